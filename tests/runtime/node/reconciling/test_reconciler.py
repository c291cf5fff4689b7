"""The gateway's `max_workers`: the distribution of workers among functions, and the error for a caller without a worker."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
from live import LIMIT_S, TRUSTED, Gate, Gateway, failure, gateway_here
from pilotflame.runtime.node.launching.nvidia_gpus import NvidiaDriver
from pilotflame.runtime.node.reconciling.gpu_bookings import GpuBookings
from pilotflame.runtime.node.reconciling.observed import LOOK_EVERY_S
from pilotflame.runtime.node.reconciling.reconciler import Reconciler
from pilotflame.runtime.node.scaling.claims import Grant, NodeProcess, ProcessState, RevisionClaim, WorkerTier
from pilotflame.runtime.node.scaling.seen import Seen
from pilotflame.runtime.node.scaling.table import Proposal, Rank, Row

pytestmark = pytest.mark.asyncio(loop_scope="module")

WAITS = "import gate, os\ndef handler(event):\n    gate.wait(event)\n    return os.getpid()"
# Idle workers stay for so long that only a limit ends them.
STAYS = {"scale.idle_timeout_s": 1000}


@pytest_asyncio.fixture(loop_scope="module")
async def small(state: Path) -> AsyncIterator[Gateway]:
    async with gateway_here(state, max_workers=4) as gateway:
        yield gateway


def actions(gateway: Any, function: Any, cause: str) -> list[str]:
    history = gateway.server.functions.get(function.name).workers.function
    return [one.action for one in history.decisions.since(0) if one.cause == cause]


async def test_one_at_zero_gets_a_worker_of_one_that_has_many(small: Gateway, gate: Gate):
    rich = await small.deploy(WAITS, {"name": "rich", "scale.max": 10, **STAYS}, gate=gate, check=False)
    poor = await small.deploy(WAITS, {"name": "poor", "scale.max": 10, **STAYS}, gate=gate, check=False)
    many = [asyncio.create_task(rich.answer("many")) for _ in range(8)]
    arrived = [await gate.next("many") for _ in range(4)]
    await rich.settled(ready=4, in_flight=4, queued=4)
    assert actions(small, rich, "max_workers")[0] == "refuse"
    one = asyncio.create_task(poor.answer("one"))
    # One of the four workers takes no new call, and ends after its call.
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
    # When the call of a worker ends, the next caller gets a worker in its place.
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
    await small.deploy(WAITS + "\n", {"scale.max": 3, **STAYS}, name="a", gate=gate)
    # The limit is reached: after the three workers of before, only the worker that checks the new revision starts.
    text = (await small.client.get("/metrics")).text
    assert 'pilotflame_activations_total{function="a",outcome="ready"} 4.0' in text


async def test_a_full_node_takes_nothing_from_scale_min(small: Gateway, gate: Gate):
    kept = await small.deploy(WAITS, {"scale.min": 4, "scale.max": 4}, name="kept", gate=gate)
    calls = [asyncio.create_task(kept.answer("kept")) for _ in range(4)]
    arrived = [await gate.next("kept") for _ in range(4)]
    await kept.settled(ready=4, in_flight=4)
    late = await small.deploy(WAITS, {"timeout_s": 0.5}, name="late", gate=gate, check=False)
    assert (await late.error("late"))["type"] == "deadline_exceeded"
    assert (await kept.status())["workers"] == {"ready": 4, "parked": 0, "starting": 0, "draining": 0}
    for arrival in arrived:
        arrival.go()
    await asyncio.gather(*calls)


# -- the limits of owners


async def deployer(gateway: Gateway, name: str, **fields: Any) -> dict[str, Any]:
    """Make a key, let the client deploy with it, and return it."""
    async with gateway.at_home() as home:
        response = await home.post(
            "/v1/keys", json={"name": name, "scopes": ["deploy", "invoke"], "policy": TRUSTED, **fields}
        )
    assert response.status_code == 201, response.text
    key: dict[str, Any] = response.json()
    gateway.client.headers["Authorization"] = f"Bearer {key['key']}"
    return key


async def test_the_functions_of_an_owner_share_what_their_key_allows(state: Path, gate: Gate):
    async with gateway_here(state) as gateway:
        key = await deployer(gateway, "small", max_workers=2)
        assert key["max_workers"] == 2
        rich = await gateway.deploy(WAITS, {"scale.max": 8, **STAYS}, name="rich", gate=gate, check=False)
        many = [asyncio.create_task(rich.answer("many")) for _ in range(4)]
        arrived = [await gate.next("many") for _ in range(2)]
        await rich.settled(ready=2, in_flight=2, queued=2)
        assert actions(gateway, rich, "owner_limit") == ["refuse"]
        # The limit does not apply to a function of another owner.
        await deployer(gateway, "large")
        other = await gateway.deploy(WAITS, {"scale.max": 8, **STAYS}, name="other", gate=gate, check=False)
        others = [asyncio.create_task(other.answer("other")) for _ in range(3)]
        for _ in range(3):
            (await gate.next("other")).go()
        await asyncio.gather(*others)
        # A second function of the same owner gets the place of a worker of the first function, although other owners have idle
        # workers.
        async with gateway.at_home() as home:
            gateway.client.headers["Authorization"] = f"Bearer {key['key']}"
            poor = await gateway.deploy(WAITS, {**STAYS}, name="poor", gate=gate, check=False)
            one = asyncio.create_task(poor.answer("one"))
            await rich.settled(ready=1, draining=1, in_flight=2)
            assert actions(gateway, rich, "owner_limit") == ["refuse", "stop"]
            assert actions(gateway, other, "owner_limit") == []
            for arrival in arrived:
                arrival.go()
            (await gate.next("one")).go()
            assert isinstance(await one, int)
            gate.open()
            assert len({*await asyncio.gather(*many)}) <= 3
            answer = await home.get("/v1/functions/rich/decisions")
            assert answer.status_code == 200, answer.text
            told = answer.json()["decisions"]
        assert any("the functions of its owner may have no more" in row["text"] for row in told)


async def test_who_gets_none_because_of_the_owners_limit_is_told_so_and_it_outlives_the_gateway(
    state: Path, gate: Gate
):
    async with gateway_here(state) as gateway:
        key = await deployer(gateway, "one", max_workers=1)
        await gateway.deploy(WAITS, {**STAYS}, name="busy", gate=gate, check=False)
        await gateway.deploy(WAITS, {"timeout_s": 0.5, **STAYS}, name="late", gate=gate, check=False)
    async with gateway_here(state) as gateway:
        gateway.client.headers["Authorization"] = f"Bearer {key['key']}"
        call = asyncio.create_task(gateway.function("busy").answer("busy"))
        await gate.next("busy")
        late = gateway.function("late")
        error = await late.error("late")
        assert (error["status"], error["type"]) == (504, "deadline_exceeded")
        assert "functions of its owner may have 1 worker" in error["message"]
        assert error["details"]["owner_limit"] == 1
        assert actions(gateway, late, "owner_limit") == ["refuse"]
        gate.open()
        await call
        assert isinstance(await late.answer("late"), int)


async def test_a_key_that_deploys_nothing_has_no_limit_of_workers(gateway: Gateway):
    async with gateway.at_home() as home:
        response = await home.post("/v1/keys", json={"name": "caller", "max_workers": 3})
    assert failure(response)["status"] == 400
    assert "max_workers needs the scope deploy" in response.text


# -- looks


async def test_a_cold_start_of_one_worker_needs_two_looks_until_its_answer(state: Path):
    async with gateway_here(state) as gateway:
        function = await gateway.deploy(
            "def handler(event):\n    return event", {"scale.idle_timeout_s": 0.1}
        )
        for _ in range(2):
            await function.settled(ready=0, standby=True)
            before = await looks(gateway)
            assert (await function.call()).headers["x-cold-start"] == "true"
            assert await looks(gateway) - before <= 2


async def test_calls_for_which_the_workers_suffice_cause_no_look_each(state: Path):
    async with gateway_here(state) as gateway:
        function = await gateway.deploy("def handler(event):\n    return event", {"scale.idle_timeout_s": 60})
        # Call first, so that the gateway knows the durations of the calls.
        await asyncio.gather(*(function.call() for _ in range(50)))
        before, began_s = await looks(gateway), time.monotonic()
        await asyncio.gather(*(function.call() for _ in range(300)))
        assert await looks(gateway) - before <= (time.monotonic() - began_s) / LOOK_EVERY_S + 20


async def looks(gateway: Gateway) -> float:
    text = (await gateway.client.get("/metrics")).text
    [count] = re.findall(r"^pilotflame_reconciler_looks_total (\S+)$", text, re.MULTILINE)
    return float(count)


class Due:
    """A member that notes that it was looked at, or fails."""

    def __init__(self, key: str, *, fails: bool = False) -> None:
        self.key, self.fails, self.looked = key, fails, asyncio.Event()

    def look(self) -> None:
        self.looked.set()
        if self.fails:
            raise RuntimeError("a defect of one function")


async def test_a_function_whose_look_fails_does_not_stop_the_looks_at_others():
    loop, told = asyncio.get_running_loop(), list[str]()
    before = loop.get_exception_handler()
    loop.set_exception_handler(lambda _loop, context: told.append(str(context["exception"])))
    try:
        reconciler = Reconciler(GpuBookings((), NvidiaDriver()), None, lambda _owner: None, math.inf)
        members = [Due("first", fails=True), Due("second"), Due("third")]
        for number, one in enumerate(members):
            reconciler.limits.join(one)  # type: ignore[arg-type]
            reconciler.look_by(one.key, time.monotonic() + 0.001 * number)
        async with asyncio.timeout(LIMIT_S):
            for one in members:
                await one.looked.wait()
    finally:
        loop.set_exception_handler(before)
    assert told == ["a defect of one function"]


class Wanting:
    """A revision with one draining worker, whose claim wants a number of workers. It also serves as its `observed` and
    `carry_out`.
    """

    gpu_need, owner, urgent, row = None, "", False, Row(0, 0)
    replicas = SimpleNamespace(total=1, parked=[])

    def __init__(self, key: str, wants: dict[WorkerTier, int]) -> None:
        self.key, self.wants, self.granted = key, wants, list[Grant]()
        self.observed = self.carry_out = self

    def claim(self, waiting_since_s: float) -> RevisionClaim:
        most = max(self.wants.values())
        drains = (NodeProcess(self.key, ProcessState.DRAINING),)
        return RevisionClaim(
            self.key, self.key, "", self.wants, most, most, drains, waiting_since_s=waiting_since_s
        )

    def update_row(self, _now_s: float, _arriving: int = 0) -> tuple[Row, Seen]:
        return Row(2, 2, (Proposal(Rank.AHEAD, "warmup", 2),)), Seen(0, 0, 0, 0)

    def settle(self, *_arguments: Any) -> None: ...

    note_limit = at_rest = settle

    def advance(self, _now_s: float) -> float:
        return math.inf

    def look(self) -> None: ...

    def grant(self, grant: Grant, _row: Row, _seen: Seen) -> None:
        self.granted.append(grant)


async def test_a_revision_that_ends_takes_no_place_although_its_last_row_wanted_workers():
    reconciler = Reconciler(GpuBookings((), NvidiaDriver()), 3, lambda _owner: None, math.inf)
    ends, waits = Wanting("ends", {WorkerTier.LOAD: 1}), Wanting("waits", {WorkerTier.AHEAD: 2})
    for one in (ends, waits):
        reconciler.limits.join(one)  # type: ignore[arg-type]
    reconciler.limits.leave(ends)  # type: ignore[arg-type]
    reconciler.look(waits)  # type: ignore[arg-type]
    # Let the event loop run the allocation.
    await asyncio.sleep(0)
    assert [len(grant.start) for grant in waits.granted] == [1]
    assert ends.granted == []
