"""Makes the state folder of a gateway, and locks it so that no second gateway uses the same folder."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from ....errors import GatewayError

LOG = logging.getLogger(__name__)
# If less space is free, deploys and uploads are refused, because jobs, logs and records need it. It is twice the size of a full log.
MIN_FREE_BYTES = 64 << 20
MOVING_FILE = "moving"
"""While this file is in a state folder, it is not known whether the jobs are in the folder or in a database."""


@contextlib.contextmanager
def locked_state_dir(path: Path) -> Iterator[Path]:
    """Make the folder if it does not exist, lock it, and yield its absolute path.

    The lock is held until the block ends or the process dies. Raise GatewayError if another gateway holds it,
    or if the folder cannot be used.
    """
    path = path.absolute()
    try:
        # Mode 0700, since the folder holds secrets and the settings of functions.
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        _make_private(path)
        descriptor = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        message = f"The state folder {path} cannot be used: {error.strerror}."
        remedy = "Set PILOTFLAME_STATE_DIR to a folder that can be written."
        raise GatewayError(message, remedy=remedy) from error
    # The lock file is never removed. Otherwise one gateway could still hold the lock of the removed file
    # while another creates a new file of the same name and locks that.
    try:
        _lock(descriptor, path)
        yield path
    finally:
        os.close(descriptor)


def _make_private(path: Path) -> None:
    """Remove the rights of group and others. A folder that existed before the gateway may have them."""
    mode = path.stat().st_mode
    try:
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            path.chmod(0o700)
    except OSError:
        # The volumes of Kubernetes belong to root, and to a group that this process is in. Some file systems have no rights.
        if mode & stat.S_IRWXO:
            text = "other users may read inputs of jobs and logs in %s, which has another owner: `chmod o-rwx` it"
            LOG.warning(text, path)


def check_not_moving(state: Path) -> None:
    """Raise GatewayError if `pilotflame move` was interrupted in its last step."""
    if (state / MOVING_FILE).exists():
        message = f"The move of the jobs of {state} into a database was interrupted in its last step."
        raise GatewayError(message, remedy="Run `pilotflame move` again, with the same PILOTFLAME_DATABASE.")


def check_user(path: Path) -> None:
    """Raise GatewayError if root would make files in the state folder of a gateway that runs as another user."""
    known = (path / "lock", path, *path.absolute().parents)
    owner = next(place.stat().st_uid for place in known if place.exists())
    if owner and os.geteuid() == 0:
        message = f"{path} belongs to the user {owner}, whose gateway could not read the files of root."
        remedy = f"Run this as that user: setpriv --reuid {owner} --clear-groups COMMAND. A command for keys may also wait until the gateway runs."
        raise GatewayError(message, remedy=remedy)


def store_fault(path: Path, error: Exception) -> tuple[str, str]:
    """Return why the database at `path` cannot be used, and what to do."""
    with contextlib.suppress(OSError):
        if is_disk_full(path.parent):
            return f"{error}: its disk is full", "Make room on the disk."
    return str(error), "Check the disk and the state folder's permissions; a damaged file can be moved away."


def create_private(path: Path) -> None:
    """Create a file that only this user can read, if it does not exist. Call it before SQLite opens the file.

    SQLite makes files with the rights that the umask leaves, and the files beside a database with the rights of the database.
    An error is left to SQLite, which reports a file that it cannot open.
    """
    with contextlib.suppress(OSError):
        path.touch(mode=0o600)
        # An earlier gateway may have created it.
        path.chmod(0o600)


@contextlib.contextmanager
def running_marker(state: Path) -> Iterator[str]:
    """Keep a file in the state folder that identifies the running gateway, until the block ends.

    Yield the content of the file that a gateway left behind if it ended without shutdown; "" if there is no such file. If
    the file cannot be written, the gateway starts anyway.
    """
    path = state / "run" / "gateway"
    previous = ""
    with contextlib.suppress(OSError):
        previous = path.read_text("ascii", "replace").strip()
    with contextlib.suppress(OSError):
        path.parent.mkdir(exist_ok=True, mode=0o700)
        started = datetime.now(UTC).isoformat(timespec="seconds")
        path.write_text(f"process {os.getpid()}, started {started}\n", "ascii")
    try:
        yield previous
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def free_bytes(folder: Path) -> int:
    """Return how many bytes this process may still write to the disk of `folder`."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def is_disk_full(folder: Path) -> bool:
    """Return True if the disk of `folder` has less than `MIN_FREE_BYTES` free, or no free inodes."""
    found = os.statvfs(folder)
    # Some file systems, such as btrfs, count no inodes.
    no_inodes = found.f_files > 0 and found.f_favail == 0
    return no_inodes or found.f_bavail * found.f_frsize < MIN_FREE_BYTES


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
        message = f"Another gateway, process {holder}, uses the state folder {path}."
        remedy = "Stop it, or set PILOTFLAME_STATE_DIR to another folder."
        details = {"pid": int(holder) if holder.isdecimal() else None}
        raise GatewayError(message, remedy=remedy, details=details) from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
