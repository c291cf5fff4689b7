"""A module without its weights: parameters on the meta device, what the code computes real.

`torch.device("meta")` sends everything there, and with it the buffers that a module computes and never saves
(a rotary embedding's frequencies, position ids): they could not be restored. Here only what has no value yet
goes to meta: the uninitialised and random factories that layers allocate parameters with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_VALUELESS: frozenset[Callable[..., Any]] = frozenset(
    {
        # Not empty_like, rand_like, Tensor.new_empty: what is like a tensor is where that tensor is. Like a
        # real one, it is a computation's scratch space: nn.init.trunc_normal_ of torch.zeros draws into it.
        torch.empty,
        torch.empty_strided,
        torch.empty_permuted,
        torch.rand,
        torch.randn,
    }
)

# What initialisers do to a tensor. On meta it is either without effect, or an error for a real operand.
_FILLING_METHODS = (
    *(
        "__setitem__",
        "copy_",
        "fill_",
        "zero_",
        "masked_fill_",
        "index_fill_",
        "add_",
        "sub_",
        "mul_",
        "div_",
    ),
    *("neg_", "exp_", "erfinv_", "clamp_", "clamp_min_", "clamp_max_", "clip_", "normal_", "uniform_"),
    *("random_", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_"),
)
# nn.init's that dispatch on overrides: caught whole, they cost nothing.
_FILLING_INITS = ("uniform_", "normal_", "constant_", "kaiming_uniform_")
_FILLING: frozenset[Callable[..., Any]] = frozenset(
    [getattr(torch.Tensor, name) for name in _FILLING_METHODS]
    + [getattr(torch.nn.init, name) for name in _FILLING_INITS]
)


class _SkeletonMode(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if func in _VALUELESS:
            # A generator or an `out` of the caller's own: these values are meant.
            if options.get("generator") is None and options.get("out") is None:
                options["device"] = "meta"
                options.pop("pin_memory", None)
            return func(*args, **options)
        if func in _FILLING:
            target = args[0] if args else options.get("tensor")
            if isinstance(target, torch.Tensor) and target.is_meta:
                return None if func is torch.Tensor.__setitem__ else target
        return func(*args, **options)


@contextmanager
def skeleton() -> Iterator[None]:
    """Within, modules are built with parameters on the meta device and computed tensors real.

    `torch.empty`, `rand` and `randn` give meta tensors, unless called with a generator or `out`; `arange`,
    `ones`, `zeros`, `full`, `tensor` stay real, so that what is computed from them is right; `empty_like` and
    its kin follow the tensor they are given. A parameter of real values (`nn.Parameter(torch.zeros(n))`)
    is real until it is restored. Initialising a meta tensor does nothing.
    """
    with _SkeletonMode():
        yield
