"""Reads what a process prints, line by line, and finds the invocation that each line belongs to.

A worker marks each line whose invocation it knows: `MARK level[+] channel id text`. MARK is a control character and a
random word that the process chose when it connected, so that printed input cannot forge it. A "+" says that the line
goes on in the channel's next marked line. All other lines were written to the descriptors directly, by C code, child
processes or threads that the handler started. Such a line belongs to an invocation only if the invocation was recorded
and was alone in its worker.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque
from typing import TypeAlias

from .logs import Capture, Log

MAX_LINE_BYTES = 16 << 10
RECEIVE_BYTES = 64 << 10
# `drain` reads at most this many times, because the process may print without end.
MAX_READS = 32
MAX_UNFINISHED = 256
# The most lines that are written in one turn of the event loop, because other functions wait meanwhile.
TURN_LINES = 200
MARK_START = b"\x1e"
NOBODY = "-"
LEVEL_NAMES = {"d": "debug", "i": "info", "w": "warning", "e": "error"}
# The first words of Python's report of a crash. The report is for the function's owner: no invocation's output gets it.
CRASH = b"Fatal Python error"
_Recorded: TypeAlias = tuple[str, Capture]


class LogStream:
    """Reads the output of the process `source` from a socket until its end, and writes the lines to a log."""

    def __init__(self, sock: socket.socket, log: Log, source: str, mark: str = "") -> None:
        """`mark` is the random word of the process; "" if the process marks no lines."""
        sock.setblocking(False)
        self._sock, self._log, self._source = sock, log, source
        self._mark = MARK_START + mark.encode() + b" " if mark else b""
        # Lines that were received, but not written yet, and the beginning of the line after them.
        self._lines: deque[bytes] = deque()
        self._rest = b""
        # The beginnings of marked lines by channel, and the recorded invocations by channel.
        self._unfinished: dict[int, str] = {}
        self._recorded: dict[int, _Recorded] = {}
        self._alone = 0
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock, self._read)

    @property
    def alive(self) -> bool:
        return self._sock.fileno() >= 0

    def close(self) -> None:
        if not self.alive:
            return
        self._loop.remove_reader(self._sock)
        self._sock.close()
        self._write_lines(len(self._lines))
        if self._rest:
            self._line(self._rest)
            self._rest = b""
        for channel in list(self._unfinished):
            self._finish(channel, "", "info", "")
        # Drop the captures, because they keep invocations and their bodies in memory.
        self._recorded.clear()

    # -- which lines belong to which invocation

    def record(self, channel: int, request_id: str, capture: Capture, *, alone: bool) -> None:
        """Add the lines of the invocation on `channel`, which is about to be sent, to `capture`.

        If the invocation is `alone` in its worker, `capture` also gets output that is written to the descriptors
        directly.
        """
        self.drain()
        self._recorded[channel] = (request_id, capture)
        self._alone = channel if alone else 0

    def crowd(self) -> None:
        """Let unmarked lines belong to no invocation from now on: a second invocation is sent, or the call is stuck."""
        if self._alone:
            self.drain()
            self._alone = 0

    def end(self, channel: int) -> None:
        """Stop recording the invocation on `channel`, because its answer has arrived. Its lines arrived before its
        answer.
        """
        self.drain()
        self._recorded.pop(channel, None)
        if self._alone == channel:
            self._alone = 0

    def drain(self) -> None:
        """Read the output that has arrived, and write its lines."""
        self._write_lines(len(self._lines))
        for _ in range(MAX_READS):
            if not self.alive or not self._receive():
                return
            self._write_lines(len(self._lines))

    # -- reading

    def _read(self) -> None:
        """Read once, and write at most TURN_LINES of the lines. The rest follows in the next turns of the loop."""
        if self._receive():
            self._write_lines(TURN_LINES)
            if self._lines:
                self._loop.remove_reader(self._sock)
                self._loop.call_soon(self._continue)

    def _continue(self) -> None:
        self._write_lines(TURN_LINES)
        if self._lines:
            self._loop.call_soon(self._continue)
        elif self.alive:
            self._loop.add_reader(self._sock, self._read)

    def _receive(self) -> bool:
        """Receive once, and add the lines that the function may print. Return False if nothing has arrived."""
        try:
            data = self._sock.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self.close()
            return False
        channel = self._log.channel
        lines = data.count(b"\n")
        allowed = channel.allowance.take(lines, len(data), time.monotonic())
        if allowed < lines:
            # Splitting 64 KiB of empty lines would take as long as writing a hundred lines, so drop them unsplit.
            channel.note_dropped(lines - allowed)
            *kept, rest = data.split(b"\n", allowed)
            data = b"".join(line + b"\n" for line in kept) + rest.rpartition(b"\n")[2]
        if lines and not allowed:
            # Drop the beginning of a line, because the rest of this line was dropped.
            self._rest = b""
        *news, self._rest = (self._rest + data).split(b"\n")
        self._lines.extend(news)
        if len(self._rest) > 2 * MAX_LINE_BYTES:
            self._cut()
        return True

    def _cut(self) -> None:
        """End a line that is too long. A process that prints no newline must not fill the gateway's memory."""
        if self._log.channel.allowance.take(1, len(self._rest), time.monotonic()):
            self._lines.append(self._rest)
        else:
            self._log.channel.note_dropped(1)
        self._rest = b""

    def _write_lines(self, most: int) -> None:
        for _ in range(min(most, len(self._lines))):
            self._line(self._lines.popleft())

    def _line(self, line: bytes) -> None:
        begin = line.find(self._mark) if self._mark else -1
        if begin < 0:
            self._unmarked(line)
            return
        if begin:
            self._unmarked(line[:begin])
        parts = line[begin + len(self._mark) :].decode("utf-8", "replace").split(" ", 3)
        if len(parts) == 4 and parts[1].isdecimal():
            request_id = "" if parts[2] == NOBODY else parts[2]
            self._marked(parts[0], int(parts[1]), request_id, parts[3])

    def _unmarked(self, line: bytes) -> None:
        if line.startswith(CRASH):
            self._alone = 0
        for start in range(0, len(line) or 1, MAX_LINE_BYTES):
            text = line[start : start + MAX_LINE_BYTES].decode("utf-8", "replace").rstrip("\r")
            self._write(text, "info", self._alone, "")

    def _marked(self, flags: str, channel: int, request_id: str, text: str) -> None:
        if not flags.endswith("+"):
            self._finish(channel, text, LEVEL_NAMES.get(flags, "info"), request_id)
            return
        if len(self._unfinished) >= MAX_UNFINISHED:
            self._finish(next(iter(self._unfinished)), "", "info", "")
        begun = self._unfinished.pop(channel, "") + text
        while len(begun) >= MAX_LINE_BYTES:
            self._write(begun[:MAX_LINE_BYTES], "info", channel, request_id)
            begun = begun[MAX_LINE_BYTES:]
        self._unfinished[channel] = begun

    def _finish(self, channel: int, text: str, level: str, request_id: str) -> None:
        text = (self._unfinished.pop(channel, "") + text).rstrip("\r")
        for start in range(0, len(text) or 1, MAX_LINE_BYTES):
            self._write(text[start : start + MAX_LINE_BYTES], level, channel, request_id)

    def _write(self, text: str, level: str, channel: int, request_id: str) -> None:
        if (recorded := self._recorded.get(channel)) is not None:
            request_id, capture = recorded
            capture.add(text if level == "info" else f"{level.upper()} {text}")
        self._log.write(self._source, text, level, request_id=request_id)
