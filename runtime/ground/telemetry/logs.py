"""Passes each new line of a log to the log's file and to followers, and keeps the last lines in memory."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from itertools import takewhile
from types import MappingProxyType
from typing import Protocol
from weakref import WeakValueDictionary

from .log_allowance import PER_S, LogAllowance
from .log_files import (
    DELETED,
    MAX_TEXT_CHARS,
    LogFacts,
    LogFiles,
    LogLine,
    LogQuery,
    function_file,
    function_of,
)

# The number of lines in memory, for the last words of a worker and the terminal of `dev`. The files also have earlier
# lines.
KEPT_LINES = 100
# The sources of lines that a function has not printed itself.
OWN_SOURCES = ("gateway", "deploy")
FOLLOWER_LINES = 1_000
# The beginnings of the lines of Python's report of a crash.
_OF_CRASHES = ("Current thread 0x", "Thread 0x", "  ", "Extension modules: ")
_NO_FACTS: Mapping[str, str | float] = MappingProxyType({})
# The smallest difference between the times of a log's lines. So a line's time identifies the line.
TICK_S = 1e-6
REPORT_S = 1.0


class Log(Protocol):
    """Writes lines to the log of a function, or of one of its revisions."""

    @property
    def channel(self) -> LogChannel:
        """The log of the function, which all its revisions share."""

    def write(self, source: str, text: str, level: str = "info", *, request_id: str = "") -> None: ...


class LogChannel:
    """The log of one function: its last `kept` lines, and a queue of new lines for each follower."""

    def __init__(
        self, function: str = "", keep: Callable[[LogLine], None] | None = None, *, kept: int = KEPT_LINES,
        on_dropped: Callable[[int], None] = lambda _lines: None,
    ) -> None:  # fmt: skip
        """The channel calls `keep` with each new line, to store it, and `on_dropped` with the number of lines that it drops."""
        self._function = function
        self._keep, self._on_dropped = keep, on_dropped
        self._lines: deque[LogLine] = deque(maxlen=kept)
        self._followers: set[asyncio.Queue[LogLine | None]] = set()
        self._listeners: list[Callable[[LogLine], None]] = []
        self._last_s = 0.0
        self.allowance = LogAllowance()
        """What the processes of the function may print now."""
        self._unreported = 0
        # True once the function was deleted.
        self.ended = False

    @property
    def channel(self) -> LogChannel:
        return self

    def note_dropped(self, lines: int) -> None:
        """Count lines that were not written. A line with their number follows within a second."""
        if not self._unreported:
            asyncio.get_running_loop().call_later(REPORT_S, self._report)
        self._unreported += lines
        self._on_dropped(lines)

    def _report(self) -> None:
        count, self._unreported = self._unreported, 0
        text = f"{count} lines were dropped: the function prints more than {PER_S:.0f} lines, or {PER_S / 1024:.0f} MiB, a second"
        self.write("gateway", text, "warning")

    def of(self, revision: str) -> RevisionLog:
        """Return the log for the lines of one revision."""
        return RevisionLog(self, revision)

    def write(
        self, source: str, text: str, level: str = "info", *, request_id: str = "", revision: str = "",
        facts: Mapping[str, str | float] = _NO_FACTS,
    ) -> None:  # fmt: skip
        """Add a line. A follower whose queue is full, because it reads too slowly, misses this line."""
        self._last_s = at_s = round(max(time.time(), self._last_s + TICK_S), 6)
        if len(text) > MAX_TEXT_CHARS:
            text = text[:MAX_TEXT_CHARS]
        line = LogLine(at_s, source, text, level, self._function, revision, request_id, facts)
        self._lines.append(line)
        if self._keep is not None:
            self._keep(line)
        for follower in self._followers:
            with contextlib.suppress(asyncio.QueueFull):
                follower.put_nowait(line)
        for listener in self._listeners:
            listener(line)

    @contextlib.contextmanager
    def listen(self, listener: Callable[[LogLine], None]) -> Iterator[None]:
        """Call `listener` with each new line until the block ends."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    def tail(self, count: int, source: str = "") -> list[LogLine]:
        """Return the last `count` lines in memory, of one source or of all."""
        lines = [line for line in self._lines if line.source == source] if source else list(self._lines)
        return lines[-count:] if count > 0 else []

    async def follow(self, count: int) -> AsyncIterator[LogLine]:
        """Yield the last `count` lines in memory, then each new line, until the function is deleted."""
        with self.subscribe() as news:
            for line in self.tail(count):
                yield line
            while (new := await news.get()) is not None:
                yield new

    def end(self) -> None:
        """Write that the function was deleted, and end the followers. Later lines are not stored: another owner may
        deploy the next function of this name, and would read them.
        """
        self.write("gateway", DELETED.format(self._function))
        self.ended, self._keep = True, None
        for follower in self._followers:
            if follower.full():
                follower.get_nowait()
            follower.put_nowait(None)

    @contextlib.contextmanager
    def subscribe(self) -> Iterator[asyncio.Queue[LogLine | None]]:
        """Yield a queue that gets each new line until the block ends, and None after the end of the function."""
        queue: asyncio.Queue[LogLine | None] = asyncio.Queue(FOLLOWER_LINES)
        self._followers.add(queue)
        try:
            yield queue
        finally:
            self._followers.discard(queue)


