"""A paused function runs nothing: calls are refused, jobs wait, nothing is started ahead, and a restart changes none of that."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from live import Function, Gate, Gateway, failure, gateway_here, gateway_process, gone, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

WAITS = "import gate\ndef handler(event):\n    gate.wait(str(event))\n    return event"
ECHO = "def handler(event):\n    return event"


async def change(gateway: Gateway, function: Function, how: str) -> dict[str, Any]:
    response = await gateway.client.post(f"/v1/functions/{function.name}/{how}")
    assert response.status_code == 200, response.text
    return dict(response.json())


async def job(gateway: Gateway, function: Function, value: object) -> str:
    response = await gateway.client.post(f"/v2/{function.name}/run", json={"input": value})
    assert response.status_code == 200, response.text
    return str(response.json()["id"])


async def state_of(gateway: Gateway, function: Function, job_id: str) -> str:
    return str((await gateway.client.get(f"/v2/{function.name}/status/{job_id}")).json()["status"])


async def done(gateway: Gateway, function: Function, job_id: str) -> None:
    async def completed() -> bool:
        return await state_of(gateway, function, job_id) == "COMPLETED"

    await until(completed, "the end of the job")


async def at_zero(function: Function) -> dict[str, Any]:
    return await function.settled(zygote=False, standby=False, stopped="paused")


async def test_what_runs_ends_and_what_comes_is_refused_with_the_remedy(gateway, deploy, gate: Gate):
    function = await deploy(WAITS, {"scale.min": 1, "scale.max": 1}, gate=gate)
    running = asyncio.create_task(function.answer("runs"))
    arrival = await gate.next("runs")
    waiting = asyncio.create_task(function.error("waits"))
    await function.settled(ready=1, in_flight=1, queued=1)
    assert (await change(gateway, function, "pause"))["stopped"] == "paused"
    for error in (await waiting, await function.error("late")):
        assert (error["status"], error["type"]) == (503, "function_paused")
        assert f"pilotflame resume {function.name}" in error["remedy"]
    arrival.go()
    assert await running == "runs"
    # No worker starts for scale.min, and no zygote is launched.
    await at_zero(function)
    warmup = await gateway.client.post(f"/v2/{function.name}/warmup", json={})
    assert failure(warmup)["type"] == "function_paused"
    assert (await change(gateway, function, "resume"))["stopped"] == ""
    await function.settled(ready=1)
    gate.open()
    assert await function.answer("again") == "again"


async def test_a_zygote_that_is_killed_does_not_come_back(gateway, deploy):
    function = await deploy(ECHO)
    for _ in range(2):
        await until(lambda: function.pids("zygote"), "a zygote")
        (zygote,) = await function.pids("zygote")
        os.kill(zygote, signal.SIGKILL)
        await gone(zygote)
    # The second launch comes after a delay. Pause the function during this delay.
    await function.logged("a new one is launched in 0.5 s")
    await change(gateway, function, "pause")
    await function.logged("no new zygote is launched")
    await at_zero(function)


async def test_it_pauses_at_once_although_a_deploy_takes_long(gateway, deploy, gate: Gate):
    function = await deploy(ECHO, {"scale.min": 1}, gate=gate)
    await function.settled(ready=1)
    slow = f"import gate\ndef setup(context):\n    gate.wait('setup')\n{ECHO} + 1"
    deploying = asyncio.create_task(gateway.send(slow, {"scale.min": 1}, name=function.name, gate=gate))
    arrival = await gate.next("setup")
    await change(gateway, function, "pause")
    assert (await function.error(1))["type"] == "function_paused"
    arrival.go()
    assert (await deploying).status_code == 201
    await at_zero(function)
    gate.open()
    await change(gateway, function, "resume")
    assert await function.answer(1) == 2


async def test_who_waits_for_a_job_is_refused_and_an_unknown_function_is_named(gateway, deploy):
    function = await deploy(ECHO)
    await change(gateway, function, "pause")
    waits = await gateway.client.post(f"/v2/{function.name}/runsync", json={"input": 1})
    assert failure(waits)["type"] == "function_paused"
    unknown = failure(await gateway.client.post(f"/v1/functions/{function.name}x/pause"))
    assert (unknown["status"], unknown["type"]) == (404, "unknown_function")
    assert function.name in unknown["remedy"] + unknown["message"]


async def test_jobs_wait_and_run_once_it_is_resumed(gateway, deploy, gate: Gate):
    function = await deploy(WAITS, {"scale.max": 1}, gate=gate, check=False)
    first = await job(gateway, function, "first")
    arrival = await gate.next("first")
    second = await job(gateway, function, "second")
    await change(gateway, function, "pause")
    third = await job(gateway, function, "third")
    arrival.go()
    await done(gateway, function, first)
    await at_zero(function)
    assert [await state_of(gateway, function, one) for one in (second, third)] == ["IN_QUEUE", "IN_QUEUE"]
    gate.open()
    await change(gateway, function, "resume")
    for one in (second, third):
        await done(gateway, function, one)


async def test_a_schedule_starts_nothing(gateway, deploy):
    function = await deploy(ECHO, {"schedule": [{"cron": "* * * * *", "workers": 1, "for_s": 3600}]})
    await function.settled(ready=1, zygote=True)
    await change(gateway, function, "pause")
    await at_zero(function)
    await change(gateway, function, "resume")
    # The schedule's time has not ended, so its worker starts again.
    await function.settled(ready=1)


async def test_a_deploy_proves_its_revision_and_leaves_it_paused(gateway, deploy):
    function = await deploy(ECHO, {"scale.min": 1})
    await change(gateway, function, "pause")
    await at_zero(function)
    again = await deploy(ECHO + " + 1", {"scale.min": 1}, name=function.name)
    assert again.described["revision"] != function.described["revision"]
    await at_zero(again)
    assert (await again.error(1))["type"] == "function_paused"
    await change(gateway, again, "resume")
    assert await again.answer(1) == 2
    # A second pause changes nothing, and neither does a deploy that fails.
    await change(gateway, again, "pause")
    await change(gateway, again, "pause")
    assert failure(await gateway.send("def handler(", name=function.name))["status"] >= 400
    await at_zero(again)


async def test_it_stays_paused_over_a_kill_and_a_restart(state: Path):
    async with gateway_process(state) as gateway:
        function = await gateway.deploy(ECHO, {"scale.min": 1}, name="kept")
        await function.settled(ready=1)
        await change(gateway, function, "pause")
        waiting = await job(gateway, function, 7)
        assert gateway.process is not None
        gateway.process.kill()
        await gateway.process.wait()
    async with gateway_here(state) as gateway:
        function = gateway.function("kept")
        status = await at_zero(function)
        assert status["activations"] == 0
        assert (await function.error())["type"] == "function_paused"
        assert await state_of(gateway, function, waiting) == "IN_QUEUE"
        await change(gateway, function, "resume")
        await done(gateway, function, waiting)
    async with gateway_here(state) as gateway:
        assert await gateway.function("kept").answer(1) == 1
        await gateway.client.delete("/v1/functions/kept")
        # A new function of the same name is not paused.
        assert await (await gateway.deploy(ECHO, name="kept")).answer(2) == 2
