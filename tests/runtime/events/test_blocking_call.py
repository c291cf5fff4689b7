"""Calls in threads: their outcome is told, and what comes too late is put where it belongs."""

from __future__ import annotations

import asyncio
import threading

import pytest
from pilotflame.runtime.events.blocking_call import BlockingCall


async def test_what_it_gives_and_what_it_raises() -> None:
    assert await BlockingCall(lambda: 7).outcome() == 7
    with pytest.raises(ZeroDivisionError):
        await BlockingCall(lambda: 1 // 0).outcome()


@pytest.mark.parametrize("ended_first", [False, True])
async def test_what_nobody_waits_for_any_more_is_handed_on(ended_first: bool) -> None:
    go, unwanted = threading.Event(), asyncio.Event()
    loop, found = asyncio.get_running_loop(), list[int]()

    def late(value: int) -> None:
        found.append(value)
        loop.call_soon_threadsafe(unwanted.set)

    def work() -> int:
        go.wait(20)
        return 7

    call = BlockingCall(work, late)
    waiting = asyncio.create_task(call.outcome())
    await asyncio.sleep(0)
    if ended_first:  # it ends, and the loop hears of it only after the waiting is given up
        go.set()
        while not call._ended:  # the loop must not turn meanwhile
            pass
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    go.set()
    async with asyncio.timeout(20):
        await unwanted.wait()
    assert found == [7]


def test_a_loop_that_is_gone_is_no_harm() -> None:
    go, unwanted = threading.Event(), threading.Event()

    def work() -> int:
        go.wait(20)
        return 7

    async def begin() -> None:
        waiting = asyncio.create_task(BlockingCall(work, lambda _: unwanted.set()).outcome())
        await asyncio.sleep(0)
        waiting.cancel()

    asyncio.run(begin())
    go.set()
    assert unwanted.wait(20)
