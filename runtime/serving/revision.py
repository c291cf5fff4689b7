"""Runs a revision, which is one immutable version of a function, and decides how many workers it has."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import replace

from ...errors import (
    ActivationTimeout,
    HandlerFailed,
    OutputInvalid,
    Overloaded,
    PilotflameError,
)
from ..batching.outstanding import BatchEnd
from ..launching.fetcher_client import FetcherClient
from ..launching.launcher import UNKNOWN_CAUSE, EndCause, Launcher
from ..link.worker_spec import WorkerSpec
from ..scaling.desired_state import desired
from ..scaling.eviction import waiting_per_byte
from ..scaling.idle_period import QUIET_S
from ..scaling.load import BUFFER, CALLS, NEAR_LIMIT, sufficient_load
from ..scaling.node_limit import Claim, ReachedLimit
from ..scaling.placement import need_of
from ..scaling.revision_state import RevisionState
from ..scaling.scale_spec import ScaleSpec
from ..scaling.seen import Seen
from ..scaling.table import Proposal, Rank, Row
from ..telemetry.invocation_end import InvocationEnd
from ..telemetry.load_history import LoadState
from ..telemetry.logs import RevisionLog
from ..telemetry.metrics import Census
from ..telemetry.timeline import WorkerTiming
from ..telemetry.usage import RungName, Usage
from .account import Account
from .deadlines import activation_timeout
from .demand import Demand
from .dispatcher import Dispatcher, Policy
from .function_history import FunctionHistory
from .gpu_places import GpuPlace, GpuPlaces
from .idle_ladder import Stand
from .invocation import Invocation, Output
from .latency_curve_store import LatencyCurveStore
from .pool import STOP_TIMEOUT_S, Pool
from .prewarms import HOLD_S, WarmHold, signal_of
from .replica import Replica, ReplicaState, RevisionEvents
from .start_outcomes import FIRST_START_TIMEOUT_S, StartOutcomes
from .worker_limit import GIVE_AFTER_S, WorkerLimit

FAILURES = (HandlerFailed, OutputInvalid)
# How many of the lines that a worker printed last are repeated when it dies.
LAST_WORDS = 5
# How many invocations are named when the worker dies that ran them.
MOST_IDS = 10
# Workers have at least this long for their `teardown` (or the whole timeout of `retire`, if that is shorter),
# even if all the time was used to end invocations.
MIN_TEARDOWN_S = 2.0
# Those who listen to the calls of a function hear of one in this time at most.
BEAT_S = 0.5
# For how long workers are held for invocations that are about to come.
EXPECTED_S = 10.0
# For how long the plan's prewarm holds a worker.
PREDICTED_S = 1.0
# The signals for which other functions make room on the GPUs.
URGENT = ("refused", "warmup")
# How often `scale` looks again at most, after workers woke, stopped or parked.
MOST_LOOKS = 3
# How long the error of a start that failed waits for the fetcher's reason.
CAUSE_TIMEOUT_S = 2.0


class Revision(RevisionEvents):
    """Accepts invocations, queues them, has workers run them, and starts and stops workers."""

    def __init__(
        self, spec: WorkerSpec, policy: Policy, launcher: Launcher, logs: RevisionLog, tasks: asyncio.TaskGroup,
        on_activation: Callable[[str], None], weights: FetcherClient, secrets: Callable[[], dict[str, str]],
        curves: LatencyCurveStore, history: FunctionHistory, limit: WorkerLimit, gpus: GpuPlaces,
        on_called: Callable[[float], None] = lambda _at_s: None,
        on_ended: Callable[[InvocationEnd], None] = lambda _end: None,
        on_processes_changed: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """`on_activation` is called with "ready" or "failed" when a worker is ready or could not be started.

        `limit` and `gpus` are shared by all revisions. `on_called` is called with the arrival of an invocation, at most once every
        BEAT_S. `on_ended` is called when an invocation has ended with an output or an error. `on_processes_changed` is called
        when a worker, the zygote or the standby has come or gone.
        """
        self.spec, self.policy, self.streaming = spec, policy, policy.streaming
        self.history, self._note_arrival = history, history.arrivals.note
        self._on_processes_changed = on_processes_changed
        scale, measure = policy.settings.scale, not curves.known
        self.pool = Pool(
            spec, scale, launcher, logs, tasks, self, weights, secrets, measure, gpus, self, history.worker_numbers
        )  # fmt: skip
        self.dispatcher = Dispatcher(spec, policy, self.pool, curves, self.scale, on_ended)
        self._limit, self._gpus = limit, gpus
        limit.join(self)
        self.gpu_need = need_of(spec.resources)
        """What each worker needs of the node's GPUs."""
        self._starts = StartOutcomes()
        self.breaker, self._readiness = self._starts.breaker, self._starts.readiness
        self.retiring = False
        """True from the start of `retire`."""
        self._tasks, self._logs, self._on_activation = tasks, logs, on_activation
        self._on_called, self._beat_at_s = on_called, 0.0
        self._loop = asyncio.get_running_loop()
        self._demand = Demand(self.pool, self.dispatcher)
        # Up to this number of running invocations, `submit` need not scale.
        self._sufficient_load = 0.0
        self._scale_timer: asyncio.TimerHandle | None = None
        self._scale_at_s = 0.0
        # What the plan said at the last look.
        self._stand = Stand()
        self._deaths = self._slow = self._refused = 0
        # Starts that have failed, and the fetcher is yet to say why.
        self._unexplained_failures = 0
        self._empty = asyncio.Event()
        # The tasks that recover the calls of workers that have ended, and log these ends.
        self._endings: set[asyncio.Task[None]] = set()
        history.account.attach(self)
        self.on_budget(changed=False)

    def configure(self, policy: Policy) -> None:
        self.policy, self.streaming = policy, policy.streaming
        self.dispatcher.configure(policy)

    # -- invocations

    def submit(self, invocation: Invocation) -> None:
        """Send an invocation, or queue it. Raise QueueFull, Overloaded, CrashLoop, BudgetExhausted or RevisionRetired."""
        if self.retiring:
            raise self.dispatcher.retired()
        parks = self.gpu_need is not None or self.policy.scale.park_after_s < math.inf
        if parks and not self.pool.ready:
            self._wake(1, waiting=1)
        if self.breaker.failures and self.breaker.open(now_s := time.monotonic()) and not self.pool.ready:
            raise self.breaker.refusal(self.spec.function, now_s)
        if (arrived_s := invocation.timeline.received_s) >= self._beat_at_s:
            self._beat_at_s = arrived_s + BEAT_S
            self._on_called(arrived_s)
        try:
            sent = self.dispatcher.submit(invocation)
        except Overloaded:
            # The caller could not wait for an activation. Start one nevertheless, for their retry.
            if not self.pool.ready:
                self._refused += 1
                self.warm(1, "refused")
            raise
        load = self.pool.in_flight
        # With as many workers as there may be, a longer queue changes nothing.
        if load > self._sufficient_load or not (sent or self.pool.has(self.policy.scale.max)):
            self.scale()
        else:
            self._demand.note_running(load)
            if not sent:
                self.history.load.note_queued(arrived_s, len(self.dispatcher.queue))

    def cancel(self, invocation: Invocation, error: PilotflameError | None = None) -> None:
        """Cancel an invocation that fails with `error` or, without one, whose caller has disconnected."""
        self.dispatcher.cancel(invocation, error)

    def census(self) -> Census:
        pool = self.pool
        busy_s, ready_s = pool.worked_s(time.monotonic())
        return Census(
            queued=len(self.dispatcher.queue),
            in_flight=pool.in_flight,
            starting=pool.starting,
            ready=len(pool.ready),
            parked=len(pool.parked),
            draining=sum(replica.state is ReplicaState.DRAINING for replica in pool.replicas),
            standby=pool.zygote.standby is not None and pool.zygote.standby_primed,
            zygote=pool.zygote.source is not None,
            busy_s=busy_s,
            ready_s=ready_s,
            deaths=self._deaths,
        )

    # -- the rung

    @property
    def rung(self) -> RungName:
        """The highest rung that is held now, of those that the ladder plans: a parked worker is a worker."""
        if self.pool.ready or self.pool.parked:
            return RungName.READY
        if self.pool.zygote.source is not None:
            return RungName.ZYGOTE
        return RungName.RESIDENT if self.pool.resident_bytes else RungName.LOCAL

    @property
    def stands_on(self) -> RungName:
        """The highest rung that is held now, for those who look: PARKED if all workers are parked."""
        rung = self.rung
        return RungName.PARKED if rung is RungName.READY and not self.pool.ready else rung

    @property
    def arrived(self) -> int:
        """How many invocations were accepted so far. Those that have failed in the queue do not count."""
        return self.pool.completed + self.pool.in_flight + len(self.dispatcher.queue)

    @property
    def slow(self) -> tuple[int, int]:
        """How many invocations have waited for the start of a worker, or could not; and how many there were."""
        lost = self._refused + self.dispatcher.given_up
        return self._slow + lost, self.arrived + lost

    @property
    def held_until_s(self) -> float | None:
        """Until when a signal holds workers; None if none does."""
        hold = self._hold(time.monotonic())
        return hold.until_s if hold is not None else None

    def _follow_idling(self, now_s: float, load: int) -> float | None:
        """Tell the ladder whether there is work. Return when to tell it again, if that is known."""
        ladder = self.history.ladder
        if not ladder.drives(self):
            return None
        if self.breaker.failures and not self.pool.ready:
            ladder.interrupt()
            return None
        workers = self.pool.ready + self.pool.parked
        last_end_s = max((one.idle_since_s for one in workers), default=None) if not load else None
        return ladder.follow(now_s, load, last_end_s)

    # -- the number of workers

    def warm(self, workers: int, cause: str = "warmup", for_s: float = HOLD_S) -> None:
        """Start workers before they are needed, until there are `workers`, and keep as many for `for_s` seconds.

        `cause` is the signal that asks for them. Its first word is the kind of signal.
        """
        self.history.prewarms.holds.add(WarmHold(workers, time.monotonic() + for_s, cause))
        self.scale()

    def expect(self, invocations: int, cause: str) -> None:
        """Start the workers that so many invocations need, which run already or are about to come."""
        now_s = time.monotonic()
        workers = self._demand.ahead(self._scale_spec(), invocations, now_s)
        if workers > len(self.pool.ready) + self.pool.starting:
            self.warm(workers, cause, EXPECTED_S)

    async def wait_ready(self, workers: int, timeout_s: float) -> None:
        """Wait until `workers` are ready. Raise ActivationTimeout, or the error of a start that fails meanwhile."""
        now_s = time.monotonic()
        if self.retiring:
            raise self.dispatcher.retired()
        if len(self.pool.ready) >= workers:
            return
        if self.breaker.open(now_s):
            raise self.breaker.refusal(self.spec.function, now_s)
        try:
            await self._readiness.wait(workers, timeout_s)
        except TimeoutError:
            if (reached := self.reached) is not None:
                raise activation_timeout(self.spec.function, timeout_s, reached) from None
            wanted = "1 worker" if workers == 1 else f"{workers} workers"
            message = f"Function {self.spec.function!r} did not have {wanted} ready within {timeout_s:.0f} s."
            raise ActivationTimeout(message, remedy="Wait longer: the start goes on.") from None

    def scale(self) -> None:
        """Start, wake, stop and park workers until there are as many as the desired state names."""
        now_s = time.monotonic()
        follow_at_s = self._follow_idling(now_s, len(self.dispatcher.queue) + self.pool.in_flight)
        stand = self._stand = self._take_stand(now_s)
        for _ in range(MOST_LOOKS):
            spec = self._scale_spec()
            seen, hold = self._demand.see(spec, now_s), self.history.prewarms.holds.at(now_s)
            ahead = (
                None if hold is None else Proposal(Rank.AHEAD, hold.cause, hold.workers, until_s=hold.until_s)
            )
            row = desired(spec, seen, now_s, self._state(now_s), ahead)
            if not self._carry_out(row, seen, spec, hold):
                break
        # The next invocation ends the idle period, or may have to wake a worker. So it must come here.
        looks_first = self.history.ladder.idle or seen.parked
        self._sufficient_load = -1.0 if looks_first else sufficient_load(spec, seen)
        if not (row.held or seen.starting or seen.calls):
            self._hold_rung(stand)
        if (
            again_s := min(row.again_s, stand.again_s, math.inf if follow_at_s is None else follow_at_s)
        ) < math.inf:
            self._scale_at(again_s, now_s)
        self.history.prewarms.settle()
        self.note_load()
        if self.retiring and not seen.calls:
            self._empty.set()

    def _take_stand(self, now_s: float) -> Stand:
        """Return the rung that the plan holds now. If it climbs to READY, a worker is wanted."""
        ladder = self.history.ladder
        if not ladder.drives(self):
            return Stand()
        stand = ladder.stand(now_s)
        if stand.climbs and stand.rung is RungName.READY:
            # Once the worker is ready, the plan keeps it.
            self.history.prewarms.holds.add(WarmHold(1, now_s + PREDICTED_S, "predicted"))
        return stand

    def _hold_rung(self, stand: Stand) -> None:
        """Without workers, starts and calls, make or give up the zygote and the weights as the plan says."""
        if not stand.keeps_zygote:
            self.pool.zygote.rest()
        elif stand.climbs and stand.rung is RungName.ZYGOTE:
            self._tasks.create_task(self.pool.zygote.warm())
        if stand.rung is RungName.LOCAL and self.pool.resident_bytes:
            self.pool.drop_weights()

    def keeps_zygote(self) -> bool:
        return self._stand.keeps_zygote or self.pool.held_workers > 0

    def _state(self, now_s: float) -> RevisionState:
        """Return what holds for the revision, beside its load."""
        breaker = self.breaker
        return RevisionState(
            self.retiring, self.history.account.exhausted, breaker.failures, breaker.backoff_until_s,
            open=breaker.open(now_s), unexplained=self._unexplained_failures > 0,
        )  # fmt: skip

    def _carry_out(self, row: Row, seen: Seen, spec: ScaleSpec, hold: WarmHold | None) -> bool:
        """Do what a row says. Return True if workers woke, stop or park, so that there is another row."""
        if (missing := row.start(seen)) and seen.parked and self._wake(missing, seen.queued):
            return True
        granted, room = self._granted(missing, seen, hold), max(0, spec.max - seen.held)
        for proposal, count in row.causes(seen, min(granted, room)):
            self._start(count, proposal, seen)
        # Parked workers that cannot wake count against `max`: they end before others start.
        stop, park = row.stop(seen) + min(seen.parked, max(0, granted - room)), row.park(seen)
        if stop:
            self.pool.stop(stop)
            self._note("stop", "idle", seen, workers=stop, recent=seen.recent.workers)
        if park:
            self.pool.park(park)
        return stop + park > 0

    def _wake(self, count: int, waiting: int) -> int:
        """Wake parked workers, at most `count`, and send them what waits. Return how many there were."""
        if woken := 0 if self.history.account.exhausted else self.pool.wake(count):
            self.history.decisions.note("wake", CALLS, workers=woken, queued=waiting)
            self._readiness.note_ready(len(self.pool.ready))
            self.dispatcher.dispatch()
        return woken

    def note_load(self) -> None:
        """Note the present load in the history of the function. A revision that retires is not the function's."""
        pool = self.pool
        if self.retiring:
            return
        waiting, ready = len(self.dispatcher.queue), len(pool.ready)
        state = LoadState(waiting, pool.in_flight, pool.starting, ready, self.stands_on)
        self.history.load.note(time.monotonic(), state)

    def _note(self, action: str, cause: str, seen: Seen, **figures: float) -> None:
        """Keep a decision about the number of workers with the figures behind it."""
        load = seen.load
        predicted = {"work_s": load.work_s, "wake_s": load.wake_s, "lasting": load.lasting} if load else {}
        self.history.decisions.note(
            action, cause, **figures, queued=seen.queued, in_flight=seen.in_flight,
            starting=seen.starting, ready=seen.ready, **predicted,
        )  # fmt: skip

    def _hold(self, now_s: float) -> WarmHold | None:
        """Return the hold that is in force: none while the revision retires or its starts fail."""
        if self.retiring or self.breaker.backoff_until_s > now_s:
            return None
        return self.history.prewarms.holds.at(now_s)

    def _start(self, workers: int, proposal: Proposal, seen: Seen) -> None:
        """Start workers for a proposal."""
        if not seen.awake:
            self.history.ladder.note_start(self)
        ahead = proposal.rank is Rank.AHEAD and proposal.cause != BUFFER
        self.pool.start(workers, proposal.cause if ahead else "")
        self._note("start", proposal.cause, seen, workers=workers)
        self.history.account.check()

    def _scale_at(self, when_s: float, now_s: float) -> None:
        """Set the timer for scaling to `when_s`, unless it is set to an earlier time."""
        if self._scale_timer is not None:
            # Not `TimerHandle.when`: for a delay of zero, uvloop returns a handle without it. The timer
            # is not moved to a later time, because one more call of `scale` takes less time than that.
            if self._scale_at_s <= when_s:
                return
            self._scale_timer.cancel()
        self._scale_at_s = when_s
        self._scale_timer = self._loop.call_later(max(0.0, when_s - now_s), self._on_scale_timer)

    def _on_scale_timer(self) -> None:
        self._scale_timer = None
        self.scale()

    def _scale_spec(self) -> ScaleSpec:
        """Return the owner's limits, with the concurrency of the ready workers if that is higher."""
        spec, ready = self.policy.scale, self.pool.ready
        windows = [replica.window for replica in ready if replica.prefetches]
        slots = [replica.outstanding.slots for replica in ready if not replica.outstanding.batching]
        if windows:
            # Prefetched invocations are very short. So a full window, of invocations that run or are
            # prefetched, is no sign that one more worker is needed. The division makes a full window
            # NEAR_LIMIT of the concurrency.
            spec = replace(spec, concurrency=math.ceil(min(windows) / NEAR_LIMIT))
        elif slots and min(slots) > spec.concurrency:
            spec = replace(spec, concurrency=min(slots))
        ladder = self.history.ladder
        if not self._stand.keeps_worker:
            return replace(spec, scale_to_zero_s=0.0)
        if ladder.plans and ladder.drives(self):
            # The plan decides when the last worker ends.
            return replace(spec, scale_to_zero_s=math.inf)
        return spec

    # -- the limits of all functions together

    def _granted(self, start: int, seen: Seen, hold: WarmHold | None) -> int:
        """Return how many of `start` workers the limits leave. Note it when they become too few."""
        before = self.reached
        if not start and before is None:
            return 0
        # A caller whom the start takes too long tries again, and one who warms it up waits as well.
        waiting = seen.queued > 0 or (hold is not None and signal_of(hold.cause) in URGENT)
        may = self._limit.ask(self, start, waiting=seen.queued > 0)
        # Where one has a worker, only those of others that are idle for a while make room for more.
        may = self._gpus.ask(self, may, waiting=waiting, lasting=seen.awake > 0)
        reached = self.reached
        if reached is not None and (before is None or before.name != reached.name):
            self._note("refuse", reached.name, seen, **{"workers": start - may, reached.name: reached.most})
        self.dispatcher.note_limit(reached)
        return may

    @property
    def reached(self) -> ReachedLimit | None:
        """Return the limit that keeps workers from starting that are wanted, or None."""
        return self._limit.reached(self) or self._gpus.reached(self)

    @property
    def function(self) -> str:
        return self.spec.function

    @property
    def owner(self) -> str:
        """Who deployed it, whose other functions share a limit of workers with it."""
        return self.policy.owner

    def claim(self) -> Claim:
        pool, now_s = self.pool, time.monotonic()
        if not pool.held_workers:
            return Claim(0, owner=self.owner)
        draining = sum(replica.state is ReplicaState.DRAINING for replica in pool.replicas)
        least = 0 if self.retiring else self.policy.scale.min
        spare = max(0, len(pool.ready) + len(pool.parked) - least)
        idle = pool.parked + pool.idle()
        lasting = sum(replica.idle_since_s + GIVE_AFTER_S <= now_s for replica in idle)
        return Claim(
            pool.held_workers,
            draining,
            idle=min(spare, lasting),
            resting=min(spare, len(idle)),
            owner=self.owner,
            least=least,
        )

    def give(self, reached: ReachedLimit) -> None:
        pool = self.pool
        seen = Seen(len(self.dispatcher.queue), pool.in_flight, pool.starting, len(pool.ready))
        pool.stop(1)
        self._note("stop", reached.name, seen, workers=1)

    def devices(self, replica: Replica) -> float:
        """Return how many GPUs a worker holds: shares by its place, or a whole one if it uses one without a place."""
        placed = self._gpus.share(replica)
        return float(replica.uses_device) if placed is None else placed

    @property
    def gpu_parked(self) -> list[Replica]:
        return self.pool.parked

    def gpu_spare(self, state: ReplicaState) -> int:
        count = len(self.pool.ready) + (len(self.pool.parked) if state is ReplicaState.PARKED else 0)
        return count if self.retiring else max(0, count - self.policy.scale.min)

    def gpu_cost(self, freed_bytes: float) -> float:
        ladder = self.history.ladder
        below = ladder.below(RungName.READY)[0]
        return waiting_per_byte(ladder.step_down(self.spec.function, RungName.READY, below, freed_bytes))

    def end_standby(self) -> None:
        self.pool.zygote.end_standby()

    def renew_standby(self) -> bool:
        return self.pool.zygote.end_standby()

    def give_gpu(self, replica: Replica, *, park: bool) -> None:
        self.pool.give(replica, park=park)
        # The next invocation has to find it a place again.
        self._sufficient_load = -1.0
        if not park:
            self.history.decisions.note("stop", "gpus", workers=1)

    # -- start and end

    async def try_start(self, keep: int = 0) -> None:
        """Start `keep` workers, as far as the limits have room, but at least one. Raise the error if the first of them fails.

        Once they are ready, stop those that neither `keep` nor `min` asks for.
        """
        place = await self._gpus.first_place(self, FIRST_START_TIMEOUT_S)
        workers = 1 + self._gpus.room(self, max(0, self._limit.room(self, keep) - 1))
        self._starts.expect_first(workers)
        self._demand.note_need(keep, time.monotonic())
        self.pool.start(workers, place=place, deploying=True)
        self.history.account.check()
        await self._starts.wait_first()
        self._demand.note_need(keep, time.monotonic())
        self.pool.stop(max(0, len(self.pool.ready) - max(keep, self.policy.scale.min)))
        self.pool.zygote.replenish()

    def reset(self) -> None:
        """Try to start workers again at once, although the last starts failed, or the budget was used up."""
        self.breaker.reset()
        self.history.account.forgive()
        self.scale()

    async def retire(self, timeout_s: float) -> None:
        """Run the accepted invocations for at most `timeout_s`, fail the others, and end the processes."""
        started_s = time.monotonic()
        self.retiring = True
        self._readiness.note_failure(self.dispatcher.retired())
        self.history.ladder.release(self)
        self.scale()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        # From now on, invocations that exiting workers give back fail: no worker would run them.
        self.dispatcher.close()
        if self._scale_timer is not None:
            self._scale_timer.cancel()
        left_s = timeout_s - (time.monotonic() - started_s)
        try:
            await self.pool.close(max(left_s, min(timeout_s, MIN_TEARDOWN_S)))
            if self._endings:
                # The function's log says how its last workers have ended.
                await asyncio.wait(self._endings, timeout=STOP_TIMEOUT_S)
        finally:
            self._limit.leave(self)
            self._gpus.leave(self)
            self.history.account.detach(self)

    # -- what it uses

    @property
    def held_workers(self) -> int:
        return self.pool.held_workers

    def usage(self, now_s: float) -> Usage:
        return self.pool.usage(now_s)

    def on_budget(self, *, changed: bool) -> None:
        """If the budget is used up, let workers finish what they have begun, and refuse the rest."""
        account = self.history.account
        self.dispatcher.bar(account.refusal if account.exhausted else None)
        if account.exhausted:
            self._readiness.note_failure(account.refusal())
        if changed:
            if not self.retiring:
                self._tell_budget(account)
            self.scale()

    def _tell_budget(self, account: Account) -> None:
        spent = account.spent
        figures = {"used_share": account.share, "money": spent.money, "worker_s": spent.seconds}
        self.history.decisions.note("budget", account.state, **figures)
        self._logs.write("gateway", account.describe(), "warning" if account.scarce else "info")

    # -- events

    def on_ready(self, replica: Replica) -> None:
        self.history.prewarms.watch(replica)
        self.dispatcher.adopt(replica)
        # Callers wait no longer: what is learned of the start comes after their invocations are sent.
        self.pool.note_ready(replica)
        self._starts.note_ready(len(self.pool.ready))
        self.history.ladder.note_ready(self, usual=not replica.measured, devices=self.devices(replica))
        self._on_activation("ready")
        self.scale()

    def on_end(
        self, replica: Replica, invocation: Invocation, outcome: Output | PilotflameError,
        timing: WorkerTiming, now_s: float, batch: BatchEnd | None,
    ) -> None:  # fmt: skip
        if isinstance(outcome, FAILURES):
            text = f"{outcome.message}\n{outcome.trace}".rstrip()
            self._logs.write(replica.name, text, "error", request_id=invocation.id)
        self.dispatcher.complete(replica, invocation, outcome, timing, now_s, batch)
        timeline = invocation.timeline
        self._note_arrival(timeline.received_s)
        if timeline.activation is not None:
            self._slow += 1
        # A batch leaves room for another only when its last invocation has ended.
        if batch is not None or not replica.outstanding.batching:
            self._on_room(replica)

    def _on_room(self, replica: Replica) -> None:
        """Dispatch to a worker that has room now. Scale only if the number of workers may have to change."""
        self.pool.zygote.schedule_standby()
        if waiting := len(self.dispatcher.queue):
            self.dispatcher.dispatch()
            waiting = len(self.dispatcher.queue)
        if not replica.outstanding.calls:
            self._limit.offer()
            self._gpus.offer()
        # The timer that finds the idle period is due QUIET_S after the last end, or sooner.
        untimed = self._scale_timer is None or self._scale_at_s > replica.idle_since_s + QUIET_S
        if waiting or self.retiring or (untimed and not replica.outstanding.calls):
            self.scale()

    def on_returned(self, invocation: Invocation) -> None:
        self.dispatcher.requeue(invocation)
        self.dispatcher.dispatch()
        self.scale()

    def on_split(self, invocations: list[Invocation]) -> None:
        self.dispatcher.restart_execution(invocations)

    def on_resized(self, replica: Replica) -> None:
        self.dispatcher.limit_batch()
        if replica.state is ReplicaState.READY:
            self._on_room(replica)

    def on_processes_changed(self) -> None:
        self._on_processes_changed()

    def on_parked(self, replica: Replica, freed_bytes: int, reserved: list[int]) -> None:
        cause = "gpus" if self._gpus.gives(replica) else "idle"
        self.history.decisions.note("park", cause, freed_bytes=freed_bytes)
        if (place := self._gpus.of(replica)) is not None:
            self._tasks.create_task(self._note_kept(place, replica, freed_bytes, reserved))

    async def _note_kept(
        self, place: GpuPlace, replica: Replica, freed_bytes: int, reserved: list[int]
    ) -> None:
        """Let other functions have what a parked worker has given back."""
        parks, kept = replica.parks, await self._gpus.kept(place, replica.child, reserved)
        # It may have been woken meanwhile, and parked again.
        if parks == replica.parks:
            self._gpus.note_parked(replica, freed_bytes, kept)

    def on_start_failed(self, error: PilotflameError) -> None:
        """Fail the waiting invocations, unless a worker is ready: the next start would probably fail too."""
        if self.pool.unheard(error):
            self._unexplained_failures += 1
            self._tasks.create_task(self._fail_start_later(error))
        else:
            self._fail_start(error)

    async def _fail_start_later(self, error: PilotflameError) -> None:
        """Wait until the fetcher says why the weights are missing: that may come after what the worker says."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CAUSE_TIMEOUT_S):
                while fetching := self.pool.unheard(error):
                    ended = [one.ended for one in fetching]
                    await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
        self._unexplained_failures -= 1
        self._fail_start(error)

    def _fail_start(self, error: PilotflameError) -> None:
        error = self.pool.explain(error)
        self._logs.write("gateway", f"activation failed: {error}\n{error.trace}".rstrip(), "error")
        self._on_activation("failed")
        self._starts.note_failure(error)
        if not self.pool.ready:
            self.dispatcher.fail_queued(error)
        self._limit.offer()
        self.scale()
        if not len(self.dispatcher.queue):
            self.pool.release()

    def on_lost(self, replica: Replica, unstarted: list[Invocation], started: list[Invocation]) -> None:
        self.pool.remove(replica)
        self._limit.offer()
        self.history.prewarms.end(replica, used=bool(replica.completed or started))
        ending = self._tasks.create_task(self._recover(replica, unstarted, started))
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)

    async def _recover(
        self, replica: Replica, unstarted: list[Invocation], started: list[Invocation]
    ) -> None:
        was_ready = replica.activation.ready_s > 0
        cause = await replica.child.cause() if started or not was_ready else EndCause()
        self.dispatcher.recover(unstarted, started, cause)
        if not was_ready and not replica.reported_failure:
            self._on_activation("failed")
            error = self._starts.note_death(cause.text)
            if not self.pool.ready and self._starts.give_up():
                self.dispatcher.fail_queued(error)
        self.scale()
        if not self.pool.replicas and not len(self.dispatcher.queue):
            self.pool.release()
            self._tasks.create_task(self.dispatcher.store_curve())
        self._log_end(replica, cause.text or (await replica.child.cause()).text, started)
        await replica.child.wait_gone(STOP_TIMEOUT_S)
        self.pool.note_gone()

    def _log_end(self, replica: Replica, cause: str, started: list[Invocation]) -> None:
        """Log why a worker has ended, what it printed last, and which invocations it ran."""
        # At a shutdown the zygote, which would tell the exit code, ends before its workers.
        if replica.left and cause in ("exit code 0", UNKNOWN_CAUSE):
            self._logs.write("gateway", f"worker {replica.name} has drained and ended")
            return
        words = self._logs.last_words(replica.name, LAST_WORDS)
        said = f"; its last words: {words}" if words else "; it printed nothing"
        # A failed start was logged as such, and the gateway kills what it does not want any more.
        expected = replica.reported_failure or (replica.left and self.retiring)
        self._deaths += not (expected or replica.left)
        level = "info" if expected else "error"
        ids = [invocation.id for invocation in started]
        ran = f"; it ran {', '.join(ids[:MOST_IDS])}" if len(ids) > 1 else ""
        text = f"worker {replica.name} ended with {cause}{ran}{said}"
        self._logs.write("gateway", text, level, request_id=ids[0] if len(ids) == 1 else "")
