"""The cause of the start that a call waited for, in its response, in the status and in the metrics."""

from __future__ import annotations

import asyncio
import re

import pytest
from live import Gate, Gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

WAITS = (
    "import gate, os\ndef handler(event):\n    gate.wait(event)\n    os._exit(1) if event == 'die' else None"
)


async def told(gateway: Gateway, name: str) -> dict[str, int]:
    """Return the cold starts of a function by cause, from the metrics."""
    line = re.compile(rf'pilotflame_cold_starts_total{{cause="([a-z-]+)",function="{name}"}} (\d+)')
    return {cause: int(count) for cause, count in line.findall((await gateway.client.get("/metrics")).text)}


async def test_each_call_that_waits_for_a_start_is_cold_and_tells_its_cause(
    gateway: Gateway, deploy, gate: Gate
):
    function = await deploy(WAITS, {"scale.max": 2, "attempts": 1}, gate=gate)
    first = asyncio.create_task(function.call("first"))
    running = await gate.next("first")
    second = asyncio.create_task(function.call("second"))
    (await gate.next("second")).go()
    running.go()
    answers = [await first, await second]
    third = asyncio.create_task(function.call("warm"))
    (await gate.next("warm")).go()
    answers.append(await third)
    assert [one.headers["X-Cold-Start"] for one in answers] == ["true", "true", "false"]
    causes = [re.findall('start;desc="([a-z-]+)"', one.headers["Server-Timing"]) for one in answers]
    assert causes == [["zero"], ["scale-up"], []]
    assert {one["cause"] for one in (await function.status())["latest_cold_starts"]} == {"zero", "scale-up"}
    assert await told(gateway, function.name) == {"zero": 1, "scale-up": 1}


async def test_a_worker_that_takes_the_place_of_a_dead_one_starts_for_its_crash(
    gateway: Gateway, deploy, gate: Gate
):
    function = await deploy(WAITS, {"scale.max": 1, "attempts": 1}, gate=gate)
    dies = asyncio.create_task(function.call("die"))
    running = await gate.next("die")
    waits = asyncio.create_task(function.call("waits"))
    await function.settled(ready=1, queued=1)
    running.go()
    assert (await dies).status_code >= 500
    (await gate.next("waits")).go()
    assert 'start;desc="crash"' in (await waits).headers["Server-Timing"]
    assert (await told(gateway, function.name))["crash"] == 1
