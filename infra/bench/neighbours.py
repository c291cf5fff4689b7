"""Between nodes: three nodes fetch the same snapshot at once, from a bucket with a limited total rate.

    python infra/bench/neighbours.py [--quick] [--rounds N]

Each node is a process with a cache in memory and a port on loopback. The nodes fetch in turns with their peers and without.
The bucket counts the bytes that it sends. The third condition is a bucket as fast as loopback, where three fetches and twice
the copying between nodes share two cores: the cost of peers where the bucket is no limit. A node that comes once another
has the whole snapshot is measured beside both.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import checkpoint
from delta import fault_server
from lane import Lane
from memory_folder import memory_folder, mounted
from percentiles import median
from pilotflame.snapshot.caching.cache import Cache
from pilotflame.snapshot.caching.tier import Tier
from pilotflame.snapshot.format.manifest import Manifest
from pilotflame.snapshot.format.verify import verify
from pilotflame.snapshot.peering.chunk_server import ChunkServer, listening
from pilotflame.snapshot.peering.peer import PeerList
from pilotflame.snapshot.peering.peers import Peers
from pilotflame.snapshot.peering.served_chunks import ServedChunks
from pilotflame.snapshot.sources.http import HttpSource
from pilotflame.snapshot.sources.realm import realm_of
from report import Report

NODES = 3
HELD_BYTES_S = 200e6
_TOKEN = "the token of the cluster"
_TIMEOUT_S = 250.0


class Node:
    """A contestant (see lane.py). It keeps its chunks for its peers until the turn `clear`."""

    def __init__(self, url: str, manifest: str, folder: str) -> None:
        self._source, self._manifest = (
            HttpSource(url),
            Manifest.read(Path(manifest)).with_realm(realm_of(url)),
        )
        self._tier = Tier(Path(folder), 4 * self._manifest.total_bytes, "tmpfs", self._manifest.total_bytes)
        self._served_chunks, self._sock = ServedChunks([self._tier]), listening("127.0.0.1", 0)
        ChunkServer(self._sock, self._served_chunks, _TOKEN).start()
        self._peers: Peers | None = None

    def run(self, what: str, urls: Sequence[str] = ()) -> dict[str, Any] | None:
        """Tell the port, or meet others, or fetch, or let go."""
        if what == "port":
            return {"port": self._sock.getsockname()[1]}
        if what == "meet":
            self._peers = Peers(self._served_chunks, PeerList(urls), _TOKEN)
        if what == "clear":
            self._tier.evict(self._manifest.digest)
        if what in {"fetch", "fetch alone"}:
            self._source.forget()
            with Cache([self._tier], self._peers if what == "fetch" else None).open(
                self._manifest, self._source
            ) as lease:
                lease.wait(_TIMEOUT_S)
                assert lease.stats is not None
                return {"fetched": lease.stats.fetched_bytes, "taken": lease.stats.taken_bytes}
        return None

    def check(self) -> None:
        verify(self._tier.folder(self._manifest.digest) / "files", self._manifest)

    def clear(self) -> None:
        """Keep all: see `run`."""


@contextmanager
def cluster(url: str, data: checkpoint.Checkpoint) -> Iterator[list[Lane]]:
    """Nodes that know each other."""
    with ExitStack() as stack:
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="pilotflame-bench-", dir=memory_folder())
        )
        given: dict[str, Any] = {"url": url, "manifest": str(data.folder / checkpoint.MANIFEST)}
        lanes = [
            stack.enter_context(Lane(f"node {index}", "neighbours:Node", folder=f"{folder}/{index}", **given))
            for index in range(NODES)
        ]
        for lane in lanes:
            lane.wait_ready()
        urls = [f"http://127.0.0.1:{lane.turn(what='port')['port']}" for lane in lanes]
        for lane in lanes:
            lane.turn(what="meet", urls=urls)
        yield lanes


def at_once(lanes: Sequence[Lane], what: str) -> float:
    """Let all do it at once. Return the seconds until the last has ended, and check what they have."""
    with ThreadPoolExecutor(len(lanes)) as pool:
        told = list(pool.map(lambda lane: lane.turn(what=what, check=True), lanes))
    return max(float(each["seconds"]) for each in told)


def play(data: checkpoint.Checkpoint, rounds: int, bytes_s: float | None) -> dict[str, list[float]]:
    """Return for each round the seconds, and the share of the snapshot's bytes that the bucket sent."""
    found: dict[str, list[float]] = {name: [] for name in ("peers", "alone", "late", "share", "alone share")}
    with fault_server(data.folder, bytes_s) as bucket, cluster(bucket.url, data) as lanes:
        size_bytes = Manifest.read(data.folder / checkpoint.MANIFEST).total_bytes

        def turn(what: str) -> tuple[float, float]:
            before = len(bucket.requests)
            seconds = at_once(lanes, what)
            sent_bytes = sum(request.sent for request in bucket.requests[before:])
            return seconds, sent_bytes / size_bytes

        # The first round touches the memory, which the others use again, and counts nothing.
        for number in range(rounds + 1):
            told = {}
            for what in ("fetch", "fetch alone") if number % 2 else ("fetch alone", "fetch"):
                told[what] = turn(what)
                late_s = _late(lanes) if what == "fetch" else 0.0
                for lane in lanes:
                    lane.turn(what="clear")
                if what == "fetch" and number:
                    found["late"].append(late_s)
            if number:
                for name, share, what in (
                    ("peers", "share", "fetch"),
                    ("alone", "alone share", "fetch alone"),
                ):
                    found[name].append(told[what][0])
                    found[share].append(told[what][1])
            print(f"  {told}", flush=True)
    return found


