"""Makes operations fail that CUDA would refuse. The memory of the simulated device is host memory, where they would succeed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, UntypedStorage
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("cpu", 0)
"""The device of tensors in device memory. torch allocates them on the host; the index 0 distinguishes them
from host tensors, which have no index.
"""
HOST_NAMES = ("cpu", torch.device("cpu"))
READS = {Tensor.numpy, Tensor.__array__}
MIXING = {Tensor.copy_, Tensor.__setitem__, Tensor.__getitem__}
"""Operations that may get one tensor of the host and one of the device."""


class DeviceMemory(TorchFunctionMode):
    """Treats the memory of some tensors, and of all that is computed from them, as memory that the host cannot read."""

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__()
        self._storages = WeakSet[UntypedStorage](one.untyped_storage() for one in tensors)

    def has(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage() in self._storages

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        leaves = tree_leaves((args, kwargs))
        tensors = _tensors(leaves[:1] if func in MIXING else leaves)
        used = any(self.has(one) for one in tensors)
        if used:
            if func == Tensor.device.__get__:
                return DEVICE
            self._check(func, tensors)
        made = func(*args, **(kwargs or {}))
        if used and (func is Tensor.cpu or (func is Tensor.to and _names_host(leaves))):
            return made.clone()
        if not used and any(one == DEVICE for one in leaves if isinstance(one, torch.device)):
            used, made = True, made.clone() if func is Tensor.to else made
        if used:
            self._storages.update(one.untyped_storage() for one in _tensors(tree_leaves(made)))
        return made

    def _check(self, func: Callable[..., Any], tensors: Sequence[Tensor]) -> None:
        if func in READS:
            raise TypeError("The host cannot read device memory. Use Tensor.cpu() first.")
        # A tensor without dimensions may be on the host.
        if any(one.dim() and not self.has(one) for one in tensors):
            raise RuntimeError("Expected all tensors to be on the same device.")


def _tensors(leaves: Sequence[Any]) -> list[Tensor]:
    return [one for one in leaves if isinstance(one, Tensor)]


def _names_host(leaves: Sequence[Any]) -> bool:
    return any(one in HOST_NAMES for one in leaves if isinstance(one, (str, torch.device)))
