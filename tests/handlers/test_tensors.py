"""Tensors in annotations: from JSON and from bytes, and back."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from pilotflame import Tensor
from pilotflame.errors import BadInput, HandlerSignatureError, InputInvalid, OutputInvalid
from pilotflame.handlers.arrays import TENSORS_TYPE
from pilotflame.handlers.codec import InputCodec, OutputCodec
from pilotflame.handlers.tensors import DATATYPES, declared
from pydantic import create_model

SHAPES = arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
TORCH = ("BOOL", "UINT8", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64")


def codecs(kind: type, datatype: str, dims: int) -> tuple[InputCodec, OutputCodec]:
    """Return the codecs of a function whose event and answer have a tensor `x`."""
    annotation: Any = Annotated[kind, Tensor(datatype, [-1] * dims)]
    model = create_model("Event", x=(annotation, ...))
    return InputCodec(model), OutputCodec(model)


def values(datatype: str, *, finite: bool) -> st.SearchStrategy[Any]:
    """Return arrays of a datatype: bytes, or numbers of numpy's type for it."""
    if datatype == "BYTES":
        texts = st.text().map(str.encode) if finite else st.binary(max_size=5)
        return SHAPES.flatmap(lambda shape: arrays.arrays(object, shape, elements=texts, fill=st.nothing()))
    if datatype == "BF16":
        bits = SHAPES.flatmap(lambda shape: arrays.arrays("<u2", shape))
        found = bits.map(lambda array: (array.astype("<u4") << 16).view("<f4"))
        return found.filter(lambda array: bool(np.isfinite(array).all())) if finite else found
    wanted = np.dtype(DATATYPES[datatype])
    numbers = (
        {"elements": {"allow_nan": False, "allow_infinity": False}} if finite and wanted.kind == "f" else {}
    )
    return SHAPES.flatmap(lambda shape: arrays.arrays(wanted, shape, **numbers))


