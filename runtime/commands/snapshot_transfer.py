"""The commands that copy snapshots: `pilotflame snapshot push|pull`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from ...snapshot.caching.download import download
from ...snapshot.caching.node import learned_file, node_cache
from ...snapshot.converting.push import push as push_files
from ...snapshot.fetching.fetch import FetchStats
from ...snapshot.format.manifest import Manifest, read_manifest
from ...snapshot.format.verify import verify as verify_files
from ...snapshot.sources.locate import is_remote, open_source
from ...snapshot.sources.source import Source
from . import display, exit_codes, options
from .snapshot import contents, folder_of, open_place, rate, read_manifest_of
from .snapshot_cache import cache_folder


@click.command()
@click.argument("folder", type=click.Path(exists=True, path_type=Path))
@click.argument("destination", metavar="DESTINATION")
@click.option("--force", is_flag=True, help="Overwrite another snapshot at DESTINATION.")
@options.as_json
def push(folder: Path, destination: str, force: bool, as_json: bool) -> None:
    """Copy the snapshot in FOLDER to DESTINATION, an s3:// prefix or another folder.

    Verifies the files, sends those that are missing there, and the manifest last: a prefix with a manifest is
    complete.

    \b
    Example:
      pilotflame snapshot push weights/ s3://bucket/models/llama
    """
    manifest, root = read_manifest_of(folder), folder_of(folder)
    with display.byte_progress(f"verifying {folder}") as progress:
        verify_files(root, manifest, progress)
    started_s = time.monotonic()
    with display.byte_progress(f"pushing to {destination}") as progress:
        target = open_source(destination)
        pushed = push_files(root, manifest, target, force=force, verified=True, progress=progress)
    elapsed_s = time.monotonic() - started_s
    facts = {
        "destination": destination,
        "sent_files": pushed.sent_files,
        "sent_bytes": pushed.sent_bytes,
        "kept_files": pushed.kept_files,
        "kept_bytes": pushed.kept_bytes,
        "digest": manifest.digest,
        "seconds": elapsed_s,
    }
    kept = f", {display.size(pushed.kept_bytes)} were there" if pushed.kept_files else ""
    sent = f"{display.size(pushed.sent_bytes)} in {display.counted(pushed.sent_files, 'file')}"
    text = f"pushed to {destination}: {sent}{kept}, {rate(pushed.sent_bytes, elapsed_s)}"
    display.print_result(facts, text, as_json=as_json)


def fetching(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --connections and --part-mib, which replace measured values."""
    part = click.option(
        "--part-mib", type=click.IntRange(1, 1024), help="Size of one request.  [default: adapted]"
    )
    many = click.option(
        "--connections", type=click.IntRange(1, 64), help="How many to keep open.  [default: adapted]"
    )
    return many(part(command))


@click.command()
@click.argument("url", metavar="URL")
@click.argument("folder", required=False, type=click.Path(file_okay=False, path_type=Path))
@click.option("--into-cache", is_flag=True, help="Into this node's cache, where functions find it.")
@click.option("--force", is_flag=True, help="Overwrite another snapshot, or other files, in FOLDER.")
@fetching
@options.as_json
def pull(
    *, url: str, folder: Path | None, into_cache: bool, force: bool, connections: int | None, part_mib: int | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Copy the snapshot at URL into FOLDER, verified. URL begins with s3:// or http(s)://, or is a folder.

    Valid files and parts of files in FOLDER are kept: after Ctrl-C or a crash the same command continues there. The
    manifest is written last, when everything else is complete.

    \b
    Examples:
      pilotflame snapshot pull s3://bucket/models/llama weights/
      pilotflame snapshot pull https://host/models/llama --into-cache
    """
    if (folder is None) != into_cache:
        raise click.UsageError("Name the FOLDER to pull into, or pass --into-cache.")
    if into_cache and (force or connections or part_mib):
        raise click.UsageError(
            "--force, --connections and --part-mib work only with a FOLDER; the cache adapts."
        )
    started_s = time.monotonic()
    source, manifest = open_snapshot(url)
    node = cache_folder()
    with _interruptible(folder or node), display.byte_progress(f"pulling {source.url}") as progress:
        if folder is not None:
            where = str(folder)
            stats: FetchStats | None = download(
                manifest, source, folder, force=force, progress=progress, connections=connections,
                part_bytes=part_mib and part_mib << 20, learned=learned_file(node) if node.is_dir() else None,
            )  # fmt: skip
        else:
            with node_cache(node).open(manifest, source, progress=progress) as lease:
                lease.wait(copied=True)
                where, stats = str(lease.root), lease.stats
    elapsed_s = time.monotonic() - started_s
    if as_json:
        return display.print_json(_facts(where, manifest, stats, elapsed_s))
    click.echo(f"pulled {source.url} into {where}: {contents(manifest)}")
    return click.echo(_fetched(manifest, stats, elapsed_s))


COMMANDS = (push, pull)


def open_snapshot(url: str) -> tuple[Source, Manifest]:
    """Return the source at a URL or path, and its manifest."""
    source = open_place(url.rstrip("/"))[0] if is_remote(url) else open_source(url)
    return source, read_manifest(source)


@contextmanager
def _interruptible(where: Path) -> Iterator[None]:
    """On Ctrl-C in the block, say that the same command continues, and exit."""
    try:
        yield
    except KeyboardInterrupt:
        display.say(
            f"interrupted: what has arrived is kept in {where}; the same command continues from there"
        )
        raise click.exceptions.Exit(exit_codes.INTERRUPTED) from None


def _facts(where: str, manifest: Manifest, stats: FetchStats | None, elapsed_s: float) -> dict[str, Any]:
    fetched = 0 if stats is None else stats.fetched_bytes
    facts = {
        "path": where, "digest": manifest.digest, "bytes": manifest.total_bytes, "fetched_bytes": fetched,
        "kept_bytes": manifest.total_bytes - fetched, "seconds": elapsed_s,
    }  # fmt: skip
    if stats is None:
        return facts
    return {
        **facts, "received_bytes": stats.received_bytes, "connections": stats.connections,
        "requests": stats.requests, "retries": stats.retries, "stalls": stats.stalls,
    }  # fmt: skip


def _fetched(manifest: Manifest, stats: FetchStats | None, elapsed_s: float) -> str:
    if stats is None or not stats.fetched_bytes:
        return f"nothing to fetch: all of it was there, {elapsed_s:.2f} s"
    kept_bytes = manifest.total_bytes - stats.fetched_bytes
    kept = f", {display.size(kept_bytes)} were there" if kept_bytes else ""
    return (
        f"fetched {display.size(stats.fetched_bytes)}{kept}: {rate(stats.fetched_bytes, stats.seconds)}; "
        f"{display.counted(stats.connections, 'connection')}, {display.counted(stats.retries, 'retry', 'retries')}, "
        f"{display.counted(stats.stalls, 'stall')}"
    )
