"""Lets the keep-alive policy move an idle function down its ladder, and up again ahead of the next request.

Requests do not pass through this module. `RevisionWorkers.advance` reports whether there is work. After QUIET_S without
work, a thread makes a plan. `IdleLadder.stand` returns the rung that the plan holds now, and the time of the plan's
next step.
"""

from __future__ import annotations

import asyncio
import functools
import math
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from ...ground.telemetry.decisions import NUMBERED_RUNGS, Decisions
from ...ground.telemetry.rung_name import RungName
from ..scaling import keep_alive
from ..scaling.eviction import Gaps, StepDown
from ..scaling.idle_distribution import Prior, SharedPrior
from ..scaling.idle_period import Followers, IdlePeriod, IdleWatch
from ..scaling.keep_alive import Choice, History
from ..scaling.ladder import Ladder, Plan, Step
from ..scaling.rung_figures import HoldingPrices, RungFigures, differs
from ..scaling.slow_share import SlowShare
from ..scaling.upstream import NEVER_READY, ClimbCost, ready_shares

# The largest number of ended periods whose later arrivals are still to come. If there are more, the ladder learns from the
# oldest period with the arrivals so far.
MOST_OBSERVATIONS = 64
# The most arrivals that are remembered for these periods. Further ones do not count.
MOST_ARRIVALS = 4096
NOTHING_KNOWN = SlowShare()
PLANNED = (RungName.READY, RungName.ZYGOTE, RungName.RESIDENT, RungName.LOCAL)


# Timers may fire this early.
EARLY_S = 0.002


class LadderTarget(Protocol):
    """The live revision, as the ladder sees it."""

    @property
    def rung(self) -> RungName: ...
    @property
    def slow(self) -> tuple[int, int]:
        """Two numbers: of invocations that were slow for lack of a ready worker, and of all, including refused ones."""

    @property
    def held_until_s(self) -> float | None:
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


class LadderSpec(NamedTuple):
    """The rungs that the owner allows, their prices, and the owner's target for slow requests."""

    rungs: tuple[RungName, ...] = PLANNED
    prices: HoldingPrices = HoldingPrices()
    planned: bool = True
    """False if the settings have a fixed timeout or a minimum of workers: then the ladder learns, but plans nothing."""
    slow_share: float | None = None
    """The share of requests that may be slow. If it is given, the price of waiting follows from it."""


class NextStep(NamedTuple):
    """The next step of a plan, and the time of the step in Unix seconds."""

    rung: RungName
    at: float


class _Observation(NamedTuple):
    """An idle period that has ended. The ladder learns from it when the arrivals that follow are known."""

    idle_s: float
    since_s: float
    followers: Followers


class _Settled(NamedTuple):
    history: History
    choice: Choice


