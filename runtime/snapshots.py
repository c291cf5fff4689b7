"""The commands about weights: `pilotlight snapshot create|inspect|verify`."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import display, options

if TYPE_CHECKING:
    from ..snapshot.manifest import Manifest

LARGEST = 10

weights = click.argument("path", type=click.Path(exists=True, path_type=Path))


@click.group()
def snapshot() -> None:
    """Weights: make, look at and verify snapshots.

    A snapshot is a manifest (pilotlight.manifest.json) beside ordinary safetensors files, which stay as they are.

    \b
    Example:
      pilotlight snapshot create weights/
    """


@snapshot.command()
@weights
@click.option(
    "--chunk-mib", type=click.IntRange(1, 1024), default=8, show_default=True, help="Unit of verifying."
)
@options.as_json
def create(path: Path, chunk_mib: int, as_json: bool) -> None:
    """Write the manifest of PATH: a folder with safetensors, or one file.

    Reads every byte once, for the digests; copies nothing. A manifest that is there is replaced.

    \b
    Example:
      pilotlight snapshot create weights/
    """
    from ..snapshot.create import create as make  # noqa: PLC0415  pydantic takes time to import
    from ..snapshot.manifest import MANIFEST_NAME  # noqa: PLC0415

    started_s = time.monotonic()
    with display.progress(f"reading {path}") as progress:
        manifest = make(path, chunk_bytes=chunk_mib << 20, progress=progress)
    file = (path if path.is_dir() else path.parent) / MANIFEST_NAME
    manifest.write(file)
    elapsed_s = time.monotonic() - started_s
    if as_json:
        return display.print_json({"manifest": str(file), **_summary(manifest), "seconds": elapsed_s})
    click.echo(f"wrote {file}: {_contents(manifest)}, {_rate(manifest, elapsed_s)}")
    return None


@snapshot.command()
@weights
@click.option("--tensors", is_flag=True, help="List every tensor, not only the largest.")
@options.as_json
def inspect(path: Path, tensors: bool, as_json: bool) -> None:
    """Show what is in the snapshot at PATH: files, tensors, types, sizes.

    \b
    Example:
      pilotlight snapshot inspect weights/ --tensors
    """
    manifest = _read(path)
    if as_json:
        listed = [tensor.model_dump(mode="json") for tensor in manifest.tensors] if tensors else None
        return display.print_json(
            {**_summary(manifest), **({"tensors": listed} if listed is not None else {})}
        )
    click.echo(f"{path}: {_contents(manifest)}")
    click.echo(f"digest {manifest.digest}, chunks of {display.size(manifest.chunk_bytes)}\n")
    shards = [
        (shard.name, display.size(shard.size_bytes), str(len(shard.chunks))) for shard in manifest.shards
    ]
    display.print_table(("file", "size", "chunks"), shards)
    click.echo()
    shown = sorted(manifest.tensors, key=lambda tensor: -tensor.size_bytes)
    shown = list(manifest.tensors) if tensors else shown[:LARGEST]
    rows = [(tensor.name, tensor.dtype, "×".join(map(str, tensor.shape)) or "scalar", display.size(tensor.size_bytes))
            for tensor in shown]  # fmt: skip
    display.print_table(("tensor" if tensors else "largest tensors", "type", "shape", "size"), rows)
    return None


@snapshot.command()
@weights
@options.as_json
def verify(path: Path, as_json: bool) -> None:
    """Read every byte of the snapshot at PATH and compare its digests.

    The first damage is named with file, chunk and tensors, and the exit code is 1.

    \b
    Example:
      pilotlight snapshot verify weights/
    """
    from ..snapshot.verify import verify as check  # noqa: PLC0415  see create

    manifest = _read(path)
    started_s = time.monotonic()
    with display.progress(f"verifying {path}") as progress:
        check(path if path.is_dir() else path.parent, manifest, progress)
    elapsed_s = time.monotonic() - started_s
    if as_json:
        return display.print_json({"verified": True, **_summary(manifest), "seconds": elapsed_s})
    click.echo(f"{path} is intact: {_contents(manifest)}, {_rate(manifest, elapsed_s)}")
    return None


def _read(path: Path) -> Manifest:
    """The manifest that describes `path`: a folder, its manifest, or a weights file beside it."""
    from ..errors import ManifestError  # noqa: PLC0415
    from ..snapshot.manifest import MANIFEST_NAME, Manifest  # noqa: PLC0415  see create

    file = path if path.suffix == ".json" else (path if path.is_dir() else path.parent) / MANIFEST_NAME
    if not file.is_file():
        raise ManifestError(
            f"{path} has no manifest ({file.name}).", remedy=f"Make one: pilotlight snapshot create {path}"
        )
    return Manifest.read(file)


def _summary(manifest: Manifest) -> dict[str, Any]:
    types = Counter(tensor.dtype for tensor in manifest.tensors)
    return {
        "digest": manifest.digest,
        "bytes": manifest.total_bytes,
        "chunk_bytes": manifest.chunk_bytes,
        "shards": [{"name": shard.name, "bytes": shard.size_bytes} for shard in manifest.shards],
        "tensor_count": len(manifest.tensors),
        "dtypes": dict(types),
        "aliases": dict(manifest.aliases),
    }


def _contents(manifest: Manifest) -> str:
    types = Counter(tensor.dtype for tensor in manifest.tensors)
    kinds = ", ".join(f"{count} {dtype}" for dtype, count in types.most_common())
    files = "1 file" if len(manifest.shards) == 1 else f"{len(manifest.shards)} files"
    return f"{display.size(manifest.total_bytes)} in {files}, {len(manifest.tensors)} tensors ({kinds})"


def _rate(manifest: Manifest, elapsed_s: float) -> str:
    return f"{elapsed_s:.2f} s, {display.size(manifest.total_bytes / max(elapsed_s, 1e-6))}/s"
