"""Converts requests and responses of inference between gRPC's messages and the form that workers read."""

from __future__ import annotations

from array import array
from typing import Annotated, Any, NamedTuple

import orjson
from google.protobuf.message import Message
from pydantic import BaseModel, Field, NonNegativeInt

from ....errors import BadInput, OutputInvalid, PilotflameError
from ....handlers.tensors import MOST_AXES, with_lengths
from ...calls.serving.invocation import Output
from ...front.http.requests import load_output, validate
from .grpc_fields import read_message
from .grpc_messages import message, parameters_of
from .infer_request import MOST_TENSORS, InferRequest

REMEDY = "Let the function return the tensors that it declares."
_CONTENTS = {
    "INT8": ("int_contents", "b"), "INT16": ("int_contents", "h"), "INT32": ("int_contents", "i"),
    "INT64": ("int64_contents", "q"), "UINT8": ("uint_contents", "B"), "UINT16": ("uint_contents", "H"),
    "UINT32": ("uint_contents", "I"), "UINT64": ("uint64_contents", "Q"), "FP32": ("fp32_contents", "f"),
    "FP64": ("fp64_contents", "d"), "BOOL": ("bool_contents", "B"),
}  # fmt: skip
"""For each datatype, the field that holds its values, and the type code with which `array` turns them into bytes."""


class _OutputParameters(BaseModel, frozen=True, strict=True):
    binary_data_size: NonNegativeInt


class _Output(BaseModel, frozen=True, strict=True):
    name: str
    datatype: str
    shape: list[Annotated[int, Field(ge=0, lt=1 << 63)]] = Field(max_length=MOST_AXES)
    parameters: _OutputParameters


class _Outputs(BaseModel, frozen=True, strict=True):
    """The header of a worker's output."""

    outputs: list[_Output] = Field(max_length=MOST_TENSORS)


class SentRequest(NamedTuple):
    """The content of a ModelInferRequest."""

    model_name: str
    model_version: str
    id: str
    size: int
    """The number of bytes of the unpacked message."""
    asked: InferRequest | PilotflameError
    """The request, or the error of an invalid request. `GrpcMethods` raises the error once the model is known, so that the error
    is counted for the model.
    """


def read_request(data: bytes) -> SentRequest:
    """Return the content of a ModelInferRequest. Raise BadInput if the bytes are not such a message."""
    sent = read_message("ModelInferRequest", data)
    asked: InferRequest | PilotflameError
    try:
        asked = _infer_request(sent)
    except PilotflameError as error:
        asked = error.with_traceback(None)
    return SentRequest(sent.model_name, sent.model_version, sent.id, len(data), asked)


def _infer_request(sent: Any) -> InferRequest:
    """Return the request in a ModelInferRequest. Raise BadInput if an input or a parameter is invalid."""
    if len(sent.inputs) > MOST_TENSORS:
        raise BadInput(f"There are more than {MOST_TENSORS} inputs.")
    if len(sent.raw_input_contents) > len(sent.inputs):
        raise BadInput(f"There are {len(sent.inputs)} inputs, but more raw_input_contents.")
    raw = list(sent.raw_input_contents)
    if raw and len(raw) != len(sent.inputs):
        raise BadInput(f"There are {len(sent.inputs)} inputs, but {len(raw)} raw_input_contents.")
    inputs, data = [], []
    for number, tensor in enumerate(sent.inputs):
        if len(tensor.shape) > MOST_AXES:
            raise BadInput(f"The input {tensor.name[:80]!r} has more than {MOST_AXES} axes.")
        if raw and tensor.HasField("contents"):
            raise BadInput(f"The input {tensor.name[:80]!r} has contents beside raw_input_contents.")
        data.append(raw[number] if raw else _contents(tensor))
        parameters = parameters_of(tensor.parameters)
        inputs.append(
            {
                "name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape),
                "parameters": {**parameters, "binary_data_size": len(data[-1])},
            }
        )  # fmt: skip
    outputs = [
        {"name": output.name, "parameters": parameters_of(output.parameters)} for output in sent.outputs
    ]
    parameters = parameters_of(sent.parameters)
    found = {"id": sent.id, "inputs": inputs, "outputs": outputs, "parameters": parameters}
    # Send only the inputs, because the worker reads no other field of the JSON. So calls that differ only in
    # their ids have the same body for the response cache.
    header = orjson.dumps({"inputs": inputs})
    return InferRequest.of(found, b"".join([header, *data]), len(header), binary=True)


def _contents(tensor: Any) -> bytes:
    """Return the values in the contents of an input as bytes."""
    if tensor.datatype == "BYTES":
        return with_lengths(tensor.contents.bytes_contents)
    if tensor.datatype not in _CONTENTS:
        message = f"The input {tensor.name[:80]!r} is {tensor.datatype[:40]!r}, which has no contents."
        raise BadInput(message, remedy="Send it in raw_input_contents.")
    field, code = _CONTENTS[tensor.datatype]
    try:
        return array(code, getattr(tensor.contents, field)).tobytes()
    except OverflowError as error:
        raise BadInput(f"The input {tensor.name[:80]!r} is not {tensor.datatype}: {error}.") from None


def infer_response(payload: bytes, header: bytes, **fields: Any) -> Message:
    """Return the ModelInferResponse with a worker's outputs and other `fields`. Raise OutputInvalid if the header is
    invalid.

    `header` is the JSON at the beginning of `payload`.
    """
    data, raw, tensors = memoryview(payload)[len(header) :], [], []
    for one in validate(_Outputs, load_output(header), REMEDY, OutputInvalid).outputs:
        size = one.parameters.binary_data_size
        raw.append(bytes(data[:size]))
        data = data[size:]
        tensors.append({"name": one.name, "datatype": one.datatype, "shape": one.shape})
    return message("ModelInferResponse", outputs=tensors, raw_output_contents=raw, **fields)


def output_of(piece: bytes) -> Output:
    """Return a piece of a stream of tensors as an output: the piece begins with its content type and a line feed."""
    content_type, _, payload = piece.partition(b"\n")
    return Output(payload, content_type.decode("latin-1"))


def is_final(value: bool) -> list[dict[str, Any]]:
    """Return the parameters of a response in a stream, which say whether it is the last one to its request."""
    return [{"key": "triton_final_response", "value": {"bool_param": value}}]
