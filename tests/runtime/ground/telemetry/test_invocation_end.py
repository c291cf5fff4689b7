"""The event that an invocation has ended: metrics, status and load history count it, from any source."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from live import WAITS_ASYNC, Function, Gate, Gateway
from prometheus_client.parser import text_string_to_metric_families

pytestmark = pytest.mark.asyncio(loop_scope="module")

FAILS = """
def handler(event):
    if event:
        raise ValueError("no")
    return 1
"""


async def counted(gateway: Gateway, name: str, **labels: str) -> float:
    """Return the sum of a metric over all samples with these labels."""
    text = (await gateway.client.get("/metrics")).text
    families = text_string_to_metric_families(text)
    return sum(
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


async def run_sync(function: Function, value: Any) -> dict[str, Any]:
    response = await function.client.post(f"/v2/{function.name}/runsync", json={"input": value})
    return dict(response.json())


async def test_jobs_are_counted_as_calls_are(deploy, gateway: Gateway):
    function = await deploy(FAILS)
    assert (await run_sync(function, 0))["status"] == "COMPLETED"
    assert (await run_sync(function, 1))["status"] == "FAILED"
    assert (await function.call(0)).status_code == 200
    assert (await function.call(1)).status_code == 500
    status = await function.status()
    assert status["invocations"] == {"job": {"200": 1, "500": 1}, "http": {"200": 1, "500": 1}}
    of = {"function": function.name}
    assert await counted(gateway, "pilotflame_invocation_seconds_count", **of) == 4
    assert await counted(gateway, "pilotflame_failures_total", error="handler_failed", **of) == 2
    for source in ("job", "http"):
        for code in ("200", "500"):
            assert await counted(gateway, "pilotflame_invocations_total", source=source, code=code, **of) == 1


async def test_a_call_that_took_too_long_is_in_the_log_with_its_id(deploy, gate: Gate):
    function = await deploy(WAITS_ASYNC, gate=gate)
    response = await function.call(0, X_Request_Timeout="0.3")
    assert response.status_code == 504
    line = await function.logged("deadline_exceeded: ")
    assert (line["request_id"], line["level"]) == (response.headers["X-Request-Id"], "error")
    assert (await function.status())["last_errors"][-1]["request_id"] == response.headers["X-Request-Id"]


async def test_a_batch_is_a_source_of_its_own(deploy):
    function = await deploy(FAILS)
    for policy, code in (({"priority": "batch"}, 0), ({"priority": "low"}, 1)):
        body = {"input": code, "policy": policy}
        await function.client.post(f"/v2/{function.name}/runsync", json=body)
    assert (await function.status())["invocations"] == {"batch": {"200": 1}, "job": {"500": 1}}


async def test_a_job_that_waits_for_a_worker_is_a_cold_start(deploy, gateway: Gateway):
    function = await deploy(FAILS)
    await function.settled(ready=0)
    await run_sync(function, 0)
    status = await function.status()
    (cold,) = status["latest_cold_starts"]
    assert cold["request_id"].startswith("job-")
    assert cold["revision"] == status["revision"]
    assert (
        await counted(
            gateway, "pilotflame_cold_start_phase_seconds_count", function=function.name, phase="fork"
        )
        == 1
    )
    load = (await gateway.client.get(f"/v1/functions/{function.name}/load")).json()["samples"]
    assert sum(one["cold"] for one in load) == 1
    slowest_s = max(one["slowest_cold_s"] for one in load)
    assert slowest_s * 1000 == pytest.approx(status["last_cold_start_ms"], abs=0.01)


async def test_a_caller_who_has_gone_is_told_to_nobody(deploy, gate: Gate):
    function = await deploy(WAITS_ASYNC, gate=gate)
    call = asyncio.create_task(function.call(0))
    await gate.next("begun")
    call.cancel()
    await gate.next("cancelled")
    await function.settled(ready=1, in_flight=0)
    assert (await function.status())["invocations"] == {}
