"""Observes one revision, and computes its row, and its claim on the limits that revisions share."""

from __future__ import annotations

import math
import time
from dataclasses import replace

from ....errors import PilotflameError
from ...calls.serving.replica import Replica
from ...calls.serving.revision import CallWatcher
from ...ground.access.gateway_shares import PATIENCE_S, GatewayUse
from ...ground.settings.scale_spec import ReachedLimit, ScaleSpec
from ...ground.telemetry.load_history import LoadState
from ...ground.telemetry.rung_name import RungName
from ..scaling.at_rest import Present, RestPlan, at_rest
from ..scaling.claims import RevisionClaim, WorkerTier
from ..scaling.desired_state import desired
from ..scaling.eviction import waiting_per_byte
from ..scaling.idle_period import QUIET_S
from ..scaling.load import NEAR_LIMIT, needed, sufficient_load, sufficient_queue
from ..scaling.revision_state import Phase, RevisionState
from ..scaling.seen import Seen
from ..scaling.table import Proposal, Rank, Row
from ..scaling.warm_requests import WarmRequest
from .bar import Bar
from .demand import Demand
from .gpu_bookings import node_processes
from .idle_ladder import Stand
from .inventory import Inventory
from .prewarms import signal_of
from .process_events import ProcessEvents, Watched
from .revision_parts import RevisionParts

# When the plan climbs to READY, its request for a worker lasts this long. The plan itself keeps the ready worker.
PREDICTED_S = 1.0
# Other functions give up workers and GPU memory for signals of these kinds, as they do for waiting callers.
URGENT = ("refused", "warmup")
# Look at a retiring revision this often. Its drain has no time limit, so it must end even if the last event was missed.
DRAIN_LOOK_S = 10.0
# While calls wait although there are enough workers, look again this long after the last look.
LOOK_EVERY_S = 0.005


