"""Functions are deleted while calls run."""

from __future__ import annotations

import asyncio

import pytest
from live import Gate, gone, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

WAITS = "import gate\ndef handler(event):\n    gate.wait(str(event))\n    return event"


async def test_a_delete_finishes_accepted_invocations(gateway, deploy, gate: Gate):
    function = await deploy(WAITS, {"scale.max": 1}, gate=gate)
    running = asyncio.create_task(function.answer("runs"))
    worker = (await gate.next("runs")).pid
    waiting = asyncio.create_task(function.answer("waits"))
    await function.settled(ready=1, queued=1)
    zygotes = await function.pids("zygote")
    path = f"/v1/functions/{function.name}"
    revision = gateway.server.functions.live(function.name)
    deleting = asyncio.create_task(gateway.client.delete(path))

    async def retiring() -> bool:
        return revision.retiring

    await until(retiring, "the start of the delete")
    assert (await gateway.client.get(path)).status_code == 404
    assert (await function.call("late")).status_code == 404
    gate.open()
    assert await asyncio.gather(running, waiting) == ["runs", "waits"]
    assert (await deleting).status_code == 200
    for pid in (worker, *zygotes):
        await gone(pid)

    async def removed() -> bool:
        return not (gateway.state / "functions" / function.name).exists()

    await until(removed, "the end of its files")
