"""The CPU time of one decision about the workers of a revision, and of one allocation of a node's workers.

    python infra/bench/decisions.py

A decision takes the numbers of a revision with default settings, learns from them, and computes the row. An allocation
shares workers and GPUs among 1,000 functions. 300 of them want more together than the node has.
"""

from __future__ import annotations

import gc
import itertools
import random
import sys
import time
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

from percentiles import median
from pilotflame.runtime.ground.settings.scale_spec import ScaleSpec
from pilotflame.runtime.node.scaling.allocation import allocate
from pilotflame.runtime.node.scaling.claims import (
    Allocation,
    Limits,
    NodeProcess,
    ProcessState,
    RevisionClaim,
    WorkerTier,
)
from pilotflame.runtime.node.scaling.desired_state import desired
from pilotflame.runtime.node.scaling.eviction import Gaps, StepDown, waiting_per_byte
from pilotflame.runtime.node.scaling.load import sufficient_load, wanted
from pilotflame.runtime.node.scaling.placement import Gpu, GpuNeed
from pilotflame.runtime.node.scaling.recent_load import RecentLoad
from pilotflame.runtime.node.scaling.recent_need import RecentNeed
from pilotflame.runtime.node.scaling.revision_state import RevisionState
from pilotflame.runtime.node.scaling.seen import Load, Seen
from report import Report, parser

REPEATS = 7
DECISION_US, ALLOCATION_MS = "<= 40", "<= 7"
DECISIONS, ALLOCATIONS = 20_000, 20
# The time between two decisions of a busy function.
STEP_S = 0.01
WAKE_S, WORK_S = 0.015, 0.05

FUNCTIONS, CLAIMS, OWNERS, ON_GPUS = 1_000, 300, 20, 40
MAX_WORKERS, OWNER_LIMIT, MOST_WANTED = 330, 17, 3
GPUS = [Gpu(str(number), 24_576) for number in range(4)]
# A GPU has room for 7 workers. 6 are there, and 10 functions want it.
WORKER_MB, PARKED_MB, PRESENT_ON_GPUS = 3_200, 400, 24
# The shares of the present workers that have calls, start, and drain. All other workers are idle.
BUSY, STARTING, DRAINING = 0.6, 0.05, 0.03
IDLE_TIMES = 50
NOW_S = 1_000.0


class Decisions:
    """One revision with default settings: its numbers of calls and workers, and their recent past."""

    def __init__(self, seen: Seen) -> None:
        self._seen, self._spec = seen, ScaleSpec()
        self._load, self._need = RecentLoad(), RecentNeed()
        self._now_s = self._in_flight_s = 0.0

    def decide(self) -> None:
        """Compute the row and its numbers, as the gateway does before it starts or stops workers of the revision."""
        now = self._now_s = self._now_s + STEP_S
        seen, spec = self._seen, self._spec
        self._in_flight_s += seen.in_flight * STEP_S
        lasting = self._load.note(now, self._in_flight_s, seen.queued, admitted=0, emptied=0)
        started_s = min(WAKE_S, STEP_S) * seen.starting
        load = Load(seen.queued * WORK_S, WAKE_S, started_s, stuck=0.0, lasting=lasting)
        numbers = seen.queued, seen.in_flight, seen.starting, seen.ready
        self._need.note(now, wanted(spec, Seen(*numbers, load=load)))
        self._need.forget(now, spec.scale_down_s)
        idle_since_s = (now - STEP_S,) * len(seen.idle_since_s)
        observed = Seen(*numbers, idle_since_s, load, self._need.peak(now, spec.scale_down_s))
        row = desired(spec, observed, now, RevisionState())
        list(row.causes(observed, row.start(observed)))
        row.stop(observed)
        row.park(observed)
        sufficient_load(spec, observed)


CASES = {
    "from_zero": Seen(queued=1, in_flight=0, starting=0, ready=0),
    "busy": Seen(queued=3, in_flight=2, starting=1, ready=2),
    "idle": Seen(queued=0, in_flight=0, starting=0, ready=1, idle_since_s=(0.0,)),
}


def cpu_s(work: Callable[[], Any], times: int) -> float:
    """Return the CPU time in seconds of one call of `work`: the median of REPEATS means of `times` calls."""
    figures = []
    for _ in range(REPEATS):
        began_s = time.process_time()
        for _ in range(times):
            work()
        figures.append((time.process_time() - began_s) / times)
    return median(figures)


def contended() -> Callable[[], Allocation]:
    """Return the allocation of a node on which more workers are wanted than `max_workers`, owners and GPUs allow."""
    draw = random.Random(1)
    claims = [_claim(number, draw) for number in range(FUNCTIONS)]
    owners = {f"owner{number}": OWNER_LIMIT for number in range(OWNERS)}
    limits = Limits(MAX_WORKERS, owners)
    return lambda: allocate(claims, limits, GPUS, NOW_S)


def _claim(number: int, draw: random.Random) -> RevisionClaim:
    owner, function = f"owner{number % OWNERS}", f"f{number}"
    if number >= CLAIMS:
        return RevisionClaim(function, function, owner, {}, awake=0, held=0)
    want, present = draw.randint(1, MOST_WANTED), draw.randint(0, 2)
    if number < ON_GPUS:
        present = int(number < PRESENT_ON_GPUS)
    gpu = str(number % len(GPUS)) if number < ON_GPUS else None
    processes = tuple(_process((number, worker), gpu, draw) for worker in range(present))
    return RevisionClaim(
        function, function, owner, {WorkerTier.LOAD: want}, want, max(want, present), processes,
        need=None if gpu is None else GpuNeed(1, WORKER_MB),
        waiting_since_s=NOW_S - draw.uniform(0, 20) if want > present else float("inf"),
        first_since_s=NOW_S - draw.uniform(0, 60) if present else float("inf"),
        cost=partial(_cost, function, Gaps([draw.uniform(1, 100) for _ in range(IDLE_TIMES)])),
    )  # fmt: skip


def _cost(function: str, gaps: Gaps, freed_bytes: float) -> float:
    return waiting_per_byte(StepDown(function, STEP_S, WAKE_S, freed_bytes, gaps))


def _process(key: Hashable, gpu: str | None, draw: random.Random) -> NodeProcess:
    states, turn = ProcessState, draw.random()
    shares = zip(
        itertools.accumulate((BUSY, STARTING, DRAINING)),
        (states.READY, states.STARTING, states.DRAINING),
        strict=True,
    )
    state = next((state for share, state in shares if turn < share), states.READY)
    holding, parked = ({}, None) if gpu is None else ({gpu: WORKER_MB}, {gpu: PARKED_MB})
    calls = int(turn < BUSY)
    return NodeProcess(key, state, calls, NOW_S - draw.uniform(0, 5), holding, holding, parked)


def main() -> int:
    arguments = parser(__doc__).parse_args()
    report = Report("bench-decisions")
    gc.freeze()
    for name, seen in CASES.items():
        figure_us = cpu_s(Decisions(seen).decide, DECISIONS) * 1e6
        report.add(f"decision_{name}_us", figure_us, "us CPU", DECISION_US)
    report.add("allocation_ms", cpu_s(contended(), ALLOCATIONS) * 1e3, "ms CPU", ALLOCATION_MS)
    return report.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())
