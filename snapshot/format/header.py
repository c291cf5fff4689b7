"""Reads and validates the header of a safetensors file: the names, types and places of the tensors in the file.

A file consists of three parts. The first 8 bytes are the little-endian length N of the header. The next N
bytes are the header: a JSON object that maps the name of each tensor to its dtype, shape and data_offsets,
and may map `__metadata__` to an object of strings or to null. Spaces may surround the object. The rest of the file is
data, which the tensors cover without gap or overlap. Only the header is read here. Every defect raises HeaderError.
"""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Never

from ...errors import HeaderError
from ..sources.source import Source, read_all
from .dtypes import DTYPES

LENGTH_BYTES = 8
# The safetensors library has the same limit.
MAX_HEADER_BYTES = 100_000_000
MAX_HEADERS_BYTES = 2 * MAX_HEADER_BYTES
"""The limit for the sizes of all headers of a snapshot together."""
_LARGE_BYTES = 1 << 20
MAX_TENSORS = 1 << 18
# Torch has the same limit.
MAX_RANK = 64
MAX_TENSOR_NAME_CHARS = 1024
MAX_FILE_BYTES = 1 << 53
# Limit the memory of a JSON parser, which allocates up to 350 bytes for an opening bracket and 120 for a comma.
MAX_BRACKETS = 1 << 20
MAX_COMMAS = 1 << 22
_METADATA = "__metadata__"
_FIELDS = {"dtype", "shape", "data_offsets"}
_REMEDY = "Save the file again with the safetensors library, or fetch it again."
_FETCH = "Open its address in a browser: you may have to log in, or it is not the address of the file."
# Other contents that are often found under the name of a safetensors file: the first bytes, the kind, and the remedy.
_OTHERS = (
    (rb"version https?://git-", "a pointer of Git LFS", "Run `git lfs pull`, or fetch the file itself (hub: /resolve/, not /raw/)."),
    (rb"(?i)\s*<(!doctype|!--|html|head|body|\?xml)", "a page of HTML or XML", _FETCH),
    (rb'\s*\{\s*"[\w-]+"\s*:', "a text of JSON", _FETCH),
    (rb"\x1f\x8b\x08", "compressed with gzip", "Unpack it with gunzip."),
    (rb"PK\x03\x04", "a zip file, as torch.save writes", "Run `pilotflame snapshot convert`, or unpack it."),
)  # fmt: skip


