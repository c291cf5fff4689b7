"""The listener: where zygotes and workers dial in. Who was asked to gets a token; anybody else is hung up on."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import secrets
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...errors import GatewayError, LinkError
from ..link.link import HEADER, Address, FrameKind, FrameReader, Link
from ..telemetry.logs import LogBook, LogStream

HELLO_TIMEOUT_S = 10.0
MAX_HELLO_BYTES = 4096
BACKLOG = 512
PEERCRED = struct.Struct("3i")
# Linux's limit for the path of a unix socket is 108 bytes with its final zero.
MAX_SOCKET_PATH = 107


@dataclass(slots=True)
class Expected:
    """Somebody who was given a token: one link and one log connection may present it."""

    secret: str
    source: str
    logs: LogBook
    on_link: Callable[[Link, int], None]
    role: str
    logged: bool = False


class Listener:
    """Accepts connections, checks their HELLO, and hands each link to the one who expects it."""

    def __init__(self, path: Path) -> None:
        if len(os.fsencode(path)) > MAX_SOCKET_PATH:
            raise GatewayError(
                f"The path of the link socket is longer than {MAX_SOCKET_PATH} bytes: {path}.",
                remedy="Use a shorter --state-dir.",
            )
        self._path = path
        self.address = Address(path=str(path))
        self._expected: dict[str, Expected] = {}
        self._dialling: set[_Dialling] = set()
        self._streams: set[LogStream] = set()

    def open(self) -> None:
        """Listens. Only this user can reach the socket."""
        self._loop = asyncio.get_running_loop()
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._path.unlink(missing_ok=True)
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.setblocking(False)
        self._sock.bind(str(self._path))
        self._path.chmod(0o600)
        self._sock.listen(BACKLOG)
        self._loop.add_reader(self._sock, self._accept)

    def close(self) -> None:
        self._loop.remove_reader(self._sock)
        self._sock.close()
        self._path.unlink(missing_ok=True)
        for dialling in list(self._dialling):
            dialling.close()
        for stream in list(self._streams):
            stream.close()

    def expect(self, role: str, source: str, logs: LogBook, on_link: Callable[[Link, int], None]) -> str:
        """A token for one process, which will appear as `on_link(link, pid)`; what it prints goes to `logs`."""
        name, secret = secrets.token_hex(8), secrets.token_hex(16)
        self._expected[name] = Expected(secret, source, logs, on_link, role)
        return f"{name}.{secret}"

    def forget(self, token: str) -> None:
        """Nobody is expected with this token any more."""
        self._expected.pop(token.partition(".")[0], None)

    def settle(self) -> None:
        """Takes in all who have dialled by now: what a process sent before it died may not have been read yet."""
        while self._accept():
            pass
        for dialling in list(self._dialling):
            dialling.read()

    def _accept(self) -> bool:
        try:
            sock, _ = self._sock.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return False
        self._dialling.add(_Dialling(sock, self._loop, self))
        return True

    def hello(self, sock: socket.socket, token: str, role: str, rest: bytes) -> bool:
        """Takes in who said HELLO; False hangs up."""
        name, _, secret = token.partition(".")
        expected = self._expected.get(name)
        known = expected is not None and hmac.compare_digest(expected.secret.encode(), secret.encode())
        pid, uid = _peer(sock)
        if expected is None or not known or uid not in (os.getuid(), 0):
            return False
        if role == "log" and not expected.logged:
            expected.logged = True
            self._streams = {stream for stream in self._streams if stream.alive}
            self._streams.add(LogStream(sock, self._loop, expected.logs, expected.source, rest))
            return True
        if role != expected.role:
            return False
        self.forget(token)
        expected.on_link(Link(sock, self._loop, rest, gathering=True), pid)
        return True

    def done(self, dialling: _Dialling) -> None:
        self._dialling.discard(dialling)


class _Dialling:
    """A connection that has not yet said who it is."""

    def __init__(self, sock: socket.socket, loop: asyncio.AbstractEventLoop, listener: Listener) -> None:
        sock.setblocking(False)
        self._sock, self._loop, self._listener = sock, loop, listener
        self._data = b""
        self._timer = loop.call_later(HELLO_TIMEOUT_S, self.close)
        loop.add_reader(sock, self.read)

    def close(self) -> None:
        self._leave()
        self._sock.close()

    def _leave(self) -> None:
        self._timer.cancel()
        self._loop.remove_reader(self._sock)
        self._listener.done(self)

    def read(self) -> None:
        """Takes what has arrived; a whole HELLO decides."""
        try:
            data = self._sock.recv(MAX_HELLO_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._data += data
        if not data or len(self._data) > 2 * MAX_HELLO_BYTES:
            self.close()
        elif len(self._data) >= HEADER.size and len(self._data) >= (
            end := HEADER.size + HEADER.unpack_from(self._data)[0]
        ):
            self._leave()
            if not self._greet(self._data[:end], self._data[end:]):
                self._sock.close()

    def _greet(self, hello: bytes, rest: bytes) -> bool:
        with contextlib.suppress(LinkError, KeyError):
            frames = FrameReader(MAX_HELLO_BYTES).feed(hello)
            if len(frames) == 1 and frames[0].kind == FrameKind.HELLO:
                head = frames[0].json()
                return self._listener.hello(self._sock, str(head["token"]), str(head["role"]), rest)
        return False


def _peer(sock: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process at the other end, as the kernel knows them."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEERCRED.size)
    pid, uid, _ = PEERCRED.unpack(data)
    return pid, uid