class ObservedRevision:
    """The observations of one revision, and the row that follows from the latest observations."""

    def __init__(self, one: RevisionParts, events: ProcessEvents, inventory: Inventory, bar: Bar) -> None:
        self._one, self._events, self._inventory, self._bar = one, events, inventory, bar
        self.demand = Demand(one.pool, one.revision)
        self.row, self.seen = Row(0, 0), Seen(0, 0, 0, 0)
        self.stand = Stand()
        """The rung that the keep-alive plan held at the last look."""
        self.looked_s = -math.inf
        """When the row was made."""
        self.quiet_s = QUIET_S

    # -- the row

    def update_row(self, now_s: float, arriving: int = 0) -> tuple[Row, Seen]:
        """Observe the revision, keep and return its row and the observations. `arriving` invocations are about to be queued."""
        self.looked_s = now_s
        spec, function = self._scale_spec(), self._one.function
        asked = function.prewarms.requests.at(now_s)
        seen = self.seen = self.demand.see(spec, now_s, arriving)
        ahead = (
            None if asked is None else Proposal(Rank.AHEAD, asked.cause, asked.workers, until_s=asked.until_s)
        )
        row = desired(spec, seen, now_s, self._state(now_s), ahead)
        rest = at_rest(self._one.phase, self._rest_plan(), seen, row.held, self._present(), now_s)
        self.row = row._replace(rest=rest, again_s=min(row.again_s, rest.again_s))
        if spec.elsewhere:
            refused, limit = self.row.capped.startswith("max"), ReachedLimit("elsewhere", spec.elsewhere)
            self._one.revision.dispatcher.limits.elsewhere = limit if refused else None
            if refused:
                self._one.node.limits.lacks(self._one.spec.function, self.use.want)
        self.quiet_s = min(QUIET_S, spec.scale_to_zero_s, spec.park_after_s)
        # The next invocation ends the idle period, or may have to wake a worker. So it must cause a look.
        looks_first = function.ladder.watch.period or seen.parked
        calls = self._one.revision
        calls.enough = -1.0 if looks_first else sufficient_load(spec, seen)
        calls.enough_queued = -1.0 if looks_first else sufficient_queue(spec, seen)
        return self.row, seen

    @property
    def use(self) -> GatewayUse:
        """Three numbers of workers: all workers of the revision, the workers that have calls or start, and the workers that
        its calls need. Workers for other reasons do not count as needed. `since_s` is the age of the oldest ready worker, at
        most PATIENCE_S.
        """
        replicas, queued = self._one.replicas, len(self._one.revision.dispatcher.queue)
        if not (have := replicas.total) and not queued:
            return GatewayUse()
        want = 0
        if queued + replicas.in_flight > replicas.leaving:
            most = self._one.revision.policy.settings.scale.max
            want = min(most, max(1, needed(self._scale_spec(), self.seen)))
        busy = replicas.starting + sum(bool(each.outstanding.calls) for each in replicas)
        # Limit the time and round it, so that it stops changing: an unchanged report is not written again.
        held_s = min(PATIENCE_S, time.monotonic() - min(self._ready_s(), default=math.inf))
        return GatewayUse(have, min(have, busy), want, round(max(0.0, held_s), 1))

    def _ready_s(self) -> list[float]:
        replicas = self._one.replicas
        return [each.activation.ready_s for each in replicas.ready + replicas.parked]

    def desired(self) -> Row:
        """Return the row of the last look, or a new row if the number of calls has changed without a look."""
        one = self._one
        if self.seen.unfinished != len(one.revision.dispatcher.queue) + one.replicas.in_flight:
            self.update_row(time.monotonic())
        return self.row

    def ahead(self, invocations: int) -> int:
        """Return how many workers `invocations` invocations need. They run already, or are about to come."""
        return self.demand.ahead(self._scale_spec(), invocations, time.monotonic())

    def advance(self, now_s: float) -> float:
        """Take the due steps of the budget and of the keep-alive plan. Return when to call this again.

        The returned time also covers the relaunch of a zygote, and the drain of a retiring revision.
        """
        one, account = self._one, self._one.function.account
        if account.due_s <= now_s:
            account.check()
        # Refuse calls before the load is counted: refused calls are no load.
        self._bar.update()
        follow_at_s, self.stand = math.inf, Stand()
        if one.function.ladder.drives(one):
            follow_at_s, self.stand = self._follow_idling(now_s), self._take_stand(now_s)
            one.revision.follows_until_s = one.function.ladder.past.follows_until_s
        drains_s = now_s + DRAIN_LOOK_S if one.phase is Phase.RETIRING else math.inf
        return min(self.stand.again_s, follow_at_s, account.due_s, one.pool.zygote.relaunch_at_s, drains_s)

    def _follow_idling(self, now_s: float) -> float:
        """Report to the ladder whether there is work. Return when to report again."""
        one, ladder = self._one, self._one.function.ladder
        if one.starts.breaker.failures and not (one.replicas.ready or one.replicas.parked):
            ladder.interrupt()
            return math.inf
        load = len(one.revision.dispatcher.queue) + one.replicas.in_flight
        if load:
            return ladder.follow(now_s, load, None)
        workers = one.replicas.ready + one.replicas.parked
        return ladder.follow(now_s, load, max((each.idle_since_s for each in workers), default=None))

    def _take_stand(self, now_s: float) -> Stand:
        """Return the rung that the plan holds now. If the plan climbs to READY, ask for a worker."""
        stand = self._one.function.ladder.stand(now_s)
        if stand.climbs and stand.rung is RungName.READY:
            # Once the worker is ready, the plan keeps it.
            self._one.function.prewarms.requests.add(WarmRequest(1, now_s + PREDICTED_S, "predicted"))
        return stand

    def _state(self, now_s: float) -> RevisionState:
        """Return the revision's state, apart from its load. The state bounds the number of workers."""
        one, breaker = self._one, self._one.starts.breaker
        return RevisionState(
            one.phase, one.rollover, one.function.stopped, breaker.failures,
            breaker.backoff_until_s, open=breaker.open(now_s), begun=self._has_begun(), unexplained=self._events.unexplained > 0,
        )  # fmt: skip

    def _rest_plan(self) -> RestPlan:
        stand, one = self.stand, self._one
        keeps = stand.keeps_zygote and not one.function.paused and one.pool.zygote.stays
        climbs = stand.climbs and stand.rung is RungName.ZYGOTE
        return RestPlan(keeps, climbs, stand.rung is RungName.LOCAL)

    def _present(self) -> Present:
        pool, standby = self._one.pool, self._one.pool.standby
        total, relaunch_at_s = self._one.replicas.total, pool.zygote.relaunch_at_s
        return Present(total, pool.ending, standby.lacks, standby.due_s, relaunch_at_s)

    def _has_begun(self) -> bool:
        """Return True if the revision retires, and no accepted invocation waits for its start."""
        one = self._one
        if one.phase is not Phase.RETIRING or len(one.revision.dispatcher.queue):
            return False
        return all(each.outstanding.running() >= each.outstanding.calls.keys() for each in one.replicas)

    @property
    def unfinished(self) -> bool:
        """True if accepted invocations have not ended."""
        dispatcher = self._one.revision.dispatcher
        waiting = len(dispatcher.queue) or dispatcher.aside or self._events.unrecovered
        return bool(waiting or self._one.replicas.in_flight)

    def _scale_spec(self) -> ScaleSpec:
        """Return the owner's settings, but with the concurrency of the ready workers if that is higher, and with the
        `scale_to_zero_s` that follows from the keep-alive plan.
        """
        one, concurrency = self._one, self._one.revision.policy.scale.concurrency
        ready, spec = one.replicas.ready, one.revision.policy.scale
        windows = [replica.window for replica in ready if replica.prefetches]
        slots = [replica.outstanding.slots for replica in ready if not replica.outstanding.batching]
        if windows:
            # A window includes prefetched invocations, which wait at the worker. So a full window is no load near the limit.
            concurrency = max(concurrency, math.ceil(min(windows) / NEAR_LIMIT))
        elif slots:
            concurrency = max(concurrency, min(slots))
        ladder, zero_s = one.function.ladder, spec.scale_to_zero_s
        if not self.stand.keeps_worker:
            zero_s = 0.0
        elif ladder.plans and ladder.drives(one):
            # The plan decides when the last worker ends.
            zero_s = math.inf
        if (concurrency, zero_s) == (spec.concurrency, spec.scale_to_zero_s):
            return spec
        return replace(spec, concurrency=concurrency, scale_to_zero_s=zero_s)

    def note_load(self, now_s: float) -> None:
        """Record the present load in the history of the function. The load of a retiring revision is left out."""
        one = self._one
        if one.phase is not Phase.RETIRING:
            replicas, waiting = one.replicas, len(one.revision.dispatcher.queue)
            state = LoadState(
                waiting, replicas.in_flight, replicas.starting, len(replicas.ready), self._inventory.stands_on
            )
            one.function.load.note(now_s, state)

    # -- what revisions share

    @property
    def urgent(self) -> bool:
        """True if other revisions make room for this one: callers, a deploy or an urgent signal wait for a worker."""
        asked = self._one.function.prewarms.requests.at(time.monotonic())
        urgent = asked is not None and signal_of(asked.cause) in URGENT
        return len(self._one.revision.dispatcher.queue) > 0 or urgent or self._one.phase is Phase.PROVING

    def claim(self, waiting_since_s: float) -> RevisionClaim:
        """Return the claim for the next allocation: the workers and the GPU memory that the revision has and wants."""
        row, one, replicas = self.desired(), self._one, self._one.replicas
        wants = {WorkerTier[rank.name]: count for rank, count in row.wants.items()}
        bookings = one.node.gpus.of_owner(one) if one.gpu_need is not None else []
        processes = tuple(node_processes(replicas, one.pool.forking, bookings))
        return RevisionClaim(
            one.key, one.spec.function, one.owner, wants, row.awake, row.held, processes, one.gpu_need,
            waiting_since_s, min(self._ready_s(), default=math.inf), self._cost, one.phase is Phase.RETIRING,
        )  # fmt: skip

    def _cost(self, freed_bytes: float) -> float:
        ladder = self._one.function.ladder
        below = ladder.measured.spec.below(RungName.READY)[0]
        return waiting_per_byte(ladder.step_down(self._one.spec.function, RungName.READY, below, freed_bytes))


