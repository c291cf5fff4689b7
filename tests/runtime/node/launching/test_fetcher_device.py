"""Functions with weights on a device: a real worker copies the weights to the device while they are fetched."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from fault_server import Faults, FaultServer
from live import Gateway, failure, gateway_here, short_folder
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.format.manifest import MANIFEST_NAME
from safetensors.torch import load_file, save_file
from simulated_device import ADDED

pytestmark = pytest.mark.asyncio(loop_scope="module")

WIDTH, LAYERS = 64, 12
SEEDS = itertools.count()
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
# The layers are used in the reverse order of the file. The buffer is computed, so no snapshot has it.
HANDLER = (
    ADDED
    + """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(12))
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)

    def forward(self, x):
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x)) * self.scale
        return x

def build(context):
    with context.snapshot.skeleton():
        net = Net()
    context.snapshot.restore(net, device="simulated")
    return net

@torch.inference_mode()
def handler(event, context):
    net = context.state
    assert len({one.untyped_storage().data_ptr() for one in net.parameters()}) == 1
    return net(torch.tensor(event)).tolist()
"""
)
PAGE = Path(__file__).resolve().parents[4] / "docs" / "devices.md"
ON_LOOP = HANDLER.replace("def handler", "async def handler")
REHEARSED = (
    HANDLER
    + """
@torch.inference_mode()
def rehearse(context):
    assert not context.state(torch.ones(64)).any()
"""
)
# Each layer is a module of its own, and the handler uses only the last one.
LAST = (
    ADDED
    + """
import sys
import torch
from torch import nn

def build(context):
    layers = []
    for number in range(12):
        with context.snapshot.skeleton():
            layers.append(nn.Linear(64, 64))
        context.snapshot.restore(layers[-1], prefix=f"layers.{number}.", ignore=["."], device="simulated")
    return layers

@torch.inference_mode()
def handler(event, context):
    answer = context.state[11](torch.tensor(event)).tolist()
    # Importing it takes longer than all else of a cold start.
    assert "torch._dynamo" not in sys.modules
    return answer
"""
)
ONES = [1.0] * WIDTH


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[tuple[FaultServer, list[float]]]:
    # Make other weights for each test, because the gateway still has the weights of earlier tests.
    torch.manual_seed(next(SEEDS))
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    tensors = {
        f"layers.{n}.{name}": one
        for n, layer in enumerate(layers)
        for name, one in layer.state_dict().items()
    }
    folder = tmp_path / "bucket" / "net"
    folder.mkdir(parents=True)
    shards = {name: SHARDS[name.startswith("layers.11.")] for name in tensors}
    for shard in SHARDS:
        save_file({name: one for name, one in tensors.items() if shards[name] == shard}, folder / shard)
    index = {"metadata": {}, "weight_map": shards}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    create(folder, chunk_bytes=16 << 10).write(folder / MANIFEST_NAME)
    with torch.inference_mode():
        x = torch.ones(WIDTH)
        for layer in reversed(layers):
            x = torch.tanh(layer(x)) * 0.5
    with FaultServer(folder.parent) as server:
        yield server, x.tolist()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def gateway() -> AsyncIterator[Gateway]:
    with short_folder() as folder:
        async with gateway_here(folder / "state", cache_dir=folder / "cache") as found:
            yield found


@pytest.mark.parametrize("handler", [HANDLER, ON_LOOP, REHEARSED], ids=["thread", "loop", "rehearsed"])
async def test_the_first_answer_is_right_while_the_weights_arrive(
    gateway: Gateway, bucket: tuple[FaultServer, list[float]], handler: str
) -> None:
    server, right = bucket
    settings = {"snapshot": f"{server.url}/net", "scale.idle_timeout_s": 0}
    function = await gateway.deploy(handler, settings, check=False)
    server.faults = Faults(bytes_per_s=4e5)
    assert await function.answer(ONES) == pytest.approx(right, rel=1e-5)
    server.faults = Faults()
    await function.settled(ready=0)
    assert await function.answer(ONES) == pytest.approx(right, rel=1e-5)


async def test_an_answer_needs_its_own_weights_only(
    gateway: Gateway, bucket: tuple[FaultServer, list[float]], tmp_path: Path
) -> None:
    server, _ = bucket
    function = await gateway.deploy(
        LAST, {"snapshot": f"{server.url}/net", "scale.idle_timeout_s": 0}, check=False
    )
    # The first shard does not arrive.
    server.faults = lambda request: Faults(
        stall_share=float(request.name.endswith(SHARDS[0])), stall_s=60.0, stall_at=10
    )
    stored = load_file(tmp_path / "bucket" / "net" / SHARDS[1])
    right = torch.nn.functional.linear(
        torch.ones(WIDTH), stored["layers.11.weight"], stored["layers.11.bias"]
    )
    assert await function.answer(ONES) == pytest.approx(right.tolist(), rel=1e-5)


async def test_weights_that_do_not_arrive_are_told_as_on_the_host(
    gateway: Gateway, bucket: tuple[FaultServer, list[float]]
) -> None:
    server, right = bucket
    function = await gateway.deploy(
        HANDLER, {"snapshot": f"{server.url}/net", "scale.idle_timeout_s": 0}, check=False
    )
    server.faults = Faults(flip_share=1.0)
    error = failure(await function.call(ONES))
    assert error["type"] == "activation_failed"
    assert ".safetensors" in error["message"]
    server.faults = Faults()
    await function.settled(ready=0)
    assert await function.answer(ONES) == pytest.approx(right, rel=1e-5)


async def test_a_device_that_is_not_there_fails_the_deploy(
    gateway: Gateway, bucket: tuple[FaultServer, list[float]]
) -> None:
    server, _ = bucket
    handler = HANDLER.replace('"simulated"', '"cuda:7"')
    error = failure(await gateway.send(handler, {"snapshot": f"{server.url}/net"}))
    assert "cuda:7" in error["message"]
    error = failure(
        await gateway.send(HANDLER.replace('"simulated"', '"tpu"'), {"snapshot": f"{server.url}/net"})
    )
    assert "There is no device 'tpu'" in error["message"]


@pytest.mark.parametrize("device", ["auto", "simulated"])
async def test_the_handler_of_the_page_runs_with_a_device_and_without(
    gateway: Gateway, tmp_path: Path, device: str
) -> None:
    source, *_ = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    layer = torch.nn.Linear(256, 256)
    save_file(dict(layer.state_dict()), tmp_path / "model.safetensors")
    function = await gateway.deploy(
        source.replace('"auto"', f'"{device}"') + ADDED, {"snapshot": str(tmp_path)}
    )
    with torch.inference_mode():
        right = layer(torch.ones(256)).tolist()
    assert await function.answer([1.0] * 256) == pytest.approx(right, rel=1e-4, abs=1e-5)
