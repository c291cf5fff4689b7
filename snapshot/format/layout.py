"""Which of a prefix's files make the snapshot: the shards, what their index says, and the assets beside them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from ...errors import HeaderError, SnapshotError
from ..sources.source import Source, name_fault
from .header import MAX_HEADER_BYTES, bulk_fault
from .manifest import MANIFEST_NAME, MAX_ASSET_DEPTH, MAX_ASSETS

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"

# Weights that are not safetensors; never assets.
FOREIGN = frozenset(
    {".bin", ".pt", ".pth", ".ckpt", ".h5", ".hdf5", ".keras", ".msgpack", ".gguf", ".ggml", ".onnx", ".onnx_data"}
    | {".tensors", ".tflite", ".pb", ".npz", ".npy", ".ot", ".pkl", ".pickle", ".engine", ".mlmodel", ".pte"}
)  # fmt: skip
# What is in the way of being downloaded, compiled or packed away: no handler reads it.
_PASSING = frozenset(
    # Code is a function's, not a snapshot's: editing it must not make another snapshot.
    {".py", ".pyc", ".lock", ".incomplete", ".part", ".tmp", ".log", ".zip", ".tar", ".gz", ".tgz", ".zst"}
)


@dataclass(frozen=True, slots=True)
class Layout:
    """Which files make the snapshot, and where the index, if any, says the tensors are."""

    shards: tuple[str, ...]
    places: dict[str, str]
    assets: tuple[str, ...] = ()
    """By their names; which of them are too large only their sizes tell."""
    index: str = ""


def lay_out(source: Source, names: Sequence[str], file: str | None = None) -> Layout:
    """The layout of `names`, all that is under `source`; with `file`, of that one and what lies beside it.

    Among the names is one `*.safetensors`, or there are several and the `*.safetensors.index.json` that lists them.
    """
    assets = tuple(sorted(name for name in names if is_asset(name)))
    if len(assets) > MAX_ASSETS:
        raise SnapshotError(
            f"{source.url} holds {len(assets)} files beside the weights, over the limit of {MAX_ASSETS}.",
            remedy="Put the weights and what belongs to them into a folder of their own.",
        )
    if file is not None:
        return Layout((file,), {}, tuple(name for name in assets if not name.endswith(INDEX_SUFFIX)))
    top = sorted(name for name in names if "/" not in name)
    indexes = [name for name in top if name.endswith(INDEX_SUFFIX)]
    files = [name for name in top if name.endswith(SUFFIX)]
    if len(indexes) > 1:
        raise _ambiguous(source, indexes)
    if indexes:
        return _indexed(source, indexes[0], files, names, assets)
    if len(files) > 1:
        raise _ambiguous(source, files)
    if not files:
        raise _nothing(source, top)
    return Layout((files[0],), {}, assets)


def is_asset(name: str) -> bool:
    """Whether a file of this name beside weights belongs to them without being weights."""
    path = PurePosixPath(name)
    if path.name == MANIFEST_NAME or len(path.parts) > MAX_ASSET_DEPTH + 1 or name_fault(name) is not None:
        return False
    if any(part.startswith(".") or part == "__pycache__" for part in path.parts):
        return False
    return path.suffix.lower() not in FOREIGN | _PASSING | {SUFFIX}


def read_index(source: Source, name: str) -> dict[str, str]:
    """The weight_map of index file `name`: tensor to file, every file's name a plain one."""
    where = f"{source.url}/{name}"
    try:
        size_bytes = source.size(name)
        buffer = bytearray(min(size_bytes, MAX_HEADER_BYTES))
        text = bytes(buffer[: source.read_into(name, 0, memoryview(buffer))])
        index: Any = (
            None if bulk_fault(text) else json.loads(text)
        )  # cut at the limit, it is no JSON any more
    except (ValueError, RecursionError) as error:
        raise HeaderError(f"{where} is not a readable JSON index.", remedy="Fetch it again.") from error
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not places:
        raise HeaderError(f"{where} holds no weight_map.", remedy="Fetch it again.")
    for tensor, file in places.items():
        fault = name_fault(file) if isinstance(file, str) else "it is not text"
        if fault is not None:
            raise HeaderError(
                f"{where} puts tensor {tensor[:80]!r} into {str(file)[:80]!r}, not a file: {fault}.",
                remedy="Do not use this snapshot unless you know who wrote its index.",
            )
    return places


def _indexed(
    source: Source, index: str, files: list[str], names: Sequence[str], assets: tuple[str, ...]
) -> Layout:
    places = read_index(source, index)
    shards = tuple(sorted(set(places.values())))
    # Files that the index does not list (consolidated.safetensors, an adapter) belong to somebody else. A
    # whole model.safetensors beside its own index is another matter: nobody can say which of the two is
    # meant.
    whole = index.removesuffix(".index.json")
    if whole in files and whole not in shards:
        raise _ambiguous(source, [whole, index])
    missing = sorted(set(shards) - set(names))
    if missing:
        raise SnapshotError(
            f"{source.url}/{index} lists files that are not there: {some(missing)}.",
            remedy="Fetch the missing shards.",
        )
    return Layout(shards, places, tuple(name for name in assets if name not in shards), index)


def _ambiguous(source: Source, names: list[str]) -> SnapshotError:
    return SnapshotError(
        f"{source.url} holds {some(names)}, and nothing says which of them is meant.",
        remedy="Give the path of the one file, or put the shards' model.safetensors.index.json beside them.",
    )


def _nothing(source: Source, names: list[str]) -> SnapshotError:
    foreign = [name for name in names if PurePosixPath(name).suffix.lower() in FOREIGN]
    if foreign:
        return SnapshotError(
            f"{source.url} holds no safetensors, only {some(foreign)}.",
            remedy="Convert with: pilotflame snapshot convert IN OUT",
        )
    found = f"only {some(names)}" if names else "it is empty"
    return SnapshotError(f"{source.url} holds no safetensors: {found}.", remedy="Check the path.")


def some(names: Sequence[str]) -> str:
    """The first few names, for a message."""
    shown = ", ".join(name[:120] for name in names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
