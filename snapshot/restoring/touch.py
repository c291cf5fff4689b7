"""Touch: which bytes of a mapping the tensors of an operation view. The ground of executing while loading, and of recording."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .mapping import Mapping

Extent = tuple[int, int, int]
"""Shard, first byte, byte after the last."""


class Touched:
    """Finds the bytes of one mapping behind tensors: views of it, whoever made them."""

    def __init__(self, mapping: Mapping) -> None:
        shards = range(len(mapping.manifest.shards))
        # Every view keeps the storage of its shard, which begins where the shard is mapped.
        flats = [mapping.flat(shard, torch.uint8) for shard in shards]
        self._shards = {
            flats[shard].untyped_storage().data_ptr(): shard for shard in shards if len(flats[shard])
        }

    def extents(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Extent]:
        """The bytes that operation `func` reads or writes of the mapping."""
        if _makes_view(func):
            return
        if func is torch.ops.aten.embedding.default:
            yield from self._extent(args[1])  # before its values are looked at
            if (rows := self._rows(args)) is not None:
                yield from rows
                return
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                yield from self._extent(value)
            elif isinstance(value, (list, tuple)):
                for item in value:
                    if isinstance(item, Tensor):
                        yield from self._extent(item)

    def _extent(self, tensor: Tensor) -> Iterator[Extent]:
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return
        shard = self._shards.get(tensor.untyped_storage().data_ptr())
        if shard is None or tensor.numel() == 0:
            return
        begin = int(tensor.storage_offset())
        reach = 1 + sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        yield shard, begin * tensor.itemsize, (begin + reach) * tensor.itemsize

    def _rows(self, args: tuple[Any, ...]) -> list[Extent] | None:
        """An embedding needs the rows it looks up, not the table: often the largest tensor, and the first one touched."""
        table, indices = args[0], args[1]
        if indices.device.type != "cpu" or table.dim() != 2 or not table.is_contiguous():
            return None
        whole = list(self._extent(table))
        if not whole:
            return []
        shard, begin, _ = whole[0]
        row_bytes = table.shape[1] * table.itemsize
        rows = [row for row in indices.unique().tolist() if 0 <= row < table.shape[0]]
        return [(shard, begin + row * row_bytes, begin + (row + 1) * row_bytes) for row in rows]


_NEVER_COPIES = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        "alias", "as_strided", "detach", "diagonal", "expand", "narrow", "permute", "select", "slice", "split",
        "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unfold", "unsqueeze", "view",
    )
)  # fmt: skip


@cache
def _makes_view(func: Any) -> bool:
    """Whether `func` only makes another view of its argument, and touches none of its bytes.

    A list, since schemas do not tell: `to`, `contiguous` and `reshape` say that they may return their argument, and copy.
    """
    return getattr(func, "overloadpacket", None) in _NEVER_COPIES
