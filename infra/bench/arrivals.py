"""While weights arrive: when the first tensor is usable, and how much earlier the first answer comes.

python infra/bench/arrivals.py [--quick] [--rounds N]
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from pathlib import Path
from typing import Any

import checkpoint
import ours
from lane import Lane
from memory_folder import memory_folder
from nginx import Nginx, start_nginx
from percentiles import median
from pilotflame.snapshot.fetching.arrival import Arrival
from pilotflame.snapshot.fetching.fetch import fetch
from pilotflame.snapshot.format.manifest import Manifest
from pilotflame.snapshot.sources.source import Connection, ObjectInfo, Source
from report import Report

LIMIT_BYTES_S = 200e6
TOKENS = 512
_SMALL = "model.layers.0.input_layernorm.weight"
_LARGE = "model.embed_tokens.weight"


class Meter:
    """Counts what arrives, and holds it to a rate if there is one: a bucket that all connections draw from."""

    def __init__(self, bytes_s: float | None = None) -> None:
        self.received_bytes = 0
        self._bytes_s = bytes_s
        self._free_s = 0.0
        self._lock = threading.Lock()

    def take(self, count: int) -> None:
        with self._lock:
            self.received_bytes += count
            if self._bytes_s is None:
                return
            now_s = time.monotonic()
            self._free_s = max(self._free_s, now_s) + count / self._bytes_s
            wait_s = self._free_s - now_s
        time.sleep(wait_s)


class MeteredConnection:
    """A connection whose bytes are metered."""

    def __init__(self, inner: Connection, meter: Meter) -> None:
        self._inner, self._meter = inner, meter

    @property
    def used(self) -> bool:
        return self._inner.used

    def begin(self, name: str, begin: int, end: int, version: str = "") -> Any:
        return self._inner.begin(name, begin, end, version)

    def read_into(self, view: memoryview) -> int:
        count = self._inner.read_into(view[: 256 << 10])
        self._meter.take(count)
        return count

    def close(self) -> None:
        self._inner.close()

    def release(self) -> None:
        self._inner.release()


class MeteredSource:
    """A source whose connections are metered."""

    def __init__(self, inner: Source, meter: Meter) -> None:
        self._inner, self._meter = inner, meter

    @property
    def url(self) -> str:
        return self._inner.url

    def stat(self, name: str) -> ObjectInfo:
        return self._inner.stat(name)

    def read_into(self, name: str, offset: int, view: memoryview) -> int:
        return self._inner.read_into(name, offset, view)

    def connect(self) -> MeteredConnection:
        return MeteredConnection(self._inner.connect(), self._meter)


class FirstTensor:
    """A lane's contestant: how many bytes had come when the tensor first in order was usable."""

    def __init__(self, url: str, folder: str) -> None:
        self._url, self._manifest = url, Manifest.read(Path(folder))

    def run(self, first: str) -> dict[str, Any]:
        rest = [name for name in self._manifest.first_touch if name != first]
        manifest = self._manifest.build(**{**dict(self._manifest), "first_touch": (first, *rest)})
        meter, arrival = Meter(), Arrival(manifest)
        files = ours.Files(manifest, memory_folder())
        entry = next(tensor for tensor in manifest.tensors if tensor.name == first)
        low, high = arrival.chunks.covering(
            entry.shard, entry.offset_bytes, entry.offset_bytes + entry.size_bytes
        )
        seen: list[tuple[int, int]] = []
        landed: list[int] = []

        def on_land(chunk: int) -> None:
            landed.append(chunk)
            if not seen and all(arrival.landed(wanted) for wanted in range(low, high + 1)):
                seen.append((meter.received_bytes, len(landed)))

        arrival.on_land(on_land)
        fetch(manifest, MeteredSource(ours.source_of(self._url), meter), files.targets, arrival)
        files.close()
        return {
            "received_share": seen[0][0] / manifest.total_bytes,
            "landed_share": min(1.0, seen[0][1] * manifest.chunk_bytes / manifest.total_bytes),
            "own_share": (high - low + 1) * manifest.chunk_bytes / manifest.total_bytes,
        }

    def check(self) -> None:
        """The engine verifies."""

    def clear(self) -> None:
        """Nothing is kept."""


