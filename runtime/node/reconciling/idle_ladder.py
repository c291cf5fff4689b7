"""Lets the keep-alive policy move an idle function down its ladder, and up again ahead of the next request.

Requests do not pass through this module. `ObservedRevision.advance` reports whether there is work. After QUIET_S without
work, a thread makes a plan. `IdleLadder.stand` returns the rung that the plan holds now, and the time of the plan's
next step.

The policy does not learn from an idle period in which the gateway was down or starts failed. After a restart of the
gateway, the plan counts from the beginning of the idle period, but does not begin with a step up.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from ...ground.telemetry.decisions import NUMBERED_RUNGS, Decisions, describe
from ...ground.telemetry.rung_name import RungName
from ..scaling.ended_periods import EndedPeriods
from ..scaling.eviction import Gaps, StepDown
from ..scaling.idle_distribution import SharedPrior
from ..scaling.idle_period import IdlePeriod, IdleWatch
from ..scaling.keep_alive import Choice
from ..scaling.ladder import Step
from ..scaling.measured_ladder import PLANNED, LadderSpec, MeasuredLadder
from ..scaling.rung_figures import differs
from ..scaling.upstream import NEVER_READY, ClimbCost, ready_shares

# Take a step that is due within this time, because timers may fire this early.
EARLY_S = 0.002


class LadderTarget(Protocol):
    """The live revision, as the ladder sees it."""

    @property
    def rung(self) -> RungName: ...
    @property
    def slow(self) -> tuple[int, int]:
        """The number of invocations that were slow, or failed, for lack of a ready worker, and the number of all invocations."""

    @property
    def warm_until_s(self) -> float | None:
        """The end of the time for which a signal holds workers; None without such a signal."""

    def look(self) -> None:
        """Call `IdleLadder.stand`, and act on the result."""


class Stand(NamedTuple):
    """The rung of an idle function."""

    rung: RungName | None = None
    """The highest rung that may be held; None if neither a plan nor an eviction limits the rung."""
    climbs: bool = False
    """True at a step up: the function climbs to the rung now, ahead of the next call."""
    again_s: float = math.inf
    """When the next step is due."""

    @property
    def keeps_worker(self) -> bool:
        return self.rung in (None, RungName.READY)

    @property
    def keeps_zygote(self) -> bool:
        return self.keeps_worker or self.rung is RungName.ZYGOTE


class NextStep(NamedTuple):
    """The next step of a plan, and the time of the step in Unix seconds."""

    rung: RungName
    at: float


class PlannedPeriod:
    """The present idle period under a plan: the present rung of the plan, and its next steps."""

    def __init__(
        self, period: IdlePeriod, choice: Choice, target: LadderTarget, spec: LadderSpec, past: EndedPeriods
    ) -> None:
        """Begin on the target's rung or on the plan's present rung, whichever is higher.

        So the plan may begin with a step down, but it never begins with a climb.
        """
        self._period, self._choice, self._past = period, choice, past
        self._target, self._rungs = target, spec.rungs
        self.stands_on = min(spec.number(target.rung), period.rung(choice.plan, time.monotonic()))
        """The number of the plan's present rung."""

    @property
    def rung(self) -> RungName:
        """The present rung of the plan."""
        return self._rungs[self.stands_on]

    def step(self, now_s: float, evicted_to: RungName | None) -> Stand:
        """Take the step that is due, and return the rung that may be held now.

        This rung is no higher than `evicted_to`, the rung of the last eviction, unless the plan climbs or a signal holds
        workers.
        """
        plan, before = self._choice.plan, self.stands_on
        wanted = self._period.rung(plan, now_s + EARLY_S)
        if wanted > before and (warm_s := self._target.warm_until_s) is not None:
            # A signal wants workers until `warm_s`. Then the plan goes on, with the step that is due at that time.
            return Stand(self.rung, again_s=warm_s)
        self.stands_on, climbs = wanted, wanted < before
        due_s = next((step.offset_s for step in self._period.later(plan, now_s + EARLY_S)), math.inf)
        rung = self.rung if climbs else max(self.rung, evicted_to or self.rung, key=PLANNED.index)
        return Stand(rung, climbs, due_s)

    def figures(self, before: int, now_s: float) -> dict[str, float]:
        """Return the figures behind the step from the rung with the number `before`."""
        rungs, history, idle_s = self._past.ladder.rungs, self._past.history, now_s - self._period.begun_s
        longer = sorted(gap for gap in history.idles if gap > idle_s)
        known = {"expected_in_s": longer[len(longer) // 2] - idle_s} if longer else {}
        return {
            "idle_s": idle_s,
            "rung": float(NUMBERED_RUNGS.index(self.rung)),
            "hold_per_hour": rungs[self.stands_on].hold_per_s * 3600,
            "saved_per_hour": (rungs[before].hold_per_s - rungs[self.stands_on].hold_per_s) * 3600,
            "wake_s": rungs[self.stands_on].wake_s,
            "expert": float(self._choice.expert),
            "periods": float(history.periods),
            **known,
        }  # fmt: skip

    def next_step(self) -> NextStep | None:
        """Return the next step that changes the held rung; None without such a step."""
        now_s, held = time.monotonic(), self._target.rung
        for step in self._period.later(self._choice.plan, now_s):
            if (rung := self._rungs[step.rung]) is not held:
                return NextStep(rung, time.time() + step.offset_s - now_s)
        return None

    def ready_shares(self) -> tuple[float, ...]:
        """For each bin of delays from now, return the share of the bin in which the plan holds a worker."""
        plan, elapsed_s = self._choice.plan, time.monotonic() - self._period.planned_from_s
        if self._target.rung is not RungName.READY:
            # Below READY, only a later step up of the plan brings the function to READY.
            lowest = Step(0.0, len(self._rungs) - 1)
            plan = (lowest, *(step for step in plan if step.offset_s > elapsed_s))
        return ready_shares(plan, [rung.wake_s for rung in self._past.ladder.rungs], elapsed_s)


class IdleLadder:
    """Moves one function along its ladder, by the plan of its present idle period and the measurements of its rungs."""

    def __init__(self, decisions: Decisions, shared: SharedPrior, on_change: Callable[[], None]) -> None:
        """The ladder calls `on_change` after it has learned from idle periods, so that the new state can be stored."""
        self.measured = MeasuredLadder()
        self.past = EndedPeriods(shared, self.measured.ladder)
        self.watch = IdleWatch()
        self._decisions, self._on_change = decisions, on_change
        self._target: LadderTarget | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._planning = asyncio.Lock()
        # None unless the function is idle and has a target.
        self._plan: PlannedPeriod | None = None
        # After an eviction, for lack of memory: the highest rung that may be held until the next call.
        self._evicted_to: RungName | None = None

    # -- the live revision

    def adopt(
        self, target: LadderTarget, spec: LadderSpec, build_s: float, tasks: asyncio.TaskGroup
    ) -> asyncio.Task[None]:
        """Drive `target`, which has become live, from now on. Return the task that plans the idle period."""
        now_s, period, deployed = time.monotonic(), self.watch.period, self._target is not None
        figures = self.measured.figures
        if deployed or not figures.build_s:
            figures = figures.of_next_revision(build_s)
        self.measured.adopt(spec, figures, target.slow)
        self._target, self._tasks, self._plan, self._evicted_to = target, tasks, None, None
        # For a restored function, the plan counts from the start of the idle period. After a deploy, the plan starts again,
        # because a call is likely to come soon.
        if period is None:
            period = self.watch.open(now_s, now_s, known=False)
        elif deployed:
            period.planned_from_s = now_s
        return tasks.create_task(self._settle_and_plan(period), name="keep_alive")

    def drives(self, target: LadderTarget) -> bool:
        return self._target is target

    def release(self, target: LadderTarget) -> None:
        """Stop driving `target`, because it retires."""
        if self._target is target:
            self._target = self._plan = self._evicted_to = None

    # -- reports of the revision

    def follow(self, now_s: float, load: int, last_end_s: float | None) -> float:
        """Learn that `load` invocations are unfinished, which may begin or end an idle period. `last_end_s` is the end
        of the last invocation, if it is known. Return when to report the load again; infinity if an event causes the
        next report.
        """
        if load:
            self._evicted_to = None
            if (ended := self.watch.busy(now_s)) is not None:
                self._plan = None
                if ended.known and self._target is not None:
                    self.past.add(ended, now_s, self.measured.ladder)
            return math.inf
        idle, again_s = self.watch.period is not None, self.watch.quiet(now_s, last_end_s)
        if not idle and (period := self.watch.period) is not None and self._tasks is not None:
            self._tasks.create_task(self._settle_and_plan(period), name="keep_alive")
        return math.inf if again_s is None else again_s

    @property
    def plans(self) -> bool:
        """True if the policy decides when the last worker ends."""
        return self.measured.spec.planned

    def stand(self, now_s: float) -> Stand:
        """Take the step of the plan that is due, and return the rung that may be held now."""
        if (plan := self._plan) is None:
            return Stand(self._evicted_to)
        before, stand = plan.stands_on, plan.step(now_s, self._evicted_to)
        if plan.stands_on != before:
            known, spec = plan.figures(before, now_s), self.measured.spec
            if spec.slow_share is not None and (share := self.measured.slow_share.share) is not None:
                known["slow_share"] = share
            self._decisions.note("step_up" if stand.climbs else "step_down", "plan", **known)
        if stand.climbs:
            self._evicted_to = None
        return stand

    @property
    def plans_zygote(self) -> bool:
        """True if the present rung of the plan is ZYGOTE or READY, or if there is no plan."""
        return self._plan is None or self._plan.rung in (RungName.READY, RungName.ZYGOTE)

    def interrupt(self) -> None:
        """End the present period without learning from it, because starts of workers fail."""
        if self.watch.period is not None:
            self._plan = self._evicted_to = None
        self.watch.interrupt()

    def note_start(self, target: LadderTarget) -> None:
        """Start to measure a wake, which begins now on the rung of `target`."""
        if self.drives(target):
            self.measured.begin_wake(target.rung, time.monotonic())

    def note_ready(self, target: LadderTarget, *, usual: bool, devices: float) -> None:
        """Record that a worker is ready. If its start was not `usual`, its start time does not predict later starts.

        `devices` is the number of GPUs that the worker holds.
        """
        if self.drives(target) and self.measured.end_wake(time.monotonic(), usual=usual, devices=devices):
            self._replan()

    def note_held(self, rung: RungName, held_bytes: float) -> None:
        """Record how much memory all processes hold on a rung."""
        self.measured.note_held(rung, held_bytes)
        self._replan()

    # -- queries

    @property
    def next_step(self) -> NextStep | None:
        """The next step of the plan that changes the held rung; None without such a step."""
        return self._plan.next_step() if self._plan is not None else None

    def climb_cost(self) -> ClimbCost:
        """Return the cost of a worker that waits for the next call, and the waiting cost that it saves.

        Both are relative to the rung that is held now. If a worker is held, they are relative to the rung below READY, because
        the plan may give the worker up.
        """
        costs, spec = self.past.history.costs(self.measured.ladder), self.measured.spec
        lowest = len(spec.rungs) - 1
        lower = min(lowest, max(1, spec.number(self._target.rung))) if self._target is not None else lowest
        saved = costs.penalties[lower] - costs.penalties[0]
        return ClimbCost(costs.holds[0] - costs.holds[lower], saved, costs.wakes[lower])

    def ready_shares(self) -> tuple[float, ...]:
        """For each bin of delays from now, return the share of the bin in which the present plan holds a worker.

        The bins are the bins of `upstream.BOUNDS_S`.
        """
        if self._plan is None or self._evicted_to is not None:
            return NEVER_READY
        return self._plan.ready_shares()

    def step_down(
        self, name: str, upper: RungName, lower: RungName, freed_bytes: float | None = None
    ) -> StepDown:
        """Return the costs and the freed memory of a step from `upper` to `lower` now, for `eviction.steps_down`.

        Without `freed_bytes`, the freed memory is the measured difference of the two rungs.
        """
        period, figures = self.watch.period, self.measured.figures
        idle_s = time.monotonic() - period.begun_s if period is not None else 0.0
        wake_s = figures.wake(lower) - figures.wake(upper)
        freed = figures.held(upper) - figures.held(lower) if freed_bytes is None else freed_bytes
        return StepDown(name, idle_s, max(0.001, wake_s), max(1.0, freed), Gaps(self.past.history.idles))

    def evict(self, rung: RungName, cause: str, step: StepDown) -> str:
        """Step down to `rung` at once, whatever the plan says, because memory is short. Return the decision in words."""
        figures = {"freed_bytes": step.freed_bytes, "extra_wake_s": step.extra_wake_s}
        rate = step.gaps.rate(step.idle_s)
        decision = self._decisions.note("evict", cause, rung=float(NUMBERED_RUNGS.index(rung)), idle_s=step.idle_s, calls_per_s=rate, **figures)  # fmt: skip
        self.yield_to(rung)
        return describe(decision)

    def yield_to(self, rung: RungName) -> None:
        """Hold no more than `rung` until the next call, or until the plan climbs."""
        self._evicted_to = rung
        if self._target is not None:
            self._target.look()

    # -- planning

    def _replan(self) -> None:
        """Plan the present idle period anew if the measured ladder differs much from the ladder of its plan."""
        period = self.watch.period
        if period is None or self._plan is None or self._tasks is None:
            return
        if differs(self.past.ladder, self.measured.ladder):
            self._tasks.create_task(self._settle_and_plan(period), name="keep_alive")

    async def _settle_and_plan(self, period: IdlePeriod) -> None:
        """Learn from earlier periods, and plan `period`."""
        async with self._planning:
            if self._target is not None:
                self.measured.count_slow(self._target.slow)
            learning = self.past.take(self.measured.ladder, time.monotonic())
            history, choice = await asyncio.to_thread(learning.settle, period.since_s)
            self.past.keep(learning, history)
        self._on_change()
        if self.watch.period is period and self._target is not None and self.plans:
            self._plan = PlannedPeriod(period, choice, self._target, self.measured.spec, self.past)
            self._target.look()
