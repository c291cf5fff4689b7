"""Reads requests for inference: which outputs a client wants in which form, the deadline and the priority.

The gateway does not read the values of the inputs. The worker checks them (`handlers/tensors.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self
from urllib.parse import quote

import orjson
from multidict import CIMultiDict, istr
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ....errors import BadInput
from ....foreign_json import dumps
from ....handlers.arrays import TENSORS_TYPE
from ....handlers.tensors import DATATYPES
from ...calls.serving.response_cache import MAX_INPUT_BYTES
from ...front.http.requests import PRIORITY, TIMEOUT, Headers, load_json, validate
from .model import TensorModel

HEADER_LENGTH = istr("Inference-Header-Content-Length")
REMEDY = "docs/how-to/oip.md lists the fields and parameters."
_LOWEST = 5
MOST_TENSORS = 1000
MOST_ID_CHARS = 1 << 16
_DIGITS = 12
_UNSUPPORTED = (
    "classification", "sequence_id", "sequence_start", "sequence_end", "shared_memory_region", "shared_memory_offset",
    "shared_memory_byte_size",
)  # fmt: skip
_EMPTY_FINAL = "triton_enable_empty_final_response"
_OWN = frozenset({"binary_data_output", "timeout", "priority", _EMPTY_FINAL})


def _without_nulls(given: Any) -> Any:
    return (
        {name: value for name, value in given.items() if value is not None}
        if isinstance(given, dict)
        else given
    )


class _Part(BaseModel):
    """Members that are null ask for nothing. Triton and KServe ignore unknown members, and KServe's client sends some."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    parameters: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _given(cls, given: Any) -> Any:
        return _without_nulls(given)

    @field_validator("parameters", mode="before")
    @classmethod
    def _supported(cls, given: Any) -> Any:
        parameters = _without_nulls(given)
        for name in _UNSUPPORTED if isinstance(parameters, dict) else ():
            # Accept 0 and false, which clients send for a call that belongs to no sequence.
            if parameters.pop(name, None):
                raise ValueError(f"{name} is not supported")
        return parameters


class AskedInput(_Part):
    """An input of a request, whose values the worker reads."""

    name: str
    datatype: str
    shape: list[int]
    data: Any = None


class AskedOutput(_Part):
    """An output that a request asks for."""

    name: str

    @property
    def binary(self) -> bool | None:
        """True if its values are wanted as bytes, and None if the request does not say."""
        return self.parameters.get("binary_data")

    @field_validator("parameters")
    @classmethod
    def _is_binary_or_not(cls, parameters: dict[str, Any]) -> dict[str, Any]:
        if type(parameters.get("binary_data", False)) is not bool:
            raise ValueError("binary_data is true or false")
        return parameters


class InferenceRequest(_Part):
    """The JSON of a request."""

    id: str = Field("", max_length=MOST_ID_CHARS)
    inputs: list[AskedInput] = Field(max_length=MOST_TENSORS)
    outputs: list[AskedOutput] = Field(default_factory=list, max_length=MOST_TENSORS)


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A request as the function gets it."""

    body: bytes
    """The tensors, as `handlers/tensors.py` reads them."""
    content_type: str
    accept: str
    id: str = ""
    headers: Mapping[str, str] | None = None
    """The headers with the request's parameters `timeout` and `priority`; None if it has neither."""
    extra: Mapping[str, Any] | None = None
    rows: int = 0
    """The length of the longest first axis among the inputs."""
    empty_final: bool = False
    """True if the client wants an empty response after the last response of a model that may send several."""

    @classmethod
    def read(cls, headers: Headers, body: bytes, model: TensorModel) -> Self:
        """Return the request in an HTTP body. Raise BadInput with the field's name if a field is invalid."""
        header_bytes = json_bytes(headers, len(body))
        if not header_bytes and body:
            header = _header_of_raw(body, model)
            header_bytes, body = len(header), header + body
        found = load_json(body[:header_bytes])
        asked = cls.of(found, body, header_bytes)
        return asked.of_inputs(found["inputs"], header_bytes) if model.has_cache else asked

    @classmethod
    def of(cls, found: Any, body: bytes, header_bytes: int, *, binary: bool = False) -> Self:
        """Return the request whose JSON `found` is the beginning of `body`. With `binary`, all outputs are bytes."""
        asked = validate(InferenceRequest, found, REMEDY)
        parameters = asked.parameters
        by_default = binary or _flag(parameters, "binary_data_output")
        wanted: dict[bool, list[str]] = {True: [], False: []}
        for output in asked.outputs:
            as_bytes = by_default if output.binary is None else output.binary
            wanted[as_bytes or binary].append(quote(output.name, safe=""))
        if not asked.outputs:
            wanted[by_default].append("*")
        own = {name: value for name, value in parameters.items() if name not in _OWN}
        return cls(
            body, f"{TENSORS_TYPE};header={header_bytes}",
            f"{TENSORS_TYPE};binary={','.join(wanted[True])};json={','.join(wanted[False])}",
            asked.id, _headers(parameters), {"parameters": own} if own else None,
            max((one.shape[0] for one in asked.inputs if one.shape), default=0), _flag(parameters, _EMPTY_FINAL),
        )  # fmt: skip

    def of_inputs(self, inputs: list[Any], header_bytes: int) -> Self:
        """Return the request with nothing but these inputs in the JSON of its body, so that requests that differ only in
        their ids have the same body for the response cache. A body that is too large for the cache stays as it is.
        """
        if len(self.body) > MAX_INPUT_BYTES:
            return self
        header = dumps({"inputs": inputs})
        return replace(
            self, body=header + self.body[header_bytes:], content_type=f"{TENSORS_TYPE};header={len(header)}"
        )

    def with_headers(self, headers: Headers) -> Headers:
        """Return `headers`. The timeout and the priority in the request's parameters replace those in `headers`."""
        if self.headers is None:
            return headers
        merged = CIMultiDict(headers)
        merged.update(self.headers)
        return merged


