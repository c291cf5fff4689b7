"""A base model and a small adapter (LoRA) whose weights are added to it. Weights: python make_weights.py"""

from typing import Annotated

import pilotflame
import torch
from pydantic import Field
from torch import Tensor, nn

WIDTH, RANK = 32, 2
Numbers = Annotated[list[float], Field(min_length=WIDTH, max_length=WIDTH)]


class LoraLinear(nn.Linear):
    """A linear layer of the base model, and two small ones of the adapter, with the names that PEFT saves."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__(width, width)
        self.lora_A = nn.Linear(width, rank, bias=False)
        self.lora_B = nn.Linear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.lora_B(self.lora_A(x))


def network() -> nn.Module:
    return nn.Sequential(LoraLinear(WIDTH, RANK), nn.Tanh(), LoraLinear(WIDTH, RANK))


def build(context: pilotflame.Context) -> nn.Module:
    with context.snapshots.skeleton():
        model = network()
    # Each tensor comes from the snapshot that has it.
    context.snapshots.restore(model, prefixes={"style": "base_model.model."})
    return model


@torch.inference_mode()
def handler(event: Numbers, context: pilotflame.Context) -> list[float]:
    return context.state(torch.tensor(event)).tolist()
