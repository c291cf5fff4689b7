"""Where to put bytes that arrive: raw sockets into every kind of memory and file that could be mapped afterwards.

    python infra/bench/destinations.py [--quick] [--rounds N]

All verify nothing unless they say so; 8 connections, parts of 16 MiB.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import checkpoint
import xxhash
from clients import job_of
from lane import Lane
from memory_folder import SMALL_PAGES, memory_folder, mounted
from nginx import start_nginx
from raw_floor import Job, Stream, file_digest, in_threads
from rounds import Rounds, plain

RESULT = checkpoint.DATA.parent / "destinations.json"
CEILING = "recv_into fresh anonymous memory"


class IntoFile:
    """A file on tmpfs or disk, fresh each turn or kept, filled through a mapping or through a kept buffer and pwrite."""

    def __init__(
        self,
        digest: str,
        mapped: bool,
        kept: bool,
        buffer_kib: int = 512,
        hashed: bool = False,
        disk: bool = False,
        huge: bool = False,
        **job: Any,
    ) -> None:
        self._job, self._digest = Job(**job), digest
        self._mapped, self._kept, self._hashed = mapped, kept, hashed
        self._buffers = [memoryview(bytearray(buffer_kib << 10)) for _ in range(self._job.connections)]
        memory = memory_folder() if huge else SMALL_PAGES
        self._folder = checkpoint.DATA if disk else memory
        self._descriptor = -1
        self._view: memoryview | None = None
        if kept:
            self._view = self._open()
            for offset in range(0, self._job.size_bytes, mmap.PAGESIZE):
                os.pwrite(self._descriptor, b"\1", offset)
                if self._view is not None:
                    self._view[offset] = 1

    def _open(self) -> memoryview | None:
        with tempfile.NamedTemporaryFile(prefix="destination-", dir=self._folder) as file:
            self._descriptor = os.dup(file.fileno())  # the name goes, the file stays
        os.ftruncate(self._descriptor, self._job.size_bytes)
        if not self._mapped:
            return None
        return memoryview(mmap.mmap(self._descriptor, self._job.size_bytes, mmap.MAP_SHARED))

    def run(self) -> None:
        if not self._kept:
            self._view = self._open()
        buffers = list(self._buffers)

        def work(row: Iterator[tuple[int, int]]) -> None:
            stream, buffer = Stream(self._job, None), buffers.pop()
            for begin, end in row:
                if self._view is not None:
                    stream.bring(begin, end, self._view[begin:end])
                else:
                    self._bounce(stream, begin, end, buffer)
            stream.close()

        in_threads(self._job.connections, self._job.parts(), work)

    def _bounce(self, stream: Stream, begin: int, end: int, buffer: memoryview) -> None:
        digest = xxhash.xxh3_128()
        count = stream.ask(begin, end, buffer)
        while True:
            if self._hashed:
                digest.update(buffer[:count])
            os.pwrite(self._descriptor, buffer[:count], begin)
            begin += count
            if begin >= end:
                return
            count = stream.more(buffer[: min(len(buffer), end - begin)])

    def check(self) -> None:
        digest, offset = xxhash.xxh3_128(), 0
        while piece := os.pread(self._descriptor, 8 << 20, offset):
            digest.update(piece)
            offset += len(piece)
        if digest.hexdigest() != self._digest:
            raise RuntimeError("the bytes are not the file's")

    def clear(self) -> None:
        if not self._kept:
            self._view = None
            os.close(self._descriptor)


def lanes(job: dict[str, Any]) -> list[Lane]:
    file = "destinations:IntoFile"
    fresh, kept = {"kept": False, **job}, {"kept": True, **job}
    return [
        Lane(CEILING, "raw_floor:Raw", **fresh),
        Lane("the same, huge pages advised", "raw_floor:Raw", huge=True, **fresh),
        Lane("recv_into kept anonymous memory", "raw_floor:Raw", **kept),
        Lane("recv_into fresh tmpfs mapping", file, mapped=True, **fresh),
        Lane("128 KiB buffer, pwrite to fresh tmpfs file", file, mapped=False, buffer_kib=128, **fresh),
        Lane("512 KiB buffer, pwrite to fresh tmpfs file", file, mapped=False, **fresh),
        Lane("the same, xxh3-128 on the way", file, mapped=False, hashed=True, **fresh),
        Lane("2 MiB buffer, pwrite to fresh tmpfs file", file, mapped=False, buffer_kib=2048, **fresh),
        Lane("512 KiB buffer, pwrite over kept tmpfs pages", file, mapped=False, **kept),
        Lane("recv_into kept tmpfs mapping", file, mapped=True, **kept),
        Lane("recv_into fresh tmpfs mapping, huge pages", file, mapped=True, huge=True, **fresh),
        Lane(
            "512 KiB buffer, pwrite to fresh tmpfs file, huge pages", file, mapped=False, huge=True, **fresh
        ),
        Lane(
            "the same, huge pages, xxh3-128 on the way", file, mapped=False, hashed=True, huge=True, **fresh
        ),
        Lane("2 MiB buffer, pwrite, huge pages", file, mapped=False, buffer_kib=2048, huge=True, **fresh),
        Lane("recv_into kept tmpfs mapping, huge pages", file, mapped=True, huge=True, **kept),
        Lane("512 KiB buffer, pwrite to fresh file on disk", file, mapped=False, disk=True, **fresh),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare destinations of one object's bytes.")
    parser.add_argument("--quick", action="store_true", help="100 MB and 2 rounds")
    parser.add_argument("--rounds", type=int)
    arguments = parser.parse_args()
    data = checkpoint.checkpoint(checkpoint.QUICK if arguments.quick else checkpoint.FULL)
    with mounted(), start_nginx(checkpoint.DATA) as server, ExitStack() as stack:
        contestants = lanes(job_of(server, data, file_digest(data.path)))
        for lane in contestants:
            stack.enter_context(lane)
        table = Rounds(data.size_bytes, ceiling=CEILING)
        table.play(plain(contestants), arguments.rounds or (2 if arguments.quick else 5))
    table.print("destinations")
    RESULT.write_text(json.dumps(table.as_rows(), indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
