"""The command about this node's cache of snapshots: `pilotflame snapshot cache`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from ...errors import CacheError
from ...snapshot.caching.cache import Cache
from ...snapshot.caching.node import node_tiers
from ...snapshot.caching.stored import Stored
from . import display, options

SHOWN_DIGEST_CHARS = 16


@click.command()
@click.option("--evict", metavar="DIGEST", help="Drop this snapshot; the beginning of its digest is enough.")
@options.as_json
def cache(*, evict: str | None, as_json: bool) -> None:
    """List the snapshots in this node's cache, or drop one of them.

    A snapshot that a worker has mapped, or that is being fetched, is not dropped.

    \b
    Examples:
      pilotflame snapshot cache
      pilotflame snapshot cache --evict 3f9c01
    """
    found = Cache(node_tiers(cache_folder()))
    if evict is not None:
        digest = _full_digest(evict, [stored.digest for stored in found.list()])
        found.evict(digest)
        text = f"{digest[:SHOWN_DIGEST_CHARS]} is evicted"
        return display.print_result({"evicted": digest}, text, as_json=as_json)
    kinds = {tier.root / "snapshots": tier.kind for tier in found.tiers}
    facts = [_facts(stored, kinds[stored.folder.parent]) for stored in reversed(found.list())]
    if as_json:
        tiers = [
            {"tier": tier.kind, "root": str(tier.root), "budget_bytes": tier.budget_bytes, "used_bytes": used}
            for tier, used in found.usage()
        ]
        return display.print_json({"snapshots": facts, "tiers": tiers})
    if facts:
        display.print_table(("digest", "size", "tier", "state", "last used"), list(map(_row, facts)))
    for tier, used in found.usage():
        spare = tier.spares.total_bytes()
        kept = f", {display.size(spare)} of it spare files, kept for their pages" if spare else ""
        used_of = f"{display.size(used)} of {display.size(tier.budget_bytes)}"
        click.echo(f"{tier.kind} ({tier.root}): {used_of}{kept}")
    return None


COMMANDS = (cache,)


def cache_folder() -> Path:
    """Return the folder of this node's cache: PILOTFLAME_CACHE_DIR or its default."""
    return options.gateway_settings().cache_dir


def _full_digest(beginning: str, digests: list[str]) -> str:
    found = sorted({digest for digest in digests if digest.startswith(beginning)})
    if not beginning or not found:
        raise CacheError(
            f"No snapshot in the cache has a digest that begins with {beginning!r}.",
            remedy="List them: pilotflame snapshot cache",
        )
    if len(found) > 1:
        raise CacheError(
            f"{len(found)} snapshots in the cache have a digest that begins with {beginning!r}.",
            remedy="Give more of the digest.",
        )
    return found[0]


def _facts(stored: Stored, tier: str) -> dict[str, Any]:
    written = stored.size_bytes if stored.ready else _written_bytes(stored.folder / "files")
    return {
        "digest": stored.digest, "bytes": stored.size_bytes, "tier": tier, "ready": stored.ready,
        "percent": 100 * written // max(1, stored.size_bytes), "used_at": stored.used_s,
    }  # fmt: skip


def _row(facts: dict[str, Any]) -> tuple[str, ...]:
    state = "ready" if facts["ready"] else f"{facts['percent']} %"
    used_at = datetime.fromtimestamp(facts["used_at"], UTC).astimezone()
    return (
        facts["digest"][:SHOWN_DIGEST_CHARS], display.size(facts["bytes"]), facts["tier"], state,
        f"{used_at:%Y-%m-%d %H:%M:%S}",
    )  # fmt: skip


def _written_bytes(folder: Path) -> int:
    """Return the bytes written so far: files have their full size, and their blocks, from the start."""
    total = 0
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as stream:
                total += sum(end - begin for begin, end in _extents(stream.fileno()))
    return total


def _extents(descriptor: int) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of each part of a file that was written."""
    end, size = 0, os.fstat(descriptor).st_size
    while end < size:
        try:
            begin = os.lseek(descriptor, end, os.SEEK_DATA)
        except OSError:
            # ENXIO: the rest is a hole.
            return
        end = os.lseek(descriptor, begin, os.SEEK_HOLE)
        yield begin, end