def same(left: Any, right: Any) -> bool:
    """Return True if two arrays have the same type, shape and bits. All NaN of one type are the same."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return bool(np.array_equal(left, right, equal_nan=left.dtype.kind == "f"))


@pytest.mark.parametrize("datatype", DATATYPES)
@given(data=st.data())
def test_bytes_keep_every_value(datatype: str, data: st.DataObject) -> None:
    array = data.draw(values(datatype, finite=False))
    decoding, encoding = codecs(np.ndarray, datatype, array.ndim)
    payload, content_type = encoding.encode({"x": array}, f"{TENSORS_TYPE};binary=*")
    assert same(decoding.decode(as_request(payload), shorter(content_type)).x, array)


@pytest.mark.parametrize("datatype", DATATYPES)
@given(data=st.data())
def test_json_keeps_every_finite_value(datatype: str, data: st.DataObject) -> None:
    array = data.draw(values(datatype, finite=True))
    decoding, encoding = codecs(np.ndarray, datatype, array.ndim)
    payload, content_type = encoding.encode({"x": array}, f"{TENSORS_TYPE};json=x")
    assert same(decoding.decode(as_request(payload), shorter(content_type)).x, array)
    if 0 not in array.shape[:-1]:
        # Nested lists cannot express an empty axis before other axes.
        body, _ = encoding.encode({"x": array})
        assert same(decoding.decode(body).x, array)


@pytest.mark.parametrize("datatype", [*TORCH, "BF16"])
@given(data=st.data())
def test_tensors_of_torch_keep_every_value(datatype: str, data: st.DataObject) -> None:
    tensor = torch.from_numpy(np.array(data.draw(values(datatype, finite=False))))
    tensor = tensor.bfloat16() if datatype == "BF16" else tensor
    decoding, encoding = codecs(torch.Tensor, datatype, tensor.dim())
    payload, content_type = encoding.encode({"x": tensor}, f"{TENSORS_TYPE};binary=*")
    found = decoding.decode(as_request(payload), shorter(content_type)).x
    assert found.dtype == tensor.dtype
    assert same(found.float().numpy(), tensor.float().numpy())


def as_request(payload: bytes) -> bytes:
    return payload.replace(b'{"outputs":', b'{"inputs":', 1)


def shorter(content_type: str) -> str:
    """Return the content type of `as_request`, whose header is one byte shorter."""
    kind, _, length = content_type.partition("=")
    return f"{kind}={int(length) - 1}"


@given(data=st.data())
def test_a_float_becomes_the_nearest_bfloat16(data: st.DataObject) -> None:
    array = data.draw(arrays.arrays("<f4", arrays.array_shapes(max_dims=1)))
    decoding, encoding = codecs(np.ndarray, "BF16", 1)
    payload, content_type = encoding.encode({"x": array}, f"{TENSORS_TYPE};binary=*")
    found = decoding.decode(as_request(payload), shorter(content_type)).x
    assert same(found, torch.from_numpy(array.copy()).bfloat16().float().numpy())


@pytest.mark.parametrize(
    ("datatype", "value", "fault"),
    [
        ("INT32", [1.5], "its values are float64, not INT32"),
        ("INT8", [128], "values that INT8 cannot hold"),
        ("UINT64", [-1], "values that UINT64 cannot hold"),
        ("INT32", ["1"], "not INT32"),
        ("FP16", [1e6], "values that FP16 cannot hold"),
        ("FP16", [70000], "values that FP16 cannot hold"),
        ("FP32", [[1.0]], "its shape is [1, 1], not [-1]"),
        ("FP32", [[1.0], [1.0, 2.0]], "it is no array"),
        ("BYTES", [1], "a value of type int"),
        ("BOOL", [2], "not BOOL"),
    ],
)
def test_values_that_do_not_fit_are_refused(datatype: str, value: Any, fault: str) -> None:
    decoding, _ = codecs(np.ndarray, datatype, 1)
    with pytest.raises(InputInvalid) as found:
        decoding.decode(str(value).replace("'", '"').encode().join([b'{"x": ', b"}"]))
    assert "input.x: " in found.value.message
    assert fault in found.value.message


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (b"[]", "no list `inputs`"),
        (b'{"inputs": 1}', "no list `inputs`"),
        (b'{"inputs": [1]}', "inputs[0] has no `name`"),
        (b'{"inputs": [{"name": "x", "datatype": ["FP32"]}]}', "The datatype of the input 'x'"),
        (b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [-1]}]}', "The shape of the input 'x'"),
        (b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [true]}]}', "The shape of the input 'x'"),
        (b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1]}]}', "no list `data`"),
        (b"{", "no JSON"),
    ],
)
def test_malformed_headers_are_refused(body: bytes, fault: str) -> None:
    decoding, _ = codecs(np.ndarray, "FP32", 1)
    with pytest.raises(BadInput) as found:
        decoding.decode(body, f"{TENSORS_TYPE};header={len(body)}")
    assert fault in found.value.message


@pytest.mark.parametrize("size", [-1, 3, 5, 8, True, "4"])
def test_wrong_sizes_of_binary_data_are_refused(size: Any) -> None:
    decoding, _ = codecs(np.ndarray, "FP32", 1)
    shown = str(size).lower() if isinstance(size, bool) else repr(size).replace("'", '"')
    header = f'{{"inputs": [{{"name": "x", "datatype": "FP32", "shape": [1], "parameters": {{"binary_data_size": {shown}}}}}]}}'.encode()
    with pytest.raises((BadInput, InputInvalid)):
        decoding.decode(header + b"1234", f"{TENSORS_TYPE};header={len(header)}")


@given(body=st.binary(max_size=60), header=st.integers(-1, 70))
def test_any_bytes_are_tensors_or_refused(body: bytes, header: int) -> None:
    decoding, _ = codecs(np.ndarray, "BYTES", 1)
    with pytest.raises((BadInput, InputInvalid)):
        decoding.decode(body, f"{TENSORS_TYPE};header={header}")


@given(data=st.binary(max_size=30), count=st.integers(0, 4))
def test_any_bytes_are_values_of_bytes_or_refused(data: bytes, count: int) -> None:
    decoding, encoding = codecs(np.ndarray, "BYTES", 1)
    header = (
        b'{"inputs":[{"name":"x","datatype":"BYTES","shape":[%d],"parameters":{"binary_data_size":%d}}]}'
        % (
            count,
            len(data),
        )
    )
    try:
        found = decoding.decode(header + data, f"{TENSORS_TYPE};header={len(header)}").x
    except InputInvalid:
        return
    payload, _ = encoding.encode({"x": found}, f"{TENSORS_TYPE};binary=*")
    assert payload.endswith(data)
    assert len(found) == count


@pytest.mark.parametrize("count", [300_000_000, 10**10, 2**62])
def test_a_shape_without_its_bytes_takes_no_memory(count: int) -> None:
    decoding, _ = codecs(np.ndarray, "BYTES", 1)
    header = (
        b'{"inputs":[{"name":"x","datatype":"BYTES","shape":[%d],"parameters":{"binary_data_size":0}}]}'
        % count
    )
    with pytest.raises(InputInvalid, match="too few for"):
        decoding.decode(header, f"{TENSORS_TYPE};header={len(header)}")


@pytest.mark.parametrize("depth", [33, 60, 70])
def test_too_many_axes_are_refused(depth: int) -> None:
    decoding, _ = codecs(np.ndarray, "BYTES", 1)
    with pytest.raises(InputInvalid):
        decoding.decode(b'{"x": %s"a"%s}' % (b"[" * depth, b"]" * depth))


def test_nan_has_no_json() -> None:
    _, encoding = codecs(np.ndarray, "FP32", 1)
    with pytest.raises(OutputInvalid, match="NaN or infinite"):
        encoding.encode({"x": np.array([np.nan], "f4")}, f"{TENSORS_TYPE};json=*")


def test_an_output_that_is_not_there_is_refused() -> None:
    _, encoding = codecs(np.ndarray, "FP32", 1)
    with pytest.raises(BadInput, match="no output 'y'"):
        encoding.encode({"x": [1.0]}, f"{TENSORS_TYPE};binary=y")


def test_a_received_array_may_be_written() -> None:
    decoding, encoding = codecs(np.ndarray, "INT32", 1)
    payload, content_type = encoding.encode({"x": [1, 2]}, f"{TENSORS_TYPE};binary=*")
    found = decoding.decode(as_request(payload), shorter(content_type)).x
    found[0] = 9
    assert found.tolist() == [9, 2]


def test_the_schema_has_the_tensors() -> None:
    decoding, _ = codecs(np.ndarray, "FP32", 2)
    assert declared(decoding.schema()) == {"x": Tensor("FP32", [-1, -1])}
    assert declared(InputCodec(create_model("Mixed", x=(int, ...))).schema()) == {}


@pytest.mark.parametrize(("datatype", "shape"), [("FLOAT", [1]), ("FP32", [-2]), ("FP32", ["a"])])
def test_a_wrong_annotation_is_refused(datatype: str, shape: list[Any]) -> None:
    with pytest.raises(HandlerSignatureError):
        Tensor(datatype, shape)


def test_torch_has_no_tensors_of_bytes() -> None:
    with pytest.raises(TypeError, match=r"annotate with numpy\.ndarray"):
        codecs(torch.Tensor, "BYTES", 1)
