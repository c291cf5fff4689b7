"""A safetensors file's header, read and distrusted: what tensors the file holds, and where.

The file is: 8 bytes, little-endian length N of the header; N bytes of JSON, `{name: {dtype, shape,
data_offsets}}` and optionally `__metadata__` (strings to strings), padded with spaces; then the data, which
the tensors cover without gap or overlap. Only the header is read. Every defect is a HeaderError.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Set
from dataclasses import dataclass
from math import prod
from typing import Any, Never

from ...errors import HeaderError
from ..sources.source import Source
from .dtype import DTYPES

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # as the safetensors library has it
MAX_TENSORS = 1 << 18
MAX_RANK = 64  # torch's own
MAX_TENSOR_NAME_CHARS = 1024
MAX_FILE_BYTES = 1 << 53
# What a parser makes of text takes up to 350 bytes for a bracket and 120 for a comma.
MAX_BRACKETS = 1 << 20
MAX_COMMAS = 1 << 22

_METADATA = "__metadata__"
_FIELDS = {"dtype", "shape", "data_offsets"}
_REMEDY = "Save the file again with the safetensors library, or fetch it again."


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """One tensor; `offset_bytes` counts from the start of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """A whole header; tensors in the order of their bytes."""

    data_offset_bytes: int
    file_bytes: int
    tensors: tuple[TensorHeader, ...]
    metadata: dict[str, str]


def read_header(source: Source, name: str) -> Header:
    """The header of file `name`; reads nothing but the header."""
    file_bytes = source.size(name)
    if file_bytes < LENGTH_BYTES:
        _refuse(name, f"it has {file_bytes} bytes, fewer than the {LENGTH_BYTES} of a header's length")
    prefix = bytearray(LENGTH_BYTES)
    _fill(source, name, 0, prefix)
    header_bytes = int.from_bytes(prefix, "little")
    if header_bytes > MAX_HEADER_BYTES:
        _refuse(name, f"its header claims {header_bytes} bytes, over the limit of {MAX_HEADER_BYTES}")
    if LENGTH_BYTES + header_bytes > file_bytes:
        _refuse(name, f"its header claims {header_bytes} bytes, but the file has {file_bytes} in all")
    text = bytearray(header_bytes)
    _fill(source, name, LENGTH_BYTES, text)
    return parse_header(bytes(text), file=name, file_bytes=file_bytes)


def parse_header(text: bytes, *, file: str, file_bytes: int) -> Header:
    """The header from its JSON text; `file` is for the messages."""
    if file_bytes > MAX_FILE_BYTES:
        _refuse(file, f"it has {file_bytes} bytes, over the limit of {MAX_FILE_BYTES}")
    entries = _entries(text, file)
    metadata = _metadata(entries.pop(_METADATA, {}), file)
    if len(entries) > MAX_TENSORS:
        _refuse(file, f"it holds {len(entries)} tensors, over the limit of {MAX_TENSORS}")
    tensors = [_tensor(file, name, entry) for name, entry in entries.items()]
    # By end too: a zero-sized tensor at the offset where another starts comes before it.
    tensors.sort(key=lambda tensor: (tensor.offset_bytes, tensor.size_bytes))
    data_offset_bytes = LENGTH_BYTES + len(text)
    _check_cover(file, tensors, file_bytes - data_offset_bytes)
    return Header(data_offset_bytes, file_bytes, tuple(tensors), metadata)


def _fill(source: Source, name: str, offset: int, buffer: bytearray) -> None:
    count = source.read_into(name, offset, memoryview(buffer))
    if count != len(buffer):
        _refuse(name, f"it ends at byte {offset + count}, inside its header")


def bulk_fault(text: bytes) -> str | None:
    """Why JSON would take far more memory to parse than any honest one does, in words; None if it would not.

    Counts characters, those within strings too: 1 ms a megabyte, before a parser sees anything.
    """
    brackets = text.count(b"[") + text.count(b"{")
    if brackets > MAX_BRACKETS:
        return f"it holds {brackets} opening brackets, over the limit of {MAX_BRACKETS}"
    commas = text.count(b",")
    return f"it holds {commas} commas, over the limit of {MAX_COMMAS}" if commas > MAX_COMMAS else None


