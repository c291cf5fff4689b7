"""The request log of one function, which collects calls and writes them to a store in batches.

The event loop only appends to a list of limited size. Everything else runs in threads, so a store that does not answer
slows no call. The log drops and counts the calls for which there is no room.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from typing import NamedTuple

from ....errors import PilotflameError
from ....snapshot.extras import require
from ....snapshot.sources.source import Source, Writable
from ...ground.access.fair_share import SharedRoom
from ...ground.settings.request_log import RequestLog
from ...ground.telemetry.invocation_end import InvocationEnd
from ...ground.telemetry.metrics import Reading
from ...jobs.events.blocking_calls import call_in_thread
from .record_file import FILES
from .records import LoggedCall, Redactor, record_of
from .statistics import FunctionStatistics

BATCH_S = 10.0
BATCH_BYTES = 4 << 20
"""A batch is written when its first call has waited for BATCH_S, or when its calls have BATCH_BYTES."""
WRITE_S, LAST_WRITE_S = 60.0, 4.0
"""The limit of one write, and the limit after `close`, which also applies to a write that is under way. The second limit
is short, because a gateway that ends waits only 10 s for its tasks.
"""
FIRST_RETRY_S, LAST_RETRY_S = 1.0, 60.0
"""The delay before a failed write is repeated. It doubles with each failure."""


class LogStore(NamedTuple):
    """Opens the store of a function, and writes failures to the function's log."""

    deployed_by: str
    """The id of the API key with whose rights the store is opened."""
    open: Callable[[], Source]
    """Opens the store. It blocks, and raises SourceError if the store cannot be opened."""
    say: Callable[[str], None]


class FunctionLog:
    """The log of one function. `note` is called on the event loop, and `run` runs until `close`."""

    def __init__(self, function: str, settings: RequestLog, room: SharedRoom, store: LogStore) -> None:
        """All functions share `room`. Raise PackageMissing if the settings need a package that is not installed."""
        require(settings.packages)
        self.settings = settings
        self.store = store
        self._function, self._room = function, room
        self._redactor, self._statistics = Redactor(settings.redact), FunctionStatistics(settings.statistics)
        self._calls: list[LoggedCall] = []
        self._size = 0
        self._arrived, self._full, self._closed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._write_limit: asyncio.Timeout | None = None
        self._counts = Counter[str]()

    def note(self, end: InvocationEnd) -> None:
        """Take a call that has ended, if it is sampled and there is room."""
        if random.random() >= self.settings.sample:  # noqa: S311  a sample, not a secret
            return
        call = LoggedCall.of(end)
        if self._closed.is_set() or not self._room.takes(self._function, call.size):
            self._counts["dropped"] += 1
            return
        self._room.add(self._function, call.size)
        self._calls.append(call)
        self._size += call.size
        self._arrived.set()
        if self._size >= BATCH_BYTES:
            self._full.set()

    def close(self) -> None:
        """Let `run` end, after it has tried once to write the calls that the log has."""
        self._closed.set()
        self._arrived.set()
        self._full.set()
        if (limit := self._write_limit) is not None and not limit.expired():
            limit.reschedule(asyncio.get_running_loop().time() + LAST_WRITE_S)

    async def run(self) -> None:
        """Write batches until the log is closed."""
        while True:
            await self._arrived.wait()
            await _within(BATCH_S, self._full)
            calls, self._calls, size, self._size = self._calls, [], self._size, 0
            if not self._closed.is_set():
                self._arrived.clear()
                self._full.clear()
            elif not calls:
                return
            try:
                await self._write(calls)
            finally:
                self._room.remove(self._function, size)

    def readings(self) -> list[Reading]:
        """Return the metrics of the log."""
        texts = {
            "written": "Calls that were written to the store of the request log.",
            "dropped": "Calls that were not written, because the store failed or was too slow.",
            "failures": "Failed writes to the store of the request log.",
        }
        return [
            *(Reading(f"request_log_{name}", text, {(self._function,): self._counts[name]}, total=True) for name, text in texts.items()),
            *self._statistics.readings(self._function),
        ]  # fmt: skip

    async def _write(self, calls: list[LoggedCall]) -> None:
        content = await asyncio.to_thread(self._content, calls)
        if self.settings.store is None:
            return
        if await self._delivered(content):
            self._counts["written"] += len(calls)
        else:
            self._counts["dropped"] += len(calls)

    def _content(self, calls: list[LoggedCall]) -> bytes:
        """Return the file with these calls, and add their numbers to the statistics. Blocks for milliseconds."""
        file = FILES[self.settings.format]()
        for call in calls:
            record = record_of(call, self._redactor)
            self._statistics.add(record)
            if self.settings.store is not None:
                file.add(record)
        return file.content()

    async def _delivered(self, content: bytes) -> bool:
        """Write an object with this content, and return True. Repeat failed writes until the log is closed."""
        at = datetime.now(UTC)
        name = f"{self._function}/{at:%Y-%m-%d}/{at:%H%M%S-%f}-{secrets.token_hex(4)}.{self.settings.format}"
        delay_s = FIRST_RETRY_S
        while True:
            try:
                await self._put(name, content)
            except (PilotflameError, TimeoutError) as error:
                self._counts["failures"] += 1
                why = error.message if isinstance(error, PilotflameError) else "A write took too long."
                self.store.say(f"request_log.store: {why}")
            else:
                return True
            if self._closed.is_set():
                return False
            await _within(delay_s, self._closed)
            delay_s = min(LAST_RETRY_S, 2 * delay_s)

    async def _put(self, name: str, content: bytes) -> None:
        """Write an object. Raise TimeoutError after the time for a write, and the errors of the store."""

        def put() -> None:
            store = self.store.open()
            if isinstance(store, Writable):
                store.put(name, content)

        async with asyncio.timeout(LAST_WRITE_S if self._closed.is_set() else WRITE_S) as limit:
            self._write_limit = limit
            try:
                await call_in_thread(put)
            finally:
                self._write_limit = None


async def _within(seconds: float, event: asyncio.Event) -> None:
    """Wait for an event, at most for `seconds`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
