"""A torch module that is built without weights, restored from a snapshot, and called in batches.

Replace `Wave` with your module and `make_weights.py` with your training. The rest can stay.
"""

from typing import Annotated

import pilotflame
import torch
from pydantic import BaseModel, Field
from torch import Tensor, nn


class Wave(nn.Module):
    """A small network that has learned sin(x) for x from -3.14 to 3.14."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Event(BaseModel):
    x: Annotated[float, Field(ge=-3.15, le=3.15)]


def build(context: pilotflame.Context) -> nn.Module:
    """Runs once per revision: make the module's structure. Each worker maps the weights into it when it starts."""
    with context.snapshot.skeleton():
        model = Wave().eval()
    context.snapshot.restore(model)
    return model


@torch.inference_mode()
def rehearse(context: pilotflame.Context) -> None:
    """Runs before the first request, in a worker that is still without weights: warm up the kernels."""
    context.state(torch.zeros(1, 1))


@pilotflame.batch(max_size=256, example={"x": 1.0})
@torch.inference_mode()
def handler(events: list[Event], context: pilotflame.Context) -> list[dict[str, float]]:
    inputs = torch.tensor([[event.x] for event in events])
    outputs: list[float] = context.state(inputs).squeeze(1).tolist()
    return [{"y": y} for y in outputs]
