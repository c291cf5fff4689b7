"""Marks each printed line with the invocation that printed it, so that a caller gets only the lines of its invocation.

`current` is the invocation that the present thread or task works for. A line that is printed for an invocation
gets a mark (see `runtime/ground/telemetry/log_stream.py`). Output that is written directly to the descriptors is not marked.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
from contextvars import ContextVar
from typing import TYPE_CHECKING, TextIO

from ....handlers.caller import NO_ORIGIN, origin

if TYPE_CHECKING:
    from .call import Call

current: ContextVar[tuple[int, str] | None] = ContextVar("current", default=None)
"""The channel and id of the invocation that this thread or task works for.

It is None in hooks, and in a batch of several invocations.
"""
# The beginnings of unfinished lines, by descriptor and channel. This dict is nearly always empty, so the check at the
# end of an invocation costs nothing.
unfinished: dict[tuple[int, int], str] = {}
LEVELS = ((logging.ERROR, "e"), (logging.WARNING, "w"), (logging.INFO, "i"))
# A longer line is written in pieces of this many characters, each with its own mark. One system call writes such a piece, so
# the pieces of several threads do not mix.
PIECE_CHARS = 3_500
NOBODY = "-"


class MarkedOutput(io.TextIOWrapper):
    """Standard output or standard error of a process that runs handlers."""

    def __init__(self, stream: TextIO) -> None:
        self._descriptor = stream.fileno()
        self._mark = ""
        self._lock = threading.RLock()
        raw = stream.detach() if isinstance(stream, io.TextIOWrapper) else stream.buffer
        super().__init__(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)

    def start_marking(self, word: str) -> None:
        """Mark lines from now on. The gateway recognises the marks by `word`."""
        self._mark = f"\x1e{word} "

    def write(self, text: str) -> int:
        call = current.get()
        if call is None or not self._mark:
            return super().write(text)
        self._write_for(*call, text)
        return len(text)

    def flush(self) -> None:
        """Write everything that was printed, including an unfinished line."""
        if unfinished and (call := current.get()) is not None:
            self.finish(*call, "+")
        super().flush()

    def log(self, level: str, channel: int, request_id: str, text: str) -> None:
        """Write lines of one logging call, with its level."""
        with self._lock:
            for line in text.split("\n") if self._mark else ():
                self._write_marked(level, channel, request_id, line)
            if not self._mark:
                super().write(f"{text}\n")

    def finish(self, channel: int, request_id: str, flag: str = "") -> None:
        """Write an invocation's unfinished line, if there is one."""
        with self._lock:
            if rest := unfinished.pop((self._descriptor, channel), ""):
                self._write_marked(f"i{flag}", channel, request_id, rest)

    def _write_for(self, channel: int, request_id: str, text: str) -> None:
        key = (self._descriptor, channel)
        with self._lock:
            *lines, rest = (unfinished.pop(key, "") + text).split("\n")
            for line in lines:
                self._write_marked("i", channel, request_id, line)
            if len(rest) > PIECE_CHARS:
                self._write_marked("i+", channel, request_id, rest)
            elif rest:
                unfinished[key] = rest

    def _write_marked(self, flags: str, channel: int, request_id: str, line: str) -> None:
        head = f"{channel} {request_id or NOBODY} "
        while len(line) > PIECE_CHARS:
            super().write(f"{self._mark}{flags[0]}+ {head}{line[:PIECE_CHARS]}\n")
            line = line[PIECE_CHARS:]
        super().write(f"{self._mark}{flags} {head}{line}\n")


class MarkedHandler(logging.Handler):
    """Writes log records to standard error, which is the function's log, with their level and invocation."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text, call = self.format(record), current.get()
            channel, request_id = call or (0, "")
            known = record.__dict__.get("invocation", NOBODY)
            if known not in (NOBODY, request_id):
                # `context.log` was used on a thread that the handler started, where `current` is not set. Use the record's
                # invocation.
                channel, request_id = record.__dict__.get("channel", 0), known
            level = next((letter for least, letter in LEVELS if record.levelno >= least), "d")
            if isinstance(stream := sys.stderr, MarkedOutput):
                stream.log(level, channel, request_id, text)
            else:
                stream.write(f"{record.levelname} {request_id or NOBODY} {text}\n")
        except Exception:  # noqa: BLE001  as the library's handlers do: a log line must not fail its caller
            self.handleError(record)


def install() -> None:
    """Replace standard output and error of this process. Call this before anything keeps a reference to the old streams."""
    if not isinstance(sys.stdout, MarkedOutput):
        sys.stdout = sys.__stdout__ = MarkedOutput(sys.stdout)  # type: ignore[misc]
        sys.stderr = sys.__stderr__ = MarkedOutput(sys.stderr)  # type: ignore[misc]


def redirect(descriptor: int, word: str) -> None:
    """Redirect standard output and error to a descriptor, and mark lines with `word` from now on."""
    for number in (1, 2):
        os.dup2(descriptor, number)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, MarkedOutput):
            stream.start_marking(word)


def begin(calls: list[Call]) -> None:
    """Record that the handler is called for `calls`. What the handler prints belongs to an invocation only if there is
    exactly one call.
    """
    single = len(calls) == 1
    current.set((calls[0].channel, calls[0].context.id) if single else None)
    origin.set(calls[0].origin if single else NO_ORIGIN)


def finish(calls: list[Call]) -> None:
    """Write the unfinished lines of invocations that have ended."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, MarkedOutput):
            for call in calls:
                stream.finish(call.channel, call.context.id)