def json_bytes(headers: Headers, size: int) -> int:
    """Return how many bytes of a body of this size are JSON. Raise BadInput if the header with this number is invalid."""
    length = headers.get(HEADER_LENGTH)
    if length is None:
        return size
    if not (length.isascii() and length.isdecimal() and len(length) <= _DIGITS) or int(length) > size:
        raise BadInput(f"{HEADER_LENGTH} is {length[:20]!r}; the body has {size} bytes.")
    return int(length)


def _header_of_raw(body: bytes, model: TensorModel) -> bytes:
    """Return the JSON for a body that has none, because the body is the data of the model's only input. Raise
    BadInput if the model has several inputs, or if the shape of the input is not clear.
    """
    if len(model.inputs) != 1:
        raise BadInput(f"A body without JSON needs a model with one input; it has {len(model.inputs)}.")
    (name, tensor), fixed = next(iter(model.inputs.items())), 1
    if tensor.datatype == "BYTES":
        # The whole body is one value.
        raise BadInput(f"The input {name!r} is BYTES.", remedy="Send JSON before its data.")
    for length in tensor.shape:
        fixed *= abs(length)
    size = 2 if tensor.datatype == "BF16" else _item_bytes(tensor.datatype)
    if tensor.shape.count(-1) > 1 or not fixed or len(body) % (fixed * size):
        raise BadInput(
            f"{len(body)} bytes do not tell the shape of the input {name!r}.", remedy="Send JSON first."
        )
    shape = [len(body) // (fixed * size) if length < 0 else length for length in tensor.shape]
    one = {
        "name": name,
        "datatype": tensor.datatype,
        "shape": shape,
        "parameters": {"binary_data_size": len(body)},
    }
    return orjson.dumps({"inputs": [one], "parameters": {"binary_data_output": True}})


def _item_bytes(datatype: str) -> int:
    return int(DATATYPES[datatype].lstrip("<?uif") or 1)


def _headers(parameters: Mapping[str, Any]) -> dict[str, str] | None:
    """Return headers with a request's parameters `timeout`, in microseconds, and `priority`. Raise BadInput if one of them
    is not a whole number.
    """
    found = {}
    for name in ("timeout", "priority"):
        value = parameters.get(name, 0)
        if type(value) is not int or value < 0:
            raise BadInput(
                f"The parameter {name} is {value!r:.40}.", remedy="It is a whole number, 0 for none."
            )
    if timeout_us := parameters.get("timeout"):
        found[TIMEOUT] = f"{timeout_us / 1e6:.6f}"
    if priority := parameters.get("priority"):
        found[PRIORITY] = str(min(priority, _LOWEST))
    return {str(name): text for name, text in found.items()} or None


def _flag(parameters: Mapping[str, Any], name: str) -> bool:
    value = parameters.get(name, False)
    if type(value) is not bool:
        raise BadInput(f"The parameter {name} is {value!r:.40}.", remedy="It is true or false.")
    return value
