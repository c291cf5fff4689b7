"""The node's usual cache: one folder on disk, and a part of its memory before it."""

from __future__ import annotations

import hashlib
import os
import shutil
from contextlib import suppress
from pathlib import Path

from ...errors import CacheError, SourceDenied
from ..format.manifest import Manifest
from ..sources.ranged import Ranged
from ..sources.source import Connection, ObjectInfo
from .cache import Cache, Lease
from .memory import SHARED_MEMORY, give_back, is_ours, prepare, sweep
from .tier import Tier

MEMORY_SHARE = 0.25
DISK_SHARE = 0.8
_MEMORY_PREFIX = "pilotflame-"


def node_cache(folder: Path) -> Cache:
    """The cache whose disk tier is `folder`, to fetch into; whoever names the same folder shares it, in whatever process.

    Budgets are taken from the machine: a quarter of its memory, four fifths of what the disk could give.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    own = _memory_root(folder)
    sweep(SHARED_MEMORY.glob(f"{_MEMORY_PREFIX}{os.getuid()}-*"), own)
    with (
        suppress(OSError, CacheError),
        _disk_tier(folder).locked(),
    ):  # a disk that takes nothing can still be read
        prepare(own, _memory_budget_bytes())
    cache = Cache(node_tiers(folder), learned=learned_file(folder))
    cache.sweep()
    return cache


def learned_file(folder: Path) -> Path:
    """Where a node keeps what it learned of sources."""
    return folder / "learned.json"


def node_tiers(folder: Path) -> list[Tier]:
    """What there is of that cache: memory first, if this machine has a file system in memory; then the disk."""
    disk, root = _disk_tier(folder), _memory_root(folder)
    if not is_ours(root):
        return [disk]
    budget_bytes = _memory_budget_bytes()
    return [Tier(root, budget_bytes, "tmpfs", spare_bytes=budget_bytes // 2), disk]


def _disk_tier(folder: Path) -> Tier:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # What the cache itself takes there already counts, so that a full one does not shrink its own budget.
    could_give_bytes = shutil.disk_usage(folder).free + Tier(folder, 0, "disk").used_bytes()
    return Tier(folder, int(DISK_SHARE * could_give_bytes), "disk")


def _memory_root(folder: Path) -> Path:
    name = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:12]
    return SHARED_MEMORY / f"{_MEMORY_PREFIX}{os.getuid()}-{name}"


def _memory_budget_bytes() -> int:
    return int(MEMORY_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def release_memory(cache: Cache) -> None:
    """Give back the memory of snapshots that nobody uses and that lie on the disk too."""
    on_disk = {
        stored.digest for tier in cache.tiers if tier.kind == "disk" for stored in tier.list() if stored.ready
    }
    for tier in cache.tiers:
        if tier.kind == "tmpfs":
            for stored in tier.list():
                if stored.digest in on_disk:
                    with suppress(CacheError):  # somebody else uses it
                        tier.evict(stored.digest)
            tier.drop_spares()
            tier.remove_if_empty()
    for tier in cache.tiers:
        if tier.kind == "disk":
            with suppress(OSError, CacheError), tier.locked():  # nobody prepares it meanwhile
                give_back(_memory_root(tier.root))


def follow(folder: Path, manifest: Manifest) -> Lease:
    """A lease of a snapshot that another process of this node holds there; it need not have arrived yet."""
    # Not swept: that is for who fetches, and here a cold start waits.
    return Cache(node_tiers(folder)).open(manifest, _Elsewhere(), tee=False)


class _Elsewhere(Ranged):
    """The source of those who may not fetch: whoever holds the snapshot does, and knows the credentials."""

    url = "the node's fetcher"

    def stat(self, name: str) -> ObjectInfo:
        raise self._gone(name)

    def connect(self) -> Connection:
        raise self._gone("the snapshot")

    def _gone(self, name: str) -> SourceDenied:
        return SourceDenied(
            f"{name} is not on this node, and the process that was to fetch it has gone.",
            remedy="Try again: the next activation fetches what is missing.",
        )
