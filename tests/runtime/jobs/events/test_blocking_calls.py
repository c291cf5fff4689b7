"""Blocking calls in threads: the caller gets the result, and a callback gets the result of an abandoned call."""

from __future__ import annotations

import asyncio
import threading

import pytest
from pilotflame.runtime.jobs.events.blocking_calls import THREAD_NAME, call_in_thread


async def test_the_result_or_the_error_of_a_call() -> None:
    assert await call_in_thread(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await call_in_thread(lambda: 1 // 0)


@pytest.mark.parametrize("ended_first", [False, True])
async def test_the_result_of_an_abandoned_call_is_handed_over(ended_first: bool) -> None:
    go, handed_over = threading.Event(), asyncio.Event()
    loop, results = asyncio.get_running_loop(), list[int]()

    def on_abandoned(value: int) -> None:
        results.append(value)
        loop.call_soon_threadsafe(handed_over.set)

    def work() -> int:
        go.wait(20)
        return 7

    # Wait only for new threads, because abandoned calls of other tests may still run.
    others = set(threading.enumerate())
    waiting = asyncio.create_task(call_in_thread(work, on_abandoned))
    await asyncio.sleep(0)
    if ended_first:
        # End the call now. The caller is cancelled before the event loop sees the result.
        go.set()
        for thread in set(threading.enumerate()) - others:
            thread.join(20)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    go.set()
    async with asyncio.timeout(20):
        await handed_over.wait()
    assert results == [7]


async def test_an_abandoned_call_that_fails_is_ignored() -> None:
    go, results = threading.Event(), list[object]()

    def fail() -> None:
        go.wait(20)
        raise ZeroDivisionError

    waiting = asyncio.create_task(call_in_thread(fail, results.append))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    go.set()
    for thread in [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]:
        await asyncio.to_thread(thread.join, 20)
    assert results == []


def test_an_abandoned_call_outlives_its_event_loop() -> None:
    go, handed_over = threading.Event(), threading.Event()

    def work() -> int:
        go.wait(20)
        return 7

    async def begin() -> None:
        waiting = asyncio.create_task(call_in_thread(work, lambda _: handed_over.set()))
        await asyncio.sleep(0)
        waiting.cancel()

    asyncio.run(begin())
    go.set()
    assert handed_over.wait(20)
