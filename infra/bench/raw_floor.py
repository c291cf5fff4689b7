"""The ceiling of a transfer: raw sockets, `recv_into` straight into memory, nothing verified, only a status line parsed."""

from __future__ import annotations

import mmap
import socket
import ssl
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

PART_BYTES = 16 << 20
CONNECTIONS = 8
_HEAD_BYTES = 16 << 10


@dataclass(frozen=True)
class Job:
    """One object to fetch, and how."""

    host: str
    port: int
    path: str
    size_bytes: int
    connections: int = CONNECTIONS
    part_bytes: int = PART_BYTES
    authority: str = ""
    """The certificate to trust, for TLS."""

    @property
    def url(self) -> str:
        return f"{'https' if self.authority else 'http'}://{self.host}:{self.port}"

    def parts(self) -> list[tuple[int, int]]:
        step = self.part_bytes
        return [(begin, min(begin + step, self.size_bytes)) for begin in range(0, self.size_bytes, step)]

    def tls(self) -> ssl.SSLContext | None:
        return ssl.create_default_context(cafile=self.authority) if self.authority else None


class Memory:
    """The destination of the bytes: anonymous memory, fresh in each turn or kept with all its pages."""

    def __init__(self, size_bytes: int, kept: bool) -> None:
        self._size_bytes, self.kept = size_bytes, kept
        self._mapped: mmap.mmap | None = None
        if kept:
            with self.view() as view:
                np.frombuffer(view, dtype=np.uint8)[:: mmap.PAGESIZE] = 1

    def view(self) -> memoryview:
        if self._mapped is None:
            self._mapped = mmap.mmap(-1, self._size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return memoryview(self._mapped)

    def clear(self) -> None:
        """Release fresh memory. It is unmapped with the last view, which a thread of a library may hold for a while."""
        if not self.kept:
            self._mapped = None


class Stream:
    """One kept-alive connection that fetches ranges."""

    def __init__(self, job: Job, context: ssl.SSLContext | None) -> None:
        self._job = job
        plain = socket.create_connection((job.host, job.port), timeout=60)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = context.wrap_socket(plain, server_hostname=job.host) if context else plain
        self._head = bytearray(_HEAD_BYTES)

    def receive(self, begin: int, end: int, view: memoryview) -> None:
        """Receive bytes [begin, end) of the object into `view`, which has this length."""
        request = f"GET {self._job.path} HTTP/1.1\r\nHost: {self._job.host}\r\nRange: bytes={begin}-{end - 1}\r\n\r\n"
        self._socket.sendall(request.encode())
        got, stop = 0, -1
        while stop < 0:
            got += self._more(memoryview(self._head)[got:])
            stop = self._head.find(b"\r\n\r\n", 0, got)
        if not self._head.startswith(b"HTTP/1.1 206"):
            raise RuntimeError(bytes(self._head[:40]))
        # The first bytes of the body arrive with the head.
        at = got - stop - 4
        view[:at] = self._head[stop + 4 : got]
        while at < len(view):
            at += self._more(view[at:])

    def close(self) -> None:
        self._socket.close()

    def _more(self, view: memoryview) -> int:
        count = self._socket.recv_into(view)
        if not count:
            raise RuntimeError("the server ended the connection")
        return count


def in_threads(job: Job, work: Callable[[Iterator[tuple[int, int]]], None]) -> None:
    """Run `work` in a thread for each connection. Each thread takes its next part from one shared iterator."""
    # `next` of a list's iterator is atomic.
    parts = iter(job.parts())
    with ThreadPoolExecutor(job.connections) as pool:
        for done in [pool.submit(work, parts) for _ in range(job.connections)]:
            done.result()


class Raw:
    """The subject. Like all subjects, it connects in each turn."""

    def __init__(self, kept: bool, digest: str, **job: Any) -> None:
        self._job, self._digest = Job(**job), digest
        self._context = self._job.tls()
        self._memory = Memory(self._job.size_bytes, kept)

    def run(self) -> None:
        view = self._memory.view()

        def work(row: Iterator[tuple[int, int]]) -> None:
            stream = Stream(self._job, self._context)
            for begin, end in row:
                stream.receive(begin, end, view[begin:end])
            stream.close()

        in_threads(self._job, work)

    def check(self) -> None:
        with self._memory.view() as view:
            if xxhash.xxh3_128_hexdigest(view) != self._digest:
                raise RuntimeError("the bytes differ from the file")

    def clear(self) -> None:
        self._memory.clear()
