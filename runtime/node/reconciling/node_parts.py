"""Defines the parts of a node that all revisions share."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from ...calls.batching.queue import MAX_WAITING_BYTES
from ...ground.access.fair_share import SharedRoom
from ..launching.fetcher_client import FetcherClient
from ..launching.launcher import RevisionLauncher
from .gpu_bookings import GpuBookings
from .reconciler import Reconciler, SharedLimits


@dataclass(frozen=True, slots=True)
class NodeParts:
    """The parts of a node that its revisions share."""

    reconciler: Reconciler
    launcher: RevisionLauncher
    weights: FetcherClient
    tasks: asyncio.TaskGroup
    waiting: SharedRoom = field(default_factory=lambda: SharedRoom(MAX_WAITING_BYTES))
    """The bodies that wait in all queues."""

    @property
    def limits(self) -> SharedLimits:
        return self.reconciler.limits

    @property
    def gpus(self) -> GpuBookings:
        return self.reconciler.gpus
