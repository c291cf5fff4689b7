"""Keeps the fetched weights of one revision on this node. All workers of the revision share one hold on each snapshot."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ....errors import LauncherError, PilotflameError, SourceDenied, not_whole
from ...calls.link.worker_spec import Weights, WorkerSpec
from ...ground.telemetry.timeline import Activation
from ..launching.fetcher_client import FetcherClient, FetchProgress, all_of


class HeldWeights:
    """The holds of a revision on its snapshots. The cache does not evict a snapshot while there is a hold on it."""

    def __init__(
        self, spec: WorkerSpec, fetcher: FetcherClient, secrets: Callable[[], dict[str, str]]
    ) -> None:
        """`secrets` returns the function's secrets, which the fetcher needs for the sources."""
        self._spec, self._fetcher, self._secrets = spec, fetcher, secrets
        self._progress: dict[str, FetchProgress] = {}
        """The holds on the weights `at_start`, by the names of the snapshots."""
        self._on_use: dict[str, FetchProgress] = {}
        """The holds on adapters that workers have needed, by the names of the adapters."""
        self._holding_on_use = {one.name: asyncio.Lock() for one in spec.remote if one.on_use}
        self._holding = asyncio.Lock()

    @property
    def at_start(self) -> list[Weights]:
        """The weights that must be fetched before a worker starts."""
        return [one for one in self._spec.remote if not one.on_use]

    @property
    def left_s(self) -> float | None:
        """How long the weights that are being fetched may still take; None if the revision has no such weights."""
        return min((one.left_s for one in self._progress.values()), default=None)

    @property
    def resident_bytes(self) -> int:
        """The number of bytes of these weights that are in memory."""
        return self._fetcher.resident.bytes_of(self) if self._spec.remote else 0

    async def fetch(self, activation: Activation) -> None:
        """Fetch and hold the weights that are not held yet, and again the weights whose fetch failed."""
        async with self._holding:
            for progress in [one for one in self._progress.values() if one.error is not None]:
                self._release(self._progress, progress)
            missing = [one for one in self.at_start if one.name not in self._progress]
            await all_of(self._hold(one) for one in missing)
            activation.mark_fetching(progress.fetch for progress in self._progress.values())

    async def _hold(self, one: Weights) -> None:
        self._progress[one.name] = await self._fetcher.hold(one, self._secrets(), user=self)

    async def fetch_on_use(self, name: str) -> float:
        """Fetch and hold an adapter that a worker needs. Return how long its bytes may still take to arrive.

        Raise LauncherError if the revision fetches no such adapter, or the errors of `FetcherClient.hold`.
        """
        if (lock := self._holding_on_use.get(name)) is None:
            raise LauncherError(f"{self._spec.label} has no adapter {name[:80]!r} that is fetched.")
        async with lock:
            progress = self._on_use.get(name)
            if progress is not None and progress.error is not None:
                self._release(self._on_use, progress)
                progress = None
            if progress is None:
                wanted = next(one for one in self._spec.remote if one.name == name)
                progress = await self._fetcher.hold(wanted, self._secrets(), user=self)
                self._on_use[name] = progress
        return progress.left_s

    def _release(self, holds: dict[str, FetchProgress], progress: FetchProgress) -> None:
        del holds[progress.weights.name]
        self._fetcher.release(progress)

    def release(self) -> None:
        """End all holds. The cache may evict the weights."""
        for holds in (self._progress, self._on_use):
            for progress in list(holds.values()):
                self._release(holds, progress)

    def drop(self) -> None:
        """Let the weights leave the memory, because no worker uses them. Weights that are not on the disk stay in memory."""
        self._fetcher.drop(self)

    def close(self) -> None:
        """End all holds: the revision has ended."""
        self.release()
        if self._spec.remote:
            self._fetcher.resident.forget(self)

    def explain(self, error: PilotflameError) -> PilotflameError:
        """Return `error`, or the fetcher's error if `error` only says that a worker's weights are missing."""
        cause = next((one.error for one in self._progress.values() if one.error is not None), None)
        if cause is None or not _only_missing(error):
            return error
        return not_whole(cause)

    def unheard(self, error: PilotflameError) -> list[FetchProgress]:
        """If `error` says that weights are missing and the fetcher has reported no failure yet, return the open
        fetches.

        Otherwise return no fetches.
        """
        fetching = list(self._progress.values())
        heard = any(one.error is not None for one in fetching)
        return [] if heard or not _only_missing(error) else [one for one in fetching if not one.ended.done()]


def _only_missing(error: PilotflameError) -> bool:
    """Return True if `error` is a worker's report that its weights are missing. Only the fetcher knows why."""
    return error.details.get("cause") == SourceDenied.code
