"""Arrays: numpy's and torch's, as bytes for who takes those, and as what JSON can say for everybody else.

Neither library is loaded here: who has made an array has loaded its library.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping
from tokenize import TokenError
from typing import Any, Never

from ..errors import BadInput, OutputInvalid

NPY_TYPE = "application/x-npy"
SAFETENSORS_TYPE = "application/vnd.safetensors"
# What a hostile header makes numpy's own reader raise: it evaluates a literal and builds a dtype from it.
_MALFORMED = (ValueError, TypeError, SyntaxError, TokenError, KeyError, AttributeError, IndexError, MemoryError, RecursionError, OverflowError)  # fmt: skip


def is_tensor(value: Any) -> bool:
    """Whether it is torch's."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_array(value: Any) -> bool:
    """Whether it is numpy's or torch's; their scalars are numbers."""
    numpy = sys.modules.get("numpy")
    return (numpy is not None and isinstance(value, numpy.ndarray)) or is_tensor(value)


def is_array_dict(value: Any) -> bool:
    """Whether it is a dict of nothing but named arrays, as a safetensors file is."""
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(isinstance(name, str) and is_array(item) for name, item in value.items())
    )


def to_numpy(value: Any) -> Any:
    """The same numbers as numpy has them: bfloat16, which it has not, as float32. OutputInvalid if they cannot be had."""
    if not is_tensor(value):
        return value
    torch = sys.modules["torch"]
    tensor = _on_cpu(value)
    try:
        if tensor.is_floating_point() and tensor.dtype not in (torch.float16, torch.float32, torch.float64):
            tensor = tensor.float()
        return tensor.numpy()
    except (RuntimeError, TypeError, NotImplementedError) as error:
        _refuse(value, error)


def to_npy(value: Any) -> bytes:
    """One array as a .npy file. OutputInvalid if only pickle could say it."""
    array = to_numpy(value)
    buffer = io.BytesIO()
    try:
        sys.modules["numpy"].lib.format.write_array(buffer, array, allow_pickle=False)
    except ValueError as error:
        _refuse(array, error)
    return buffer.getvalue()


def to_safetensors(named: Mapping[str, Any]) -> bytes | None:
    """Named arrays as a safetensors file; None where the library for that is not installed."""
    try:
        if any(is_tensor(item) for item in named.values()):
            from safetensors.torch import save  # noqa: PLC0415  loads torch, which is there by now

            return save({name: _owned(item) for name, item in named.items()})
        from safetensors.numpy import save as save_numpy  # noqa: PLC0415  as above

        numpy = sys.modules["numpy"]
        return save_numpy({name: numpy.array(item, order="C") for name, item in named.items()})
    except ImportError:
        return None
    except (RuntimeError, ValueError, TypeError, KeyError) as error:
        _refuse(named, error)
    except Exception as error:
        if (
            type(error).__name__ != "SafetensorError"
        ):  # a class of the library's, which we do not load for its name
            raise
        _refuse(named, error)


def from_npy(body: bytes) -> Any:
    """The array of a .npy file; the bytes where nobody has loaded numpy. BadInput if it is not what its header claims."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return body
    try:
        file = io.BytesIO(body)
        shape, fortran, dtype = _header(numpy.lib.format, file)
        if dtype.hasobject:
            raise ValueError("it holds Python objects")
        count = 1
        for length in shape:
            if length < 0:
                raise ValueError("a negative length")
            count *= length
        start = file.tell()
        if count * dtype.itemsize != len(body) - start:
            raise ValueError(f"its header claims {count * dtype.itemsize} bytes, {len(body) - start} came")
        flat = numpy.frombuffer(body, dtype, count, start) if count else numpy.empty(0, dtype)
        return flat.reshape(shape, order="F" if fortran else "C").copy(order="K")
    except _MALFORMED as error:
        raise BadInput(
            f"The body says that it is {NPY_TYPE} but is not: {str(error)[:200]}.",
            remedy="Send what numpy.save(file, array, allow_pickle=False) writes.",
        ) from None


def _header(form: Any, file: io.BytesIO) -> tuple[tuple[int, ...], bool, Any]:
    readers = {(1, 0): form.read_array_header_1_0, (2, 0): form.read_array_header_2_0}
    version = form.read_magic(file)
    if (reader := readers.get(version)) is None:
        raise ValueError(f"version {version[0]}.{version[1]} of the format is not known")
    found: tuple[tuple[int, ...], bool, Any] = reader(file)
    return found


def _on_cpu(value: Any) -> Any:
    """A tensor as its numbers in this process: dense, not lazy, without its history."""
    try:
        tensor = value.detach()
        tensor = tensor.to_dense() if tensor.layout is not sys.modules["torch"].strided else tensor
        return tensor.cpu().resolve_conj().resolve_neg()
    except (RuntimeError, NotImplementedError) as error:
        _refuse(value, error)


def _owned(value: Any) -> Any:
    """A tensor with bytes of its own in order: safetensors takes neither strides nor shared memory."""
    torch = sys.modules["torch"]
    if is_tensor(value):
        tensor = _on_cpu(value)
        return tensor.clone(memory_format=torch.contiguous_format)
    return torch.from_numpy(sys.modules["numpy"].array(value, order="C"))


def _refuse(value: Any, error: Exception) -> Never:
    kind = getattr(value, "dtype", type(value).__name__)
    raise OutputInvalid(
        f"The answer ({kind}) cannot be sent as an array: {str(error)[:200]}.",
        remedy="Return arrays of numbers, on a device that can be read.",
    ) from None
