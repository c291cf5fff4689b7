"""Stored revisions: which one is live, which are kept to go back to, and which are pruned."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from live import Gate, failure, gateway_here, gone, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

WAITS = "import gate\ndef handler(event):\n    gate.wait(str(event))\n    return event"


async def test_a_rollback_makes_an_older_revision_live_also_after_a_restart(state):
    def version(number: int) -> str:
        return f"def handler(event):\n    return {number}"

    async def roll(gateway, **order) -> str:
        response = await gateway.client.post("/v1/functions/undone/rollback", json=order)
        assert response.status_code == 200, response.text
        return response.json()["revision"].partition("-")[0]

    async def listed(gateway) -> dict[str, str]:
        found = (await gateway.client.get("/v1/functions/undone/revisions")).json()["revisions"]
        return {one["revision"].partition("-")[0]: one["state"] for one in found}

    async with gateway_here(state) as gateway:
        for number in (1, 2, 3):
            function = await gateway.deploy(version(number), name="undone")
        assert await roll(gateway) == "r2"
        assert await function.answer() == 2
        assert await roll(gateway) == "r1"
        assert await roll(gateway, revision="r3") == "r3"
        assert await roll(gateway, revision="1") == "r1"
        assert await function.answer() == 1

        async def drained() -> bool:
            return await listed(gateway) == {"r3": "stored", "r2": "stored", "r1": "live"}

        await until(drained, "the end of the old revisions")
        refused = await gateway.client.post("/v1/functions/undone/rollback")
        assert failure(refused)["type"] == "unknown_revision"
    async with gateway_here(state) as gateway:
        assert await gateway.function("undone").answer() == 1
        assert (await gateway.send(version(4), name="undone")).json()["revision"].startswith("r4-")


async def test_old_revisions_are_pruned_but_not_while_they_drain(state, gate: Gate):
    async with gateway_here(state, keep_revisions=1) as gateway:
        function = await gateway.deploy(WAITS, name="pruned", gate=gate)
        running = asyncio.create_task(function.answer("runs"))
        await gate.next("runs")
        folder = gateway.state / "functions" / "pruned"

        def stored() -> set[str]:
            return {path.name.partition("-")[0] for path in folder.glob("r*")}

        for number in (2, 3):
            await gateway.deploy(f"def handler(event):\n    return {number}", name="pruned")

        async def pruned() -> bool:
            return stored() == {"r1", "r3"}

        await until(pruned, "r2 pruned and r1 kept")
        gate.open()
        assert await running == "runs"

        async def alone() -> bool:
            return stored() == {"r3"}

        await until(alone, "r1 pruned")


async def test_a_revision_that_a_rollback_proves_is_not_pruned(state, gate: Gate, tmp_path: Path):
    held = tmp_path / "held"
    proof = "import os\ndef setup(context):\n    if os.path.exists(os.environ['HELD']):\n        gate.wait('proof')"
    async with gateway_here(state, keep_revisions=1) as gateway:
        source = f"{WAITS}\n{proof}"
        function = await gateway.deploy(source, {"env.HELD": str(held)}, name="proved", gate=gate)
        running = asyncio.create_task(function.answer("runs"))
        call = await gate.next("runs")
        await gateway.deploy("def handler(event):\n    return 'new'", name="proved")
        held.touch()
        rolling = asyncio.create_task(gateway.client.post("/v1/functions/proved/rollback"))
        await gate.next("proof")
        # When the last call of the first revision has ended, the gateway prunes old revisions.
        call.go()
        assert await running == "runs"

        async def pruned() -> bool:
            return not gateway.server.node.retirements._ending

        await until(pruned, "the end of the retirement")
        gate.open()
        response = await rolling
        assert response.status_code == 200, response.text
        assert await function.answer("again") == "again"
        assert len(list((state / "functions" / "proved").glob("r1-*/code/handler.py"))) == 1


async def test_a_revision_that_cannot_be_stored_as_live_leaves_no_process(state, gate: Gate):
    async with gateway_here(state) as gateway:
        function = await gateway.deploy("def handler(event):\n    return 'old'", name="stuck")
        current = state / "functions" / "stuck" / "current"
        current.unlink()
        (current / "in the way").mkdir(parents=True)
        source = (
            "import gate\ndef setup(context):\n    gate.wait('setup')\ndef handler(event):\n    return 'new'"
        )
        deploying = asyncio.create_task(gateway.send(source, name="stuck", gate=gate))
        proof = await gate.next("setup")
        proof.go()
        assert "current cannot be written" in failure(await deploying)["message"]
        assert "current cannot be written" in (await function.logged("was not deployed"))["text"]
        await gone(proof.pid)
        assert [path.name.partition("-")[0] for path in current.parent.glob("r*")] == ["r1"]
        assert await function.answer() == "old"
