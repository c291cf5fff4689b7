"""Accepts the connections of launched processes, which identify themselves with a token."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import secrets
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from weakref import WeakValueDictionary

from ....errors import GatewayError, LinkError
from ...calls.link.connection import Link
from ...calls.link.frames import Frame, FrameKind, FrameReader
from ...ground.telemetry.log_stream import LogStream
from ...ground.telemetry.logs import Log

_log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 10.0
# The pause after a connection could not be accepted. asyncio pauses for the same time. No event says when a descriptor
# becomes free.
ACCEPT_RETRY_S = 1.0
MAX_HELLO_BYTES = 4096
# If more connections than this wait for their HELLO, close the oldest connection. Otherwise, silent connections could
# use up the descriptors that callers need. A worker sends its HELLO at once, so the oldest connections are not those of
# workers.
MAX_GREETINGS = 256
BACKLOG = 512
PEERCRED = struct.Struct("3i")
# Called with the link, the pid of its process, and the process's log connection, if it has one.
OnLink = Callable[[Link, int, LogStream | None], None]
# Linux allows 108 bytes for the path of a unix socket, including the zero byte at the end.
MAX_SOCKET_PATH = 107


class Expected(NamedTuple):
    """A process that was given a token. It may open one log connection and then one link."""

    secret: str
    """The second half of the token."""
    source: str
    """The name of the process in the log."""
    logs: Log
    on_link: OnLink
    role: str
    """The role that the link's HELLO must name."""


class Listener:
    """Accepts connections, checks their HELLO, and passes each link to the code that expects it."""

    def __init__(self, path: Path) -> None:
        if len(os.fsencode(path)) > MAX_SOCKET_PATH:
            message = f"The path of the link socket is longer than {MAX_SOCKET_PATH} bytes: {path}."
            raise GatewayError(message, remedy="Use a shorter --state-dir, or a shorter TMPDIR.")
        self.path = path
        self._expected: dict[str, Expected] = {}
        # The connections whose HELLO is not complete, in the order of their arrival.
        self._greetings: dict[_Greeting, None] = {}
        # The log connections, by the first half of their tokens. The event loop keeps each connection in memory until
        # it ends.
        self._streams: WeakValueDictionary[str, LogStream] = WeakValueDictionary()
        self._paused: asyncio.TimerHandle | None = None
        self._failing = False

    def open(self) -> None:
        """Listen on a socket that only this user can connect to."""
        self._loop = asyncio.get_running_loop()
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path.unlink(missing_ok=True)
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.setblocking(False)
        self._sock.bind(str(self.path))
        self.path.chmod(0o600)
        self._sock.listen(BACKLOG)
        self._resume()

    def close(self) -> None:
        if self._paused is not None:
            self._paused.cancel()
        self._loop.remove_reader(self._sock)
        self._sock.close()
        self.path.unlink(missing_ok=True)
        for greeting in list(self._greetings):
            greeting.close()
        for stream in list(self._streams.values()):
            stream.close()

    def expect(self, role: str, source: str, logs: Log, on_link: OnLink) -> str:
        """Return a token for one process.

        When the process opens a link as `role`, the listener calls `on_link(link, pid, log_stream)`.
        """
        token = secrets.token_hex(24)
        name, secret = token[:16], token[16:]
        self._expected[name] = Expected(secret, source, logs, on_link, role)
        return f"{name}.{secret}"

    def forget(self, token: str) -> None:
        """Make a token invalid."""
        self._expected.pop(token.partition(".")[0], None)

    def settle(self) -> None:
        """Accept and read everything that has arrived, such as the HELLO of a process that has since died."""
        while self._accept():
            pass
        for greeting in list(self._greetings):
            greeting.read()

    def hello(self, sock: socket.socket, token: str, role: str, mark: str = "") -> bool:
        """Pass a connection that sent HELLO to the code that expects it. Return False if the connection is refused; the
        caller must then close it.
        """
        name, _, secret = token.partition(".")
        expected = self._expected.get(name)
        if expected is None or not hmac.compare_digest(expected.secret.encode(), secret.encode()):
            return False
        peer = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEERCRED.size)
        pid, uid, _ = PEERCRED.unpack(peer)
        if uid not in (os.getuid(), 0):
            return False
        if role == "log" and name not in self._streams:
            self._streams[name] = LogStream(sock, expected.logs, expected.source, mark)
            return True
        if role != expected.role:
            return False
        self.forget(token)
        expected.on_link(Link(sock, join_writes=True), pid, self._streams.get(name))
        return True

    def discard(self, greeting: _Greeting) -> None:
        self._greetings.pop(greeting, None)

    def _accept(self) -> bool:
        try:
            sock, _ = self._sock.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return False
        except OSError as error:
            self._pause(error)
            return False
        self._failing = False
        greeting = _Greeting(sock, self._loop, self)
        # Usually the HELLO has arrived with the connection, so read it now. But if an earlier connection waits for its HELLO,
        # this connection waits too: a process connects its output before its link, and the order must stay.
        if self._greetings or not greeting.read():
            greeting.wait()
            self._greetings[greeting] = None
            if len(self._greetings) > MAX_GREETINGS:
                next(iter(self._greetings)).close()
        return True

    def _pause(self, error: OSError) -> None:
        """Accept nothing for ACCEPT_RETRY_S after an error such as EMFILE. The socket stays readable, so the event loop
        would call `_accept` at once.
        """
        if not self._failing:
            self._failing = True
            remedy = "Raise the limit of open files (ulimit -n)."
            _log.error("workers cannot connect to the gateway: %s. %s", error.strerror, remedy)
        if self._paused is None:
            self._loop.remove_reader(self._sock)
            self._paused = self._loop.call_later(ACCEPT_RETRY_S, self._resume)

    def _resume(self) -> None:
        self._paused = None
        self._loop.add_reader(self._sock, self._accept)


class _Greeting:
    """A connection whose HELLO has not arrived completely."""

    def __init__(self, sock: socket.socket, loop: asyncio.AbstractEventLoop, listener: Listener) -> None:
        sock.setblocking(False)
        self._sock, self._loop, self._listener = sock, loop, listener
        self._reader = FrameReader(MAX_HELLO_BYTES)
        self._timer: asyncio.TimerHandle | None = None

    def wait(self) -> None:
        """Read the rest of the HELLO when it arrives."""
        self._timer = self._loop.call_later(HELLO_TIMEOUT_S, self.close)
        self._loop.add_reader(self._sock, self.read)

    def close(self) -> None:
        self._stop()
        self._sock.close()

    def read(self) -> bool:
        """Read the bytes of the HELLO that have arrived, but no bytes after the HELLO. Return False if bytes of the
        HELLO are still missing.

        Once the HELLO is complete, hand over the connection or close it.
        """
        try:
            while data := self._sock.recv(self._reader.missing):
                if frames := self._reader.feed(data):
                    self._stop()
                    if not self._greet(frames[0]):
                        self._sock.close()
                    return True
        except BlockingIOError:
            return False
        except (OSError, LinkError):
            pass
        self.close()
        return True

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._loop.remove_reader(self._sock)
            self._listener.discard(self)

    def _greet(self, hello: Frame) -> bool:
        if hello.kind != FrameKind.HELLO:
            return False
        try:
            head = hello.json()
            token, role, mark = str(head["token"]), str(head["role"]), str(head.get("mark", ""))
            return self._listener.hello(self._sock, token, role, mark)
        # OSError means that no descriptor is free to watch the process.
        except (LinkError, KeyError, OSError):
            return False
