"""A function's account is charged for the files of its stored revisions, and not of removed ones. Gateway and workers are real."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from live import Gate, gateway_here, until
from pilotflame.runtime.ground.billing.usage import GB
from pilotflame.runtime.node.measuring import node_memory

pytestmark = pytest.mark.asyncio(loop_scope="module")

WAITS = "import gate\ndef handler(event):\n    gate.wait()\n    return event"


async def test_revisions_that_were_removed_are_not_paid(
    state: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_memory, "SETTLE_S", 0.1)
    async with gateway_here(state, keep_revisions=1) as gateway:
        assert gateway.server is not None
        functions = gateway.server.functions
        function = await gateway.deploy(WAITS, name="paid", files={"large": "x" * 100_000}, gate=gate)
        call = asyncio.create_task(function.answer(1))
        await gate.next()
        await gateway.deploy(WAITS, name="paid", gate=gate)

        async def pays(revisions: int) -> bool:
            sizes = functions.store.function("paid").sizes()
            told_gb = functions.get("paid").function.account.footprint.disk_gb
            return len(sizes) == revisions and told_gb == sum(sizes.values()) / GB

        await until(lambda: pays(2), "both revisions are paid while the first one runs a call")
        gate.open()
        assert await call == 1
        await until(lambda: pays(1), "only the live revision is paid")
