"""Two snapshots: an encoder and a head, each with weights of its own. Weights: python make_weights.py"""

from typing import Annotated

import pilotflame
import torch
from pydantic import Field
from torch import nn

INPUTS, WIDTH = 4, 16
Numbers = Annotated[list[float], Field(min_length=INPUTS, max_length=INPUTS)]


def modules() -> tuple[nn.Module, nn.Module]:
    return nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.Tanh()), nn.Linear(WIDTH, 2)


def build(context: pilotflame.Context) -> nn.Module:
    with context.snapshots.skeleton():
        encoder, head = modules()
    context.snapshots["encoder"].restore(encoder)
    context.snapshots["head"].restore(head)
    return nn.Sequential(encoder, head)


@torch.inference_mode()
def handler(event: Numbers, context: pilotflame.Context) -> list[float]:
    return context.state(torch.tensor(event)).tolist()
