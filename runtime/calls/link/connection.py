"""Implements both ends of a link: `BlockingLink` for zygotes, `Link` for the gateway and for workers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import orjson

from ....errors import LinkError
from .frames import HEADER, MAX_HEAD_BYTES, Frame, FrameKind, FrameReader, encode, encode_json
from .poll_loop import LinkLoop

LOG = logging.getLogger(__name__)
# The size of the receive buffer. With a new buffer for each recv, the kernel would map, clear and unmap its pages
# each time, which takes half of the time of a short invocation.
RECEIVE_BYTES = 256 << 10
# Up to this size, the parts of a message are copied into one buffer and sent in one system call. Larger parts
# are sent in separate system calls, because a copy would then take longer than a second system call.
JOIN_BYTES = 64 << 10
# The seconds and microseconds of a `struct timeval`.
_TIMEVAL = struct.Struct("ll")


def dial(path: str, timeout_s: float) -> socket.socket:
    """Return a blocking socket that is connected to the gateway at `path`. Raise LinkError.

    While the gateway's backlog is full, wait, up to `timeout_s`. Only the kernel can wait: with Python's own timeout, the
    socket is non-blocking, and `connect` fails at once with EAGAIN.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(*_timeval(timeout_s)))
        sock.connect(path)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(0, 0))
    except OSError as error:
        sock.close()
        late = f"it accepted no connection within {timeout_s:g} s"
        reason = late if isinstance(error, BlockingIOError) else error
        raise LinkError(f"Cannot reach the gateway at {path}: {reason}.") from error
    return sock


def _timeval(seconds: float) -> tuple[int, int]:
    return divmod(max(1, round(seconds * 1e6)), 1_000_000)


