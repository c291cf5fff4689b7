"""Defines what a function uses: seconds on each rung, memory, disk and devices over time, and their price.

`RungName` lists the rungs.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, fields
from typing import Self

from ..telemetry.rung_name import RungName

HOUR_S, DAY_S = 3600, 86400
GB = 1e9


# Not frozen, because a frozen dataclass is slow to make, and the ledger makes several Usages for each function and
# minute. No code changes a Usage.
@dataclass(slots=True)
class Usage:
    """The figures of one function over some time. Figures of several functions or times can be added up."""

    busy_s: float = 0.0
    """Seconds in which ready workers had work, summed over the workers."""
    idle_s: float = 0.0
    """Seconds in which ready workers had no work, summed over the workers."""
    starting_s: float = 0.0
    """Seconds from asking for a worker until it was ready or had failed, summed over the workers."""
    occupied_s: float = 0.0
    """Seconds in which there was at least one worker."""
    parked_s: float = 0.0
    """Seconds in which workers were parked, summed over the workers. `idle_s` contains these seconds, too."""
    zygote_s: float = 0.0
    """Seconds in which there was a zygote, but no worker."""
    local_s: float = 0.0
    """Seconds in which there was no process, only files. The files may have been in memory."""
    device_s: float = 0.0
    """Seconds in which workers held a GPU, summed over the workers. A worker that holds a share of a GPU counts by this share."""
    activations: float = 0.0
    """Starts of workers, without the starts by deploys."""
    memory_gb_s: float = 0.0
    """Memory (PSS) of workers, zygote and standby, or of bases or gateway, times the seconds for which it was held."""
    disk_gb_s: float = 0.0
    """Size of the stored revisions, times the seconds for which they were stored."""
    cost: float = 0.0
    """The cost of memory, disk and devices, at the prices of that time, whether calls used them or not."""
    always_on_cost: float = 0.0
    """The cost if one worker had always been ready, with the other workers unchanged."""
    invocations: float = 0.0
    """Invocations that workers have answered, including invocations of jobs."""
    cold_starts: float = 0.0
    """Callers who waited for the start of a worker. Jobs are not counted here."""
    waiting_s: float = 0.0
    """Seconds for which these callers waited."""
    holding_gb_s: float = 0.0
    """The part of `memory_gb_s` that no call used: the memory of idle workers, zygote, standby, bases and gateway."""
    holding_cost: float = 0.0
    """The part of `cost` for memory, devices and files that were held while no call used them."""

    prompt_tokens: float = 0.0
    """Tokens of the prompts of language models, of the texts of encoders, and of the pairs of rerankers."""
    cached_tokens: float = 0.0
    """The part of `prompt_tokens` that the model did not need to read."""
    generated_tokens: float = 0.0
    """Tokens that language models have made."""

    def __add__(self, other: Self) -> Self:
        return type(self)(*map(operator.add, figures(self), figures(other)))

    def __sub__(self, other: Self) -> Self:
        return type(self)(*map(operator.sub, figures(self), figures(other)))

    @property
    def worker_s(self) -> float:
        """Seconds of workers: for each worker, from the request to start it until its end."""
        return self.busy_s + self.idle_s + self.starting_s

    @property
    def deployed_s(self) -> float:
        return self.occupied_s + self.zygote_s + self.local_s


FIGURES = tuple(field.name for field in fields(Usage))
figures = operator.attrgetter(*FIGURES)
"""Returns the figures of a Usage, in the order of FIGURES."""

DISK_SHARE = 0.01
"""The price of a gigabyte of disk, as a share of the price of memory. Clouds rent disk at about this share. The price counts in
usage and budgets only: decisions about rungs do not consider the disk.
"""


@dataclass(frozen=True, slots=True)
class Prices:
    """The prices of holding a gigabyte of memory, a gigabyte of disk, or a device for an hour, in any currency."""

    memory_gb_hour: float = 0.0
    disk_gb_hour: float = 0.0
    device_hour: float = 0.0


@dataclass(frozen=True, slots=True)
class Footprint:
    """The memory, disk and devices of a function on this node, as they were measured last."""

    worker_gb: float = 0.0
    """Memory (PSS) of one worker. A page that several processes share counts in part."""
    rest_gb: float = 0.0
    """Memory of zygote and standby while there is no worker."""
    disk_gb: float = 0.0
    """Size of the stored revisions."""
    devices: float = 0.0
    """GPUs of one worker."""
    beside_gb: float = 0.0
    """Memory of zygote and standby beside workers, which share pages with them."""


def priced(used: Usage, footprint: Footprint, prices: Prices) -> Usage:
    """Return the usage `used` with its memory, disk, devices and cost, computed from `footprint`."""
    # If only one of the two figures was measured, it is used for both.
    beside_gb, alone_gb = footprint.beside_gb or footprint.rest_gb, footprint.rest_gb or footprint.beside_gb
    holding_gb_s = used.idle_s * footprint.worker_gb + used.occupied_s * beside_gb + used.zygote_s * alone_gb
    memory_gb_s = (used.busy_s + used.starting_s) * footprint.worker_gb + holding_gb_s
    disk_gb_s = used.deployed_s * footprint.disk_gb
    device_s = used.worker_s * footprint.devices
    # The always-on cost is computed as if there had been a worker, with a zygote beside it, in the seconds without a worker.
    on_s = used.worker_s + used.zygote_s + used.local_s
    on_gb_s = on_s * footprint.worker_gb + used.deployed_s * max(beside_gb, alone_gb)

    def cost(gb_s: float, device_s: float) -> float:
        per_h = gb_s * prices.memory_gb_hour + disk_gb_s * prices.disk_gb_hour + device_s * prices.device_hour
        return per_h / HOUR_S

    return used + Usage(
        memory_gb_s=memory_gb_s, disk_gb_s=disk_gb_s, device_s=device_s, cost=cost(memory_gb_s, device_s),
        always_on_cost=cost(on_gb_s, on_s * footprint.devices), holding_gb_s=holding_gb_s,
        holding_cost=cost(holding_gb_s, used.idle_s * footprint.devices),
    )  # fmt: skip


class RungClock:
    """Measures the time that a revision spends on each rung. Times are monotonic seconds."""

    def __init__(self, now_s: float, rung: RungName = RungName.LOCAL) -> None:
        self.rung = rung
        self._since_s = now_s
        self._past: dict[RungName, float] = {}

    def move(self, rung: RungName, now_s: float) -> None:
        """Record that the revision is on `rung` from now on."""
        if rung is not self.rung:
            self._past[self.rung] = self.seconds(self.rung, now_s)
            self.rung, self._since_s = rung, now_s

    def seconds(self, rung: RungName, now_s: float) -> float:
        """Return the seconds that the revision has spent on a rung so far."""
        present_s = now_s - self._since_s if rung is self.rung else 0.0
        return self._past.get(rung, 0.0) + present_s
