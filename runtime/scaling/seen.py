"""The load and the workers of one revision, as observed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

# A worker is started for waiting invocations if they will keep it busy for as long as its start takes, or at least for this time.
# A caller hardly notices a shorter delay, and a start takes processor time from the workers that run.
TARGET_S = 0.1


class Load(NamedTuple):
    """What the load will take, in seconds."""

    work_s: float
    """How long one worker would take for all waiting invocations."""
    wake_s: float
    """How long the start of a worker takes; 0 if that is unknown."""
    started_s: float
    """How long the starting workers have been starting, summed; each counts for at most `wake_s`."""
    stuck: float
    """How many ready workers run calls that take much longer than usual. Their ends cannot be predicted."""
    lasting: float
    """The number of running and waiting invocations that lasts (recent_load.py)."""

    @property
    def delay_s(self) -> float:
        """How long waiting invocations may take on workers that are awake."""
        return max(self.wake_s, TARGET_S)


class Peak(NamedTuple):
    """The most workers that were needed at a time of a window that ends now."""

    workers: int = 0
    until_s: float = math.inf
    """When the peak leaves the window, if no more are needed."""


NO_NEED = Peak()


@dataclass(frozen=True, slots=True)
class Seen:
    """The present numbers of invocations and workers of a revision, and the workers that it needed in its windows."""

    queued: int
    in_flight: int
    starting: int
    ready: int
    idle_since_s: tuple[float, ...] = ()
    """One time for each ready worker without work, the earliest first."""
    load: Load | None = None
    """None while it is not known how long invocations take."""
    recent: Peak = NO_NEED
    """The need of the last `scale_down_s` seconds."""
    parked_since_s: tuple[float, ...] = ()
    """For each parked worker when its last work ended, the earliest first. `ready` does not count them."""
    recent_awake: Peak = NO_NEED
    """The need of the last `park_after_s` seconds."""
    leaving: int = 0
    """The invocations of workers that drain. They need no other worker, and `in_flight` does not count them."""

    @property
    def calls(self) -> int:
        return self.queued + self.in_flight

    @property
    def unfinished(self) -> int:
        return self.calls + self.leaving

    @property
    def parked(self) -> int:
        return len(self.parked_since_s)

    @property
    def awake(self) -> int:
        """The workers that run invocations, or will without another decision."""
        return self.ready + self.starting

    @property
    def held(self) -> int:
        return self.awake + self.parked
