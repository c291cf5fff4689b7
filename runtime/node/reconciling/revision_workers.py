"""The workers of one revision: the observations, the row that follows from them, and the steps that carry out the row.

The reconciler (reconciler.py) decides when these steps are taken.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ....errors import ActivationTimeout, CrashLoop, PilotflameError
from ...calls.link.worker_spec import WorkerSpec
from ...calls.serving.call_ends import CallEnd, replaced
from ...calls.serving.deadlines import activation_timeout
from ...calls.serving.dispatcher import Policy, Refusal
from ...calls.serving.invocation import Invocation
from ...calls.serving.latency_curve_store import LatencyCurveStore
from ...calls.serving.replica import Replica
from ...calls.serving.replicas import ReplicaList
from ...calls.serving.revision import Revision
from ...ground.billing.account import Account
from ...ground.billing.usage import Usage
from ...ground.settings.scale_spec import ReachedLimit, ScaleSpec
from ...ground.telemetry.invocation_end import InvocationEnd
from ...ground.telemetry.load_history import LoadState
from ...ground.telemetry.logs import RevisionLog
from ...ground.telemetry.metrics import WorkerCounts
from ...ground.telemetry.rung_name import RungName
from ..launching.launcher import WorkerSource
from ..scaling.claims import Grant, RevisionClaim, WorkerTier
from ..scaling.desired_state import desired
from ..scaling.eviction import waiting_per_byte
from ..scaling.idle_period import QUIET_S
from ..scaling.load import BUFFER, CALLS, NEAR_LIMIT, sufficient_load
from ..scaling.placement import GpuNeed, Holding, need_of
from ..scaling.revision_state import Phase, RevisionState
from ..scaling.seen import Seen
from ..scaling.table import Proposal, Rank, Row
from .demand import Demand
from .drain import MIN_TEARDOWN_S, Drain
from .function import Function
from .gpu_places import node_processes
from .idle_ladder import Stand
from .node_parts import NodeParts
from .pool import STOP_TIMEOUT_S, Pool
from .prewarms import HOLD_S, WarmHold, signal_of
from .process_events import ProcessEvents

# For invocations that are about to come, workers are held for this time.
EXPECTED_S = 10.0
# The plan's prewarm holds a worker for this time.
PREDICTED_S = 1.0
# The signals for which other functions make room. They also make room for callers.
URGENT = ("refused", "warmup")
# The drain of a revision has no limit of its own, so it must not depend on the last event alone: this often, it is looked at.
DRAIN_LOOK_S = 10.0
# A deploy fails if its first worker is not ready after this time.
FIRST_START_TIMEOUT_S = 900.0
_NUMBERS = itertools.count()


@dataclass(frozen=True, slots=True)
class Listeners:
    """Callbacks about the workers and the calls of a revision."""

    activated: Callable[[str], None] = lambda _outcome: None
    """Called with "ready" or "failed" when a worker is ready or could not be started."""
    called: Callable[[float], None] = lambda _at_s: None
    """Called with the arrival times of some invocations; `Revision` limits how often."""
    ended: Callable[[InvocationEnd], None] = lambda _end: None
    """Called when an invocation has ended with an output or an error."""
    begun: Sequence[Callable[[str, Invocation], None]] = ()
    """Called with the function's name and an invocation before it is queued or sent."""
    processes: Callable[[], None] = lambda: None
    """Called when a worker, the zygote or the standby has started or ended."""


