"""The element types a safetensors file may hold and torch can too; known without loading torch."""

from __future__ import annotations

from typing import NamedTuple


class Dtype(NamedTuple):
    """One element type: how many bytes an element takes, and what torch calls it."""

    itemsize_bytes: int
    torch_name: str


# F4, F6_E2M3 and F6_E3M2 are left out: their elements are no whole bytes, and torch has no type for them.
DTYPES: dict[str, Dtype] = {
    "BOOL": Dtype(1, "bool"),
    "U8": Dtype(1, "uint8"),
    "I8": Dtype(1, "int8"),
    "F8_E4M3": Dtype(1, "float8_e4m3fn"),
    "F8_E4M3FNUZ": Dtype(1, "float8_e4m3fnuz"),
    "F8_E5M2": Dtype(1, "float8_e5m2"),
    "F8_E5M2FNUZ": Dtype(1, "float8_e5m2fnuz"),
    "F8_E8M0": Dtype(1, "float8_e8m0fnu"),
    "I16": Dtype(2, "int16"),
    "U16": Dtype(2, "uint16"),
    "F16": Dtype(2, "float16"),
    "BF16": Dtype(2, "bfloat16"),
    "I32": Dtype(4, "int32"),
    "U32": Dtype(4, "uint32"),
    "F32": Dtype(4, "float32"),
    "I64": Dtype(8, "int64"),
    "U64": Dtype(8, "uint64"),
    "F64": Dtype(8, "float64"),
    "C64": Dtype(8, "complex64"),
}
