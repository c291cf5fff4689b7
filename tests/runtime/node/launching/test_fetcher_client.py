"""Remote weights: fetched once per node while workers start, used while they arrive, and never used if they are corrupt."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from fault_server import Faults
from live import Gateway, failure, gateway_here, until
from pilotflame.runtime.ground.telemetry.timeline import parse_server_timing
from pilotflame.runtime.node.launching.fetcher_client import FetcherClient, FetchProgress
from pilotflame.snapshot.caching.node import node_tiers
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.format.manifest import MANIFEST_NAME, Manifest
from pilotflame.snapshot.format.slices import part_of
from remote_weights import HANDLER, WIDTH, Weights, deployed, served_weights
from safetensors.torch import load_file, save_file


@pytest.fixture
def weights(tmp_path: Path) -> Iterator[Weights]:
    with served_weights(tmp_path / "weights") as served:
        yield served


@pytest.fixture
async def gateway(state: Path, tmp_path: Path) -> AsyncIterator[Gateway]:
    async with gateway_here(state, cache_dir=tmp_path / "cache") as found:
        yield found


def fetcher() -> psutil.Process:
    found = [child for child in psutil.Process().children() if child.name().startswith("pilotflame: fet")
             or any("pilotflame.runtime.node.launching.fetcher" in word or "fetcher" in word for word in child.cmdline())]  # fmt: skip
    assert len(found) == 1
    return found[0]


async def test_the_first_answer_comes_from_weights_that_are_still_arriving(
    gateway: Gateway, weights: Weights
) -> None:
    function = await deployed(gateway, weights, check=False)
    assert weights.fetched() == 0  # no worker runs, so nothing is fetched
    weights.server.faults = Faults(bytes_per_s=1e6)
    response = await function.call([1.0] * WIDTH)
    assert response.json() == weights.right
    assert response.headers["x-cold-start"] == "true"
    timing = parse_server_timing(response.headers["server-timing"])
    assert timing["fetch"] > 0
    assert timing["exec"] > 0
    assert 'desc="beside ' in response.headers["server-timing"]
    phases = sum(ms for name, ms in timing.items() if name not in {"total", "fetch"})
    assert phases == pytest.approx(timing["total"], rel=0.02)


ASYNC = (
    HANDLER.partition("@torch.inference_mode()")[0].replace(
        "    return net", "    context.snapshot.gated = GATED\n    return net"
    )
    + """
import asyncio

def compute(event, context):
    with torch.inference_mode(), context.snapshot.gate():
        return context.state(torch.tensor(event)).tolist()

async def handler(event, context):
    arrives = context.snapshot.arriving
    return [arrives, await asyncio.to_thread(compute, event, context)]
"""
)


@pytest.mark.parametrize("gated", [True, False])
async def test_an_async_handler_is_called_before_all_weights_are_there_if_it_gates_its_threads(
    gateway: Gateway, weights: Weights, gated: bool
) -> None:
    settings = {"snapshot": weights.url, "name": "net"}
    function = await gateway.deploy(ASYNC.replace("GATED", str(gated)), settings, check=False)
    weights.server.faults = Faults(bytes_per_s=1e6)
    assert await function.answer([1.0] * WIDTH) == [gated, weights.right]


HALF = """
import torch

def build(context):
    with context.snapshot.skeleton():
        layer = torch.nn.Linear(256, 128)
    # The slices are those of the settings.
    context.snapshot.restore(layer, prefix="layers.5.", ignore=["."])
    return layer

@torch.inference_mode()
def handler(event, context):
    return context.state(torch.tensor(event)).tolist()
