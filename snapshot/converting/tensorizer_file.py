"""Reads and writes CoreWeave's tensorizer files (`.tensors`), without changing a bit of the tensors."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy
import torch

from ...errors import SnapshotError
from ..extras import needs
from ..format.dtypes import DTYPES
from ..publish import cannot_write, publish
from ..sources.source import ByteCounter, ReportProgress
from .origin import DTYPE_NAMES, TensorOrigin, TensorSpec, check_names, first_line, grouped, open_weights

SUFFIX = ".tensors"

# The most bytes of a batch, unless the batch is one larger tensor. Each batch gets a new reader, because the library's
# reader keeps in memory every tensor that it has read, until the reader is closed.
BATCH_BYTES = 256 << 20


class TensorizerOrigin:
    """The tensors of one `.tensors` file. When a tensor is read, the library checks its hash."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._keys: dict[str, Any] = {}
        self.aliases: dict[str, str] = {}
        self.specs: list[TensorSpec] = []
        with _reading(path) as (reader, size_bytes):
            # Use a private attribute, because no public method returns the types without reading the tensors.
            for key, entry in reader._metadata.items():  # noqa: SLF001
                self._add(key, entry, size_bytes)
        check_names(str(path), [spec.name for spec in self.specs])

    def tensors(self, names: Sequence[str]) -> Iterator[torch.Tensor]:
        specs = {spec.name: spec for spec in self.specs}
        for batch in grouped((specs[name] for name in names), BATCH_BYTES):
            keys = [self._keys[spec.name] for spec in batch]
            with _reading(self._path, filter_func=set(keys).__contains__) as (reader, _):
                found = {key: value for *_, key, value in reader.read_tensors()}
            for key in keys:
                yield found.pop(key).detach()

    def _add(self, key: Any, entry: Any, size_bytes: int) -> None:
        path = tuple(key)
        # If a single layer was saved, the names of its parameters start with a dot: ".weight".
        name = ".".join(str(step) for step in path).removeprefix(".")
        shape, dtype = tuple(int(length) for length in entry.shape), _dtype(self._path, name, entry.dtype)
        spec = TensorSpec(name, dtype, DTYPES[dtype].stored_shape(shape) or shape)
        inside = 0 <= entry.data_offset <= size_bytes - entry.data_length
        if spec.size_bytes != entry.data_length or not inside or min(shape, default=0) < 0:
            fault = f"{self._path}, tensor {name[:80]!r}: its shape and type do not fit its place."
            raise SnapshotError(fault, remedy="Fetch the file again.")
        self._keys[name] = path[0] if len(path) == 1 else path
        self.specs.append(spec)


def export(origin: TensorOrigin, path: Path, progress: ReportProgress | None = None) -> int:
    """Write an origin's tensors to file `path`, and a copy for each alias. Return the total bytes of the tensors."""
    library = _library()
    sizes = {spec.name: spec.size_bytes for spec in origin.specs}
    for spec in origin.specs:
        if not spec.size_bytes and spec.dtype.startswith(("BF16", "F8_", "F4")):
            fault = f"Tensor {spec.name!r} is empty and {spec.dtype}, which tensorizer cannot read."
            raise SnapshotError(fault, remedy="Leave the tensor out.")
    names = list(chain(sizes, origin.aliases))
    stored = [origin.aliases.get(name, name) for name in names]
    total_bytes = sum(sizes[name] for name in stored)
    written = ByteCounter(total_bytes, progress)
    kind = library.serialization.TensorType.STATE_DICT
    try:
        with publish(path) as stream, closing(library.TensorSerializer(stream.name)) as writer:
            tensors = origin.tensors(stored)
            for name, target in zip(names, stored, strict=True):
                writer.write_tensor(0, name, kind, next(tensors))
                written.add(sizes[target])
    except OSError as error:
        raise cannot_write(path, error) from error
    return total_bytes


def _library() -> Any:
    with needs("A file of tensorizer", "tensorizer"):
        import tensorizer  # noqa: PLC0415
        import tensorizer.serialization  # noqa: PLC0415
    return tensorizer


@contextmanager
def _reading(path: Path, **options: Any) -> Iterator[tuple[Any, int]]:
    """Yield the library's reader of file `path`, and its size. Raise SnapshotError if reading fails."""
    # Use one reader. With more, the library would open the path again, where another file may be by then.
    options |= {"device": "cpu", "lazy_load": True, "num_readers": 1, "verify_hash": True}
    library = _library()
    with open_weights(path) as stream:
        try:
            with closing(library.TensorDeserializer(stream, **options)) as reader:
                yield reader, os.fstat(stream.fileno()).st_size
        except SnapshotError:
            raise
        except Exception as error:
            fault = f"{path} is not a valid tensorizer file: {first_line(error)}."
            raise SnapshotError(fault, remedy="Fetch it again.") from error


def _dtype(path: Path, tensor: str, text: str) -> str:
    """Return the safetensors name of a tensor's type.

    `text` is the name of a numpy dtype. For a type that numpy lacks, a NUL character and torch's name of it follow.
    """
    plain, _, opaque = text.partition("\0")
    try:
        if opaque:
            return DTYPE_NAMES[getattr(torch, opaque.removeprefix("torch."))]
        return DTYPE_NAMES[torch.from_numpy(numpy.empty(0, numpy.dtype(plain))).dtype]
    except (AttributeError, KeyError, TypeError) as error:
        fault = f"{path}, tensor {tensor[:80]!r}: safetensors does not hold {(opaque or plain)[:80]!r}."
        raise SnapshotError(fault, remedy="Convert it to another type first.") from error
