"""Recognises numpy arrays and torch tensors, and converts them to and from the bytes of files.

This module imports neither library: if the handler has made an array, its library is already loaded.
"""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Mapping
from tokenize import TokenError
from typing import Any, Never

from ..errors import BadInput, OutputInvalid

NPY_TYPE = "application/x-npy"
SAFETENSORS_TYPE = "application/vnd.safetensors"
TENSORS_TYPE = "application/vnd.oip"
"""The media type of tensors as bytes (`tensors.py`). Its parameter `header` is the number of bytes of the JSON header before them.

In an Accept header, the parameter `binary` names the outputs to send as bytes, and `json` the outputs to send in the JSON
header. The names are percent-encoded and separated by commas; * means all outputs. The parameter `fields` is a
percent-encoded JSON object, whose fields come before the outputs.
"""
# numpy's reader evaluates a header as a Python literal and builds a dtype from it, which can raise these exceptions.
_MALFORMED = (ValueError, TypeError, SyntaxError, TokenError, KeyError, AttributeError, IndexError,
              MemoryError, RecursionError, OverflowError)  # fmt: skip


def is_tensor(value: Any) -> bool:
    """Return True for torch tensors."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_array(value: Any) -> bool:
    """Return True for numpy arrays and torch tensors, but not for numpy's scalars (numpy.float32(1))."""
    numpy = sys.modules.get("numpy")
    return (numpy is not None and isinstance(value, numpy.ndarray)) or is_tensor(value)


def is_array_dict(value: Any) -> bool:
    """Return True for a non-empty dict that maps strings to arrays, which a safetensors file can hold."""
    if not isinstance(value, Mapping) or not value:
        return False
    return all(isinstance(name, str) and is_array(item) for name, item in value.items())


def to_numpy(value: Any) -> Any:
    """Return a tensor as a numpy array, and any other value unchanged. Raise OutputInvalid if that fails.

    Floating-point types that numpy lacks, such as bfloat16, become float32.
    """
    if not is_tensor(value):
        return value
    torch = sys.modules["torch"]
    try:
        tensor = _on_cpu(value)
        if tensor.is_floating_point() and tensor.dtype not in (torch.float16, torch.float32, torch.float64):
            tensor = tensor.float()
        return tensor.numpy()
    except (RuntimeError, TypeError) as error:
        _refuse(value, error)


def to_npy(value: Any) -> bytes:
    """Return an array or tensor as a .npy file. Raise OutputInvalid if numpy could only pickle it."""
    array = to_numpy(value)
    buffer = io.BytesIO()
    try:
        sys.modules["numpy"].lib.format.write_array(buffer, array, allow_pickle=False)
    except ValueError as error:
        _refuse(array, error)
    return buffer.getvalue()


def to_safetensors(named: Mapping[str, Any]) -> bytes | None:
    """Return named arrays as a safetensors file, or None if the safetensors package is not installed."""
    try:
        from safetensors import SafetensorError  # noqa: PLC0415
    except ImportError:
        return None
    try:
        if any(is_tensor(item) for item in named.values()):
            from safetensors.torch import save  # noqa: PLC0415  loads torch, which is loaded by now

            return save({name: _contiguous(item) for name, item in named.items()})
        from safetensors.numpy import save as save_numpy  # noqa: PLC0415

        numpy = sys.modules["numpy"]
        return save_numpy({name: numpy.array(item, order="C") for name, item in named.items()})
    except (RuntimeError, ValueError, TypeError, KeyError, SafetensorError) as error:
        _refuse(named, error)


def from_npy(body: bytes) -> Any:
    """Return the array in `body`, a .npy file, or `body` itself if numpy is not loaded.

    Raise BadInput if the header is malformed, or does not match the number of bytes that follow it.
    """
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return body
    try:
        file = io.BytesIO(body)
        shape, fortran, dtype = _header(numpy.lib.format, file)
        if dtype.hasobject:
            raise ValueError("it holds Python objects")
        if any(length < 0 for length in shape):
            raise ValueError("a negative length")
        count, start = math.prod(shape), file.tell()
        if count * dtype.itemsize != len(body) - start:
            raise ValueError(f"its header claims {count * dtype.itemsize} bytes, {len(body) - start} arrived")
        flat = numpy.frombuffer(body, dtype, count, start) if count else numpy.empty(0, dtype)
        return flat.reshape(shape, order="F" if fortran else "C").copy(order="K")
    except _MALFORMED as error:
        fault = f"The body is not {NPY_TYPE}, as its content type says: {str(error)[:200]}."
        remedy = "Send what numpy.save(file, array, allow_pickle=False) writes."
        raise BadInput(fault, remedy=remedy) from None


def _header(form: Any, file: io.BytesIO) -> tuple[tuple[int, ...], bool, Any]:
    readers = {(1, 0): form.read_array_header_1_0, (2, 0): form.read_array_header_2_0}
    version = form.read_magic(file)
    if (reader := readers.get(version)) is None:
        raise ValueError(f"version {version[0]}.{version[1]} of the format is not known")
    return reader(file)  # type: ignore[no-any-return]


def _on_cpu(value: Any) -> Any:
    """Return a tensor in the host's memory: dense, without gradients or pending conjugation and negation."""
    tensor = value.detach()
    tensor = tensor.to_dense() if tensor.layout is not sys.modules["torch"].strided else tensor
    return tensor.cpu().resolve_conj().resolve_neg()


def _contiguous(value: Any) -> Any:
    """Return a contiguous copy of an array as a tensor, because safetensors refuses strided and shared memory."""
    torch = sys.modules["torch"]
    if is_tensor(value):
        return _on_cpu(value).clone(memory_format=torch.contiguous_format)
    return torch.from_numpy(sys.modules["numpy"].array(value, order="C"))


def _refuse(value: Any, error: Exception) -> Never:
    kind = getattr(value, "dtype", type(value).__name__)
    fault = f"The answer ({kind}) cannot be sent as an array: {str(error)[:200]}."
    raise OutputInvalid(fault, remedy="Return arrays of numbers, on a device that can be read.") from None