"""


async def test_a_function_that_needs_a_part_fetches_that_part(gateway: Gateway, weights: Weights) -> None:
    settings = {"snapshot": weights.url, "scale.idle_timeout_s": 0, "name": "half"}
    part = {"snapshot_part.tensors": ["layers.5.*"], "snapshot_part.slices": {"*": [0, 1, 2]}}
    function = await gateway.deploy(HALF, {**settings, **part}, check=False)
    stored = load_file(weights.folder / "model.safetensors")
    wanted = torch.nn.functional.linear(
        torch.ones(WIDTH), stored["layers.5.weight"][WIDTH // 2 :], stored["layers.5.bias"][WIDTH // 2 :]
    )
    assert await function.answer([1.0] * WIDTH) == pytest.approx(wanted.tolist(), rel=1e-4, abs=1e-5)
    sent = sum(request.sent for request in weights.server.requests if request.name.endswith(".safetensors"))
    needed = part_of(Manifest.read(weights.folder), ["layers.5.*"], {"*": (0, 1, 2)}).needed_bytes
    assert sent == needed < sum(tensor.nbytes for tensor in stored.values()) // 8


async def test_slices_of_nothing_fail_the_deploy(gateway: Gateway, weights: Weights) -> None:
    settings = {"snapshot": weights.url, "name": "half", "snapshot_part.slices": {"layer.*": [0, 1, 2]}}
    error = failure(await gateway.send(HALF, settings))
    assert error["status"] == 422
    assert "No tensor of the snapshot has a name that fits 'layer.*'" in error["message"]
    # Slices that do not fit the module's shapes fail the deploy as well.
    error = failure(await gateway.send(HALF, {**settings, "snapshot_part.slices": {"*weight": [0, 1, 2]}}))
    assert "layers.5.bias [256], not [128]" in error["message"]


async def test_what_was_fetched_is_fetched_once(gateway: Gateway, weights: Weights) -> None:
    first = await deployed(gateway, weights)
    asked = weights.fetched()
    assert asked > 0
    second = await deployed(gateway, weights, "second")
    assert await first.answer([1.0] * WIDTH) == weights.right
    assert await second.answer([1.0] * WIDTH) == weights.right
    assert weights.fetched() == asked


async def test_a_revision_fetches_what_the_node_does_not_have_unless_its_credentials_are_others(
    gateway: Gateway, weights: Weights
) -> None:
    stored = load_file(weights.folder / "model.safetensors")
    for version in ("v1", "v2", "v3"):
        folder = weights.folder / "net" / version
        folder.mkdir(parents=True)
        stored["layers.3.bias"] = stored["layers.3.bias"] + (version != "v1")
        save_file(stored, folder / "model.safetensors")
        (folder / "config.json").write_bytes((weights.folder / "config.json").read_bytes())
        create(folder, chunk_bytes=64 << 10).write(folder / MANIFEST_NAME)

    async def sent(name: str, version: str) -> int:
        """Deploy a function, call it, and return how many bytes of weights the server sent for that."""
        before = len(weights.server.requests)
        settings = {"snapshot": f"{weights.url}/net/{version}", "scale.idle_timeout_s": 0}
        function = await gateway.deploy(HANDLER, settings, name=name, check=False)
        answer = await function.answer([1.0] * WIDTH)
        assert (answer == weights.right) == (version == "v1")
        served = weights.server.requests[before:]
        return sum(request.sent for request in served if request.name.endswith(".safetensors"))

    whole_bytes = (weights.folder / "net" / "v1" / "model.safetensors").stat().st_size
    assert await sent("net", "v1") == whole_bytes
    assert await sent("net", "v2") == 64 << 10
    secret = "/v1/functions/other/secrets/PILOTFLAME_SNAPSHOT_TOKEN"
    assert (await gateway.client.put(secret, json={"value": "own"})).is_success
    assert await sent("other", "v3") == whole_bytes


async def test_a_prefetch_brings_the_weights_to_the_disk_and_once_only(
    gateway: Gateway, weights: Weights, tmp_path: Path
) -> None:
    function = await deployed(gateway, weights, check=False)
    path = f"/v1/functions/{function.name}/prefetch"
    first = (await gateway.client.post(path)).json()
    size_bytes = (weights.folder / "model.safetensors").stat().st_size
    assert first == {
        "function": function.name,
        "image": None,
        "snapshot": weights.url,
        "snapshots": {},
        "fetched_bytes": size_bytes,
    }
    disk = next(tier for tier in node_tiers(tmp_path / "cache") if tier.kind == "disk")
    assert [stored.ready for stored in disk.list()] == [True]
    assert (await gateway.client.post(path)).json()["fetched_bytes"] == 0
    asked = weights.fetched()
    assert await function.answer([1.0] * WIDTH) == weights.right
    assert weights.fetched() == asked


async def test_the_fetcher_keeps_to_the_budgets_of_the_settings(
    state: Path, weights: Weights, tmp_path: Path
) -> None:
    settings = {"cache_dir": tmp_path / "cache", "cache_memory_mb": 0, "cache_disk_mb": 1}
    async with gateway_here(state, **settings) as gateway:
        function = await deployed(gateway, weights, check=False)
        error = failure(await gateway.client.post(f"/v1/functions/{function.name}/prefetch"))
    assert error["type"] == "cache_error"
    assert f"takes {1 << 20} bytes" in error["message"]


async def test_a_prefetch_tells_what_could_not_be_fetched(gateway: Gateway, weights: Weights) -> None:
    function = await deployed(gateway, weights, check=False)
    weights.server.faults = lambda request: Faults(flip_share=float("model" in request.name))
    error = failure(await gateway.client.post(f"/v1/functions/{function.name}/prefetch"))
    assert error["type"] == "snapshot_corrupt"
    assert "model.safetensors" in error["message"]
    assert failure(await gateway.client.post("/v1/functions/nobody/prefetch"))["status"] == 404


async def test_workers_do_not_know_where_weights_come_from(gateway: Gateway, weights: Weights) -> None:
    """The URL of a snapshot may hold credentials, so workers must not get it."""
    code = "import gc\ndef handler(event):\n    gc.unfreeze()\n    found = gc.get_objects()\n"
    code += "    return [one.source for one in found if type(one).__name__ == 'Weights']"
    function = await gateway.deploy(code, {"snapshot": weights.url}, check=False)
    assert await function.answer() == [""]


async def test_many_workers_at_once_follow_one_fetch(gateway: Gateway, weights: Weights) -> None:
    settings = {"snapshot": weights.url, "scale.max": 4}
    function = await gateway.deploy(HANDLER, settings, check=False)
    # The first response stalls. The fetcher requests the rest of its range on another connection.
    weights.server.faults = Faults(bytes_per_s=2e6, stall_share=1.0, stall_at=10_000, times=1)
    answers = await asyncio.gather(*(function.answer([1.0] * WIDTH) for _ in range(8)))
    assert answers == [weights.right] * 8
    size_bytes = (weights.folder / "model.safetensors").stat().st_size

    async def received_bytes() -> float:
        found = await snapshot_metrics(gateway)
        return max(found.get(f'received_bytes_total{{tier="{tier}"}}', 0) for tier in ("memory", "disk"))

    async def received() -> bool:
        return await received_bytes() >= size_bytes

    await until(received, "the end of the fetch")
    assert await received_bytes() == size_bytes  # no byte was fetched twice
    assert (await snapshot_metrics(gateway))['fetches_total{outcome="done"}'] == 1


async def test_corrupt_weights_answer_no_call(gateway: Gateway, weights: Weights) -> None:
    function = await deployed(gateway, weights, check=False)
    weights.server.faults = lambda request: Faults(flip_share=float("model" in request.name))
    response = await function.call([1.0] * WIDTH)
    assert response.status_code == 500
    assert failure(response)["type"] == "activation_failed"
    assert "model.safetensors" in failure(response)["message"]
    weights.server.faults = Faults()
    await function.settled(ready=0)
    assert await function.answer([1.0] * WIDTH) == weights.right


async def test_a_killed_fetcher_fails_its_callers_and_is_replaced(gateway: Gateway, weights: Weights) -> None:
    function = await deployed(gateway, weights, check=False)
    # The response with the weights stalls after a few bytes, so the fetch cannot end before the fetcher is killed.
    weights.server.faults = lambda request: Faults(
        stall_share=float("model" in request.name), stall_s=60.0, stall_at=10_000
    )
    call = asyncio.create_task(function.call([1.0] * WIDTH))

    async def stalled() -> bool:
        asked = [request for request in weights.server.requests if "model" in request.name]
        return any(request.sent >= 10_000 for request in asked)

    await until(stalled, "a stalled fetch")
    weights.server.faults = Faults()
    os.kill(fetcher().pid, signal.SIGKILL)
    # The call fails if a worker had started it. Otherwise it waits for the next worker, whose weights the next fetcher brings.
    response = await call
    assert response.status_code >= 500 or response.json() == weights.right
    await function.settled(ready=0)
    assert await function.answer([1.0] * WIDTH) == weights.right


async def test_the_fetcher_and_the_worker_give_up_at_the_deadline_of_the_hold(
    gateway: Gateway, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = await deployed(gateway, weights, check=False)
    monkeypatch.setattr("pilotflame.runtime.node.launching.fetcher_client.WEIGHTS_TIMEOUT_S", 1.0)
    weights.server.faults = lambda request: Faults(
        stall_share=float("model" in request.name), stall_s=60.0, stall_at=10_000
    )
    async with asyncio.timeout(20):
        error = await function.error([1.0] * WIDTH)
    assert error["details"]["cause"] == "source_unavailable"
    assert "did not arrive" in error["message"]


async def snapshot_metrics(gateway: Gateway) -> dict[str, float]:
    text = (await gateway.client.get("/metrics")).text
    lines = [line.rpartition(" ") for line in text.splitlines() if line.startswith("pilotflame_snapshot_")]
    return {name.removeprefix("pilotflame_snapshot_"): float(number) for name, _, number in lines}


async def test_without_a_fetcher_no_memory_is_given_back(tmp_path: Path) -> None:
    async with asyncio.TaskGroup() as tasks:
        client = FetcherClient(tmp_path / "cache", tasks)
        client.metrics.on_tiers([{"spare_bytes": 1 << 20}])
        # Return 0: after another number, callers that are short of memory would wait for bytes that no fetcher frees.
        assert client.give_back() == 0
        assert client.metrics.take_spare_bytes() == 1 << 20


async def test_fetches_and_tiers_are_in_the_metrics(gateway: Gateway, weights: Weights) -> None:
    size_bytes = (weights.folder / "model.safetensors").stat().st_size
    whole_bytes = size_bytes + (weights.folder / "config.json").stat().st_size
    function = await deployed(gateway, weights, check=False)
    assert (await snapshot_metrics(gateway))["fetches_under_way"] == 0
    weights.server.faults = lambda request: Faults(flip_share=float("model" in request.name))
    assert (await function.call([1.0] * WIDTH)).status_code == 500

    async def counted(name: str, number: float) -> bool:
        return (await snapshot_metrics(gateway)).get(name) == number

    await until(lambda: counted("fetches_under_way", 0), "the end of the fetch")
    found = await snapshot_metrics(gateway)
    # Count both outcomes: the worker may fail, and its hold be released, before the fetcher has reported its own failure.
    assert sum(found[f'fetches_total{{outcome="{outcome}"}}'] for outcome in ("failed", "released")) >= 1
    weights.server.faults = Faults()
    assert await function.answer([1.0] * WIDTH) == weights.right
    await until(lambda: counted('fetches_total{outcome="done"}', 1), "a fetch that is done")

    async def in_a_tier() -> bool:
        found = await snapshot_metrics(gateway)
        return whole_bytes in [found.get(f'cache_bytes{{tier="{tier}"}}') for tier in ("memory", "disk")]

    await until(in_a_tier, "the size of the cache")

    async def verified() -> bool:
        found = await snapshot_metrics(gateway)
        return sum(found[name] for name in found if name.startswith("verified_bytes_total")) >= size_bytes

    # The fetcher reports the contents of its tiers only after it has reported the end of a fetch.
    await until(verified, "the count of the verified bytes")
    found = await snapshot_metrics(gateway)
    assert sum(found[name] for name in found if name.startswith("received_bytes_total")) >= size_bytes
    assert found['cache_budget_bytes{tier="disk"}'] > size_bytes
    assert found["fetches_under_way"] == 0


async def test_no_other_worker_starts_before_a_failed_start_is_explained(
    gateway: Gateway, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without the wait, the worker may be ready before the fetch fails. Then it returns the call, and another worker starts.
    source = f"{HANDLER}\ndef setup(context):\n    context.snapshot.wait(60)\n"
    settings = {"snapshot": weights.url, "scale.idle_timeout_s": 0}
    function = await gateway.deploy(source, settings, check=False)
    weights.server.faults = lambda request: Faults(flip_share=float("model" in request.name))
    on_event = FetcherClient._on_event

    def late(self: FetcherClient, held: dict[int, FetchProgress], event: dict[str, Any]) -> None:
        # Report the failure of the fetch only after the worker has failed and ended.
        delay_s = 0.5 if event["event"] == "failed" else 0.0
        asyncio.get_running_loop().call_later(delay_s, on_event, self, held, event)

    monkeypatch.setattr(FetcherClient, "_on_event", late)
    assert "layers.3.weight, differs" in (await function.error([1.0] * WIDTH))["message"]
    response = await gateway.client.get(f"/v1/functions/{function.name}/decisions")
    assert [one["action"] for one in response.json()["decisions"]].count("start") == 1


async def test_a_missing_snapshot_fails_the_deploy(gateway: Gateway, weights: Weights) -> None:
    response = await gateway.send(HANDLER, {"snapshot": weights.url + "/nowhere"})
    assert response.status_code == 422
    assert failure(response)["type"] == "source_missing"
