"""Finds the bytes of weights that an operation reads or writes, to wait for them or to record their order."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..format.manifest import Manifest
from .inner_tensors import PLAIN, tensors_with_bytes
from .mapping import Mapping

if TYPE_CHECKING:
    from .device.upload import DeviceUpload

Extent = tuple[int, int, int]
"""The number of the region, the first byte, and the byte after the last."""
Placed = tuple[int, int, int, str]
"""The extent of a tensor, and its name."""


class Touched:
    """Finds the bytes of some regions that an operation uses. It recognises a view of a region by its storage.

    A region is a tensor of bytes, such as a mapped shard, or the slab on a device.
    """

    def __init__(self, regions: Sequence[Tensor]) -> None:
        # A view has the same storage as its region, so the address of the storage identifies the region.
        self._regions = {
            flat.untyped_storage().data_ptr(): number for number, flat in enumerate(regions) if len(flat)
        }
        self._device = regions[0].device if regions else torch.device("cpu")

    def extents(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Extent]:
        """Yield the bytes of the regions that operation `func` reads or writes."""
        makes_view = _makes_view(func)
        if func is torch.ops.aten.embedding.default and type(args[0]) in PLAIN:
            # The indices may be in a region too. Yield their bytes first, because they must land before `_rows` reads them.
            yield from self._extent(args[1])
            if (rows := self._rows(args)) is not None:
                yield from rows
                return
        for value in (*args, *kwargs.values()):
            for item in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(item, Tensor):
                    yield from self._read_by(item, makes_view=makes_view)

    def _read_by(self, tensor: Tensor, *, makes_view: bool) -> Iterator[Extent]:
        if type(tensor) in PLAIN:
            if not makes_view:
                yield from self._extent(tensor)
            return
        # Yield all inner tensors, because a subclass may read them even to make a view, in ways that no dispatch mode
        # sees.
        for one in tensors_with_bytes(tensor):
            if not (makes_view and one is tensor):
                yield from self._extent(one)

    def _extent(self, tensor: Tensor) -> Iterator[Extent]:
        if tensor.device != self._device or tensor.layout != torch.strided:
            return
        try:
            region = self._regions.get(tensor.untyped_storage().data_ptr())
        except RuntimeError:
            # The tensor belongs to a subclass without bytes of its own, so it is in no region.
            return
        if region is None or tensor.numel() == 0:
            return
        begin = int(tensor.storage_offset())
        sizes = zip(tensor.shape, tensor.stride(), strict=True)
        reach = 1 + sum((size - 1) * stride for size, stride in sizes)
        yield region, begin * tensor.itemsize, (begin + reach) * tensor.itemsize

    def _rows(self, args: tuple[Any, ...]) -> list[Extent] | None:
        """Return the rows of the table that an embedding looks up. None if the rows cannot be found.

        The table is often the largest tensor of the snapshot, so waiting for the whole table would take long. Do not read
        indices on a device, because the read would wait for everything that runs on the device.
        """
        table, indices = args[:2]
        if indices.device.type != "cpu" or table.dim() != 2 or not table.is_contiguous():
            return None
        whole = list(self._extent(table))
        if not whole:
            return []
        region, begin, _ = whole[0]
        row_bytes = table.shape[1] * table.itemsize
        rows = [row for row in indices.unique().tolist() if 0 <= row < table.shape[0]]
        return [(region, begin + row * row_bytes, begin + (row + 1) * row_bytes) for row in rows]


def record_first_touch(
    mapping: Mapping, run: Callable[[], Any], uploads: Sequence[DeviceUpload] = ()
) -> Manifest:
    """Call `run`, and return the manifest with the order in which `run` first touches tensors.

    `run` uses modules whose weights are views of `mapping`, or were copied from it to a device by `uploads`.
    """
    mapped = [
        (tensor.shard, tensor.offset_bytes, tensor.offset_bytes + tensor.size_bytes, tensor.name)
        for tensor in mapping.manifest.tensors
        if tensor.size_bytes
    ]
    with _Recorder(
        [(mapping.flats, mapped), *(([one.slab], one.layout.placed()) for one in uploads)]
    ) as recorder:
        run()
    return mapping.manifest.model_copy(update={"first_touch": tuple(recorder.order)})


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, regions: Sequence[tuple[Sequence[Tensor], list[Placed]]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.order: dict[str, None] = {}
        self._regions = [(Touched(each), sorted(placed)) for each, placed in regions]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for touched, placed in self._regions:
            for region, begin, end in touched.extents(func, args, kwargs):
                index = max(0, bisect_right(placed, (region, begin, math.inf)) - 1)
                for other, low, high, name in placed[index:]:
                    if (other, low) >= (region, end):
                        break
                    if other == region and high > begin:
                        self.order.setdefault(name)
        return func(*args, **kwargs)


# The operations that always return a view. They are listed by name, because their schemas look like the schemas of `to`,
# `contiguous` and `reshape`, which may return a copy.
_NEVER_COPIES = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        "alias", "as_strided", "detach", "diagonal", "expand", "narrow", "permute", "select", "slice",
        "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unfold", "unsqueeze", "view",
    )
)  # fmt: skip


@cache
def _makes_view(func: Any) -> bool:
    """Return True if `func` only makes a view of its argument, and reads or writes none of the bytes."""
    return getattr(func, "overloadpacket", None) in _NEVER_COPIES