class RevisionWorkers:
    """The workers, the zygote and the standby of one revision."""

    def __init__(
        self, spec: WorkerSpec, policy: Policy, node: NodeParts, logs: RevisionLog, secrets: Callable[[], dict[str, str]],
        curves: LatencyCurveStore, function: Function, listeners: Listeners,
    ) -> None:  # fmt: skip
        """`secrets` returns, by name, the environment variables that only this revision's processes get."""
        self.spec, self.function, self.phase = spec, function, Phase.NEW
        # While the processes of a revision are replaced, the reconciler has two members for that revision.
        self.key = f"{spec.function}/{next(_NUMBERS)}"
        self.node, self._logs, self._tasks = node, logs, node.tasks
        self.replicas = ReplicaList()
        self.revision = Revision(
            spec, policy, self.replicas, self, curves, logs, function.load, function.arrivals, listeners.called,
            listeners.ended, listeners.begun, node.waiting,
        )  # fmt: skip
        self.events = ProcessEvents(self, node.tasks, logs, listeners.activated, listeners.processes)
        self.pool = Pool(
            spec, policy.settings.scale, self.replicas, node.launcher, logs, node.tasks, self.revision, self.events,
            node.weights, secrets, not curves.known, node.gpus, self, function.worker_numbers,
        )  # fmt: skip
        self.gpu_need: GpuNeed | None = need_of(spec.resources)
        """The GPUs that each worker needs."""
        self.row, self._seen = Row(0, 0), Seen(0, 0, 0, 0)
        """The row of this revision (how many workers it should have, and why), and the observations from which the row
        follows.
        """
        self._demand = Demand(self.pool, self.revision)
        self.breaker = self.events.starts.breaker
        # The stand of the keep-alive plan at the last look.
        self._stand = Stand()
        self._rollover = 0
        self._barred = ""
        # After this time without calls, the row may change, or an idle period begins.
        self._quiet_s = QUIET_S
        self.drain = Drain()
        node.reconciler.join(self)
        function.account.attach(self)
        self._bar()

    # -- observations

    @property
    def owner(self) -> str:
        """The owner of the key that deployed it. All functions of an owner share a limit of workers."""
        return self.revision.policy.owner

    @property
    def held_workers(self) -> int:
        return self.replicas.held

    @property
    def holds_processes(self) -> bool:
        """True if there is a zygote or a worker, or one of them is being started."""
        return self.pool.holds_processes

    @property
    def resident_bytes(self) -> int:
        """The number of bytes of the fetched weights that are in memory."""
        return self.pool.weights.resident_bytes

    @property
    def activations(self) -> int:
        """The number of workers that were started, except the workers that deploys have started."""
        return self.pool.activations

    @property
    def used_s(self) -> float:
        """The latest time at which a worker ended that had run invocations; 0 before the first such end."""
        return self.pool.used_s

    @property
    def zygote_pid(self) -> int | None:
        source = self.pool.zygote.source
        return source.zygote_pid if source is not None else None

    @property
    def zygote_pids(self) -> list[int]:
        """The process ids of the zygote and the standby, which can stay without workers."""
        return self.pool.zygote.pids

    def processes(self) -> list[tuple[int, str, str]]:
        """Return the pid, the role and the name of each of its processes."""
        rows = [(replica.child.pid, "worker", replica.name) for replica in self.replicas]
        if (standby := self.pool.zygote.standby) is not None:
            rows.append((standby.pid, "standby", standby.name))
        if self.zygote_pid is not None:
            rows.append((self.zygote_pid, "zygote", "zygote"))
        return rows

    @property
    def rung(self) -> RungName:
        """The highest rung that is held now, among the rungs that the ladder plans. A parked worker counts as a worker."""
        if self.replicas.ready or self.replicas.parked:
            return RungName.READY
        if self.pool.zygote.source is not None:
            return RungName.ZYGOTE
        return RungName.RESIDENT if self.pool.weights.resident_bytes else RungName.LOCAL

    @property
    def stands_on(self) -> RungName:
        """The highest rung that is held now, as the status shows it: PARKED if all workers are parked."""
        rung = self.rung
        return RungName.PARKED if rung is RungName.READY and not self.replicas.ready else rung

    @property
    def slow(self) -> tuple[int, int]:
        return self.revision.slow

    @property
    def held_until_s(self) -> float | None:
        """The end of the time for which a signal holds workers; None without such a signal."""
        if self.phase is Phase.RETIRING or self.breaker.backoff_until_s > (now_s := time.monotonic()):
            return None
        hold = self.function.prewarms.holds.at(now_s)
        return hold.until_s if hold is not None else None

    @property
    def reached(self) -> ReachedLimit | None:
        """The limit that keeps wanted workers from starting, or None."""
        return self.node.reconciler.reached(self)

    def worker_counts(self) -> WorkerCounts:
        replicas, zygote = self.replicas, self.pool.zygote
        busy_s, ready_s = self.pool.worked_s(time.monotonic())
        return WorkerCounts(
            queued=len(self.revision.dispatcher.queue),
            in_flight=replicas.in_flight,
            starting=replicas.starting,
            ready=len(replicas.ready),
            parked=len(replicas.parked),
            draining=replicas.draining,
            standby=zygote.standby is not None and zygote.standby_primed,
            zygote=zygote.source is not None,
            busy_s=busy_s,
            ready_s=ready_s,
            deaths=self.events.deaths,
        )

    def usage(self, now_s: float) -> Usage:
        return self.pool.usage(now_s)

    def devices(self, replica: Replica) -> float:
        """Return the number of GPUs that a worker holds: the sum of the shares that its place has.

        Without a place, return 1 if the worker uses a device, else 0.
        """
        placed = self.node.gpus.share(replica)
        return float(replica.uses_device) if placed is None else placed

    # -- the row

    def decide(self, now_s: float, arriving: int = 0) -> tuple[Row, Seen]:
        """Return the present row, and the observations that it follows from. `arriving` invocations are about to be queued."""
        spec, hold = self._scale_spec(), self.function.prewarms.holds.at(now_s)
        seen = self._seen = self._demand.see(spec, now_s, arriving)
        ahead = None if hold is None else Proposal(Rank.AHEAD, hold.cause, hold.workers, until_s=hold.until_s)
        self.row = desired(spec, seen, now_s, self._state(now_s), ahead)
        # The next invocation ends the idle period, or may have to wake a worker. So it must cause a look.
        self._quiet_s = min(QUIET_S, spec.scale_to_zero_s, spec.park_after_s)
        looks_first = self.function.ladder.idle or seen.parked
        self.revision.enough = -1.0 if looks_first else sufficient_load(spec, seen)
        return self.row, seen

    def desired(self) -> Row:
        """Return the row of the last look, or a new row if the number of calls has changed without a look."""
        if self._seen.unfinished != len(self.revision.dispatcher.queue) + self.replicas.in_flight:
            self.decide(time.monotonic())
        return self.row

    def advance(self, now_s: float) -> float:
        """Take the due steps of the budget and of the keep-alive plan, and relaunch a zygote that died.

        Return when the next step is due.
        """
        account, zygote, ladder = self.function.account, self.pool.zygote, self.function.ladder
        if account.due_s <= now_s:
            account.check()
        # Refuse calls before the load is counted: refused calls are no load.
        self._bar()
        follow_at_s = self._follow_idling(now_s)
        stand = self._stand = self._take_stand(now_s)
        if zygote.relaunch_at_s <= now_s:
            zygote.relaunch()
        self.revision.follows_until_s = ladder.follows_until_s if ladder.drives(self) else -math.inf
        drains_s = now_s + DRAIN_LOOK_S if self.phase is Phase.RETIRING else math.inf
        return min(stand.again_s, follow_at_s, account.due_s, zygote.relaunch_at_s, drains_s)

    def _follow_idling(self, now_s: float) -> float:
        """Tell the ladder whether there is work. Return when to tell it again."""
        ladder = self.function.ladder
        if not ladder.drives(self):
            return math.inf
        if self.breaker.failures and not (self.replicas.ready or self.replicas.parked):
            ladder.interrupt()
            return math.inf
        load = len(self.revision.dispatcher.queue) + self.replicas.in_flight
        workers = self.replicas.ready + self.replicas.parked
        last_end_s = max((one.idle_since_s for one in workers), default=None) if not load else None
        return ladder.follow(now_s, load, last_end_s)

    def _take_stand(self, now_s: float) -> Stand:
        """Return the rung that the plan holds now. If the plan climbs to READY, ask for a worker."""
        ladder = self.function.ladder
        if not ladder.drives(self):
            return Stand()
        stand = ladder.stand(now_s)
        if stand.climbs and stand.rung is RungName.READY:
            # Once the worker is ready, the plan keeps it.
            self.function.prewarms.holds.add(WarmHold(1, now_s + PREDICTED_S, "predicted"))
        return stand

    def _state(self, now_s: float) -> RevisionState:
        """Return the state that bounds the revision's workers, whatever its load is."""
        breaker = self.breaker
        return RevisionState(
            self.phase, self._rollover, self.function.stopped, breaker.failures,
            breaker.backoff_until_s, open=breaker.open(now_s), begun=self._has_begun(), unexplained=self.events.unexplained > 0,
        )  # fmt: skip

    def _has_begun(self) -> bool:
        """Return True if the revision retires, and no accepted invocation waits for its start."""
        if self.phase is not Phase.RETIRING or len(self.revision.dispatcher.queue):
            return False
        return all(one.outstanding.running() >= one.outstanding.calls.keys() for one in self.replicas)

    @property
    def unfinished(self) -> bool:
        """True if accepted invocations have not ended."""
        dispatcher = self.revision.dispatcher
        waiting = len(dispatcher.queue) or dispatcher.aside or self.events.unrecovered
        return bool(waiting or self.replicas.in_flight)

    def _scale_spec(self) -> ScaleSpec:
        """Return the owner's limits, with the concurrency of the ready workers if that is higher."""
        spec, ready = self.revision.policy.scale, self.replicas.ready
        windows = [replica.window for replica in ready if replica.prefetches]
        slots = [replica.outstanding.slots for replica in ready if not replica.outstanding.batching]
        if windows:
            # Prefetched invocations wait at the worker, so the worker may run fewer invocations than it holds.
            spec = replace(spec, concurrency=max(spec.concurrency, math.ceil(min(windows) / NEAR_LIMIT)))
        elif slots and min(slots) > spec.concurrency:
            spec = replace(spec, concurrency=min(slots))
        ladder = self.function.ladder
        if not self._stand.keeps_worker:
            return replace(spec, scale_to_zero_s=0.0)
        if ladder.plans and ladder.drives(self):
            # The plan decides when the last worker ends.
            return replace(spec, scale_to_zero_s=math.inf)
        return spec

    # -- the row is carried out

    def start(self, workers: int, row: Row, seen: Seen, places: Sequence[Holding | None] = ()) -> None:
        """Start workers for the proposals of a row."""
        number = 0
        for proposal, count in row.causes(seen, workers):
            if not seen.awake:
                self.function.ladder.note_start(self)
            ahead = proposal.rank is Rank.AHEAD and proposal.cause != BUFFER
            deploying = self.phase is Phase.PROVING
            signal = proposal.cause if ahead and not deploying else ""
            self.pool.start(count, signal, places[number : number + count], deploying=deploying)
            number += count
            if not deploying:
                self.note("start", proposal.cause, seen, workers=count)
        self.function.account.check()

    def wake(self, workers: int, queued: int) -> int:
        """Wake at most this number of parked workers, the most recently used first, and send them waiting invocations.

        Return how many workers woke.
        """
        return self._sent(self.pool.wake(self.replicas.parked[::-1], workers), queued)

    def _sent(self, woken: int, queued: int) -> int:
        if woken:
            self.function.decisions.note("wake", CALLS, workers=woken, queued=queued)
            self.events.tell_workers()
            self.revision.dispatcher.dispatch()
        return woken

    def stop(self, workers: int, seen: Seen) -> None:
        """Drain workers: first parked workers, then idle workers (the longest idle first), then the least busy."""
        replicas = self.replicas
        busy = sorted((one for one in replicas.ready if one.load), key=lambda one: one.load)
        self.pool.stop([*replicas.parked, *replicas.idle, *busy][:workers])
        if self.phase is not Phase.PROVEN:
            retired = "retired" if self.phase is Phase.RETIRING else "idle"
            cause = self.function.stopped or retired
            self.note("stop", cause, seen, workers=workers, recent=seen.recent.workers)

    def park(self, workers: int) -> None:
        """Park this number of idle workers, the longest idle first."""
        self.pool.park(self.replicas.idle[:workers])

    def settle(self, row: Row, seen: Seen, now_s: float) -> None:
        """Hold the rung of the plan if there is no worker, and note the load."""
        if not (row.held or seen.starting or seen.unfinished):
            self._hold_rung()
        self.function.prewarms.settle()
        self.note_load(now_s)
        if self.phase is Phase.RETIRING and not self.unfinished:
            self.drain.note_empty()

    def keeps_zygote(self) -> bool:
        # A deploy is about to fork its first worker.
        if self.replicas.held > 0 or self.phase in (Phase.NEW, Phase.PROVING):
            return True
        return self._stand.keeps_zygote and not self.function.paused

    def _hold_rung(self) -> None:
        """As the plan says for a revision without workers, launch or end the zygote, and drop weights from memory."""
        stand = self._stand
        if not self.keeps_zygote():
            self.pool.zygote.rest()
        elif stand.climbs and stand.rung is RungName.ZYGOTE:
            self._tasks.create_task(self.pool.zygote.warm())
        if stand.rung is RungName.LOCAL and self.pool.weights.resident_bytes:
            self.pool.drop_weights()

    def _bar(self) -> None:
        """While the function may not run or its starts fail, refuse the invocations for which no worker is free."""
        refusal: Refusal | None = None
        if barred := (stopped := self.function.stopped):
            refusal = self.function.refusal
        elif self.breaker.failures:
            barred, refusal = "breaker", self._crash_loop
        if barred == self._barred:
            return
        self._barred = barred
        self.revision.dispatcher.bar(refusal, queued=bool(stopped))
        if stopped and (error := self.function.refusal()) is not None:
            self.events.starts.refuse(error)

    def _crash_loop(self) -> CrashLoop | None:
        """Return the error of invocations while the breaker is open; None if a worker is ready or may be started.

        The breaker opens after many failed starts. Then no start is tried for an invocation.
        """
        now_s = time.monotonic()
        if self.replicas.ready or not self.breaker.open(now_s):
            return None
        return self.breaker.refusal(self.spec.function, now_s)

    def note_load(self, now_s: float) -> None:
        """Record the present load in the history of the function. The load of a retiring revision is left out."""
        if self.phase is not Phase.RETIRING:
            replicas, waiting = self.replicas, len(self.revision.dispatcher.queue)
            state = LoadState(
                waiting, replicas.in_flight, replicas.starting, len(replicas.ready), self.stands_on
            )
            self.function.load.note(now_s, state)

    def note(self, action: str, cause: str, seen: Seen, **figures: float) -> None:
        """Record a decision about the number of workers, with the figures behind it."""
        load = seen.load
        predicted = {"work_s": load.work_s, "wake_s": load.wake_s, "lasting": load.lasting} if load else {}
        self.function.decisions.note(
            action, cause, **figures, queued=seen.queued, in_flight=seen.in_flight,
            starting=seen.starting, ready=seen.ready, **predicted,
        )  # fmt: skip

    # -- the limits that all revisions share

    @property
    def urgent(self) -> bool:
        """True if other revisions make room for this one: callers, a deploy or an urgent signal wait for a worker."""
        hold = self.function.prewarms.holds.at(time.monotonic())
        asked = hold is not None and signal_of(hold.cause) in URGENT
        return len(self.revision.dispatcher.queue) > 0 or asked or self.phase is Phase.PROVING

    def fits_gpus(self, workers: int) -> bool:
        return self.node.gpus.fits(self, self.replicas.parked, workers)

    def note_limit(self, reached: ReachedLimit | None, missing: int, seen: Seen) -> None:
        if reached is not None:
            self.note("refuse", reached.name, seen, **{"workers": missing, reached.name: reached.most})
        self.revision.dispatcher.note_limit(reached)

    def claim(self, waiting_since_s: float) -> RevisionClaim:
        """Return the claim for the next allocation: the workers and the GPU memory that the revision has and wants."""
        row, replicas = self.desired(), self.replicas
        wants = {_TIERS[rank]: count for rank, count in row.wants.items()}
        first_s = min((one.activation.ready_s for one in replicas.ready + replicas.parked), default=math.inf)
        places = self.node.gpus.of_owner(self) if self.gpu_need is not None else []
        processes = tuple(node_processes(replicas, self.pool.forking, places))
        return RevisionClaim(
            self.key, self.spec.function, self.owner, wants, row.awake, row.held, processes, self.gpu_need,
            waiting_since_s, first_s, self._cost, self.phase is Phase.RETIRING,
        )  # fmt: skip

    def _cost(self, freed_bytes: float) -> float:
        ladder = self.function.ladder
        below = ladder.below(RungName.READY)[0]
        return waiting_per_byte(ladder.step_down(self.spec.function, RungName.READY, below, freed_bytes))

    def carry_out(self, grant: Grant, seen: Seen) -> None:
        """Start, wake, park and stop workers as the allocation says."""
        cause = grant.limit.name if grant.limit is not None else "gpus"
        for key in grant.stop:
            if isinstance(key, Replica):
                self.pool.stop([key])
                self.note("stop", cause, seen, workers=1)
            else:
                self.pool.zygote.end_standby()
        if ended := [key for key in grant.end if isinstance(key, Replica)]:
            calls = self._relieve(
                ended, replaced(self.spec.function, self.node.reconciler.drain_s), MIN_TEARDOWN_S
            )
            self.note("end", "replaced", seen, workers=len(ended), calls=calls)
        self.pool.park([key for key in grant.park if isinstance(key, Replica)], given=True)
        wakes = [key for key in grant.wake if isinstance(key, Replica)]
        self._sent(self.pool.wake(wakes, len(wakes)), seen.queued)
        if grant.start:
            self.start(len(grant.start), self.row, seen, grant.start)

    def _relieve(self, replicas: Sequence[Replica], end: CallEnd, teardown_s: float) -> int:
        """End workers and their invocations. Return the number of the invocations."""
        calls = sum(self.revision.dispatcher.end_started(replica, end) for replica in replicas)
        for replica in replicas:
            replica.relieve(teardown_s)
        return calls

    def renew_standby(self) -> bool:
        return self.pool.zygote.end_standby()

    # -- who wants workers

    def look(self, arriving: int = 0) -> None:
        self.node.reconciler.look(self, arriving)

    def warm(self, workers: int, cause: str = "warmup", for_s: float = HOLD_S) -> None:
        """Have this number of workers before they are needed, and keep them for `for_s` seconds.

        `cause` is the signal that asks for the workers. The first word of `cause` is the kind of signal.
        """
        self.function.prewarms.holds.add(WarmHold(workers, time.monotonic() + for_s, cause))
        self.look()

    def end_warm_ups(self) -> None:
        """Keep no workers for a signal any more. Workers without calls may end now."""
        self.function.prewarms.holds.clear()
        self.look()

    def on_refused(self) -> None:
        # The caller was refused. Start a worker nevertheless, for the caller's retry.
        self.warm(1, "refused")

    def expect(self, invocations: int, cause: str) -> None:
        """Start the workers that `invocations` invocations need. The invocations run already, or are about to come."""
        now_s = time.monotonic()
        workers = self._demand.ahead(self._scale_spec(), invocations, now_s)
        if workers > len(self.replicas.ready) + self.replicas.starting:
            self.warm(workers, cause, EXPECTED_S)

    async def wait_ready(self, workers: int, timeout_s: float) -> None:
        """Wait until `workers` are ready. Raise ActivationTimeout, or the error of a start that fails meanwhile."""
        if self.phase is Phase.RETIRING:
            raise self.revision.dispatcher.retired()
        if len(self.replicas.ready) >= workers:
            return
        if (error := self._crash_loop()) is not None:
            raise error
        try:
            await self.events.starts.reached(workers, timeout_s)
        except TimeoutError:
            if (reached := self.reached) is not None:
                raise activation_timeout(self.spec.function, timeout_s, reached) from None
            wanted = "1 worker" if workers == 1 else f"{workers} workers"
            message = f"Function {self.spec.function!r} did not have {wanted} ready within {timeout_s:.0f} s."
            raise ActivationTimeout(message, remedy="Wait longer: the start goes on.") from None

    def reset(self) -> None:
        """Try to start workers again at once, although the last starts failed, or the budget was used up."""
        self.breaker.reset()
        self.function.account.forgive()
        self.look()

    # -- its life

    async def open(self) -> WorkerSource:
        """Launch its zygote. Raise HandlerError or LauncherError."""
        return await self.pool.zygote.open()

    async def warm_zygote(self, *, shared_only: bool) -> None:
        """Launch the zygote and the standby. A failure is only logged.

        If `shared_only`, launch only the processes that the zygote shares with zygotes of other revisions.
        """
        await self.pool.zygote.warm(shared_only=shared_only)

    async def prove(self, rollover: int = 0) -> None:
        """Start a worker, to show that workers of this revision start. Raise the error of a start that fails.

        At the same time, start up to `rollover` workers that stay when the revision is live, if the limits allow them.
        """
        self.phase, self._rollover = Phase.PROVING, rollover
        self.look()
        self.function.account.check()
        await self.wait_ready(1, FIRST_START_TIMEOUT_S)
        if self.replicas.starting:
            # The first worker has shown that the revision works. If another start fails, for example for lack of
            # memory, the revision is not the cause.
            await self.events.starts.reached(rollover, FIRST_START_TIMEOUT_S, settled=True)
        self.phase = Phase.PROVEN
        self.look()
        self.pool.zygote.replenish()

    def go_live(self) -> None:
        """Follow the load from now on: this revision has replaced the previous live revision."""
        self._demand.note_need(self._rollover, time.monotonic())
        self.phase, self._rollover = Phase.LIVE, 0
        self.look()

    async def retire(self, timeout_s: float | None = None) -> None:
        """Run the accepted invocations to their deadlines, and end the processes.

        Fail the invocations that have not ended in time, if there is a `timeout_s` or the gateway ends (see `Drain`).
        """
        self.phase = Phase.RETIRING
        if timeout_s is not None:
            self.drain.limit(timeout_s)
        self.revision.retire()
        self.events.starts.refuse(self.revision.dispatcher.retired())
        self.function.ladder.release(self)
        self.pool.zygote.stop_standbys()
        self.look()
        await self.drain.wait()
        # From now on, invocations that exiting workers give back fail: no worker would run them.
        self.revision.dispatcher.close(self.drain.end)
        self.node.reconciler.leave(self)
        if self.drain.end is not None and (busy := [one for one in self.replicas if one.outstanding.calls]):
            calls = self._relieve(busy, self.drain.end, self.drain.teardown_s)
            self.function.decisions.note("end", "shutdown", workers=len(busy), calls=calls)
        try:
            await self.pool.close(self.drain.teardown_s)
            await self.events.wait_told(STOP_TIMEOUT_S)
        finally:
            self.node.reconciler.forget(self)
            self.function.account.detach(self)

    def on_budget(self, *, changed: bool) -> None:
        """If the budget is used up, let workers finish what they have begun, and refuse the rest."""
        self._bar()
        self.node.reconciler.look_by(self, self.function.account.due_s)
        if changed:
            account = self.function.account
            if self.phase is not Phase.RETIRING:
                self._tell_budget(account)
            self.look()

    def _tell_budget(self, account: Account) -> None:
        spent = account.spent
        figures = {"used_share": account.share, "money": spent.money, "worker_s": spent.seconds}
        self.function.decisions.note("budget", account.state, **figures)
        self._logs.write("gateway", account.describe(), "warning" if account.scarce else "info")

    # -- events of invocations

    def explain(self, error: PilotflameError) -> PilotflameError:
        return self.pool.weights.explain(error)

    def on_room(self, replica: Replica, *, waiting: bool) -> None:
        self.pool.zygote.schedule_standby()
        idle = not replica.outstanding.calls
        if idle:
            self.node.reconciler.note_change()
        if waiting or self.phase is Phase.RETIRING:
            self.look()
        elif idle:
            # Nothing changes at the end of the last call, but then time counts.
            self.node.reconciler.look_by(self, replica.idle_since_s + self._quiet_s)

    def on_followed(self, arrived_s: float) -> None:
        self.function.ladder.note_arrival(arrived_s)


_TIERS = {
    Rank.PROOF: WorkerTier.PROOF, Rank.OWNER: WorkerTier.OWNER, Rank.LOAD: WorkerTier.LOAD, Rank.AHEAD: WorkerTier.AHEAD, Rank.KEEP: WorkerTier.KEEP,
}  # fmt: skip
