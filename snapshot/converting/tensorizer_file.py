"""CoreWeave's tensorizer files (`.tensors`): an origin and an export, both bit for bit."""

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
from ..publish import cannot_write, publish
from ..sources.source import ByteCounter, Progress
from .origin import DTYPE_NAMES, TensorOrigin, TensorSpec, check_names

SUFFIX = ".tensors"

# The library keeps every tensor that it read until it is closed, so it is opened again for each batch.
BATCH_BYTES = 256 << 20


class TensorizerOrigin:
    """The tensors of one `.tensors` file. Their hashes are checked as they are read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._keys: dict[str, Any] = {}
        self.aliases: dict[str, str] = {}
        self.specs: list[TensorSpec] = []
        with _reading(path) as (reader, size_bytes):
            # No public method returns types without reading the tensors.
            for key, entry in reader._metadata.items():  # noqa: SLF001
                self._add(key, entry, size_bytes)
        check_names(str(path), [spec.name for spec in self.specs])
        self._sizes = {spec.name: spec.size_bytes for spec in self.specs}

    def tensors(self, names: Sequence[str]) -> Iterator[torch.Tensor]:
        for batch in self._batches(names):
            wanted = {self._keys[name] for name in batch}
            with _reading(self._path, filter_func=wanted.__contains__) as (reader, _):
                found = {key: value for *_, key, value in reader.read_tensors()}
            for name in batch:
                yield found.pop(self._keys[name]).detach()

    def _add(self, key: Any, entry: Any, size_bytes: int) -> None:
        path = tuple(key)
        # The parameters of a bare module have names like ".weight".
        name = ".".join(str(step) for step in path).removeprefix(".")
        shape = tuple(int(length) for length in entry.shape)
        spec = TensorSpec(name, _dtype(self._path, name, entry.dtype), shape)
        inside = 0 <= entry.data_offset <= size_bytes - entry.data_length
        if spec.size_bytes != entry.data_length or not inside or min(shape, default=0) < 0:
            raise SnapshotError(
                f"{self._path}, tensor {name[:80]!r}: its shape and type do not fit its place in the file.",
                remedy="Fetch the file again.",
            )
        self._keys[name] = path[0] if len(path) == 1 else path
        self.specs.append(spec)

    def _batches(self, names: Sequence[str]) -> Iterator[list[str]]:
        batch: list[str] = []
        total_bytes = 0
        for name in names:
            if batch and total_bytes + self._sizes[name] > BATCH_BYTES:
                yield batch
                batch, total_bytes = [], 0
            batch.append(name)
            total_bytes += self._sizes[name]
        if batch:
            yield batch


def export(origin: TensorOrigin, path: Path, progress: Progress | None = None) -> int:
    """Write an origin's tensors, once for each of their names, as file `path`, and return their bytes."""
    library = _library()
    sizes = {spec.name: spec.size_bytes for spec in origin.specs}
    for spec in origin.specs:
        if not spec.size_bytes and spec.dtype.startswith(("BF16", "F8_")):
            raise SnapshotError(
                f"Tensor {spec.name!r} is empty and {spec.dtype}: tensorizer writes that, but cannot read it.",
                remedy="Leave the tensor out.",
            )
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
    try:
        # An optional dependency.
        import tensorizer  # noqa: PLC0415
        import tensorizer.serialization  # noqa: PLC0415
    except ImportError as error:
        raise SnapshotError(
            "Tensorizer files need the package tensorizer, which is not installed.",
            remedy="Install it: pip install tensorizer",
        ) from error
    return tensorizer


@contextmanager
def _reading(path: Path, **options: Any) -> Iterator[tuple[Any, int]]:
    """Yield the library's reader of a file, and the file's size. Its errors become SnapshotError."""
    library = _library()
    try:
        stream = path.open("rb")
    except OSError as error:
        raise SnapshotError(f"{path} cannot be read: {error.strerror}.", remedy="Check the path.") from error
    try:
        # With several readers, the library would open the file again by its name.
        with (
            stream,
            closing(
                library.TensorDeserializer(
                    stream, device="cpu", lazy_load=True, num_readers=1, verify_hash=True, **options
                )
            ) as reader,
        ):
            yield reader, os.fstat(stream.fileno()).st_size
    except SnapshotError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200].rstrip(".")
        raise SnapshotError(
            f"{path} is not a valid tensorizer file: {reason}.", remedy="Fetch it again."
        ) from error


def _dtype(path: Path, tensor: str, text: str) -> str:
    """Return the safetensors name of numpy's dtype `text`, which has torch's behind a NUL if numpy has none."""
    plain, _, opaque = text.partition("\0")
    try:
        if opaque:
            return DTYPE_NAMES[getattr(torch, opaque.removeprefix("torch."))]
        return DTYPE_NAMES[torch.from_numpy(numpy.empty(0, numpy.dtype(plain))).dtype]
    except (AttributeError, KeyError, TypeError) as error:
        raise SnapshotError(
            f"{path}, tensor {tensor[:80]!r}: safetensors does not hold {(opaque or plain)[:80]!r}.",
            remedy="Convert it to another type first.",
        ) from error
