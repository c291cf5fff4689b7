"""Defines claims and grants. A claim lists the workers and the GPU memory that a revision has and wants.

`allocation.py` computes the grants from the claims of all revisions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from enum import IntEnum, StrEnum
from types import MappingProxyType
from typing import NamedTuple

from ...ground.settings.scale_spec import ReachedLimit
from .placement import GpuNeed, MemoryByGpu

NOTHING: MemoryByGpu = MappingProxyType({})


class WorkerTier(IntEnum):
    """The purpose of a worker. Lower tiers are served first."""

    PROOF = 0
    """The first worker of a revision in its deploy. It may exceed `max_workers` and the owner's limit by one."""
    OWNER = 1
    """`scale.min`."""
    FIRST = 2
    """The first worker of a revision for its callers."""
    LOAD = 3
    """Further workers for callers, and present workers that had a call within LATELY_S."""
    AHEAD = 4
    """Workers for calls that are expected."""
    KEEP = 5
    """Present workers that nothing needs now."""
    STANDBY = 6
    """A standby that holds GPU memory, because it rehearsed. It is no worker and does not count against the limits."""


class ProcessState(StrEnum):
    """The state of a process. If places are short, the workers of a revision keep their places in this order."""

    STARTING = "starting"
    """The worker is being forked, and cannot be displaced. A worker that restores its weights is READY."""
    READY = "ready"
    PARKED = "parked"
    """The worker is parked, or about to be parked. Until it is parked, `holding` is still more than `parked`."""
    STANDBY = "standby"
    DRAINING = "draining"
    LEAVING = "leaving"
    """A standby that ends. Like a STANDBY, it is no worker and does not count against the limits."""


class NodeProcess(NamedTuple):
    """A worker or a standby of a revision."""

    key: Hashable
    state: ProcessState
    calls: int = 0
    used_s: float = 0.0
    """When its last call ended, in monotonic seconds; before its first call, when it became ready. While it restores
    its weights, the value is -infinity: such a start can be cancelled."""
    holding: MemoryByGpu = NOTHING
    """The GPU memory that is booked for it now."""
    full: MemoryByGpu = NOTHING
    """The GPU memory that it may hold while it is awake."""
    parked: MemoryByGpu | None = None
    """The GPU memory of the parked worker; None if the worker cannot park, or frees nothing by parking."""

    @property
    def restores(self) -> bool:
        return self.state is ProcessState.READY and self.used_s == -math.inf


class RevisionClaim(NamedTuple):
    """The workers and the GPU memory that a revision has and wants."""

    key: str
    """The revision's id on the node."""
    function: str
    """The name of the function. During a deploy, two revisions have the same name."""
    owner: str
    wants: Mapping[WorkerTier, int]
    """For PROOF, OWNER, LOAD and AHEAD: how many awake workers the tier alone would want, after all caps. The largest number is the total."""
    awake: int
    """The number of workers that should be awake (`Row.awake`), at least each number of `wants`."""
    held: int
    """The number of workers that should be awake or parked (`Row.held`). The row stops the workers beyond this number."""
    processes: tuple[NodeProcess, ...] = ()
    need: GpuNeed | None = None
    waiting_since_s: float = math.inf
    """The time since which callers, a deploy or an urgent warm-up wait for a refused worker; infinity if no worker is
    refused. If a worker of the revision was displaced meanwhile, the wait begins anew at that time."""
    first_since_s: float = math.inf
    """The time since which the revision has a ready worker; infinity without a ready worker."""
    cost: Callable[[float], float] = lambda _freed_bytes: 0.0
    """Takes the number of bytes that an idle worker would free. Returns the callers' loss per byte (eviction.py)."""
    retiring: bool = False
    """True if the revision was replaced, and only runs the invocations that it has accepted."""


class Limits(NamedTuple):
    """The limits on the number of workers."""

    node: int | None = None
    """The limit of the node (`max_workers`); None for no limit."""
    owners: Mapping[str, int] = {}
    """By owner, the limit for all functions of that owner together. An owner without a limit is left out."""
    drain_s: float = math.inf
    """After callers of a function have waited this long for the places of its replaced revisions, workers of these revisions end."""


class Grant(NamedTuple):
    """The steps that a revision takes now."""

    start: tuple[MemoryByGpu | None, ...] = ()
    """For each worker that starts, its GPU memory; None without GPUs. The first worker is the standby, if the revision has one."""
    wake: tuple[Hashable, ...] = ()
    park: tuple[Hashable, ...] = ()
    stop: tuple[Hashable, ...] = ()
    """Workers and standbys that end to make room. Busy workers finish their calls first."""
    end: tuple[Hashable, ...] = ()
    """Workers of a replaced revision that end although they have calls."""
    limit: ReachedLimit | None = None
    """The limit that makes workers park or stop, or keeps missing workers from starting."""


NO_GRANT = Grant()


class Allocation(NamedTuple):
    """The steps that all revisions take now."""

    grants: Mapping[str, Grant]
    """The grants by the keys of the claims. Revisions that have no step to take and lack no worker are left out."""
    again_s: float = math.inf
    """The time at which the result may change although no event occurs. It is later than now."""
