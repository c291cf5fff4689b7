"""Removes folders in which untrusted code may have made any files."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY
# Removing this many blocks of 512 bytes takes about as long as removing an entry.
_BLOCKS = 4096
# Fewer entries than this fit into one read of a folder. So no file system leaves some out while others are removed.
_MANY = 50


def remove_tree(folder: str | Path, most: float = math.inf) -> bool:
    """Remove a folder with everything in it, and return True; return False if something is left. Follow no links.

    Unlike `shutil.rmtree`, this also removes trees of any depth, and folders that may not be read or written. It raises
    no OSError. `most` limits the work: the number of entries, where 2 MiB of a file count as one entry.
    """
    # Do not use pathlib, because this runs at each end of a worker, and pathlib is slower.
    parent, name = os.path.split(folder)
    # OSError: another process has removed or moved a folder, or the limit is reached.
    with suppress(OSError):
        _Removal(parent or os.curdir, most).run(name)
    try:
        os.lstat(folder)
    except OSError as error:
        return isinstance(error, (FileNotFoundError, NotADirectoryError))
    return False


class _Removal:
    """A walk through a tree. One folder is open at a time, because the tree may be deeper than the number of files that
    a process may open.
    """

    def __init__(self, parent: str, most: float) -> None:
        self._place, self._left = os.open(parent, _FOLDER), most
        # For the open folder and each folder above it: what identifies it, and the folders in it that are to be removed.
        self._levels: list[tuple[tuple[int, int], Iterator[str]]] = []
        # The names of the folders on the way from the parent to the open folder.
        self._names: list[str] = []

    def run(self, name: str) -> None:
        try:
            self._levels.append((_identity(self._place), iter([name])))
            while self._levels:
                if (inner := next(self._levels[-1][1], None)) is not None:
                    self._enter(inner)
                else:
                    self._leave()
        finally:
            os.close(self._place)

    def _enter(self, name: str) -> None:
        """Open a folder of the open folder, and remove the files in it. Do nothing if it is no folder any more."""
        try:
            # An empty folder needs no more.
            os.rmdir(name, dir_fd=self._place)
        except OSError:
            try:
                inner = _open_writable(self._place, name)
            except OSError:
                # It is no folder any more, or belongs to another user, or is a mount.
                return
            self._open(inner)
            self._names.append(name)
            self._levels.append((_identity(self._place), iter(self._remove_files())))

    def _leave(self) -> None:
        """Open the folder above the open folder, and remove the folder that was open. Raise OSError if it was moved."""
        self._levels.pop()
        if self._levels:
            self._open(os.open("..", _FOLDER, dir_fd=self._place))
            if _identity(self._place) != self._levels[-1][0]:
                raise OSError("the folder was moved")
            with suppress(OSError):
                os.rmdir(self._names.pop(), dir_fd=self._place)

    def _open(self, folder: int) -> None:
        os.close(self._place)
        self._place = folder

    def _remove_files(self) -> list[str]:
        """Remove all entries of the open folder except folders. Return the names of the folders."""
        removed = _MANY
        # Some file systems leave entries out while many others are removed, so look again.
        while removed >= _MANY:
            removed, folders = 0, []
            with os.scandir(self._place) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.name)
                        continue
                    self._count(entry)
                    with suppress(OSError):
                        os.unlink(entry.name, dir_fd=self._place)
                        removed += 1
        self._left -= len(folders)
        return folders

    def _count(self, entry: os.DirEntry[str]) -> None:
        """Count an entry. Raise OSError if the count exceeds the limit."""
        if self._left < math.inf:
            self._left -= 1 + entry.stat(follow_symlinks=False).st_blocks // _BLOCKS
            if self._left < 0:
                raise OSError("the limit is reached")


def _open_writable(place: int, name: str) -> int:
    """Open a folder in the open folder `place`, and give its owner all rights on it. Raise OSError."""
    with suppress(PermissionError):
        folder = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=place)
        try:
            if os.fstat(folder).st_mode & stat.S_IRWXU != stat.S_IRWXU:
                os.fchmod(folder, stat.S_IRWXU)
        except OSError:
            os.close(folder)
            raise
        return folder
    # The folder may not be read. Open it with O_PATH, which needs no right to read it, and give its owner all rights first.
    handle = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=place)
    try:
        # `fchmod` accepts no descriptor that was opened with O_PATH.
        os.chmod(f"/proc/self/fd/{handle}", stat.S_IRWXU)  # noqa: PTH101
        return os.open(".", _FOLDER, dir_fd=handle)
    finally:
        os.close(handle)


def _identity(folder: int) -> tuple[int, int]:
    found = os.fstat(folder)
    return found.st_dev, found.st_ino
