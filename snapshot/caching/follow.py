"""Following: the process that fetches a snapshot tells the others, over a unix socket, which chunks have landed.

Messages (SOCK_SEQPACKET: whole or not at all). From the fetching process: LANDED and chunk numbers, four bytes each, first
those that are there already; at the end, ENDED and a JSON object, the error's wire form or `{}` when all is published.
From a follower: the first and the last chunk that somebody waits for. Who drops the connection without ENDED has died or
was cancelled: the fetch is anybody's. The bytes themselves are in the files, which both have mapped.
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
from dataclasses import dataclass

from ...errors import LinkError, PilotflameError
from ..fetching.arrival import Arrival

SOCKET_NAME = "socket"
LANDED, ENDED = b"L", b"E"
END_TIMEOUT_S = 5.0
"""How long a follower may take to read the end. One that is stopped finds out later, from the files."""
_NUMBERS_PER_MESSAGE = 8192
_MESSAGE_BYTES = 64 << 10
_DEMAND = struct.Struct("!II")
_BACKLOG = 128


@dataclass(slots=True, eq=False)
class _Follower:
    socket: socket.socket
    told: int = 0
    """How many of the news it has heard."""


class Feed:
    """The telling side, in the process that holds the fetch lock; listening once it is constructed."""

    def __init__(self, folder: int, arrival: Arrival) -> None:
        """`folder` is an open folder: its socket is bound through that, as a path may be too long for an address."""
        self._folder, self._arrival = folder, arrival
        self._listener = _socket()
        try:
            _unlink_socket(folder)
            self._listener.bind(_address(folder))
            self._listener.listen(_BACKLOG)
        except OSError:
            self._listener.close()
            raise
        self._lock = threading.Lock()
        self._news: list[int] = []
        self._end: bytes | None = None
        self._awake, self._waker = socket.socketpair()
        for end in (self._listener, self._awake, self._waker):
            end.setblocking(False)
        self._followers: list[_Follower] = []
        arrival.on_land(self._landed)
        self._thread = threading.Thread(target=self._run, name="snapshot-feed", daemon=True)
        self._thread.start()

    def close(self, error: PilotflameError | None = None, *, dropped: bool = False) -> None:
        """End: all is published, or `error` happened; with `dropped`, somebody else may go on."""
        _unlink_socket(self._folder)
        self._end = b"" if dropped else ENDED + _wire(error)
        self._wake()
        self._thread.join()
        for end in (self._listener, self._awake, self._waker):
            end.close()

    def _landed(self, chunk: int) -> None:
        with self._lock:
            self._news.append(chunk)
        if self._end is None:
            self._wake()

    def _wake(self) -> None:
        with suppress(BlockingIOError, OSError):  # full: it is awake; closed: it is over
            self._waker.send(b"!")

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._awake, selectors.EVENT_READ)
            while self._end is None:
                for key, events in selector.select():
                    self._serve(selector, key.fileobj, key.data, events)
                for follower in list(self._followers):
                    self._tell(selector, follower)
        self._say_goodbye()

    def _serve(
        self, selector: selectors.BaseSelector, ready: object, peer: _Follower | None, events: int
    ) -> None:
        if ready is self._awake:
            with suppress(BlockingIOError):
                while self._awake.recv(4096):
                    pass
        elif ready is self._listener:
            with suppress(
                OSError
            ):  # out of descriptors too: who is not let in hears that from the closed end
                follower = _Follower(self._listener.accept()[0])
                follower.socket.setblocking(False)
                self._followers.append(follower)
                selector.register(follower.socket, selectors.EVENT_READ, follower)
        elif peer is not None and events & selectors.EVENT_READ:
            self._hear(selector, peer)

    def _hear(self, selector: selectors.BaseSelector, follower: _Follower) -> None:
        try:
            demand = follower.socket.recv(_DEMAND.size)
        except BlockingIOError:
            return
        except OSError:
            demand = b""
        if len(demand) < _DEMAND.size:
            self._drop(selector, follower)
            return
        first, last = _DEMAND.unpack(demand)
        if first <= last < self._arrival.count:
            self._arrival.demand(first, last)

    def _tell(self, selector: selectors.BaseSelector, follower: _Follower) -> None:
        """All news that the follower's socket takes now; the rest when it is writable."""
        if follower not in self._followers:
            return
        try:
            self._send_news(follower)
        except BlockingIOError:
            selector.modify(follower.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, follower)
        except OSError:
            self._drop(selector, follower)
        else:
            selector.modify(follower.socket, selectors.EVENT_READ, follower)

    def _send_news(self, follower: _Follower) -> None:
        while True:
            with self._lock:
                news = self._news[follower.told : follower.told + _NUMBERS_PER_MESSAGE]
            if not news:
                return
            follower.socket.send(LANDED + struct.pack(f"!{len(news)}I", *news))
            follower.told += len(news)

    def _drop(self, selector: selectors.BaseSelector, follower: _Follower) -> None:
        selector.unregister(follower.socket)
        follower.socket.close()
        self._followers.remove(follower)

    def _say_goodbye(self) -> None:
        """The last news and the end, to those too who knocked and were not let in yet."""
        with suppress(OSError):
            while True:
                self._followers.append(_Follower(self._listener.accept()[0]))
        deadline_s = time.monotonic() + END_TIMEOUT_S
        for follower in self._followers:
            follower.socket.settimeout(max(0.001, deadline_s - time.monotonic()))
            with suppress(OSError):
                if self._end:
                    self._send_news(follower)
                    follower.socket.send(self._end)
            follower.socket.close()