class TensorHeader(NamedTuple):
    """One tensor of a header. `offset_bytes` is its position, counted from the file's first byte."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """A whole header. `tensors` are in the order of their bytes. The data starts at `data_offset_bytes`."""

    data_offset_bytes: int
    file_bytes: int
    tensors: tuple[TensorHeader, ...]
    metadata: dict[str, str]


class HeaderRoom:
    """Limits the memory for the headers of one snapshot. Several threads read headers, but only one large header at a time."""

    def __init__(self) -> None:
        self._counting, self._reading = threading.Lock(), threading.Lock()
        self._left = MAX_HEADERS_BYTES

    @contextmanager
    def taken(self, name: str, size_bytes: int) -> Iterator[None]:
        """Count a header against MAX_HEADERS_BYTES, the limit for all headers of a snapshot. The header still counts after the block.

        In the block, read and parse the header; only one large header is read at a time. Raise HeaderError if the limit is
        exceeded.
        """
        with self._counting:
            self._left -= size_bytes
            if self._left < 0:
                _refuse(name, f"the headers have over {MAX_HEADERS_BYTES} bytes together, with this one")
        with self._reading if size_bytes > _LARGE_BYTES else nullcontext():
            yield


def read_header(source: Source, name: str, room: HeaderRoom | None = None) -> Header:
    """Return the header of file `name`, without reading the rest. Raise HeaderError if it is not valid."""
    try:
        return _read_header(source, name, room or HeaderRoom())
    except HeaderError as error:
        beginning = read_all(source, name, 64)
        for pattern, kind, remedy in _OTHERS:
            if re.match(pattern, beginning):
                raise HeaderError(f"{name} is {kind}, and no safetensors file.", remedy=remedy) from error
        raise


def _read_header(source: Source, name: str, room: HeaderRoom) -> Header:
    file_bytes = source.stat(name).size_bytes
    if file_bytes < LENGTH_BYTES:
        _refuse(name, f"it has {file_bytes} bytes, fewer than the {LENGTH_BYTES} of a header's length")
    header_bytes = int.from_bytes(_read(source, name, 0, LENGTH_BYTES), "little")
    if header_bytes > MAX_HEADER_BYTES:
        _refuse(name, f"its header claims {header_bytes} bytes, over the limit of {MAX_HEADER_BYTES}")
    if LENGTH_BYTES + header_bytes > file_bytes:
        _refuse(name, f"its header claims {header_bytes} bytes, but the file has {file_bytes} in all")
    with room.taken(name, header_bytes):
        return parse_header(_read(source, name, LENGTH_BYTES, header_bytes), file=name, file_bytes=file_bytes)


def parse_header(text: bytes, *, file: str, file_bytes: int) -> Header:
    """Return the header whose JSON is `text`. Raise HeaderError, which names `file`, if it is not valid."""
    if file_bytes > MAX_FILE_BYTES:
        _refuse(file, f"it has {file_bytes} bytes, over the limit of {MAX_FILE_BYTES}")
    entries = _entries(text, file)
    # Like the safetensors library, read null as no metadata.
    metadata = {} if (given := entries.pop(_METADATA, None)) is None else given
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        _refuse(file, f"its {_METADATA} is not an object of strings")
    if len(entries) > MAX_TENSORS:
        _refuse(file, f"it holds {len(entries)} tensors, over the limit of {MAX_TENSORS}")
    data_offset_bytes = LENGTH_BYTES + len(text)
    tensors = [_tensor(file, name, entry, data_offset_bytes) for name, entry in entries.items()]
    # Sort by size too, so that an empty tensor comes before the tensor that starts at the same offset.
    tensors.sort(key=lambda tensor: (tensor.offset_bytes, tensor.size_bytes))
    _check_cover(file, tensors, data_offset_bytes, file_bytes)
    return Header(data_offset_bytes, file_bytes, tuple(tensors), metadata)


def _read(source: Source, name: str, offset: int, size_bytes: int) -> bytes:
    buffer = bytearray(size_bytes)
    count = source.read_into(name, offset, memoryview(buffer))
    if count != size_bytes:
        _refuse(name, f"it ends at byte {offset + count}, inside its header")
    return bytes(buffer)


def bulk_fault(text: bytes) -> str | None:
    """Return a fault if parsing this JSON could take too much memory, else None.

    It counts brackets and commas, also inside strings. That takes 1 ms per megabyte.
    """
    brackets = text.count(b"[") + text.count(b"{")
    if brackets > MAX_BRACKETS:
        return f"it holds {brackets} opening brackets, over the limit of {MAX_BRACKETS}"
    commas = text.count(b",")
    return f"it holds {commas} commas, over the limit of {MAX_COMMAS}" if commas > MAX_COMMAS else None


def _entries(text: bytes, file: str) -> dict[str, Any]:
    if not text.lstrip().startswith(b"{"):
        _refuse(file, "its header does not start with '{'")
    if fault := bulk_fault(text):
        _refuse(file, f"its header is not that of a tensor file: {fault}")
    try:
        # Decode as UTF-8 first: json.loads would also accept bytes in UTF-16 and UTF-32.
        unique = partial(_unique, file)
        # The result is a dict, because JSON that starts with '{' is an object.
        return json.loads(text.decode(), object_pairs_hook=unique, parse_constant=_no_constant)  # type: ignore[no-any-return]
    except (ValueError, RecursionError) as error:
        _refuse(file, f"its header is not JSON ({_short(str(error))})")


def _unique(file: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        _refuse(file, f"its header holds the key {_short(str(repeated(name for name, _ in pairs)))!r} twice")
    return found


def _no_constant(constant: str) -> Never:
    raise ValueError(f"{constant} is not JSON")


def _tensor(file: str, name: str, entry: Any, data_offset_bytes: int) -> TensorHeader:
    if not name_is_sound(name):
        _refuse(file, "a tensor's name is empty, too long or no valid text", name)
    # Like the safetensors library, ignore other keys.
    if not isinstance(entry, dict) or not entry.keys() >= _FIELDS:
        _refuse(file, f"its entry does not hold {', '.join(sorted(_FIELDS))}", name)
    dtype = entry["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        _refuse(file, f"its dtype {_short(str(dtype))!r} is unknown", name, f"Known are {', '.join(DTYPES)}.")
    shape = _naturals(file, name, "shape", entry["shape"], MAX_RANK)
    offsets = _naturals(file, name, "data_offsets", entry["data_offsets"], 2)
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        _refuse(file, "its data_offsets are not a begin and an end after it", name)
    begin, end = offsets
    needed_bytes = DTYPES[dtype].size_bytes(shape)
    if needed_bytes is None:
        _refuse(file, f"{dtype} of shape {_short(str(shape))} does not fill whole bytes", name)
    if end - begin != needed_bytes:
        fault = f"its data_offsets span {end - begin} bytes, but {dtype} of shape {_short(str(shape))}"
        _refuse(file, f"{fault} takes {_short(str(needed_bytes))}", name)
    return TensorHeader(name, dtype, shape, data_offset_bytes + begin, needed_bytes)


def _naturals(file: str, name: str, field: str, values: Any, limit: int) -> tuple[int, ...]:
    if not isinstance(values, list) or len(values) > limit:
        _refuse(file, f"its {field} is not a list of at most {limit} numbers", name)
    for value in values:
        # Compare the type itself, because isinstance would accept a bool. The limit keeps products and sums of such
        # numbers small enough to compute quickly.
        if type(value) is not int or not 0 <= value <= MAX_FILE_BYTES:
            _refuse(file, f"its {field} holds {_short(str(value))}, not a whole number in range", name)
    return tuple(values)


def _check_cover(file: str, tensors: list[TensorHeader], end_bytes: int, file_bytes: int) -> None:
    """Raise HeaderError unless the tensors cover the data, which starts at `end_bytes`, without gaps."""
    for tensor in tensors:
        if tensor.offset_bytes < end_bytes:
            _refuse(file, "its bytes overlap those of the tensor before it", tensor.name)
        if tensor.offset_bytes > end_bytes:
            _refuse(file, f"there is a gap of {tensor.offset_bytes - end_bytes} bytes before it", tensor.name)
        end_bytes += tensor.size_bytes
        if end_bytes > file_bytes:
            fault = f"it ends at byte {end_bytes} of a file of {file_bytes}"
            _refuse(file, f"{fault}: the file is truncated or its header wrong", tensor.name)
    if end_bytes != file_bytes:
        _refuse(file, f"{file_bytes - end_bytes} bytes at its end belong to no tensor")


def aliases_of(headers: Iterable[Header], stored: Set[str]) -> dict[str, str]:
    """Return the aliases of tensors in `stored` that safetensors.torch.save_model put into the metadata.

    The metadata may also have other entries, so entries whose key cannot be the name of a tensor are left out.
    """
    return {
        alias: target
        for header in headers
        for alias, target in header.metadata.items()
        if target in stored and alias not in stored and alias != "format" and name_is_sound(alias)
    }


def repeated(names: Iterable[str]) -> str | None:
    """Return the first name that occurs more than once, or None if all are unique."""
    return next((name for name, count in Counter(names).items() if count > 1), None)


def name_is_sound(name: str) -> bool:
    """Return True if `name` is allowed as a tensor's name: not empty, not too long, and valid in UTF-8."""
    # Refuse half of a surrogate pair: json.loads accepts it, but it cannot be encoded in UTF-8.
    return 0 < len(name) <= MAX_TENSOR_NAME_CHARS and not any("\ud800" <= char <= "\udfff" for char in name)


def _refuse(file: str, fault: str, tensor: str | None = None, remedy: str = _REMEDY) -> Never:
    where = file if tensor is None else f"{file}, tensor {_short(tensor)!r}"
    raise HeaderError(f"{where}: {fault}.", remedy=remedy)


def _short(text: str) -> str:
    """Shorten untrusted text to 80 characters for a message, and escape characters that UTF-8 cannot encode."""
    clean = text.encode(errors="backslashreplace").decode()
    return clean if len(clean) <= 80 else f"{clean[:77]}..."
