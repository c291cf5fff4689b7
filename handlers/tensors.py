"""Defines tensors as fields of events and answers, and the bytes in which the Open Inference Protocol sends them.

A field is a tensor if its annotation is `Annotated[numpy.ndarray, Tensor("FP32", [-1, 16])]`, or the same with
`torch.Tensor`. Its JSON is nested lists. As bytes, tensors are a JSON header and the values of all tensors in its
order: https://github.com/kserve/open-inference-protocol and Triton's extension for binary data describe both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Never
from urllib.parse import unquote

import orjson

from ..errors import BadInput, HandlerSignatureError, OutputInvalid
from ..foreign_json import check_json
from . import arrays
from .arrays import TENSORS_TYPE

if TYPE_CHECKING:
    from numpy.typing import NDArray

KEY = "x-tensor"
"""The key of a tensor's datatype and shape in the JSON schema of its field."""
DATATYPES: Mapping[str, str] = {
    "BOOL": "?", "UINT8": "u1", "UINT16": "<u2", "UINT32": "<u4", "UINT64": "<u8", "INT8": "i1", "INT16": "<i2",
    "INT32": "<i4", "INT64": "<i8", "FP16": "<f2", "FP32": "<f4", "FP64": "<f8", "BYTES": "O", "BF16": "<f4",
}  # fmt: skip
"""The datatypes of the protocol, and numpy's type for each. numpy has no bfloat16, so its values are float32 there."""
_TAKEN = {"b": "b", "u": "iu", "i": "iu", "f": "fiu"}
_ITEMS = {"b": "boolean", "u": "integer", "i": "integer", "f": "number", "O": "string"}
_LENGTH_BYTES = 4
MOST_AXES = 32
"""numpy iterates over no more axes."""


class SentTensor(NamedTuple):
    """A tensor of a request. `data` has its values, as bytes or as lists."""

    datatype: str
    shape: tuple[int, ...]
    data: memoryview | list[Any]


