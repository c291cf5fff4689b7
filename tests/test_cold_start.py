"""The promise, end to end: nothing runs, a request comes, a worker with mapped weights answers, nothing runs again."""

from __future__ import annotations

import asyncio
import contextlib
import statistics

import psutil
import pytest
from live import gateway_here, gone
from pilotflame.runtime.ground.telemetry.timeline import parse_server_timing

pytestmark = pytest.mark.asyncio(loop_scope="module")

HANDLER = """
import os
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(64, 64)
        self.second = torch.nn.Linear(64, 8)
        self.second.bias = torch.nn.Parameter(torch.empty(8))
        self.register_buffer("scale", torch.empty(8))

    def forward(self, x):
        return self.second(torch.relu(self.first(x))) * self.scale

def build(context):
    with context.snapshot.skeleton():
        net = Net().eval()
    context.snapshot.restore(net)
    return net

@torch.inference_mode()
def handler(event, context):
    return {"pid": os.getpid(), "out": context.state(torch.tensor(event)).tolist()}
"""


@pytest.fixture
def weights(tmp_path):
    """Return a folder with weights, and the network's answer to an input of ones."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(7)
    made = {
        name: torch.randn(*shape, generator=generator)
        for name, shape in {
            "first.weight": (64, 64), "first.bias": (64,), "second.weight": (8, 64), "second.bias": (8,), "scale": (8,),
        }.items()
    }  # fmt: skip
    save_file(made, tmp_path / "model.safetensors")
    hidden = torch.relu(made["first.weight"] @ torch.ones(64) + made["first.bias"])
    return tmp_path, ((made["second.weight"] @ hidden + made["second.bias"]) * made["scale"]).tolist()


async def test_from_zero_and_back(state, weights):
    folder, right = weights
    async with gateway_here(state) as gateway:
        function = await gateway.deploy(HANDLER, {"snapshot": str(folder), "scale.idle_timeout_s": 0})
        pids, restores = [], []
        for _ in range(5):
            status = await function.settled(ready=0, standby=True)
            assert await function.pids("worker") == []
            assert status["zygote"]
            response = await function.call([1.0] * 64)
            assert response.headers["x-cold-start"] == "true"
            assert response.json()["out"] == pytest.approx(right, abs=1e-4)
            phases = parse_server_timing(response.headers["server-timing"])
            total = phases.pop("total")
            assert sum(phases.values()) == pytest.approx(total, rel=0.02)
            assert phases["restore"] > 0
            restores.append(phases["restore"])
            pids.append(response.json()["pid"])
            await gone(pids[-1])
        assert len(set(pids)) == 5
        assert statistics.median(restores) > 0


async def test_nothing_of_the_weights_is_held_at_zero(state, weights):
    folder, _ = weights
    async with gateway_here(state) as gateway:
        function = await gateway.deploy(HANDLER, {"snapshot": str(folder), "scale.idle_timeout_s": 0})
        await gone((await function.answer([1.0] * 64))["pid"])
        await function.settled(ready=0, standby=True)
        for process in psutil.Process().children(recursive=True):
            # A worker of another test may end while its maps are read.
            with contextlib.suppress(psutil.NoSuchProcess):
                assert not [held.path for held in process.memory_maps() if held.path.startswith(str(folder))]


async def test_weights_that_changed_are_refused(state, weights):
    folder, _ = weights
    async with gateway_here(state) as gateway:
        settings = {"snapshot": str(folder), "scale.idle_timeout_s": 0}
        function = await gateway.deploy(HANDLER, settings)
        await function.settled(ready=0)
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-4] + b"\0\0\0\0")
        error = await function.error([1.0] * 64)
        assert (error["type"], error["details"]["cause"]) == ("activation_failed", "snapshot_changed")
        assert "model.safetensors" in error["message"]
        assert error["remedy"]


async def test_a_burst_from_zero_is_answered(state, weights):
    folder, right = weights
    async with gateway_here(state) as gateway:
        function = await gateway.deploy(HANDLER, {"snapshot": str(folder), "scale.max": 3})
        await function.settled(ready=0)
        answers = await asyncio.gather(*(function.answer([1.0] * 64) for _ in range(50)))
        for answer in answers:
            assert answer["out"] == pytest.approx(right, abs=1e-4)
        assert 1 <= len({answer["pid"] for answer in answers}) <= 3
