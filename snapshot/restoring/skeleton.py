"""A module without its weights: parameters are on the meta device, computed tensors are real.

`torch.device("meta")` puts everything there, also the buffers that a module computes and never saves (a
rotary embedding's frequencies, position ids), which could not be restored. Here only tensors without a value
go to meta: those of the uninitialised and random factories that layers allocate parameters with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_VALUELESS: frozenset[Callable[..., Any]] = frozenset(
    {
        # Not empty_like, rand_like, Tensor.new_empty: they follow the device of the tensor that they are
        # given. For a real one they give scratch space: nn.init.trunc_normal_ of torch.zeros draws into it.
        torch.empty,
        torch.empty_strided,
        torch.empty_permuted,
        torch.rand,
        torch.randn,
    }
)

# What initialisers do to a tensor. On meta it either has no effect, or is an error for a real operand.
_FILLING_METHODS = (
    "__setitem__", "copy_", "fill_", "zero_", "masked_fill_", "index_fill_", "add_", "sub_", "mul_",
    "div_", "neg_", "exp_", "erfinv_", "clamp_", "clamp_min_", "clamp_max_", "clip_", "normal_",
    "uniform_", "random_", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_",
)  # fmt: skip
# The functions of nn.init that dispatch on overrides: caught whole, they cost nothing.
_FILLING_INITS = ("uniform_", "normal_", "constant_", "kaiming_uniform_")
_FILLING: frozenset[Callable[..., Any]] = frozenset(
    [getattr(torch.Tensor, name) for name in _FILLING_METHODS]
    + [getattr(torch.nn.init, name) for name in _FILLING_INITS]
)


class _SkeletonMode(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func in _VALUELESS:
            # With the caller's own generator or `out`, the values matter.
            if options.get("generator") is None and options.get("out") is None:
                options["device"] = "meta"
                options.pop("pin_memory", None)
            return func(*args, **options)
        target = args[0] if args else options.get("tensor")
        if func in _FILLING and isinstance(target, torch.Tensor) and target.is_meta:
            return None if func is torch.Tensor.__setitem__ else target
        return func(*args, **options)


def skeleton() -> AbstractContextManager[Any]:
    """Modules built inside have their parameters on the meta device and their computed tensors real.

    `torch.empty`, `rand` and `randn` make meta tensors, unless called with a generator or `out`. A parameter
    of real values (`nn.Parameter(torch.zeros(n))`) is real until it is restored. Initialising a meta tensor
    does nothing.
    """
    return _SkeletonMode()
