"""Arrays and tensors: bytes for callers that accept bytes, JSON for other callers, and never pickle."""

import contextlib
import io
import json
import math
import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.errors import BadInput, OutputInvalid
from pilotflame.handlers.arrays import NPY_TYPE, SAFETENSORS_TYPE
from pilotflame.handlers.codec import BYTES_TYPE, JSON_TYPE, InputCodec, OutputCodec

CODEC = OutputCodec(None)


def as_npy(answer: Any, accept: str = NPY_TYPE) -> Any:
    payload, kind = CODEC.encode(answer, accept)
    assert kind == accept
    return np.load(io.BytesIO(payload), allow_pickle=False)


def npy(array: Any, *, allow_pickle: bool = False) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=allow_pickle)
    return file.getvalue()


# -- out, as bytes


ARRAYS = [
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.asfortranarray(np.arange(6, dtype=np.int16).reshape(2, 3)),
    np.arange(6.0)[::2],
    np.array(3, dtype=np.uint8),
    np.zeros((0, 4), dtype=np.float16),
    np.array([1 + 2j]),
    np.array([True, False]),
    np.arange(3, dtype=">i4"),
    np.array(["a", "bc"]),
    np.array([math.nan, math.inf]),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}{array.shape}")
@pytest.mark.parametrize("accept", [NPY_TYPE, BYTES_TYPE])
def test_an_array_is_a_npy_file(array: Any, accept: str) -> None:
    found = as_npy(array, accept)
    assert found.dtype == array.dtype
    np.testing.assert_array_equal(found, array)


TENSORS = [
    torch.arange(6, dtype=torch.float32).reshape(2, 3).T,
    torch.tensor([True, False]),
    torch.tensor(2.5, dtype=torch.float64),
    torch.ones(2, requires_grad=True),
    torch.nn.Parameter(torch.ones(2)),
    torch.ones(2, 2).to_sparse(),
    torch.tensor([1 + 2j]).conj(),
]


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda tensor: f"{tensor.dtype}{tensor.layout}")
def test_a_tensor_is_a_npy_file_too(tensor: Any) -> None:
    np.testing.assert_array_equal(as_npy(tensor), tensor.detach().to_dense().resolve_conj().numpy())


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float8_e4m3fn])
def test_what_numpy_has_no_type_for_comes_as_float32(kind: Any) -> None:
    tensor = torch.tensor([0.5, -2.0]).to(kind)
    found = as_npy(tensor)
    assert (found.dtype, found.tolist()) == (np.float32, [0.5, -2.0])
    file = CODEC.encode({"t": tensor}, SAFETENSORS_TYPE)[0]
    assert safetensors.torch.load(file)["t"].dtype == kind  # safetensors supports this type


def test_a_dict_of_arrays_is_a_safetensors_file() -> None:
    answer = {
        "a": np.arange(6.0).reshape(2, 3).T,
        "b": np.array(1, dtype=np.int8),
        "c": np.arange(2, dtype=">f4"),
    }
    payload, kind = CODEC.encode(answer, SAFETENSORS_TYPE)
    assert kind == SAFETENSORS_TYPE
    found = safetensors.numpy.load(payload)
    assert {name: value.tolist() for name, value in found.items()} == {
        "a": [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]], "b": 1, "c": [0.0, 1.0],
    }  # fmt: skip


def test_tensors_arrays_and_shared_memory_go_into_one_file() -> None:
    base = torch.arange(6.0).reshape(2, 3)
    found = safetensors.torch.load(
        CODEC.encode({"t": base.T, "row": base[0], "n": np.ones(2, dtype=np.float16)}, SAFETENSORS_TYPE)[0]
    )
    assert torch.equal(found["t"], base.T)
    assert torch.equal(found["row"], base[0])
    assert found["n"].dtype == torch.float16


@pytest.mark.parametrize(
    ("answer", "accept"),
    [
        (np.ones(2), ""),
        (np.ones(2), "*/*"),
        (np.ones(2), "application/json, application/x-npy;q=0.9"),
        (np.ones(2), SAFETENSORS_TYPE),
        ([np.ones(2)], NPY_TYPE),
        ({"a": np.ones(2), "b": 1}, SAFETENSORS_TYPE),
        ({1: np.ones(2)}, NPY_TYPE + ", application/json;q=0.1"),
        ({}, SAFETENSORS_TYPE),
        (np.float32(1), NPY_TYPE),
    ],
)
def test_everything_else_is_json(answer: Any, accept: str) -> None:
    if isinstance(answer, dict) and 1 in answer:
        with pytest.raises(OutputInvalid, match="key 1"):
            CODEC.encode(answer, accept)
    else:
        assert CODEC.encode(answer, accept)[1] == JSON_TYPE


