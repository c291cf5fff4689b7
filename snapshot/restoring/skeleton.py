"""Builds modules without their weights: parameters are on the meta device, computed tensors are real.

`torch.device("meta")` would also put buffers that a module computes and never saves (a rotary embedding's
frequencies, position ids) on the meta device, and no snapshot could restore them. `skeleton` puts only uninitialised and
random tensors, with which layers allocate their parameters, on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_VALUELESS: frozenset[Callable[..., Any]] = frozenset(
    {
        # Do not add empty_like, rand_like and Tensor.new_empty, whose result for a real tensor must be real:
        # nn.init.trunc_normal_ of torch.zeros draws values into such a result.
        torch.empty,
        torch.empty_strided,
        torch.empty_permuted,
        torch.rand,
        torch.randn,
    }
)

# The methods with which initialisers fill a tensor. Calls on a meta tensor are skipped: they would have no effect, or
# raise an error if another operand is real.
_FILLING_METHODS = (
    "__setitem__", "copy_", "fill_", "zero_", "masked_fill_", "index_fill_", "add_", "sub_", "mul_",
    "div_", "neg_", "exp_", "erfinv_", "clamp_", "clamp_min_", "clamp_max_", "clip_", "normal_",
    "uniform_", "random_", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_",
)  # fmt: skip
# The functions of nn.init that a TorchFunctionMode sees as one call. Skipping the whole call saves time.
_FILLING_INITS = ("uniform_", "normal_", "constant_", "kaiming_uniform_")
_FILLING: frozenset[Callable[..., Any]] = frozenset(
    [getattr(torch.Tensor, name) for name in _FILLING_METHODS]
    + [getattr(torch.nn.init, name) for name in _FILLING_INITS]
)


# Skip moves of meta tensors, which have no bytes. Pipelines of transformers move their model to a device.
_MOVING: frozenset[Callable[..., Any]] = frozenset({torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda})


def _converted(
    func: Callable[..., Any], tensor: torch.Tensor, args: Sequence[Any], options: Mapping[str, Any]
) -> torch.Tensor:
    """Return a meta tensor with the dtype from a call of `to`. Ignore the device from the call."""
    if func is not torch.Tensor.to:
        return tensor
    dtype = next((one for one in (*args, *options.values()) if isinstance(one, torch.dtype)), None)
    return tensor if dtype is None else tensor.to(dtype)


class _SkeletonMode(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func in _VALUELESS:
            # If the caller passes a generator or `out`, the values matter, so the tensor must be real.
            if options.get("generator") is None and options.get("out") is None:
                options["device"] = "meta"
                options.pop("pin_memory", None)
            return func(*args, **options)
        target = args[0] if args else options.get("tensor")
        if func in _MOVING and isinstance(target, torch.Tensor) and target.is_meta:
            return _converted(func, target, args[1:], options)
        if func in _FILLING and isinstance(target, torch.Tensor) and target.is_meta:
            return None if func is torch.Tensor.__setitem__ else target
        return func(*args, **options)


def skeleton() -> AbstractContextManager[Any]:
    """Return a context in which modules are built with parameters on the meta device.

    In this context, `torch.empty`, `rand` and `randn` make meta tensors, unless called with a generator or `out`. A
    parameter made from real values (`nn.Parameter(torch.zeros(n))`) is real until it is restored.
    """
    return _SkeletonMode()
