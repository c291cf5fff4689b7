"""Streams: the memory that one slow reader costs, and the slowdown of the other streams. Part of `make bench-warm`.

One worker runs 16 streams at the same time. The slow reader asks for SLOW_MB and reads nothing. Four other callers read
streams of 1 MB one after the other, before the slow reader connects and while it is connected.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from load import Request, load_apart
from percentiles import median
from report import Report
from servers import Server, ServerError

SLOW_MB = 256
PIECE_BYTES = 16 << 10
CALLERS = 4
ROUNDS = 3
HANDLER = """
def handler(event):
    for _ in range(event["pieces"]):
        yield "x" * event["bytes"]
"""


def measure(report: Report, server: Server, for_s: float) -> None:
    """Enter slow_reader_memory_mb and other_streams_rate_share."""
    others = stream_of(server, pieces=64)
    rate(others, for_s)
    alone: list[float] = []
    beside: list[float] = []
    grown: list[float] = []
    for _ in range(ROUNDS):
        alone.append(rate(others, for_s))
        before_mb = server.pss_mb()
        with slow_reader(server):
            beside.append(rate(others, for_s))
            grown.append(server.pss_mb() - before_mb)
    report.row(part="streams", alone=alone, beside=beside, grown_mb=grown)
    report.add("slow_reader_memory_mb", max(grown), "MB", f"<= {SLOW_MB / 16:g}")
    report.add("other_streams_rate_share", median(beside) / median(alone), "", ">= 0.9")


def rate(request: Request, for_s: float) -> float:
    """Return the number of streams a second that callers read as fast as they can."""
    tally = load_apart(request, callers=CALLERS, duration_s=for_s)
    if not tally.clean:
        raise ServerError(f"streams: {tally.summary()}")
    return tally.per_second


def stream_of(server: Server, pieces: int) -> Request:
    body = json.dumps({"pieces": pieces, "bytes": PIECE_BYTES}).encode()
    return Request(f"{server.url}/invoke/streams", body=body)


@contextmanager
def slow_reader(server: Server) -> Iterator[None]:
    """Run a caller during the block who asks for a long stream, reads the first bytes of its answer, and then
    nothing more.
    """
    request = stream_of(server, pieces=(SLOW_MB << 20) // PIECE_BYTES)
    with socket.create_connection(request.address, timeout=10) as connection:
        connection.sendall(request.encode())
        connection.recv(64)
        yield
