"""Removes the working folders of children that have ended (`working_folder.py`).

The parent removes them, because it also sees children that are killed. A worker that removed gigabytes of files itself would
keep its GPU meanwhile.
"""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Collection
from contextlib import suppress
from itertools import islice
from pathlib import Path

from setproctitle import setproctitle

from ....removal import remove_tree

# A zygote removes a folder of at most this many entries itself, which takes less than a millisecond. For a larger folder, it
# forks a process.
REMOVED_AT_ONCE = 64
# A base looks at no more folders than this before a fork, to find the folders of ended processes.
LOOKED_AT = 1000


class ChildFolders:
    """The folders of the children of this process."""

    def __init__(self) -> None:
        self._folders: dict[int, str] = {}
        self.copied: Collection[str] = ()
        """The files that each child has in its working directory at its start."""

    def expect(self, pid: int, root: str) -> None:
        self._folders[pid] = f"{root}{os.sep}{pid}"

    def remove(self, pid: int) -> None:
        """Remove the folder of a child that has ended. Call this before reaping the child, because its pid may be reused afterwards."""
        if (folder := self._folders.pop(pid, None)) is not None and not self._remove_unchanged(folder):
            _remove(folder)

    def _remove_unchanged(self, folder: str) -> bool:
        """If the child has left no file in a folder, remove the folder and return True. This takes a third of the time of `_remove`.

        A link that the child has made is no risk, because this process has the same rights as the child.
        """
        with suppress(OSError):
            os.rmdir(f"{folder}{os.sep}tmp")  # noqa: PTH106
            for name in self.copied:
                os.unlink(f"{folder}{os.sep}work{os.sep}{name}")  # noqa: PTH108
            os.rmdir(f"{folder}{os.sep}work")  # noqa: PTH106
            os.rmdir(folder)  # noqa: PTH106
            return True
        return False

    def remove_ended(self, root: str) -> None:
        """Remove the folders below `root` of processes that ended after their parent, and the hidden folders that `_remove` left."""
        with suppress(OSError), os.scandir(root) as found:
            for entry in islice(found, LOOKED_AT):
                ended = entry.name.isdecimal() and not Path("/proc", entry.name).exists()
                if ended or entry.name.startswith("."):
                    _remove(entry.path)


def _remove(folder: str) -> None:
    """Remove a folder. If it is large, a fork of this process removes it."""
    if remove_tree(folder, REMOVED_AT_ONCE):
        return
    hidden = Path(folder).with_name(f".{secrets.token_hex(4)}")
    # If this fails, `remove_ended` removes the folder later.
    with suppress(OSError):
        Path(folder).rename(hidden)
        if os.fork() == 0:
            try:
                # The fork may outlive its parent. `end_orphans` does not kill the fork, because it stays in the parent's session.
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                # Close the copies of the connections, which would hide the end of the parent from the gateway.
                os.closerange(0, os.sysconf("SC_OPEN_MAX"))
                setproctitle("pilotflame: remover")
                remove_tree(hidden)
            finally:
                os._exit(0)
