"""Following: the process that fetches a snapshot tells others, over a unix socket, which chunks have landed.

Messages are whole (SOCK_SEQPACKET). From the fetching process: LANDED and chunk numbers, four bytes each,
first those that have landed already; at the end, ENDED and a JSON object: the error's wire form, or `{}` when
all is published. From a follower: the first and the last chunk that it waits for. A connection that closes
without ENDED means that the fetching process died or was cancelled: any follower may take over. The bytes
themselves are in the files, which both have mapped.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import struct
import threading
import time
from contextlib import suppress

from ...errors import LinkError, PilotflameError
from ..fetching.arrival import Arrival

SOCKET_NAME = "socket"
LANDED, ENDED = b"L", b"E"
END_TIMEOUT_S = 5.0
"""How long followers may take to read the end. One that is stopped finds out later, from the files."""
_NUMBERS_PER_MESSAGE = 8192
_MESSAGE_BYTES = 64 << 10
_DEMAND = struct.Struct("!II")
_BACKLOG = 128
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Feed:
    """The sending side, in the process that holds the fetch lock. It listens once it is constructed."""

    def __init__(self, folder: int, arrival: Arrival) -> None:
        """`folder` is an open folder: a socket's address is too short for some paths."""
        self._folder, self._arrival = folder, arrival
        self._listener = _socket()
        try:
            _unlink_socket(folder)
            self._listener.bind(_address(folder))
            self._listener.listen(_BACKLOG)
        except OSError:
            self._listener.close()
            raise
        self._landed: list[int] = []
        self._end: bytes | None = None
        self._awake, self._waker = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for end in (self._listener, self._awake):
            end.setblocking(False)
            self._selector.register(end, _READ)
        self._waker.setblocking(False)
        self._followers: dict[socket.socket, int] = {}
        """How many of the landed chunks each follower was told."""
        arrival.on_land(self._on_land)
        self._thread = threading.Thread(target=self._run, name="snapshot-feed", daemon=True)
        self._thread.start()

    def close(self, error: PilotflameError | None = None, *, dropped: bool = False) -> None:
        """End: all is published, or `error` happened. With `dropped`, a follower may take over."""
        _unlink_socket(self._folder)
        self._end = b"" if dropped else ENDED + _wire(error)
        self._wake()
        self._thread.join()
        for end in (self._listener, self._awake, self._waker):
            end.close()

    def _on_land(self, chunk: int) -> None:
        # Appending to a list, and slicing it, are atomic.
        self._landed.append(chunk)
        if self._end is None:
            self._wake()

    def _wake(self) -> None:
        # A full socket will wake the thread anyway; a closed one means that it has ended.
        with suppress(OSError):
            self._waker.send(b"!")

    def _run(self) -> None:
        with self._selector as selector:
            while self._end is None:
                for key, events in selector.select():
                    if key.fileobj is self._awake:
                        self._awake.recv(4096)
                    elif key.fileobj is self._listener:
                        self._accept()
                    elif events & _READ:
                        self._read_demand(key.data)
                for follower in list(self._followers):
                    self._send_pending(follower)
        self._finish()

    def _accept(self) -> None:
        # Out of descriptors, a follower is not accepted; it learns the end from the closed connection.
        with suppress(OSError):
            follower = self._listener.accept()[0]
            follower.setblocking(False)
            self._followers[follower] = 0
            self._selector.register(follower, _READ, follower)

    def _read_demand(self, follower: socket.socket) -> None:
        try:
            demand = follower.recv(_DEMAND.size)
        except BlockingIOError:
            return
        except OSError:
            demand = b""
        if len(demand) < _DEMAND.size:
            self._drop(follower)
            return
        first, last = _DEMAND.unpack(demand)
        if first <= last < self._arrival.count:
            self._arrival.demand(first, last)

    def _send_pending(self, follower: socket.socket) -> None:
        """Send what the follower's socket takes now, and the rest when it is writable."""
        try:
            self._send_landed(follower)
            self._selector.modify(follower, _READ, follower)
        except BlockingIOError:
            self._selector.modify(follower, _READ | _WRITE, follower)
        except OSError:
            self._drop(follower)

    def _send_landed(self, follower: socket.socket) -> None:
        sent = self._followers[follower]
        while chunks := self._landed[sent : sent + _NUMBERS_PER_MESSAGE]:
            follower.send(LANDED + struct.pack(f"!{len(chunks)}I", *chunks))
            self._followers[follower] = sent = sent + len(chunks)

    def _drop(self, follower: socket.socket) -> None:
        self._selector.unregister(follower)
        del self._followers[follower]
        follower.close()

    def _finish(self) -> None:
        """Send the last chunks and the end, also to followers that are not accepted yet."""
        with suppress(OSError):
            while True:
                self._followers[self._listener.accept()[0]] = 0
        deadline_s = time.monotonic() + END_TIMEOUT_S
        for follower in self._followers:
            follower.settimeout(max(0.001, deadline_s - time.monotonic()))
            with suppress(OSError):
                if self._end:
                    self._send_landed(follower)
                    follower.send(self._end)
            follower.close()


class Following:
    """The receiving side. It is connected once it is constructed."""

    def __init__(self, folder: int) -> None:
        """Raise ConnectionError or FileNotFoundError if there is no feed in the open folder `folder`."""
        self._socket = _socket()
        try:
            self._socket.connect(_address(folder))
        except OSError:
            self._socket.close()
            raise

    def run(self, arrival: Arrival) -> bool:
        """Land chunks as they are announced. Return True if all is published, False if the feed was dropped.

        Raise the error that the fetch failed with.
        """
        try:
            while message := self._socket.recv(_MESSAGE_BYTES):
                if message[:1] == ENDED:
                    if wire := json.loads(message[1:]):
                        raise PilotflameError.from_wire(wire)
                    arrival.land_all()
                    return True
                for chunk in _numbers(message, arrival.count):
                    arrival.land(chunk)
        except ConnectionError:
            return False
        finally:
            self.close()
        return False

    def demand(self, first: int, last: int) -> None:
        """Tell the fetching process what is waited for: a hint, dropped if it cannot be sent at once."""
        with suppress(OSError):
            self._socket.send(_DEMAND.pack(first, last), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def cancel(self) -> None:
        """End `run` in another thread, as if the feed had been dropped."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _address(folder: int) -> str:
    return f"/proc/self/fd/{folder}/{SOCKET_NAME}"


def _unlink_socket(folder: int) -> None:
    with suppress(FileNotFoundError):
        os.unlink(SOCKET_NAME, dir_fd=folder)


def _wire(error: PilotflameError | None) -> bytes:
    wire = {} if error is None else error.to_wire()
    if len(text := json.dumps(wire).encode()) < _MESSAGE_BYTES:
        return text
    return json.dumps({**wire, "message": str(wire["message"])[:4096], "details": {}}).encode()


def _numbers(message: bytes, count: int) -> tuple[int, ...]:
    """The chunk numbers in a LANDED message; LinkError if it is malformed."""
    body = message[1:]
    if message[:1] != LANDED or len(body) % 4:
        raise LinkError("The process that fetches the snapshot sent a malformed message.")
    numbers = struct.unpack(f"!{len(body) // 4}I", body)
    if any(number >= count for number in numbers):
        raise LinkError("The process that fetches the snapshot announced a chunk that it does not have.")
    return numbers
