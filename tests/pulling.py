"""Pulling snapshots in tests: a source that stops at a given byte, processes that pull, and fetchers."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
from pilotflame.errors import PilotflameError, SourceDenied, SourceUnavailable
from pilotflame.snapshot.caching.cache import Cache, Lease
from pilotflame.snapshot.caching.tier import Tier
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.format.manifest import MANIFEST_NAME, Manifest
from pilotflame.snapshot.sources.folder import FolderConnection, FolderSource
from pilotflame.snapshot.sources.source import ObjectInfo
from safetensors.numpy import save_file

LIMIT_S = 30.0
CHUNK_BYTES = 64 << 10


def make(
    folder: Path, seed: int = 0, *, tensors: int = 8, tensor_bytes: int = 128 << 10, **how: Any
) -> Manifest:
    """Write a safetensors file of `tensors` random tensors and its manifest into `folder`. Return the
    manifest.
    """
    drawn = numpy.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {f"t{index}": drawn.integers(0, 255, tensor_bytes, numpy.uint8) for index in range(tensors)}
    save_file(arrays, folder / "model.safetensors")
    manifest = create(folder, chunk_bytes=CHUNK_BYTES, **how)
    manifest.write(folder / MANIFEST_NAME)
    return manifest


class Stopping(FolderSource):
    """Serves the bytes before `stop_at` of every shard, and the rest after `go`. Counts the served bytes."""

    def __init__(self, root: Path, stop_at: int | None = None) -> None:
        super().__init__(root)
        self.stop_at = stop_at
        self.denied = False
        self.changed = threading.Condition()
        self.given_bytes = 0

    def connect(self) -> StoppingConnection:
        return StoppingConnection(self)

    def go(self) -> None:
        with self.changed:
            self.stop_at = None
            self.changed.notify_all()

    def deny(self) -> None:
        """From now on raise SourceDenied, also in reads that wait."""
        with self.changed:
            self.denied = True
            self.changed.notify_all()


class StoppingConnection(FolderConnection):
    def __init__(self, source: Stopping) -> None:
        super().__init__(source)
        self._stopping = source
        self._given_up = False

    def begin(self, name: str, begin: int, end: int, version: str = "") -> ObjectInfo:
        self._given_up = False
        return super().begin(name, begin, end, version)

    def read_into(self, view: memoryview) -> int:
        if not self._name.endswith(".safetensors"):
            return super().read_into(view)
        with self._stopping.changed:
            while self._stopping.stop_at is not None and self._at >= self._stopping.stop_at:
                if self._stopping.denied:
                    raise SourceDenied("Not for you.", remedy="Ask.")
                if self._given_up or not self._stopping.changed.wait(LIMIT_S):
                    raise SourceUnavailable("Given up.")
            if self._stopping.stop_at is not None:
                view = view[: self._stopping.stop_at - self._at]
        count = super().read_into(view)
        with self._stopping.changed:
            self._stopping.given_bytes += count
        return count

    def close(self) -> None:
        with self._stopping.changed:
            self._given_up = True
            self._stopping.changed.notify_all()
        super().close()


def check(root: Path, source: Path) -> None:
    """Assert that `root` has every safetensors file of `source`, byte for byte."""
    for file in source.glob("*.safetensors"):
        assert (root / file.name).read_bytes() == file.read_bytes(), file.name


class Puller:
    """A process that opens a snapshot and then runs commands, one per line of standard input."""

    def __init__(self, tiers: Sequence[Tier], source: Path, **how: Any) -> None:
        spec = {
            "tiers": [[str(tier.root), tier.budget_bytes, tier.kind] for tier in tiers],
            "source": str(source),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", __file__, json.dumps({**spec, **how})],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ,
        )  # fmt: skip

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the process ended"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def ask(self, word: str) -> dict[str, Any]:
        self.tell(word)
        return self.hear()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(LIMIT_S)

    def end(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        self.process.kill()
        self.process.wait(LIMIT_S)


@contextmanager
def pulling(tiers: Sequence[Tier], source: Path, **how: Any) -> Iterator[Puller]:
    """Yield a Puller that is ended afterwards. Before it takes commands, it writes `{"opened": root}` or its
    error.
    """
    puller = Puller(tiers, source, **how)
    try:
        yield puller
    finally:
        puller.end()


class Fetching:
    """A fetcher process and its two streams."""

    def __init__(self, cache: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pilotflame.runtime.node.launching.fetcher", str(cache), "{}"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def tell(self, **request: Any) -> None:
        """Send a request. The time limit of a hold is a minute, unless the request has another one."""
        if request["op"] == "hold":
            request = {"timeout_s": 60.0, **request}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def hear(self, number: int, event: str) -> dict[str, Any]:
        """Read events until the event `event` of hold `number` arrives, and return it."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            heard: dict[str, Any] = json.loads(line)
            if (heard.get("id"), heard["event"]) == (number, event):
                return heard
            assert heard["event"] != "failed" or heard.get("id") != number, heard
        raise AssertionError("the fetcher ended")


@contextmanager
def fetching(cache: Path) -> Iterator[Fetching]:
    found = Fetching(cache)
    try:
        yield found
    finally:
        found.process.kill()
        found.process.wait(LIMIT_S)
        for pipe in (found.process.stdin, found.process.stdout):
            if pipe is not None:
                pipe.close()


def _say(**answer: Any) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _obey(word: str, lease: Lease, source: Stopping) -> None:
    if word == "go":
        source.go()
        _say(gone=True)
    elif word == "wait":
        lease.wait(LIMIT_S)
        _say(fetched=lease.stats.fetched_bytes if lease.stats else None, given=source.given_bytes)
    elif word.startswith("upto "):
        lease.arrival.wait(0, int(word[5:]), LIMIT_S)
        _say(landed=word)
    elif word == "map":
        from pilotflame.snapshot.restoring.mapping import Mapping

        globals()["mapping"] = Mapping(lease.root, lease.manifest, keep=lease, arrival=lease.arrival)
        _say(mapped=True)
    elif word == "read":
        mapping = globals()["mapping"]
        mapping.wait(0, 0, len(mapping.flats[0]))
        _say(read=hashlib.sha256(mapping.flats[0].numpy()).hexdigest())
    elif word == "close":
        lease.close()
        _say(closed=True)


def main() -> None:
    spec = json.loads(sys.argv[1])
    if "user" in spec:
        os.setgid(spec["user"])
        os.setuid(spec["user"])
    folder = Path(spec["source"])
    source = Stopping(folder, spec.get("stop_at"))
    try:
        cache = Cache([Tier(Path(root), budget_bytes, kind) for root, budget_bytes, kind in spec["tiers"]])
        lease = cache.open(Manifest.read(folder), source, tee=False)
    except PilotflameError as error:
        _say(error=error.code, message=str(error))
        return
    _say(opened=str(lease.root))
    for line in sys.stdin:
        try:
            _obey(line.strip(), lease, source)
        except PilotflameError as error:
            _say(error=error.code, message=str(error))


if __name__ == "__main__":
    main()
