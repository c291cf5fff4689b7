"""The workers and the GPU memory that a revision has and wants (its claim), and that it is granted.

`allocation.py` computes the grants from the claims.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from enum import IntEnum, StrEnum
from types import MappingProxyType
from typing import Literal, NamedTuple

from .placement import GpuNeed, Holding

NOTHING: Holding = MappingProxyType({})


class WorkerTier(IntEnum):
    """The purpose of a worker. Lower tiers are served first."""

    PROOF = 0
    """The first worker of a revision that is being deployed. It may be one more than `max_workers` and the owner's limit."""
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
    """The state of a process. The workers of a revision keep their places in this order."""

    STARTING = "starting"
    """It starts or wakes, and cannot be displaced."""
    READY = "ready"
    PARKED = "parked"
    """It is parked, or is about to be: then `holding` is still more than `parked`."""
    STANDBY = "standby"
    DRAINING = "draining"
    LEAVING = "leaving"
    """A standby that ends. As STANDBY, it is no worker and does not count against the limits."""


class NodeProcess(NamedTuple):
    """A worker or a standby of a revision."""

    key: Hashable
    state: ProcessState
    calls: int = 0
    used_s: float = 0.0
    """The time at which its last call ended, or before its first call the time of its start (monotonic, in seconds); -infinity
    while it restores its weights: such a start can be cancelled."""
    holding: Holding = NOTHING
    """The GPU memory that is booked for it now."""
    full: Holding = NOTHING
    """The GPU memory of an awake worker."""
    parked: Holding | None = None
    """The GPU memory of a parked worker; None if it cannot park, or frees nothing."""

    @property
    def restores(self) -> bool:
        return self.state is ProcessState.READY and self.used_s == -math.inf


class RevisionClaim(NamedTuple):
    """The workers and the GPU memory that a revision has and wants."""

    key: str
    """Its id on the node."""
    function: str
    """Two revisions of one function exist during a deploy."""
    owner: str
    wants: Mapping[WorkerTier, int]
    """The cumulative number of awake workers that PROOF, OWNER, LOAD and AHEAD want, after all caps."""
    awake: int
    """The number of workers that should be awake (`Row.awake`), at least each number of `wants`."""
    held: int
    """The number of workers that should be awake or parked (`Row.held`). The row stops the workers beyond this number."""
    processes: tuple[NodeProcess, ...] = ()
    need: GpuNeed | None = None
    waiting_since_s: float = math.inf
    """The time since which callers, a deploy or an urgent warm-up wait for a worker that is refused; infinity if none is.
    A revision whose worker was displaced waits from that time on, although its calls are older."""
    first_since_s: float = math.inf
    """The time since which it has a ready worker; infinity without one."""
    cost: Callable[[float], float] = lambda _freed_bytes: 0.0
    """Returns the callers' loss for each byte if one idle worker frees a number of bytes (eviction.py)."""


class Limits(NamedTuple):
    """The largest numbers of workers."""

    node: int | None = None
    """The limit of the node (`max_workers`); None for no limit."""
    owners: Mapping[str, int] = {}
    """The limits of the owners that have one, each for all functions of the owner."""


class ReachedLimit(NamedTuple):
    """The limit that keeps workers from a revision."""

    name: Literal["max_workers", "owner_limit", "gpus"]
    """The limit of the gateway, the limit of the owner's API key, or the memory of the GPUs (placement.py)."""
    most: int


class Grant(NamedTuple):
    """The steps that a revision takes now."""

    start: tuple[Holding | None, ...] = ()
    """For each worker that starts, its GPU memory; None without GPUs. The first one is the standby, if the revision has one."""
    wake: tuple[Hashable, ...] = ()
    park: tuple[Hashable, ...] = ()
    stop: tuple[Hashable, ...] = ()
    """Workers and standbys that end to make room. Busy workers finish their calls first."""
    limit: ReachedLimit | None = None
    """Why workers park, stop, or are missing."""


NO_GRANT = Grant()


class Allocation(NamedTuple):
    """The steps that all revisions take now."""

    grants: Mapping[str, Grant]
    """By the key of the claim. Revisions that have nothing to do and miss no worker are left out."""
    again_s: float = math.inf
    """The time at which the result may change although no event occurs. It is later than now."""
