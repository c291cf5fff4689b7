"""Stores the decisions about each function, its load over time, and the arrival times of its calls.

    <state dir>/records/<name>/decisions.jsonl    one decision per line
    <state dir>/records/<name>/load.jsonl         one row for each second in which the load changed
    <state dir>/records/<name>/arrivals.f64       Unix times, as float64 in this machine's byte order

The recorder writes rows every few seconds, and before it reads. A crash loses rows that were not written yet. The
records of a deleted function are removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import orjson

from ...ground.telemetry.decisions import DecisionRecord
from ...ground.telemetry.load_history import LoadSample
from ..functions.live import Live
from ..reconciling.function import Function

LOG = logging.getLogger(__name__)
T = TypeVar("T")
WRITE_EVERY_S = 10.0
# Size limits of a function's files on disk: about 5,000 decisions, 10,000 rows of load and a million arrivals.
DECISIONS_BYTES, LOAD_BYTES, ARRIVALS_BYTES = 1 << 20, 1 << 20, 8 << 20


class BoundedFile:
    """A file to which rows are appended. Before it exceeds half of `max_bytes`, it replaces the older file, and a new
    file begins.

    Both files together have at most `max_bytes`. All methods block. A row has `row_bytes`, or else ends with a line
    feed. A crash can leave a partial row. The next `append` cuts off a partial row of fixed size. It ends a partial
    line with a line feed, so readers must skip lines that they cannot parse.
    """

    def __init__(self, path: Path, max_bytes: int, *, row_bytes: int = 0) -> None:
        self._path, self._row_bytes = path, row_bytes
        self._older = path.with_name(f"{path.name}.1")
        self._half_bytes = max_bytes // 2

    def append(self, rows: bytes) -> None:
        """Append whole rows. Raise OSError if they cannot be written."""
        if not rows:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self._size() + len(rows) > self._half_bytes and self._path.exists():
            self._path.replace(self._older)
        with self._path.open("a+b") as file:
            size = file.seek(0, os.SEEK_END)
            if self._row_bytes:
                file.truncate(size - size % self._row_bytes)
            elif size and os.pread(file.fileno(), 1, size - 1) != b"\n":
                file.write(b"\n")
            file.write(rows)

    def read(self) -> bytes:
        """Return the rows of both files, the oldest first."""
        return self._rows(self._older) + self._rows(self._path)

    def remove(self) -> None:
        for path in (self._path, self._older):
            path.unlink(missing_ok=True)

    def _size(self) -> int:
        with contextlib.suppress(OSError):
            return self._path.stat().st_size
        return 0

    def _rows(self, path: Path) -> bytes:
        try:
            data = path.read_bytes()
        except OSError:
            return b""
        if self._row_bytes:
            return data[: len(data) - len(data) % self._row_bytes]
        return data[: data.rfind(b"\n") + 1]


class _Rows(NamedTuple):
    """The rows to append to the files of one function."""

    decisions: list[DecisionRecord]
    load: list[LoadSample]
    arrivals: array[float]


class Recorder:
    """Takes new rows from the histories of live functions, and writes and reads their records."""

    def __init__(self, folder: Path, functions: Callable[[], Iterable[Live]]) -> None:
        """`functions` returns all live functions."""
        self._folder, self._functions = folder, functions
        # The functions whose records could not be written the last time. Each of them is reported only once.
        self._failing = set[str]()
        # The functions whose processes have started or ended since their load was last noted.
        self._changed = set[str]()
        self._writing = asyncio.Lock()

    def note_change(self, function: str) -> None:
        """Record that a process of a function has started or ended."""
        self._changed.add(function)

    async def run(self) -> None:
        """Write the new rows every few seconds. Does not return."""
        while True:
            await asyncio.sleep(WRITE_EVERY_S)
            await self.flush()

    async def flush(self, only: str | None = None) -> None:
        """Write the new rows of all functions, or of the function `only`."""
        async with self._writing:
            now_s, due = time.monotonic(), dict[str, _Rows]()
            changed = self._changed if only is None else self._changed & {only}
            self._changed = self._changed - changed
            for live in self._functions():
                name, function = live.record.function, live.function
                if only not in (None, name):
                    continue
                # Always note the load of a function with fetched weights: they enter and leave the memory although no
                # process starts or ends.
                if name in changed or live.revision.spec.remote:
                    live.workers.observed.note_load(now_s)
                if _pending(function) and any(rows := _take(function, now_s)):
                    due[name] = rows
            if due:
                await asyncio.to_thread(self._append, due)

    async def forget(self, function: str) -> None:
        """Remove the records of a deleted function."""
        async with self._writing:
            self._failing.discard(function)
            await asyncio.to_thread(shutil.rmtree, self._folder / function, ignore_errors=True)

    # -- reading

    async def decisions(self, function: str, since: float = 0.0) -> list[DecisionRecord]:
        """Return the decisions about a function since a Unix time, the oldest first."""
        return await self._read(
            function, lambda: [DecisionRecord(*row) for row in self._lines(function, "decisions", since)]
        )

    async def load(self, function: str, since: float = 0.0) -> list[LoadSample]:
        """Return the samples of a function's load since a Unix time, and the last sample before this time."""
        return await self._read(function, lambda: self._load_since(function, since))

    async def arrivals(self, function: str, since: float = 0.0) -> list[float]:
        """Return the arrival times of a function's answered invocations since a Unix time, ascending."""
        return await self._read(function, lambda: self._arrivals_since(function, since))

    async def _read(self, function: str, read: Callable[[], list[T]]) -> list[T]:
        await self.flush(function)
        async with self._writing:
            return await asyncio.to_thread(read)

    def _load_since(self, function: str, since: float) -> list[LoadSample]:
        rows = [LoadSample(*row) for row in self._lines(function, "load", 0.0)]
        first = next((number for number, row in enumerate(rows) if row.at >= since), len(rows))
        return rows[max(0, first - 1) :]

    def _arrivals_since(self, function: str, since: float) -> list[float]:
        found = array("d")
        found.frombytes(self._file(function, "arrivals").read())
        return sorted(at for at in found if at >= since)

    def _lines(self, function: str, kind: str, since: float) -> Iterator[list[Any]]:
        for line in self._file(function, kind).read().splitlines():
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError:
                continue
            if isinstance(row, list) and row and row[0] >= since:
                yield row

    # -- files

    def _append(self, due: dict[str, _Rows]) -> None:
        for function, rows in due.items():
            try:
                self._file(function, "decisions").append(_json_lines(rows.decisions))
                self._file(function, "load").append(_json_lines(rows.load))
                self._file(function, "arrivals").append(rows.arrivals.tobytes())
                self._failing.discard(function)
            except OSError as error:
                if function not in self._failing:
                    LOG.warning("the records of %s could not be written: %s", function, error)
                self._failing.add(function)

    def _file(self, function: str, kind: str) -> BoundedFile:
        folder = self._folder / function
        if kind == "arrivals":
            return BoundedFile(folder / "arrivals.f64", ARRIVALS_BYTES, row_bytes=array("d").itemsize)
        size = DECISIONS_BYTES if kind == "decisions" else LOAD_BYTES
        return BoundedFile(folder / f"{kind}.jsonl", size)


def _pending(function: Function) -> bool:
    return function.load.pending or function.decisions.pending or function.arrivals.pending


def _take(function: Function, now_s: float) -> _Rows:
    return _Rows(function.decisions.take(), function.load.take(now_s), function.arrivals.take())


def _json_lines(rows: Iterable[DecisionRecord | LoadSample]) -> bytes:
    return b"".join(orjson.dumps(list(row)) + b"\n" for row in rows)
