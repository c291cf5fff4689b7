"""Files of CoreWeave's tensorizer (`.tensors`): an origin, and an export. Bit for bit, both ways."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy
import torch

from ...errors import CacheError, SnapshotError
from ..publish import publish
from ..sources.source import Progress
from .origin import DTYPE_NAMES, TensorOrigin, TensorSpec, check_specs

SUFFIX = ".tensors"

# The library keeps every tensor that it has read until it is closed: it is opened anew for every so many bytes.
BATCH_BYTES = 256 << 20


class TensorizerOrigin:
    """The tensors of one `.tensors` file, their hashes checked as they are read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._keys: dict[str, Any] = {}
        self.aliases: dict[str, str] = {}
        self.specs: list[TensorSpec] = []
        size_bytes = _size_bytes(path)
        with _open(path) as stream, _reading(path):
            reader = _reader(stream)
            try:
                for key, entry in reader._metadata.items():  # noqa: SLF001  nothing public tells types unread
                    self._add(key, entry, size_bytes)
            finally:
                reader.close()
        check_specs(str(path), [spec.name for spec in self.specs])
        self._sizes = {spec.name: spec.size_bytes for spec in self.specs}

    def tensors(self, names: Sequence[str]) -> Iterator[torch.Tensor]:
        for batch in self._batches(names):
            wanted = {self._keys[name] for name in batch}
            with _open(self._path) as stream, _reading(self._path):
                reader = _reader(stream, filter_func=wanted.__contains__)
                try:
                    found = {key: value for *_, key, value in reader.read_tensors()}
                finally:
                    reader.close()
            for name in batch:
                yield found.pop(self._keys[name]).detach()

    def _add(self, key: Any, entry: Any, size_bytes: int) -> None:
        path = tuple(key)
        name = ".".join(str(step) for step in path).removeprefix(".")  # a bare module's own: ".weight"
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
    """Write an origin's tensors, those with several names once for each, as file `path`; returns their bytes."""
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
    total_bytes, done_bytes = sum(sizes[name] for name in stored), 0
    try:
        with publish(path) as stream:
            writer = library.TensorSerializer(stream.name)
            try:
                source = origin.tensors(stored)
                for name, kept in zip(names, stored, strict=True):
                    writer.write_tensor(0, name, library.serialization.TensorType.STATE_DICT, next(source))
                    done_bytes += sizes[kept]
                    if progress is not None:
                        progress(done_bytes, total_bytes)
            finally:
                writer.close()
    except OSError as error:
        raise CacheError(
            f"{path} cannot be written: {error.strerror or error}.", remedy="Make room."
        ) from error
    return total_bytes


def _library() -> Any:
    try:
        import tensorizer  # noqa: PLC0415  an extra of its own
        import tensorizer.serialization  # noqa: PLC0415
    except ImportError as error:
        raise SnapshotError(
            "Files of tensorizer need its package, which is not installed.",
            remedy="Install it: pip install tensorizer",
        ) from error
    return tensorizer


def _reader(stream: IO[bytes], **options: Any) -> Any:
    # One reader: more would open the file anew, by its name.
    return _library().TensorDeserializer(
        stream, device="cpu", lazy_load=True, num_readers=1, verify_hash=True, **options
    )


def _size_bytes(path: Path) -> int:
    with _open(path) as stream:
        return stream.seek(0, os.SEEK_END)


def _open(path: Path) -> IO[bytes]:
    try:
        return path.open("rb")
    except OSError as error:
        raise SnapshotError(f"{path} cannot be read: {error.strerror}.", remedy="Check the path.") from error


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """What the library raises over a broken file, as ours."""
    try:
        yield
    except SnapshotError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200].rstrip(".")
        raise SnapshotError(
            f"{path} is no sound file of tensorizer: {reason}.", remedy="Fetch it again."
        ) from error


def _dtype(path: Path, tensor: str, text: str) -> str:
    """A type as safetensors calls it. Numpy's name, and behind a NUL torch's, where numpy has none."""
    plain, _, opaque = text.partition("\0")
    try:
        dtype = getattr(torch, opaque.removeprefix("torch.")) if opaque else _from_numpy(plain)
        return DTYPE_NAMES[dtype]
    except (AttributeError, KeyError, TypeError) as error:
        raise SnapshotError(
            f"{path}, tensor {tensor[:80]!r}: safetensors does not hold {(opaque or plain)[:80]!r}.",
            remedy="Convert it to another type first.",
        ) from error


def _from_numpy(text: str) -> torch.dtype:
    return torch.from_numpy(numpy.empty(0, numpy.dtype(text))).dtype
