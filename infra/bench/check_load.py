"""Checks the load generator itself against servers that misbehave; exits with 1 where it counts wrongly.

python infra/bench/check_load.py
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

import uvloop
from load import Request, Tally, closed_loop, open_loop, poisson

_OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def _right(tally: Tally) -> bool:
    return tally.clean


def _none_right(tally: Tally) -> bool:
    return tally.right == 0 < tally.answers


def _lost(tally: Tally) -> bool:
    return tally.answers == 0 < tally.errors["connection lost"]


# What the server writes, piece by piece, for each request; whether it closes then; what the tally must show.
CASES: dict[str, tuple[list[bytes], bool, Callable[[Tally], bool]]] = {
    "plain": ([_OK], False, _right),
    "byte by byte": ([_OK[at : at + 1] for at in range(len(_OK))], False, _right),
    "closes": ([_OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")], True, _right),
    "ends at close": ([b"HTTP/1.1 200 OK\r\n\r\nok"], True, _right),
    "chunked": (
        [
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
            b"1\r\no\r\n",
            b"1\r\nk\r\n0\r\n",
            b"\r\n",
        ],
        False,
        _right,
    ),
    "wrong body": ([_OK.replace(b"ok", b"no")], False, _none_right),
    "refuses": ([_OK.replace(b"200 OK", b"503 No")], False, _none_right),
    "drops": ([], True, _lost),
}


async def _serve(pieces: list[bytes], closes: bool) -> asyncio.Server:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(2)
                for piece in pieces:
                    writer.write(piece)
                    await asyncio.sleep(0)
                if closes:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    return await asyncio.start_server(handle, "127.0.0.1", 0)


async def _check() -> bool:
    passed = True
    for name, (pieces, closes, holds) in CASES.items():
        server = await _serve(pieces, closes)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        request = Request(url, body=b"hi", expect=b"ok")
        tallies = {
            "closed": await closed_loop(request, callers=4, duration_s=0.2, drain_s=2),
            "open": await open_loop(request, poisson(300, 0.2, 1), drain_s=2),
        }
        for loop, tally in tallies.items():
            right = holds(tally) and "no answer" not in tally.errors
            passed &= right
            print(f"{'ok  ' if right else 'FAIL'} {name}, {loop} loop: {tally.statuses} {tally.errors}")
        server.close()
    return passed & await _check_retry()


async def _check_retry() -> bool:
    """The load generator repeats each refused request exactly once, after the delay in the refusal."""
    refusal = b"HTTP/1.1 503 No\r\nretry-after-ms: 20\r\nRetry-After: 9\r\nContent-Length: 2\r\n\r\nno"
    server = await _serve([refusal], False)
    request = Request(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", body=b"hi")
    tally = await open_loop(request, poisson(300, 0.2, 1), retry=True, drain_s=2)
    server.close()
    right = tally.statuses == tally.second_statuses == {503: len(poisson(300, 0.2, 1))} and not tally.errors
    print(f"{'ok  ' if right else 'FAIL'} refused, then again: {tally.statuses}, {tally.second_statuses}")
    return right


if __name__ == "__main__":
    sys.exit(0 if uvloop.run(_check()) else 1)
