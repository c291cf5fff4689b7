"""Converts weights of any supported format to a snapshot folder or to a tensorizer file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..._version import __version__
from ...errors import SnapshotError
from ..format.create import create
from ..format.digests import AlgorithmName
from ..format.layout import INDEX_SUFFIX, SUFFIX, Layout, ambiguous, is_asset, lay_out, read_index, some
from ..format.manifest import MANIFEST_NAME, MAX_ASSET_BYTES, Manifest, Provenance
from ..publish import publish_folder
from ..sources.folder import FolderSource
from ..sources.source import ByteCounter, ReportProgress
from . import tensorizer_file, torch_file
from .origin import SafetensorsOrigin, TensorOrigin
from .writer import CASTS, write_shards

SHARD_BYTES = 5_000_000_000
_TORCH_INDEX = "pytorch_model.bin.index.json"
_TORCH_FILE = "pytorch_model.bin"
# Training scripts save files whose names start with one of these words. Such files are not weights.
_TRAINING = ("training_args", "optimizer", "scheduler", "rng_state", "scaler", "trainer_state")


@dataclass(frozen=True, slots=True)
class _Input:
    """The weights to convert in folder `source`. `shards` are its safetensors files. `origin` opens the tensors."""

    source: FolderSource
    shards: tuple[str, ...]
    origin: Callable[[], TensorOrigin]
    assets: tuple[str, ...] = ()


def convert(
    path_in: Path,
    path_out: Path,
    *,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    algorithm: AlgorithmName = "xxh3-128",
    progress: ReportProgress | None = None,
) -> Manifest:
    """Convert `path_in` to a snapshot in folder `path_out`, which must be new or empty. Write it atomically.

    `path_in` is a file of safetensors, torch.save or tensorizer, or a folder in a layout of Hugging Face. The
    assets of a folder are copied. Floating-point tensors of 16 to 64 bits are cast to `dtype` (bf16, fp16, fp32).
    Without `dtype`, safetensors files are copied as they are. In all other cases, tensors are written to new
    safetensors files of about `shard_bytes` each, with one tensor in memory at a time. Raise SnapshotError
    (HeaderError) if `path_in` cannot be converted, CacheError if `path_out` cannot be written.
    """
    if dtype is not None and dtype not in CASTS:
        raise SnapshotError(f"dtype {dtype!r} is unknown.", remedy=f"Use one of {', '.join(CASTS)}.")
    found = _find(path_in)
    copied = found.shards if dtype is None else ()
    assets = tuple(name for name in found.assets if found.source.stat(name).size_bytes <= MAX_ASSET_BYTES)
    with publish_folder(path_out) as folder:
        if copied:
            _copy(found.source, copied, folder, progress)
        else:
            origin = found.origin()
            written = ByteCounter(sum(spec.size_bytes for spec in origin.specs), progress)
            cast = CASTS[dtype] if dtype else None
            write_shards(folder, origin, shard_bytes=shard_bytes, cast=cast, wrote=written.add)
            # Leave out the index files at the top of `path_in`, which describe the old files.
            assets = tuple(name for name in assets if "/" in name or not name.endswith(".index.json"))
        _copy(found.source, assets, folder, None)
        provenance = Provenance(created_by=f"pilotflame {__version__}", source=str(path_in)[:4096])
        manifest = create(folder, algorithm=algorithm).model_copy(update={"provenance": provenance})
        manifest.write(folder / MANIFEST_NAME)
    return manifest


def convert_to_tensorizer(path_in: Path, path_out: Path, *, progress: ReportProgress | None = None) -> int:
    """Write the tensors of `path_in` (see `convert`) to tensorizer file `path_out`. Return their total bytes."""
    if path_out.exists():
        raise SnapshotError(f"{path_out} is there already.", remedy="Choose a path that does not exist.")
    return tensorizer_file.export(_find(path_in).origin(), path_out, progress)


def _find(path: Path) -> _Input:
    if path.is_file():
        return _in_file(path)
    if not path.is_dir():
        raise SnapshotError(f"{path} is neither a folder nor a file.", remedy="Check the path.")
    source = FolderSource(path)
    names = source.names()
    top = [name for name in names if "/" not in name]
    weights = [name for name in top if _is_foreign(name)]
    is_safetensors = any(name.endswith((SUFFIX, INDEX_SUFFIX)) for name in top)
    if is_safetensors or not (weights or _TORCH_INDEX in top):
        # If there are no weights, `lay_out` raises SnapshotError.
        layout = lay_out(source, names)
        return _Input(source, layout.shards, lambda: SafetensorsOrigin(source, layout), layout.assets)
    assets = tuple(name for name in names if is_asset(name))
    if _TORCH_INDEX in top:
        return _Input(source, (), lambda: _sharded(path, source), assets)
    if _TORCH_FILE in weights:
        weights = [_TORCH_FILE]
    if len(weights) > 1:
        raise ambiguous(source, weights)
    return _Input(source, (), _in_file(path / weights[0]).origin, assets)


def _in_file(path: Path) -> _Input:
    source, suffix = FolderSource(path.parent), path.suffix.lower()
    if suffix == SUFFIX:
        layout = Layout((path.name,), {})
        return _Input(source, layout.shards, lambda: SafetensorsOrigin(source, layout))
    if suffix == tensorizer_file.SUFFIX:
        return _Input(source, (), lambda: tensorizer_file.TensorizerOrigin(path))
    if suffix in torch_file.SUFFIXES:
        return _Input(source, (), lambda: torch_file.TorchOrigin([path]))
    known = ", ".join([SUFFIX, tensorizer_file.SUFFIX, *sorted(torch_file.SUFFIXES)])
    remedy = f"Supported are {known}, and folders of them."
    raise SnapshotError(f"{path} has no supported format.", remedy=remedy)


def _is_foreign(name: str) -> bool:
    suffixes = {tensorizer_file.SUFFIX, *torch_file.SUFFIXES}
    return Path(name).suffix.lower() in suffixes and not name.startswith(_TRAINING)


def _sharded(path: Path, source: FolderSource) -> TensorOrigin:
    index, places = path / _TORCH_INDEX, read_index(source, _TORCH_INDEX)
    files = sorted(set(places.values()))
    if missing := [name for name in files if not (path / name).is_file()]:
        fault = f"{index} lists files that are not there: {some(missing)}."
        raise SnapshotError(fault, remedy="Fetch the missing files.")
    if foreign := [name for name in files if Path(name).suffix.lower() not in torch_file.SUFFIXES]:
        raise SnapshotError(f"{index} lists {some(foreign)}, which torch.save did not write.")
    origin = torch_file.TorchOrigin([path / name for name in files])
    if lost := sorted(places.keys() - {spec.name for spec in origin.specs} - origin.aliases.keys()):
        fault = f"{index} lists tensors that no file holds: {some(lost)}."
        raise SnapshotError(fault, remedy="Fetch the index and the files again, from the same revision.")
    return origin


def _copy(
    source: FolderSource, names: tuple[str, ...], folder: Path, progress: ReportProgress | None
) -> None:
    written = ByteCounter(sum(source.stat(name).size_bytes for name in names), progress)
    for name in names:
        FolderSource(folder).put(name, Path(source.url, name), written.add)
