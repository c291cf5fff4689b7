"""Stores logs in files of JSON lines, which one thread writes, and searches them.

    <state dir>/logs/gateway.jsonl              what the gateway says
    <state dir>/logs/audit.jsonl                who changed what
    <state dir>/logs/access.jsonl               a line for each request, if the setting `access_log` is on
    <state dir>/logs/functions/<name>.jsonl     what a function's processes printed, and what happened to them

A full file is renamed to `….jsonl.1`, and older files to `.2` and `.3`. Files that were not written for `keep_s` are
removed, so the log of a deleted function stays for that time.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import re
import threading
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import orjson

from ....errors import UnknownFunction

LOG = logging.getLogger(__name__)
GATEWAY, AUDIT, ACCESS = "gateway", "audit", "access"
SUFFIX = ".jsonl"
BACKUPS = 3
MAX_BYTES = 32 << 20
"""The most bytes of one log, a function's or the gateway's, with its older files."""
# The most memory of lines that wait for the disk. A line counts as LINE_BYTES plus the length of its text.
MAX_WAITING_BYTES = 16 << 20
LINE_BYTES = 400
MAX_TEXT_CHARS = 16 << 10
"""The most characters of a line's text."""
MAX_OPEN_FILES = 8
MAX_FOUND_BYTES = 16 << 20
"""The most bytes of the lines that a search returns. If more lines fit the query, it returns only the newest ones."""
# The gateway's last line about a function that was deleted, or whose first deploy has failed, with the function's name.
DELETED, NOT_DEPLOYED = "{} was deleted", "{} was not deployed"
PRUNE_EVERY_S = 3600.0
# How long a search waits until the lines that were written before it are in the files.
SETTLE_TIMEOUT_S = 5.0
_FUNCTIONS = "functions/"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
# All control characters but the tab and the line feed. Some terminals obey control characters above 0x7f, too.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Return the text with its control characters escaped, as in `\\x1b`, except tabs and line feeds.

    Otherwise, texts of functions and callers could set a terminal's title or clipboard, or erase its lines.
    """
    return text if text.isprintable() else CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def printable_json(text: str) -> str:
    """Return JSON without control characters. JSON itself escapes only control characters below 0x20."""
    return text if text.isprintable() else CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class LogLevel(StrEnum):
    """The importance of a line. The least important level comes first."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


_SEVERITIES: dict[str, int] = {level: number for number, level in enumerate(LogLevel)}


class LogLine(NamedTuple):
    """A line of a log. Its text may hold line feeds.

    `at` is the Unix time in seconds at which the line was received. `source` is the name of the worker or zygote that
    printed the line, or `gateway` or `deploy`. `request_id` names the invocation that the line belongs to.
    """

    at: float
    source: str
    text: str
    level: str = "info"
    function: str = ""
    revision: str = ""
    request_id: str = ""
    facts: Mapping[str, str | float] = MappingProxyType({})
    """What the text of an audit or access line says, by name. Files have the text only."""

    def encode(self, log: str = "") -> bytes:
        """Return the line as one line of JSON without control characters, as files have it. With `log`, add the facts and this name."""
        fields = self._asdict() | ({"log": log, **self.facts} if log else {})
        del fields["facts"]
        try:
            line = orjson.dumps(fields)
        except TypeError:
            # A text has half a surrogate pair.
            line = orjson.dumps(fields | {"text": ascii(self.text), "request_id": ""})
        return printable_json(line.decode()).encode() + b"\n"


class LogQuery(NamedTuple):
    """Selects lines: the last `most` lines that fit all other fields."""

    most: int = 100
    since_s: float = 0.0
    until_s: float = math.inf
    request_id: str = ""
    level: str = LogLevel.DEBUG
    """The lowest level of the selected lines."""
    worker: str = ""
    """The name of the worker that printed the line."""
    since_deletion: bool = False
    """If True, select only lines after the last deletion or failed first deploy of the function: another owner may have deployed it before."""

    @property
    def most_bytes(self) -> int:
        """The most bytes of the lines that a search returns, where a line counts as LINE_BYTES plus the length of its text."""
        return min(MAX_FOUND_BYTES, self.most * (MAX_TEXT_CHARS + LINE_BYTES))

    def marks(self) -> list[bytes]:
        """Return byte strings that every fitting stored line contains. Lines without them need not be parsed."""
        marks = [self.request_id.encode(), self.worker.encode()]
        if self.level == LogLevel.ERROR:
            marks.append(b'"level":"error"')
        return marks

    def fits(self, line: LogLine) -> bool:
        return (
            self.since_s <= line.at <= self.until_s
            and self.request_id in ("", line.request_id)
            and self.worker in ("", line.source)
            and _severity(line.level) >= _severity(self.level)
        )


class LogFacts(NamedTuple):
    """The facts about a stored log that are known without reading its lines."""

    name: str
    bytes: int
    written_at: float


