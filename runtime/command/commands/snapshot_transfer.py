"""The commands that copy snapshots, and show copies on this node: `pilotflame snapshot push|pull|cache`."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from ....errors import CacheError
from ....snapshot.caching.cache import Cache
from ....snapshot.caching.download import download
from ....snapshot.caching.node import Budgets, node_cache, node_tiers
from ....snapshot.caching.stored import Stored
from ....snapshot.converting.push import push as push_files
from ....snapshot.fetching.fetch import FetchStats
from ....snapshot.format.create import create as make_manifest
from ....snapshot.format.discover import find_manifest
from ....snapshot.format.manifest import MANIFEST_NAME, Manifest, read_manifest
from ....snapshot.format.verify import verify as verify_files
from ....snapshot.sources.locate import is_remote, open_source, weights_file
from ....snapshot.sources.realm import realm_of
from ....snapshot.sources.source import Pinnable
from ...ground.settings.gateway_settings import GatewaySettings
from ..client import display, exit_codes, options
from ..client.snapshots import contents, folder_of, of_caller, print_rate, rate, read_manifest_of

SHOWN_DIGEST_CHARS = 16


@click.command()
@click.argument("folder", type=click.Path(exists=True, path_type=Path))
@click.argument("destination", metavar="DESTINATION")
@click.option("--force", is_flag=True, help="Overwrite another snapshot at DESTINATION.")
@options.as_json
def push(folder: Path, destination: str, force: bool, as_json: bool) -> None:
    """Copy the snapshot in FOLDER to DESTINATION: S3, a tag in an OCI registry, or another folder.

    If FOLDER has no manifest, makes it. Otherwise verifies the files. Sends the files that DESTINATION lacks, and the
    manifest last, so a prefix with a manifest is complete.

    \b
    Examples:
      pilotflame snapshot push weights/ s3://bucket/models/llama
      pilotflame snapshot push weights/ oci://ghcr.io/org/llama:v1
    """
    manifest, root = _verified_manifest(folder), folder_of(folder)
    started_s = time.monotonic()
    with display.progress(f"pushing to {destination}") as progress:
        target = open_source(destination)
        pushed = push_files(root, manifest, target, force=force, verified=True, progress=progress)
    if isinstance(target, Pinnable):
        destination = target.pinned()
    facts = {"destination": destination, **asdict(pushed), "digest": manifest.digest}
    kept = f", {display.size(pushed.kept_bytes)} were there" if pushed.kept_files else ""
    sent = f"{display.size(pushed.sent_bytes)} in {display.counted(pushed.sent_files, 'file')}"
    text = f"pushed to {destination}: {sent}{kept}"
    print_rate(facts, text, pushed.sent_bytes, started_s, as_json=as_json)


def _verified_manifest(folder: Path) -> Manifest:
    """Return the manifest of the snapshot in `folder`. If the manifest exists, verify the files. Otherwise make the manifest."""
    if folder.is_dir() and not (file := folder / MANIFEST_NAME).exists():
        with display.progress(f"reading {folder}") as progress:
            manifest = make_manifest(folder, progress=progress)
        manifest.write(file)
        return manifest
    manifest = read_manifest_of(folder)
    with display.progress(f"verifying {folder}") as progress:
        verify_files(folder_of(folder), manifest, progress)
    return manifest


@click.command()
@click.argument("url", metavar="URL")
@click.argument("folder", required=False, type=click.Path(file_okay=False, path_type=Path))
@click.option("--into-cache", is_flag=True, help="Into this node's cache, where functions find it.")
@click.option("--force", is_flag=True, help="Overwrite another snapshot, or other files, in FOLDER.")
@click.option("--connections", type=click.IntRange(1, 64), help="How many to open.  [default: adapted]")
@click.option("--part-mib", type=click.IntRange(1, 1024), help="Size of a request.  [default: adapted]")
@options.as_json
def pull(
    *, url: str, folder: Path | None, into_cache: bool, force: bool, connections: int | None,
    part_mib: int | None, as_json: bool,
) -> None:  # fmt: skip
    """Copy the snapshot at URL into FOLDER, verified. URL begins with s3://, hf://, oci:// or http(s)://, or is a folder.

    Valid files and parts of files in FOLDER are kept. So after Ctrl-C or a crash, the same command continues where it
    stopped. The manifest is written last, when everything else is complete. If URL has no manifest, the manifest is
    computed from the bytes as they arrive.

    \b
    Examples:
      pilotflame snapshot pull s3://bucket/models/llama weights/
      pilotflame snapshot pull https://host/models/llama --into-cache
    """
    if (folder is None) != into_cache:
        raise click.UsageError("Name the FOLDER to pull into, or pass --into-cache.")
    if into_cache and (force or connections or part_mib):
        raise click.UsageError("--force, --connections and --part-mib work only with a FOLDER.")
    started_s = time.monotonic()
    source = open_source(url, of_caller())
    manifest = find_manifest(source, weights_file(url)) if is_remote(url) else read_manifest(source)
    settings = options.gateway_settings()
    node = settings.cache_dir
    kept = f"interrupted: what has arrived is kept in {folder or node}; the same command continues there"
    with exit_codes.on_interrupt(kept), display.progress(f"pulling {source.url}") as progress:
        if folder is not None:
            where = str(folder)
            stats: FetchStats | None = download(
                manifest, source, folder, force=force, progress=progress, connections=connections,
                part_bytes=part_mib and part_mib << 20,
            )  # fmt: skip
        else:
            manifest = manifest.with_realm(realm_of(url, of_caller()))
            with node_cache(node, _budgets(settings)).open(manifest, source, progress=progress) as lease:
                lease.wait(copied=True)
                where, stats = str(lease.root), lease.stats
    elapsed_s = time.monotonic() - started_s
    if as_json:
        return display.print_json(_pull_facts(where, manifest, stats, elapsed_s))
    display.echo(f"pulled {source.url} into {where}: {contents(manifest)}")
    return display.echo(_fetched(manifest, stats, elapsed_s))


def _budgets(settings: GatewaySettings) -> Budgets:
    return Budgets(settings.cache_memory_mb, settings.cache_disk_mb)


@click.command()
@click.option("--evict", metavar="DIGEST", help="Drop this snapshot; the beginning of its digest is enough.")
@options.as_json
def cache(*, evict: str | None, as_json: bool) -> None:
    """List the snapshots in this node's cache, or drop one of them.

    The command does not drop a snapshot that a worker has mapped or that is being fetched.

    Example: pilotflame snapshot cache --evict 3f9c01
    """
    settings = options.gateway_settings()
    found = Cache(node_tiers(settings.cache_dir, _budgets(settings)))
    if evict is not None:
        digest = _full_digest(evict, {stored.digest for stored in found.list()})
        found.evict(digest)
        text = f"{digest[:SHOWN_DIGEST_CHARS]} is evicted"
        return display.print_result({"evicted": digest}, text, as_json=as_json)
    usage = [(tier, tier.space.used_bytes()) for tier in found.tiers]
    kinds = {tier.root / "snapshots": tier.kind for tier in found.tiers}
    facts = [_cache_facts(stored, kinds[stored.folder.parent]) for stored in reversed(found.list())]
    if as_json:
        tiers = [
            {"tier": tier.kind, "root": str(tier.root), "budget_bytes": tier.budget_bytes, "used_bytes": used}
            for tier, used in usage
        ]
        return display.print_json({"snapshots": facts, "tiers": tiers})
    if facts:
        display.print_table(("digest", "size", "tier", "state", "last used"), list(map(_cache_row, facts)))
    for tier, used in usage:
        spare = tier.space.spares.total_bytes()
        kept = f", {display.size(spare)} of it spare files, kept for their pages" if spare else ""
        used_of = f"{display.size(used)} of {display.size(tier.budget_bytes)}"
        display.echo(f"{tier.kind} ({tier.root}): {used_of}{kept}")
    return None


def _pull_facts(where: str, manifest: Manifest, stats: FetchStats | None, elapsed_s: float) -> dict[str, Any]:
    fetched = {"fetched_bytes": 0} if stats is None else asdict(stats)
    kept_bytes = manifest.total_bytes - fetched["fetched_bytes"]
    return {
        "path": where, "digest": manifest.digest, "bytes": manifest.total_bytes, **fetched,
        "kept_bytes": kept_bytes, "seconds": elapsed_s,
    }  # fmt: skip


def _fetched(manifest: Manifest, stats: FetchStats | None, elapsed_s: float) -> str:
    if stats is None or not stats.fetched_bytes:
        return f"nothing to fetch: all of it was there, {elapsed_s:.2f} s"
    kept_bytes = manifest.total_bytes - stats.fetched_bytes
    kept = f", {display.size(kept_bytes)} were there" if kept_bytes else ""
    stalls = display.counted(stats.stalls, "stall")
    retries = display.counted(stats.retries, "retry", "retries")
    how = f"{display.counted(stats.connections, 'connection')}, {retries}, {stalls}"
    fetched = f"{display.size(stats.fetched_bytes)}{kept}"
    return f"fetched {fetched}: {rate(stats.fetched_bytes, stats.seconds)}; {how}"


def _full_digest(beginning: str, digests: set[str]) -> str:
    found = [digest for digest in digests if beginning and digest.startswith(beginning)]
    if len(found) == 1:
        return found[0]
    remedy = (
        "Give more of the digest: pilotflame snapshot cache --json"
        if found
        else "List them: pilotflame snapshot cache"
    )
    matching = f"{len(found) or 'No'} snapshots in the cache have a digest that begins with {beginning!r}."
    raise CacheError(matching, remedy=remedy)


def _cache_facts(stored: Stored, tier: str) -> dict[str, Any]:
    written = stored.size_bytes if stored.ready else _written_bytes(stored.folder / "files")
    return {
        "digest": stored.digest, "bytes": stored.size_bytes, "tier": tier, "ready": stored.ready,
        "percent": 100 * written // max(1, stored.size_bytes), "used_at": stored.used_s,
    }  # fmt: skip


def _cache_row(facts: dict[str, Any]) -> tuple[str, ...]:
    digest, state = facts["digest"][:SHOWN_DIGEST_CHARS], f"{facts['percent']} %"
    used_at = datetime.fromtimestamp(facts["used_at"], UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    return digest, display.size(facts["bytes"]), facts["tier"], "ready" if facts["ready"] else state, used_at


def _written_bytes(folder: Path) -> int:
    """Return the number of bytes that were written to the files in `folder`.

    The sizes of the files and their numbers of blocks do not show this: files have their full size and all blocks from the start.
    """
    total = 0
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            # SEEK_DATA raises OSError (ENXIO) if the rest of the file is a hole.
            with path.open("rb", buffering=0) as file, suppress(OSError):
                end, size = 0, path.stat().st_size
                while end < size:
                    begin = file.seek(end, os.SEEK_DATA)
                    end = file.seek(begin, os.SEEK_HOLE)
                    total += end - begin
    return total
