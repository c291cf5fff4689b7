"""The memory of idle functions: none for unused functions, and no more than the limit for all together."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from live import Function, gateway_here, gone, until
from pilotflame.runtime.ground.telemetry.rung_name import RungName
from pilotflame.runtime.node.functions.live import Live
from pilotflame.runtime.node.measuring import idle_memory_limit, node_memory
from pilotflame.runtime.node.measuring.idle_memory_limit import IdleStats, never_used, next_check_s
from pilotflame.runtime.node.measuring.node_memory import FunctionMemory, NodeMemory

LIGHT = "import os\ndef handler(event):\n    return os.getpid()"
# The import takes so long that the zygote is worth its memory.
HEAVY = "import time\ntime.sleep(0.4)\n" + LIGHT
SETTLE_S = 0.05


@pytest.fixture
def quick(monkeypatch):
    """Measure memory a moment after each change, and count a function as unused after one second."""
    for name, seconds in (("FIRST_S", SETTLE_S), ("SETTLE_S", SETTLE_S), ("PAUSE", 0.0)):
        monkeypatch.setattr(node_memory, name, seconds)
    for name, seconds in (("SOONEST_S", SETTLE_S), ("RECHECK_S", 0.1), ("UNUSED_S", 1.0)):
        monkeypatch.setattr(idle_memory_limit, name, seconds)


def one(name: str, held_mb: float = 10.0, **how: object) -> IdleStats:
    return IdleStats(**{"name": name, "held_mb": held_mb, "idle": True, "light": False, "used_s": 1.0, "since_s": 0.0, **how})  # fmt: skip


def test_light_functions_that_were_never_used_rest_after_a_while():
    stats = [one("used", light=True), one("unused", light=True, used_s=0.0), one("heavy", used_s=0.0)]
    stats += [one("busy", light=True, used_s=0.0, idle=False), one("gone", 0.0, light=True, used_s=0.0)]
    assert never_used(stats, idle_memory_limit.UNUSED_S - 1) == []
    assert never_used(stats, idle_memory_limit.UNUSED_S) == ["unused"]


def test_functions_that_hold_nothing_or_were_used_are_not_checked_again() -> None:
    resting, used = one("resting", 0.0, light=True, used_s=0.0), one("used", light=True)
    assert next_check_s([resting, used, one("heavy", used_s=0.0)], 1e6) == math.inf
    waiting = one("waiting", light=True, used_s=0.0, since_s=100.0)
    assert next_check_s([resting, used, waiting], 150.0) == idle_memory_limit.UNUSED_S - 50.0
    in_use = one("in use", light=True, used_s=0.0, idle=False)
    assert next_check_s([in_use], idle_memory_limit.UNUSED_S + 1) == idle_memory_limit.RECHECK_S


@pytest.mark.asyncio
async def test_a_function_that_rests_causes_no_more_checks(state, quick, monkeypatch) -> None:
    checks, check = [], idle_memory_limit.IdleMemoryLimit.check

    async def counted(self: idle_memory_limit.IdleMemoryLimit, memory: NodeMemory) -> float:
        checks.append(self)
        return await check(self, memory)

    monkeypatch.setattr(idle_memory_limit.IdleMemoryLimit, "check", counted)
    async with gateway_here(state, keep_bases=False) as gateway:
        function = await gateway.deploy(LIGHT, {"scale.idle_timeout_s": 0})
        await function.settled(zygote=False, standby=False)
        before = len(checks)
        await gateway.deploy(HEAVY)
        await asyncio.sleep(20 * SETTLE_S)
        # The start of the second function's worker causes a check, its deploy causes another, and more follow until the
        # worker is idle. The resting function causes no check.
        assert before < len(checks) <= before + 5


@pytest.mark.asyncio
async def test_a_check_measures_only_functions_that_have_changed(state, quick, monkeypatch) -> None:
    measured, note = list[str](), idle_memory_limit._noted

    def noted(live: Live, memory: FunctionMemory) -> IdleStats:
        measured.append(live.record.function)
        return note(live, memory)

    monkeypatch.setattr(idle_memory_limit, "_noted", noted)
    monkeypatch.setattr(node_memory, "DRIFT", 10.0)
    async with gateway_here(state, keep_bases=False) as gateway:
        first, second = [await gateway.deploy(HEAVY, {"scale.idle_timeout_s": 0.5}) for _ in range(2)]
        for function in (first, second):
            await function.settled(zygote=True, standby=True)
        await asyncio.sleep(10 * SETTLE_S)
        measured.clear()
        await second.answer()

        async def checked() -> bool:
            return second.name in measured

        await until(checked, "a measurement of the called function")
        assert first.name not in measured
        assert 0.5 < (await first.status())["rest_mb"] < 100


@pytest.mark.asyncio
async def test_a_light_function_holds_nothing_until_it_is_used(state, quick):
    async with gateway_here(state, keep_bases=False) as gateway:
        light = await gateway.deploy(LIGHT, {"scale.idle_timeout_s": 0})
        heavy = await gateway.deploy(HEAVY)
        await light.settled(zygote=False, standby=False)
        assert await light.answer() > 0
        # After a call, its zygote and standby are kept. The processes of the heavy function are kept from its deploy on.
        await light.settled(zygote=True, standby=True)
        await asyncio.sleep(1.5)
        await light.settled(zygote=True, standby=True)
        await heavy.settled(zygote=True, standby=True)
        status = await heavy.status()
        assert 0.5 < status["rest_mb"] < 100


@pytest.mark.asyncio
async def test_after_a_restart_a_light_function_has_only_a_base(state):
    async with gateway_here(state, keep_bases=False) as gateway:
        for name, source in (("light", LIGHT), ("heavy", HEAVY)):
            await gateway.deploy(source, name=name)
    async with gateway_here(state, keep_bases=False) as gateway:
        await gateway.function("heavy").settled(zygote=True, standby=True)
        await gateway.function("light").settled(zygote=False, standby=False)
        (zygote,) = await gateway.function("heavy").pids("zygote")
        base = psutil.Process(zygote).ppid()
        assert len(psutil.Process(base).children()) == 1
        assert (await gateway.function("light").call()).headers["x-cold-start"] == "true"


@pytest.mark.asyncio
async def test_beside_an_idle_worker_both_rungs_are_measured(state, quick):
    async with gateway_here(state, keep_bases=False) as gateway:
        function = await gateway.deploy(HEAVY)
        await function.answer()
        assert gateway.server is not None
        ladder = gateway.server.functions.get(function.name).workers.function.ladder

        async def measured() -> bool:
            return {*ladder.measured.figures.held_bytes} >= {RungName.READY, RungName.ZYGOTE}

        await until(measured, "figures of both rungs")
        held = ladder.measured.figures.held_bytes
        assert 1e6 < held[RungName.ZYGOTE] < held[RungName.READY] < 1e9


@pytest.mark.asyncio
async def test_the_limit_ends_zygotes_and_then_the_base(state, quick):
    async with gateway_here(state, keep_bases=False, rest_mb=0) as gateway:
        function = await gateway.deploy(HEAVY, {"scale.idle_timeout_s": 0.3})
        worker = await function.answer()
        (zygote,) = await function.pids("zygote")
        base = psutil.Process(zygote).ppid()
        assert base == psutil.Process(worker).parents()[1].pid
        # While the function has a worker, its zygote and base stay.
        for pid in (worker, zygote, base):
            await gone(pid)
        await function.settled(zygote=False, standby=False)
        await function.logged("was evicted to files alone")
        why = "functions without workers held more than rest_mb"
        assert why in (await function.status())["cold_because"]
        view = (await gateway.client.get("/v1/console")).json()
        assert why in next(one["cold_because"] for one in view["functions"] if one["name"] == function.name)
        assert gateway.server is not None
        decisions = gateway.server.functions.get(function.name).workers.function.decisions.since(0)
        # Take the last eviction: there is an earlier one if the first call came long after the deploy.
        evicted = [one for one in decisions if one.action == "evict"][-1]
        assert (evicted.cause, evicted.figures["rung"]) == ("rest_mb", 2)
        assert evicted.figures["freed_bytes"] > 1e6
        again = await function.call()
        assert again.headers["x-cold-start"] == "true"


@pytest.mark.asyncio
async def test_a_zygote_that_a_signal_holds_does_not_count_as_freed(state, quick):
    async with gateway_here(state, keep_bases=False, rest_mb=0) as gateway:
        held = await gateway.deploy(HEAVY, {"budget.seconds_per_day": 0.01})
        assert gateway.server is not None
        workers = gateway.server.functions.get(held.name).workers
        # The budget is used up, so the signal keeps the zygote but gets no worker.
        workers.warm(1, "warmup", 1000.0)
        await workers.pool.zygote.open()
        before = len(workers.function.decisions.since(0))
        other = await gateway.deploy(HEAVY, {"scale.idle_timeout_s": 0})
        await other.logged("functions without workers held more than rest_mb")
        # Look for evictions only, because the signal's own decisions may come after `before`.
        assert "evict" not in [one.action for one in workers.function.decisions.since(0)[before:]]
        await held.settled(zygote=True)


@pytest.mark.asyncio
async def test_the_base_of_deleted_functions_ends(state):
    async with gateway_here(state, keep_bases=False) as gateway:
        first, second = [await gateway.deploy(LIGHT) for _ in range(2)]
        base = await base_of(first)
        assert await base_of(second) == base
        await gateway.client.delete(f"/v1/functions/{first.name}")
        assert await second.answer() > 0
        assert psutil.pid_exists(base)
        # A new revision uses the same base, also after the old one has ended.
        await gateway.deploy(HEAVY, name=second.name)
        assert await base_of(second) == base
        await gateway.client.delete(f"/v1/functions/{second.name}")
        await gone(base)
        third = await gateway.deploy(LIGHT)
        assert await third.answer() > 0


async def base_of(function: Function) -> int:
    await until(lambda: function.pids("zygote"), "a zygote")
    (zygote,) = await function.pids("zygote")
    base = psutil.Process(zygote).parent()
    assert base is not None
    assert base.pid != psutil.Process().pid
    return base.pid


@pytest.mark.asyncio
async def test_warm_ups_end_when_memory_is_short_and_no_other_function_can_step_down(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Callable[[], None]] = []
    short = False

    class Pressure:
        def __init__(self, on_pressure: Callable[[], None]) -> None:
            told.append(on_pressure)

        def short_bytes(self) -> float:
            return 1e12 * short

        def close(self) -> None:
            pass

    monkeypatch.setattr(idle_memory_limit, "MemoryPressure", Pressure)
    async with gateway_here(state) as gateway:
        idle, held = [await gateway.deploy(LIGHT) for _ in range(2)]
        assert await idle.answer() > 0
        warm = {"workers": 1, "for_s": 86_400}
        assert (await gateway.client.post(f"/v2/{held.name}/warmup", params=warm)).is_success
        await held.settled(ready=1)
        short = True
        told[0]()
        await idle.logged("idle, memory is short: it held")
        await held.logged("its warm-up ends because memory is short")
        await held.settled(ready=0)
