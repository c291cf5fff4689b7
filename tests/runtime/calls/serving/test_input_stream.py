"""The input of an invocation that its caller sends in pieces. tests/runtime/calls/link/test_exchange.py tests its other end."""

from __future__ import annotations

import asyncio

from live import LIMIT_S
from pilotflame.runtime.calls.serving.input_stream import InputStream


async def test_an_input_is_sent_once_it_is_asked_for() -> None:
    stream, sent = InputStream(), list[tuple[bytes, bool]]()
    stream.connect(lambda piece, *, last: sent.append((piece, last)))
    asked = asyncio.create_task(stream.wait_asked())
    putting = asyncio.create_task(stream.put(b"x", last=True))
    await asyncio.sleep(0)
    assert not asked.done()
    stream.grant(0)
    async with asyncio.timeout(LIMIT_S):
        assert await asked
        assert await putting
    assert sent == [(b"x", True)]


async def test_the_end_of_the_invocation_ends_all_waits() -> None:
    stream = InputStream()
    stream.connect(lambda piece, *, last: None)
    waiting = [asyncio.create_task(stream.wait_asked()), asyncio.create_task(stream.put(b"x"))]
    await asyncio.sleep(0)
    stream.close()
    async with asyncio.timeout(LIMIT_S):
        assert [await one for one in waiting] == [False, False]
