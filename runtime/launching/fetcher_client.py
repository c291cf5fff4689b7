"""Weights from elsewhere, as the gateway sees them: what is held on this node, and how the fetch of it goes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import sys
import time
from pathlib import Path
from typing import Any

import orjson

from ...errors import LauncherError, PilotflameError
from ..link.worker_spec import WorkerSpec
from ..telemetry.timeline import Fetch

HOLD_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 10.0
MAX_LINE_BYTES = 1 << 20


class FetchProgress:
    """One snapshot held for one activation or more."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.fetch = Fetch(time.monotonic())
        self.error: PilotflameError | None = None
        self.held: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def fail(self, error: PilotflameError) -> None:
        self.error = error
        self.fetch.ended_s = self.fetch.ended_s or time.monotonic()
        if not self.held.done():
            self.held.set_exception(error)
            self.held.exception()  # seen: nobody has to wait for it


class FetcherClient:
    """Holds snapshots by way of the node's fetcher, which is started when the first is wanted and then stays."""

    def __init__(self, cache: Path, tasks: asyncio.TaskGroup) -> None:
        self.cache = cache
        self._tasks = tasks
        self._numbers = itertools.count(1)
        self._fetchings: dict[int, FetchProgress] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._orders: asyncio.StreamWriter | None = None
        self._reader: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._closed = False

    async def warm(self) -> None:
        """Has the fetcher there before it is needed."""
        with contextlib.suppress(LauncherError):  # met again when it is needed
            await self._fetcher()

    async def hold(self, spec: WorkerSpec) -> FetchProgress:
        """A snapshot whose files can be mapped. Raises SourceError, CacheError, SnapshotError or LauncherError."""
        await self._fetcher()
        fetching = FetchProgress(next(self._numbers))
        self._fetchings[fetching.number] = fetching
        self._order(op="hold", id=fetching.number, manifest=str(spec.manifest), url=spec.source)
        try:
            async with asyncio.timeout(HOLD_TIMEOUT_S):
                await fetching.held
        except TimeoutError:
            self.release(fetching)
            raise LauncherError(
                f"The fetcher gave no answer within {HOLD_TIMEOUT_S:.0f} s.",
                remedy="Look whether the disk of the cache answers.",
            ) from None
        except BaseException:
            self.release(fetching)
            raise
        return fetching

    def release(self, fetching: FetchProgress) -> None:
        """Nobody maps it any more: it may be evicted, and what is still coming need not."""
        if self._fetchings.pop(fetching.number, None) is not None:
            self._order(op="release", id=fetching.number)

    async def close(self) -> None:
        """Ends the fetcher."""
        self._closed = True
        process = self._process
        if process is None or self._orders is None:
            return
        self._orders.close()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        if self._reader is not None:
            await self._reader
        with contextlib.suppress(OSError):
            await self._orders.wait_closed()

    async def _fetcher(self) -> asyncio.subprocess.Process:
        async with self._starting:
            if self._closed:
                raise LauncherError("The gateway is shutting down.")
            if self._process is None or self._process.returncode is not None:
                self._process = await self._start()
            return self._process

    async def _start(self) -> asyncio.subprocess.Process:
        # One socket for both ways, and no pipes of asyncio's: those close when they like, this when it is told.
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "pilotflame.runtime.launching.fetcher", str(self.cache),
                stdin=theirs.fileno(), stdout=theirs.fileno(), cwd="/",
            )  # fmt: skip
        except OSError as error:
            ours.close()
            raise LauncherError(f"The fetcher cannot be started: {error.strerror}.") from error
        finally:
            theirs.close()
        ours.setblocking(False)
        words, self._orders = await asyncio.open_unix_connection(sock=ours, limit=MAX_LINE_BYTES)
        self._fetchings = {}
        self._reader = self._tasks.create_task(self._read(process, words, self._orders))
        return process

    def _order(self, **order: Any) -> None:
        if self._orders is not None and not self._orders.is_closing():
            self._orders.write(orjson.dumps(order) + b"\n")

    async def _read(
        self, process: asyncio.subprocess.Process, words: asyncio.StreamReader, orders: asyncio.StreamWriter
    ) -> None:
        fetchings = self._fetchings  # of this process: the next one has others
        with contextlib.suppress(OSError):  # reset by a fetcher that died with orders unread
            while line := await words.readline():
                try:
                    self._on_word(orjson.loads(line))
                except (ValueError, KeyError, TypeError):  # not its own words: some library's
                    sys.stderr.write(f"fetcher: {line.decode(errors='replace')}")
        orders.close()
        await process.wait()
        error = LauncherError(
            f"The fetcher ended (exit code {process.returncode}).",
            remedy="Its own words are on the gateway's standard error.",
        )
        for fetching in fetchings.values():
            fetching.fail(error)
        fetchings.clear()

    def _on_word(self, word: dict[str, Any]) -> None:
        fetching = self._fetchings.get(word["id"])
        if fetching is None:
            return
        if word["event"] == "failed":
            fetching.fail(PilotflameError.from_wire(word["error"]))
            return
        if word["event"] == "done":
            fetching.fetch.ended_s, fetching.fetch.fetched_bytes = time.monotonic(), int(word["bytes"])
        if not fetching.held.done():
            fetching.held.set_result(None)
