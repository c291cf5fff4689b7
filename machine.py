"""Tells how much memory a process may use: that of the machine, or less in a container or a limited service."""

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
    return min([total_bytes, *_limits(cgroups, own)])


def _limits(cgroups: Path, own: Path) -> Iterator[int]:
    with suppress(OSError):
        for line in own.read_text(encoding="utf-8").splitlines():
            number, controllers, path = line.split(":", 2)
            # Version 2 has one hierarchy, which is numbered 0 and names no controllers.
            if number == "0" and not controllers:
                yield from _limits_above(cgroups, path, "memory.max")
            elif "memory" in controllers.split(","):
                yield from _limits_above(cgroups / "memory", path, "memory.limit_in_bytes")


def _limits_above(root: Path, path: str, name: str) -> Iterator[int]:
    """Yield the limits of a cgroup and of those that contain it.

    In a container, `root` may be the container's own cgroup, and `path` that cgroup as the host names it. Then
    nothing is found below `root`, and the limit is in `root` itself.
    """
    folder = root / path.lstrip("/")
    for one in (folder, *folder.parents):
        # ValueError: there is no limit, and the file contains "max".
        with suppress(OSError, ValueError):
            yield int((one / name).read_text(encoding="ascii"))
        if one == root:
            return