@dataclass(frozen=True, slots=True)
class Tensor:
    """The datatype and the shape of a tensor, for the annotation of a field.

    `datatype` is a name of the protocol (`DATATYPES`). In `shape`, -1 is an axis of any length. Values of BYTES are
    `bytes` in a numpy array of objects.
    """

    datatype: str
    shape: Sequence[int]

    def __post_init__(self) -> None:
        remedy = 'Write for example Tensor("FP32", [-1, 16]).'
        if self.datatype not in DATATYPES:
            fault = f"Tensor({self.datatype!r:.40}, ...): there is no such datatype."
            raise HandlerSignatureError(fault, remedy=f"Use one of {', '.join(DATATYPES)}.")
        if not all(isinstance(length, int) and length >= -1 for length in self.shape):
            raise HandlerSignatureError(f"Tensor(..., {self.shape!r:.80}) is no shape.", remedy=remedy)
        # Make the shape hashable, because annotations must have a hash.
        object.__setattr__(self, "shape", tuple(self.shape))

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema  # noqa: PLC0415

        as_torch = getattr(source, "__module__", "") == "torch"
        if as_torch and self.datatype == "BYTES":
            raise TypeError("torch has no tensors of BYTES: annotate with numpy.ndarray")
        return core_schema.no_info_plain_validator_function(
            partial(self._read, as_torch=as_torch),
            serialization=core_schema.plain_serializer_function_ser_schema(_to_json, when_used="json"),
        )

    def __get_pydantic_json_schema__(self, core: Any, handler: Any) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": _ITEMS[self._kind]}
        for length in reversed(self.shape):
            limits = {} if length < 0 else {"minItems": length, "maxItems": length}
            schema = {"type": "array", "items": schema, **limits}
        return {**schema, KEY: {"datatype": self.datatype, "shape": list(self.shape)}}

    @property
    def _kind(self) -> str:
        return DATATYPES[self.datatype].lstrip("<")[0].replace("?", "b")

    def _read(self, value: Any, *, as_torch: bool) -> Any:
        """Return a SentTensor, lists or an array as an array that fits this annotation. Raise PydanticCustomError."""
        if isinstance(value, SentTensor):
            if value.datatype != self.datatype:
                _misfit(f"it is {value.datatype}, not {self.datatype}")
            array = self._received(value)
        else:
            array = self._cast(value)
        if len(array.shape) != len(self.shape) or any(
            wanted not in (-1, length) for length, wanted in zip(array.shape, self.shape, strict=True)
        ):
            _misfit(f"its shape is {list(array.shape)}, not {list(self.shape)}")
        return self._as_torch(array) if as_torch else array

    def _received(self, sent: SentTensor) -> NDArray[Any]:
        import numpy as np  # noqa: PLC0415

        count = math.prod(sent.shape)
        if isinstance(sent.data, list):
            array = self._cast(sent.data)
        elif self.datatype == "BYTES":
            if count * _LENGTH_BYTES > len(sent.data):
                _misfit(f"it has {len(sent.data)} bytes, too few for {count} values")
            array = np.empty(count, object)
            array[:] = list(_split(sent.data, count))
        else:
            kind = "<u2" if self.datatype == "BF16" else DATATYPES[self.datatype]
            if (due := count * np.dtype(kind).itemsize) != len(sent.data):
                _misfit(f"it has {len(sent.data)} bytes, but its shape and datatype have {due}")
            # A copy, because a handler may write to it.
            array = np.frombuffer(sent.data, kind).copy()
            if self.datatype == "BF16":
                array = (array.astype("<u4") << 16).view("<f4")
        if array.size != count:
            _misfit(f"it has {array.size} values, but its shape {list(sent.shape)} has {count}")
        return array.reshape(sent.shape)

    def _cast(self, value: Any) -> NDArray[Any]:
        """Return lists or an array as an array of the datatype. No whole number changes, and no number becomes infinite."""
        import numpy as np  # noqa: PLC0415

        wanted = np.dtype(DATATYPES[self.datatype])
        try:
            array = np.asarray(arrays.to_numpy(value), object if self.datatype == "BYTES" else None)
            if self.datatype == "UINT64" and array.dtype.kind == "f" and isinstance(value, list):
                # If a list has integers below 2**63 and others from 2**63 on, numpy reads all of them as floats.
                array = _whole(value, array)
        except (ValueError, TypeError, OverflowError) as error:
            _misfit(f"it is no array: {error}")
        if array.ndim > MOST_AXES:
            _misfit(f"it has {array.ndim} axes, more than {MOST_AXES}")
        if self.datatype == "BYTES":
            return _as_bytes(array)
        if array.size and array.dtype.kind not in _TAKEN[self._kind]:
            _misfit(f"its values are {array.dtype}, not {self.datatype}")
        if array.dtype == wanted:
            return array
        with np.errstate(over="ignore", invalid="ignore"):
            cast = array.astype(wanted)
        if self._kind == "f":
            fits = np.array_equal(np.isfinite(array), np.isfinite(cast))
        else:
            fits = array.size == 0 or np.array_equal(array, cast)
        if not fits:
            _misfit(f"it has values that {self.datatype} cannot hold")
        return cast

    def _as_torch(self, array: NDArray[Any]) -> Any:
        import torch  # noqa: PLC0415

        tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
        return tensor.to(torch.bfloat16) if self.datatype == "BF16" else tensor


