"""The group `pilotflame snapshot`, and its commands `create|inspect|convert`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from ....errors import SnapshotError
from ....snapshot.extras import needs
from ....snapshot.format.create import create as make_manifest
from ....snapshot.format.digests import AlgorithmName
from ....snapshot.format.manifest import MANIFEST_NAME
from ....snapshot.sources.source import Writable
from ..client import display, options
from ..client.snapshots import (
    contents,
    digest_option,
    facts,
    folder_of,
    open_place,
    print_rate,
    read_manifest_of,
    url_or_path,
)
from .lazy_group import LazyGroup

LARGEST_TENSORS = 10


@click.group(
    cls=LazyGroup,
    lazy={
        "cache": ("snapshot_transfer", "List the snapshots in this node's cache, or drop one of them."),
        "prefixes": (
            "snapshot_prefixes",
            "Compute beginnings that many prompts of MODEL share, and write them to a snapshot.",
        ),
        "pull": ("snapshot_transfer", "Copy the snapshot at URL into FOLDER, verified."),
        "push": (
            "snapshot_transfer",
            "Copy the snapshot in FOLDER to DESTINATION: S3, a tag in an OCI registry, or another folder.",
        ),
        "record": ("snapshot_record", "Record in which order a function first touches its tensors."),
        "sign": (
            "snapshot_sign",
            "Sign the manifest of the snapshot at PATH_OR_URL, and write the signature beside it.",
        ),
        "verify": ("snapshot_sign", "Read every byte of the snapshot at PATH and compare its digests."),
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
@digest_option
@click.option("--output", "-o", type=click.Path(path_type=Path), help="Write the manifest to this file.")
@options.as_json
def create(
    path: str | Path, chunk_mib: int, digests: AlgorithmName, output: Path | None, as_json: bool
) -> None:
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
        manifest = make_manifest(
            source, file=file, chunk_bytes=chunk_mib << 20, algorithm=digests, progress=progress
        )
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
    display.echo(f"{path}: {contents(manifest)}")
    how = f"chunks of {chunk_size} with digests of {manifest.algorithm}"
    display.echo(f"digest {manifest.digest}, {how}, order of first touch {touched}\n")
    chunks = {shard.name: str(len(shard.chunks)) for shard in manifest.shards}
    rows = [(file.name, display.size(file.size_bytes), chunks.get(file.name, "-")) for file in manifest.files]
    display.print_table(("file", "size", "chunks"), rows)
    largest = sorted(manifest.tensors, key=lambda tensor: -tensor.size_bytes)[:LARGEST_TENSORS]
    details = [
        (found.name, found.dtype, "×".join(map(str, found.shape)) or "scalar", display.size(found.size_bytes))
        for found in (manifest.tensors if tensors else largest)
    ]
    head = ("tensor" if tensors else "largest tensors", "type", "shape", "size")
    return display.print_table(head, details, apart=True)


@snapshot.command()
@click.argument("path_in", metavar="IN", type=click.Path(exists=True, path_type=Path))
@click.argument("path_out", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--dtype", type=click.Choice(["bf16", "fp16", "fp32"]), help="Cast floats of 16 to 64 bits.")
@click.option(
    "--to", type=click.Choice(["safetensors", "tensorizer"]), default="safetensors",
    help="What to write: a folder that is a snapshot, or one .tensors file.",
)  # fmt: skip
@click.option("--shard-mb", type=click.IntRange(min=1), default=5000, help="Size of the files.")
@digest_option
@options.as_json
def convert(
    *, path_in: Path, path_out: Path, dtype: str | None, to: str, shard_mb: int, digests: AlgorithmName,
    as_json: bool,
) -> None:  # fmt: skip
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
        from ....snapshot.converting import convert as converter  # noqa: PLC0415

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
                path_in, path_out, dtype=dtype, shard_bytes=shard_bytes, algorithm=digests, progress=progress
            )
            found, text = found | facts(manifest), contents(manifest)
    print_rate(found, f"wrote {path_out}: {text}", found["bytes"], started_s, as_json=as_json)
