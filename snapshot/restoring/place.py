"""Computes the offset, shape and strides with which torch views a tensor, or a slice of it, in a mapped shard."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..format.dtypes import DTYPES
from ..format.manifest import TensorEntry
from ..format.slices import Slice, shape_fault, strided

TORCH_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, dtype.torch_name)
    for name, dtype in DTYPES.items()
    if dtype.torch_name is not None and hasattr(torch, dtype.torch_name)
}


@dataclass(frozen=True, slots=True)
class Elements:
    """Where in a shard the elements of a tensor or a slice are, and how torch views them (see `Strided`)."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    begin_bytes: int
    end_bytes: int

    @property
    def offset_elements(self) -> int | None:
        """The offset from the shard's first byte, in elements. None if the bytes are not aligned for the dtype."""
        # An empty tensor may be at the end of the file, where no view can begin. So views of empty tensors begin at 0.
        begin_bytes = self.begin_bytes if self.begin_bytes < self.end_bytes else 0
        offset, rest = divmod(begin_bytes, self.dtype.itemsize)
        return None if rest else offset


def type_fault(entry: TensorEntry) -> str | None:
    """Return why torch cannot view this tensor, or None if it can."""
    if entry.dtype not in TORCH_DTYPES:
        return f"{entry.dtype}, for which torch {torch.__version__} has no type"
    return shape_fault(entry)


def place(entry: TensorEntry, cut: Slice | None = None) -> Elements:
    """Return the elements of a tensor, or of a slice of it. The caller has checked `type_fault` and `slice_fault`."""
    return Elements(TORCH_DTYPES[entry.dtype], *strided(entry, cut))
