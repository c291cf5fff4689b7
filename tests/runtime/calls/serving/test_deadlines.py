"""A deadline fires once, at the time for which it was set, and not after it was cancelled."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref

import pytest
from pilotflame.runtime.calls.serving import deadlines
from pilotflame.runtime.calls.serving.invocation import Invocation

pytestmark = pytest.mark.asyncio


def loop_timers(timers: deadlines.Deadlines) -> int:
    """Return how many timers of the event loop belong to `timers`."""
    own = sum(not isinstance(timer, dict) for timer in timers._timers.values())
    return own + (timers._next is not None)


def invocation(name: str) -> Invocation:
    now_s = time.monotonic()
    return Invocation(name, b"", now_s=now_s, deadline_s=now_s + 60, hold_until_s=now_s + 60)


@pytest.mark.parametrize("soon_s", [2.0, 0.0])
async def test_each_fires_once_unless_it_was_cancelled(monkeypatch, soon_s: float):
    """With `soon_s` 0, each deadline waits in a slot first."""
    monkeypatch.setattr(deadlines, "SOON_S", soon_s)
    fired: asyncio.Queue[str] = asyncio.Queue()
    timers = deadlines.Deadlines(asyncio.get_running_loop(), lambda one: fired.put_nowait(one.id))
    calls = {name: invocation(name) for name in ("early", "late", "cancelled", "moved")}
    now_s = time.monotonic()
    for name, due_s in (("early", 0.05), ("late", 0.1), ("cancelled", 0.05), ("moved", 0.05)):
        timers.set(calls[name], now_s + due_s, now_s)
    timers.cancel(calls["cancelled"])
    timers.set(calls["moved"], now_s + 0.15, now_s)
    async with asyncio.timeout(10):
        assert [await fired.get() for _ in range(3)] == ["early", "late", "moved"]
    assert time.monotonic() >= now_s + 0.14
    assert fired.empty()


async def test_a_deadline_passes_through_slots_of_all_widths(monkeypatch):
    monkeypatch.setattr(deadlines, "RATIO", 2)
    fired: asyncio.Queue[str] = asyncio.Queue()
    timers = deadlines.Deadlines(asyncio.get_running_loop(), lambda one: fired.put_nowait(one.id))
    now_s = time.monotonic()
    for due_s in (2.6, 4.6, 0.1):
        timers.set(invocation(str(due_s)), now_s + due_s, now_s)
    async with asyncio.timeout(10):
        for due_s in (0.1, 2.6, 4.6):
            assert await fired.get() == str(due_s)
            assert due_s - 0.01 <= time.monotonic() - now_s < due_s + 0.5
    assert loop_timers(timers) == 0


async def test_a_day_of_distinct_deadlines_has_few_timers_and_few_slots():
    timers = deadlines.Deadlines(asyncio.get_running_loop(), lambda _: None)
    now_s = time.monotonic()
    calls = [invocation(str(number)) for number in range(24 * 3600)]
    for number, one in enumerate(calls):
        timers.set(one, now_s + number + 2.5, now_s)
    assert loop_timers(timers) == 1
    assert len(timers._slots) < 300
    for one in calls:
        timers.cancel(one)
    assert not timers._timers
    timers.close()
    assert loop_timers(timers) == 0
    assert not timers._slots


async def test_no_timer_keeps_a_retired_revision_in_memory():
    class Owner:
        def on_due(self, one: Invocation) -> None:
            pass

    owner = Owner()
    timers = deadlines.Deadlines(asyncio.get_running_loop(), owner.on_due)
    call, now_s = invocation("job"), time.monotonic()
    timers.set(call, now_s + 24 * 3600, now_s)
    timers.close()
    assert loop_timers(timers) == 1
    timers.cancel(call)
    assert loop_timers(timers) == 0
    gone = weakref.ref(owner)
    del owner, timers
    gc.collect()
    # The event loop refers to a cancelled timer until its next iteration.
    await asyncio.sleep(0)
    assert gone() is None
