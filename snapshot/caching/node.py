"""Makes the usual cache of a node. Its first tier is in memory, and its second tier is a folder on disk."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ...errors import CacheError
from ...machine import memory_bytes
from ..format.manifest import Manifest
from ..sources.folder import FolderSource
from .cache import Cache, Lease
from .memory import SHARED_MEMORY, give_back, is_ours, prepare, sweep
from .mounted import FollowedTier, KeptFolders, MountedFolder
from .tier import Tier

MEMORY_SHARE = 0.25
DISK_SHARE = 0.8
_MEMORY_PREFIX = "pilotflame-"


@dataclass(frozen=True, slots=True)
class Budgets:
    """How many MiB the tiers of a node may hold. If `memory_mb` is 0, snapshots are on the disk only.

    If `memory_mb` is None, the budget is a quarter of the memory of the machine or the cgroup (see
    `machine.memory_bytes`). If `disk_mb` is None, the budget is four fifths of the bytes on the disk that are free or
    used by this cache.
    """

    memory_mb: int | None = None
    disk_mb: int | None = None

    @property
    def memory_bytes(self) -> int:
        return int(MEMORY_SHARE * memory_bytes()) if self.memory_mb is None else self.memory_mb << 20

    def disk_bytes(self, could_give_bytes: int) -> int:
        return int(DISK_SHARE * could_give_bytes) if self.disk_mb is None else self.disk_mb << 20


DEFAULT_BUDGETS = Budgets()


def node_cache(folder: Path, budgets: Budgets = DEFAULT_BUDGETS) -> Cache:
    """Return a cache to fetch into, whose disk tier is `folder`. Processes with the same folder share the cache."""
    sweep(SHARED_MEMORY.glob(f"{_MEMORY_PREFIX}{os.getuid()}-*"), _memory_root(folder))
    tiers = _prepared_tiers(folder, budgets)
    for tier in tiers:
        tier.sweep()
    return Cache(tiers)


def _prepared_tiers(folder: Path, budgets: Budgets) -> list[Tier]:
    """Make the memory tier if it is absent. Return the tiers."""
    root = _memory_root(folder)
    prepared = is_ours(root)
    # Ignore errors: on a read-only disk the lock cannot be taken, but the snapshots there can be used.
    with suppress(OSError, CacheError), _disk_tier(folder, budgets).locked():
        if budgets.memory_bytes:
            prepared = prepare(root, budgets.memory_bytes)
    # Another process may remove the root now, when it ends. Then the first fetch makes the root again.
    return _tiers(folder, budgets, in_memory=prepared)


def keep_folders(folder: Path, digest: str, budgets: Budgets = DEFAULT_BUDGETS) -> KeptFolders:
    """Return the folders of a snapshot, to be mounted into a container. Raise OSError or CacheError.

    Block while a fetch overwrites another snapshot's bytes in a folder.
    """
    return KeptFolders(_prepared_tiers(folder, budgets), digest)


def node_tiers(folder: Path, budgets: Budgets = DEFAULT_BUDGETS) -> list[Tier]:
    """Return the tiers of `node_cache`: the memory tier if `node_cache` has made it, then the disk tier."""
    return _tiers(folder, budgets, in_memory=is_ours(_memory_root(folder)))


def _tiers(folder: Path, budgets: Budgets, *, in_memory: bool) -> list[Tier]:
    disk, budget_bytes = _disk_tier(folder, budgets), budgets.memory_bytes
    if not in_memory:
        return [disk]
    return [Tier(_memory_root(folder), budget_bytes, "tmpfs", spare_bytes=budget_bytes // 2), disk]


def _disk_tier(folder: Path, budgets: Budgets) -> Tier:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Bytes that the cache itself uses count as available. Otherwise its budget would shrink as it fills.
    could_give_bytes = shutil.disk_usage(folder).free + Tier(folder, 0, "disk").space.used_bytes()
    return Tier(folder, budgets.disk_bytes(could_give_bytes), "disk")


def _memory_root(folder: Path) -> Path:
    name = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:12]
    return SHARED_MEMORY / f"{_MEMORY_PREFIX}{os.getuid()}-{name}"


def drop_from_memory(cache: Cache, chosen: Callable[[str], bool] = lambda _digest: True) -> None:
    """Remove unused snapshots from memory if they are also on the disk and `chosen` returns True for their digest."""
    disks = [tier for tier in cache.tiers if tier.kind == "disk"]
    on_disk = {stored.digest for tier in disks for stored in tier.list() if stored.ready}
    for tier in (tier for tier in cache.tiers if tier.kind == "tmpfs"):
        for digest in filter(chosen, on_disk):
            # CacheError means that the snapshot is in use.
            with suppress(CacheError):
                tier.evict(digest)


def release_memory(cache: Cache) -> None:
    """Remove unused snapshots from memory if they are also on the disk. Then unmount the memory tier if it is empty."""
    drop_from_memory(cache)
    for tier in cache.tiers:
        if tier.kind == "tmpfs":
            tier.release()
    for tier in (tier for tier in cache.tiers if tier.kind == "disk"):
        # Take the lock, so that no other process calls `prepare` for the root meanwhile.
        with suppress(OSError, CacheError), tier.locked():
            give_back(_memory_root(tier.root))


def follow(folder: Path, manifest: Manifest, mounted: Sequence[Path] = ()) -> Lease:
    """Return a lease of a snapshot that another process of this node has fetched or is fetching.

    In a container, `mounted` are the paths of the folders from `keep_folders`.
    """
    memory = [root] if is_ours(root := _memory_root(folder)) else []
    paths = mounted or (*memory, folder)
    tiers = [MountedFolder(path) if mounted else FollowedTier(path) for path in paths]
    # The source does not matter, because a tier that follows reads nothing from it.
    return Cache(tiers).open(manifest, FolderSource(folder), tee=False)
