"""A function whose weights lie behind a server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_server import FaultServer
from live import Function, Gateway
from pilotflame.snapshot.caching.tier import Tier
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.format.manifest import MANIFEST_NAME
from safetensors.torch import save_file

LAYERS, WIDTH = 8, 256
LINEAR = """
import torch

def build(context):
    with context.snapshot.skeleton():
        net = torch.nn.Linear(64, 64, bias=False)
    context.snapshot.restore(net)
    return net

@torch.inference_mode()
def handler(event, context):
    return context.state(torch.ones(64)).tolist()
"""
"""A handler whose answer is the sum of each row of its only layer."""
HANDLER = """
import json
import torch

class Net(torch.nn.Module):
    def __init__(self, layers, width):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

def build(context):
    config = json.loads((context.snapshot.path / "config.json").read_text())
    with context.snapshot.skeleton():
        net = Net(config["layers"], config["width"]).eval()
    context.snapshot.restore(net)
    return net

@torch.inference_mode()
def handler(event, context):
    return context.state(torch.tensor(event)).tolist()
"""


@dataclass
class Weights:
    """A snapshot behind a server, and the answer of its network to an input of ones."""

    server: FaultServer
    folder: Path
    right: Any
    """The answer is exact up to its last bits, which depend on the number of threads that multiply."""

    @property
    def url(self) -> str:
        return self.server.url

    def fetched(self) -> int:
        """Return how many ranges of the weights were requested."""
        return sum(request.name.endswith(".safetensors") for request in self.server.requests)


@contextmanager
def served_weights(folder: Path) -> Iterator[Weights]:
    """Make the snapshot in `folder`, and serve it."""
    generator = torch.Generator().manual_seed(1)
    made = {}
    for layer in range(LAYERS):
        made[f"layers.{layer}.weight"] = torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5
        made[f"layers.{layer}.bias"] = torch.randn(WIDTH, generator=generator)
    folder.mkdir()
    save_file(made, folder / "model.safetensors")
    (folder / "config.json").write_text(f'{{"layers": {LAYERS}, "width": {WIDTH}}}')
    create(folder, chunk_bytes=64 << 10).write(folder / MANIFEST_NAME)
    answer = torch.ones(WIDTH)
    for layer in range(LAYERS):
        answer = torch.tanh(
            torch.nn.functional.linear(answer, made[f"layers.{layer}.weight"], made[f"layers.{layer}.bias"])
        )
    with FaultServer(folder) as server:
        yield Weights(server, folder, pytest.approx(answer.tolist(), rel=1e-4, abs=1e-5))


async def deployed(gateway: Gateway, weights: Weights, name: str = "net", **how: Any) -> Function:
    settings = {"snapshot": weights.url, "scale.idle_timeout_s": 0, "name": name}
    return await gateway.deploy(HANDLER, settings, **how)


async def in_tier(tier: Tier, count: int = 1) -> bool:
    """Return True if a tier has exactly `count` snapshots, all of them complete."""
    return [stored.ready for stored in tier.list()] == [True] * count
