"""Defines the object that a handler receives as `context.adapters`: the snapshots of the table `[adapters]`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from threading import Lock

from ..errors import NoSuchSnapshot
from .handle import ADAPTERS, Snapshot

FetchByName = Callable[[str], float]
"""Requests the fetch of the snapshot with this full name, and returns once its files can be mapped. The result is the time
in seconds within which all its bytes arrive."""


class Adapters:
    """The adapters of a function, by name. The first `open` of an adapter fetches and maps it. Iteration yields names."""

    def __init__(self, snapshots: Iterable[Snapshot] = ()) -> None:
        self._named = {one.name.removeprefix(ADAPTERS): one for one in snapshots}
        self.compare = any(one.compares for one in self._named.values())
        """True if `check` compares the bytes of an adapter. If it is False, `check` does nothing."""
        self._locks = {name: Lock() for name in self._named}
        self._opened = set[str]()
        self.fetch: FetchByName | None = None
        """A worker sets this function before its handler runs. Until then, `open` can open only adapters that are on this node."""

    def __getitem__(self, name: str) -> Snapshot:
        """Return an adapter. It may not be open yet, but its `path` and `manifest` are known. Raise NoSuchSnapshot if no adapter has this name."""
        if (found := self._named.get(name)) is not None:
            return found
        there = f"there: {', '.join(self._named)}" if self._named else "there are none"
        raise NoSuchSnapshot(
            f"There is no adapter {name!r} ({there}).", remedy="Name it in [adapters] of pilotflame.toml."
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._named)

    def __len__(self) -> int:
        return len(self._named)

    def __contains__(self, name: object) -> bool:
        return name in self._named

    def open(self, name: str) -> Snapshot:
        """Return an adapter with all its bytes, mapped. The first call fetches it.

        Block until all bytes have arrived: async handlers call this with `asyncio.to_thread`. Several threads may call it at
        once. Raise NoSuchSnapshot if there is no such adapter. Raise the error of the fetch if it fails. The next call then
        fetches again.
        """
        found = self[name]
        with self._locks[name]:
            if name not in self._opened:
                self._open(found)
                self._opened.add(name)
        return found

    def _open(self, one: Snapshot) -> None:
        by_s = None
        if one.fetched and self.fetch is not None:
            within_s = self.fetch(one.name)
            by_s = time.monotonic() + within_s
        one.open(by_s)
        one.wait()

    def check(self) -> None:
        """Raise SnapshotChanged if an open adapter may no longer have the bytes that its manifest describes."""
        for name in tuple(self._opened):
            self._named[name].check()

    def __repr__(self) -> str:
        return f"Adapters({list(self._named)!r})"
