"""A call that has started runs to its own deadline on its own revision, whatever replaces or deletes the revision."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from live import LIMIT_S, Function, Gate, Gateway, events, failure, gateway_here, gone, short_folder, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

# A call may run on for longer than this time: it ends only if other calls wait for the place of its worker.
DRAIN_S = 0.2
SOURCE = """
import gate
VERSION = {version}
async def handler(event):
    await gate.wait_async(f"{{VERSION}} {{event}}")
    return [VERSION, event]
"""
FINE = {"concurrency": 8, "scale.max": 1}


@pytest.fixture(autouse=True)
def _no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("node.reconciling.carry_out.MIN_TEARDOWN_S", "calls.link.child.STACKS_TIMEOUT_S"):
        monkeypatch.setattr(f"pilotflame.runtime.{name}", 0.1)


def version(number: int) -> str:
    return SOURCE.format(version=number)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[Gateway]:
    """A gateway whose `drain_s` is much shorter than the calls."""
    with short_folder() as folder:
        async with gateway_here(folder / "state", drain_s=DRAIN_S) as found:
            yield found


async def replaced(gateway: Gateway, function: Function, how: str) -> None:
    path = f"/v1/functions/{function.name}"
    if how == "deploy":
        return
    response = await gateway.client.post(f"{path}/{how}", json={})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("how", ["deploy", "restart", "rollback", "delete"])
async def test_a_started_call_outlives_its_revision(gateway, deploy, gate: Gate, how: str):
    function = await deploy(version(1), FINE, gate=gate)
    if how == "rollback":
        await deploy(version(2), FINE, name=function.name, gate=gate)
    running = asyncio.create_task(function.answer("runs"))
    begun = await gate.next()
    if how == "deploy":
        await deploy(version(2), FINE, name=function.name, gate=gate)
    elif how == "delete":
        assert (await gateway.client.delete(f"/v1/functions/{function.name}")).status_code == 200
    else:
        await replaced(gateway, function, how)
    # Wait for longer than `drain_s` and the time in which the gateway would kill the worker of the call.
    await asyncio.sleep(DRAIN_S + 0.6)
    assert not running.done()
    begun.go()
    assert await running == [2 if how == "rollback" else 1, "runs"]
    await gone(begun.pid)


async def test_a_delete_answers_while_calls_run_and_its_name_is_free(gateway, deploy, gate: Gate):
    secret = {"value": "old"}
    function = await deploy(version(1), FINE, name="gone", gate=gate)
    await gateway.client.put("/v1/functions/gone/secrets/TOKEN", json=secret)
    running = asyncio.create_task(function.answer("runs"))
    begun = await gate.next()
    async with asyncio.timeout(LIMIT_S):
        assert (await gateway.client.delete("/v1/functions/gone")).json() == {"deleted": "gone"}
    await asyncio.sleep(DRAIN_S + 0.6)
    assert not running.done()
    assert failure(await function.call("late"))["type"] == "unknown_function"
    source = "import os\ndef handler(event):\n    return os.environ.get('TOKEN', 'none')"
    await deploy(source, name="gone")
    assert await function.answer() == "none"
    found = (await gateway.client.get("/v1/functions/gone/revisions")).json()["revisions"]
    assert [one["state"] for one in found] == ["live"]
    refused = await gateway.client.post("/v1/functions/gone/rollback", json={})
    assert failure(refused)["type"] == "unknown_revision"
    begun.go()
    assert await running == [1, "runs"]
    await gone(begun.pid)

    async def alone() -> bool:
        return len(list((gateway.state / "functions" / "gone").glob("r*"))) == 1

    await until(alone, "the end of the deleted revision's files")
    # The end of the deleted function must not remove the counts of the new function.
    metrics = (await gateway.client.get("/metrics")).text
    assert 'pilotflame_invocations_total{code="200",function="gone",source="http"}' in metrics
    assert await function.answer() == "none"


async def test_a_function_that_is_deleted_while_calls_run_is_gone_after_a_kill(state: Path, gate: Gate):
    async with gateway_here(state, drain_s=0.0) as gateway:
        function = await gateway.deploy(version(1), FINE, name="gone", gate=gate)
        call = asyncio.create_task(function.call("runs"))
        await gate.next()
        await gateway.client.delete("/v1/functions/gone")
        # Only the code is left on the disk, also if the gateway is killed now.
        kept = list((state / "functions" / "gone").glob("*/*"))
        assert {path.name for path in kept} == {"code"}
        assert gateway.server is not None
        assert gateway.server.functions.store.functions() == {}
    # The call may fail, because the client leaves before the gateway.
    await asyncio.gather(call, return_exceptions=True)
    async with gateway_here(state) as gateway:
        assert (await gateway.client.get("/v1/functions")).json()["functions"] == []
        assert not (state / "functions" / "gone").exists()


async def test_a_replacement_beyond_three_draining_revisions_is_refused(gateway, deploy, gate: Gate):
    function, calls, begun = await deploy(version(0), FINE, name="many", gate=gate), [], []
    for number in (1, 2, 3):
        calls.append(asyncio.create_task(function.answer("runs")))
        begun.append(await gate.next())
        await deploy(version(number), FINE, name="many", gate=gate)
    for response in (
        await gateway.send(version(4), FINE, name="many", gate=gate),
        await gateway.client.post("/v1/functions/many/restart", json={}),
        await gateway.client.post("/v1/functions/many/rollback", json={}),
    ):
        error = failure(response)
        assert (error["status"], error["type"]) == (409, "revisions_draining")
        assert "3 replaced revisions of many" in error["message"]
        assert "r1-" in error["message"]
        assert error["remedy"]
    begun[0].go()
    assert await calls[0] == [0, "runs"]

    async def accepted() -> bool:
        return (await gateway.client.post("/v1/functions/many/restart", json={})).status_code == 200

    await until(accepted, "a restart after the end of a revision")
    for arrival in begun[1:]:
        arrival.go()
    assert [await call for call in calls[1:]] == [[1, "runs"], [2, "runs"]]


async def test_changed_secrets_arrive_after_a_revision_has_drained(gateway, deploy, gate: Gate):
    source = "import os\n" + SOURCE.replace("[VERSION,", "[os.environ.get('TOKEN', 'none'),")
    function, calls, begun = await deploy(source.format(version=0), FINE, gate=gate), [], []
    for number in (1, 2, 3):
        calls.append(asyncio.create_task(function.answer("runs")))
        begun.append(await gate.next())
        await deploy(source.format(version=number), FINE, name=function.name, gate=gate)
    await gateway.client.put(f"/v1/functions/{function.name}/secrets/TOKEN", json={"value": "new"})
    await function.logged("which wait for")
    begun[0].go()
    gate.open()

    async def renewed() -> bool:
        return await function.answer("again") == ["new", "again"]

    await until(renewed, "the changed secret")
    await asyncio.gather(*calls)


# -- where old and new workers do not fit


@pytest_asyncio.fixture(loop_scope="module")
async def narrow(tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """Yield a function: `await narrow(**settings)` starts a gateway. The tests' settings leave room for one worker."""
    del tmp_path
    stack: list[Any] = []

    async def opened(**settings: Any) -> Gateway:
        folder = short_folder()
        stack.append((folder, None))
        context = gateway_here(folder.__enter__() / "state", drain_s=DRAIN_S, **settings)
        found = await context.__aenter__()
        stack[-1] = (folder, context)
        return found

    yield opened
    for folder, context in stack:
        if context is not None:
            await context.__aexit__(None, None, None)
        folder.__exit__(None, None, None)


