"""Alarms ring once, when they were set for, and not for what has ended."""

from __future__ import annotations

import asyncio
import time

import pytest
from pilotflame.runtime.serving import deadlines
from pilotflame.runtime.serving.invocation import Answer, Invocation

pytestmark = pytest.mark.asyncio


def invocation(name: str) -> Invocation:
    now_s = time.monotonic()
    return Invocation(name, b"", now_s=now_s, deadline_s=now_s + 60, hold_until_s=now_s + 60)


@pytest.mark.parametrize("soon_s", [2.0, 0.0])
async def test_each_rings_once_and_only_if_it_still_waits(monkeypatch, soon_s: float):
    """With `soon_s` 0 all of them lie in sheets first."""
    monkeypatch.setattr(deadlines, "SOON_S", soon_s)
    rang: asyncio.Queue[str] = asyncio.Queue()
    found = deadlines.Deadlines(asyncio.get_running_loop(), lambda one: rang.put_nowait(one.id))
    calls = {name: invocation(name) for name in ("early", "late", "ended", "moved")}
    now_s = time.monotonic()
    for name, due_s in (("early", 0.05), ("late", 0.1), ("ended", 0.05), ("moved", 0.05)):
        found.set(calls[name], now_s + due_s, now_s)
    calls["ended"].resolve(Answer(b"", ""))
    found.set(calls["moved"], now_s + 0.15, now_s)
    async with asyncio.timeout(10):
        assert [await rang.get() for _ in range(3)] == ["early", "late", "moved"]
    assert time.monotonic() >= now_s + 0.14
    assert rang.empty()
