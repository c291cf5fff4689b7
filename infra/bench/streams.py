"""Streams at full rate: pieces a second of generators that do nothing but yield, and what CPU time a piece takes.

    python infra/bench/streams.py [--pieces N] [--rounds N]

Generator and async generator, one stream and four at the same time, one worker; the medians of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path

import httpx
from percentiles import median
from servers import Server, start_pilotflame

HANDLERS = {
    "generator": "def handler(event):\n    for n in range(event):\n        yield {'token': n}\n",
    "async-generator": "async def handler(event):\n    for n in range(event):\n        yield {'token': n}\n",
}
STREAMS = (1, 4)


def deploy(server: Server, name: str) -> None:
    with tempfile.TemporaryDirectory(prefix="pilotflame-bench-") as folder:
        (Path(folder) / "handler.py").write_text(HANDLERS[name])
        settings = {"name": name, "concurrency": max(STREAMS), "scale.max": 1}
        order = {"path": folder, "overrides": settings}
        httpx.post(f"{server.url}/v1/functions", json=order, timeout=60).raise_for_status()


async def read_stream(server: Server, name: str, pieces: int) -> None:
    """By a bare socket: a client library would be what is measured."""
    url = httpx.URL(server.url)
    reader, writer = await asyncio.open_connection(url.host, url.port, limit=1 << 20)
    body = str(pieces)
    head = f"POST /invoke/{name} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write((head + body).encode())
    found, rest = 0, b""
    while data := await reader.read(1 << 18):
        data = rest + data
        found += data.count(b"event: output\n")
        rest = data[-(len(b"event: output\n") - 1) :]
    writer.close()
    if found != pieces:
        raise RuntimeError(f"{name}: {found} of {pieces} pieces came")


async def measure(server: Server, name: str, streams: int, pieces: int) -> tuple[float, float]:
    """(pieces a second, microseconds of CPU time a piece, of the gateway and its worker)."""
    started_s, cpu_s = time.perf_counter(), server.cpu_s()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(streams):
            tasks.create_task(read_stream(server, name, pieces // streams))
    taken_s = time.perf_counter() - started_s
    return pieces / taken_s, (server.cpu_s() - cpu_s) / pieces * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pieces", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {}
    with start_pilotflame() as server:
        for name in HANDLERS:
            deploy(server, name)
        for number in range(given.rounds + 1):
            for name in HANDLERS:
                for streams in STREAMS:
                    one = asyncio.run(measure(server, name, streams, given.pieces))
                    if number:  # the first round warms up
                        found.setdefault(f"{name}, {streams} at once", []).append(one)
    for what, rounds in found.items():
        told = {
            "streams": what,
            "pieces_per_s": round(median([rate for rate, _ in rounds])),
            "cpu_us_per_piece": round(median([cost for _, cost in rounds]), 1),
        }
        print(json.dumps(told))


if __name__ == "__main__":
    main()
