"""The group `pilotflame snapshot`, and its commands `create|inspect|verify|convert`."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import click

from ...errors import ManifestError, SnapshotError
from ...snapshot.extras import needs
from ...snapshot.format.create import create as make_manifest
from ...snapshot.format.discover import find_manifest
from ...snapshot.format.manifest import MANIFEST_NAME, Manifest
from ...snapshot.format.verify import verify as verify_files
from ...snapshot.sources.locate import is_remote, open_source, split_file, weights_file
from ...snapshot.sources.source import Source, Writable
from ...snapshot.sources.variables import WEB, own_variables
from ..client import display, options
from .lazy_group import LazyGroup

LARGEST_TENSORS = 10
MANIFEST_SUFFIX = ".json"


# -- shared by the commands about snapshots


def url_or_path(text: str) -> str | Path:
    """Convert an argument that is a URL, or the path of an existing file or folder."""
    return text.rstrip("/") if is_remote(text) else Path(str(click.Path(exists=True)(text)))


def of_caller() -> dict[str, str]:
    """Return this process's variables for sources on the web. For a function, its secrets hold such variables."""
    return own_variables(os.environ, WEB)


def open_place(url: str) -> tuple[Source, str | None]:
    """Return the source at a URL. If the URL names weights or a manifest, also return the name of this file."""
    return open_source(url, of_caller()), split_file(url)[1]


def folder_of(path: Path) -> Path:
    """Return the folder of a snapshot. `path` is this folder or a file in it."""
    return path if path.is_dir() else path.parent


def read_manifest_of(path: str | Path) -> Manifest:
    """Return a snapshot's manifest. `path` is the snapshot's folder or URL, a weights file or the manifest.

    Raise ManifestError if the snapshot has no manifest.
    """
    if isinstance(path, str):
        return find_manifest(open_source(path, of_caller()), weights_file(path))
    file = path if path.suffix == MANIFEST_SUFFIX else folder_of(path) / MANIFEST_NAME
    if not file.is_file():
        remedy = f"Make one: pilotflame snapshot create {path}"
        raise ManifestError(f"{path} has no manifest ({file.name}).", remedy=remedy)
    return Manifest.read(file)


def facts(manifest: Manifest) -> dict[str, Any]:
    """Return the facts that --json prints about a snapshot."""
    return {
        "digest": manifest.digest,
        "bytes": manifest.total_bytes,
        "chunk_bytes": manifest.chunk_bytes,
        "shards": [{"name": shard.name, "bytes": shard.size_bytes} for shard in manifest.shards],
        "tensor_count": len(manifest.tensors),
        "dtypes": dict(Counter(tensor.dtype for tensor in manifest.tensors)),
        "aliases": dict(manifest.aliases),
        "assets": [{"name": asset.name, "bytes": asset.size_bytes} for asset in manifest.assets],
        "first_touch_recorded": bool(manifest.first_touch),
    }


def contents(manifest: Manifest) -> str:
    """Return a snapshot's size, files and tensors in one line."""
    types = Counter(tensor.dtype for tensor in manifest.tensors)
    kinds = ", ".join(f"{count} {dtype}" for dtype, count in types.most_common())
    assets = f" and {display.counted(len(manifest.assets), 'asset')}" if manifest.assets else ""
    files = f"{display.counted(len(manifest.shards), 'file')}{assets}"
    tensors = display.counted(len(manifest.tensors), "tensor")
    return f"{display.size(manifest.total_bytes)} in {files}, {tensors} ({kinds})"


def rate(size_bytes: float, elapsed_s: float) -> str:
    return f"{elapsed_s:.2f} s, {display.size(size_bytes / max(elapsed_s, 1e-6))}/s"


def print_rate(facts: dict[str, Any], text: str, size_bytes: int, started_s: float, *, as_json: bool) -> None:
    """Print the result of a command that has processed `size_bytes` since `started_s`, with the time and the rate."""
    elapsed_s = time.monotonic() - started_s
    text = f"{text}, {rate(size_bytes, elapsed_s)}"
    display.print_result({**facts, "seconds": elapsed_s}, text, as_json=as_json)


# -- commands


@click.group(
    cls=LazyGroup,
    lazy={
        "cache": ("snapshot_transfer", "List the snapshots in this node's cache, or drop one of them."),
        "prefixes": (
            "snapshot_prefixes",
            "Compute beginnings that many prompts of MODEL share, and write them to a snapshot.",
        ),
        "pull": ("snapshot_transfer", "Copy the snapshot at URL into FOLDER, verified."),
        "push": ("snapshot_transfer", "Copy the snapshot in FOLDER to DESTINATION, S3 or another folder."),
        "record": ("snapshot_record", "Record in which order a function first touches its tensors."),
    },
)
def snapshot() -> None:
    """Create, inspect, verify, copy and convert snapshots of weights.

    A snapshot is a manifest (pilotflame.manifest.json) beside ordinary safetensors files.

    Example: pilotflame snapshot create weights/
    """


