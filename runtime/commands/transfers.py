"""The commands that bring weights here, and show what is here: `pilotflame snapshot pull|cache`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import display, options
from .contents import contents, open_place, rate

if TYPE_CHECKING:
    from ...snapshot.caching.stored import Stored
    from ...snapshot.fetching.fetch import FetchStats
    from ...snapshot.format.manifest import Manifest
    from ...snapshot.sources.source import Source

INTERRUPTED = 130
SHOWN_DIGEST_CHARS = 16


def fetching(command: Any) -> Any:
    """`--connections` and `--part-mib`: what is otherwise measured."""
    for option in (
        click.option("--part-mib", type=click.IntRange(1, 1024), help="Bytes asked for at once.  [default: adapted]"),
        click.option("--connections", type=click.IntRange(1, 64), help="How many to keep open.  [default: adapted]"),
    ):  # fmt: skip
        command = option(command)
    return command


@click.command()
@click.argument("url", metavar="URL")
@click.argument("folder", required=False, type=click.Path(file_okay=False, path_type=Path))
@click.option("--into-cache", is_flag=True, help="Into this node's cache, where functions find it.")
@click.option("--force", is_flag=True, help="Overwrite another snapshot, or other files, that are there.")
@fetching
@options.as_json
def pull(
    *,
    url: str,
    folder: Path | None,
    into_cache: bool,
    force: bool,
    connections: int | None,
    part_mib: int | None,
    as_json: bool,
) -> None:
    """Bring the snapshot at URL (s3://, http(s)://, or a folder) into FOLDER, verified.

    What is there already and fits is kept, so after Ctrl-C or a crash the same command goes on from there. FOLDER
    has a manifest once all of it is whole.

    \b
    Examples:
      pilotflame snapshot pull s3://bucket/models/llama weights/
      pilotflame snapshot pull https://host/models/llama --into-cache
    """
    if (folder is None) != into_cache:
        raise click.UsageError("Name the FOLDER to pull into, or say --into-cache.")
    if into_cache and (force or connections or part_mib):
        raise click.UsageError("--force, --connections and --part-mib are for a FOLDER; the cache adapts.")
    started_s = time.monotonic()
    source, manifest = open_snapshot(url)
    where = str(folder) if folder is not None else str(cache_folder())
    with _interruptible(where), display.progress(f"pulling {source.url}") as progress:
        if folder is not None:
            from ...snapshot.caching.download import download  # noqa: PLC0415  pydantic and xxhash take time to import

            stats: FetchStats | None = download(
                manifest, source, folder, force=force, progress=progress, connections=connections,
                part_bytes=_mib(part_mib),
            )  # fmt: skip
        else:
            where, stats = _into_cache(manifest, source, progress)
    elapsed_s = time.monotonic() - started_s
    if as_json:
        return display.print_json(_facts(where, manifest, stats, elapsed_s))
    click.echo(f"pulled {source.url} into {where}: {contents(manifest)}")
    click.echo(_said(manifest, stats, elapsed_s))
    return None


@click.command()
@click.option("--evict", metavar="DIGEST", help="Drop this snapshot; the beginning of its digest will do.")
@options.as_json
def cache(*, evict: str | None, as_json: bool) -> None:
    """List the snapshots in this node's cache, or drop one of them.

    A snapshot that a worker has mapped, or that is being fetched, is not dropped.

    \b
    Examples:
      pilotflame snapshot cache
      pilotflame snapshot cache --evict 3f9c01
    """
    from ...snapshot.caching.cache import Cache  # noqa: PLC0415  see pull
    from ...snapshot.caching.node import node_tiers  # noqa: PLC0415

    found = Cache(node_tiers(cache_folder()))
    if evict is not None:
        digest = _the_one(evict, [stored.digest for stored in found.list()])
        found.evict(digest)
        if as_json:
            return display.print_json({"evicted": digest})
        click.echo(f"{digest[:SHOWN_DIGEST_CHARS]} is evicted")
        return None
    kinds = {tier.root / "snapshots": tier.kind for tier in found.tiers}
    rows = [_row(stored, kinds[stored.folder.parent]) for stored in reversed(found.list())]
    if as_json:
        tiers = [{"tier": tier.kind, "root": str(tier.root), "budget_bytes": tier.budget_bytes, "used_bytes": tier.used_bytes()}
                 for tier in found.tiers]  # fmt: skip
        return display.print_json({"snapshots": rows, "tiers": tiers})
    if rows:
        lines = [(row["digest"][:SHOWN_DIGEST_CHARS], display.size(row["bytes"]), row["tier"],
                  "ready" if row["ready"] else f"{row['percent']} %", _when(row["used_at"])) for row in rows]  # fmt: skip
        display.print_table(("digest", "size", "tier", "state", "last used"), lines)
    for tier in found.tiers:
        spare = tier.spares.total_bytes()
        kept = f", {display.size(spare)} of it spare files, kept for their pages" if spare else ""
        click.echo(
            f"{tier.kind} ({tier.root}): {display.size(tier.used_bytes())} of {display.size(tier.budget_bytes)}{kept}"
        )
    return None


def open_snapshot(url: str) -> tuple[Source, Manifest]:
    """The source at `url`, a URL or a path, and the manifest in it."""
    from ...snapshot.format.manifest import read_manifest  # noqa: PLC0415  see pull
    from ...snapshot.sources.locate import is_remote, open_source  # noqa: PLC0415  see pull

    source = open_place(url.rstrip("/"))[0] if is_remote(url) else open_source(url)
    return source, read_manifest(source)


def cache_folder() -> Path:
    """Where this node's cache lies, by PILOTFLAME_CACHE_DIR or the usual place."""
    from ..settings.gateway_settings import read_gateway_settings  # noqa: PLC0415  see pull

    return read_gateway_settings(os.environ, other_variables=(options.URL_VARIABLE,)).cache_dir


def _mib(count: int | None) -> int | None:
    return None if count is None else count << 20


@contextmanager
def _interruptible(where: str) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        display.say(f"interrupted: what has arrived is kept in {where}; the same command goes on from there")
        raise click.exceptions.Exit(INTERRUPTED) from None


def _into_cache(
    manifest: Manifest, source: Source, progress: display.Progress
) -> tuple[str, FetchStats | None]:
    from ...snapshot.caching.node import node_cache  # noqa: PLC0415  see pull

    with node_cache(cache_folder()).open(manifest, source, progress=progress) as lease:
        lease.wait(copied=True)
        return str(lease.root), lease.stats


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


def _said(manifest: Manifest, stats: FetchStats | None, elapsed_s: float) -> str:
    if stats is None or not stats.fetched_bytes:
        return f"nothing was to be fetched: all of it was there, {elapsed_s:.2f} s"
    kept_bytes = manifest.total_bytes - stats.fetched_bytes
    kept = f", {display.size(kept_bytes)} were there" if kept_bytes else ""
    return (
        f"fetched {display.size(stats.fetched_bytes)}{kept}: {rate(stats.fetched_bytes, stats.seconds)}; "
        f"{counted(stats.connections, 'connection')}, {counted(stats.retries, 'retry', 'retries')}, "
        f"{counted(stats.stalls, 'stall')}"
    )


def counted(count: int, one: str, many: str = "") -> str:
    """`1 stall`, `2 stalls`."""
    return f"{count} {one if count == 1 else many or f'{one}s'}"


def _the_one(begun: str, digests: list[str]) -> str:
    from ...errors import CacheError  # noqa: PLC0415

    found = sorted({digest for digest in digests if digest.startswith(begun)})
    if not begun or not found:
        raise CacheError(
            f"No snapshot in the cache has a digest that begins with {begun!r}.",
            remedy="List them: pilotflame snapshot cache",
        )
    if len(found) > 1:
        raise CacheError(
            f"{len(found)} snapshots in the cache have a digest that begins with {begun!r}.",
            remedy="Write more of it.",
        )
    return found[0]


def _row(stored: Stored, tier: str) -> dict[str, Any]:
    written = stored.size_bytes if stored.ready else _written_bytes(stored.folder / "files")
    return {
        "digest": stored.digest, "bytes": stored.size_bytes, "tier": tier, "ready": stored.ready,
        "percent": 100 * written // max(1, stored.size_bytes), "used_at": stored.used_s,
    }  # fmt: skip


def _written_bytes(folder: Path) -> int:
    """What has ever been written into files that have had their full size, and their room on the disk, from the start."""
    total = 0
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as stream:
                total += sum(end - begin for begin, end in _extents(stream.fileno()))
    return total


def _extents(descriptor: int) -> Iterator[tuple[int, int]]:
    end, size = 0, os.fstat(descriptor).st_size
    while end < size:
        try:
            begin = os.lseek(descriptor, end, os.SEEK_DATA)
        except OSError:  # ENXIO: nothing but holes from here on
            return
        end = os.lseek(descriptor, begin, os.SEEK_HOLE)
        yield begin, end


def _when(at_s: float) -> str:
    return f"{datetime.fromtimestamp(at_s, UTC).astimezone():%Y-%m-%d %H:%M:%S}"


COMMANDS = (pull, cache)
