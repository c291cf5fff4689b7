"""Bookings of GPU memory in a real gateway. Its settings name the GPUs, and no worker uses a GPU.

The weights lie on a simulated device, so workers park as they would with a GPU.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
from live import Gate, Gateway, failure, gateway_here, until
from pilotflame.runtime.calls.serving import replica
from pilotflame.runtime.ground.settings.resources import CONTEXT_MB
from pilotflame.runtime.node.launching.nvidia_gpus import NvidiaDriver
from pilotflame.runtime.node.reconciling.gpu_bookings import GpuBookings, node_processes
from pilotflame.runtime.node.scaling import allocation
from pilotflame.runtime.node.scaling.claims import ProcessState
from pilotflame.runtime.node.scaling.placement import Gpu, GpuNeed
from serving_handlers import KEEPS_MEMORY, KEPT_MB, ON_DEVICE, PID, device_weights

pytestmark = pytest.mark.asyncio(loop_scope="module")

MEMORY_MB = 16384
PLAIN = "import gate, os\ndef handler(event):\n    gate.wait(event)\n    return os.getpid(), os.environ.get('CUDA_VISIBLE_DEVICES')"
STAYS = {"scale.idle_timeout_s": 1000}


def needs(memory_mb: int | None = 10240, gpus: int = 1) -> dict[str, Any]:
    memory = {} if memory_mb is None else {"resources.gpu_memory_mb": memory_mb}
    return {"resources.gpus": gpus, "scale.max": 1, **memory, **STAYS}


@pytest_asyncio.fixture(loop_scope="module")
async def one_gpu(state: Path) -> AsyncIterator[Gateway]:
    async with gateway_here(state, gpus=(f"0:{MEMORY_MB}",)) as gateway:
        yield gateway


@pytest_asyncio.fixture(loop_scope="module")
async def two_gpus(state: Path) -> AsyncIterator[Gateway]:
    async with gateway_here(state, gpus=("GPU-a:16384", "GPU-b:8192")) as gateway:
        yield gateway


async def held_mb(gateway: Gateway) -> dict[str, float]:
    readings = await gateway.server.node.revisions.reconciler.gpus.readings()
    held = next(one for one in readings if one.name == "gpu_held_bytes")
    return {gpu: size / (1 << 20) for (gpu,), size in held.values.items()}


async def booked_mb(gateway: Gateway) -> int:
    """Return the booked memory of GPU 0 from the metrics."""
    (line,) = [
        line
        for line in (await gateway.client.get("/metrics")).text.splitlines()
        if line.startswith('pilotflame_gpu_held_bytes{gpu="0"}')
    ]
    return int(float(line.partition(" ")[2])) >> 20


def actions(gateway: Gateway, function: Any, cause: str = "gpus") -> list[str]:
    history = gateway.server.functions.get(function.name).workers.function
    return [one.action for one in history.decisions.since(0) if one.cause == cause]


async def test_the_place_of_a_start_whose_process_has_died_may_be_given_back() -> None:
    """The start goes on after the death of the process, because it fetches weights."""
    places = GpuBookings((Gpu("0", MEMORY_MB),), NvidiaDriver())
    one = SimpleNamespace(gpu_need=GpuNeed(1, 1000), renew_standby=lambda: False)
    place = places.take(one, {"0": 1000})  # type: ignore[arg-type]
    places.free(place)
    found = list(node_processes([], [place], places.of_owner(one)))  # type: ignore[arg-type]
    assert [process.state for process in found] == [ProcessState.STARTING]


async def test_two_that_do_not_fit_together_take_turns(one_gpu: Gateway, tmp_path: Path):
    functions, rights = [], []
    for number in range(2):
        rights.append(device_weights(tmp_path / str(number), number))
        overrides = {"snapshot": str(tmp_path / str(number)), **needs()}
        functions.append(await one_gpu.deploy(ON_DEVICE, overrides))
    workers = [set[int](), set[int]()]
    for turn in range(100):
        number = turn % 2
        worker, found = await functions[number].answer(turn)
        assert found == rights[number](turn)
        workers[number].add(worker)
        assert (await held_mb(one_gpu))["0"] <= MEMORY_MB
    # The workers were parked and woken, and not started anew.
    assert [len(pids) for pids in workers] == [1, 1]
    assert await held_mb(one_gpu) == {"0": 10240 + CONTEXT_MB}
    assert "park" in actions(one_gpu, functions[0])
    assert (await functions[0].settled(parked=1))["rung"] == "parked"


async def test_callers_of_both_at_once_are_all_answered(one_gpu: Gateway, tmp_path: Path):
    functions, rights = [], []
    for number in range(3):
        rights.append(device_weights(tmp_path / str(number), number))
        overrides = {"snapshot": str(tmp_path / str(number)), **needs()}
        functions.append(await one_gpu.deploy(ON_DEVICE, overrides))

    async def call(turn: int) -> None:
        _, found = await functions[turn % 3].answer(turn)
        assert found == rights[turn % 3](turn)

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        for turn in range(60):
            tasks.create_task(call(turn))
    assert (await held_mb(one_gpu))["0"] <= MEMORY_MB


async def test_a_worker_whose_weights_do_not_park_is_ended(one_gpu: Gateway, gate: Gate):
    gate.open()
    first = await one_gpu.deploy(PLAIN, needs(), gate=gate)
    second = await one_gpu.deploy(PLAIN, needs(), gate=gate)
    before, _ = await first.answer(1)
    await second.answer(2)
    assert "stop" in actions(one_gpu, first)
    after, _ = await first.answer(3)
    assert after != before
    assert await held_mb(one_gpu) == {"0": 10240}


async def test_two_that_fit_share_the_gpu(one_gpu: Gateway, gate: Gate):
    gate.open()
    functions = [await one_gpu.deploy(PLAIN, needs(8192), gate=gate) for name in ("a", "b")]
    pids = [(await one.answer(1))[0] for one in functions]
    assert [(await one.answer(2))[0] for one in functions] == pids
    assert await held_mb(one_gpu) == {"0": MEMORY_MB}
    # Each function is billed for its half of the GPU.
    lives = [one_gpu.server.functions.get(one.name) for one in functions]
    assert [live.devices for live in lives] == [0.5, 0.5]
    assert [live.workers.function.ladder.measured.figures.devices for live in lives] == [0.5, 0.5]


async def test_a_busy_worker_is_left_alone_and_the_caller_is_told(one_gpu: Gateway, gate: Gate):
    busy = await one_gpu.deploy(PLAIN, needs(), gate=gate, check=False)
    running = asyncio.create_task(busy.answer("busy"))
    arrived = await gate.next("busy")
    late = await one_gpu.deploy(PLAIN, {"timeout_s": 0.5, **needs()}, gate=gate, check=False)
    error = await late.error("late")
    assert (error["status"], error["type"]) == (504, "deadline_exceeded")
    assert "The node's GPUs (1) have no room" in error["message"]
    assert actions(one_gpu, late) == ["refuse"]
    waiting = asyncio.create_task(late.call("again"))
    await late.settled(queued=1)
    arrived.go()
    await running
    (await gate.next("again")).go()
    assert (await waiting).status_code == 200


async def test_a_killed_worker_gives_its_place_back(one_gpu: Gateway, gate: Gate):
    gate.open()
    function = await one_gpu.deploy(PLAIN, needs(), gate=gate)
    pid, _ = await function.answer(1)
    os.kill(pid, 9)

    async def free() -> bool:
        return await held_mb(one_gpu) == {"0": 0}

    await until(free, "the place of a killed worker")


async def test_what_never_fits_is_refused_at_the_deploy(one_gpu: Gateway):
    for overrides in ({"resources.gpus": 2}, {"resources.gpus": 1, "resources.gpu_memory_mb": 20000}):
        error = failure(await one_gpu.send(PLAIN, overrides))
        assert (error["status"], error["type"]) == (422, "settings_invalid")
        assert "resources.gpus" in error["message"]
        assert "0 with 16384 MiB" in error["message"]


async def test_several_gpus_are_never_slices(state: Path, gate: Gate):
    gate.open()
    async with gateway_here(state, gpus=("MIG-a:16384", "MIG-b:8192", "GPU-c:8192")) as gateway:
        error = failure(await gateway.send(PLAIN, needs(1024, gpus=2)))
        assert (error["status"], error["type"]) == (422, "settings_invalid")
        assert "a process can use one MIG slice only" in error["message"]
        # A function that needs one GPU may have a slice instead.
        function = await gateway.deploy(PLAIN, needs(16384), gate=gate)
        assert (await function.answer(1))[1] == "MIG-a"


async def test_workers_are_told_which_gpus_are_theirs(two_gpus: Gateway, gate: Gate):
    gate.open()
    seen = {}
    for name, overrides in {
        "small": needs(4096), "large": needs(9000), "slice": needs(None), "both": needs(1024, gpus=2),
        "none": {"resources.gpus": 0},
    }.items():  # fmt: skip
        function = await two_gpus.deploy(PLAIN, overrides, gate=gate)
        seen[name] = (await function.answer(1))[1]
    # The small function goes where the least memory stays free. A function that wants a whole GPU gets the GPU of a
    # worker that ends for it.
    assert (seen["small"], seen["large"], seen["none"]) == ("GPU-b", "GPU-a", "")
    assert seen["slice"] in {"GPU-b", "GPU-a"}
    assert sorted(seen["both"].split(",")) == ["GPU-a", "GPU-b"]


async def test_several_workers_of_a_function_are_on_several_gpus(two_gpus: Gateway, gate: Gate):
    overrides = {**needs(6000), "scale.max": 3}
    function = await two_gpus.deploy(PLAIN, overrides, gate=gate, check=False)
    calls = [asyncio.create_task(function.answer("now")) for _ in range(3)]
    for arrival in [await gate.next("now") for _ in range(3)]:
        arrival.go()
    assert sorted({seen for _, seen in await asyncio.gather(*calls)}) == ["GPU-a", "GPU-b"]
    assert await held_mb(two_gpus) == {"GPU-a": 12000, "GPU-b": 6000}


async def test_a_function_is_deployed_again_although_its_worker_holds_the_gpu(one_gpu: Gateway, gate: Gate):
    gate.open()
    kept = needs() | {"scale.min": 1}
    function = await one_gpu.deploy(PLAIN, kept, gate=gate)
    before, _ = await function.answer(1)
    again = await one_gpu.send(PLAIN, kept, name=function.name, gate=gate)
    assert again.status_code == 201, again.text
    after, _ = await function.answer(2)
    assert after != before
    await function.settled(ready=1)


async def test_a_busy_function_is_deployed_again(one_gpu: Gateway, gate: Gate):
    function = await one_gpu.deploy(PLAIN, needs(), gate=gate, check=False)
    calls = [asyncio.create_task(function.answer("now")) for _ in range(2)]
    first = await gate.next("now")
    deploying = asyncio.create_task(one_gpu.send(PLAIN, needs(), name=function.name, gate=gate))
    await function.settled(draining=1)
    first.go()
    response = await deploying
    assert response.status_code == 201, response.text
    # The other call waited in the queue of the old revision. This revision gets a worker for the call.
    (await gate.next("now")).go()
    assert len(await asyncio.gather(*calls)) == 2


async def test_a_deploy_comes_before_those_who_wait(one_gpu: Gateway, gate: Gate):
    busy = await one_gpu.deploy(PLAIN, needs(), gate=gate, check=False)
    calls = [asyncio.create_task(busy.answer("busy"))]
    first = await gate.next("busy")
    other = await one_gpu.deploy(PLAIN, needs(), gate=gate, check=False)
    waiting = asyncio.create_task(other.answer("other"))
    await other.settled(queued=1)
    deploying = asyncio.create_task(one_gpu.send(PLAIN, needs(), gate=gate))

    async def waits() -> bool:
        readings = await one_gpu.server.node.revisions.reconciler.gpus.readings()
        return next(one for one in readings if one.name == "gpu_waiting").values == {(): 2.0}

    await until(waits, "a deploy that waits for room")
    # The busy worker takes no further call, and the deploy gets its place.
    await busy.settled(draining=1, in_flight=1)
    calls.append(asyncio.create_task(busy.answer("busy")))
    first.go()
    assert (await deploying).status_code == 201
    assert not waiting.done()
    gate.open()
    await asyncio.gather(*calls, waiting)


async def test_who_becomes_idle_for_long_makes_room_for_more(two_gpus: Gateway, gate: Gate):
    wide = await two_gpus.deploy(PLAIN, {**needs(6000), "scale.max": 3}, gate=gate, check=False)
    other = await two_gpus.deploy(PLAIN, needs(8000), gate=gate, check=False)
    calls = [asyncio.create_task(wide.answer("wide")) for _ in range(2)]
    arrived = [await gate.next("wide") for _ in range(2)]

    async def started() -> bool:
        # While `wide` starts a worker for further calls, this worker cannot make room, so a busy worker would drain.
        return not (await wide.status())["workers"]["starting"]

    await until(started, "the end of all starts")
    once = asyncio.create_task(other.answer("other"))
    (await gate.next("other")).go()
    await once
    # `wide` needs a third worker, because the calls of its two workers do not end. No event tells when the other function's
    # worker has been idle for a second.
    calls.append(asyncio.create_task(wide.answer("third")))
    (await gate.next("third")).go()
    for one in arrived:
        one.go()
    await asyncio.gather(*calls)
    assert "stop" in actions(two_gpus, other)


async def test_workers_that_the_owner_keeps_stay(one_gpu: Gateway, gate: Gate):
    kept = await one_gpu.deploy(PLAIN, needs(8192) | {"scale.max": 2, "scale.min": 1}, gate=gate, check=False)
    calls = [asyncio.create_task(kept.answer("now")) for _ in range(2)]
    for arrival in [await gate.next("now") for _ in range(2)]:
        arrival.go()
    await asyncio.gather(*calls)
    large = await one_gpu.deploy(PLAIN, needs(16000) | {"timeout_s": 1.5}, gate=gate, check=False)
    error = await large.error("large")
    assert "no room" in error["message"]
    assert (await kept.status())["workers"]["ready"] >= 1
    assert "stop" not in actions(one_gpu, kept)


async def test_who_waits_for_long_gets_the_gpu_of_a_busy_function(
    one_gpu: Gateway, gate: Gate, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(allocation, "PATIENCE_S", 0.1)
    busy = await one_gpu.deploy(PLAIN, needs(), gate=gate, check=False)
    calls = [asyncio.create_task(busy.answer("busy")) for _ in range(3)]
    first = await gate.next("busy")
    late = await one_gpu.deploy(PLAIN, needs(), gate=gate, check=False)
    waiting = asyncio.create_task(late.answer("late"))
    await busy.settled(draining=1, queued=2)
    first.go()
    (await gate.next("late")).go()
    await waiting
    gate.open()
    assert len(await asyncio.gather(*calls)) == 3


async def test_a_worker_that_does_not_park_in_time_is_killed(
    one_gpu: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(replica, "EXIT_TIMEOUT_S", 0.2)
    functions = []
    for number in range(2):
        device_weights(tmp_path / str(number), number)
        overrides = {"snapshot": str(tmp_path / str(number)), **needs()}
        functions.append(await one_gpu.deploy(ON_DEVICE, overrides))
    stuck, _ = await functions[0].answer(1)
    os.kill(stuck, signal.SIGSTOP)
    await functions[1].answer(1)
    pid, _ = await functions[0].answer(2)
    assert pid != stuck


async def test_a_warm_up_makes_others_make_room(one_gpu: Gateway, gate: Gate):
    gate.open()
    first = await one_gpu.deploy(PLAIN, needs(), gate=gate, check=False)
    second = await one_gpu.deploy(PLAIN, needs(), gate=gate, check=False)
    await first.answer(1)
    await one_gpu.server.functions.get(second.name).workers.pool.zygote.open()
    one_gpu.server.functions.get(second.name).workers.warm(1)
    await second.settled(ready=1)
    assert (await first.status())["workers"]["ready"] == 0


async def test_one_that_parks_by_itself_is_not_ended_for_others(two_gpus: Gateway, gate: Gate):
    busy = await two_gpus.deploy(PLAIN, needs(16384), gate=gate, check=False)
    running = asyncio.create_task(busy.answer("busy"))
    arrived = await gate.next("busy")
    # `other` fits only where the busy worker is, and no caller waits for `other`.
    other = await two_gpus.deploy(PLAIN, needs(16000), gate=gate, check=False)
    two_gpus.server.functions.get(other.name).workers.warm(1, "schedule")
    parks = await two_gpus.deploy(PLAIN, needs(8000) | {"scale.park_after_s": 0}, gate=gate, check=False)
    once = asyncio.create_task(parks.answer("parks"))
    (await gate.next("parks")).go()
    before, _ = await once
    await parks.settled(parked=1)
    gate.open()
    after, _ = await parks.answer("again")
    assert after == before
    arrived.go()
    await running


async def test_a_worker_that_ends_anyway_is_waited_for(one_gpu: Gateway, gate: Gate):
    gate.open()
    functions = [await one_gpu.deploy(PLAIN, needs(8000), gate=gate, check=False) for _ in range(3)]
    await functions[0].answer(1)
    before, _ = await functions[1].answer(1)
    os.kill((await functions[0].pids("worker"))[0], signal.SIGSTOP)
    one_gpu.server.functions.get(functions[0].name).workers.pool.stop(
        one_gpu.server.functions.get(functions[0].name).workers.replicas
    )
    waiting = asyncio.create_task(functions[2].answer(1))
    await functions[2].settled(queued=1)
    os.kill((await functions[0].pids("worker"))[0], signal.SIGCONT)
    await waiting
    after, _ = await functions[1].answer(1)
    assert after == before


REHEARSES = """
import os
SEEN = []
def rehearse(context):
    SEEN.append(os.environ.get("CUDA_VISIBLE_DEVICES"))
