"""Confines a process to its limits before it runs a function's code.

Its children, and the programs that it starts, inherit the limits.

A cgroup limits memory, processors and processes; Landlock, a part of the kernel that needs no privilege, limits which
files can be read and written. Landlock also keeps the process from looking into processes outside of its function, such
as the gateway, and from sending signals to them (from Linux 6.12).
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ....errors import LauncherError
from ..link.worker_spec import Confinement

# Numbers of system calls, the same on all processors that Python runs on, and constants of <linux/landlock.h>.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_CREATE_RULESET_VERSION, _RULE_PATH_BENEATH, _SCOPE_SIGNAL = 1, 1, 2
_PR_SET_NO_NEW_PRIVS = 38
_RULESET_ATTR, _PATH_BENEATH_ATTR = struct.Struct("=QQQ"), struct.Struct("=Qi")
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _REFER, _TRUNCATE = 1, 2, 4, 8, 1 << 13, 1 << 14
# Execute, read, write, and all ways to make and remove files, folders and other entries.
_ALL_OF_VERSION_1 = (1 << 13) - 1
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
_READ = _EXECUTE | _READ_FILE | _READ_DIR
# The first versions of Landlock that know the right to rename between folders, the right to truncate, and the signal
# scope.
_SINCE_REFER, _SINCE_TRUNCATE, SINCE_SCOPE = 2, 3, 6
# From <linux/capability.h>. In version 3, `capset` takes two sets of three numbers: effective, permitted, inheritable.
_CAPABILITY_HEADER, _CAPABILITY_VERSION, _CAPABILITY_BYTES = struct.Struct("=Ii"), 0x20080522, 24
# The devices that a confined process can read and write. It cannot use other devices, such as disks.
DEVICES = ("null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts", "dri", "kfd", "infiniband")
DEVICE_PREFIX = "nvidia"
_libc = ctypes.CDLL(None, use_errno=True)


def confine(confinement: Confinement) -> None:
    """Confine this process. Raise OSError, or LauncherError if the kernel has no Landlock."""
    # Let the kernel write no core dump: it would hold the secrets and weights of the crashed worker.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    for file in confinement.joins:
        # 0 means the process that writes it.
        file.write_text("0")
    if confinement.tmp is not None:
        os.environ["TMPDIR"] = str(confinement.tmp)
        # Forget the folder that `tempfile` may have found in the base.
        tempfile.tempdir = None
    if confinement.hidden:
        _restrict(confinement)


def landlock_version() -> int:
    """Return the version of the kernel's Landlock, 0 if the kernel has no Landlock."""
    return max(0, int(_libc.syscall(_CREATE_RULESET, None, 0, _CREATE_RULESET_VERSION)))


def _restrict(confinement: Confinement) -> None:
    """Let Landlock hide the folders in `Confinement.hidden`, except what the other fields allow."""
    if not (version := landlock_version()):
        raise LauncherError('This kernel has no Landlock, which resources.files = "private" needs.')
    handled = _ALL_OF_VERSION_1
    handled |= _REFER if version >= _SINCE_REFER else 0
    handled |= _TRUNCATE if version >= _SINCE_TRUNCATE else 0
    scope = _SCOPE_SIGNAL if version >= SINCE_SCOPE else 0
    attributes = _RULESET_ATTR.pack(handled, 0, scope)
    ruleset = _call(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    try:
        for path, rights in _rules(confinement):
            _allow(ruleset, path, rights & handled)
        if _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "no new privileges")
        _call(_RESTRICT_SELF, ruleset, 0)
        # Drop the capabilities, with which a process of root could read the memory of processes outside of its function.
        _drop_capabilities()
    finally:
        os.close(ruleset)


def _rules(confinement: Confinement) -> Iterator[tuple[Path, int]]:
    """Yield the paths that can be used, and the rights that apply to each path and to everything below it."""
    hidden = {path.resolve() for path in confinement.hidden}
    devices = Path("/dev")
    # Exclude /dev here, because /dev/shm holds weights of other functions.
    yield from ((path, _READ) for path in _outside(Path("/"), hidden | {devices}))
    python = (Path(sys.prefix), Path(sys.base_prefix), *map(Path, filter(None, sys.path)))
    for path in (*confinement.readable, *python):
        # Skip a path that contains a hidden folder, such as the working directory "/". Its other parts were yielded above.
        if not any(other.is_relative_to(path.resolve()) for other in hidden):
            yield path, _READ
    for path in confinement.unlisted:
        yield path, _READ_FILE
    for path in devices.iterdir():
        if path.name in DEVICES or path.name.startswith(DEVICE_PREFIX):
            yield path, _READ_FILE | _READ_DIR | _WRITE_FILE
    for path in (*confinement.writable, *((confinement.tmp,) if confinement.tmp is not None else ())):
        yield path, _ALL_OF_VERSION_1 | _REFER | _TRUNCATE


def _outside(folder: Path, hidden: set[Path]) -> Iterator[Path]:
    """Yield as few paths as possible, which together cover everything in `folder` except the hidden folders.

    Files and folders that are made later beside a hidden folder are not covered. Links are left out, because a link's
    target is covered under its own path, unless the target is hidden.
    """
    with suppress(PermissionError), os.scandir(folder) as entries:
        for entry in entries:
            path = Path(entry.path)
            if entry.is_symlink() or path in hidden:
                continue
            if any(other.is_relative_to(path) for other in hidden):
                yield from _outside(path, hidden)
            else:
                yield path


def _allow(ruleset: int, path: Path, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH)
    except OSError:
        # The path was removed meanwhile, or this process cannot reach it anyway.
        return
    try:
        if not path.is_dir():
            rights &= _OF_FILES
        _call(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, _PATH_BENEATH_ATTR.pack(rights, descriptor), 0)
    finally:
        os.close(descriptor)


def _drop_capabilities() -> None:
    """Give up all capabilities. Because of PR_SET_NO_NEW_PRIVS, programs that this process starts have no capabilities
    either.
    """
    if _libc.capset(_CAPABILITY_HEADER.pack(_CAPABILITY_VERSION, 0), bytes(_CAPABILITY_BYTES)) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def _call(number: int, *arguments: object) -> int:
    result = int(_libc.syscall(number, *arguments))
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"Landlock: {os.strerror(error)}")
    return result
