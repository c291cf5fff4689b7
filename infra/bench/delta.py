"""Between versions: the bytes that the server sends for a second revision if the node has the first.

    python infra/bench/delta.py [--quick] [--rounds N]

The second revision differs in one layer. The server counts the bytes that it sends, once at loopback speed and once at a
rate like that of object storage. The count exceeds the requested bytes: when another connection takes over the second half
of a request, the server has already put more of that half into its socket's buffer. Each time is reported beside a fetch of
the whole snapshot in the same round.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import checkpoint
from memory_folder import memory_folder, mounted
from percentiles import median
from pilotflame.snapshot.caching.cache import Cache
from pilotflame.snapshot.caching.tier import Tier
from pilotflame.snapshot.fetching.ranges import Chunks
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.format.manifest import Manifest
from pilotflame.snapshot.format.verify import verify
from pilotflame.snapshot.sources.locate import open_source
from pilotflame.snapshot.sources.realm import realm_of
from report import Report

TESTS = Path(__file__).resolve().parents[2] / "tests"
HELD_BYTES_S = 200e6
LAYER = "model.layers.3."
_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Turn:
    """One fetch: the bytes that the server sent, the bytes of the requested chunks, and the duration."""

    sent_bytes: int
    fetched_bytes: int
    seconds: float


def fault_server(folder: Path, bytes_s: float | None) -> Any:
    """The server of the tests, which counts what it sends."""
    sys.path.append(str(TESTS))
    return importlib.import_module("fault_server").FaultServer(folder, total_bytes_per_s=bytes_s)


def layer_bytes(manifest: Manifest) -> int:
    """Return the bytes of the chunks that hold the layer."""
    chunks, wanted = Chunks(manifest), set[int]()
    for tensor in manifest.tensors:
        if tensor.name.startswith(LAYER):
            end = tensor.offset_bytes + tensor.size_bytes
            low, high = chunks.covering(tensor.shard, tensor.offset_bytes, end)
            wanted.update(range(low, high + 1))
    extents = [chunks.extent(chunk) for chunk in wanted]
    return sum(extent.end - extent.begin for extent in extents)


def revise(data: checkpoint.Checkpoint, folder: Path) -> Manifest:
    """Write a second revision into `folder`, with another layer."""
    folder.mkdir()
    shutil.copyfile(data.path, folder / checkpoint.SAFETENSORS)
    with (folder / checkpoint.SAFETENSORS).open("r+b") as new:
        for name, begin, end in data.ranges():
            if name.startswith(LAYER):
                new.seek(begin)
                new.write(os.urandom(end - begin))
    return create(folder)


@contextmanager
def revisions(data: checkpoint.Checkpoint) -> Iterator[tuple[Path, dict[str, Manifest]]]:
    """The folder of a server with two revisions, and their manifests."""
    with tempfile.TemporaryDirectory(prefix="pilotflame-bench-", dir=checkpoint.DATA) as name:
        folder = Path(name)
        (folder / "first").symlink_to(data.folder)
        yield (
            folder,
            {
                "first": Manifest.read(data.folder / checkpoint.MANIFEST),
                "second": revise(data, folder / "second"),
            },
        )


class Node:
    """A node's cache in memory, which fetches from a server."""

    def __init__(self, folder: Path, server: Any, budget_bytes: int) -> None:
        self._tier = Tier(folder, budget_bytes, "tmpfs")
        self._server = server
        self._last = ""

    def fetch(self, name: str, manifest: Manifest, *, whole: bool = False) -> Turn:
        """Fetch a revision, and check every byte of it."""
        url, before = f"{self._server.url}/{name}", len(self._server.requests)
        realm = "" if whole else realm_of(self._server.url)
        manifest = manifest.with_realm(realm)
        self._last = manifest.digest
        started_s = time.monotonic()
        with Cache([self._tier]).open(manifest, open_source(url)) as lease:
            lease.wait(_TIMEOUT_S)
            seconds = time.monotonic() - started_s
            verify(lease.root, manifest)
            assert lease.stats is not None
            fetched_bytes = lease.stats.fetched_bytes
        sent_bytes = sum(request.sent for request in self._server.requests[before:])
        return Turn(sent_bytes, fetched_bytes, seconds)

    def clear(self) -> None:
        """Evict what was fetched last."""
        self._tier.evict(self._last)


def measure(report: Report, data: checkpoint.Checkpoint, rounds: int) -> None:
    """Enter the figures of a server that is held to a rate, and of one that is not."""
    with revisions(data) as (served, manifests):
        _enter(report, "", play(served, manifests, 2, HELD_BYTES_S), manifests["second"])
        _enter(report, "_unheld", play(served, manifests, rounds, None), manifests["second"])


def play(
    served: Path, manifests: dict[str, Manifest], rounds: int, bytes_s: float | None
) -> dict[str, list[Turn]]:
    """Fetch revisions beside the first one, which stays. One turn fetches the whole: as if of another realm."""
    turns: dict[str, list[Turn]] = {"whole": [], "second": []}
    with (
        fault_server(served, bytes_s) as server,
        tempfile.TemporaryDirectory(prefix="pilotflame-bench-", dir=memory_folder()) as folder,
    ):
        node = Node(Path(folder), server, 4 * manifests["first"].total_bytes)
        node.fetch("first", manifests["first"])
        # The first round touches memory for the later rounds, and is not counted.
        for number in range(rounds + 1):
            for name, done in turns.items():
                whole = name == "whole"
                turn = node.fetch(
                    "second" if whole else name, manifests["second" if whole else name], whole=whole
                )
                if number:
                    done.append(turn)
                node.clear()
    return turns


def _enter(report: Report, how: str, turns: dict[str, list[Turn]], second: Manifest) -> None:
    wanted_bytes = layer_bytes(second)
    sent_bytes = median([turn.sent_bytes for turn in turns["second"]])
    fetched_bytes = max(turn.fetched_bytes for turn in turns["second"])
    report.add(f"delta_extra_share{how}", sent_bytes / wanted_bytes - 1, "", "<= 0.05")
    report.add(f"delta_extra_share_asked{how}", fetched_bytes / wanted_bytes - 1, "", "<= 0")
    pairs = zip(turns["second"], turns["whole"], strict=True)
    shares = [turn.seconds / whole.seconds for turn, whole in pairs]
    report.add(f"delta_time_share{how}", median(shares), "of a whole fetch")
    report.add(f"delta_sent_mb{how}", sent_bytes / 1e6, "MB")
    report.add(f"delta_whole_sent_mb{how}", median([turn.sent_bytes for turn in turns["whole"]]) / 1e6, "MB")


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure what a second revision costs.")
    parser.add_argument("--quick", action="store_true", help="100 MB in place of 1.1 GB")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    report = Report("bench-delta")
    with mounted():
        measure(
            report,
            checkpoint.checkpoint(checkpoint.QUICK if arguments.quick else checkpoint.FULL),
            arguments.rounds,
        )
    return 0 if report.finish() else 1


if __name__ == "__main__":
    sys.exit(main())
