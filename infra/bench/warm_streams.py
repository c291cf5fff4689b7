"""`make bench-warm`, streams: the memory that one slow reader costs, and the slowdown of the other streams.

One worker that runs 16 streams at the same time. The slow reader asks for SLOW_MB and reads nothing; beside it, 4 callers
take streams of 1 MB one after the other, before it came and while it is there.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from control import Control
from http1 import Request
from load import Tally, load_apart
from memory import held_by_tree
from percentiles import median
from report import Report
from servers import Server, start_pilotflame
from warm_peers import HEADERS, HERE

SLOW_MB = 256
PIECE_BYTES = 16 << 10
CALLERS = 4
ROUNDS = 3


def measure(report: Report, for_s: float = 2.0) -> None:
    """Enters slow_reader_memory_mb and other_streams_rate_share."""
    with start_pilotflame() as server:
        control = Control(server.url)
        control.deploy(
            str(HERE / "functions" / "streams"), concurrency=16, **{"scale.min": 1, "scale.max": 1}
        )
        control.wait_for("streams", workers=1)
        control.close()
        others = stream_of(server, pieces=64)
        load_apart(others, callers=CALLERS, duration_s=for_s)
        rates: dict[str, list[float]] = {"without": [], "beside": []}
        grown: list[float] = []
        for _ in range(ROUNDS):
            rates["without"].append(taken(others, for_s).per_second)
            before = held_mb(server)
            with slow_reader(server):
                rates["beside"].append(taken(others, for_s).per_second)
                grown.append(held_mb(server) - before)
    report.row(part="streams", rates=rates, grown_mb=grown)
    report.add("stream_mb_s", median(rates["without"]) * 64 * PIECE_BYTES / 1e6, "MB/s")
    report.add("slow_reader_stream_mb", SLOW_MB, "MB")
    report.add("slow_reader_memory_mb", max(grown), "MB", f"<= {SLOW_MB / 16:g}")
    share = median(rates["beside"]) / median(rates["without"])
    report.add("other_streams_rate_share", share, "", ">= 0.9")


class UnclearStreams(Exception):
    """Streams were not answered whole."""


def taken(request: Request, for_s: float) -> Tally:
    """Streams that callers read as fast as they can."""
    tally = load_apart(request, callers=CALLERS, duration_s=for_s, warmup_s=0.3)
    if not tally.clean:
        raise UnclearStreams(f"streams: {tally.summary()}")
    return tally


def stream_of(server: Server, pieces: int) -> Request:
    body = json.dumps({"pieces": pieces, "bytes": PIECE_BYTES}).encode()
    return Request(f"{server.url}/invoke/streams", body=body, headers=HEADERS)


def held_mb(server: Server) -> float:
    """What the gateway and all its children hold, shared pages by their share."""
    return sum(holding.pss_mb for holding in held_by_tree(server.pid))


@contextmanager
def slow_reader(server: Server) -> Iterator[None]:
    """A caller who asks for a long stream, reads its head to be sure that it runs, and then no more."""
    request = stream_of(server, pieces=(SLOW_MB << 20) // PIECE_BYTES)
    with socket.create_connection(request.address, timeout=10) as connection:
        connection.sendall(request.encode())
        connection.recv(64)
        yield