@pytest.mark.parametrize("idempotent", [False, True], ids=["once", "idempotent"])
async def test_calls_that_wait_for_old_calls_wait_for_drain_s(narrow, gate: Gate, idempotent: bool):
    gateway = await narrow(max_workers=1)
    settings = {**FINE, "idempotent": idempotent}
    function = await gateway.deploy(version(1), settings, name="one", gate=gate)
    running = asyncio.create_task(function.call("runs"))
    await gate.next("1 runs")
    # Deploy without a start-up check, whose worker may exceed the limit. So the new revision has no worker.
    await gateway.deploy(version(2), settings, name="one", gate=gate, check=False)
    began_s = time.monotonic()
    waits = asyncio.create_task(function.answer("waits"))
    (await gate.next("2 waits")).go()
    assert await waits == [2, "waits"]
    assert DRAIN_S <= time.monotonic() - began_s < DRAIN_S + 20
    response = await running
    error = failure(response)
    assert error["type"] == "revision_replaced"
    assert "(drain_s)" in error["message"]
    assert error["remedy"]
    if idempotent:
        assert (error["status"], int(response.headers["retry-after"]) > 0) == (503, True)
        assert "x-should-retry" not in response.headers
    else:
        assert (error["status"], response.headers["x-should-retry"]) == (500, "false")
        assert "retry-after" not in response.headers
    await counted_apart(gateway, function, "revision_replaced")
    explained = (await gateway.client.get("/v1/functions/one/decisions")).text
    assert "ended 1 worker with 1 running call" in explained


async def counted_apart(gateway: Gateway, function: Function, code: str) -> None:
    metrics = (await gateway.client.get("/metrics")).text
    assert f'pilotflame_failures_total{{error="{code}",function="{function.name}"}} 1.0' in metrics
    assert f'pilotflame_worker_deaths_total{{function="{function.name}"}} 0.0' in metrics
    assert 'error="worker_died"' not in metrics


