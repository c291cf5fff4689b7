"""Defines TensorOrigin, the interface to read tensors of any format, and implements it for safetensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

import torch

from ...errors import HeaderError, SnapshotError
from ..format.dtypes import DTYPES
from ..format.header import MAX_TENSORS, HeaderRoom, aliases_of, name_is_sound, read_header, repeated
from ..format.layout import Layout
from ..sources.source import Source

TORCH_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, dtype.torch_name)
    for name, dtype in DTYPES.items()
    if dtype.torch_name is not None and hasattr(torch, dtype.torch_name)
}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, type and shape of a tensor in a file. `dtype` is the safetensors name of its type, such as BF16."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        size_bytes = DTYPES[self.dtype].size_bytes(self.shape)
        if size_bytes is None:
            raise SnapshotError(
                f"Tensor {self.name!r}: {self.dtype} of shape {self.shape} does not fill whole bytes."
            )
        return size_bytes

    @property
    def torch_shape(self) -> tuple[int, ...] | None:
        """The shape of the tensor in torch. None if torch has no tensor of this type and shape."""
        return DTYPES[self.dtype].torch_shape(self.shape)

    @staticmethod
    def of(name: str, tensor: torch.Tensor) -> TensorSpec:
        """Return the spec of a tensor, whose type is one of DTYPE_NAMES. Raise SnapshotError for a scalar of F4."""
        dtype = DTYPE_NAMES[tensor.dtype]
        shape = DTYPES[dtype].stored_shape(tuple(tensor.shape))
        if shape is None:
            fault = f"Tensor {name!r} is a scalar of {tensor.dtype}, which safetensors does not hold."
            raise SnapshotError(fault, remedy="Save it with one dimension.")
        return TensorSpec(name, dtype, shape)


class TensorOrigin(Protocol):
    @property
    def specs(self) -> Sequence[TensorSpec]: ...

    @property
    def aliases(self) -> Mapping[str, str]:
        """Further names of tensors (tied weights). Maps each alias to the name of a spec."""

    def tensors(self, names: Sequence[str]) -> Iterator[torch.Tensor]:
        """Yield the tensors of these names in this order, contiguous and on the CPU.

        The caller must not use a tensor after it has requested the next one.
        """


class SafetensorsOrigin:
    """The tensors in the safetensors files of a layout. Each tensor is read when it is requested."""

    def __init__(self, source: Source, layout: Layout) -> None:
        self._source = source
        room = HeaderRoom()
        headers = {name: read_header(source, name, room) for name in layout.shards}
        places = [(file, tensor) for file, header in headers.items() for tensor in header.tensors]
        self._places = {tensor.name: (file, tensor) for file, tensor in places}
        self.specs = [TensorSpec(tensor.name, tensor.dtype, tensor.shape) for _, tensor in places]
        check_names(source.url, [spec.name for spec in self.specs])
        self.aliases = aliases_of(headers.values(), self._places.keys())

    def tensors(self, names: Sequence[str]) -> Iterator[torch.Tensor]:
        return (self._read(name) for name in names)

    def _read(self, name: str) -> torch.Tensor:
        file, tensor = self._places[name]
        dtype = TORCH_DTYPES.get(tensor.dtype)
        if dtype is None:
            fault = (
                f"{file}, tensor {name!r}: this torch ({torch.__version__}) has no type for {tensor.dtype}."
            )
            raise SnapshotError(fault, remedy="Leave the tensor out, or save it as another type.")
        shape = DTYPES[tensor.dtype].torch_shape(tensor.shape)
        if shape is None:
            fault = f"{file}, tensor {name!r}: torch has no {tensor.dtype} of shape {list(tensor.shape)}."
            raise SnapshotError(fault, remedy="Save it with rows of whole bytes.")
        values = torch.empty(shape, dtype=dtype)
        if self._source.read_into(file, tensor.offset_bytes, raw(values)) != tensor.size_bytes:
            raise HeaderError(f"{file} shrank while it was read.", remedy="Wait until it is written.")
        return values


def grouped(specs: Iterable[TensorSpec], most_bytes: int) -> list[list[TensorSpec]]:
    """Divide the tensors into groups, in order. A group has at most `most_bytes`, or one larger tensor."""
    groups: list[list[TensorSpec]] = []
    free_bytes = 0
    for spec in specs:
        if not groups or spec.size_bytes > free_bytes:
            groups.append([])
            free_bytes = most_bytes
        groups[-1].append(spec)
        free_bytes -= spec.size_bytes
    return groups


def raw(tensor: torch.Tensor) -> memoryview:
    """Return a view of the bytes of a contiguous tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def check_names(where: str, names: Sequence[str]) -> None:
    """Raise SnapshotError unless one snapshot can hold tensors of these names. `where` is their path or URL, for the message."""
    if not names:
        raise SnapshotError(f"{where} holds no tensors.", remedy="Check the path.")
    if len(names) > MAX_TENSORS:
        raise SnapshotError(f"{where} holds {len(names)} tensors, over the limit of {MAX_TENSORS}.")
    if (twice := repeated(names)) is not None:
        raise SnapshotError(f"{where} holds tensor {twice[:80]!r} twice.", remedy="Save it again.")
    for name in names:
        if not name_is_sound(name) or name == "__metadata__":
            raise SnapshotError(f"{where} holds a tensor with a name that no file may hold: {name[:80]!r}.")


def open_weights(path: Path) -> IO[bytes]:
    try:
        return path.open("rb")
    except OSError as error:
        raise SnapshotError(f"{path} cannot be read: {error.strerror}.", remedy="Check the path.") from error


def first_line(error: Exception) -> str:
    """Return the first line of a library's error, without its final period."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200].rstrip(".")
