"""Tells followers, over a unix socket, which chunks of a snapshot have landed in the process that fetches it.

The socket keeps the boundaries of messages (SOCK_SEQPACKET). A message of the fetching process is LANDED and chunk
numbers of four bytes. The first messages are about the chunks that have landed already. The last message is ENDED and a
JSON object: the error's wire form, or `{}` if the snapshot is published. A message of a follower has the numbers of
the first and the last chunk that the follower waits for. If a connection closes without ENDED, the fetching process died or was cancelled, and any
follower may take over the fetch. The bytes of chunks are not sent, because both processes use the same files.
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

from ...errors import CacheError, LinkError, PilotflameError
from ..fetching.arrival import Arrival

SOCKET_NAME = "socket"
LANDED, ENDED = b"L", b"E"
END_TIMEOUT_S = 5.0
"""How long the fetching process waits for followers to read the last messages. A follower that does not read them, such
as a stopped process, later sees in the files that the fetch has ended."""
_NUMBERS_PER_MESSAGE = 8192
_MESSAGE_BYTES = 64 << 10
_DEMAND = struct.Struct("!II")
_BACKLOG = 128
MAX_FOLLOWERS = 256
"""How many processes may follow one fetch. Without a limit, a handler in a container could connect any number of times."""
ACCEPT_RETRY_S = 1.0
"""The pause after a connection could not be accepted because descriptors ran out. No event says when one is free."""
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Feed:
    """The sending side, in the process that holds the fetch lock. The constructor starts the thread that accepts followers."""

    def __init__(self, folder: int, arrival: Arrival) -> None:
        """`folder` is a descriptor, since the path of the folder may be too long for a socket's address."""
        self._folder, self._arrival = folder, arrival
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
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
        self._accept_at_s = 0.0
        """When connections are accepted again after a pause. 0 if there is no pause."""
        self._followers: dict[socket.socket, int] = {}
        """For each follower, how many entries of `_landed` were sent to it."""
        arrival.on_land(self._on_land)
        self._thread = threading.Thread(target=self._run, name="snapshot-feed", daemon=True)
        self._thread.start()

    def close(self, error: PilotflameError | None = None, *, dropped: bool = False) -> None:
        """Send the followers `error`, or that the snapshot is published if `error` is None. Then end the thread and
        close the connections.

        With `dropped`, close the connections without such a message, so that a follower takes over the fetch.
        """
        _unlink_socket(self._folder)
        self._end = b"" if dropped else ENDED + _wire(error)
        self._wake()
        self._thread.join()
        for end in (self._listener, self._awake, self._waker):
            end.close()

    def _on_land(self, chunk: int) -> None:
        # No lock is needed, because appending to a list and slicing it are atomic, and this list only grows.
        self._landed.append(chunk)
        if self._end is None:
            self._wake()

    def _wake(self) -> None:
        # Ignore errors. If the socket is full, the thread will wake because of earlier bytes. If the socket is closed, the
        # thread has ended.
        with suppress(OSError):
            self._waker.send(b"!")

    def _run(self) -> None:
        with self._selector as selector:
            while self._end is None:
                for key, events in selector.select(self._resume()):
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
        try:
            follower = self._listener.accept()[0]
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:
            # Descriptors have run out. The listener stays readable, so unregister it, or the thread would never sleep.
            self._selector.unregister(self._listener)
            self._accept_at_s = time.monotonic() + ACCEPT_RETRY_S
            return
        follower.setblocking(False)
        if len(self._followers) >= MAX_FOLLOWERS:
            # Send an end. Without an end, the process would try to take over the fetch again and again.
            with follower, suppress(OSError):
                follower.send(ENDED + _wire(_too_many()))
            return
        self._followers[follower] = 0
        self._selector.register(follower, _READ, follower)

    def _resume(self) -> float | None:
        """Accept connections again if the pause is over. Return the rest of the pause. None if there is no pause."""
        if not self._accept_at_s:
            return None
        left_s = self._accept_at_s - time.monotonic()
        if left_s > 0:
            return left_s
        self._accept_at_s = 0.0
        self._selector.register(self._listener, _READ)
        return None

    def _read_demand(self, follower: socket.socket) -> None:
        demand = b""
        with suppress(OSError):
            demand = follower.recv(_DEMAND.size)
        if len(demand) < _DEMAND.size:
            self._drop(follower)
            return
        first, last = _DEMAND.unpack(demand)
        if first <= last < self._arrival.count:
            self._arrival.demand(first, last)

    def _send_pending(self, follower: socket.socket) -> None:
        """Send the follower the numbers of newly landed chunks, until its socket is full."""
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
        """Accept the followers that still wait. Send the last chunks and the end to all followers, and close them."""
        with suppress(OSError):
            while len(self._followers) < MAX_FOLLOWERS:
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
    """The receiving side, in a follower. The constructor connects it."""

    def __init__(self, folder: int) -> None:
        """Connect to the Feed of a folder. Raise ConnectionError or FileNotFoundError if the folder has no feed."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.connect(_address(folder))
        except OSError:
            self._socket.close()
            raise

    def run(self, arrival: Arrival) -> bool:
        """Record in `arrival` the chunks that have landed, until the fetch ends.

        Return True if the snapshot is published, and False if the connection closed without ENDED. Raise the error
        of the fetch, or LinkError for a malformed message.
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
        """Ask the fetching process to fetch chunks `first` to `last` next. Do nothing if the socket is full or closed."""
        with suppress(OSError):
            self._socket.send(_DEMAND.pack(first, last), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def cancel(self) -> None:
        """Make `run` return False. Any thread may call this."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


def _too_many() -> CacheError:
    fault = f"{MAX_FOLLOWERS} processes follow the fetch of this snapshot already."
    return CacheError(fault, remedy="Try again when it is done, or let fewer processes follow it.")


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
    """Return the numbers in a LANDED message. Raise LinkError if it is malformed or a number is >= `count`."""
    body = message[1:]
    if message[:1] != LANDED or len(body) % 4:
        raise LinkError("The process that fetches the snapshot sent a malformed message.")
    numbers = struct.unpack(f"!{len(body) // 4}I", body)
    if any(number >= count for number in numbers):
        raise LinkError("The process that fetches the snapshot announced a chunk that it does not have.")
    return numbers