class CallReports(CallWatcher):
    """Passes on the reports of a revision about its invocations. The reconciler looks when the row may have changed."""

    def __init__(self, one: Watched) -> None:
        self._one = one

    def look(self, arriving: int = 0) -> None:
        self._one.node.reconciler.look(self._one, arriving)

    def look_soon(self) -> None:
        # Look again although no event occurs: no event reports that the calls before the waiting call are late.
        at_s = self._one.observed.looked_s + LOOK_EVERY_S
        self._one.node.reconciler.look_by(self._one.key, at_s)

    def on_refused(self) -> None:
        # The caller was refused. Start a worker nevertheless, for the caller's retry.
        self._one.warm(1, "refused")

    def on_room(self, replica: Replica, *, waiting: bool) -> None:
        idle = not replica.outstanding.calls
        if idle:
            self._one.node.limits.note_change()
        if waiting or self._one.phase is Phase.RETIRING:
            self.look()
        elif idle:
            # The worker has become idle. This changes the row only after `quiet_s`, so look at that time.
            at_s = replica.idle_since_s + self._one.observed.quiet_s
            self._one.node.reconciler.look_by(self._one.key, at_s)

    def on_followed(self, arrived_s: float) -> None:
        self._one.function.ladder.past.note_arrival(arrived_s)

    def explain(self, error: PilotflameError) -> PilotflameError:
        return self._one.pool.weights.explain(error)
