"""Serves files and their ranges over HTTP/1.1, with the faults that a test or a benchmark asks for."""

from __future__ import annotations

import asyncio
import os
import random
import re
import socket
import ssl
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import BinaryIO
from urllib.parse import unquote
from weakref import WeakSet

PIECE_BYTES = 256 << 10
_RANGE = re.compile(r"bytes=(\d+)-(\d*)", re.ASCII)
_HEAD_BYTES = 64 << 10


@dataclass(frozen=True)
class Faults:
    """The faults of one response. Shares are probabilities from 0 to 1, drawn anew for each repetition of a range; the draw
    depends on seed, name, range and repetition alone, not on the order of requests."""

    times: int | None = None
    """The faults with a share apply to the first `times` requests for a range; None: to all requests."""
    stall_share: float = 0.0
    stall_s: float = 2.0
    stall_at: int | None = None
    """The number of body bytes before the stall; None: before the head."""
    short_share: float = 0.0
    """The connection closes in the middle of the body."""
    reset_share: float = 0.0
    """The connection is reset in the middle of the body."""
    busy_share: float = 0.0
    busy_status: int = 503
    retry_after: str | None = None
    wrong_range_share: float = 0.0
    """The answer has the bytes and the Content-Range of another range."""
    duplicate_share: float = 0.0
    """The whole answer is sent twice."""
    late_share: float = 0.0
    """The whole answer is sent again when the next request arrives on the same connection."""
    flip_share: float = 0.0
    """One bit of the body is flipped."""

    latency_s: float = 0.0
    """The delay before the first byte of every answer."""
    bytes_per_s: float | None = None
    """The rate of each connection."""
    changed_from: int | None = None
    """From this request on (counted from 0), objects have another ETag."""
    etag: str | None = "strong"
    """The kind of ETag: "strong", "weak", or None for answers that have only a Last-Modified."""
    ranges: bool = True
    range_said: bool = True
    """Partial answers have a Content-Range."""
    chunked: bool = False
    close_each: bool = False
    """The connection is closed after each answer; a header says so if `close_said`."""
    close_said: bool = True
    redirect: str | None = None
    """Everything is redirected to this URL, with the path after it if it ends in /."""
    redirect_status: int = 302
    status: int | None = None
    """Everything is answered with this status, `body` and `headers`."""
    body: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Request:
    """One request, as the log keeps it. `sent` grows as the body goes out."""

    number: int
    name: str
    begin: int
    end: int
    # How often this range was requested before.
    repetition: int
    when_s: float
    connection: int
    headers: Mapping[str, str]
    target: str
    sent: int = 0


