"""Tells how much of the machine a process may use, and names what the operating system refuses.

A container or a service may be limited to less than the machine. One table has the refusals by operation and errno.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

CGROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc")
OWN = PROC / "self" / "cgroup"


class CgroupLimit(NamedTuple):
    """A limit of a controller, and the cgroup that has it."""

    folder: Path
    numbers: tuple[int, ...]
    """What its files hold. Version 1 has 2**63 or -1 where there is no limit."""
    unified: bool
    """True for version 2 of cgroups."""


def memory_bytes(cgroups: Path = CGROUPS, own: Path = OWN) -> int:
    """Return the memory of this machine in bytes, or the smallest limit of the cgroups of this process.

    `cgroups` is where they are mounted. `own` is the file in which the kernel names those of the process.
    """
    total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total_bytes, *(limit.numbers[0] for limit in limits("memory", cgroups, own))])


def physical_memory(proc: Path = PROC) -> tuple[int, int]:
    """Return the memory of the machine and what of it is available, in bytes. Raise OSError or KeyError."""
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
    """Yield each limit of a controller ("memory" or "cpu") that holds for this process."""
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
    """Yield the folder and the limit of a cgroup and of those that contain it.

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


class Operation(StrEnum):
    """An operation of the operating system."""

    FORK = "another process or thread"
    MEMORY = "more memory"
    LISTEN = "the address"
    PYTHON = "the Python of the environment"
    FOLDER = "the current folder"
    FILE = "a file or a folder"


class SystemRefusal(NamedTuple):
    """Why an operation failed, and a remedy."""

    why: str
    remedy: str


_PROCESSES = SystemRefusal(
    "the number of processes and threads is limited",
    "Raise the limit: `ulimit -u`, TasksMax= of systemd, or --pids-limit of the container.",
)
_MEMORY = SystemRefusal(
    "memory is limited",
    "Raise the limit: `ulimit -v`, MemoryMax= of systemd, or --memory of the container.",
)
_MOVED = SystemRefusal(
    "the environment was moved or removed while the gateway runs",
    "Start the gateway again, from the place where the environment is now.",
)
_FULL = SystemRefusal("the disk or its quota is full", "Free space, or name another folder.")
TABLE: dict[tuple[Operation, int], SystemRefusal] = {
    (Operation.FORK, errno.EAGAIN): _PROCESSES,
    (Operation.FORK, errno.ENOMEM): _MEMORY,
    (Operation.MEMORY, errno.ENOMEM): _MEMORY,
    (Operation.FILE, errno.ENOMEM): _MEMORY,
    (Operation.PYTHON, errno.ENOENT): _MOVED,
    (Operation.PYTHON, errno.ENOTDIR): _MOVED,
    (Operation.PYTHON, errno.EAGAIN): _PROCESSES,
    (Operation.PYTHON, errno.ENOMEM): _MEMORY,
    (Operation.FOLDER, errno.ENOENT): SystemRefusal(
        "the current folder no longer exists", "Change to another folder."
    ),
    (Operation.FILE, errno.ENOSPC): _FULL,
    (Operation.FILE, errno.EDQUOT): _FULL,
    (Operation.FILE, errno.EROFS): SystemRefusal(
        "the file system is read-only", "Name a folder that can be written."
    ),
    (Operation.FILE, errno.EMFILE): SystemRefusal(
        "the number of open files is limited", "Raise the limit: `ulimit -n`."
    ),
    (Operation.LISTEN, errno.EADDRINUSE): SystemRefusal(
        "another program listens there", "Choose another --port (0 picks a free one), or stop that program."
    ),
    (Operation.LISTEN, errno.EADDRNOTAVAIL): SystemRefusal(
        "this machine does not have the address",
        "Use --host ::1 on a machine with IPv6 only, or see `ip address`.",
    ),
    (Operation.LISTEN, errno.EAFNOSUPPORT): SystemRefusal(
        "this machine does not have this kind of address",
        "Use --host ::1 for IPv6, or --host 127.0.0.1 for IPv4.",
    ),
    (Operation.LISTEN, errno.EACCES): SystemRefusal(
        "this user may not use the port",
        "Choose a --port of 1024 or more, or give the right CAP_NET_BIND_SERVICE.",
    ),
}


def refusal(operation: Operation, number: int | None, remedy: str = "") -> SystemRefusal:
    """Return the row of the table, or the text of the operating system with this `remedy`."""
    known = TABLE.get((operation, number or 0))
    return known or SystemRefusal(os.strerror(number) if number else "it was refused", remedy)


def explained(error: BaseException) -> str | None:
    """Return a sentence and a remedy for an error that no code has expected; None if it did not come from the operating system."""
    number: int | None
    for one in _leaves(error):
        if isinstance(one, RuntimeError) and "start new thread" in str(one):
            operation, number, name = Operation.FORK, errno.EAGAIN, None
        elif isinstance(one, MemoryError):
            operation, number, name = Operation.MEMORY, errno.ENOMEM, None
        elif isinstance(one, OSError):
            gone = one.errno == errno.ENOENT and not one.filename and _folder_is_gone()
            operation, number, name = Operation.FOLDER if gone else Operation.FILE, one.errno, one.filename
            if one.errno == errno.EAGAIN:
                operation = Operation.FORK
        else:
            continue
        found = refusal(operation, number)
        why = str(one) if isinstance(one, OSError) and number is None else found.why
        return f"{name or f'The system refuses {operation}'}: {why}. {found.remedy}".strip()
    return None


def _folder_is_gone() -> bool:
    try:
        os.getcwd()  # noqa: PTH109
    except FileNotFoundError:
        return True
    return False


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            yield from _leaves(one)
    else:
        yield error
