"""What the policies that others use cost whole classes of functions, for the benchmark of ours."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from pilotflame.runtime.scaling.keep_alive_baselines import Hybrid, timeout
from pilotflame.runtime.scaling.ladder import Ladder
from pilotflame.runtime.scaling.ladder_simulator import Fixed, KeepAlivePolicy, LadderRun, Replay, run

SERVICE_S = 0.2
TIMEOUTS_S = (0.001, *(10 ** (power / 4) for power in range(-3, 21, 2)), math.inf)
BIN_WIDTHS_S = (1.0, 10.0, 60.0, 600.0)
Policies = Callable[[], KeepAlivePolicy]


def replay_all(functions: Sequence[Sequence[float]], ladder: Ladder, policy: Policies) -> list[LadderRun]:
    """Replay each function under a policy of its own."""
    return [run(Replay(arrivals, SERVICE_S, ladder, policy())) for arrivals in functions]


def total(runs: Sequence[LadderRun]) -> LadderRun:
    whole = LadderRun()
    for one in runs:
        whole += one
    return whole


def fixed_timeouts(functions: Sequence[Sequence[float]], ladder: Ladder) -> list[LadderRun]:
    """What each timeout and floor rung costs the whole class."""
    plans = [timeout(at_s, floor) for floor in range(1, len(ladder.rungs)) for at_s in TIMEOUTS_S]
    return [total(replay_all(functions, ladder, partial(Fixed, plan))) for plan in plans]


def hybrids(functions: Sequence[Sequence[float]], ladder: Ladder) -> list[LadderRun]:
    """What the hybrid histogram costs with each width of its bins and each floor rung."""
    return [
        total(replay_all(functions, ladder, partial(Hybrid, width, floor, ladder)))
        for width in BIN_WIDTHS_S
        for floor in range(1, len(ladder.rungs))
    ]
