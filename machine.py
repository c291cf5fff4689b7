"""Measures how much memory and how many processors a process may use: those of the machine, or less in a container or a limited service."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

CGROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc")
OWN = PROC / "self" / "cgroup"


class CgroupLimit(NamedTuple):
    """A limit of a controller, and the cgroup that has it."""

    folder: Path
    numbers: tuple[int, ...]
    """The numbers in the files of the limit. Without a limit, version 1 has about 2**63, or -1 for processors."""
    unified: bool
    """True for version 2 of cgroups."""


def memory_bytes(cgroups: Path = CGROUPS, own: Path = OWN) -> int:
    """Return the memory of this machine in bytes, or the smallest limit of the cgroups of this process.

    `cgroups` is the folder where cgroups are mounted. `own` is the file in which the kernel names the cgroups of the process.
    """
    total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total_bytes, *(limit.numbers[0] for limit in limits("memory", cgroups, own))])


def physical_memory(proc: Path = PROC) -> tuple[int, int]:
    """Return the memory of the machine, and how much of it is available, in bytes. Raise OSError or KeyError."""
    pairs = (line.split()[:2] for line in (proc / "meminfo").read_text(encoding="ascii").splitlines())
    amounts = {key: int(value) * 1024 for key, value in pairs}
    return amounts["MemTotal:"], amounts["MemAvailable:"]


def free_memory_bytes(cgroups: Path = CGROUPS, proc: Path = PROC) -> int:
    """Return how many bytes of memory this process could use: of the machine, or less in its cgroups."""
    _, free_bytes = physical_memory(proc)
    for limit in limits("memory", cgroups, proc / "self" / "cgroup"):
        name = "memory.current" if limit.unified else "memory.usage_in_bytes"
        with suppress(OSError, ValueError):
            used_bytes = int((limit.folder / name).read_text(encoding="ascii"))
            free_bytes = min(free_bytes, limit.numbers[0] - used_bytes)
    return max(0, free_bytes)


def processors(cgroups: Path = CGROUPS, own: Path = OWN) -> float:
    """Return how many processors this process may run on, or the smallest quota of its cgroups, as 0.5 or 2."""
    pairs = (limit.numbers for limit in limits("cpu", cgroups, own))
    quotas = [quota / period for quota, period in pairs if quota > 0 < period]
    return min([float(len(os.sched_getaffinity(0))), *quotas])


# By controller: the files of version 2 and of version 1 of cgroups that hold its limit, in one line each.
_FILES = {
    "memory": (("memory.max",), ("memory.limit_in_bytes",)),
    "cpu": (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")),
}


def limits(controller: str, cgroups: Path = CGROUPS, own: Path = OWN) -> Iterator[CgroupLimit]:
    """Yield each limit of a controller ("memory" or "cpu") that applies to this process."""
    second, first = _FILES[controller]
    with suppress(OSError):
        for line in own.read_text(encoding="utf-8").splitlines():
            number, controllers, path = line.split(":", 2)
            # Version 2 has one hierarchy, which is numbered 0 and names no controllers.
            if number == "0" and not controllers:
                for folder, numbers in _limits_above(cgroups, path, second):
                    yield CgroupLimit(folder, numbers, unified=True)
            elif controller in controllers.split(","):
                for folder, numbers in _limits_above(cgroups / controller, path, first):
                    yield CgroupLimit(folder, numbers, unified=False)


def _limits_above(root: Path, path: str, files: tuple[str, ...]) -> Iterator[tuple[Path, tuple[int, ...]]]:
    """Yield the folder and the limit of a cgroup, and of the cgroups that contain it.

    In a container, `root` may be the container's own cgroup, and `path` that cgroup as the host names it. Then
    nothing is found below `root`, and the limit is in `root` itself.
    """
    folder = root / path.lstrip("/")
    for one in (folder, *folder.parents):
        # ValueError: there is no limit, and the file contains "max".
        with suppress(OSError, ValueError):
            text = " ".join((one / name).read_text(encoding="ascii") for name in files)
            yield one, tuple(map(int, text.split()))
        if one == root:
            return