def declared(schema: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors in the JSON schema of an event or an answer, by their names; {} if it has other fields, too."""
    found = {}
    for name, field in schema.get("properties", {}).items():
        for one in (field, *field.get("anyOf", ())):
            if KEY in one:
                found[name] = Tensor(**one[KEY])
    return found if len(found) == len(schema.get("properties", {})) else {}


def decode(body: bytes, header: str) -> dict[str, SentTensor]:
    """Return the tensors of a request by their names. `header` is the length of its JSON header as text.

    Raise BadInput, which names the tensor. The values are checked when the event is validated.
    """
    header_bytes = int(header) if header.isdecimal() and len(header) < 12 else -1
    if not 0 <= header_bytes <= len(body):
        raise _malformed(f"The JSON header has {header[:20]!r} bytes, the body {len(body)}.")
    try:
        check_json(head := body[:header_bytes])
        found_header = orjson.loads(head)
    except orjson.JSONDecodeError as error:
        raise _malformed(f"The header is no JSON: {error}.") from None
    inputs = found_header.get("inputs") if isinstance(found_header, dict) else None
    if not isinstance(inputs, list):
        raise _malformed("The header has no list `inputs`.")
    found: dict[str, SentTensor] = {}
    left = memoryview(body)[header_bytes:]
    for number, one in enumerate(inputs):
        name, sent, left = _taken(one, f"inputs[{number}]", left)
        if name in found:
            raise _malformed(f"The input {name[:80]!r} is there twice.")
        found[name] = sent
    if left:
        raise _malformed(f"{len(left)} bytes follow the data of the last input.")
    return found


def _taken(one: Any, path: str, left: memoryview) -> tuple[str, SentTensor, memoryview]:
    """Return the name of an input, its tensor, and the bytes that follow its data."""
    if not isinstance(one, dict) or not isinstance(name := one.get("name"), str):
        raise _malformed(f"{path} has no `name`.")
    datatype, shape, data = one.get("datatype"), one.get("shape"), one.get("data")
    if not isinstance(datatype, str) or datatype not in DATATYPES:
        raise _malformed(f"The datatype of the input {name[:80]!r} is {datatype!r:.40}.")
    if (
        not isinstance(shape, list)
        or len(shape) > MOST_AXES
        or not all(type(length) is int and length >= 0 for length in shape)
    ):
        raise _malformed(f"The shape of the input {name[:80]!r} is {shape!r:.80}.")
    parameters = one.get("parameters") or {}
    size = parameters.get("binary_data_size") if isinstance(parameters, dict) else None
    if size is None:
        if not isinstance(data, list):
            raise _malformed(f"The input {name[:80]!r} has no list `data`.")
        return name, SentTensor(datatype, tuple(shape), data), left
    if data is not None:
        raise _malformed(f"The input {name[:80]!r} has both `data` and `binary_data_size`.")
    if type(size) is not int or not 0 <= size <= len(left):
        raise _malformed(
            f"The input {name[:80]!r} has a binary_data_size of {size!r:.40}; {len(left)} bytes are left."
        )
    return name, SentTensor(datatype, tuple(shape), left[:size]), left[size:]


def encode(answer: Mapping[str, Any], tensors: Mapping[str, Tensor], accept: str) -> tuple[bytes, str]:
    """Return (payload, content type) of the outputs that an Accept header names (`TENSORS_TYPE`). `answer` has the values
    of `tensors`.

    Raise BadInput if there is no such output, and OutputInvalid if a value has no JSON form.
    """
    asked = dict(part.partition("=")[::2] for part in accept.split(";")[1:])
    wanted: dict[str, bool] = {}
    for key in ("binary", "json"):
        names = list(tensors) if asked.get(key) == "*" else filter(None, asked.get(key, "").split(","))
        wanted |= {unquote(name): key == "binary" for name in names}
    outputs, data = [], []
    for name, as_bytes in wanted.items():
        if name not in tensors:
            remedy = f"It has {', '.join(tensors)}."
            raise BadInput(f"The function has no output {name[:80]!r}.", remedy=remedy)
        if (value := answer.get(name)) is None:
            continue
        tensor, array = tensors[name], arrays.to_numpy(value)
        head: dict[str, Any] = {"name": name, "datatype": tensor.datatype, "shape": list(array.shape)}
        if as_bytes:
            data.append(_raw(array, tensor.datatype))
            head["parameters"] = {"binary_data_size": len(data[-1])}
        else:
            head["data"] = _flat(array, name)
        outputs.append(head)
    fields = orjson.loads(unquote(asked.get("fields", "{}")))
    header = orjson.dumps({**fields, "outputs": outputs}, option=orjson.OPT_SERIALIZE_NUMPY)
    return b"".join([header, *data]), f"{TENSORS_TYPE};header={len(header)}"


def _raw(array: NDArray[Any], datatype: str) -> bytes | memoryview:
    import numpy as np  # noqa: PLC0415

    if datatype == "BYTES":
        return with_lengths(array.flat)
    if datatype == "BF16":
        array = _rounded(array)
    return np.ascontiguousarray(array).reshape(-1).view("u1").data


def with_lengths(values: Iterable[bytes]) -> bytes:
    """Return the data of a tensor of BYTES: each value comes after its length."""
    return b"".join(len(value).to_bytes(_LENGTH_BYTES, "little") + value for value in values)


def _rounded(array: NDArray[Any]) -> NDArray[Any]:
    """Return the bits of the bfloat16 that is nearest to each float32; of two equally near ones, the even number."""
    import numpy as np  # noqa: PLC0415

    bits = np.ascontiguousarray(array, "<f4").view("<u4")
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    # Do not round NaN, because the sum may overflow.
    return np.where(np.isnan(array), (bits >> 16) | 0x40, rounded).astype("<u2")


def _flat(array: NDArray[Any], name: str) -> Any:
    import numpy as np  # noqa: PLC0415

    remedy = "Ask for it as binary data."
    if array.dtype.kind == "O":
        try:
            return [item.decode() for item in array.flat]
        except UnicodeDecodeError:
            raise OutputInvalid(f"The output {name!r} has bytes that are no text.", remedy=remedy) from None
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        # Refuse NaN and infinities, because orjson would write them as null.
        raise OutputInvalid(f"The output {name!r} has NaN or infinite values.", remedy=remedy)
    return np.ascontiguousarray(array).reshape(-1)


def _to_json(array: Any) -> Any:
    array = arrays.to_numpy(array)
    if array.dtype.kind != "O":
        return array.tolist()
    import numpy as np  # noqa: PLC0415

    text = np.empty(array.shape, object)
    text.flat[:] = [item.decode() for item in array.flat]
    return text.tolist()


def _whole(value: list[Any], array: NDArray[Any]) -> NDArray[Any]:
    """Return lists of whole numbers as an array, or else `array`. Raise OverflowError for a number out of range."""
    import numpy as np  # noqa: PLC0415

    numbers = np.asarray(value, object)
    return numbers.astype("<u8") if all(type(number) is int for number in numbers.flat) else array


def _as_bytes(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array of text and bytes as one of bytes."""
    import numpy as np  # noqa: PLC0415

    found = np.empty(array.shape, object)
    for place, item in enumerate(array.flat):
        if not isinstance(item, str | bytes):
            _misfit(f"it has a value of type {type(item).__name__}, not text or bytes")
        found.flat[place] = item.encode() if isinstance(item, str) else bytes(item)
    return found


def _split(data: memoryview, count: int) -> Iterator[bytes]:
    """Yield each value of a tensor of BYTES: its length comes before it. Raise PydanticCustomError."""
    for _ in range(count):
        end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
        if len(data) < max(end, _LENGTH_BYTES):
            _misfit(f"it has fewer than {count} values")
        yield bytes(data[_LENGTH_BYTES:end])
        data = data[end:]
    if data:
        _misfit(f"{len(data)} bytes follow its {count} values")


def _misfit(fault: str) -> Never:
    from pydantic_core import PydanticCustomError  # noqa: PLC0415

    raise PydanticCustomError("tensor", "{fault}", {"fault": fault})


def _malformed(fault: str) -> BadInput:
    return BadInput(fault, remedy="docs/how-to/oip.md has an example.")