async def test_a_stream_that_is_ended_for_new_calls_ends_with_the_named_event(narrow, gate: Gate):
    gateway = await narrow(max_workers=1)
    source = "import gate\ndef handler(event):\n    yield 'first'\n    gate.wait('runs')\n    yield 'never'"
    function = await gateway.deploy(source, name="one", gate=gate)
    running = asyncio.create_task(function.call())
    await gate.next("runs")
    await gateway.deploy("def handler(event):\n    return event", name="one", check=False)
    assert await function.answer("new") == "new"
    last = events((await running).text)[-1]
    assert (last[1], last[2]["type"]) == ("error", "revision_replaced")


async def replaced_on_one_gpu(
    narrow, gate: Gate
) -> tuple[Function, asyncio.Task[httpx.Response], asyncio.Task[httpx.Response]]:
    """Deploy a second version while a call of the first version runs. The deploy needs the worker's place, so it waits for
    the call. Return the function, the call and the deploy.
    """
    gateway = await narrow(gpus="0:1000")
    settings = {**FINE, "resources.gpus": 1}
    function = await gateway.deploy(version(1), settings, name="one", gate=gate)
    running = asyncio.create_task(function.call("runs"))
    await gate.next("1 runs")
    deploying = asyncio.create_task(gateway.send(version(2), settings, name="one", gate=gate))
    await until(lambda: displaced(function), "a worker that makes room for the proof")
    return function, running, deploying


async def test_on_one_gpu_old_calls_end_and_waiting_calls_are_answered(narrow, gate: Gate):
    function, running, deploying = await replaced_on_one_gpu(narrow, gate)
    assert not deploying.done()
    gate.open()
    assert (await running).json() == [1, "runs"]
    assert (await deploying).status_code == 201
    assert await function.answer("new") == [2, "new"]


async def displaced(function: Function) -> bool:
    workers = (await function.status())["workers"]
    return bool(workers["draining"] and not workers["ready"])


async def test_on_one_gpu_calls_wait_at_most_drain_s_for_an_old_call(narrow, gate: Gate):
    function, running, deploying = await replaced_on_one_gpu(narrow, gate)
    waits = asyncio.create_task(function.answer("waits"))
    assert failure(await running)["type"] == "revision_replaced"
    gate.open()
    assert (await deploying).status_code == 201
    assert (await waits)[1] == "waits"


@pytest.mark.parametrize(
    ("settings", "status"), [({"attempts": 1}, "FAILED"), ({"attempts": 1, "idempotent": True}, "COMPLETED")]
)
async def test_a_job_that_is_ended_runs_again_as_its_attempts_allow(narrow, gate: Gate, settings, status):
    gateway = await narrow(max_workers=1)
    function = await gateway.deploy(version(1), {**FINE, **settings}, name="one", gate=gate)
    job = (await gateway.client.post("/v2/one/run", json={"input": "job"})).json()["id"]
    await gate.next("1 job")
    await gateway.deploy(version(2), {**FINE, **settings}, name="one", gate=gate, check=False)
    waits = asyncio.create_task(function.answer("waits"))
    (await gate.next("2 waits")).go()
    await waits
    gate.open()
    found: dict[str, Any] = {}

    async def ended() -> bool:
        found.update((await gateway.client.get(f"/v2/one/status/{job}")).json())
        return found["status"] in ("FAILED", "COMPLETED")

    await until(ended, "the end of the job")
    assert found["status"] == status
    if status == "FAILED":
        assert found["errorDetails"]["type"] == "revision_replaced"
    else:
        assert found["output"] == [2, "job"]


async def test_an_old_revision_holds_no_standby(gateway, deploy, gate: Gate):
    function = await deploy(version(1), FINE, gate=gate)
    first = asyncio.create_task(function.answer("first"))
    (await gate.next()).go()
    await first
    await function.settled(ready=1, standby=True)
    (standby,) = await function.pids("standby")
    running = asyncio.create_task(function.answer("runs"))
    begun = await gate.next()
    await deploy(version(2), FINE, name=function.name, gate=gate)
    await gone(standby)
    begun.go()
    assert await running == [1, "runs"]


async def test_calls_of_the_old_revision_that_wait_still_run_there(gateway, deploy, gate: Gate):
    source = "import gate\ndef handler(event):\n    gate.wait(f'old {event}')\n    return ['old', event]"
    function = await deploy(source, {"scale.max": 1}, gate=gate)
    calls = [asyncio.create_task(function.answer(number)) for number in range(3)]
    first = await gate.next()
    await function.settled(ready=1, queued=2)
    await deploy("def handler(event):\n    return 'new'", name=function.name)
    assert await function.answer() == "new"
    await asyncio.sleep(DRAIN_S)
    first.go()
    gate.open()
    assert await asyncio.gather(*calls) == [["old", number] for number in range(3)]
