"""The node's usual cache: one folder on disk, and a part of its memory before it."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from ...errors import CacheError, FetchFailed
from ..format.manifest import Manifest
from ..sources.ranged import Ranged
from ..sources.source import Connection, ObjectInfo
from .cache import Cache, Lease
from .tier import Tier

MEMORY_SHARE = 0.25
DISK_SHARE = 0.8
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  a folder of our own below it, made private


def node_cache(folder: Path) -> Cache:
    """The cache whose disk tier is `folder`; whoever names the same folder shares it, in whatever process.

    Budgets are taken from the machine: a quarter of its memory, four fifths of what the disk could give.
    """
    return Cache(node_tiers(folder), learned=folder / "learned.json")


def node_tiers(folder: Path) -> list[Tier]:
    """Memory first, if this machine has a file system in memory; then the disk."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    disk = Tier(folder, int(DISK_SHARE * (shutil.disk_usage(folder).free + _held_bytes(folder))), "disk")
    if not SHARED_MEMORY.is_dir() or not os.access(SHARED_MEMORY, os.W_OK):
        return [disk]
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    name = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:12]
    root = SHARED_MEMORY / f"pilotlight-{os.getuid()}-{name}"
    if not _is_ours(root):
        return [disk]
    budget_bytes = int(MEMORY_SHARE * memory_bytes)
    memory = Tier(
        root,
        budget_bytes,
        "tmpfs",
        spare_bytes=budget_bytes // 2,
    )
    return [memory, disk]


def _is_ours(root: Path) -> bool:
    """Whether nobody else can have put, or can put, anything there. Anybody may make folders in shared memory."""
    with suppress(FileExistsError):
        root.mkdir(mode=0o700)
    status = root.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


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


def _held_bytes(folder: Path) -> int:
    """What the cache itself takes there already, so that a full cache does not shrink its own budget."""
    return Tier(folder, 0, "disk").used_bytes()


def follow(folder: Path, manifest: Manifest) -> Lease:
    """A lease of a snapshot that another process of this node holds there; it need not have arrived yet."""
    return node_cache(folder).open(manifest, _Elsewhere(), tee=False)


class _Elsewhere(Ranged):
    """The source of those who may not fetch: whoever holds the snapshot does, and knows the credentials."""

    url = ""  # so that who takes over from it is not told that there is nothing to be had

    def stat(self, name: str) -> ObjectInfo:
        raise self._gone(name)

    def connect(self) -> Connection:
        raise self._gone("the snapshot")

    def _gone(self, name: str) -> FetchFailed:
        return FetchFailed(
            f"{name} is not on this node, and the process that was to fetch it has gone.",
            remedy="Try again: the next activation fetches what is missing.",
        )
