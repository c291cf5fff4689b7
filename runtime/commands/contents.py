"""Snapshots in words, and where a command line says they are: what the commands about weights share."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...snapshot.sources.locate import is_remote
from . import display

if TYPE_CHECKING:
    from ...snapshot.format.manifest import Manifest
    from ...snapshot.sources.source import Source

MANIFEST_SUFFIX = ".json"
WEIGHTS_SUFFIX = ".safetensors"


class Place(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.3 on
    """A URL, or the path of something that is there."""

    name = "path_or_url"

    def convert(
        self, value: str | Path, param: click.Parameter | None, ctx: click.Context | None
    ) -> str | Path:
        if is_remote(str(value)):
            return str(value).rstrip("/")
        found: Path = click.Path(exists=True, path_type=Path).convert(value, param, ctx)
        return found


def open_place(url: str) -> tuple[Source, str | None]:
    """The source of a URL's prefix, and the weights file or manifest that the URL names in it."""
    from ...snapshot.sources.locate import open_source  # noqa: PLC0415  see create

    above, _, last = url.rpartition("/")
    if last.endswith((WEIGHTS_SUFFIX, MANIFEST_SUFFIX)):
        return open_source(above), last
    return open_source(url), None


def put_manifest(source: Source, name: str, content: bytes) -> None:
    from ...errors import SnapshotError  # noqa: PLC0415
    from ...snapshot.sources.source import Writable  # noqa: PLC0415

    if not isinstance(source, Writable):
        raise SnapshotError(
            f"{source.url} cannot be written to.", remedy="Take the manifest with --output, and put it there."
        )
    source.put(name, content)


def read_manifest_of(path: str | Path) -> Manifest:
    """The manifest that describes `path`: a folder or prefix, its manifest, or a weights file beside it."""
    from ...errors import ManifestError  # noqa: PLC0415
    from ...snapshot.format.manifest import (  # noqa: PLC0415  see create
        MANIFEST_NAME,
        Manifest,
        read_manifest,
    )

    if isinstance(path, str):
        return read_manifest(open_place(path)[0])
    file = (
        path if path.suffix == MANIFEST_SUFFIX else (path if path.is_dir() else path.parent) / MANIFEST_NAME
    )
    if not file.is_file():
        raise ManifestError(
            f"{path} has no manifest ({file.name}).", remedy=f"Make one: pilotflame snapshot create {path}"
        )
    return Manifest.read(file)


def summary(manifest: Manifest) -> dict[str, Any]:
    types = Counter(tensor.dtype for tensor in manifest.tensors)
    return {
        "digest": manifest.digest,
        "bytes": manifest.total_bytes,
        "chunk_bytes": manifest.chunk_bytes,
        "shards": [{"name": shard.name, "bytes": shard.size_bytes} for shard in manifest.shards],
        "tensor_count": len(manifest.tensors),
        "dtypes": dict(types),
        "aliases": dict(manifest.aliases),
        "assets": [{"name": asset.name, "bytes": asset.size_bytes} for asset in manifest.assets],
        "first_touch_recorded": bool(manifest.first_touch),
    }


def contents(manifest: Manifest) -> str:
    types = Counter(tensor.dtype for tensor in manifest.tensors)
    kinds = ", ".join(f"{count} {dtype}" for dtype, count in types.most_common())
    beside = f" and {len(manifest.assets)} beside" if manifest.assets else ""
    files = f"{files_counted(len(manifest.shards))}{beside}"
    return f"{display.size(manifest.total_bytes)} in {files}, {len(manifest.tensors)} tensors ({kinds})"


def files_counted(count: int) -> str:
    return "1 file" if count == 1 else f"{count} files"


def rate(size_bytes: float, elapsed_s: float) -> str:
    return f"{elapsed_s:.2f} s, {display.size(size_bytes / max(elapsed_s, 1e-6))}/s"
