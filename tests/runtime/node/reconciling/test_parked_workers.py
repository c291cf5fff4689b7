"""Parked workers in a real gateway: they give device memory back, wake with right answers, and end like other workers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from live import Gate, Gateway, failure, gateway_here, gone, short_folder, until
from pilotflame.runtime.calls.link.frames import Frame, FrameKind
from pilotflame.runtime.calls.serving import replica
from pilotflame.runtime.ground.telemetry.timeline import parse_server_timing
from serving_handlers import DEVICE_WIDTH, ON_DEVICE, WAITS, device_weights, kill

pytestmark = pytest.mark.asyncio(loop_scope="module")

SLAB_BYTES = 4 * (DEVICE_WIDTH * DEVICE_WIDTH + DEVICE_WIDTH)
SEEDS = itertools.count()
PLAIN = "import os\ndef handler(event):\n    return os.getpid(), event"
STAYS = {"scale.idle_timeout_s": 1000}
PARKS = {"scale.park_after_s": 0, **STAYS}


@pytest.fixture
def weights(tmp_path: Path) -> tuple[Path, Callable[[float], Any]]:
    return tmp_path, device_weights(tmp_path, next(SEEDS))


async def decisions(gateway: Gateway, function: Any, action: str) -> list[dict[str, Any]]:
    response = await gateway.client.get(f"/v1/functions/{function.name}/decisions")
    return [one for one in response.json()["decisions"] if one["action"] == action]


@pytest.mark.parametrize("kind", ["def", "async def"])
async def test_weights_leave_the_device_and_come_back(gateway, deploy, weights, kind: str):
    folder, right = weights
    source = ON_DEVICE.replace("def handler", f"{kind} handler")
    function = await deploy(source, PARKS | {"snapshot": str(folder)})
    worker, found = await function.answer(1)
    assert found == right(1)

    async def told(parks: int) -> bool:
        return len(await decisions(gateway, function, "park")) >= parks

    for turn in range(2, 5):
        status = await function.settled(parked=1)
        assert status["rung"] == "parked"
        # Wait for the decision: a worker that is woken before it has answered the order to park does not count as parked.
        await until(partial(told, turn - 1), "what parking has freed")
        response = await function.call(turn)
        assert response.json() == [worker, right(turn)]
        assert response.headers["x-cold-start"] == "false"
    await function.settled(parked=1)
    await until(partial(told, 4), "what parking has freed")
    freed = [one["figures"]["freed_bytes"] for one in await decisions(gateway, function, "park")]
    assert min(freed) >= SLAB_BYTES
    assert len(await decisions(gateway, function, "wake")) >= 3


@pytest.mark.parametrize("where", ["build", "setup"])
async def test_a_cold_start_tells_how_long_the_copy_ran(deploy, weights, where: str):
    folder, right = weights
    source = ON_DEVICE.replace("def build", f"def {where}")
    function = await deploy(source, STAYS | {"snapshot": str(folder)}, check=False)
    cold, warm = await function.call(1), await function.call(2)
    assert warm.json()[1] == right(2)
    timing = parse_server_timing(cold.headers["server-timing"])
    assert 0 < timing["copy"] <= timing["total"]
    assert 0 < timing["context"] <= timing["total"]
    told = parse_server_timing(warm.headers["server-timing"])
    assert "copy" not in told
    assert "context" not in told


async def test_a_standby_that_rehearses_makes_the_context_before_the_start(deploy, weights, tmp_path):
    folder, right = weights
    mark = tmp_path / "rehearsed"
    mark.touch()
    rehearse = f"handler(1, context)\n    open('{mark}', 'a').write(f'{{os.getpid()}}\\n')"
    source = f"{ON_DEVICE}\ndef rehearse(context):\n    {rehearse}\n"
    function = await deploy(source, {"snapshot": str(folder), "scale.idle_timeout_s": 0})

    async def rehearsed() -> bool:
        standbys = await function.pids("standby")
        return bool(standbys) and str(standbys[0]) in mark.read_text().split()

    await until(rehearsed, "the standby's rehearsal")
    cold = await function.call(1)
    assert cold.json()[1] == right(1)
    timing = parse_server_timing(cold.headers["server-timing"])
    assert timing["copy"] > 0
    assert "context" not in timing


async def test_twenty_turns_do_not_grow_the_worker(deploy, weights):
    folder, right = weights
    # From 64 KiB on, memory that is freed goes back to the kernel at once. Otherwise the allocator would keep some.
    frees_at_once = "import ctypes\nctypes.CDLL(None).mallopt(-3, 64 << 10)\n"
    function = await deploy(frees_at_once + ON_DEVICE, PARKS | {"snapshot": str(folder)})
    sizes = []
    for turn in range(20):
        worker, found = await function.answer(turn)
        assert found == right(turn)
        await function.settled(parked=1)
        sizes.append(psutil.Process(worker).memory_full_info().uss)
    # If the weights of each turn stayed, the worker would grow by 15 slabs.
    assert max(sizes[-3:]) - max(sizes[:5]) < 6 * SLAB_BYTES


async def test_calls_that_arrive_while_it_parks(deploy, weights):
    folder, right = weights
    function = await deploy(ON_DEVICE, PARKS | {"snapshot": str(folder), "scale.max": 1})
    workers = set()
    for turn in range(30):
        # Send the next call directly after the answer, so that only the PARK that follows the answer lies between them.
        worker, found = await function.answer(turn)
        assert found == right(turn)
        workers.add(worker)
    assert len(workers) == 1
    answers = await asyncio.gather(*(function.answer(turn) for turn in range(10)))
    assert [found for _, found in answers] == [right(turn) for turn in range(10)]
    await function.settled(parked=1)


async def test_without_weights_the_metrics_and_the_usage_know_it(gateway, deploy):
    function = await deploy(PLAIN, PARKS)
    worker, _ = await function.answer(1)
    await function.settled(parked=1, rung="parked")
    text = (await gateway.client.get("/metrics")).text
    assert f'pilotflame_workers{{function="{function.name}",state="parked"}} 1.0' in text
    assert f'pilotflame_workers{{function="{function.name}",state="ready"}} 0.0' in text

    async def used() -> bool:
        response = await gateway.client.get("/v1/usage", params={"function": function.name})
        (row,) = response.json()["rows"]
        usage = row["usage"]
        return 0 < usage["parked_s"] <= usage["idle_s"]

    await until(used, "seconds of a parked worker")
    assert await function.answer(2) == [worker, 2]


async def test_a_parked_worker_that_is_killed_is_replaced_when_needed(deploy, weights):
    folder, right = weights
    function = await deploy(ON_DEVICE, PARKS | {"snapshot": str(folder)})
    worker, _ = await function.answer(1)
    await function.settled(parked=1)
    await kill(worker)
    await function.settled(parked=0)
    other, found = await function.answer(2)
    assert other != worker
    assert found == right(2)


async def test_two_are_needed_and_one_is_parked(gateway, deploy, gate: Gate):
    # With a buffer of one, a call needs two workers.
    settings = PARKS | {"scale.buffer": 1, "scale.max": 2}
    function = await deploy(WAITS, settings, gate=gate, check=False)
    first = asyncio.create_task(function.answer("a"))
    (await gate.next("a")).go()
    await first
    await function.settled(parked=2)
    lost, kept = await function.pids("worker")
    await kill(lost)
    await function.settled(parked=1)
    # One worker wakes, and another is forked.
    second = asyncio.create_task(function.answer("b"))
    arrival = await gate.next("b")
    assert arrival.pid == kept
    await function.settled(ready=2)
    both = set(await function.pids("worker"))
    assert kept in both
    arrival.go()
    await second
    await function.settled(parked=2)
    # Both workers wake, and no worker is forked.
    third = asyncio.create_task(function.answer("c"))
    (await gate.next("c")).go()
    await third
    await function.settled(parked=2)
    assert set(await function.pids("worker")) == both
    assert sum(one["figures"]["workers"] for one in await decisions(gateway, function, "wake")) == 3


async def test_it_ends_after_the_idle_timeout_that_counts_from_the_last_call(deploy):
    function = await deploy(PLAIN, {"scale.park_after_s": 0, "scale.idle_timeout_s": 1})
    worker, _ = await function.answer(1)
    await function.settled(parked=1)
    await gone(worker)
    await function.settled(parked=0)


async def test_to_the_keep_alive_policy_it_is_an_idle_worker(state: Path):
    # At a high price of waiting the policy keeps the worker; at a price of 0 it ends the worker.
    async with gateway_here(state, price_waiting_s=1e9) as gateway:
        kept = await gateway.deploy(PLAIN, {"scale.park_after_s": 0})
        worker, _ = await kept.answer(1)
        status = await kept.settled(parked=1, rung="parked")
        assert status["next_rung"] != "ready"
        assert await kept.answer(2) == [worker, 2]
    async with gateway_here(state, price_waiting_s=0) as gateway:
        given_up = gateway.function(kept.name)
        worker, _ = await given_up.answer(1)
        await gone(worker)
        await given_up.settled(parked=0)


async def test_what_the_owner_keeps_is_not_parked(gateway, deploy):
    function = await deploy(PLAIN, PARKS | {"scale.min": 1, "scale.max": 2})
    await function.settled(ready=1)
    await function.answer(1)
    await gateway.client.post(f"/v2/{function.name}/warmup", json={"workers": 2})
    await function.settled(ready=2)
    assert await decisions(gateway, function, "park") == []


async def test_a_signal_wakes_it_ahead_of_a_call(gateway, deploy):
    function = await deploy(PLAIN, PARKS)
    worker, _ = await function.answer(1)
    await function.settled(parked=1)
    await gateway.client.post(f"/v2/{function.name}/warmup", json={})
    await function.settled(ready=1)
    assert await function.pids("worker") == [worker]


async def test_a_new_revision_a_rollback_and_a_delete_end_parked_workers(gateway, weights):
    folder, right = weights
    settings = PARKS | {"snapshot": str(folder)}
    function = await gateway.deploy(ON_DEVICE, settings)
    old, _ = await function.answer(1)
    await function.settled(parked=1)
    await gateway.deploy(ON_DEVICE + "\n", settings, name=function.name)
    await gone(old)
    new, found = await function.answer(2)
    assert found == right(2)
    await function.settled(parked=1)
    response = await gateway.client.post(f"/v1/functions/{function.name}/rollback", json={})
    assert response.status_code < 300, failure(response)
    await gone(new)
    last, found = await function.answer(3)
    assert found == right(3)
    await function.settled(parked=1)
    await gateway.client.delete(f"/v1/functions/{function.name}")
    await gone(last)


async def test_a_gateway_ends_with_a_parked_worker(weights):
    folder, _ = weights
    with short_folder() as state:
        async with gateway_here(state / "state", drain_s=5.0) as gateway:
            function = await gateway.deploy(ON_DEVICE, PARKS | {"snapshot": str(folder)})
            worker, _ = await function.answer(1)
            await function.settled(parked=1)
        await gone(worker)


async def test_a_worker_that_is_woken_before_it_began_to_park_is_not_taken_for_stuck(
    gateway, deploy, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(replica, "EXIT_TIMEOUT_S", 0.1)
    function = await deploy(
        "import os, time\ndef handler(event):\n    time.sleep(event)\n    return os.getpid()", STAYS
    )
    before = await function.answer(0)
    pool = gateway.server.functions.get(function.name).workers.pool
    # Both frames arrive together, so the worker never reports that it has parked.
    pool.park(pool.replicas.idle)
    assert pool.wake(pool.replicas.parked, 1) == 1
    # The call takes longer than a worker may take to park, and then to write its stacks before it is killed.
    assert await function.answer(1.5) == before


async def test_a_late_answer_to_an_earlier_park_is_not_taken_for_that_to_the_last(gateway, deploy, weights):
    folder, _ = weights
    function = await deploy(ON_DEVICE, STAYS | {"snapshot": str(folder)})
    before, _ = await function.answer(1)
    pool = gateway.server.functions.get(function.name).workers.pool
    link = pool.replicas.ready[0].child.link
    deliver, frames = link._on_frame, asyncio.Queue[Frame]()
    link.bind(frames.put_nowait, link._on_close)

    async def parked() -> Frame:
        while (frame := await frames.get()).kind != FrameKind.PARKED:
            deliver(frame)
        return frame

    pool.park(pool.replicas.idle)
    late = await parked()
    assert pool.wake(pool.replicas.parked, 1) == 1
    pool.park(pool.replicas.idle)
    deliver(late)
    assert await decisions(gateway, function, "park") == []
    deliver(await parked())
    assert len(await decisions(gateway, function, "park")) == 1
    link.bind(deliver, link._on_close)
    assert (await function.answer(1))[0] == before
