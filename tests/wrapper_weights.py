"""Weights in tensors of a wrapper subclass, such as torchao's quantised weights: the wrapper has no bytes, its inner tensor does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only


class Wrapped(torch.Tensor):
    """A tensor that acts as `held`, its inner tensor."""

    held: torch.Tensor

    def __new__(cls, held: torch.Tensor) -> Wrapped:
        made: Wrapped = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), dtype=held.dtype, device=held.device
        )
        made.held = held
        return made

    def __repr__(self) -> str:
        return "Wrapped(...)"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], _: None, size: Any, stride: Any) -> Wrapped:
        return Wrapped(inner["held"])

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        plain, named = tree_map_only(Wrapped, lambda one: one.held, (tuple(args), kwargs or {}))
        made = func(*plain, **named)
        if args and made is plain[0]:
            return args[0]
        return Wrapped(made) if func is torch.ops.aten.detach.default else made


def wrap(module: nn.Module) -> nn.Module:
    """Replace all parameters and buffers of a module by wrappers. A tensor with several names stays one
    object.
    """
    made: dict[int, torch.Tensor] = {}
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            wrapped = nn.Parameter(Wrapped(parameter.detach()), requires_grad=False)
            setattr(owner, name, made.setdefault(id(parameter), wrapped))
        for name, buffer in list(owner.named_buffers(recurse=False)):
            setattr(owner, name, made.setdefault(id(buffer), Wrapped(buffer)))
    return module