@snapshot.command()
@click.argument("path", metavar="PATH_OR_URL", type=url_or_path)
@click.option("--chunk-mib", type=click.IntRange(1, 1024), default=4, help="Unit of verification.")
@click.option("--output", "-o", type=click.Path(path_type=Path), help="Write the manifest to this file.")
@options.as_json
def create(path: str | Path, chunk_mib: int, output: Path | None, as_json: bool) -> None:
    """Write the manifest of PATH_OR_URL: a folder or an s3:// prefix with safetensors, or one file.

    Reads every byte once for the digests, and copies nothing. For an s3:// prefix, uploads only the manifest. Replaces
    an existing manifest.

    \b
    Examples:
      pilotflame snapshot create weights/
      pilotflame snapshot create s3://bucket/models/llama
    """
    started_s = time.monotonic()
    source, file = open_place(path) if isinstance(path, str) else (path, None)
    with display.progress(f"reading {path}") as progress:
        manifest = make_manifest(source, file=file, chunk_bytes=chunk_mib << 20, progress=progress)
    if output is not None or isinstance(source, Path):
        file = str(output or folder_of(Path(path)) / MANIFEST_NAME)
        manifest.write(Path(file))
    elif isinstance(source, Writable):
        file = f"{source.url}/{MANIFEST_NAME}"
        source.put(MANIFEST_NAME, manifest.to_json())
    else:
        remedy = "Write the manifest to a file with --output, and upload it there."
        raise SnapshotError(f"{source.url} cannot be written to.", remedy=remedy)
    found, text = {"manifest": file, **facts(manifest)}, f"wrote {file}: {contents(manifest)}"
    print_rate(found, text, manifest.total_bytes, started_s, as_json=as_json)


@snapshot.command()
@click.argument("path", metavar="PATH_OR_URL", type=url_or_path)
@click.option("--tensors", is_flag=True, help="List every tensor, not only the largest.")
@options.as_json
def inspect(path: str | Path, tensors: bool, as_json: bool) -> None:
    """Show the files, tensors, types and sizes of the snapshot at PATH_OR_URL. Reads only the manifest.

    If a URL has no manifest, the command reads the headers of the safetensors files instead.

    \b
    Examples:
      pilotflame snapshot inspect weights/ --tensors
      pilotflame snapshot inspect s3://bucket/models/llama
    """
    manifest = read_manifest_of(path)
    if as_json:
        listed = manifest.model_dump(mode="json", include={"tensors"}) if tensors else {}
        return display.print_json({**facts(manifest), **listed})
    touched = "recorded" if manifest.first_touch else "not recorded"
    chunk_size = display.size(manifest.chunk_bytes)
    click.echo(f"{path}: {contents(manifest)}")
    click.echo(f"digest {manifest.digest}, chunks of {chunk_size}, order of first touch {touched}\n")
    chunks = {shard.name: str(len(shard.chunks)) for shard in manifest.shards}
    rows = [(file.name, display.size(file.size_bytes), chunks.get(file.name, "-")) for file in manifest.files]
    display.print_table(("file", "size", "chunks"), rows)
    click.echo()
    largest = sorted(manifest.tensors, key=lambda tensor: -tensor.size_bytes)[:LARGEST_TENSORS]
    details = [
        (found.name, found.dtype, "×".join(map(str, found.shape)) or "scalar", display.size(found.size_bytes))
        for found in (manifest.tensors if tensors else largest)
    ]
    return display.print_table(("tensor" if tensors else "largest tensors", "type", "shape", "size"), details)


@snapshot.command()
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@options.as_json
def verify(path: Path, as_json: bool) -> None:
    """Read every byte of the snapshot at PATH and compare its digests.

    If the snapshot is damaged, the error names the first damaged file, chunk and tensors, and the exit code is 1.

    Example: pilotflame snapshot verify weights/
    """
    manifest = read_manifest_of(path)
    started_s = time.monotonic()
    with display.progress(f"verifying {path}") as progress:
        verify_files(folder_of(path), manifest, progress)
    found, text = {"verified": True, **facts(manifest)}, f"{path} is intact: {contents(manifest)}"
    print_rate(found, text, manifest.total_bytes, started_s, as_json=as_json)


@snapshot.command()
@click.argument("path_in", metavar="IN", type=click.Path(exists=True, path_type=Path))
@click.argument("path_out", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--dtype", type=click.Choice(["bf16", "fp16", "fp32"]), help="Cast floats of 16 to 64 bits.")
@click.option(
    "--to", type=click.Choice(["safetensors", "tensorizer"]), default="safetensors",
    help="What to write: a folder that is a snapshot, or one .tensors file.",
)  # fmt: skip
@click.option("--shard-mb", type=click.IntRange(min=1), default=5000, help="Size of the files.")
@options.as_json
def convert(path_in: Path, path_out: Path, dtype: str | None, to: str, shard_mb: int, as_json: bool) -> None:
    """Convert IN to the snapshot OUT.

    IN is a Hugging Face folder, or a .pt, .pth, .bin, .tensors or .safetensors file. Code in a pickle is
    refused and never run. OUT is written completely, or not at all.

    \b
    Examples:
      pilotflame snapshot convert downloads/llama weights/ --dtype bf16
      pilotflame snapshot convert weights/ llama.tensors --to tensorizer
    """
    # The import of torch takes seconds, and the other commands do not need it.
    with needs("The conversion", "torch", "safetensors", "numpy"):
        from ...snapshot.converting import convert as converter  # noqa: PLC0415

    if to == "tensorizer" and dtype is not None:
        raise click.UsageError("--dtype casts to safetensors only; convert twice.")
    started_s = time.monotonic()
    with display.progress(f"converting {path_in}") as progress:
        found: dict[str, Any] = {"path": str(path_out)}
        if to == "tensorizer":
            found["bytes"] = converter.convert_to_tensorizer(path_in, path_out, progress=progress)
            text = display.size(found["bytes"])
        else:
            shard_bytes = shard_mb * 1_000_000
            manifest = converter.convert(
                path_in, path_out, dtype=dtype, shard_bytes=shard_bytes, progress=progress
            )
            found, text = found | facts(manifest), contents(manifest)
    print_rate(found, f"wrote {path_out}: {text}", found["bytes"], started_s, as_json=as_json)
