"""The commands about weights: `pilotflame snapshot create|inspect|verify`."""

from __future__ import annotations

import time
from pathlib import Path

import click

from . import display, options
from .contents import Place, contents, open_place, put_manifest, rate, read_manifest_of, summary
from .moves import COMMANDS as MOVES

LARGEST = 10

weights = click.argument("path", type=click.Path(exists=True, path_type=Path))
place = click.argument("path", metavar="PATH_OR_URL", type=Place())


@click.group()
def snapshot() -> None:
    """Weights: make, look at, verify, move and convert snapshots.

    A snapshot is a manifest (pilotflame.manifest.json) beside ordinary safetensors files, which stay as they are.

    \b
    Example:
      pilotflame snapshot create weights/
    """


@snapshot.command()
@place
@click.option(
    "--chunk-mib", type=click.IntRange(1, 1024), default=4, show_default=True, help="Unit of verifying."
)
@click.option(
    "--output", "-o", type=click.Path(path_type=Path), help="Write the manifest to this file instead."
)
@options.as_json
def create(path: str | Path, chunk_mib: int, output: Path | None, as_json: bool) -> None:
    """Write the manifest of PATH_OR_URL: a folder or an s3:// prefix with safetensors, or one file.

    Reads every byte once, for the digests; copies nothing. To s3:// it uploads the manifest alone. A manifest that
    is there is replaced.

    \b
    Examples:
      pilotflame snapshot create weights/
      pilotflame snapshot create s3://bucket/models/llama
    """
    from ...snapshot.format.create import create as make  # noqa: PLC0415  pydantic takes time to import
    from ...snapshot.format.manifest import MANIFEST_NAME  # noqa: PLC0415

    started_s = time.monotonic()
    source, file = open_place(path) if isinstance(path, str) else (path, None)
    with display.progress(f"reading {path}") as progress:
        manifest = make(source, file=file, chunk_bytes=chunk_mib << 20, progress=progress)
    written: Path | str
    if output is not None:
        written = output
        manifest.write(output)
    elif isinstance(source, Path):
        written = (source if source.is_dir() else source.parent) / MANIFEST_NAME
        manifest.write(written)
    else:
        written = f"{source.url}/{MANIFEST_NAME}"
        put_manifest(source, MANIFEST_NAME, manifest.to_json())
    elapsed_s = time.monotonic() - started_s
    if as_json:
        return display.print_json({"manifest": str(written), **summary(manifest), "seconds": elapsed_s})
    click.echo(f"wrote {written}: {contents(manifest)}, {rate(manifest.total_bytes, elapsed_s)}")
    return None


@snapshot.command()
@place
@click.option("--tensors", is_flag=True, help="List every tensor, not only the largest.")
@options.as_json
def inspect(path: str | Path, tensors: bool, as_json: bool) -> None:
    """Show what is in the snapshot at PATH_OR_URL: files, tensors, types, sizes. Reads nothing but the manifest.

    \b
    Examples:
      pilotflame snapshot inspect weights/ --tensors
      pilotflame snapshot inspect s3://bucket/models/llama
    """
    manifest = read_manifest_of(path)
    if as_json:
        listed = [tensor.model_dump(mode="json") for tensor in manifest.tensors] if tensors else None
        return display.print_json(
            {**summary(manifest), **({"tensors": listed} if listed is not None else {})}
        )
    click.echo(f"{path}: {contents(manifest)}")
    touched = "recorded" if manifest.first_touch else "not recorded"
    click.echo(
        f"digest {manifest.digest}, chunks of {display.size(manifest.chunk_bytes)}, order of first touch {touched}\n"
    )
    files = [
        (shard.name, display.size(shard.size_bytes), str(len(shard.chunks))) for shard in manifest.shards
    ]
    files += [(asset.name, display.size(asset.size_bytes), "-") for asset in manifest.assets]
    display.print_table(("file", "size", "chunks"), files)
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
      pilotflame snapshot verify weights/
    """
    from ...snapshot.format.verify import verify as check  # noqa: PLC0415  see create

    manifest = read_manifest_of(path)
    started_s = time.monotonic()
    with display.progress(f"verifying {path}") as progress:
        check(path if path.is_dir() else path.parent, manifest, progress)
    elapsed_s = time.monotonic() - started_s
    if as_json:
        return display.print_json({"verified": True, **summary(manifest), "seconds": elapsed_s})
    click.echo(f"{path} is intact: {contents(manifest)}, {rate(manifest.total_bytes, elapsed_s)}")
    return None


for command in MOVES:
    snapshot.add_command(command)
