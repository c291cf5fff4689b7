"""A target: where one shard's bytes go. An open file, and its memory where that is known to be there."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

from ...errors import CacheError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(frozen=True, slots=True)
class ShardTarget:
    """A file of exactly the shard's size. `memory`: the same bytes mapped shared, where bytes go straight into from the
    socket: pages that were used before, or huge ones. `fresh`: they need not be there yet.

    Fresh small pages are faster to fill by pwrite from a small kept buffer than through a mapping, which faults for every
    one (figures: docs/snapshot-choices.md).
    """

    name: str
    descriptor: int
    memory: memoryview | None = None
    fresh: bool = False

    def reserve(self, begin: int, end: int) -> None:
        """Have the pages of bytes [begin, end) there before `memory` is written to; CacheError when the disk is full.

        Through a hole of a full tmpfs we would be killed (SIGBUS); this is told.
        """
        if self.fresh and begin < end:
            try:
                os.posix_fallocate(self.descriptor, begin, end - begin)
            except OSError as error:
                raise self._refused(error) from error

    def write(self, offset: int, view: memoryview) -> None:
        """Put `view` at `offset`; CacheError when the disk is full or gone."""
        try:
            while view:
                count = os.pwrite(self.descriptor, view, offset)
                view, offset = view[count:], offset + count
        except OSError as error:
            raise self._refused(error) from error

    def read_into(self, offset: int, view: memoryview) -> int:
        """Fill `view` with what is there from `offset` on; returns the bytes read."""
        done = 0
        try:
            while done < len(view) and (count := os.preadv(self.descriptor, [view[done:]], offset + done)):
                done += count
        except OSError as error:
            raise CacheError(f"{self.name} cannot be read back: {error.strerror}.") from error
        return done

    def _refused(self, error: OSError) -> CacheError:
        remedy = "Make room, or give the cache another folder or a smaller budget."
        if error.errno not in _FULL:
            remedy = "Check the disk and the folder's permissions."
        return CacheError(f"{self.name} cannot be written: {error.strerror}.", remedy=remedy)
