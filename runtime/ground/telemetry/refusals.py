"""Names what the operating system refuses, by operation and errno, and what to do about it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple


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
