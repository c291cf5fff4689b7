"""The link: one connection between gateway and worker (or zygote), dialled from below, carrying frames.

A frame is `length u32 | head length u32 | kind u8 | channel u32` (little endian), then the head (a few bytes of
JSON or a packed struct) and the payload, which nobody on the way decodes. `length` counts head and payload.
A channel is one invocation on this link; 0 is the link itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

from ...errors import LinkError

HEADER = struct.Struct("<IIBI")
TIMING = struct.Struct("<ddHd")
MAX_FRAME_BYTES = 256 << 20
# Received into a buffer that is kept: asking recv for a new one of this size for each message costs the kernel's
# mapping, clearing and unmapping of its pages, which is half of the time of a short invocation.
RECEIVE_BYTES = 256 << 10
# Above this a payload is sent from where it lies; below, one copy is cheaper than a second system call.
JOIN_BYTES = 64 << 10


class FrameKind(enum.IntEnum):
    """What a frame says. Downwards is gateway to worker or zygote, upwards the other way."""

    HELLO = 1  # up: who dials in, and the token that proves it
    ACTIVATE = 2  # down: take the weights and become a worker
    READY = 3  # up: setup is done; grants a window
    FAILED = 4  # up: import, build or setup failed; the head is the error
    WINDOW = (
        5  # up: how many groups may be in flight on this link from now on, and how many invocations in one
    )
    INVOKE = 6  # down; as long as its head says `more`, those that follow are run together with it
    # 7 is free: a kind never changes its number.
    RESULT = 8  # up: the one answer of a channel
    CHUNK = 9  # up: one piece of a streamed answer
    END = 10  # up: a streamed answer is complete
    ERROR = 11  # up: a channel failed; the head is the error
    RETURNED = 12  # up: never started, take it back
    CANCEL = 13  # down: nobody waits for this channel any more
    MORE = 14  # down: the caller has read; so many more chunks may be sent
    DRAIN = 15  # both: finish what runs, take nothing new
    FORK = 16  # down, to a zygote
    BUILT = 17  # up, from a zygote: ready to fork; the head says what was built
    FORKED = 18  # up, from a zygote: the pid that a FORK became
    EXITED = 19  # up, from a zygote: a child ended
    PRIMED = 20  # up: a standby has done all it can ahead of time
    UNFORKED = 21  # up, from a zygote: a FORK that the system refused
    PROGRESS = 22  # up: how far a channel is; the payload is JSON, the latest counts


class Frame(NamedTuple):
    kind: int
    channel: int
    head: bytes
    payload: bytes

    def json(self) -> dict[str, Any]:
        """The head as JSON. Raises LinkError if the peer sent something else."""
        try:
            head = orjson.loads(self.head) if self.head else {}
        except orjson.JSONDecodeError:
            head = None
        if not isinstance(head, dict):
            name = {kind.value: kind.name for kind in FrameKind}.get(self.kind, self.kind)
            raise LinkError(f"A {name} frame's head is not a JSON object.")
        return head


class Timing(NamedTuple):
    """What a worker measured of one invocation: `batch` is how many ran in the same call of the handler."""

    wait_s: float
    exec_s: float
    batch: int = 1
    cost: float = 1.0

    def pack(self) -> bytes:
        return TIMING.pack(*self)

    @classmethod
    def unpack(cls, head: bytes) -> Timing:
        return cls(*TIMING.unpack(head)) if len(head) == TIMING.size else cls(0.0, 0.0)


def encode(kind: int, channel: int = 0, head: bytes = b"", payload: bytes = b"") -> bytes:
    """One frame as bytes."""
    return HEADER.pack(len(head) + len(payload), len(head), kind, channel) + head + payload


def encode_json(kind: int, channel: int, head: dict[str, Any], payload: bytes = b"") -> bytes:
    """One frame whose head is JSON."""
    return encode(kind, channel, orjson.dumps(head), payload)


class FrameReader:
    """Cuts a byte stream into frames, however it arrives."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max = max_bytes
        self._rest = bytearray()
        self._wanted = HEADER.size

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that `data` completes. Raises LinkError on a frame over the limit or an inconsistent header."""
        if self._rest:
            self._rest += data
            if len(self._rest) < self._wanted:
                return []
            data = bytes(self._rest)
            self._rest.clear()
        frames: list[Frame] = []
        position, size = 0, len(data)
        self._wanted = HEADER.size
        while size - position >= HEADER.size:
            length, head, kind, channel = HEADER.unpack_from(data, position)
            if length > self._max or head > length:
                raise LinkError(
                    f"A frame claims {length} bytes with a head of {head}; the limit is {self._max}."
                )
            start = position + HEADER.size
            if start + length > size:
                self._wanted = HEADER.size + length
                break
            position = start + length
            frames.append(Frame(kind, channel, data[start : start + head], data[start + head : position]))
        if position < size:
            self._rest += data[position:]
        return frames


@dataclass(frozen=True, slots=True)
class Address:
    """Where a gateway listens for links: a path, or a host and port."""

    path: str = ""
    host: str = ""
    port: int = 0

    def __str__(self) -> str:
        return f"unix:{self.path}" if self.path else f"tcp:{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Address:
        scheme, _, rest = text.partition(":")
        if scheme == "unix" and rest:
            return cls(path=rest)
        host, _, port = rest.rpartition(":")
        if scheme != "tcp" or not host or not port.isdecimal() or not port.isascii():
            raise LinkError(f"{text!r} is not an address.", remedy="Write unix:/path or tcp:host:port.")
        return cls(host=host, port=int(port))

    def dial(self, timeout_s: float) -> socket.socket:
        """A connected, blocking socket. Raises LinkError."""
        try:
            sock = self._connect(timeout_s)
        except OSError as error:
            raise LinkError(f"Cannot reach the gateway at {self}: {error}.") from error
        sock.settimeout(None)
        return sock

    def _connect(self, timeout_s: float) -> socket.socket:
        if not self.path:
            sock = socket.create_connection((self.host, self.port), timeout_s)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(timeout_s)
        try:
            sock.connect(self.path)
        except OSError:
            sock.close()
            raise
        return sock


class BlockingLink:
    """A link without an event loop: for zygotes, which must stay single-threaded and simple."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._reader = FrameReader()

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, kind: FrameKind, head: dict[str, Any] | None = None) -> None:
        self.sock.sendall(encode_json(kind, 0, head or {}))

    def receive(self) -> list[Frame] | None:
        """The frames of one read, which may be none; None once the gateway has gone."""
        try:
            data = self.sock.recv(RECEIVE_BYTES)
        except ConnectionError:
            data = b""
        return self._reader.feed(data) if data else None

    def close(self) -> None:
        self.sock.close()


