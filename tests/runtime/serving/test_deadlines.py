"""A deadline fires once, when it was set for, and not after it was cancelled."""

from __future__ import annotations

import asyncio
import time

import pytest
from pilotflame.runtime.serving import deadlines
from pilotflame.runtime.serving.invocation import Invocation

pytestmark = pytest.mark.asyncio


def invocation(name: str) -> Invocation:
    now_s = time.monotonic()
    return Invocation(name, b"", now_s=now_s, deadline_s=now_s + 60, hold_until_s=now_s + 60)


@pytest.mark.parametrize("soon_s", [2.0, 0.0])
async def test_each_fires_once_unless_it_was_cancelled(monkeypatch, soon_s: float):
    """With `soon_s` 0 all of them are in slots first."""
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
