"""The latest cold starts of a function, each with its phases as a waterfall."""

from __future__ import annotations

import asyncio

import pytest
from live import Gateway
from pilotflame.runtime.ground.telemetry.cold_starts import KEPT, ColdStarts
from pilotflame.runtime.ground.telemetry.invocation_end import InvocationEnd
from pilotflame.runtime.ground.telemetry.timeline import PHASES, Activation, Timeline, parse_server_timing

pytestmark = pytest.mark.asyncio(loop_scope="module")

SLEEPS = "import time\ndef handler(event):\n    time.sleep(event)\n    return event"


async def test_a_cold_start_is_a_waterfall_without_gaps(deploy, gateway: Gateway):
    function = await deploy(SLEEPS)
    await function.settled(ready=0)
    assert (await function.status())["latest_cold_starts"] == []
    response = await function.call(0.2)
    assert response.headers["X-Cold-Start"] == "true"
    await function.answer(0)
    status = await function.status()
    (cold,) = status["latest_cold_starts"]
    assert cold["request_id"] == response.headers["X-Request-Id"]
    assert [phase["name"] for phase in cold["phases"]] == list(PHASES)
    end_ms = 0.0
    for phase in cold["phases"]:
        assert phase["start_ms"] == pytest.approx(end_ms, abs=0.01)
        end_ms += phase["duration_ms"]
    assert cold["total_ms"] == pytest.approx(end_ms, abs=0.01)
    # The handler's own time belongs to the invocation, and not to its cold start.
    assert cold["total_ms"] - cold["cold_start_ms"] >= 200
    assert status["last_cold_start_ms"] == pytest.approx(cold["cold_start_ms"], abs=0.001)
    assert list(status["last_cold_start_phases_ms"]) == ["queue", "fork", "restore", "dispatch"]
    rows = (await gateway.client.get("/v1/console")).json()["functions"]
    row = next(one for one in rows if one["name"] == function.name)
    assert row["last_cold_start"] == cold
    assert sum(row["last_cold_phases_ms"].values()) == pytest.approx(cold["cold_start_ms"], abs=0.01)
    assert sum(row["cold_phases_s"].values()) * 1000 == pytest.approx(cold["cold_start_ms"], abs=0.01)


async def test_a_call_that_waited_for_other_calls_is_no_cold_start(deploy):
    """All of them came before the worker was ready. The last two waited for it, and then for the calls before them."""
    function = await deploy(f"{SLEEPS}\ndef setup(context):\n    time.sleep(0.3)", {"scale.max": 1})
    await function.settled(ready=0)
    answers = await asyncio.gather(*(function.call(0.2) for _ in range(3)))
    (cold,) = [one for one in answers if one.headers["X-Cold-Start"] == "true"]
    status = await function.status()
    assert [one["request_id"] for one in status["latest_cold_starts"]] == [cold.headers["X-Request-Id"]]
    for warm in answers:
        if warm is not cold:
            phases = parse_server_timing(warm.headers["Server-Timing"])
            assert phases["queue"] >= 200
            assert "dispatch" not in phases


async def test_a_redeploy_keeps_the_latest_cold_start(deploy, gateway: Gateway):
    function = await deploy(SLEEPS)
    await function.settled(ready=0)
    await function.answer(0)
    before = await function.status()
    again = await gateway.deploy(SLEEPS + "\n", name=function.name)
    after = await again.status()
    assert after["revision"] != before["revision"]
    assert after["last_cold_start_ms"] == before["last_cold_start_ms"] > 0
    assert after["latest_cold_starts"] == before["latest_cold_starts"]
    assert after["latest_cold_starts"][0]["revision"] == before["revision"]


async def test_only_the_last_ones_are_kept():
    starts = ColdStarts()
    assert (starts.latest, starts.told()) == (None, [])
    for number in range(KEPT + 5):
        timeline = Timeline(1.0, 4.0, 6.0, 7.0, exec_s=1.0, activation=Activation(1.5, 2.0, 3.0))
        starts.note(InvocationEnd("tone", "r1", f"q{number}", "http", timeline))
    told = starts.told()
    assert [one["request_id"] for one in told] == [f"q{number}" for number in range(5, KEPT + 5)]
    assert (told[-1]["cold_start_ms"], told[-1]["total_ms"]) == (3000.0, 6000.0)
    assert starts.told(1) == told[-1:]
