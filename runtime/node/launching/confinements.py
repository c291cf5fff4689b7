"""Makes and removes the confinement of a function's processes: its cgroup and its folder for temporary files."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import secrets
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

from ....errors import LauncherError
from ....removal import remove_tree
from ....snapshot.caching.memory import is_ours
from ...calls.link.worker_spec import Confinement, WorkerSpec
from . import cgroups

PREFIX = "pilotflame-"
# Flags of mount(2): no programs with the rights of their owners, and no devices.
_NOSUID, _NODEV = 2, 4
# Flags of umount2(2): a mount that is in use ends with its last use, and no link is followed.
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8
_libc = ctypes.CDLL(None, use_errno=True)


class Confinements:
    """The confinements of one gateway. All methods block."""

    def __init__(self, state: Path, cache: Path) -> None:
        """`state` is the gateway's state folder, `cache` the node's cache of fetched snapshots."""
        self._state, self._cache = state, cache
        digest = hashlib.sha256(os.fsencode(state)).hexdigest()[:8]
        self._prefix = f"{PREFIX}{os.getuid()}-{digest}"
        self._groups: dict[Confinement, cgroups.Cgroup] = {}
        # Several threads make confinements at the start of the gateway. With this lock, only the first thread looks for
        # what an earlier gateway has left.
        self._cleaning, self._clean = threading.Lock(), False
        self._left: list[Path] = []
        self._root_lock: int | None = None

    def make(self, spec: WorkerSpec) -> Confinement:
        """Make and return the confinement of a revision's processes. Raise LauncherError."""
        self._find_left()
        name = f"{self._prefix}-{spec.function}-{spec.revision.partition('-')[0]}-{secrets.token_hex(4)}"
        group = cgroups.make_cgroup(name, spec.resources)
        tmp = None
        try:
            tmp = self._make_tmp(spec)
            confinement = Confinement(
                joins=group.joins if group is not None else (),
                memory_kills=group.memory_kills if group is not None else None,
                tmp=tmp, **self._files(spec),
            )  # fmt: skip
        except BaseException:
            if group is not None:
                group.remove()
            raise
        if group is not None:
            self._groups[confinement] = group
        return confinement

    def remove(self, confinement: Confinement) -> None:
        """Remove a confinement, and kill the processes that are still in its cgroup."""
        if (group := self._groups.pop(confinement, None)) is not None:
            group.remove()
        if confinement.tmp is not None:
            _remove_tmp(confinement.tmp)

    def close(self) -> None:
        """Remove the parent folder of all temporary folders if it is empty, and unlock it."""
        with suppress(OSError):
            self.tmp_root.rmdir()
        if self._root_lock is not None:
            os.close(self._root_lock)
            self._root_lock = None

    @property
    def tmp_root(self) -> Path:
        """The parent folder of all folders for temporary files."""
        return Path(tempfile.gettempdir()) / self._prefix

    def remove_left(self) -> None:
        """Remove what a killed gateway with the same state folder has left. Meanwhile, other threads may call `make`."""
        with suppress(OSError):
            self._find_left()
        for folder in self._left:
            _remove_tmp(folder)

    def _find_left(self) -> None:
        with self._cleaning:
            if not self._clean:
                cgroups.remove_left(self._prefix)
                self._left = list(self.tmp_root.iterdir()) if is_ours(self.tmp_root) else []
                self._clean = True

    def _make_tmp(self, spec: WorkerSpec) -> Path | None:
        """Return a new folder for temporary files. If the folder cannot be made, raise LauncherError if `tmp_mb` is
        set, and otherwise return None.
        """
        size_mb = spec.resources.tmp_mb
        try:
            folder = Path(tempfile.mkdtemp(prefix=f"{spec.function[:16]}-", dir=self._make_root()))
        except OSError as error:
            if size_mb is None:
                return None
            message = f"No folder for temporary files can be made: {error.strerror} ({error.filename})."
            raise LauncherError(message, remedy="Set TMPDIR to another folder.") from error
        if size_mb is not None and not mount_tmp(folder, size_mb):
            folder.rmdir()
            message = (
                f"resources.tmp_mb is {size_mb}, but the gateway may not mount file systems on this machine."
            )
            raise LauncherError(message, remedy=cgroups.REMEDY)
        return folder

    def _make_root(self) -> Path:
        """Make the parent folder of all temporary folders, lock it, and return it. Raise OSError if it cannot be made,
        belongs to another user, or is open to others.
        """
        root = self.tmp_root
        with suppress(FileExistsError):
            root.mkdir(mode=0o700)
        if not is_ours(root):
            raise PermissionError(errno.EPERM, "it belongs to another user or is open to others", str(root))
        with self._cleaning:
            if self._root_lock is None:
                # Lock the folder. Otherwise, systemd-tmpfiles would remove files that were not used for days.
                self._root_lock = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
                with suppress(BlockingIOError):
                    fcntl.flock(self._root_lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return root

    def _files(self, spec: WorkerSpec) -> dict[str, tuple[Path, ...]]:
        if spec.resources.files != "private":
            return {}
        # Make the folders now, because Landlock accepts a rule only for a folder that exists.
        (uploads := self._state / "files").mkdir(mode=0o700, exist_ok=True)
        # An environment is a folder with bin/python.
        environment = Path(spec.python).parents[1] if spec.python else None
        weights = (path for one in spec.weights for path in one.folders)
        paths = (spec.code, *weights, environment)
        writable = () if spec.prefixes is None else (spec.prefixes.folder,)
        for folder in writable:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return {
            "hidden": (self._state, self.tmp_root, self._cache),
            "readable": tuple(path for path in paths if path is not None),
            "writable": writable,
            "unlisted": (uploads,),
        }


def mount_tmp(folder: Path, size_mb: int) -> bool:
    """Mount a file system of `size_mb` in memory on `folder`. Return True if the kernel has allowed it."""
    options = f"mode=0700,size={size_mb}m".encode()
    place = os.fsencode(folder)
    return bool(_libc.mount(b"pilotflame", place, b"tmpfs", _NOSUID | _NODEV, options) == 0)


def _remove_tmp(folder: Path) -> None:
    _libc.umount2(os.fsencode(folder), _UMOUNT_NOFOLLOW | _MNT_DETACH)
    remove_tree(folder)