@pytest.mark.parametrize(
    ("answer", "accept"),
    [
        (np.array([object()]), NPY_TYPE),
        ({"a": np.array(["text"])}, SAFETENSORS_TYPE),
        ({"a": torch.ones(1), "b": np.array(["text"])}, SAFETENSORS_TYPE),
        (torch.empty(2, device="meta"), NPY_TYPE),
        ({"a": torch.empty(2, device="meta")}, SAFETENSORS_TYPE),
        (torch.empty(2, device="meta"), ""),
    ],
)
def test_what_is_no_array_of_numbers_is_refused(answer: Any, accept: str) -> None:
    with pytest.raises(OutputInvalid) as caught:
        CODEC.encode(answer, accept)
    assert caught.value.remedy


# -- out, as JSON


@pytest.mark.parametrize("codec", [OutputCodec(None), OutputCodec(dict[str, Any])], ids=["bare", "annotated"])
def test_tensors_are_lists_in_json(codec: OutputCodec) -> None:
    answer = {
        "f": torch.ones(2, 2, requires_grad=True),
        "h": [torch.tensor([0.5], dtype=torch.bfloat16)],
        "n": torch.tensor(7),
        "b": torch.tensor([True]),
        "s": torch.arange(6).reshape(2, 3)[:, 1],
    }
    expected = {"f": [[1.0, 1.0]] * 2, "h": [[0.5]], "n": 7, "b": [True], "s": [1, 4]}
    assert json.loads(codec.encode(answer)[0]) == expected


def test_nan_in_a_tensor_is_an_error_not_a_null() -> None:
    with pytest.raises(OutputInvalid, match=r"answer\.t\[1\] is NaN"):
        CODEC.encode({"t": torch.tensor([1.0, math.nan])})


def test_neither_library_is_loaded_without_need() -> None:
    text = (
        "import sys; from pilotflame.handlers.codec import InputCodec, OutputCodec;"
        "assert OutputCodec(None).encode({'a': [1]}, 'application/x-npy')[0] == b'{\"a\":[1]}';"
        f"assert InputCodec(None).decode(b'x', {NPY_TYPE!r}) == b'x';"
        "sys.exit(bool({'numpy', 'torch', 'safetensors'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", text], check=False, timeout=60).returncode == 0


# -- in


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}{array.shape}")
def test_a_npy_body_is_an_array(array: Any) -> None:
    found = InputCodec(None).decode(npy(array), NPY_TYPE)
    assert found.dtype == array.dtype
    np.testing.assert_array_equal(found, array)
    assert found.flags.writeable
    assert InputCodec(bytes).decode(npy(array), NPY_TYPE) == npy(array)


def header(text: str, data: bytes = b"") -> bytes:
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode() + data


HOSTILE = {
    "pickle": npy(np.array([object()]), allow_pickle=True),
    "empty": b"",
    "no-magic": b"not a file",
    "cut": npy(np.ones(100))[:-1],
    "longer": npy(np.ones(100)) + b"x",
    "claims-much": header("{'descr': '<f8', 'fortran_order': False, 'shape': (9999999999999,), }"),
    "overflows": header("{'descr': '<f8', 'fortran_order': False, 'shape': (4294967296, 4294967296), }"),
    "negative": header("{'descr': '<f8', 'fortran_order': False, 'shape': (-1,), }"),
    "many-dimensions": header(
        "{'descr': '<f8', 'fortran_order': False, 'shape': (" + "1," * 100 + "), }", b"x" * 8
    ),
    "no-dtype": header("{'descr': 'nonsense', 'fortran_order': False, 'shape': (1,), }"),
    "code": header("__import__('os').abort()"),
    "nested": header("[" * 5000),
    "long": b"\x93NUMPY\x02\x00" + (1 << 20).to_bytes(4, "little") + b" " * (1 << 20),
    "version": b"\x93NUMPY\x09\x00" + b"\0" * 100,
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_npy_body_is_refused(body: bytes) -> None:
    with pytest.raises(BadInput, match=NPY_TYPE) as caught:
        InputCodec(None).decode(body, NPY_TYPE)
    assert caught.value.remedy


@given(st.data())
def test_a_damaged_npy_body_is_taken_or_refused(data: st.DataObject) -> None:
    body = bytearray(npy(np.arange(4, dtype=np.float32)))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy warns about headers that look as if Python 2 had written them
        with contextlib.suppress(BadInput):
            InputCodec(None).decode(bytes(body), NPY_TYPE)
