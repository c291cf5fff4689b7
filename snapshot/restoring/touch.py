"""Finds which bytes of a mapping an operation reads or writes, to wait for them or to record their order."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..format.manifest import Manifest
from .mapping import Mapping

Extent = tuple[int, int, int]
"""The number of the shard, the first byte, and the byte after the last."""


class Touched:
    """Finds the bytes of one mapping that a tensor views, whatever code made the view."""

    def __init__(self, mapping: Mapping) -> None:
        # A view has the same storage as its shard, which begins at the address where the shard is mapped.
        flats = enumerate(mapping.flats)
        self._shards = {flat.untyped_storage().data_ptr(): shard for shard, flat in flats if len(flat)}

    def extents(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Extent]:
        """Yield the bytes of the mapping that operation `func` reads or writes."""
        if _makes_view(func):
            return
        if func is torch.ops.aten.embedding.default:
            # The indices may be in the mapping too. Yield them first: they must land before they are read.
            yield from self._extent(args[1])
            if (rows := self._rows(args)) is not None:
                yield from rows
                return
        for value in (*args, *kwargs.values()):
            for item in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(item, Tensor):
                    yield from self._extent(item)

    def _extent(self, tensor: Tensor) -> Iterator[Extent]:
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return
        shard = self._shards.get(tensor.untyped_storage().data_ptr())
        if shard is None or tensor.numel() == 0:
            return
        begin = int(tensor.storage_offset())
        sizes = zip(tensor.shape, tensor.stride(), strict=True)
        reach = 1 + sum((size - 1) * stride for size, stride in sizes)
        yield shard, begin * tensor.itemsize, (begin + reach) * tensor.itemsize

    def _rows(self, args: tuple[Any, ...]) -> list[Extent] | None:
        """Return the rows of the table that an embedding looks up; None if they cannot be found.

        The whole table is often the largest tensor of the snapshot, so waiting for it would take long.
        """
        table, indices = args[:2]
        if indices.device.type != "cpu" or table.dim() != 2 or not table.is_contiguous():
            return None
        whole = list(self._extent(table))
        if not whole:
            return []
        shard, begin, _ = whole[0]
        row_bytes = table.shape[1] * table.itemsize
        rows = [row for row in indices.unique().tolist() if 0 <= row < table.shape[0]]
        return [(shard, begin + row * row_bytes, begin + (row + 1) * row_bytes) for row in rows]


def record_first_touch(mapping: Mapping, run: Callable[[], Any]) -> Manifest:
    """Call `run`, which uses modules restored from `mapping`. Return the manifest with the recorded order."""
    with _Recorder(mapping) as recorder:
        run()
    return mapping.manifest.model_copy(update={"first_touch": tuple(recorder.order)})


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, mapping: Mapping) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.order: dict[str, None] = {}
        self._touched = Touched(mapping)
        self._placed = sorted(
            (tensor.shard, tensor.offset_bytes, tensor.offset_bytes + tensor.size_bytes, tensor.name)
            for tensor in mapping.manifest.tensors
            if tensor.size_bytes
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for shard, begin, end in self._touched.extents(func, args, kwargs):
            index = max(0, bisect_right(self._placed, (shard, begin, math.inf)) - 1)
            for other, low, high, name in self._placed[index:]:
                if (other, low) >= (shard, end):
                    break
                if other == shard and high > begin:
                    self.order.setdefault(name)
        return func(*args, **kwargs)


# The schema of an operation does not tell: `to`, `contiguous` and `reshape` may return a view or a copy.
_NEVER_COPIES = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        "alias", "as_strided", "detach", "diagonal", "expand", "narrow", "permute", "select", "slice",
        "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unfold", "unsqueeze", "view",
    )
)  # fmt: skip


@cache
def _makes_view(func: Any) -> bool:
    """Return True if `func` only makes another view of its argument, without reading or writing its bytes."""
    return getattr(func, "overloadpacket", None) in _NEVER_COPIES