class LogFiles:
    """The files of all logs below `folder`. Any thread may use it."""

    def __init__(
        self, folder: Path, *, max_bytes: int = MAX_BYTES, keep_s: float, on_written: Callable[[bool], None] = lambda _failed: None
    ) -> None:  # fmt: skip
        """`max_bytes` is the size that one log may have with its older files.

        After each write, the writing thread calls `on_written`: with True if some lines could not be stored, else
        False.
        """
        self._on_written, self._failed = on_written, False
        self._folder, self._keep_s = folder, keep_s
        self._file_bytes = max(1, max_bytes // (BACKUPS + 1))
        self._waiting: queue.SimpleQueue[tuple[str, LogLine] | threading.Event] = queue.SimpleQueue()
        self._waiting_bytes = 0
        self._unreported: Counter[str] = Counter()
        self.dropped = 0
        """The number of lines that were not stored: the disk was too slow or full, or a function has printed too much."""
        self._lock = threading.Lock()
        # Held while files are written or renamed, and while they are opened to be read.
        self._changing = threading.Lock()
        self._open: OrderedDict[str, _LogFile] = OrderedDict()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="logs", daemon=True)

    def start(self) -> None:
        """Make the folder and start the thread that writes."""
        for folder in (self._folder, self._folder / "functions"):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._thread.start()

    def close(self) -> None:
        """Write all lines that wait, and end the thread."""
        self._closing = True
        self._waiting.put(threading.Event())
        self._thread.join(SETTLE_TIMEOUT_S)

    def write(self, name: str, line: LogLine) -> None:
        """Store a line in the log `name`. It is dropped and counted if too many lines wait for the disk."""
        size = len(line.text) + LINE_BYTES
        with self._lock:
            if self._waiting_bytes + size > MAX_WAITING_BYTES:
                self._unreported[name] += 1
                self.dropped += 1
                return
            self._waiting_bytes += size
        self._waiting.put((name, line))

    def note_dropped(self, lines: int) -> None:
        """Count lines that were dropped before `write`."""
        with self._lock:
            self.dropped += lines

    # -- reading

    def search(self, name: str, query: LogQuery) -> list[LogLine]:
        """Return the lines that fit, oldest first. This blocks until all lines that were written before are in the
        files.
        """
        self._settle()
        found: list[LogLine] = []
        left = query.most_bytes
        for line in self._newest_first(name, query):
            left -= len(line.text) + LINE_BYTES
            if left < 0:
                break
            found.append(line)
            if len(found) == query.most:
                break
        return found[::-1]

    def exists(self, name: str) -> bool:
        """Return True if lines are stored. This blocks until all lines that were written before are in the files."""
        self._settle()
        return any(path.exists() for path in self._paths(name))

    def _settle(self) -> None:
        """Wait until all lines that were written before are in the files."""
        settled = threading.Event()
        self._waiting.put(settled)
        settled.wait(SETTLE_TIMEOUT_S)

    def facts(self) -> list[LogFacts]:
        """Return the name, the size and the time of the last change of each log."""
        sizes: Counter[str] = Counter()
        written: dict[str, float] = defaultdict(float)
        for path in self._all_paths():
            with contextlib.suppress(FileNotFoundError):
                name, status = self._name_of(path), path.stat()
                sizes[name] += status.st_size
                written[name] = max(written[name], status.st_mtime)
        return [LogFacts(name, sizes[name], written[name]) for name in sorted(sizes)]

    def _newest_first(self, name: str, query: LogQuery) -> Iterator[LogLine]:
        """Yield the lines that fit, the newest first."""
        marks, ends = query.marks(), _end_marks(function_of(name)) if query.since_deletion else []
        for data in self._contents(name) if query.most > 0 else ():
            for raw in reversed(data.splitlines()):
                if any(end in raw for end in ends):
                    return
                if not all(mark in raw for mark in marks) or (line := _parse(raw)) is None:
                    continue
                if line.at < query.since_s:
                    return
                if query.fits(line):
                    yield line

    def _contents(self, name: str) -> Iterator[bytes]:
        """Yield the present content of a log's files, the newest file first."""
        with contextlib.ExitStack() as stack:
            files = []
            with self._changing:
                for path in self._paths(name):
                    with contextlib.suppress(OSError):
                        file = stack.enter_context(path.open("rb"))
                        files.append((file, path.stat().st_size))
            for file, size in files:
                yield file.read(size)

    def _paths(self, name: str) -> list[Path]:
        """Return the paths of a log's files, the newest first."""
        path = self._folder / f"{name}{SUFFIX}"
        return [path, *(path.with_name(f"{path.name}.{number}") for number in range(1, BACKUPS + 1))]

    def _all_paths(self) -> list[Path]:
        return [*self._folder.glob(f"*{SUFFIX}*"), *self._folder.glob(f"functions/*{SUFFIX}*")]

    def _name_of(self, path: Path) -> str:
        return str(path.relative_to(self._folder)).rpartition(SUFFIX)[0]

    # -- the thread that writes

    def _run(self) -> None:
        pruned_s = -math.inf
        while not self._closing or not self._waiting.empty():
            if time.monotonic() - pruned_s > PRUNE_EVERY_S:
                # Go on, because a folder that cannot be read now may be readable later.
                with contextlib.suppress(OSError):
                    self._prune()
                pruned_s = time.monotonic()
            try:
                self._store(self._waiting.get(timeout=PRUNE_EVERY_S))
            except queue.Empty:
                continue
            except Exception:
                # The thread goes on with the lines that follow.
                LOG.exception("lines of a log could not be stored")
        for file in self._open.values():
            file.close()

    def _store(self, first: tuple[str, LogLine] | threading.Event) -> None:
        """Write `first` and the lines that wait now. Write all lines of a log at once."""
        items = [first, *(self._waiting.get_nowait() for _ in range(self._waiting.qsize()))]
        texts: dict[str, list[bytes]] = defaultdict(list)
        size = 0
        for item in items:
            if not isinstance(item, threading.Event):
                texts[item[0]].append(item[1].encode())
                size += len(item[1].text) + LINE_BYTES
        with self._lock:
            self._waiting_bytes -= size
            unreported, self._unreported = self._unreported, Counter()
        for name, count in unreported.items():
            lines_were = "1 line was" if count == 1 else f"{count} lines were"
            text = f"{lines_were} not stored: the disk is too slow or full"
            texts[name].append(LogLine(time.time(), "gateway", text, "warning").encode())
        self._failed = False
        with self._changing:
            for name, lines in texts.items():
                if not self._file(name).store(b"".join(lines)):
                    self._fail(name, len(lines))
        if texts:
            self._on_written(self._failed)
        for item in items:
            if isinstance(item, threading.Event):
                item.set()

    def _file(self, name: str) -> _LogFile:
        if (file := self._open.get(name)) is None:
            file = self._open[name] = _LogFile(self._paths(name), self._file_bytes, self._keep_s)
            if len(self._open) > MAX_OPEN_FILES:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end(name)
        return file

    def _fail(self, name: str, count: int) -> None:
        self._failed = True
        with self._lock:
            self._unreported[name] += count
            self.dropped += count

    def _prune(self) -> None:
        """Remove the files that were not written for `keep_s`."""
        oldest_s = time.time() - self._keep_s
        for path in self._all_paths():
            with self._changing, contextlib.suppress(OSError):
                if path.stat().st_mtime < oldest_s:
                    if (file := self._open.pop(self._name_of(path), None)) is not None:
                        file.close()
                    path.unlink()


