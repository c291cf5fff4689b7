"""Making a manifest: safetensors files stay what they are, and are read once, header and digests."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._version import __version__
from ..errors import HeaderError, ManifestError, SnapshotError
from .chunk import Progress, chunk_digests
from .folder import FolderSource
from .header import MAX_HEADER_BYTES, Header, read_header
from .manifest import (
    DEFAULT_CHUNK_BYTES,
    MAX_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    Manifest,
    Provenance,
    Shard,
    TensorEntry,
)
from .source import Source, name_fault

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"

_FOREIGN = {".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".tensors"}


@dataclass(frozen=True, slots=True)
class _Layout:
    """Which files make the snapshot, and where the index, if any, says the tensors are."""

    shards: tuple[str, ...]
    places: dict[str, str]
    index: str = ""


def create(
    folder: Path, *, chunk_bytes: int = DEFAULT_CHUNK_BYTES, progress: Progress | None = None
) -> Manifest:
    """Describe the safetensors in `folder` (or the one file it is); writes nothing.

    The folder holds one `*.safetensors`, or several and the `*.safetensors.index.json` that lists them.
    """
    if not MIN_CHUNK_BYTES <= chunk_bytes <= MAX_CHUNK_BYTES:
        raise ManifestError(
            f"chunk_bytes is {chunk_bytes}.", remedy=f"Take {MIN_CHUNK_BYTES} to {MAX_CHUNK_BYTES} bytes."
        )
    root, layout = _layout(folder)
    source = FolderSource(root)
    headers = {name: read_header(source, name) for name in layout.shards}
    _check_index(layout, headers)
    shards = _shards(source, headers, chunk_bytes, progress)
    tensors = tuple(
        _entry(header, index, position)
        for index, header in enumerate(headers.values())
        for position in range(len(header.tensors))
    )
    return Manifest.build(
        chunk_bytes=chunk_bytes,
        shards=shards,
        tensors=tensors,
        aliases=_aliases(headers, {tensor.name for tensor in tensors}),
        provenance=Provenance(created_by=f"pilotlight {__version__}", source=str(folder)[:4096]),
    )


def _layout(folder: Path) -> tuple[Path, _Layout]:
    if folder.is_file():
        return folder.parent, _Layout((folder.name,), {})
    if not folder.is_dir():
        raise SnapshotError(f"{folder} is neither a folder nor a file.", remedy="Check the path.")
    names = sorted(path.name for path in folder.iterdir())
    indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
    files = [name for name in names if name.endswith(SUFFIX)]
    if len(indexes) > 1:
        raise _ambiguous(folder, indexes)
    if indexes:
        return folder, _indexed(folder, indexes[0], files)
    if len(files) > 1:
        raise _ambiguous(folder, files)
    if not files:
        raise _nothing(folder, names)
    return folder, _Layout((files[0],), {})


def _indexed(folder: Path, index: str, files: list[str]) -> _Layout:
    places = _read_index(folder / index)
    shards = tuple(sorted(set(places.values())))
    # Files that the index does not list (consolidated.safetensors, an adapter) belong to somebody else. A
    # whole model.safetensors beside its own index is another matter: nobody can say which of the two is
    # meant.
    whole = index.removesuffix(".index.json")
    if whole in files and whole not in shards:
        raise _ambiguous(folder, [whole, index])
    missing = [name for name in shards if not (folder / name).exists()]
    if missing:
        raise SnapshotError(
            f"{folder / index} lists files that are not there: {_some(missing)}.",
            remedy="Fetch the missing shards.",
        )
    return _Layout(shards, places, index)


def _read_index(path: Path) -> dict[str, str]:
    try:
        with path.open("rb") as stream:
            text = stream.read(MAX_HEADER_BYTES)
        index: Any = json.loads(text)  # cut off at the limit, it is no JSON any more
    except (OSError, ValueError, RecursionError) as error:
        raise HeaderError(f"{path} is not a readable JSON index.", remedy="Fetch it again.") from error
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not places:
        raise HeaderError(f"{path} holds no weight_map.", remedy="Fetch it again.")
    for tensor, file in places.items():
        fault = name_fault(file) if isinstance(file, str) else "it is not text"
        if fault is not None:
            raise HeaderError(
                f"{path} puts tensor {tensor[:80]!r} into {str(file)[:80]!r}, not a file: {fault}.",
                remedy="Do not use this snapshot unless you know who wrote its index.",
            )
    return places


def _check_index(layout: _Layout, headers: dict[str, Header]) -> None:
    # Tensors that the index forgot are taken all the same, as transformers takes them.
    holders: dict[str, str] = {}
    for file, header in headers.items():
        for tensor in header.tensors:
            if tensor.name in holders:
                raise HeaderError(
                    f"Tensor {tensor.name!r} is both in {holders[tensor.name]} and in {file}.",
                    remedy="Save the shards again: every tensor belongs into one.",
                )
            holders[tensor.name] = file
    for name, file in layout.places.items():
        if holders.get(name) != file:
            where = f"it is in {holders[name]}" if name in holders else "no shard holds it"
            raise HeaderError(
                f"{layout.index} claims that tensor {name[:80]!r} is in {file}, but {where}.",
                remedy="Fetch the index and the shards again, from the same revision.",
            )


def _shards(
    source: Source, headers: dict[str, Header], chunk_bytes: int, progress: Progress | None
) -> tuple[Shard, ...]:
    total_bytes = sum(header.file_bytes for header in headers.values())
    # Never larger than the largest file: first touch of fresh memory costs more than reading into it.
    largest_bytes = max(header.file_bytes for header in headers.values())
    buffer = memoryview(bytearray(min(chunk_bytes, largest_bytes)))
    done_bytes = 0
    shards = []
    for name, header in headers.items():
        digests, read_bytes = [], 0
        for digest, count in chunk_digests(source, name, header.file_bytes, buffer):
            digests.append(digest)
            read_bytes += count
            if progress is not None:
                progress(done_bytes + read_bytes, total_bytes)
        done_bytes += read_bytes
        if read_bytes != header.file_bytes:
            raise SnapshotError(f"{name} shrank while it was read.", remedy="Wait until it is written.")
        shards.append(
            Shard(
                name=name,
                size_bytes=header.file_bytes,
                data_offset_bytes=header.data_offset_bytes,
                chunks=tuple(digests),
            )
        )
    return tuple(shards)


def _entry(header: Header, shard: int, position: int) -> TensorEntry:
    tensor = header.tensors[position]
    return TensorEntry(
        name=tensor.name,
        dtype=tensor.dtype,
        shape=tensor.shape,
        shard=shard,
        offset_bytes=header.data_offset_bytes + tensor.offset_bytes,
        size_bytes=tensor.size_bytes,
    )


def _aliases(headers: dict[str, Header], stored: set[str]) -> dict[str, str]:
    # safetensors.torch.save_model drops all names but one of a shared tensor, and says so in the metadata.
    return {
        alias: target
        for header in headers.values()
        for alias, target in header.metadata.items()
        if target in stored and alias not in stored and alias != "format"
    }


def _ambiguous(folder: Path, names: list[str]) -> SnapshotError:
    return SnapshotError(
        f"{folder} holds {_some(names)}, and nothing says which of them is meant.",
        remedy="Give the path of the one file, or put the shards' model.safetensors.index.json beside them.",
    )


def _nothing(folder: Path, names: list[str]) -> SnapshotError:
    foreign = [name for name in names if Path(name).suffix in _FOREIGN]
    if foreign:
        return SnapshotError(
            f"{folder} holds no safetensors, only {_some(foreign)}.",
            remedy="Convert with model.save_pretrained(folder) or safetensors.torch.save_file(state, path).",
        )
    found = f"only {_some(names)}" if names else "it is empty"
    return SnapshotError(f"{folder} holds no safetensors: {found}.", remedy="Check the path.")


def _some(names: list[str]) -> str:
    shown = ", ".join(name[:120] for name in names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
