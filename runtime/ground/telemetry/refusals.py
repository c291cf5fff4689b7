"""Explains errors of the operating system, by operation and errno, and says what to do about them."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

from ....errors import CallEnded, GatewayError, PilotflameError

LOG = logging.getLogger(__name__)


class Operation(StrEnum):
    """An operation of the operating system."""

    FORK = "another process or thread"
    MEMORY = "more memory"
    LISTEN = "the address"
    PYTHON = "the Python of the environment"
    FOLDER = "the current folder"
    FILE = "a file or a folder"
    CONNECT = "a connection"


class SystemRefusal(NamedTuple):
    """Why an operation failed, and a remedy."""

    why: str
    remedy: str


_PROCESSES = SystemRefusal(
    "the number of processes and threads, or the memory of their stacks, is limited",
    "Raise the limit: `ulimit -u` or `ulimit -v`, TasksMax= of systemd, or --pids-limit of the container.",
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
_NO_RIGHT = SystemRefusal("this user has no right to it", "Give the user the right, or name another place.")
_GONE = SystemRefusal("it does not exist, or was removed", "Put it back, or name another place.")
_FILES = SystemRefusal("the number of open files is limited", "Raise the limit: `ulimit -n`.")
_DISK = SystemRefusal("the disk has failed", "Check the disk.")
TABLE: dict[tuple[Operation, int], SystemRefusal] = {
    (Operation.FORK, errno.EAGAIN): _PROCESSES,
    (Operation.FILE, errno.ENOMEM): _MEMORY,
    (Operation.PYTHON, errno.ENOENT): _MOVED,
    (Operation.PYTHON, errno.ENOTDIR): _MOVED,
    (Operation.PYTHON, errno.EAGAIN): _PROCESSES,
    (Operation.FOLDER, errno.ENOENT): SystemRefusal(
        "the current folder no longer exists", "Change to another folder."
    ),
    (Operation.FILE, errno.ENOSPC): _FULL,
    (Operation.FILE, errno.EDQUOT): _FULL,
    (Operation.FILE, errno.EROFS): SystemRefusal(
        "the file system is read-only", "Name a folder that can be written."
    ),
    (Operation.FILE, errno.EMFILE): _FILES,
    (Operation.FILE, errno.ENFILE): _FILES,
    (Operation.FILE, errno.EACCES): _NO_RIGHT,
    (Operation.FILE, errno.EPERM): _NO_RIGHT,
    (Operation.FILE, errno.ENOENT): _GONE,
    (Operation.FILE, errno.ENOTDIR): _GONE,
    (Operation.FILE, errno.ESTALE): _GONE,
    (Operation.FILE, errno.EIO): _DISK,
    (Operation.FILE, errno.EISDIR): SystemRefusal("it is a folder", "Name a file."),
    (Operation.FILE, errno.ENAMETOOLONG): SystemRefusal("its path is too long", "Name a shorter one."),
    (Operation.PYTHON, errno.EACCES): SystemRefusal("this user may not run it", "Give the user the right."),
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


_ANYWHERE = (errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ENOMEM)
# Errors of these modules have numbers of their own, which are not errnos.
_OWN_NUMBERS = ("socket", "ssl")
_UNREACHED = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ETIMEDOUT, errno.ENETDOWN)
_ELSE = {
    Operation.FILE: "Check it, and the disk that it is on.", Operation.CONNECT: "Check the address and the network.",
}  # fmt: skip


def refusal(operation: Operation, number: int | None, remedy: str = "") -> SystemRefusal:
    """Return the row of the table. If there is none, return the text of the operating system with `remedy`.

    The errnos in _ANYWHERE, such as that of a full disk, mean the same for each operation.
    """
    known = TABLE.get((operation, number or 0))
    if known is None and number in _ANYWHERE:
        known = TABLE[Operation.FILE, number]
    return known or SystemRefusal(os.strerror(number) if number else "it was refused", remedy)


def explained(error: BaseException, *, named: bool = True) -> PilotflameError | None:
    """Return an error with a remedy for an unexpected error of the operating system; None for any other error. Return a
    PilotflameError unchanged.

    With `named`, the message has the path of the file.
    """
    number: int | None
    if isinstance(error, PilotflameError):
        return error
    for one in _leaves(error):
        own_number = type(one).__module__ in _OWN_NUMBERS
        if isinstance(one, RuntimeError) and "start new thread" in str(one):
            operation, number, name = Operation.FORK, errno.EAGAIN, None
        elif isinstance(one, MemoryError):
            operation, number, name = Operation.MEMORY, errno.ENOMEM, None
        elif isinstance(one, OSError) and not (isinstance(one, TimeoutError) and one.errno is None):
            gone = one.errno == errno.ENOENT and not one.filename and _folder_is_gone()
            operation, number, name = Operation.FOLDER if gone else Operation.FILE, one.errno, one.filename
            if one.errno == errno.EAGAIN:
                operation = Operation.FORK
            elif isinstance(one, ConnectionError) or own_number or one.errno in _UNREACHED:
                operation = Operation.CONNECT
            elif one.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                operation = Operation.LISTEN
        else:
            continue
        found = refusal(operation, number, _ELSE.get(operation, ""))
        why = str(one) if isinstance(one, OSError) and (own_number or number is None) else found.why
        what = name if name and named else f"The system refuses {operation}"
        return GatewayError(f"{what}: {why}.", remedy=found.remedy)
    return None


@contextlib.contextmanager
def explaining(*, named: bool = True, begun: bool = False) -> Iterator[None]:
    """Log an error of the operating system that the block raises, and raise it as an error with a remedy.

    If a call may have `begun` in the block, the error suggests no retry. ConnectionError and TimeoutError are raised unchanged.
    """
    try:
        yield
    except (OSError, RuntimeError, MemoryError, ExceptionGroup) as error:
        if (
            isinstance(error, ConnectionError | TimeoutError)
            or (known := explained(error, named=named)) is None
        ):
            raise
        LOG.warning("%s", explained(error), exc_info=True)
        if begun:
            raise CallEnded.after(known) from error
        raise known from error


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
