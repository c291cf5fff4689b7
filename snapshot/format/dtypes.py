"""Lists the element types of safetensors, with the size of an element and the name of the type in torch.

Elements may be smaller than a byte. Elements are packed without padding, also between the rows of a tensor, but a whole
tensor must end at the end of a byte. This module never imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple


class Dtype(NamedTuple):
    """An element type: the bits of one element, and the name of the type in torch. None if torch lacks the type."""

    bits: int
    torch_name: str | None
    packed: int = 1
    """How many elements of the file torch counts as one element. An element of torch has at least one whole byte."""

    @property
    def torch_itemsize_bytes(self) -> int:
        """The size of one element in torch. Call it only if torch has the type."""
        return self.bits * self.packed // 8

    def size_bytes(self, shape: Sequence[int]) -> int | None:
        """Return the size of a tensor of this type. None if the tensor would not fill whole bytes, which the format forbids."""
        size_bytes, rest = divmod(prod(shape) * self.bits, 8)
        return None if rest else size_bytes

    def torch_shape(self, shape: Sequence[int]) -> tuple[int, ...] | None:
        """Return the shape in torch of a tensor that has `shape` in a file. None if torch has no such tensor.

        With two elements in a byte, torch needs rows of whole bytes: [2, 6] becomes [2, 3], and [2, 3] becomes None.
        """
        if self.packed == 1:
            return tuple(shape)
        if not shape or shape[-1] % self.packed:
            return None
        return (*shape[:-1], shape[-1] // self.packed)

    def stored_shape(self, shape: Sequence[int]) -> tuple[int, ...] | None:
        """Return the shape in a file of a tensor that has `shape` in torch. None for a scalar of packed elements."""
        if self.packed == 1:
            return tuple(shape)
        return (*shape[:-1], shape[-1] * self.packed) if shape else None


# The element types by their safetensors names. F4, F6_E2M3, F6_E3M2 and F8_E8M0 are types of the OCP Microscaling (MX)
# formats. Torch has no type of 6 bits.
DTYPES: dict[str, Dtype] = {
    "BOOL": Dtype(8, "bool"), "U8": Dtype(8, "uint8"), "I8": Dtype(8, "int8"),
    "F4": Dtype(4, "float4_e2m1fn_x2", 2), "F6_E2M3": Dtype(6, None), "F6_E3M2": Dtype(6, None),
    "F8_E4M3": Dtype(8, "float8_e4m3fn"), "F8_E4M3FNUZ": Dtype(8, "float8_e4m3fnuz"),
    "F8_E5M2": Dtype(8, "float8_e5m2"), "F8_E5M2FNUZ": Dtype(8, "float8_e5m2fnuz"),
    "F8_E8M0": Dtype(8, "float8_e8m0fnu"),
    "I16": Dtype(16, "int16"), "U16": Dtype(16, "uint16"), "F16": Dtype(16, "float16"), "BF16": Dtype(16, "bfloat16"),
    "I32": Dtype(32, "int32"), "U32": Dtype(32, "uint32"), "F32": Dtype(32, "float32"),
    "I64": Dtype(64, "int64"), "U64": Dtype(64, "uint64"), "F64": Dtype(64, "float64"), "C64": Dtype(64, "complex64"),
}  # fmt: skip
