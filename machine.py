"""Tells how much a process may use: of the machine, or less in a container or a limited service."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def memory_bytes(cgroups: Path = _CGROUPS, own: Path = _OWN) -> int:
    """Return the memory of this machine in bytes, or the smallest limit of the cgroups of this process.

    `cgroups` is where they are mounted. `own` is the file in which the kernel names those of the process.
    """
    total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total_bytes, *(limit for (limit,) in _limits(cgroups, own, "memory"))])


def processors(cgroups: Path = _CGROUPS, own: Path = _OWN) -> float:
    """Return how many processors this process may run on, or the smallest quota of its cgroups, as 0.5 or 2."""
    quotas = [quota / period for quota, period in _limits(cgroups, own, "cpu") if quota > 0 < period]
    return min([float(len(os.sched_getaffinity(0))), *quotas])


# By controller: the files of version 2 and of version 1 of cgroups that hold its limit, in one line each.
_FILES = {
    "memory": (("memory.max",), ("memory.limit_in_bytes",)),
    "cpu": (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")),
}


def _limits(cgroups: Path, own: Path, controller: str) -> Iterator[tuple[int, ...]]:
    """Yield the numbers of each limit of a controller. Version 1 has 2**63 or -1 where there is no limit."""
    second, first = _FILES[controller]
    with suppress(OSError):
        for line in own.read_text(encoding="utf-8").splitlines():
            number, controllers, path = line.split(":", 2)
            # Version 2 has one hierarchy, which is numbered 0 and names no controllers.
            if number == "0" and not controllers:
                yield from _limits_above(cgroups, path, second)
            elif controller in controllers.split(","):
                yield from _limits_above(cgroups / controller, path, first)


def _limits_above(root: Path, path: str, files: tuple[str, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the limits of a cgroup and of those that contain it.

    In a container, `root` may be the container's own cgroup, and `path` that cgroup as the host names it. Then
    nothing is found below `root`, and the limit is in `root` itself.
    """
    folder = root / path.lstrip("/")
    for one in (folder, *folder.parents):
        # ValueError: there is no limit, and the file contains "max".
        with suppress(OSError, ValueError):
            text = " ".join((one / name).read_text(encoding="ascii") for name in files)
            yield tuple(map(int, text.split()))
        if one == root:
            return