def _late(lanes: Sequence[Lane]) -> float:
    """The last node lets go, and fetches again: the others have the whole."""
    lanes[-1].turn(what="clear")
    told = lanes[-1].turn(what="fetch", check=True)
    if told["fetched"]:
        raise RuntimeError(f"a late node asked the bucket for {told['fetched']} bytes")
    return float(told["seconds"])


def measure(report: Report, data: checkpoint.Checkpoint, rounds: int) -> None:
    """Enters peer_bucket_share and peer_time_share, and the same where the bucket is as fast as loopback."""
    size_bytes = Manifest.read(data.folder / checkpoint.MANIFEST).total_bytes
    for how, bytes_s in (("", HELD_BYTES_S), ("_unheld", None)):
        found = play(data, rounds, bytes_s)
        report.row(group="peers", bytes_s=bytes_s, **found)
        report.add(f"peer_bucket_share{how}", median(found["share"]), "x", "" if how else "<= 1.1")
        report.add(f"alone_bucket_share{how}", median(found["alone share"]), "x")
        shares = [one / other for one, other in zip(found["peers"], found["alone"], strict=True)]
        report.add(f"peer_time_share{how}", median(shares), "of three alone", "" if how else "<= 0.5")
        report.add(f"peer_ready{how}_s", median(found["peers"]), "s")
        report.add(f"alone_ready{how}_s", median(found["alone"]), "s")
        report.add(f"late_ready{how}_s", median(found["late"]), "s")
        if bytes_s is not None:
            report.add(
                "peer_time_over_floor", median(found["peers"]) * bytes_s / size_bytes, "of one at the rate"
            )


def main() -> int:
    parser = argparse.ArgumentParser(
        description="What nodes that take chunks from each other spare the bucket."
    )
    parser.add_argument("--quick", action="store_true", help="100 MB in place of 1.1 GB")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    report = Report("bench-snapshot-peers")
    with mounted():
        shape = checkpoint.QUICK if arguments.quick else checkpoint.FULL
        measure(report, checkpoint.checkpoint(shape), arguments.rounds)
    return 0 if report.finish() else 1


if __name__ == "__main__":
    sys.exit(main())
