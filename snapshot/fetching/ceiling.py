"""The ceiling: how fast plain sockets take an object's bytes, with nothing done to them. What fetching is compared with."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from urllib.parse import urlsplit

from ..sources.location import Location, ServerAddress

CONNECTIONS = 8
TIMEOUT_S = 30.0
_BUFFER_BYTES = 1 << 20
_MAX_HEAD_BYTES = 64 << 10
_PARTIAL = b"206"


def ceiling(location: Location, size_bytes: int) -> float | None:
    """Bytes a second that 8 connections receive of an object into kept buffers; connecting counts.

    None if it is not to be had by plain http, has no bytes, or its server does not answer with ranges.
    """
    if not location.url.startswith("http://") or size_bytes == 0:
        return None
    count = min(CONNECTIONS, size_bytes)
    ends = [size_bytes * number // count for number in range(count + 1)]
    with ThreadPoolExecutor(count, thread_name_prefix="ceiling") as pool:
        started_s = time.monotonic()
        jobs = [pool.submit(_receive, location, begin, end) for begin, end in pairwise(ends)]
        try:
            whole = all(job.result() for job in jobs)
        except (OSError, ValueError):
            return None
        return size_bytes / (time.monotonic() - started_s) if whole else None


def _receive(location: Location, begin: int, end: int) -> bool:
    """Receive bytes [begin, end); whether all of them came."""
    origin, parts = ServerAddress.of(location.url), urlsplit(location.url)
    target = f"{parts.path or '/'}{f'?{parts.query}' if parts.query else ''}"
    headers = {"Host": origin.authority, "Range": f"bytes={begin}-{end - 1}", "Connection": "close"}
    lines = [f"GET {target} HTTP/1.1", *(f"{name}: {value}" for name, value in (headers | dict(location.headers)).items())]  # fmt: skip
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    with socket.create_connection((origin.host, origin.port), TIMEOUT_S) as connected:
        connected.sendall("\r\n".join([*lines, "", ""]).encode("latin-1"))
        head = b""
        while b"\r\n\r\n" not in head and len(head) < _MAX_HEAD_BYTES:
            count = connected.recv_into(buffer)
            if count == 0:
                return False
            head += buffer[:count]
        first, _, body = head.partition(b"\r\n\r\n")
        if first.split(b" ", 2)[1:2] != [_PARTIAL]:
            return False
        left = end - begin - len(body)
        while left > 0 and (count := connected.recv_into(buffer)):
            left -= count
        return left <= 0
