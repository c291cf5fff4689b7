"""Makes spare files ahead of need, in the idle moments of the process that fetches.

Memory that nobody has touched yet costs most of a fetch: 0.2-0.9 GB/s, where a kept file takes 1.5-3
(docs/snapshot-choices.md). So while nothing is fetched, a thread of low priority writes files of zeros that are as
large as the shards of the largest snapshot that may be wanted. It ends within a piece when a fetch begins.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from ...errors import CacheError
from ...machine import free_memory_bytes
from ..format.manifest import Manifest
from .memory import has_huge_pages
from .tier import LEAST_SPARE_BYTES, Tier

FREE_SHARE = 0.25
"""Spare files are made of at most this share of the memory that is free."""
PIECE_BYTES = 2 << 20
"""So much is written between two looks whether a fetch has begun: some milliseconds."""
MOST_EXPECTED = 16
LOCK_TIMEOUT_S = 1.0
CLOSE_TIMEOUT_S = 2.0
_NICE = 19


class TouchedAhead:
    """The spare files of the memory tier among `tiers`, if there is one. Thread-safe."""

    def __init__(self, tiers: Sequence[Tier], on_made: Callable[[], None] = lambda: None) -> None:
        """`on_made` is called after a file was made."""
        self._on_made = on_made
        self._tiers = tuple(tiers)
        self._tier = next((tier for tier in tiers if tier.kind == "tmpfs"), None)
        self._lock = threading.Lock()
        """Guards the attributes below."""
        self._expected: dict[str, tuple[int, ...]] = {}
        self._fetches = 0
        self._thread: threading.Thread | None = None
        self._again = False
        """True if the thread has to look once more, since something has changed meanwhile."""
        self._making: Path | None = None
        """The file that is not finished yet."""
        self._stop = threading.Event()

    def expect(self, manifest: Manifest) -> None:
        """Make room for this snapshot, which may be fetched some time."""
        size_bytes = manifest.needed_bytes + manifest.assets_bytes
        # The files of a part are not made of spares (see `Tier.make_room`).
        if self._tier is None or manifest.part is not None or size_bytes > self._tier.budget_bytes:
            return
        with self._lock:
            self._expected.pop(manifest.digest, None)
            self._expected[manifest.digest] = tuple(shard.size_bytes for shard in manifest.shards)
            while len(self._expected) > MOST_EXPECTED:
                del self._expected[next(iter(self._expected))]
        self._start()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While the block runs, which fetches, make nothing."""
        with self._lock:
            self._fetches += 1
            self._interrupt()
        try:
            yield
        finally:
            with self._lock:
                self._fetches -= 1
            self._start()

    def give_back(self) -> None:
        """Delete the spare files, because memory is short. No more are made before the next fetch has ended."""
        with self._lock:
            self._again = False
            self._interrupt()
        if self._tier is not None and self._tier.root.is_dir():
            with suppress(CacheError, OSError), self._tier.locked():
                self._tier.spares.trim(0)

    def close(self) -> None:
        """Make nothing any more."""
        with self._lock:
            # It never ends.
            self._fetches += 1
            self._interrupt()
            thread = self._thread
        if thread is not None:
            thread.join(CLOSE_TIMEOUT_S)

    def wait(self, timeout_s: float) -> None:
        """Wait until all is made that is to be made now."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

    def _interrupt(self) -> None:
        """Let the thread end, and free the memory of the file that it makes. The lock is held."""
        self._stop.set()
        if self._making is not None:
            # The thread itself may wait long for a processor. The fetch does not wait: see `Tier.make_room`.
            threading.Thread(target=_free, args=(self._making,), name="spare-free", daemon=True).start()

    def _start(self) -> None:
        with self._lock:
            if self._tier is None or self._fetches:
                return
            if self._thread is not None:
                self._again = True
                return
            self._stop.clear()
            run, arguments = self._run, (self._tier,)
            self._thread = threading.Thread(target=run, args=arguments, name="spare-files", daemon=True)
            self._thread.start()

    def _run(self, tier: Tier) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        try:
            # OSError: the memory is full, or the tier has been removed.
            with suppress(OSError, CacheError):
                for size_bytes in self._missing(tier):
                    self._make(tier, size_bytes)
        finally:
            with self._lock:
                self._thread = None
                again, self._again = self._again, False
            if again:
                self._start()

    def _missing(self, tier: Tier) -> Sequence[int]:
        with self._lock:
            expected = [
                sizes
                for digest, sizes in self._expected.items()
                if not any(one.has(digest) for one in self._tiers)
            ]
        kept = [size_bytes for size_bytes, _ in tier.spares.files()]
        left_bytes = min(tier.spare_bytes - sum(kept), tier.budget_bytes - tier.used_bytes())
        left_bytes = min(left_bytes, int(FREE_SHARE * free_memory_bytes()))
        return missing_sizes(max(expected, key=sum, default=()), kept, left_bytes)

    def _make(self, tier: Tier, size_bytes: int) -> None:
        """Make one spare file. Leave none if a fetch begins: its memory is then free, and has been touched."""
        # A crash leaves it there for the next `sweep`.
        path = tier.root / "trash" / uuid4().hex
        if not tier.root.is_dir():
            return
        path.parent.mkdir(exist_ok=True)
        with self._lock:
            self._making = path
        try:
            if _write_zeros(path, size_bytes, self._stop):
                with tier.locked(LOCK_TIMEOUT_S):
                    if not self._stop.is_set():
                        tier.spares.put(path)
                        if has_huge_pages(tier.root):
                            tier.spares.map_ahead()
                self._on_made()
        finally:
            with self._lock:
                self._making = None
            path.unlink(missing_ok=True)


def missing_sizes(wanted: Sequence[int], kept: Sequence[int], left_bytes: int) -> Sequence[int]:
    """Return the sizes of the files to make so that there is one for each of `wanted`, the largest first.

    Each of the files `kept` serves one of the same size or less. Together, the new ones have `left_bytes` at most.
    """
    spares, missing = sorted(kept), []
    for size_bytes in sorted(wanted, reverse=True):
        if spares and spares[-1] >= size_bytes:
            spares.pop()
        elif LEAST_SPARE_BYTES <= size_bytes <= left_bytes:
            missing.append(size_bytes)
            left_bytes -= size_bytes
    return missing


def _free(path: Path) -> None:
    # It may have been finished or deleted meanwhile.
    with suppress(OSError):
        os.truncate(path, 0)


def _write_zeros(path: Path, size_bytes: int, stop: threading.Event) -> bool:
    """Write a file of zeros. Return False if `stop` is set before it is complete."""
    piece = memoryview(bytes(PIECE_BYTES))
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        # The size comes first: a tmpfs gives huge pages only within it.
        os.ftruncate(descriptor, size_bytes)
        at = 0
        while at < size_bytes:
            if stop.is_set():
                return False
            at += os.pwrite(descriptor, piece[: size_bytes - at], at)
        return True
    finally:
        os.close(descriptor)