def handler(event):
    return SEEN, os.environ.get("CUDA_VISIBLE_DEVICES")
"""


@pytest.mark.parametrize("gpus", [1, 2])
async def test_a_standby_rehearses_only_on_gpus_that_it_will_have(
    state: Path, monkeypatch: pytest.MonkeyPatch, gpus: int
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    async with gateway_here(state, gpus=("0:16384", "1:16384")) as gateway:
        function = await gateway.deploy(REHEARSES, needs(gpus=gpus))
        await function.settled(standby=True)
        rehearsed, seen = await function.answer(1)
    assert rehearsed == ([] if gpus == 1 else [seen])
    assert len(seen.split(",")) == gpus


@pytest.mark.parametrize(("gpus", "limit"), [(1, "0=4096M"), (2, "0=4096M,1=4096M")])
async def test_mps_is_told_how_much_memory_a_worker_has(state: Path, gpus: int, limit: str):
    source = "import os\ndef handler(event):\n    return os.environ['CUDA_MPS_PINNED_DEVICE_MEM_LIMIT']"
    async with gateway_here(state, gpus=("a:16384", "b:16384")) as gateway:
        function = await gateway.deploy(source, needs(gpus=gpus, memory_mb=4096))
        assert await function.answer() == limit


async def test_a_parked_worker_is_booked_with_what_it_keeps(one_gpu: Gateway, tmp_path: Path):
    functions, rights = [], []
    for number in range(2):
        rights.append(device_weights(tmp_path / str(number), number))
        overrides = {"snapshot": str(tmp_path / str(number)), **needs(12000 if number else 10240)}
        functions.append(
            await one_gpu.deploy(KEEPS_MEMORY, overrides | {"scale.park_after_s": 0}, check=False)
        )
    first, _ = await functions[0].answer(0)
    await functions[0].settled(parked=1)

    async def told() -> bool:
        return await booked_mb(one_gpu) == KEPT_MB + CONTEXT_MB

    await until(told, "what the parked worker keeps")
    # The other function does not fit beside the parked worker, so that worker ends.
    _, found = await functions[1].answer(1)
    assert found == rights[1](1)
    other, found = await functions[0].answer(2)
    assert found == rights[0](2)
    assert other != first
    assert await booked_mb(one_gpu) <= MEMORY_MB


REHEARSES_ON_GPU = """
import os
def rehearse(context):
    with open("{folder}/rehearsed", "a") as lines:
        lines.write(f"{{os.getpid()}}\\n")
