"""The ceiling: raw sockets, `recv_into` straight into memory, nothing verified and nothing parsed but a status line.

    python infra/bench/raw_floor.py [--quick]

The issue names 8 connections and parts of 16 MiB. The report also has the best of 2, 4 and 8 connections.
"""

from __future__ import annotations

import argparse
import mmap
import socket
import ssl
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import checkpoint
import numpy as np
import xxhash
from lane import Lane
from memory_folder import memory_folder
from nginx import start_nginx
from percentiles import median

PART_BYTES = 16 << 20
CONNECTIONS = 8
_HEAD_BYTES = 16 << 10


@dataclass(frozen=True)
class Job:
    """One object to bring, and how."""

    host: str
    port: int
    path: str
    size_bytes: int
    connections: int = CONNECTIONS
    part_bytes: int = PART_BYTES
    authority: str = ""
    """Certificate to trust: then it is TLS."""

    @property
    def url(self) -> str:
        return f"{'https' if self.authority else 'http'}://{self.host}:{self.port}"

    def parts(self) -> list[tuple[int, int]]:
        step = self.part_bytes
        return [(begin, min(begin + step, self.size_bytes)) for begin in range(0, self.size_bytes, step)]

    def tls(self) -> ssl.SSLContext | None:
        return ssl.create_default_context(cafile=self.authority) if self.authority else None


class Memory:
    """Where a contestant puts the bytes: fresh memory every time, or kept memory whose pages are there.

    It is anonymous, or with `file` a file where our own contestants have theirs.
    """

    def __init__(self, size_bytes: int, kept: bool, huge: bool = False, file: bool = False) -> None:
        self._size = size_bytes
        self.kept = kept
        self._huge, self._file = huge, file
        self._mapped: mmap.mmap | None = None
        if kept:
            self._mapped = self._map()
            np.frombuffer(self._mapped, dtype=np.uint8)[:: mmap.PAGESIZE] = 1

    def view(self) -> memoryview:
        if self._mapped is None:
            self._mapped = self._map()
        return memoryview(self._mapped)

    def clear(self) -> None:
        if not self.kept:
            self._mapped = (
                None  # unmapped with the last view of it, which a library's thread may hold a while yet
            )

    def _map(self) -> mmap.mmap:
        if self._file:
            with tempfile.TemporaryFile(dir=memory_folder()) as file:
                file.truncate(self._size)
                return mmap.mmap(file.fileno(), self._size)
        mapped = mmap.mmap(-1, self._size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if self._huge:
            mapped.madvise(mmap.MADV_HUGEPAGE)
        return mapped


class Stream:
    """One kept-alive connection that brings ranges."""

    def __init__(self, job: Job, context: ssl.SSLContext | None) -> None:
        self._job = job
        plain = socket.create_connection((job.host, job.port), timeout=60)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = context.wrap_socket(plain, server_hostname=job.host) if context else plain
        self._head = bytearray(_HEAD_BYTES)

    def bring(self, begin: int, end: int, view: memoryview) -> None:
        """Bytes [begin, end) of the object into `view`, which is as long."""
        got = self.ask(begin, end, view)
        while got < len(view):
            got += self.more(view[got:])

    def ask(self, begin: int, end: int, view: memoryview) -> int:
        """Send the request and read the head. Bytes of the body that arrive with the head go into `view`. Return their number."""
        request = f"GET {self._job.path} HTTP/1.1\r\nHost: {self._job.host}\r\nRange: bytes={begin}-{end - 1}\r\n\r\n"
        self._socket.sendall(request.encode())
        got, stop = 0, -1
        while stop < 0:
            got += self.more(memoryview(self._head)[got:])
            stop = self._head.find(b"\r\n\r\n", 0, got)
        if not self._head.startswith(b"HTTP/1.1 206"):
            raise RuntimeError(bytes(self._head[:40]))
        rest = self._head[stop + 4 : got]
        view[: len(rest)] = rest
        return len(rest)

    def more(self, view: memoryview) -> int:
        count = self._socket.recv_into(view)
        if not count:
            raise RuntimeError("the server ended the connection")
        return count

    def close(self) -> None:
        self._socket.close()


def in_threads(
    count: int, parts: list[tuple[int, int]], work: Callable[[Iterator[tuple[int, int]]], None]
) -> None:
    """Run `work` in `count` threads. Each thread takes its next part from one shared iterator. Raise the first error."""
    row, errors = iter(parts), []  # next() of a list's iterator is atomic

    def body() -> None:
        try:
            work(row)
        except Exception as error:  # noqa: BLE001  raised below, in the caller's thread
            errors.append(error)

    threads = [threading.Thread(target=body) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


class Raw:
    """The contestant: new connections each turn, like all contestants."""

    def __init__(
        self, kept: bool, digest: str = "", huge: bool = False, file: bool = False, **job: Any
    ) -> None:
        self._job = Job(**job)
        self._context = self._job.tls()
        self._memory = Memory(self._job.size_bytes, kept, huge, file)
        self._digest = digest

    def run(self, connections: int | None = None) -> None:
        view = self._memory.view()

        def work(row: Iterator[tuple[int, int]]) -> None:
            stream = Stream(self._job, self._context)
            for begin, end in row:
                stream.bring(begin, end, view[begin:end])
            stream.close()

        in_threads(connections or self._job.connections, self._job.parts(), work)

    def check(self) -> None:
        with self._memory.view() as view:
            if xxhash.xxh3_128_hexdigest(view) != self._digest:
                raise RuntimeError("the bytes are not the file's")

    def clear(self) -> None:
        self._memory.clear()


def file_digest(path: Path) -> str:
    """xxh3-128 of a whole file."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(8 << 20):
            digest.update(piece)
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    data = checkpoint.checkpoint(checkpoint.QUICK if arguments.quick else checkpoint.FULL)
    digest = file_digest(data.path)
    with ExitStack() as stack:
        server = stack.enter_context(start_nginx(checkpoint.DATA))
        job: dict[str, Any] = {
            "host": "127.0.0.1",
            "port": server.port,
            "path": f"/{checkpoint.BUCKET}/{data.key}",
            "size_bytes": data.size_bytes,
            "digest": digest,
        }
        kinds: dict[str, dict[str, Any]] = {
            "fresh": {"kept": False},
            "fresh, huge": {"kept": False, "huge": True},
            "kept": {"kept": True},
        }
        lanes = [
            stack.enter_context(Lane(name, "raw_floor:Raw", **job, **kind)) for name, kind in kinds.items()
        ]
        for lane in lanes:
            lane.wait_ready()
        rates: dict[tuple[str, int], list[float]] = {}
        for number in range(arguments.rounds):
            for lane in lanes:
                for connections in (2, 4, 8):
                    seconds = lane.turn(check=number == 0, connections=connections)["seconds"]
                    rates.setdefault((lane.name, connections), []).append(data.size_bytes / 1e9 / seconds)
        for (name, connections), figures in rates.items():
            print(
                f"{name:12} {connections} x 16 MiB: {median(figures):.2f} GB/s   {[round(rate, 2) for rate in figures]}"
            )


if __name__ == "__main__":
    main()
