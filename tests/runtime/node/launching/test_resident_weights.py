"""Fetched weights of idle functions leave the memory: by the ladder, when memory is short, and when they are unused."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from live import Function, Gateway, gateway_here, until
from pilotflame.runtime.ground.telemetry.decisions import describe
from pilotflame.runtime.ground.telemetry.rung_name import RungName
from pilotflame.runtime.node.measuring import idle_memory_limit
from pilotflame.runtime.node.reconciling.revision_workers import RevisionWorkers
from pilotflame.snapshot.caching.node import node_tiers
from remote_weights import HANDLER, WIDTH, Weights, deployed, in_tier, served_weights


@pytest.fixture
def weights(tmp_path: Path) -> Iterator[Weights]:
    with served_weights(tmp_path / "weights") as served:
        yield served


@pytest.fixture
async def gateway(state: Path, tmp_path: Path) -> AsyncIterator[Gateway]:
    async with gateway_here(state, cache_dir=tmp_path / "cache") as found:
        yield found


def live_revision(gateway: Gateway, function: Function) -> RevisionWorkers:
    assert gateway.server is not None
    return gateway.server.functions.get(function.name).workers


async def test_weights_leave_the_memory_when_their_last_function_gives_them_up(
    gateway: Gateway, weights: Weights, tmp_path: Path
) -> None:
    first, second = await deployed(gateway, weights), await deployed(gateway, weights, "second")
    found = await gateway.client.get(f"/v1/functions/{first.name}/arrivals")
    assert [one["rung"] for one in found.json()["rungs"]] == ["ready", "zygote", "resident", "local"]
    memory, disk = node_tiers(tmp_path / "cache")
    await until(lambda: in_tier(disk), "a copy on the disk")
    revisions = []
    for function in (first, second):
        assert await function.answer([1.0] * WIDTH) == weights.right
        await function.settled()
        revisions.append(live_revision(gateway, function))
    revisions[0].function.ladder.yield_to(RungName.RESIDENT)
    await first.settled(zygote=False)
    assert revisions[0].rung is RungName.RESIDENT
    assert (await first.status())["rung"] == "resident"
    # The weights stay in memory, because the second function still wants them.
    revisions[0].function.ladder.yield_to(RungName.LOCAL)
    assert revisions[0].rung is RungName.LOCAL
    assert revisions[1].pool.weights.resident_bytes == disk.list()[0].allocated_bytes
    assert await in_tier(memory)
    revisions[1].function.ladder.yield_to(RungName.LOCAL)
    await until(lambda: in_tier(memory, 0), "weights that have left the memory")
    asked = weights.fetched()
    assert await first.answer([1.0] * WIDTH) == weights.right
    assert weights.fetched() == asked


async def test_a_worker_that_still_ends_does_not_keep_its_weights_in_memory(
    gateway: Gateway, weights: Weights, tmp_path: Path
) -> None:
    function = await gateway.deploy(
        HANDLER, {"snapshot": weights.url, "scale.idle_timeout_s": 600}, name="net"
    )
    assert await function.answer([1.0] * WIDTH) == weights.right
    memory, disk = node_tiers(tmp_path / "cache")
    await until(lambda: in_tier(disk), "a copy on the disk")
    revision = live_revision(gateway, function)
    assert revision.rung is RungName.READY
    revision.function.ladder.yield_to(RungName.LOCAL)
    await until(lambda: in_tier(memory, 0), "weights that have left the memory")
    assert revision.rung is RungName.LOCAL


async def test_when_memory_is_short_weights_of_idle_functions_leave_it(
    state: Path, weights: Weights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Callable[[], None]] = []

    class Pressure:
        """Reports that memory is short as long as weights are in memory."""

        def __init__(self, on_pressure: Callable[[], None]) -> None:
            told.append(on_pressure)

        def short_bytes(self) -> float:
            return 1e12 * len(node_tiers(tmp_path / "cache")[0].list())

        def close(self) -> None:
            pass

    monkeypatch.setattr(idle_memory_limit, "MemoryPressure", Pressure)
    async with gateway_here(state, cache_dir=tmp_path / "cache") as gateway:
        function = await deployed(gateway, weights)
        assert await function.answer([1.0] * WIDTH) == weights.right
        memory, disk = node_tiers(tmp_path / "cache")
        await until(lambda: in_tier(disk), "a copy on the disk")
        await function.settled()
        told[0]()
        await function.logged("was evicted to files alone")
        await until(lambda: in_tier(memory, 0), "weights that have left the memory")
        decisions = live_revision(gateway, function).function.decisions.since(0)
        steps = [describe(one) for one in decisions if one.action == "evict"]
        assert any("was evicted to files alone" in step for step in steps), steps
        assert await function.answer([1.0] * WIDTH) == weights.right


async def test_weights_that_no_function_has_used_are_given_back(
    gateway: Gateway, weights: Weights, tmp_path: Path
) -> None:
    function = await deployed(gateway, weights, check=False)
    assert (await gateway.client.post(f"/v1/functions/{function.name}/prefetch")).is_success
    memory, disk = node_tiers(tmp_path / "cache")
    assert await in_tier(memory)
    assert await in_tier(disk)
    assert gateway.server is not None
    client = gateway.server.node.revisions.weights

    async def given_back() -> bool:
        return client.give_back() > 0

    # Try again: the fetcher may not have reported yet that these weights are in memory.
    await until(given_back, "what the fetcher reports")
    await until(lambda: in_tier(memory, 0), "weights that have left the memory")
    asked = weights.fetched()
    assert await function.answer([1.0] * WIDTH) == weights.right
    assert weights.fetched() == asked
