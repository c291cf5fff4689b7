"""Fetches adapters to this node without blocking the event loop. Each adapter is fetched once, even if several requests wait for it."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from ...snapshot.adapters import Adapters
from ...snapshot.handle import Snapshot

MOST_FETCHES = 4


class AdapterFetches:
    """The adapters that a worker fetches or has fetched. Use it on an event loop."""

    def __init__(self, snapshots: Adapters) -> None:
        self._snapshots = snapshots
        self._arriving: dict[str, asyncio.Future[Snapshot]] = {}
        self._threads: ThreadPoolExecutor | None = None

    async def arrive(self, name: str) -> Snapshot:
        """Wait until all bytes of an adapter are on this node, and return it, open. The first call starts the fetch.

        Raise SnapshotError or SourceError. The next call then fetches again.
        """
        if (arriving := self._arriving.get(name)) is None or _failed(arriving):
            if self._threads is None:
                # Make the threads here, in the worker, because the threads of a zygote would not survive the fork of a worker.
                self._threads = ThreadPoolExecutor(MOST_FETCHES, thread_name_prefix="adapter")
            loop = asyncio.get_running_loop()
            arriving = loop.run_in_executor(self._threads, self._snapshots.open, name)
            self._arriving[name] = arriving
        # A caller who leaves does not end the fetch, for which others may wait.
        return await asyncio.shield(arriving)


def _failed(arriving: asyncio.Future[Snapshot]) -> bool:
    return arriving.done() and (arriving.cancelled() or arriving.exception() is not None)
