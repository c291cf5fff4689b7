"""The gateway's `max_workers`: who gets the workers, and what a caller is told who gets none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from live import Gate, Gateway, gateway_here
from pilotflame.runtime.scaling.node_limit import Claim
from pilotflame.runtime.serving.worker_limit import WorkerLimit

pytestmark = pytest.mark.asyncio(loop_scope="module")

WAITS = "import gate, os\ndef handler(event):\n    gate.wait(event)\n    return os.getpid()"
# Nothing ends a worker here but the limit.
STAYS = {"scale.idle_timeout_s": 1000}


@pytest_asyncio.fixture(loop_scope="module")
async def small(state: Path) -> AsyncIterator[Gateway]:
    async with gateway_here(state, max_workers=4) as gateway:
        yield gateway


def actions(gateway: Any, function: Any, cause: str) -> list[str]:
    history = gateway.server.functions.live(function.name).history
    return [one.action for one in history.decisions.since(0) if one.cause == cause]


async def test_one_at_zero_gets_a_worker_of_one_that_has_many(small: Gateway, gate: Gate):
    rich = await small.deploy(WAITS, {"name": "rich", "scale.max": 10, **STAYS}, gate=gate, check=False)
    poor = await small.deploy(WAITS, {"name": "poor", "scale.max": 10, **STAYS}, gate=gate, check=False)
    many = [asyncio.create_task(rich.answer("many")) for _ in range(8)]
    arrived = [await gate.next("many") for _ in range(4)]
    await rich.settled(ready=4, in_flight=4, queued=4)
    assert actions(small, rich, "max_workers")[0] == "refuse"
    one = asyncio.create_task(poor.answer("one"))
    # One of the four takes nothing new, and ends after its call.
    await rich.settled(ready=3, draining=1, in_flight=4)
    assert actions(small, rich, "max_workers")[-1] == "stop"
    for arrival in arrived:
        arrival.go()
    (await gate.next("one")).go()
    assert isinstance(await one, int)
    gate.open()
    assert len({*await asyncio.gather(*many)}) <= 4


async def test_an_idle_worker_makes_room(small: Gateway, gate: Gate):
    functions = [
        await small.deploy(WAITS, {"name": name, **STAYS}, gate=gate, check=False)
        for name in ("a", "b", "c", "d", "e")
    ]
    gate.open()
    for function in functions:
        await function.answer("")
    ready = [(await function.status())["workers"]["ready"] for function in functions]
    assert sum(ready) == 4
    assert ready[-1] == 1


async def test_a_caller_who_gets_no_worker_is_told_why(small: Gateway, gate: Gate):
    busy = []
    for name in ("a", "b", "c", "d"):
        function = await small.deploy(WAITS, {"name": name, "scale.max": 1, **STAYS}, gate=gate, check=False)
        busy.append(asyncio.create_task(function.answer(name)))
        await gate.next(name)
    late = await small.deploy(WAITS, {"name": "late", "timeout_s": 0.5, **STAYS}, gate=gate, check=False)
    error = await late.error("late")
    assert (error["status"], error["type"]) == (504, "deadline_exceeded")
    assert "4 workers (max_workers)" in error["message"]
    assert "PILOTFLAME_MAX_WORKERS" in error["remedy"]
    assert actions(small, late, "max_workers") == ["refuse"]
    # When one ends its call, the next caller has its worker.
    gate.open()
    await asyncio.gather(*busy)
    assert isinstance(await late.answer("late"), int)


async def test_a_deploy_keeps_as_many_workers_as_there_is_room_for(small: Gateway, gate: Gate):
    calls = []
    for name, count in (("a", 3), ("b", 1)):
        settings = {"scale.max": count, **STAYS}
        function = await small.deploy(WAITS, settings, name=name, gate=gate, check=False)
        calls += [asyncio.create_task(function.answer(name)) for _ in range(count)]
        await function.settled(ready=count, in_flight=count)
    gate.open()
    await asyncio.gather(*calls)
    again = await small.deploy(WAITS + "\n", {"scale.max": 3, **STAYS}, name="a", gate=gate)
    # All four places are taken: only the worker that proves the revision starts.
    assert (await again.status())["activations"] == 1


class Poor:
    """A revision that wants a worker for callers who wait."""

    def __init__(self, limit: WorkerLimit) -> None:
        self.limit, self.asked, self.workers = limit, 0, 0
        limit.join(self)

    def claim(self) -> Claim:
        return Claim(self.workers)

    def give(self) -> None:
        raise AssertionError("it has none")

    def scale(self) -> None:
        self.asked += 1
        self.workers += self.limit.ask(self, 1 - self.workers, waiting=True)


async def test_when_there_is_no_worker_for_one_the_others_are_not_asked():
    limit = WorkerLimit(1)
    many = [Poor(limit) for _ in range(50)]
    for one in many:
        one.scale()
    assert [one.workers for one in many[:2]] == [1, 0]
    limit.offer()
    await asyncio.sleep(0)
    assert sum(one.asked for one in many) == 51
    # The one worker ends, and the next one gets it.
    limit.leave(many[0])
    await asyncio.sleep(0)
    assert [one.workers for one in many[1:4]] == [1, 0, 0]
    assert sum(one.asked for one in many) == 53