class _Throttle:
    """Limits the bytes per second."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_s = 0.0

    async def take(self, count: int) -> None:
        if self.bytes_per_s is None:
            return
        now_s = time.monotonic()
        self._free_s = max(now_s, self._free_s) + count / self.bytes_per_s
        await asyncio.sleep(self._free_s - now_s)


class _HangUp(Exception):
    """Raised to close the connection at once."""


class FaultServer:
    """Serves a folder, or named bytes, on 127.0.0.1 from a thread of its own: `with FaultServer(folder) as server`.

    `faults` may be set at any time, and may be a function of the request. Entries may be added to `content`.
    """

    def __init__(
        self,
        content: Path | Mapping[str, bytes],
        faults: Faults | Callable[[Request], Faults] = Faults(),
        *,
        seed: int = 0,
        total_bytes_per_s: float | None = None,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self.content = content
        self.faults = faults
        self.requests: list[Request] = []
        self.connections = 0
        self._seed = seed
        self._total = _Throttle(total_bytes_per_s)
        self._tls = ssl_context
        self._asked: Counter[tuple[str, int, int]] = Counter()
        # By connection: the answer that is to be sent again.
        self._late: dict[int, _Answer] = {}
        self._talks: set[asyncio.Task[None]] = set()
        self._transports: WeakSet[asyncio.WriteTransport] = WeakSet()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port = self._listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="fault server")
        self._stop = asyncio.Event()

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    def __enter__(self) -> FaultServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(
            self._greet, sock=self._listener, ssl=self._tls, limit=_HEAD_BYTES
        )
        await self._stop.wait()
        for _ in range(10):
            # Let connections that are just being accepted start their tasks, which are cancelled below. If
            # the server closed before, it would drop their sockets without closing them (CPython 109564).
            await asyncio.sleep(0)
        server.close()
        for talk in list(self._talks):
            talk.cancel()
        await asyncio.gather(*self._talks, return_exceptions=True)
        for transport in list(self._transports):
            # Abort also closing transports: they would wait until the peer has read all that is unsent.
            transport.abort()
        # Transports close in the next iteration of the loop.
        await asyncio.sleep(0)

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talk = asyncio.current_task()
        assert talk is not None
        self._talks.add(talk)
        self._transports.add(writer.transport)
        connection, self.connections = self.connections, self.connections + 1
        throttle = _Throttle(None)
        try:
            while await self._answer_one(reader, writer, connection, throttle):
                pass
        except (
            _HangUp,
            OSError,
            asyncio.IncompleteReadError,
            asyncio.LimitOverrunError,
            asyncio.CancelledError,
        ):
            # The peer or a fault has closed the connection, or the server stops.
            pass
        finally:
            self._talks.discard(talk)
            if not writer.transport.is_closing():
                writer.close()

    async def _answer_one(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: int, throttle: _Throttle
    ) -> bool:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, target, _ = lines[0].split(" ")
        headers = {
            name.lower(): value.strip() for name, _, value in (x.partition(":") for x in lines[1:] if x)
        }
        file = self.open(unquote(target.partition("?")[0]).lstrip("/"))
        size = os.fstat(file.fileno()).st_size if file else 0
        request = self._log(target, headers, size, connection)
        faults = self.faults(request) if callable(self.faults) else self.faults
        throttle.bytes_per_s = faults.bytes_per_s
        answer = _Answer(self, request, faults, writer, (throttle, self._total), method == "HEAD")
        if (late := self._late.pop(connection, None)) is not None:
            await late.again()
        try:
            await answer.give(file, size)
            if file is not None and answer.draws_late():
                self._late[connection] = answer
        finally:
            if file:
                file.close()
        await writer.drain()
        return not faults.close_each

    def _log(self, target: str, headers: Mapping[str, str], size: int, connection: int) -> Request:
        begin, end = 0, size
        if found := _RANGE.fullmatch(headers.get("range", "")):
            begin = int(found[1])
            end = min(size, int(found[2]) + 1) if found[2] else size
        name = unquote(target.partition("?")[0]).lstrip("/")
        repetition = self._asked[name, begin, end]
        self._asked[name, begin, end] += 1
        request = Request(
            len(self.requests), name, begin, end, repetition, time.monotonic(), connection, headers, target
        )
        self.requests.append(request)
        return request

    def open(self, name: str) -> BinaryIO | None:
        if isinstance(self.content, Path):
            path = self.content / name
            return path.open("rb") if path.is_file() else None
        if name not in self.content:
            return None
        file = os.fdopen(os.memfd_create("object"), "w+b", buffering=0)
        file.write(self.content[name])
        return file

    def draw(self, request: Request) -> random.Random:
        """Return the random numbers of this request, which are the same in every run."""
        return random.Random(
            f"{self._seed}/{request.name}/{request.begin}/{request.end}/{request.repetition}"
        )


class _Answer:
    """One answer, with its faults."""

    def __init__(
        self,
        server: FaultServer,
        request: Request,
        faults: Faults,
        writer: asyncio.StreamWriter,
        throttles: tuple[_Throttle, _Throttle],
        headless: bool,
    ) -> None:
        self._server = server
        self._request = request
        self._faults = faults
        self._writer = writer
        self._throttles = throttles
        self._bodiless = headless
        self._chance = server.draw(request)
        self._hit = faults.times is None or request.repetition < faults.times

    async def give(self, file: BinaryIO | None, size: int) -> None:
        faults, request = self._faults, self._request
        stalls = self._draws(faults.stall_share)
        await asyncio.sleep(faults.latency_s + (faults.stall_s if stalls and faults.stall_at is None else 0))
        if faults.redirect is not None:
            where = faults.redirect + (request.target.lstrip("/") if faults.redirect.endswith("/") else "")
            return self._plain(faults.redirect_status, {"Location": where})
        if faults.status is not None:
            return self._plain(faults.status, faults.headers, faults.body)
        if self._draws(faults.busy_share):
            late = {"Retry-After": faults.retry_after} if faults.retry_after else {}
            return self._plain(faults.busy_status, late, "busy")
        if file is None:
            return self._plain(404, {}, "no such object")
        version = self._version()
        if request.headers.get("if-match", version.get("ETag")) != version.get("ETag"):
            return self._plain(412, version)
        if "range" in request.headers and faults.ranges and request.begin >= size:
            return self._plain(416, {"Content-Range": f"bytes */{size}"})
        twice = self._draws(faults.duplicate_share)
        # Send the end of the first answer together with the beginning of the second. Otherwise the client
        # could send its next request before the second answer arrives. If both requests have the same range, it
        # could take the second answer for the answer to the next request.
        self._hold_end(hold=twice)
        for _ in range(2 if twice else 1):
            await self._object(file, size, version, faults.stall_at if stalls else None)
        self._hold_end(hold=False)
        return None

    def draws_late(self) -> bool:
        return self._draws(self._faults.late_share)

    async def again(self) -> None:
        file = self._server.open(self._request.name)
        assert file is not None
        with file:
            await self._object(file, os.fstat(file.fileno()).st_size, self._version(), None)
            await self._writer.drain()

    def _hold_end(self, *, hold: bool) -> None:
        sock = self._writer.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, int(hold))

    async def _object(
        self, file: BinaryIO, size: int, version: Mapping[str, str], stall_at: int | None
    ) -> None:
        faults, begin, end = self._faults, self._request.begin, self._request.end
        headers = {**version, **faults.headers}
        ranged = "range" in self._request.headers and faults.ranges
        if not ranged:
            begin, end = 0, size
        elif self._draws(faults.wrong_range_share):
            shift = -1 if begin else min(1, size - end)
            begin, end = begin + shift, end + shift
        if ranged and faults.range_said:
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
        headers |= (
            {"Transfer-Encoding": "chunked"} if faults.chunked else {"Content-Length": str(end - begin)}
        )
        self._head(206 if ranged else 200, headers)
        if self._bodiless:
            return
        short, reset = self._draws(faults.short_share), self._draws(faults.reset_share)
        flip_at = (
            self._chance.randrange(begin, end) if end > begin and self._draws(faults.flip_share) else None
        )
        broken_at = (begin + end) // 2 if short or reset else end
        stops = [begin + stall_at] if stall_at is not None and stall_at < broken_at - begin else []
        for stop in (*stops, broken_at):
            await self._send(file, begin, stop, flip_at)
            begin = stop
            if stop in stops:
                await asyncio.sleep(faults.stall_s)
        if short or reset:
            await self._hang_up(reset)
        if faults.chunked:
            self._writer.write(b"0\r\n\r\n")

    async def _send(self, file: BinaryIO, begin: int, end: int, flip_at: int | None) -> None:
        # sendfile can neither wait, nor change bytes, nor encrypt.
        secret = self._writer.get_extra_info("ssl_object") is not None
        paced = any(throttle.bytes_per_s is not None for throttle in self._throttles)
        changed = flip_at is not None or self._faults.chunked or secret
        if not paced and not changed and end - begin > PIECE_BYTES:
            await self._writer.drain()
            loop = asyncio.get_running_loop()
            self._request.sent += await loop.sendfile(self._writer.transport, file, begin, end - begin)
            return
        slowest = min(
            (throttle.bytes_per_s for throttle in self._throttles if throttle.bytes_per_s), default=0.0
        )
        piece_bytes = max(4096, min(PIECE_BYTES, int(slowest / 100))) if slowest else PIECE_BYTES
        for at in range(begin, end, piece_bytes):
            piece = bytearray(os.pread(file.fileno(), min(piece_bytes, end - at), at))
            if flip_at is not None and at <= flip_at < at + len(piece):
                piece[flip_at - at] ^= 1
            for throttle in self._throttles:
                await throttle.take(len(piece))
            self._writer.write(
                b"%x\r\n%b\r\n" % (len(piece), bytes(piece)) if self._faults.chunked else piece
            )
            if self._writer.transport.is_closing():
                # The peer has closed the connection, so nothing was sent.
                raise _HangUp
            self._request.sent += len(piece)
            await self._writer.drain()

    async def _hang_up(self, reset: bool) -> None:
        await self._writer.drain()
        if reset:
            linger = struct.pack("ii", 1, 0)
            self._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self._writer.transport.abort()
        raise _HangUp

    def _draws(self, share: float) -> bool:
        return self._hit and share > 0 and self._chance.random() < share

    def _version(self) -> dict[str, str]:
        faults = self._faults
        changed = faults.changed_from is not None and self._request.number >= faults.changed_from
        if faults.etag is None:
            return {"Last-Modified": f"Sat, 21 Nov 2026 12:00:0{int(changed)} GMT"}
        tag = f'"v{int(changed)}"'
        return {"ETag": f"W/{tag}" if faults.etag == "weak" else tag}

    def _head(self, status: int, headers: Mapping[str, str]) -> None:
        said = {"Connection": "close"} if self._faults.close_each and self._faults.close_said else {}
        lines = [f"HTTP/1.1 {status} -", *(f"{name}: {value}" for name, value in {**headers, **said}.items())]
        self._writer.write("\r\n".join([*lines, "", ""]).encode("latin-1"))

    def _plain(self, status: int, headers: Mapping[str, str], body: str = "") -> None:
        data = b"" if self._bodiless else body.encode()
        self._head(status, {"Content-Length": str(len(data)), **headers})
        self._writer.write(data)
