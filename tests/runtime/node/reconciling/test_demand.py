"""Demand: the number of workers that start for a load with a known execution time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from live import Gate
from pilotflame.runtime.ground.telemetry.decisions import DecisionRecord

pytestmark = pytest.mark.asyncio(loop_scope="module")

ECHO = "def handler(event):\n    return event"
BATCH = "import pilotflame\n@pilotflame.batch(max_size=32)\ndef handler(events):\n    return events"
# The handler takes 10 ms, because a worker would prefetch faster calls. If the event is a word, it waits for this word.
SOME_WAIT = """
import gate, os, time
def handler(event):
    time.sleep(0.01)
    if event:
        gate.wait(event)
    return os.getpid()
"""


@pytest.mark.parametrize("source", [ECHO, BATCH])
async def test_a_burst_that_one_worker_ends_in_time_starts_one(gateway, deploy, source: str):
    function = await deploy(source, {"scale.idle_timeout_s": 0.2, "concurrency": 1, "scale.max": 8})
    # After this call, the gateway knows how long a call takes.
    await function.answer(0)
    await function.settled(ready=0)
    before = len(starts(gateway, function))
    assert await asyncio.gather(*(function.answer(n) for n in range(40))) == list(range(40))
    (start,) = starts(gateway, function)[before:]
    assert start.figures["workers"] == 1
    assert start.figures["ready"] == start.figures["starting"] == 0


async def test_a_call_that_takes_far_longer_than_others_holds_up_none(deploy, gate: Gate):
    function = await deploy(SOME_WAIT, {"scale.max": 2}, gate=gate)
    first = await function.answer("")
    stuck = asyncio.create_task(function.answer("long"))
    arrival = await gate.next("long")
    assert arrival.pid == first
    assert await function.answer("") != first
    arrival.go()
    assert await stuck == first


async def test_a_buffer_is_kept_while_there_is_load(deploy, gate: Gate):
    function = await deploy(
        SOME_WAIT, {"scale.max": 4, "scale.buffer": 2, "scale.idle_timeout_s": 0}, gate=gate
    )
    call = asyncio.create_task(function.answer("long"))
    arrival = await gate.next("long")
    await function.settled(ready=3, in_flight=1)
    # One worker of the buffer takes the next call, and another worker starts for the buffer.
    other = asyncio.create_task(function.answer("also"))
    await gate.next("also")
    await function.settled(ready=4, in_flight=2)
    gate.open()
    arrival.go()
    assert len({await call, await other}) == 2
    await function.settled(ready=0)


async def test_a_busy_worker_that_is_not_needed_ends_after_its_call(deploy, gate: Gate):
    source = "import asyncio, gate, os\nasync def handler(event):\n    await gate.wait_async(event)\n    return os.getpid()"
    settings = {"concurrency": 4, "scale.max": 2, "scale.idle_timeout_s": 0.1}
    function = await deploy(source, settings, gate=gate)
    calls = {str(n): asyncio.create_task(function.answer(str(n))) for n in range(6)}
    arrivals = [await gate.next() for _ in calls]
    await function.settled(ready=2, in_flight=6)
    # Leave one call at each worker. One worker could run both calls, so the other is not needed.
    for pid in {arrival.pid for arrival in arrivals}:
        for arrival in [one for one in arrivals if one.pid == pid][1:]:
            arrival.go()
    await function.settled(ready=1, draining=1, in_flight=2)
    gate.open()
    assert {await call for call in calls.values()} == {arrival.pid for arrival in arrivals}


def starts(gateway: Any, function: Any) -> list[DecisionRecord]:
    history = gateway.server.functions.get(function.name).workers.function
    return [one for one in history.decisions.since(0) if one.action == "start"]