class IdleLadder:
    """The idle periods of one function, the history of past periods, and the plan of the present period."""

    def __init__(
        self, decisions: Decisions, shared: SharedPrior | None = None, on_change: Callable[[], None] = lambda: None
    ) -> None:  # fmt: skip
        """The ladder calls `on_change` after it has learned from idle periods, so that the new state can be stored."""
        self.history, self.figures, self.slow_share = History(), RungFigures(), SlowShare()
        self._decisions, self._shared, self._on_change = decisions, shared or SharedPrior(), on_change
        self._spec = LadderSpec()
        self._target: LadderTarget | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._watch = IdleWatch()
        self._planning = asyncio.Lock()
        # The value of the target's `slow` when `slow_share` last learned from it.
        self._counted = (0, 0)
        self._ladder = self._measured = self.figures.ladder(self._spec.rungs, self._spec.prices)
        self._plan: Plan | None = None
        self._expert = 0
        # The index of the rung on which the plan stands.
        self._stands_on = 0
        # After an eviction, for lack of memory: the highest rung that may be held until the next call.
        self._evicted_to: RungName | None = None
        # The present wake of the target: the rung on which the wake began, and the time at which the worker was
        # requested.
        self._woken_from: tuple[RungName, float] | None = None
        self._observations: deque[_Observation] = deque()
        self._followers: Followers | None = None
        # The arrivals since the oldest observation, in monotonic seconds.
        self._arrivals_s = array("d")

    # -- the live revision

    def adopt(
        self, target: LadderTarget, spec: LadderSpec, build_s: float, tasks: asyncio.TaskGroup
    ) -> asyncio.Task[None]:
        """Drive `target`, which has become live, from now on. Return the task that plans the idle period."""
        now_s, period, deployed = time.monotonic(), self._watch.period, self._target is not None
        if deployed or not self.figures.build_s:
            self.figures = self.figures.of_next_revision(build_s)
        self._target, self._spec, self._tasks, self._woken_from = target, spec, tasks, None
        self._counted = target.slow
        self._measure()
        self._forget_plan()
        # For a restored function, the plan counts from the start of the idle period. After a deploy, the plan starts again,
        # because a call is likely to come soon.
        if period is None:
            period = self._watch.open(now_s, now_s, known=False)
        elif deployed:
            period.planned_from_s = now_s
        return tasks.create_task(self._settle_and_plan(period), name="keep_alive")

    def remember(self, history: History, figures: RungFigures, slow_share: SlowShare = NOTHING_KNOWN) -> None:
        """Start from a history that an earlier gateway has stored."""
        self.history, self.figures, self.slow_share = history, figures, slow_share
        self._measure()

    def resume(self, idle_for_s: float, since_s: float) -> None:
        """Continue the idle period during which the previous gateway ended. Nothing is learned from its length."""
        self._watch.resume(time.monotonic() - idle_for_s, since_s)

    def drives(self, target: LadderTarget) -> bool:
        return self._target is target

    def release(self, target: LadderTarget) -> None:
        """Stop driving `target`, because it retires."""
        if self._target is target:
            self._target = None
            self._forget_plan()

    # -- reports of the revision

    def follow(self, now_s: float, load: int, last_end_s: float | None) -> float:
        """Take `load`, the number of unfinished invocations, which may begin or end an idle period. Return when to
        report it again; infinity if an event causes the next report.
        """
        if load:
            self._evicted_to = None
            if (ended := self._watch.busy(now_s)) is not None:
                self._on_wake(ended, now_s)
            return math.inf
        if self.idle:
            return math.inf
        again_s = self._watch.quiet(now_s, last_end_s)
        if (period := self._watch.period) is not None and self._tasks is not None:
            self._tasks.create_task(self._settle_and_plan(period), name="keep_alive")
        return math.inf if again_s is None else again_s

    @property
    def idle(self) -> bool:
        return self._watch.period is not None

    @property
    def plans(self) -> bool:
        """True if the policy decides when the last worker ends."""
        return self._spec.planned

    def stand(self, now_s: float) -> Stand:
        """Take the step of the plan that is due, and return the rung that may be held now."""
        period, plan = self._watch.period, self._plan
        if period is None or plan is None or self._target is None:
            return Stand(self._evicted_to)
        wanted, before = period.rung(plan, now_s + EARLY_S), self._stands_on
        if wanted > before and (held_s := self._target.held_until_s) is not None:
            # A signal holds workers until `held_s`. Then the plan goes on, with the step that is due at that time.
            return Stand(self._spec.rungs[before], again_s=held_s)
        if wanted != before:
            self._stands_on = wanted
            self._note(period, before, wanted, now_s)
            if wanted < before:
                self._evicted_to = None
        due_s = next((step.offset_s for step in period.later(plan, now_s + EARLY_S)), math.inf)
        return Stand(self._lower(self._spec.rungs[wanted]), climbs=wanted < before, again_s=due_s)

    def _lower(self, rung: RungName) -> RungName:
        """Return `rung`, or the rung of the last eviction if that is lower."""
        return max(rung, self._evicted_to or rung, key=PLANNED.index)

    @property
    def plans_zygote(self) -> bool:
        """True if the present plan holds a zygote or a worker, or if there is no plan."""
        return self._spec.rungs[self._stands_on] in (RungName.READY, RungName.ZYGOTE)

    def interrupt(self) -> None:
        """End the present period without learning from it, because starts of workers fail."""
        if self._watch.period is not None:
            self._forget_plan()
        self._watch.interrupt()

    def note_start(self, target: LadderTarget) -> None:
        """Start to measure a wake, which begins now on the rung of `target`."""
        if self.drives(target):
            self._woken_from = target.rung, time.monotonic()

    def note_ready(self, target: LadderTarget, *, usual: bool, devices: float) -> None:
        """Record that a worker is ready. If its start was not `usual`, its start time does not predict later starts.

        `devices` is the number of GPUs that the worker holds.
        """
        if not self.drives(target):
            return
        if self._woken_from is not None and usual:
            rung, asked_s = self._woken_from
            took_s = time.monotonic() - asked_s
            self.figures = self.figures.with_wake(rung, took_s, devices=devices)
            self._measure_and_replan()
        self._woken_from = None

    def note_held(self, rung: RungName, held_bytes: float) -> None:
        """Record how much memory all processes hold on a rung."""
        self.figures = self.figures.with_held(rung, held_bytes)
        self._measure_and_replan()

    # -- queries

    @property
    def next_step(self) -> NextStep | None:
        """The next step of the plan that changes the held rung; None without such a step."""
        period, now_s = self._watch.period, time.monotonic()
        if period is None or not self._plan or self._target is None:
            return None
        held = self._target.rung
        for step in period.later(self._plan, now_s):
            if (rung := self._spec.rungs[step.rung]) is not held:
                return NextStep(rung, time.time() + step.offset_s - now_s)
        return None

    def idle_for_s(self) -> tuple[float, float] | None:
        """Return the seconds since the idle period began, and the seconds from the last wake to that beginning.

        Return None if the function is busy.
        """
        period = self._watch.period
        return None if period is None else (time.monotonic() - period.begun_s, period.since_s)

    def climb_cost(self) -> ClimbCost:
        """Return the cost of a worker that waits for the next call, and the waiting cost that it saves.

        Both are relative to the rung that is held now. If a worker is held, they are relative to the rung below READY, because
        the plan may give the worker up.
        """
        costs, rungs = self.history.costs(self._measured), self._spec.rungs
        held = (
            rungs.index(self._target.rung) if self._target is not None and self._target.rung in rungs else -1
        )
        lower = max(held, 1) if held >= 0 and len(rungs) > 1 else len(rungs) - 1
        saved = costs.penalties[lower] - costs.penalties[0]
        return ClimbCost(costs.holds[0] - costs.holds[lower], saved, costs.wakes[lower])

    def ready_shares(self) -> tuple[float, ...]:
        """For each bin of delays from now, return the share of the bin in which the present plan holds a worker.

        See `upstream.ready_shares`.
        """
        period, plan = self._watch.period, self._plan
        if period is None or plan is None or self._target is None or self._evicted_to is not None:
            return NEVER_READY
        elapsed_s = time.monotonic() - period.planned_from_s
        if self._target.rung is not RungName.READY:
            # Below READY, only a later step up of the plan brings the function to READY.
            lowest = Step(0.0, len(self._spec.rungs) - 1)
            plan = (lowest, *(step for step in plan if step.offset_s > elapsed_s))
        return ready_shares(plan, [rung.wake_s for rung in self._ladder.rungs], elapsed_s)

    def below(self, rung: RungName) -> tuple[RungName, ...]:
        """Return the rungs below `rung`, from the highest down: only LOCAL if the owner excludes `rung`."""
        rungs = self._spec.rungs
        return rungs[rungs.index(rung) + 1 :] if rung in rungs else (RungName.LOCAL,)

    def step_down(
        self, name: str, upper: RungName, lower: RungName, freed_bytes: float | None = None
    ) -> StepDown:
        """Return the costs and the freed memory of a step from `upper` to `lower` now, for `eviction.steps_down`.

        Without `freed_bytes`, the freed memory is the measured difference of the two rungs.
        """
        idle = self.idle_for_s()
        wake_s = self.figures.wake(lower) - self.figures.wake(upper)
        freed = self.figures.held(upper) - self.figures.held(lower) if freed_bytes is None else freed_bytes
        gaps = Gaps(self.history.idles)
        return StepDown(name, idle[0] if idle else 0.0, max(0.001, wake_s), max(1.0, freed), gaps)

    def evict(self, rung: RungName, cause: str, step: StepDown) -> None:
        """Step down to `rung` at once, whatever the plan says, because memory is short."""
        figures = {"freed_bytes": step.freed_bytes, "extra_wake_s": step.extra_wake_s}
        rate = step.gaps.rate(step.idle_s)
        self._decisions.note("evict", cause, rung=float(NUMBERED_RUNGS.index(rung)), idle_s=step.idle_s, calls_per_s=rate, **figures)  # fmt: skip
        self.yield_to(rung)

    def yield_to(self, rung: RungName) -> None:
        """Hold no more than `rung` until the next call, or until the plan climbs."""
        self._evicted_to = rung
        if self._target is not None:
            self._target.look()

    def learning(self) -> Callable[[], History]:
        """Return a function that adds all ended periods to the history. The returned function can run in a thread."""
        observations, prior = tuple(self._observations), self._shared.prior
        return functools.partial(
            _learn, self.history, self._measured, prior, observations, self._arrivals_s[:]
        )

    # -- the end of a period

    def _on_wake(self, ended: IdlePeriod, now_s: float) -> None:
        self._forget_plan()
        if not ended.known or self._target is None:
            return
        wakes_s = [rung.wake_s for rung in self._measured.rungs]
        followers = self._followers = Followers(now_s, wakes_s, self._followers)
        self._observations.append(_Observation(now_s - ended.begun_s, ended.since_s, followers))

    @property
    def follows_until_s(self) -> float:
        """The ladder wants to know the arrivals until this time."""
        return max((one.followers.until_s for one in self._observations), default=-math.inf)

    def note_arrival(self, arrived_s: float) -> None:
        """Record the arrival of an invocation that has ended, in monotonic seconds."""
        if len(self._arrivals_s) < MOST_ARRIVALS:
            self._arrivals_s.append(arrived_s)

    # -- planning

    @property
    def prices(self) -> HoldingPrices:
        """The present prices of holding and of waiting for this function."""
        prices = self._spec.prices
        if self._spec.slow_share is None:
            return prices
        return prices._replace(waiting_s=self.slow_share.price(prices.waiting_s))

    def _measure(self) -> None:
        self._measured = self.figures.ladder(self._spec.rungs, self.prices)

    def _measure_and_replan(self) -> None:
        """Plan the present idle period anew if the measured ladder differs much from the ladder of its plan."""
        self._measure()
        period = self._watch.period
        if period is None or self._plan is None or self._tasks is None:
            return
        if differs(self._ladder, self._measured):
            self._tasks.create_task(self._settle_and_plan(period), name="keep_alive")

    def _count_slow(self) -> None:
        """Learn how many requests were slow since the last idle period. All requests since then have ended."""
        if self._target is None or self._spec.slow_share is None:
            return
        before, self._counted = self._counted, self._target.slow
        slow, requests = (now - then for now, then in zip(self._counted, before, strict=True))
        self.slow_share = self.slow_share.learn(self._spec.slow_share, slow, requests)
        self._measure()

    async def _settle_and_plan(self, period: IdlePeriod) -> None:
        """Learn from earlier periods, and plan `period`."""
        async with self._planning:
            self._count_slow()
            if differs(self._ladder, self._measured):
                self._ladder, self.history = self._measured, self.history.unplanned()
            arrivals_s = self._arrivals_s[:]
            observations = self._take_observations()
            prior, known = self._shared.prior, self.history.periods
            self.history, choice = await asyncio.to_thread(
                _settle, self.history, self._ladder, prior, observations, arrivals_s, period.since_s
            )
        for number, observation in enumerate(observations):
            self._shared.prior = self._shared.prior.learn(observation.idle_s, known + number)
        self._on_change()
        if self._watch.period is period and self._target is not None and self._spec.planned:
            self._expert, self._plan = choice
            self._begin_plan(period, choice.plan)

    def _take_observations(self) -> tuple[_Observation, ...]:
        taken, now_s = list[_Observation](), time.monotonic()
        while self._observations and (
            self._observations[0].followers.until_s <= now_s or len(self._observations) > MOST_OBSERVATIONS
        ):
            taken.append(self._observations.popleft())
        from_s = self._observations[0].followers.from_s if self._observations else math.inf
        self._arrivals_s = array("d", [at_s for at_s in self._arrivals_s if at_s >= from_s])
        return tuple(taken)

    # -- the steps

    def _begin_plan(self, period: IdlePeriod, plan: Plan) -> None:
        """Begin to follow a plan: step down to its present rung if the function stands higher, but never climb."""
        if self._target is None:
            return
        rungs, now_s = self._spec.rungs, time.monotonic()
        actual = rungs.index(self._target.rung) if self._target.rung in rungs else len(rungs) - 1
        self._stands_on = min(actual, period.rung(plan, now_s))
        self._target.look()

    def _note(self, period: IdlePeriod, before: int, wanted: int, now_s: float) -> None:
        ladder, history = self._ladder, self.history
        longer = sorted(gap for gap in history.idles if gap > now_s - period.begun_s)
        known = {"expected_in_s": longer[len(longer) // 2] - (now_s - period.begun_s)} if longer else {}
        if self._spec.slow_share is not None and (share := self.slow_share.share) is not None:
            known["slow_share"] = share
        self._decisions.note(
            "step_down" if wanted > before else "step_up", "plan",
            idle_s=now_s - period.begun_s,
            rung=float(NUMBERED_RUNGS.index(self._spec.rungs[wanted])),
            hold_per_hour=ladder.rungs[wanted].hold_per_s * 3600,
            saved_per_hour=(ladder.rungs[before].hold_per_s - ladder.rungs[wanted].hold_per_s) * 3600,
            wake_s=ladder.rungs[wanted].wake_s,
            expert=float(self._expert),
            periods=float(history.periods),
            **known,
        )  # fmt: skip

    def _forget_plan(self) -> None:
        self._plan, self._stands_on, self._evicted_to = None, 0, None


def _settle(
    history: History, ladder: Ladder, prior: Prior, observations: Sequence[_Observation],
    arrivals_s: Sequence[float], since_s: float,
) -> _Settled:  # fmt: skip
    """Learn from periods that have ended, and plan the period that began `since_s` after the last wake."""
    history = _learn(history, ladder, prior, observations, arrivals_s)
    return _Settled(history, keep_alive.choose(history, ladder, since_s, prior))


def _learn(
    history: History, ladder: Ladder, prior: Prior, observations: Sequence[_Observation], arrivals_s: Sequence[float]
) -> History:  # fmt: skip
    wakes_s = [rung.wake_s for rung in ladder.rungs]
    for idle_s, since_s, followers in observations:
        waits = followers.waits(wakes_s, arrivals_s)
        history = keep_alive.learn(history, ladder, idle_s, since_s, waits, prior)
    return history
