"""Holds the fetched weights of one revision: one hold on each snapshot, for all workers of the revision's pool."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ...errors import ActivationFailed, PilotflameError, SourceDenied
from ..launching.fetcher_client import FetcherClient, FetchProgress, all_of
from ..link.worker_spec import Weights, WorkerSpec
from ..telemetry.timeline import Activation


class HeldWeights:
    """The snapshots that the fetcher keeps on this node for a revision. While the fetcher holds one, it is not evicted."""

    def __init__(
        self, spec: WorkerSpec, fetcher: FetcherClient, secrets: Callable[[], dict[str, str]]
    ) -> None:
        """`secrets` returns the function's secrets, which the fetcher needs for the sources."""
        self._spec, self._fetcher, self._secrets = spec, fetcher, secrets
        self._progress: dict[str, FetchProgress] = {}
        """The holds, by the names of the snapshots."""
        self._holding = asyncio.Lock()
        self._drops = False
        """True if the weights should leave the memory once no worker uses them."""

    @property
    def any(self) -> bool:
        """True if the revision has weights that are fetched."""
        return bool(self._spec.remote)

    @property
    def left_s(self) -> float | None:
        """How long the weights that are being fetched may still take; None if the revision has no such weights."""
        return min((one.left_s for one in self._progress.values()), default=None)

    @property
    def resident_bytes(self) -> int:
        """The number of bytes of these weights that are in memory."""
        return self._fetcher.resident_bytes(self) if self.any else 0

    async def fetch(self, activation: Activation) -> None:
        """Fetch and hold the weights that are not held yet, and again the weights whose fetch failed."""
        async with self._holding:
            self._drops = False
            for progress in [one for one in self._progress.values() if one.error is not None]:
                self._release(progress)
            missing = [one for one in self._spec.remote if one.name not in self._progress]
            await all_of(self._hold(one) for one in missing)
            activation.mark_fetching(progress.fetch for progress in self._progress.values())

    async def _hold(self, one: Weights) -> None:
        self._progress[one.name] = await self._fetcher.hold(one, self._secrets(), user=self)

    def _release(self, progress: FetchProgress) -> None:
        del self._progress[progress.weights.name]
        self._fetcher.release(progress)

    def release(self) -> None:
        """End all holds. The cache may evict the weights."""
        for progress in list(self._progress.values()):
            self._release(progress)

    def drop(self) -> None:
        """Let the weights leave the memory at the next `drop_unused`. Weights that are not on the disk stay."""
        self._drops = True

    def drop_unused(self) -> None:
        """Let the weights leave the memory if `drop` was called. The caller says so when no worker uses them."""
        if self._drops and self.any:
            self._drops = False
            self.release()
            self._fetcher.drop(self)

    def close(self) -> None:
        """End all holds: the revision has ended."""
        self.release()
        self._fetcher.forget(self)

    def explain(self, error: PilotflameError) -> PilotflameError:
        """Return `error`, or the fetcher's error if `error` only says that a worker's weights are missing."""
        cause = next((one.error for one in self._progress.values() if one.error is not None), None)
        if cause is None or not _only_missing(error):
            return error
        message = f"The weights are not whole: {cause.message}"
        details = {**cause.details, "cause": cause.code}
        return ActivationFailed(message, remedy=cause.remedy, details=details)

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
