"""The commands that write weights elsewhere: `pilotflame snapshot push|convert`."""

from __future__ import annotations

import time
from pathlib import Path

import click

from . import display, options
from .contents import contents, files_counted, rate, read_manifest_of, summary


@click.command()
@click.argument("folder", type=click.Path(exists=True, path_type=Path))
@click.argument("destination", metavar="DESTINATION")
@click.option("--force", is_flag=True, help="Overwrite another snapshot that is there.")
@options.as_json
def push(folder: Path, destination: str, force: bool, as_json: bool) -> None:
    """Copy the snapshot in FOLDER to DESTINATION: an s3:// prefix, or another folder.

    Verifies the files, sends what is not there yet, and the manifest last: a prefix that has one is whole.

    \b
    Example:
      pilotflame snapshot push weights/ s3://bucket/models/llama
    """
    from ...snapshot.converting.push import push as send  # noqa: PLC0415
    from ...snapshot.format.verify import verify as check  # noqa: PLC0415
    from ...snapshot.sources.locate import open_source  # noqa: PLC0415  see create

    manifest = read_manifest_of(folder)
    root = folder if folder.is_dir() else folder.parent
    with display.progress(f"verifying {folder}") as progress:
        check(root, manifest, progress)
    started_s = time.monotonic()
    with display.progress(f"pushing to {destination}") as progress:
        pushed = send(root, manifest, open_source(destination), force=force, verified=True, progress=progress)
    elapsed_s = time.monotonic() - started_s
    if as_json:
        facts = {
            "destination": destination,
            "sent_files": pushed.sent_files,
            "sent_bytes": pushed.sent_bytes,
            "kept_files": pushed.kept_files,
            "kept_bytes": pushed.kept_bytes,
        }
        return display.print_json({**facts, "digest": manifest.digest, "seconds": elapsed_s})
    kept = f", {display.size(pushed.kept_bytes)} were there" if pushed.kept_files else ""
    sent = f"{display.size(pushed.sent_bytes)} in {files_counted(pushed.sent_files)}"
    click.echo(f"pushed to {destination}: {sent}{kept}, {rate(pushed.sent_bytes, elapsed_s)}")
    return None


@click.command()
@click.argument("path_in", metavar="IN", type=click.Path(exists=True, path_type=Path))
@click.argument("path_out", metavar="OUT", type=click.Path(path_type=Path))
@click.option(
    "--dtype", type=click.Choice(["bf16", "fp16", "fp32"]), help="Cast what floats in 16 to 64 bits."
)
@click.option(
    "--to", "kind", type=click.Choice(["safetensors", "tensorizer"]), default="safetensors", show_default=True,
    help="What to write: a folder that is a snapshot, or one .tensors file.",
)  # fmt: skip
@click.option(
    "--shard-mb",
    type=click.IntRange(min=1),
    default=5000,
    show_default=True,
    help="Size of the files written.",
)
@options.as_json
def convert(
    path_in: Path, path_out: Path, dtype: str | None, kind: str, shard_mb: int, as_json: bool
) -> None:
    """Make the snapshot OUT of IN: a Hugging Face folder, or a .pt, .pth, .bin, .tensors or .safetensors file.

    Code in a pickle is refused, never run. OUT is there whole, or not at all.

    \b
    Examples:
      pilotflame snapshot convert downloads/llama weights/ --dtype bf16
      pilotflame snapshot convert weights/ llama.tensors --to tensorizer
    """
    from ...snapshot.converting.convert import convert as make  # noqa: PLC0415  torch takes seconds to import
    from ...snapshot.converting.convert import convert_to_tensorizer  # noqa: PLC0415

    if kind == "tensorizer" and dtype is not None:
        raise click.UsageError("--dtype casts into safetensors only; convert twice.")
    started_s = time.monotonic()
    with display.progress(f"converting {path_in}") as progress:
        if kind == "tensorizer":
            size_bytes = convert_to_tensorizer(path_in, path_out, progress=progress)
            facts, said = {"bytes": size_bytes}, display.size(size_bytes)
        else:
            manifest = make(
                path_in, path_out, dtype=dtype, shard_bytes=shard_mb * 1_000_000, progress=progress
            )
            size_bytes, facts, said = manifest.total_bytes, summary(manifest), contents(manifest)
    elapsed_s = time.monotonic() - started_s
    if as_json:
        return display.print_json({"path": str(path_out), **facts, "seconds": elapsed_s})
    click.echo(f"wrote {path_out}: {said}, {rate(size_bytes, elapsed_s)}")
    return None


COMMANDS = (push, convert)