class Link:
    """A link on an event loop: frames arrive by callback, and any thread may send.

    A send tries the socket at once, so that what was sent before a crash is in the kernel's hands and arrives;
    only what the socket does not take is kept and flushed by the loop. A `gathering` link (the gateway's, which only
    its loop uses) instead sends what one turn of the loop has written in one system call.
    """

    def __init__(
        self,
        sock: socket.socket,
        loop: asyncio.AbstractEventLoop,
        begun: bytes = b"",
        *,
        gathering: bool = False,
    ) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._loop = loop
        self._reader = FrameReader()
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))
        self._begun = begun
        self._bound = False
        self._on_frame: Callable[[Frame], None] = _unbound
        self._on_close: Callable[[], None] = _unbound
        self._lock = threading.Lock()
        self._pending: deque[memoryview] = deque()
        self._gathering = gathering
        self._gathered: list[bytes] = []
        self.closed = False

    def bind(self, on_frame: Callable[[Frame], None], on_close: Callable[[], None]) -> None:
        """Gives the link to an owner, or to another. Nothing is read before there is one, so no frame is lost."""
        self._on_frame, self._on_close = on_frame, on_close
        if not self._bound:
            self._bound = True
            self._loop.add_reader(self.sock, self._readable)
            if self._begun:
                self._loop.call_soon(self._take_begun)

    def send(self, kind: int, channel: int = 0, head: bytes = b"", payload: bytes = b"") -> None:
        """Sends one frame; does nothing on a closed link (its owner hears of that by `on_close`)."""
        if len(payload) > JOIN_BYTES:
            header = HEADER.pack(len(head) + len(payload), len(head), kind, channel)
            self.send_encoded(header + head, payload)
        else:
            self.send_encoded(encode(kind, channel, head, payload))

    def send_json(self, kind: int, channel: int, head: dict[str, Any], payload: bytes = b"") -> None:
        self.send(kind, channel, orjson.dumps(head), payload)

    def send_encoded(self, *parts: bytes) -> None:
        """Sends encoded frames, in one piece as far as the socket takes them."""
        with self._lock:
            if self.closed:
                return
            if self._gathering:
                if not self._gathered:
                    self._loop.call_soon(self.flush)
                self._gathered += parts
                return
            for part in parts:
                self._write(part)

    def finish(self, timeout_s: float) -> None:
        """Sends what is left, blocking for at most `timeout_s`, and closes: the last act of a worker."""
        if self.closed:
            return
        self._loop.remove_reader(self.sock)
        self._loop.remove_writer(self.sock)
        with self._lock, contextlib.suppress(OSError):
            self._write_gathered()
            self.sock.settimeout(timeout_s)
            while self._pending:
                self.sock.sendall(self._pending.popleft())
        self.close()

    def close(self) -> None:
        """Closes without telling the owner. Loop thread only."""
        with self._lock:
            if self.closed:
                return
            self._write_gathered()
            self.closed = True
            self._buffer = memoryview(bytearray())  # whoever still holds the link should not hold that
            self._pending.clear()
        self._loop.remove_reader(self.sock)
        self._loop.remove_writer(self.sock)
        self.sock.close()

    def flush(self) -> None:
        """Sends what was gathered, now."""
        with self._lock:
            if not self.closed:
                self._write_gathered()

    def _write_gathered(self) -> None:
        gathered, self._gathered = self._gathered, []
        small = b"".join(gathered) if sum(map(len, gathered)) <= JOIN_BYTES else b""
        for part in [small] if small else gathered:
            self._write(part)

    def _write(self, data: bytes) -> None:
        if self._pending:
            self._pending.append(memoryview(data))
            return
        try:
            sent = self.sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # the reading side sees the end of the connection and tells the owner
        if sent < len(data):
            self._pending.append(memoryview(data)[sent:])
            self._loop.call_soon_threadsafe(self._watch_writable)

    def _watch_writable(self) -> None:
        if not self.closed and self._pending:
            self._loop.add_writer(self.sock, self._writable)

    def _writable(self) -> None:
        with self._lock:
            try:
                while self._pending:
                    sent = self.sock.send(self._pending[0])
                    if sent < len(self._pending[0]):
                        self._pending[0] = self._pending[0][sent:]
                        return
                    self._pending.popleft()
            except BlockingIOError:
                return
            except OSError:
                self._pending.clear()
        self._loop.remove_writer(self.sock)

    def _take_begun(self) -> None:
        begun, self._begun = self._begun, b""
        if begun and not self.closed:
            self.feed(begun)

    def _readable(self) -> None:
        if self._begun:
            self._take_begun()
        if self.closed:
            return
        try:
            size = self.sock.recv_into(self._buffer)
        except BlockingIOError:
            return
        except OSError:
            size = 0
        if not size:
            self._lost()
            return
        self.feed(bytes(self._buffer[:size]))

    def feed(self, data: bytes) -> None:
        """Takes bytes as if they had just been received."""
        try:
            for frame in self._reader.feed(data):
                if self.closed:
                    return
                self._on_frame(frame)
        except LinkError:  # the reader's, or the owner's on a head that it cannot read
            self._lost()

    def _lost(self) -> None:
        if not self.closed:
            self.close()
            self._on_close()


def _unbound(*_frame: Frame) -> None:
    raise LinkError("A link without an owner was read.")
