"""Owners take turns at the threads. An owner that occupies a thread does not get the last free thread."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref
from collections.abc import AsyncIterator
from typing import Never

import pytest
from pilotflame.runtime.ground.access.fair_threads import FairThreads


class Held:
    """Work that occupies its thread until `go` is called."""

    def __init__(self, name: str, order: list[str]) -> None:
        self._name, self._order = name, order
        self._go = threading.Event()

    def __call__(self) -> str:
        self._order.append(self._name)
        assert self._go.wait(20)
        return self._name

    def go(self) -> None:
        self._go.set()


@pytest.fixture
async def threads() -> AsyncIterator[FairThreads]:
    made = FairThreads(2, "test")
    yield made
    made.close()


async def settled() -> None:
    """Let all ready tasks and threads run. A thread that ends meanwhile adds its callback to the event loop before these threads do."""
    for _ in range(3):
        await asyncio.to_thread(lambda: None)


async def test_the_last_thread_is_for_another_owner(threads: FairThreads) -> None:
    order = list[str]()
    first, second, other = (Held(name, order) for name in ("first", "second", "other"))
    greedy = [asyncio.create_task(threads.run(work, owner="greedy")) for work in (first, second)]
    await settled()
    assert order == ["first"]
    task = asyncio.create_task(threads.run(other, owner="other"))
    other.go()
    assert await task == "other"
    assert order == ["first", "other"]
    first.go()
    second.go()
    assert await asyncio.gather(*greedy) == ["first", "second"]


async def test_owners_take_turns() -> None:
    threads, order = FairThreads(1, "test"), list[str]()
    works = {name: Held(name, order) for name in ("a1", "a2", "a3", "b1", "b2")}
    tasks = [asyncio.create_task(threads.run(work, owner=name[0])) for name, work in works.items()]
    await settled()
    for work in works.values():
        work.go()
    await asyncio.gather(*tasks)
    assert order == ["a1", "a2", "b1", "a3", "b2"]
    threads.close()


async def test_work_of_a_caller_who_has_left_is_not_begun_or_is_undone(threads: FairThreads) -> None:
    order, undone = list[str](), asyncio.Queue[str]()
    loop = asyncio.get_running_loop()

    def undo(result: str) -> None:
        loop.call_soon_threadsafe(undone.put_nowait, result)

    running, waiting, later = (Held(name, order) for name in ("running", "waiting", "later"))
    tasks = [asyncio.create_task(threads.run(work, owner="a", undo=undo)) for work in (running, waiting)]
    await settled()
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    running.go()
    later.go()
    assert await undone.get() == "running"
    assert await threads.run(later, owner="a") == "later"
    assert order == ["running", "later"]
    assert undone.empty()


async def test_an_error_reaches_its_caller_and_frees_the_thread(threads: FairThreads) -> None:
    def fail() -> None:
        raise ValueError("wrong")

    for _ in range(4):
        with pytest.raises(ValueError, match="wrong"):
            await threads.run(fail, owner="a")


async def test_a_failure_keeps_nothing_of_its_work(threads: FairThreads) -> None:
    """A failure is in no reference cycle. Otherwise it would keep a body in memory until the garbage collector runs."""

    class Failing:
        def __call__(self) -> None:
            raise ValueError("wrong")

    work = Failing()
    kept = weakref.ref(work)
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            await threads.run(work, owner="a")
        del work
        await settled()
        assert kept() is None
    finally:
        gc.enable()


async def test_what_waits_ends_when_the_threads_are_closed() -> None:
    threads, order = FairThreads(1, "test"), list[str]()
    works = [Held(name, order) for name in ("running", "waiting")]
    tasks = [asyncio.create_task(threads.run(work, owner="a")) for work in works]
    await settled()
    threads.close()
    works[0].go()
    assert await tasks[0] == "running"
    with pytest.raises(asyncio.CancelledError):
        await tasks[1]
    assert order == ["running"]


async def test_work_that_gets_no_thread_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = FairThreads(1, "none")

    def full(*_: object) -> Never:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threads._pool, "submit", full)
    async with asyncio.timeout(20):
        for owner in "ab":
            with pytest.raises(RuntimeError, match="can't start"):
                await threads.run(lambda: 1, owner=owner)
    monkeypatch.undo()
    assert await threads.run(lambda: 1, owner="a") == 1
    threads.close()