class _LogFile:
    """One log's file. It is renamed when it is full, or when its first line is older than half of `keep_s`."""

    def __init__(self, paths: list[Path], max_bytes: int, keep_s: float) -> None:
        """`paths` has the path of the file, and then the paths of older files, the newest first."""
        self._paths, self._max_bytes, self._keep_s = paths, max_bytes, keep_s
        self._begun_s = _first_s(paths[0])
        self._file: int | None = None
        self._size = 0

    def store(self, lines: bytes) -> bool:
        """Append lines. Return False if they could not be written; the next call opens the file anew."""
        try:
            if self._file is None:
                self._open()
            aged = time.time() - self._begun_s > self._keep_s / 2
            if self._size and (aged or self._size + len(lines) > self._max_bytes):
                self._rename()
            written = os.write(self._file, lines) if self._file is not None else 0
        except OSError:
            written = 0
        self._size += written
        if written < len(lines):
            self.close()
        return written == len(lines)

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = None

    def _open(self) -> None:
        self._file = os.open(self._paths[0], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._size = os.fstat(self._file).st_size

    def _rename(self) -> None:
        self.close()
        for newer, older in reversed(list(pairwise(self._paths))):
            with contextlib.suppress(FileNotFoundError):
                newer.replace(older)
        self._begun_s = time.time()
        self._open()


def function_file(function: str) -> str:
    """Return the name of the log of a function. Raise UnknownFunction if no function can have this name."""
    if not _NAME.fullmatch(function):
        raise UnknownFunction.named(function)
    return f"{_FUNCTIONS}{function}"


def function_of(file: str) -> str:
    """Return the name of the function whose log this is, or "" for one of the gateway's own logs."""
    return file.removeprefix(_FUNCTIONS) if file.startswith(_FUNCTIONS) else ""


def _end_marks(function: str) -> list[bytes]:
    """Return byte strings that only the gateway's lines DELETED and NOT_DEPLOYED contain. Other lines cannot contain them, because JSON escapes the
    quotation marks of a text.
    """
    texts = [text.format(function) for text in (DELETED, NOT_DEPLOYED)]
    return [f'"source":"gateway","text":"{text}"'.encode() for text in texts]


def _severity(level: str) -> int:
    return _SEVERITIES.get(level, _SEVERITIES[LogLevel.INFO])


def _first_s(path: Path) -> float:
    """Return the time of the first line of a file; the present time if the file has no line."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        if (line := _parse(file.readline())) is not None:
            return line.at
    return time.time()


def _parse(raw: bytes) -> LogLine | None:
    """Return the line of a file, or None if it was not written completely."""
    try:
        return LogLine(**orjson.loads(raw))
    except (orjson.JSONDecodeError, TypeError):
        return None
