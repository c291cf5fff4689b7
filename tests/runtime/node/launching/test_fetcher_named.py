"""Several snapshots of one function: a base and adapters, with the handler that docs/adapters.md shows."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from fault_server import Faults, FaultServer
from live import Function, Gateway, failure, gateway_here, short_folder
from pilotflame.errors import PilotflameError
from pilotflame.runtime.ground.telemetry.timeline import parse_server_timing
from pilotflame.runtime.node.launching.fetcher_client import FetchProgress
from pilotflame.runtime.node.reconciling.process_events import ProcessEvents
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.format.manifest import MANIFEST_NAME
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.asyncio(loop_scope="module")

PAGE = Path(__file__).resolve().parents[4] / "docs" / "adapters.md"
HANDLER = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
WIDTH, LAYERS, RANK, ALPHA = 64, 4, 4, 8
ONES = [1.0] * WIDTH
LORA = {"r": RANK, "lora_alpha": ALPHA, "target_modules": ["up_proj"]}
SEEDS = itertools.count(1, 1000)
Tensors = dict[str, torch.Tensor]


def random(seed: int, **shapes: tuple[int, int]) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(*shape, generator=generator) / shape[-1] ** 0.5 for name, shape in shapes.items()
    }


def base_tensors(seed: int) -> Tensors:
    found: Tensors = {}
    for layer in range(LAYERS):
        made = random(seed + layer, up=(2 * WIDTH, WIDTH), down=(WIDTH, 2 * WIDTH))
        found[f"{layer}.up_proj.weight"], found[f"{layer}.up_proj.bias"] = (
            made["up"],
            torch.full((2 * WIDTH,), 0.1),
        )
        found[f"{layer}.down_proj.weight"], found[f"{layer}.down_proj.bias"] = (
            made["down"],
            torch.zeros(WIDTH),
        )
    return found


def adapter_tensors(seed: int) -> Tensors:
    """Return the tensors of an adapter for the layers named up_proj, as PEFT saves them."""
    found: Tensors = {}
    for layer in range(LAYERS):
        made = random(seed + layer, a=(RANK, WIDTH), b=(2 * WIDTH, RANK))
        found[f"base_model.model.{layer}.up_proj.lora_A.weight"] = made["a"]
        found[f"base_model.model.{layer}.up_proj.lora_B.weight"] = made["b"]
    return found


def right(base: Tensors, adapter: Tensors) -> Any:
    """Return the answer of the merged weights to an input of ones."""
    x = torch.ones(WIDTH)
    for layer in range(LAYERS):
        a, b = (adapter[f"base_model.model.{layer}.up_proj.lora_{one}.weight"] for one in "AB")
        up = base[f"{layer}.up_proj.weight"] + ALPHA / RANK * b @ a
        inner = torch.tanh(torch.nn.functional.linear(x, up, base[f"{layer}.up_proj.bias"]))
        down = base[f"{layer}.down_proj.weight"], base[f"{layer}.down_proj.bias"]
        x = x + torch.nn.functional.linear(inner, *down)
    return pytest.approx(x.tolist(), rel=1e-3, abs=1e-4)


def write(folder: Path, file: str, tensors: Tensors, config: str, content: dict[str, Any]) -> None:
    folder.mkdir()
    save_file(tensors, folder / file)
    (folder / config).write_text(json.dumps(content))
    create(folder, chunk_bytes=16 << 10).write(folder / MANIFEST_NAME)


class Bucket:
    """A server with the folders base, one and two: a base and two adapters."""

    def __init__(self, server: FaultServer, folder: Path) -> None:
        self.server, self.folder = server, folder

    def url(self, name: str) -> str:
        return f"{self.server.url}/{name}"

    def right(self, adapter: str) -> Any:
        base = load_file(self.folder / "base" / "model.safetensors")
        return right(base, load_file(self.folder / adapter / "adapter_model.safetensors"))

    def sent(self, name: str) -> int:
        """Return how many bytes of the weights in a folder were sent."""
        served = [one for one in self.server.requests if one.name.startswith(f"{name}/")]
        return sum(one.sent for one in served if one.name.endswith(".safetensors"))

    def size(self, name: str) -> int:
        return sum(path.stat().st_size for path in (self.folder / name).glob("*.safetensors"))


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[Bucket]:
    # Make other bytes for each test, because the gateway still has the bytes of earlier tests.
    seed = next(SEEDS)
    (folder := tmp_path / "bucket").mkdir()
    config = {"width": WIDTH, "layers": LAYERS}
    write(folder / "base", "model.safetensors", base_tensors(seed), "config.json", config)
    for number, name in enumerate(("one", "two"), 1):
        tensors = adapter_tensors(seed + 100 * number)
        write(folder / name, "adapter_model.safetensors", tensors, "adapter_config.json", LORA)
    with FaultServer(folder) as server:
        yield Bucket(server, folder)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def gateway() -> AsyncIterator[Gateway]:
    with short_folder() as folder:
        async with gateway_here(folder / "state", cache_dir=folder / "cache") as found:
            yield found


def settings(bucket: Bucket, adapter: str) -> dict[str, Any]:
    named = {"snapshots.base": bucket.url("base"), "snapshots.style": bucket.url(adapter)}
    return {**named, "scale.idle_timeout_s": 0}


async def deployed(gateway: Gateway, bucket: Bucket, adapter: str, name: str = "") -> Function:
    return await gateway.deploy(HANDLER, settings(bucket, adapter), name=name, check=False)


async def test_a_base_is_shared_and_a_revision_with_another_adapter_fetches_that_alone(
    gateway: Gateway, bucket: Bucket
) -> None:
    function = await deployed(gateway, bucket, "one", "net")
    # Send slowly, so that the answer is computed while both snapshots arrive.
    bucket.server.faults = Faults(bytes_per_s=6e5)
    response = await function.call(ONES)
    assert response.json() == bucket.right("one")
    bucket.server.faults = Faults()
    timing = parse_server_timing(response.headers["server-timing"])
    assert min(timing["fetch-base"], timing["fetch-style"]) > 0
    phases = sum(ms for name, ms in timing.items() if name != "total" and not name.startswith("fetch"))
    assert phases == pytest.approx(timing["total"], rel=0.02)
    assert (bucket.sent("base"), bucket.sent("one")) == (bucket.size("base"), bucket.size("one"))
    # Another function with the same base fetches only its adapter.
    other = await deployed(gateway, bucket, "two", "other")
    assert await other.answer(ONES) == bucket.right("two")
    assert (bucket.sent("base"), bucket.sent("two")) == (bucket.size("base"), bucket.size("two"))
    # A revision whose snapshots are in the cache fetches nothing, and neither does a rollback.
    function = await deployed(gateway, bucket, "two", "net")
    assert await function.answer(ONES) == bucket.right("two")
    rolled = await gateway.client.post(f"/v1/functions/{function.name}/rollback")
    assert rolled.is_success
    assert await function.answer(ONES) == bucket.right("one")
    assert bucket.sent("base") + bucket.sent("one") + bucket.sent("two") == sum(
        map(bucket.size, ("base", "one", "two"))
    )


async def test_all_are_shown_and_prefetched(gateway: Gateway, bucket: Bucket) -> None:
    function = await deployed(gateway, bucket, "one")
    wanted = {"base": bucket.url("base"), "style": bucket.url("one")}
    status = await function.status()
    assert (status["snapshot"], status["snapshots"], status["settings"]["snapshots"]) == (
        None,
        wanted,
        wanted,
    )
    listed = (await gateway.client.get(f"/v1/functions/{function.name}/revisions")).json()["revisions"]
    assert [(one["snapshot"], one["snapshots"]) for one in listed] == [(None, wanted)]
    found = (await gateway.client.post(f"/v1/functions/{function.name}/prefetch")).json()
    size_bytes = bucket.size("base") + bucket.size("one")
    assert (found["snapshot"], found["snapshots"], found["fetched_bytes"]) == (None, wanted, size_bytes)
    assert await function.answer(ONES) == bucket.right("one")
    assert bucket.sent("base") + bucket.sent("one") == size_bytes


ADAPTER_ALONE = """
import torch