def _entries(text: bytes, file: str) -> dict[str, Any]:
    if not text.startswith(b"{"):
        _refuse(file, "its header does not start with '{'")
    fault = bulk_fault(text)
    if fault is not None:
        _refuse(file, f"its header is no tensor file's: {fault}")
    try:
        # Decoded here: json.loads on bytes would guess UTF-16 and UTF-32 as well.
        entries = json.loads(
            text.decode(), object_pairs_hook=lambda pairs: _unique(file, pairs), parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as error:
        fault = f"{file}: its header is not JSON ({_short(str(error))})."
        raise HeaderError(fault, remedy=_REMEDY) from error
    if not isinstance(entries, dict):  # pragma: no cover - JSON that starts with '{' is an object
        _refuse(file, "its header is not a JSON object")
    return entries


def _unique(file: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        _refuse(file, f"its header holds the key {_short(twice)!r} twice")
    return found


def _no_constant(constant: str) -> Never:
    raise ValueError(f"{constant} is not JSON")


def _metadata(metadata: Any, file: str) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        _refuse(file, f"its {_METADATA} is not an object of strings")
    return metadata


def _tensor(file: str, name: str, entry: Any) -> TensorHeader:
    if not name_is_sound(name):
        _refuse(file, "a tensor's name is empty, too long or no valid text", name)
    if not isinstance(entry, dict) or entry.keys() != _FIELDS:
        _refuse(file, f"its entry does not hold exactly {', '.join(sorted(_FIELDS))}", name)
    dtype = entry["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        _refuse(file, f"its dtype {_short(str(dtype))!r} is unknown", name, f"Known are {', '.join(DTYPES)}.")
    shape = _naturals(file, name, "shape", entry["shape"], MAX_RANK)
    offsets = _naturals(file, name, "data_offsets", entry["data_offsets"], 2)
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        _refuse(file, "its data_offsets are not a begin and an end after it", name)
    begin, end = offsets
    needed_bytes = prod(shape) * DTYPES[dtype].itemsize_bytes
    if end - begin != needed_bytes:
        fault = f"its data_offsets span {end - begin} bytes, but {dtype} of shape {_short(str(shape))}"
        _refuse(file, f"{fault} takes {_short(str(needed_bytes))}", name)
    return TensorHeader(name, dtype, shape, begin, end - begin)


def _naturals(file: str, name: str, field: str, values: Any, limit: int) -> tuple[int, ...]:
    if not isinstance(values, list) or len(values) > limit:
        _refuse(file, f"its {field} is not a list of at most {limit} numbers", name)
    for value in values:
        # bool is an int to Python, not to the format. The bound keeps every later product and sum small.
        if type(value) is not int or not 0 <= value <= MAX_FILE_BYTES:
            _refuse(file, f"its {field} holds {_short(str(value))}, not a whole number in range", name)
    return tuple(values)


def _check_cover(file: str, tensors: list[TensorHeader], data_bytes: int) -> None:
    end_bytes = 0
    for tensor in tensors:
        if tensor.offset_bytes < end_bytes:
            _refuse(file, "its bytes overlap those of the tensor before it", tensor.name)
        if tensor.offset_bytes > end_bytes:
            _refuse(file, f"there is a gap of {tensor.offset_bytes - end_bytes} bytes before it", tensor.name)
        end_bytes += tensor.size_bytes
        if end_bytes > data_bytes:
            fault = f"it ends at byte {end_bytes} of the data, which has {data_bytes}"
            _refuse(file, f"{fault}: the file is truncated or its header wrong", tensor.name)
    if end_bytes != data_bytes:
        _refuse(file, f"{data_bytes - end_bytes} bytes at its end belong to no tensor")


def aliases_of(headers: Iterable[Header], stored: Set[str]) -> dict[str, str]:
    """The names that safetensors.torch.save_model dropped of shared tensors, and noted in the metadata: to the kept ones."""
    return {
        alias: target
        for header in headers
        for alias, target in header.metadata.items()
        if target in stored and alias not in stored and alias != "format"
    }


def name_is_sound(name: str) -> bool:
    """Whether a tensor's name is one that can be printed, stored and matched."""
    # json.loads lets half a surrogate pair through, which no file and no message can hold.
    return 0 < len(name) <= MAX_TENSOR_NAME_CHARS and not any("\ud800" <= char <= "\udfff" for char in name)


def _refuse(file: str, fault: str, tensor: str | None = None, remedy: str = _REMEDY) -> Never:
    where = file if tensor is None else f"{file}, tensor {_short(tensor)!r}"
    raise HeaderError(f"{where}: {fault}.", remedy=remedy)


def _short(text: str) -> str:
    """At most 80 characters of what a file says, fit for a message and a log."""
    clean = text.encode(errors="backslashreplace").decode()
    return clean if len(clean) <= 80 else f"{clean[:77]}..."
