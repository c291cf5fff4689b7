"""The load and the workers of one revision, as observed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .recent_need import NO_NEED, Peak

# A worker is started for waiting invocations if they will keep it busy for as long as its start takes, and at least for this time.
# A caller hardly notices a shorter delay, and a start takes processor time from the workers that run.
TARGET_S = 0.1


class Load(NamedTuple):
    """The predicted times of the load, in seconds."""

    work_s: float
    """How long one worker would take for all waiting invocations."""
    wake_s: float
    """How long the start of a worker takes; 0 if that is unknown."""
    started_s: float
    """The time for which workers have been starting, summed over all starting workers, at most `wake_s` for each."""
    stuck: float
    """The number of ready workers whose calls are late, so that the ends of these calls are unpredictable."""
    lasting: float
    """The lasting load: a number of running and waiting invocations (recent_load.py)."""
    each_s: float = 0.0
    """The most that one more waiting invocation adds to `work_s`; 0 if that is unknown."""

    @property
    def delay_s(self) -> float:
        """If awake workers need longer than this for the waiting invocations, another worker is worth its start."""
        return max(self.wake_s, TARGET_S)


@dataclass(frozen=True, slots=True)
class Seen:
    """The present numbers of invocations and workers of a revision, and the number of workers that it needed recently."""

    queued: int
    in_flight: int
    starting: int
    ready: int
    idle_since_s: tuple[float, ...] = ()
    """For each ready worker without work, when its last work ended; the earliest first."""
    load: Load | None = None
    """The predicted times of the load; None while the duration of an invocation is unknown."""
    recent: Peak = NO_NEED
    """The largest need of the last `scale_down_s` seconds."""
    parked_since_s: tuple[float, ...] = ()
    """For each parked worker, when its last work ended; the earliest first. `ready` does not count parked workers."""
    recent_awake: Peak = NO_NEED
    """The largest need of the last `park_after_s` seconds."""
    leaving: int = 0
    """The number of invocations at draining workers. They need no other worker. `in_flight` does not count them."""

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
        """The number of workers that are ready, or will be ready without another decision."""
        return self.ready + self.starting

    @property
    def held(self) -> int:
        return self.awake + self.parked