def build(context):
    with context.snapshots.skeleton():
        base, layer = torch.nn.Linear(64, 128), torch.nn.Linear(64, 4, bias=False)
    context.snapshots["base"].restore(base, prefix="0.up_proj.", ignore=["."])
    context.snapshots["style"].restore(layer, prefix="base_model.model.3.up_proj.lora_A.", ignore=["."])
    return {"base": base, "style": layer}

@torch.inference_mode()
def handler(event, context):
    return context.state[event](torch.ones(64)).tolist()
"""


async def test_an_adapter_is_not_stuck_behind_its_base(gateway: Gateway, bucket: Bucket) -> None:
    function = await gateway.deploy(ADAPTER_ALONE, settings(bucket, "one"), check=False)
    # Only the first bytes of the base arrive.
    bucket.server.faults = lambda request: Faults(
        stall_share=float(request.name == "base/model.safetensors"), stall_s=60.0, stall_at=10
    )
    stored = load_file(bucket.folder / "one" / "adapter_model.safetensors")
    wanted = stored["base_model.model.3.up_proj.lora_A.weight"] @ torch.ones(WIDTH)
    assert await function.answer("style") == pytest.approx(wanted.tolist(), rel=1e-4, abs=1e-5)
    assert bucket.sent("one") == bucket.size("one")
    assert bucket.sent("base") < bucket.size("base")


async def test_the_one_that_fails_is_named_and_the_other_is_kept(gateway: Gateway, bucket: Bucket) -> None:
    function = await deployed(gateway, bucket, "one")
    bucket.server.faults = lambda request: Faults(
        flip_share=float(request.name == "one/adapter_model.safetensors")
    )
    error = failure(await function.call(ONES))
    assert error["type"] == "activation_failed"
    assert "snapshots.style: " in error["message"]
    assert "adapter_model.safetensors" in error["message"]
    error = failure(await gateway.client.post(f"/v1/functions/{function.name}/prefetch"))
    assert error["message"].startswith("snapshots.style: ")
    bucket.server.faults = Faults()
    await function.settled(ready=0)
    assert await function.answer(ONES) == bucket.right("one")
    assert bucket.sent("base") == bucket.size("base")


async def test_the_fetcher_may_say_why_after_the_worker_has_said_that_weights_are_missing(
    gateway: Gateway, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = await deployed(gateway, bucket, "one")
    bucket.server.faults = lambda request: Faults(
        status=404 if request.name == "one/adapter_model.safetensors" else 0
    )
    on_event, on_start_failed = FetchProgress.on_event, ProcessEvents.on_start_failed
    held: list[tuple[FetchProgress, dict[str, Any]]] = []
    failed: list[tuple[FetchProgress, dict[str, Any]]] = []

    def hold_back(progress: FetchProgress, event: dict[str, Any]) -> None:
        if progress.weights.name != "style":
            on_event(progress, event)
        elif event["event"] == "held":
            held.append((progress, event))
        else:
            # Let the worker start only now: nothing is left that it could map.
            failed.append((progress, event))
            on_event(*held.pop())

    def then_tell(revision: ProcessEvents, error: PilotflameError, worker: str = "") -> None:
        on_start_failed(revision, error, worker)
        on_event(*failed.pop())

    monkeypatch.setattr(FetchProgress, "on_event", hold_back)
    monkeypatch.setattr(ProcessEvents, "on_start_failed", then_tell)
    error = failure(await function.call(ONES))
    assert (error["type"], error["details"]["cause"]) == ("activation_failed", "source_missing")
    assert "snapshots.style: " in error["message"]
    assert "adapter_model.safetensors" in error["message"]


async def test_one_that_is_absent_or_does_not_fit_fails_the_deploy_by_its_name(
    gateway: Gateway, bucket: Bucket
) -> None:
    error = failure(await gateway.send(HANDLER, settings(bucket, "absent")))
    assert error["message"].startswith("snapshots.style: ")
    folder = bucket.folder / "odd"
    odd = adapter_tensors(1) | {"base_model.model.0.up_proj.weight": torch.zeros(2 * WIDTH, WIDTH)}
    write(folder, "adapter_model.safetensors", odd, "adapter_config.json", LORA)
    error = failure(await gateway.send(HANDLER, settings(bucket, "odd")))
    assert error["type"] == "handler_build_failed"
    assert "0.up_proj.weight in base and style" in error["message"]
