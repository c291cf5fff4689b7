"""Logs when the disk of the state folder becomes full, and when it has room again."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ....errors import StorageFull

LOG = logging.getLogger(__name__)
PAUSE_S = 60.0
"""The shortest pause between two messages. Without a pause, a disk that changes between full and free would fill the log."""


class Disk:
    """The disk of the state folder. Its free space is read on request, and when the outcome of writes changes. No timer
    reads it.
    """

    def __init__(
        self, folder: Path, is_full: Callable[[], bool], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`is_full` checks the disk. Any thread may call it."""
        self._folder, self._is_full, self._clock = folder, is_full, clock
        self._lock = threading.Lock()
        self._again_s = float("-inf")
        self.full = False
        """True if the last message said that the disk is full."""

    def look(self) -> bool:
        """Return whether the disk is full, and log a change. Blocks."""
        full = self._is_full()
        with self._lock:
            now_s = self._clock()
            if full == self.full or now_s < self._again_s:
                return full
            self.full, self._again_s = full, now_s + PAUSE_S
        if full:
            LOG.error(
                "the disk of %s is full: /readyz answers 503, and jobs, logs and records may be lost",
                self._folder,
            )
        else:
            LOG.warning("the disk of %s has room again", self._folder)
        return full

    def check(self) -> None:
        """Raise StorageFull if the disk is full, so that no caller uses the space that is kept for jobs and records. Blocks."""
        if self.look():
            message = "The disk of the gateway's state folder is full."
            raise StorageFull(message, remedy="Ask its operator to make room, then try again.")

    def wrote(self, failed: bool) -> None:
        """Record that a write to the disk has succeeded or failed. If the outcome may mean that the disk has become
        full or has room again, look at the disk, which blocks.
        """
        if failed != self.full:
            self.look()