class Following:
    """The hearing side; connected once it is constructed."""

    def __init__(self, folder: int) -> None:
        """ConnectionError or FileNotFoundError if nobody tells."""
        self._socket = _socket()
        try:
            self._socket.connect(_address(folder))
        except OSError:
            self._socket.close()
            raise

    def run(self, arrival: Arrival) -> bool:
        """Land what is told until the end. True: all is published; False: dropped. Raises what made the fetch fail."""
        try:
            while message := self._receive():
                if message[:1] == ENDED:
                    _raise_wire(message[1:])
                    arrival.land_all()
                    return True
                for chunk in _numbers(message, arrival.count):
                    arrival.land(chunk)
        finally:
            self.close()
        return False

    def demand(self, first: int, last: int) -> None:
        """Tell the fetching process what is waited for; a hint, dropped if it cannot be sent at once."""
        with suppress(OSError):
            self._socket.send(_DEMAND.pack(first, last), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def cancel(self) -> None:
        """End `run` in another thread, as if the connection had been dropped."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _receive(self) -> bytes:
        try:
            return self._socket.recv(_MESSAGE_BYTES)
        except ConnectionError:
            return b""


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _address(folder: int) -> str:
    return f"/proc/self/fd/{folder}/{SOCKET_NAME}"


def _unlink_socket(folder: int) -> None:
    with suppress(FileNotFoundError):
        os.unlink(SOCKET_NAME, dir_fd=folder)


def _wire(error: PilotflameError | None) -> bytes:
    wire = {} if error is None else error.to_wire()
    text = json.dumps(wire).encode()
    if len(text) < _MESSAGE_BYTES:
        return text
    return json.dumps({**wire, "message": str(wire["message"])[:4096], "details": {}}).encode()


def _raise_wire(text: bytes) -> None:
    wire = json.loads(text)
    if wire:
        raise PilotflameError.from_wire(wire)


def _numbers(message: bytes, count: int) -> tuple[int, ...]:
    body = message[1:]
    if message[:1] != LANDED or len(body) % 4:
        raise LinkError("The process that fetches the snapshot does not speak our language.")
    numbers = struct.unpack(f"!{len(body) // 4}I", body)
    if any(number >= count for number in numbers):
        raise LinkError("The process that fetches the snapshot tells of chunks that it does not have.")
    return numbers