def handler(event):
    return os.getpid()
"""


async def test_standbys_are_booked_limited_and_end_first(state: Path, tmp_path: Path):
    source = REHEARSES_ON_GPU.format(folder=tmp_path)
    (tmp_path / "rehearsed").touch()
    # Two standbys rehearse, and each keeps a context. A third standby has too little memory beside them to rehearse.
    async with gateway_here(state, gpus=("0:1700",)) as gateway:
        functions = [
            await gateway.deploy(source, needs(1024) | {"scale.idle_timeout_s": 0}) for _ in range(4)
        ]

        async def rest() -> bool:
            for one in functions:
                await one.settled(ready=0, draining=0, standby=True)
            standbys = {pid for one in functions for pid in await one.pids("standby")}
            rehearsed = {int(line) for line in (tmp_path / "rehearsed").read_text().split()}
            booked = await booked_mb(gateway)
            return (len(standbys), len(standbys & rehearsed), booked) == (4, 2, 2 * CONTEXT_MB)

        await until(rest, "standbys, two of them with contexts")
        # A worker that needs the whole GPU gets the memory of the standbys.
        large = await gateway.deploy(PID, needs(1700) | {"scale.idle_timeout_s": 0}, check=False)
        await large.answer(1)
        for one in functions:
            assert await one.answer(1)
