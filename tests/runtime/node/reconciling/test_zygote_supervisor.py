"""The zygote supervisor: standbys, zygotes and bases that die, and functions that cannot be forked."""

from __future__ import annotations

import asyncio

import psutil
import pytest
from live import Gate, gateway_here, gone, until
from pilotflame.runtime.ground.telemetry.rung_name import RungName
from pilotflame.runtime.node.reconciling import zygote_supervisor
from serving_handlers import OPENS_A_DEVICE, PID, THREADED, WAITS, kill

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_killed_standby_fails_nothing(deploy):
    function = await deploy(PID)
    await function.settled(standby=True)
    (standby,) = await function.pids("standby")
    await kill(standby)
    worker, _ = await function.answer()
    assert worker != standby


async def test_a_killed_zygote_lets_its_workers_finish(deploy, gate: Gate):
    function = await deploy(WAITS, {"scale.max": 1}, gate=gate)
    running = asyncio.create_task(function.answer("runs"))
    worker = (await gate.next("runs")).pid
    (zygote,) = await function.pids("zygote")
    await kill(zygote)
    await until(lambda: logged(function, "the zygote died"), "the zygote's death in the log")
    gate.open()
    assert await running == worker
    # The worker drains when its zygote dies, so it ends after its call.
    await gone(worker)
    assert await function.answer("next") != worker
    assert await function.pids("zygote") != [zygote]


async def test_a_zygote_that_dies_again_and_again(deploy):
    function = await deploy(PID)
    for _ in range(3):
        await until(lambda: function.pids("zygote"), "a zygote")
        (zygote,) = await function.pids("zygote")
        await kill(zygote)
        await function.answer()


async def test_a_zygote_does_not_end_under_a_worker_that_starts_for_nobody(gateway, deploy, gate: Gate):
    source = "import gate\ndef setup(context):\n    gate.wait('setup')\ndef handler(event):\n    return event"
    settings = {"hold_s": 0.2, "scale.idle_timeout_s": 0}
    function = await deploy(source, settings, gate=gate, check=False)
    # The caller gives up while the worker still starts.
    assert (await function.error())["type"] == "activation_timeout"
    (zygote,) = await function.pids("zygote")
    gateway.server.functions.get(function.name).workers.function.ladder.yield_to(RungName.LOCAL)
    assert await function.pids("zygote") == [zygote]
    gate.open()
    # The worker is idle once it is ready. Then worker and zygote end.
    await function.settled(ready=0, zygote=False)


async def test_a_failed_import_is_logged_as_one_error(deploy, gateway):
    await deploy(PID)
    for _ in range(8):
        assert (await gateway.send("import nosuchmodule\n", name="broken")).status_code == 422
    function = gateway.function("broken")
    errors = [line["text"] for line in await function.lines() if line["level"] == "error"]
    assert len(errors) == 8, errors


async def test_a_zygote_that_died_is_not_launched_again_below_its_rung(gateway, deploy, monkeypatch):
    # The delay must be long enough for the steps below on a busy machine.
    monkeypatch.setattr(zygote_supervisor, "FIRST_RELAUNCH_DELAY_S", 3.0)
    function = await deploy(PID, {"scale.idle_timeout_s": 600})
    for death in (1, 2):
        await until(lambda: function.pids("zygote"), "a zygote")
        (zygote,) = await function.pids("zygote")
        await kill(zygote)
        # Wait for the line in the log: the status names the dead process until the gateway has seen its end.
        await until(lambda died=death: deaths(function, died), f"death {death} in the log")
    # The second launch comes after a delay. Memory becomes short during this delay.
    gateway.server.functions.get(function.name).workers.function.ladder.yield_to(RungName.LOCAL)
    await until(lambda: logged(function, "no new zygote is launched"), "the line in the log")
    assert await function.pids("zygote") == []
    assert await function.answer() is not None


async def test_a_killed_base_is_started_again(state):
    async with gateway_here(state) as gateway:
        function = await gateway.deploy(PID)
        await function.settled(standby=True)
        (zygote,) = await function.pids("zygote")
        base = psutil.Process(zygote).ppid()
        await kill(base)
        # The zygote ends when its base dies.
        await gone(zygote)
        worker, parent = await function.answer()
        assert psutil.Process(parent).ppid() not in (base, 1)
        other = await gateway.deploy(PID)
        assert (await other.answer())[0] != worker


async def test_a_function_that_uses_a_device_at_import_is_spawned(deploy):
    function = await deploy(OPENS_A_DEVICE + PID, {"scale.idle_timeout_s": 0})
    (warning,) = function.described["warnings"]
    assert "spawned, not forked" in warning
    assert "handler.py is open" in warning
    assert "into setup(context)" in warning
    worker, _ = await function.answer()
    await gone(worker)
    assert (await function.answer())[0] != worker


async def test_every_base_asks_for_gpus_without_using_one(deploy):
    source = "import os\nFOUND = os.environ.get('PYTORCH_NVML_BASED_CUDA_CHECK')\ndef handler(event):\n    return FOUND"
    assert await (await deploy(source)).answer() == "1"


async def test_a_function_with_threads_at_import_is_spawned(deploy):
    function = await deploy("import chatty\n" + PID, {"scale.idle_timeout_s": 0}, files=THREADED)
    (warning,) = function.described["warnings"]
    assert "spawned, not forked" in warning
    assert "importing chatty" in warning
    assert "put `import chatty` into setup(context)" in warning
    status = await function.settled(ready=0)
    assert status["warnings"] == [warning]
    for _ in range(2):
        response = await function.call()
        assert response.headers["x-cold-start"] == "true"
        await gone(response.json()[0])
        await function.settled(ready=0)
    assert any("importing chatty" in line["text"] for line in await function.lines())


async def test_a_spawned_standby_becomes_the_worker(deploy):
    function = await deploy("import chatty\n" + PID, {"scale.idle_timeout_s": 0}, files=THREADED)
    for _ in range(2):
        await function.settled(ready=0, standby=True)
        (standby,) = await function.pids("standby")
        assert (await function.answer())[0] == standby
        await gone(standby)


async def deaths(function, count: int) -> bool:
    return sum("the zygote died" in line["text"] for line in await function.lines()) == count


async def logged(function, text: str) -> bool:
    return any(text in line["text"] for line in await function.lines())
