"""A module with every tensor of its snapshot; a call reads a value of each page and returns the sum."""

import pilotflame
import torch
from torch import nn


def build(context: pilotflame.Context) -> nn.Module:
    whole = nn.Module()
    with context.snapshot.skeleton():
        for tensor in context.snapshot.manifest.tensors:
            *path, name = tensor.name.split(".")
            owner = whole
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, nn.Module())
                owner = getattr(owner, part)
            weight = nn.Parameter(torch.empty(tensor.shape, dtype=torch.bfloat16), requires_grad=False)
            owner.register_parameter(name, weight)
    context.snapshot.restore(whole)
    return whole


def handler(event: object, context: pilotflame.Context) -> int:
    flat = (weight.view(torch.int16).flatten() for weight in context.state.parameters())
    return sum(int(values[::2048].sum()) for values in flat)