class BlockingLink:
    """A link without an event loop, for zygotes, which must stay single-threaded."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._reader = FrameReader()

    def send(self, kind: FrameKind, head: dict[str, Any] | None = None) -> None:
        self.sock.sendall(encode_json(kind, 0, head or {}))

    def receive_one(self) -> Frame | None:
        """Read one frame, and no bytes after it. Return None if the gateway closed the link."""
        with contextlib.suppress(ConnectionError):
            while data := self.sock.recv(self._reader.missing):
                if frames := self._reader.feed(data):
                    return frames[0]
        return None

    def receive(self) -> list[Frame] | None:
        """Read once and return the complete frames. Return None if the gateway closed the link."""
        try:
            data = self.sock.recv(RECEIVE_BYTES)
        except ConnectionError:
            data = b""
        return self._reader.feed(data) if data else None


class _Received(threading.local):
    """The receive buffer of a thread. All links of the thread can share it, because each link copies the received bytes at once."""

    def __init__(self) -> None:
        # A `bytearray` would write to all of its pages at once.
        self.buffer = memoryview(mmap.mmap(-1, RECEIVE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


_received = _Received()


class Link:
    """A link on an event loop. It passes received frames to a callback, and any thread may send.

    A send writes to the socket immediately, so that frames that were sent before a crash arrive. The loop sends later
    what the socket did not accept. With `join_writes`, all frames that are sent in one iteration of the loop are
    collected and written together, and only the loop's thread may send. The gateway uses `join_writes`.
    """

    def __init__(
        self, sock: socket.socket | None, *, join_writes: bool = False, loop: LinkLoop | None = None
    ) -> None:
        """`loop` is the loop that the link uses; by default, the running loop of asyncio. A link without a socket needs `connect`."""
        if sock is not None:
            self.connect(sock)
        self.closed = False
        self._loop: LinkLoop = loop or asyncio.get_running_loop()
        self._reader = FrameReader(max_head_bytes=MAX_HEAD_BYTES) if join_writes else FrameReader()
        self._lock = threading.Lock()
        self._unsent: deque[memoryview] = deque()
        self._join_writes = join_writes
        self._joined: list[bytes] = []
        self._bound = self._peer_ended = False

    def connect(self, sock: socket.socket) -> None:
        """Set the link's socket."""
        sock.setblocking(False)
        self.sock = sock

    def bind(self, on_frame: Callable[[Frame], None], on_close: Callable[[], None]) -> None:
        """Set or replace the owner's callbacks. Reading begins with the first `bind`, so no frame is lost.

        The link calls `on_frame` with each frame, and `on_close` when the other end closes the link or a frame is
        invalid.
        """
        self._on_frame, self._on_close = on_frame, on_close
        self._bound = True
        if not self.closed:
            self._loop.add_reader(self.sock, self._receive)
        if self._peer_ended:
            self._loop.call_soon(self._receive_rest)

    def send(self, kind: int, channel: int = 0, head: bytes = b"", payload: bytes = b"") -> None:
        """Send one frame. Do nothing if the link is closed."""
        if len(payload) > JOIN_BYTES:
            header = HEADER.pack(len(head) + len(payload), len(head), kind, channel)
            self.send_encoded(header + head, payload)
        else:
            self.send_encoded(encode(kind, channel, head, payload))

    def send_json(self, kind: int, channel: int, head: dict[str, Any], payload: bytes = b"") -> None:
        self.send(kind, channel, orjson.dumps(head), payload)

    def send_encoded(self, *parts: bytes) -> None:
        """Send encoded frames, or the consecutive parts of one frame. Do nothing if the link is closed."""
        with self._lock:
            if self.closed:
                return
            if self._join_writes:
                if not self._joined:
                    self._loop.call_soon(self.flush)
                self._joined += parts
                return
            for part in parts:
                self._write(part)

    def finish(self, timeout_s: float) -> None:
        """Send all unsent data, in at most `timeout_s` per part, and close. This blocks, so it is used at exit only."""
        with self._lock, contextlib.suppress(OSError):
            self._write_joined()
            self.sock.settimeout(timeout_s)
            while self._unsent:
                self.sock.sendall(self._unsent.popleft())
        self.close()

    def close(self) -> None:
        """Close without calling `on_close`. Call it on the event loop's thread only."""
        with self._lock:
            if self.closed:
                return
            self._write_joined()
            self.closed = True
            self._unsent.clear()
        self._loop.remove_reader(self.sock)
        self._loop.remove_writer(self.sock)
        self.sock.close()

    def close_in_fork(self) -> None:
        """Close the copy of the link in a fork of this process, where no loop runs. Sends do nothing from then on."""
        # Replace the lock, because another thread may have held it at the fork.
        self._lock, self.closed = threading.Lock(), True
        self.sock.close()

    def drain(self) -> None:
        """Receive all that is left, and close. Call this on a bound link whose process at the other end has ended."""
        self._receive_rest()
        self.close()

    def note_peer_ended(self) -> None:
        """Record that the process at the other end has ended. Then receive all that is left, up to the end of the link.

        uvloop's report is not enough: if that process has not read everything, its end resets the socket, and uvloop reports
        a reset socket only once. If frames are received at this report, no report follows for the end of the link.
        """
        self._peer_ended = True
        if self._bound:
            self._loop.call_soon(self._receive_rest)

    def flush(self) -> None:
        """Write the collected frames now, without waiting for the loop's next iteration."""
        with self._lock:
            if not self.closed:
                self._write_joined()

    def _write_joined(self) -> None:
        parts, self._joined = self._joined, []
        small = b"".join(parts) if sum(map(len, parts)) <= JOIN_BYTES else b""
        for part in [small] if small else parts:
            self._write(part)

    def _write(self, data: bytes) -> None:
        if self._unsent:
            self._unsent.append(memoryview(data))
            return
        try:
            sent = self.sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            # The connection is broken. `_receive` finds this out and calls `on_close`.
            return
        if sent < len(data):
            self._unsent.append(memoryview(data)[sent:])
            self._loop.call_soon_threadsafe(self._watch_writable)

    def _watch_writable(self) -> None:
        if not self.closed and self._unsent:
            self._loop.add_writer(self.sock, self._writable)

    def _writable(self) -> None:
        with self._lock:
            try:
                while self._unsent:
                    sent = self.sock.send(self._unsent[0])
                    if sent < len(self._unsent[0]):
                        self._unsent[0] = self._unsent[0][sent:]
                        return
                    self._unsent.popleft()
            except BlockingIOError:
                return
            except OSError:
                self._unsent.clear()
        self._loop.remove_writer(self.sock)

    def _receive_rest(self) -> None:
        while not self.closed and self._receive():
            pass

    def _receive(self) -> bool:
        """Receive once, and pass the complete frames on. Return False if nothing had arrived."""
        buffer = _received.buffer
        try:
            size = self.sock.recv_into(buffer)
        except BlockingIOError:
            return False
        except OSError:
            size = 0
        if not size:
            self._lost()
            return True
        try:
            for frame in self._reader.feed(bytes(buffer[:size])):
                if self.closed:
                    return True
                self._on_frame(frame)
            self._reader.check()
        except Exception:
            # A frame is malformed, or the owner's callback failed. End the link, so that the owner treats everything
            # that is open as lost. Otherwise the lost frame would go unnoticed.
            LOG.exception("a link is closed, because a frame could not be taken")
            self._lost()
        return True

    def _lost(self) -> None:
        if not self.closed:
            self.close()
            self._on_close()
