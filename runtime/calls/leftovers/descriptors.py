"""Sorts open descriptors by how they can be used after a fork. Forks share the state of a descriptor, such as its offset."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

# A process with a context on a GPU of NVIDIA keeps the first file open, and with a context on a GPU of AMD the second.
DEVICE_FILES = ("/dev/nvidia-uvm", "/dev/kfd")
# Forks can share these files. The devices have no state that one process could change for another. Copies of weights are sealed
# (see `shared_copies.NAME`). NVML opens files whose names begin with /dev/nvidia, except the files in DEVICE_FILES.
STATELESS = (
    "/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/nvidia", "/memfd:pilotflame-weights",
)  # fmt: skip
_KINDS = {
    "pipe:": "a pipe", "anon_inode:[eventpoll]": "a selector", "anon_inode:[eventfd]": "an event", "anon_inode:[pidfd]": "a process",
    "anon_inode:[timerfd]": "a timer", "anon_inode:inotify": "a watch of files", "anon_inode:[io_uring]": "an io_uring",
}  # fmt: skip
# Mappings with these paths have no lasting file.
_FLEETING = ("/dev/zero", "/dev/shm", "/memfd:", "/SYSV")  # noqa: S108
# The flags that stay the same when a file is opened again.
_KEPT_FLAGS = os.O_NONBLOCK | os.O_DIRECT | os.O_DIRECTORY


@dataclass(slots=True)
class Descriptors:
    """The descriptors of a process that matter at a fork."""

    shared: dict[int, str] = field(default_factory=dict)
    """Descriptors that forks cannot share, each with its kind as text."""
    read: list[int] = field(default_factory=list)
    """Files and folders that are only read. A child opens them again."""
    devices: list[str] = field(default_factory=list)
    """The files of DEVICE_FILES that are open. If there is one, the process has used a device."""


def sort(numbers: Collection[int], kept: Path | None = None) -> Descriptors:
    """Sort descriptors. Leave out descriptors that may be shared without harm, and descriptors of files below `kept`."""
    found = Descriptors()
    for number in sorted(numbers):
        # OSError means that a thread has closed the descriptor meanwhile.
        with suppress(OSError):
            _sort(number, kept, found)
    found.devices = sorted(set(found.devices))
    return found


def _sort(number: int, kept: Path | None, found: Descriptors) -> None:
    target, mode = os.readlink(f"/proc/self/fd/{number}"), os.fstat(number).st_mode  # noqa: PTH115  not always a path
    flags = fcntl.fcntl(number, fcntl.F_GETFL)
    if target in DEVICE_FILES:
        found.devices.append(target)
    elif (
        flags & os.O_PATH
        or target.startswith(STATELESS)
        or (kept is not None and Path(target).is_relative_to(kept))
    ):
        pass
    elif not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        found.shared[number] = _what(number, target, mode)
    elif "\nlock:" in Path(f"/proc/self/fdinfo/{number}").read_text():
        found.shared[number] = f"a lock of {target}"
    elif flags & os.O_ACCMODE == os.O_RDONLY and not target.startswith("/proc/"):
        try:
            os.close(_open_again(number))
        except OSError as error:
            found.shared[number] = f"{target}, which cannot be opened again ({error.strerror})"
        else:
            found.read.append(number)
    elif flags & os.O_ACCMODE != os.O_WRONLY or not flags & os.O_APPEND:
        # A file that is open only for appending, such as a log, may be shared: the kernel appends each write at its end.
        found.shared[number] = f"{target}, open for writing"


def _what(number: int, target: str, mode: int) -> str:
    if stat.S_ISSOCK(mode):
        with suppress(OSError, ValueError), socket.socket(fileno=os.dup(number)) as duplicate:
            peer = duplicate.getpeername()
            place = f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) and len(peer) > 1 else str(peer)
            return f"a connection to {place}" if peer else "a socket"
        return "a socket"
    return next((kind for start, kind in _KINDS.items() if target.startswith(start)), target)


def open_again(numbers: Collection[int]) -> None:
    """Open files again at the same numbers and offsets, so that this process has its own offsets from now on."""
    for number in numbers:
        own = _open_again(number)
        os.lseek(own, os.lseek(number, 0, os.SEEK_CUR), os.SEEK_SET)
        os.dup2(own, number, inheritable=os.get_inheritable(number))
        os.close(own)


def _open_again(number: int) -> int:
    # Open the file by its descriptor, which also works if the file was removed.
    flags = fcntl.fcntl(number, fcntl.F_GETFL)
    return os.open(f"/proc/self/fd/{number}", os.O_RDONLY | (flags & _KEPT_FLAGS))


def shared_memory() -> Iterator[str]:
    """Yield the path of each writable mapping that forks share, unless another process could map the file by this path.

    The path of anonymous memory is empty.
    """
    with Path("/proc/self/maps").open() as lines:
        for line in lines:
            _, rights, _, _, _, *path = line.rstrip("\n").split(maxsplit=5)
            place = path[0] if path else ""
            lasting = place.startswith("/") and not place.startswith(_FLEETING)
            if rights[1::2] == "ws" and not (lasting and not place.endswith(" (deleted)")):
                yield place