class RevisionLog:
    """Writes the lines of one revision to the log of its function."""

    def __init__(self, channel: LogChannel, revision: str) -> None:
        self.channel, self._revision = channel, revision

    def write(self, source: str, text: str, level: str = "info", *, request_id: str = "") -> None:
        self.channel.write(source, text, level, request_id=request_id, revision=self._revision)

    def last_words(self, source: str, count: int, requests: Collection[str]) -> str:
        """Return the last lines of one source, joined into one line. Leave out the lines of calls that are not in `requests`."""
        return " | ".join(_without_outer_frames(self.last_lines(source, KEPT_LINES, requests), count))

    def last_lines(self, source: str, count: int, requests: Collection[str] = ()) -> list[str]:
        lines = self.channel.tail(KEPT_LINES, source)
        return [line.text for line in lines if not line.request_id or line.request_id in requests][-count:]


def _without_outer_frames(lines: list[str], count: int) -> list[str]:
    """Return the last `count` lines. If they are Python's report of a crash, return the cause and the innermost frames."""
    begin = next((n for n in reversed(range(len(lines))) if lines[n].startswith("Current thread 0x")), None)
    if begin is None:
        return lines[-count:]
    frames = [line.strip() for line in takewhile(lambda line: line.startswith("  "), lines[begin + 1 :])]
    # If the process has printed more since, it did not end with the report.
    if not all(line.startswith(_OF_CRASHES) or not line for line in lines[begin:]):
        return lines[-count:]
    cause = [line for line in lines[:begin] if line.startswith("Fatal Python error")][-1:]
    return [*cause, *frames][:count]


class Capture:
    """The last lines that one invocation has printed, up to `max_chars`."""

    def __init__(self, max_chars: int, on_line: Callable[[], None] = lambda: None) -> None:
        """The capture calls `on_line` after each line."""
        self._max_chars, self._on_line = max_chars, on_line
        self._lines: deque[str] = deque()
        self._chars = 0

    def add(self, text: str) -> None:
        self._lines.append(text)
        self._chars += len(text) + 1
        while self._chars > self._max_chars and len(self._lines) > 1:
            self._chars -= len(self._lines.popleft()) + 1
        self._on_line()

    def text(self) -> str:
        """Return the lines without the line feed at the end."""
        return "\n".join(self._lines)[-self._max_chars :]


class Logs:
    """The logs of all functions, and of the gateway itself, with their files."""

    def __init__(self, files: LogFiles) -> None:
        self.files = files
        self.logged: list[Callable[[LogLine], None]] = []
        """Called with each new line of a function."""
        self.kept: list[Callable[[str, LogLine], None]] = []
        """Called with each new line of any log, and the name of the log."""
        # A channel is kept as long as its function lives or a follower reads it.
        self._channels: WeakValueDictionary[str, LogChannel] = WeakValueDictionary()

    def of_function(self, function: str) -> LogChannel:
        """Return the log of a function. The function need not exist."""
        return self.channel(function_file(function))

    def channel(self, file: str) -> LogChannel:
        """Return the log that is stored in `file`. After a function was deleted, the next function of its name gets a new log."""
        if (channel := self._channels.get(file)) is None or channel.ended:
            channel = self._channels[file] = LogChannel(
                function_of(file),
                lambda line: self._keep(file, line),
                on_dropped=self.files.note_dropped,
            )
        return channel

    def _keep(self, file: str, line: LogLine) -> None:
        self.files.write(file, line)
        for keep in self.kept:
            keep(file, line)
        if line.function:
            for listener in self.logged:
                listener(line)

    async def facts(self) -> list[LogFacts]:
        """Return the facts about each stored log that are known without reading its lines."""
        return await asyncio.to_thread(self.files.facts)

    async def exists(self, file: str) -> bool:
        """Return True if there are stored lines."""
        return await asyncio.to_thread(self.files.exists, file)

    async def history(self, file: str, query: LogQuery) -> list[LogLine]:
        """Return the stored lines that fit a query, oldest first."""
        return await asyncio.to_thread(self.files.search, file, query)

    async def stored(self, file: str, query: LogQuery) -> AsyncIterator[LogLine]:
        """Yield the stored lines that fit a query, oldest first."""
        for line in await self.history(file, query):
            yield line

    async def follow(self, file: str, query: LogQuery) -> AsyncIterator[LogLine]:
        """Yield the stored lines that fit a query, then each new line that fits it, until the function is deleted."""
        channel, last_s = self.channel(file), 0.0
        with channel.subscribe() as news:
            for line in await self.history(file, query):
                last_s = line.at
                yield line
            while (new := await news.get()) is not None:
                # Skip lines that were written before the files were read, because `history` has returned them.
                if new.at > last_s and query.fits(new):
                    yield new