class FirstAnswer:
    """A lane's contestant: from nothing to the first answer of a toy transformer, from a source held to 200 MB/s."""

    def __init__(self, url: str, folder: str) -> None:
        import torch  # noqa: PLC0415
        from llama import skeleton  # noqa: PLC0415
        from pilotflame.snapshot.restoring.plan import make_plan  # noqa: PLC0415

        self._url, self._manifest = url, Manifest.read(Path(folder))
        self._model = skeleton(checkpoint.TOY)
        self._plan = make_plan(self._model, self._manifest)
        self._tokens = torch.randint(
            0, checkpoint.TOY.vocabulary, (1, TOKENS), generator=torch.Generator().manual_seed(1)
        )
        self._torch = torch

    def run(self, overlapped: bool) -> dict[str, Any]:
        from pilotflame.snapshot.restoring.gate import Gate, Unlanded  # noqa: PLC0415
        from pilotflame.snapshot.restoring.mapping import Mapping  # noqa: PLC0415
        from pilotflame.snapshot.restoring.plan import restore  # noqa: PLC0415

        started_s = time.perf_counter()
        files = ours.Files(self._manifest, memory_folder())
        arrival, source = (
            Arrival(self._manifest),
            MeteredSource(ours.source_of(self._url), Meter(LIMIT_BYTES_S)),
        )
        fetching = threading.Thread(target=fetch, args=(self._manifest, source, files.targets, arrival))
        fetching.start()
        mapping = Mapping(files.folder, self._manifest)
        restore(self._plan, mapping)
        if not overlapped:
            fetching.join()
        loaded_s = time.perf_counter() - started_s
        with self._torch.inference_mode():
            if overlapped:
                with Gate(Unlanded(mapping, arrival)):
                    answer = self._model(self._tokens)
            else:
                answer = self._model(self._tokens)
        seconds = time.perf_counter() - started_s
        fetching.join()
        files.close()
        bits = answer.view(self._torch.int16)
        return {
            "seconds": seconds,
            "loaded_s": loaded_s,
            "answer": [int(bits.sum()), bits.flatten()[:64].tolist()],
        }

    def check(self) -> None:
        """Nothing to check here: the caller of the lane compares the two answers."""

    def clear(self) -> None:
        """The next turn restores anew."""


def first_tensor(report: Report, server: Nginx, data: checkpoint.Checkpoint, rounds: int) -> None:
    """Enters first_tensor_share."""
    url = f"{server.url}/{checkpoint.BUCKET}/{data.shape.name}"
    told: dict[str, list[dict[str, Any]]] = {_SMALL: [], _LARGE: []}
    with Lane("first tensor", "arrivals:FirstTensor", url=url, folder=str(data.folder)) as lane:
        lane.wait_ready()
        for _ in range(rounds):
            for first, found in told.items():
                found.append(lane.turn(first=first))

    def share(first: str, of: str) -> float:
        return median([found[of] for found in told[first]])

    report.add("first_tensor_share", share(_SMALL, "received_share"), "", "<= 0.02")
    report.add("first_tensor_landed_share", share(_SMALL, "landed_share"))
    report.add("embedding_share", share(_LARGE, "received_share"))
    report.add("embedding_own_share", share(_LARGE, "own_share"))
    report.note(
        "first_tensor_share: of all bytes, those received when the first tensor in order of first touch (a norm: what"
        " fits a chunk) was usable; embedding_share: the same with the embedding first, which alone is embedding_own_share"
    )


def overlap(report: Report, server: Nginx, rounds: int) -> None:
    """Enters overlap_gain."""
    toy = checkpoint.snapshot(checkpoint.TOY, checkpoint.DATA / checkpoint.BUCKET)
    url = f"{server.url}/{checkpoint.BUCKET}/{toy.shape.name}"
    turns: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    with Lane("first answer", "arrivals:FirstAnswer", url=url, folder=str(toy.folder)) as lane:
        lane.wait_ready()
        lane.turn(overlapped=False)  # the first forward pass of a process pays for threads and code
        for number in range(rounds):
            for overlapped in (False, True) if number % 2 == 0 else (True, False):
                turns[overlapped].append(lane.turn(overlapped=overlapped))
    answers = {str(told["answer"]) for found in turns.values() for told in found}
    if len(answers) != 1:
        raise RuntimeError("executing while loading gave another answer than loading first")
    plain_s, loaded_s = (median([told[of] for told in turns[False]]) for of in ("seconds", "loaded_s"))
    pairs = zip(turns[True], turns[False], strict=True)
    report.add(
        "overlap_gain", median([1 - one["seconds"] / two["seconds"] for one, two in pairs]), "", ">= 0.25"
    )
    report.add("overlap_gain_bound", min(loaded_s, plain_s - loaded_s) / plain_s)
    report.add("load_then_run_s", plain_s, "s")
    report.add("load_alone_s", loaded_s, "s")
    report.note(
        f"overlap_gain: 24 layers, {toy.size_bytes / 1e6:.0f} MB at 200 MB/s, {TOKENS} tokens, output bit-identical;"
        " the bound is what perfect overlap of this load and this forward pass would gain"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="First tensor, first answer.")
    parser.add_argument("--quick", action="store_true", help="100 MB and 2 rounds")
    parser.add_argument("--rounds", type=int)
    arguments = parser.parse_args()
    rounds = arguments.rounds or (2 if arguments.quick else 5)
    data = checkpoint.checkpoint(checkpoint.QUICK if arguments.quick else checkpoint.FULL)
    report = Report("bench-snapshot-arrivals", packages=("torch",))
    with start_nginx(checkpoint.DATA) as server:
        first_tensor(report, server, data, rounds)
        overlap(report, server, rounds)
    return 0 if report.finish() else 1


if __name__ == "__main__":
    sys.exit(main())
