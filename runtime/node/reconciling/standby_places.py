"""Gives the standbys of one revision their places on GPUs: a standby without a place does not rehearse."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from ...calls.link.child import Child
from .gpu_places import GpuClaimant, GpuPlace, GpuPlaces


class StandbyPlaces:
    """Books the GPU memory of a standby: first the memory for its rehearsal, then the memory that it keeps."""

    def __init__(self, gpus: GpuPlaces, claimant: GpuClaimant, tasks: asyncio.TaskGroup) -> None:
        self._gpus, self._claimant, self._tasks = gpus, claimant, tasks

    def take(self, facts: Mapping[str, Any]) -> tuple[GpuPlace | None, int | None]:
        """Return the place of the next standby, and the number of MiB of each GPU that it may use to rehearse.

        The number is 0 if the standby must not rehearse on a GPU, and None if the function has no GPUs of its own. The
        zygote has sent `facts` about the handler.
        """
        if self._claimant.gpu_need is None:
            return None, None
        if not facts.get("rehearses") or (place := self._gpus.take_standby(self._claimant)) is None:
            return None, 0
        return place, min(place.holding.values())

    def bind(self, place: GpuPlace, child: Child | None) -> None:
        """Record that `child` has the place. Give the place back when `child` ends, or at once if the fork failed."""
        if child is None:
            self._gpus.free(place)
            return
        place.child = child
        self._tasks.create_task(self._gpus.free_at_end(place, child))

    def note_forked(self) -> None:
        """Learn that a standby was forked: it can become a worker now, or be replaced."""
        self._gpus.note_forked()

    def note_primed(self, place: GpuPlace, child: Child, head: Mapping[str, Any]) -> None:
        """Learn from a standby's PRIMED frame how much GPU memory it keeps after its rehearsal."""
        self._tasks.create_task(self._shrink(place, child, list(head.get("reserved", ()))))

    async def _shrink(self, place: GpuPlace, child: Child, reserved: list[int]) -> None:
        self._gpus.note_rehearsed(place, await self._gpus.kept(place, child, reserved))
