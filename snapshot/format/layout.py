"""Decides which files of a source are shards and which are assets, and reads the index of the shards."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from ...errors import HeaderError, SnapshotError
from ..sources.source import Source, name_fault, read_all
from .header import MAX_HEADER_BYTES, bulk_fault
from .manifest import MANIFEST_NAME, MAX_ASSET_DEPTH, MAX_ASSETS, SIGNATURE_NAME

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"

# The suffixes of weights in other formats. Such files are never assets.
FOREIGN = frozenset(
    {".bin", ".pt", ".pth", ".ckpt", ".h5", ".hdf5", ".keras", ".msgpack", ".gguf", ".ggml", ".onnx", ".onnx_data"}
    | {".tensors", ".tflite", ".pb", ".npz", ".npy", ".ot", ".pkl", ".pickle", ".engine", ".mlmodel", ".pte"}
)  # fmt: skip
# More suffixes that no asset has. No handler reads partial downloads, caches and archives. Code is not an asset
# either: it belongs to the function, and editing code must not change the snapshot.
_IGNORED = frozenset(
    {".py", ".pyc", ".lock", ".incomplete", ".part", ".tmp", ".log", ".zip", ".tar", ".gz", ".tgz", ".zst"}
)


@dataclass(frozen=True, slots=True)
class Layout:
    """The names of a snapshot's files. `assets` are chosen by name, so some may be too large to be assets.

    `index` is the name of the index file, or "". `places` maps each tensor to its file, as written in the index.
    """

    shards: tuple[str, ...]
    places: dict[str, str]
    assets: tuple[str, ...] = ()
    index: str = ""


def lay_out(source: Source, names: Sequence[str], file: str | None = None) -> Layout:
    """Return the layout of the files `names`, which are all in `source`.

    With `file`, that file is the only shard. Without `file`, the top folder must have either one `*.safetensors`, or
    several and the `*.safetensors.index.json` that lists them. Raise SnapshotError if the choice of the files
    is not clear, if a shard is missing or if there are too many assets, and HeaderError if the index is not valid.
    """
    assets = tuple(sorted(name for name in names if is_asset(name)))
    if len(assets) > MAX_ASSETS:
        fault = f"{source.url} holds {len(assets)} files beside the weights, over the limit of {MAX_ASSETS}."
        raise SnapshotError(fault, remedy="Put the weights and their files into a separate folder.")
    if file is not None:
        return Layout((file,), {}, tuple(name for name in assets if not name.endswith(INDEX_SUFFIX)))
    top = sorted(name for name in names if "/" not in name)
    indexes = [name for name in top if name.endswith(INDEX_SUFFIX)]
    files = [name for name in top if name.endswith(SUFFIX)]
    if len(indexes) > 1:
        raise ambiguous(source, indexes)
    if indexes:
        return _indexed(source, indexes[0], files, names, assets)
    if len(files) > 1:
        raise ambiguous(source, files)
    if not files:
        raise _no_safetensors(source, top)
    return Layout((files[0],), {}, assets)


def is_asset(name: str) -> bool:
    """Return True if a file of this name, in the folder of the weights or below it, is an asset."""
    path = PurePosixPath(name)
    if path.name in {MANIFEST_NAME, SIGNATURE_NAME}:
        return False
    if len(path.parts) > MAX_ASSET_DEPTH + 1 or name_fault(name) is not None:
        return False
    if any(part.startswith(".") or part == "__pycache__" for part in path.parts):
        return False
    return path.suffix.lower() not in FOREIGN | _IGNORED | {SUFFIX}


def read_index(source: Source, name: str) -> dict[str, str]:
    """Return the weight_map (tensor to file) of index file `name`. Raise HeaderError if the file is not valid."""
    where = f"{source.url}/{name}"
    try:
        # If the index is over the limit, `read_all` returns only its beginning, which is not valid JSON.
        text = read_all(source, name, MAX_HEADER_BYTES)
        index: Any = None if bulk_fault(text) else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise HeaderError(f"{where} is not a readable JSON index.", remedy="Fetch it again.") from error
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not places:
        raise HeaderError(f"{where} holds no weight_map.", remedy="Fetch it again.")
    for tensor, file in places.items():
        fault = name_fault(file) if isinstance(file, str) else "it is not text"
        if fault is not None:
            fault = f"{where} puts tensor {tensor[:80]!r} into {str(file)[:80]!r}, not a file: {fault}."
            raise HeaderError(fault, remedy="Do not use this snapshot unless you know who wrote its index.")
    return places


def _indexed(
    source: Source, index: str, files: list[str], names: Sequence[str], assets: tuple[str, ...]
) -> Layout:
    places = read_index(source, index)
    shards = tuple(sorted(set(places.values())))
    # Ignore safetensors files that the index does not list (consolidated.safetensors, an adapter). But a file that is
    # named like the index (model.safetensors) may also have all weights. Refuse it, because the choice is not clear.
    whole = index.removesuffix(".index.json")
    if whole in files and whole not in shards:
        raise ambiguous(source, [whole, index])
    missing = sorted(set(shards) - set(names))
    if missing:
        fault = f"{source.url}/{index} lists files that are not there: {some(missing)}."
        raise SnapshotError(fault, remedy="Fetch the missing shards.")
    return Layout(shards, places, tuple(name for name in assets if name not in shards), index)


def ambiguous(source: Source, names: list[str]) -> SnapshotError:
    remedy = "Give the path of the one file, or put the shards' model.safetensors.index.json beside them."
    return SnapshotError(f"{source.url} holds {some(names)}, and nothing says which to use.", remedy=remedy)


def _no_safetensors(source: Source, names: list[str]) -> SnapshotError:
    foreign = [name for name in names if PurePosixPath(name).suffix.lower() in FOREIGN]
    found = f"only {some(foreign or names)}" if names else "it is empty"
    remedy = "Convert with: pilotflame snapshot convert IN OUT" if foreign else "Check the path."
    return SnapshotError(f"{source.url} holds no safetensors: {found}.", remedy=remedy)


def some(names: Sequence[str], most: int = 5) -> str:
    """Join the first names for a message, for example as "a, b, c and 4 more"."""
    shown = ", ".join(name[:120] for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
