"""Checks a simulated node whenever nothing is left to do at the present time: what must hold in every history."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

from pilotflame.runtime.calls.serving.replica import Replica, ReplicaState
from pilotflame.runtime.ground.settings.resources import CONTEXT_MB
from pilotflame.runtime.ground.telemetry.rung_name import RungName
from pilotflame.runtime.node.reconciling.reconciler import ALLOCATION
from pilotflame.runtime.node.reconciling.revision_workers import RevisionWorkers
from pilotflame.runtime.node.scaling.allocation import PATIENCE_S
from pilotflame.runtime.node.scaling.idle_period import QUIET_S
from pilotflame.runtime.node.scaling.load import CHECKS, MIN_RECHECK_S
from pilotflame.runtime.node.scaling.placement import GpuNeed, MemoryByGpu, place
from pilotflame.runtime.node.scaling.revision_state import Phase
from simulated_node import SimulatedNode
from simulated_time import LATE_S

# All revisions are looked at again at every seventh time at which nothing is left to do.
LOOK_EVERY = 7
# The largest number of wake-ups of an idle node. Accounts check each hour whether a new day has begun.
MOST_WAKES = 5000
# The time that ends of processes and parking may add to a wait, besides drains and starts.
SLACK_S = 2.0

Real: TypeAlias = Callable[..., Any]


class Broken(Exception):
    """A property does not hold."""


class Checks:
    """Watches the revisions of a node."""

    def __init__(self, node: SimulatedNode) -> None:
        self.node = node
        self.looks = self.actions = self.wakes = 0
        """`wakes` counts how often the loop ran although no call and no event is left."""
        self.rests = False
        self.allocation_s = 0.0
        self.longest_start_s = self.longest_drain_s = self.longest_wait_s = 0.0
        self.most_runs = 0
        """How often the loop ran, at most, at one simulated time before a worker started, stopped, parked or woke."""
        self.actions_at_event = 0
        """How many actions there were at the last event."""
        self._stage = self._quiets = 0
        self._acted: list[tuple[RevisionWorkers, str]] = []
        self._decided_s = dict[str, float]()
        # By revision, noted before the revision is looked at again: whether it had calls, and the time of the
        # next look.
        self._before = dict[str, tuple[bool, float]]()
        self._allocation_due = self._shared = False
        self._rows = dict[str, dict[Any, int]]()
        # By revision, the number of workers that died during their start and whose deaths are not counted yet.
        self._dead_starts = Counter[str]()
        # The GPU memory of each process that was activated, by pid.
        self._full = dict[int, MemoryByGpu]()
        self._draining_since_s = dict[Replica, float]()
        self._waiting_since_s = dict[str, float]()
        # For each waiting revision, by key: the other revisions that have wanted workers meanwhile.
        self._rivals = dict[str, set[str]]()
        node.on_created, node.on_event = self._watch, self._note_event
        node.loop.clock.on_quiet = self._on_quiet

    @property
    def now_s(self) -> float:
        return self.node.loop.time()

    @property
    def looks_again(self) -> bool:
        """True while all revisions are looked at again. No time may pass then."""
        return self._stage > 0

    def close(self) -> None:
        self.node.closed, self.node.loop.clock.on_quiet = True, lambda: False

    # -- what is done

    def _watch(self, one: RevisionWorkers) -> None:
        """Have the methods that decide and act call this object."""
        pool, zygote, standby = one.pool, one.pool.zygote, one.pool.standby
        changed: tuple[tuple[object, str, Callable[..., Any]], ...] = (
            (one.observed, "update_row", self._on_decide), (pool, "start", self._on_start), (pool, "stop", self._on_stop),
            (pool, "park", self._on_park), (pool, "wake", self._on_wake), (zygote, "rest", self._on_rest),
            (standby, "end", self._on_end_standby), (one.events, "on_lost", self._on_lost),
            (one.events, "_note_death", self._on_death),
        )  # fmt: skip
        for target, name, method in changed:
            setattr(target, name, partial(method, one, getattr(target, name)))

    def _on_decide(self, one: RevisionWorkers, decide: Real, now_s: float, arriving: int = 0) -> Any:
        self._decided_s[one.key] = now_s
        return decide(now_s, arriving)

    def _on_lost(self, one: RevisionWorkers, on_lost: Real, replica: Replica, *calls: Any) -> None:
        self._dead_starts[one.key] += not replica.activation.ready_s and not replica.start.failed
        on_lost(replica, *calls)

    def _on_death(self, one: RevisionWorkers, note_death: Real, *arguments: Any) -> None:
        self._dead_starts[one.key] -= 1
        note_death(*arguments)

    def _on_start(self, one: RevisionWorkers, start: Real, count: int, *arguments: Any, **named: Any) -> None:
        self._check_start(one, count)
        self._note(one, f"start {count} for {self._wants(one)}")
        start(count, *arguments, **named)
        self._check_gpus()

    def _on_stop(self, one: RevisionWorkers, stop: Real, replicas: Sequence[Replica]) -> None:
        for replica in replicas:
            self._note(one, f"stop {replica.name} ({replica.state}, {replica.outstanding.load} calls)")
        stop(replicas)

    def _on_park(self, one: RevisionWorkers, park: Real, replicas: Sequence[Replica], **named: bool) -> None:
        for replica in replicas:
            self._note(one, f"park {replica.name}{' to make room' if named.get('given') else ''}")
        park(replicas, **named)

    def _on_wake(self, one: RevisionWorkers, wake: Real, replicas: Sequence[Replica], most: int) -> int:
        woken = int(wake(replicas, most))
        if woken:
            self._note(one, f"wake {woken}")
        return woken

    def _on_rest(self, one: RevisionWorkers, rest: Real) -> None:
        if one.pool.zygote._source is not None:
            self._note(one, "end of the zygote")
            if len(one.replicas):
                raise Broken(f"{one.key}: the zygote ends under workers")
        rest()

    def _on_end_standby(self, one: RevisionWorkers, end_standby: Real) -> bool:
        ended = bool(end_standby())
        if ended:
            self._note(one, "end of the standby")
        return ended

    def _note_event(self) -> None:
        self.actions_at_event = self.actions

    def _note(self, one: RevisionWorkers, text: str) -> None:
        self.node.tell(f"{one.key}: {text}")
        self._acted.append((one, text))
        self.actions += 1
        if not self._stage:
            self.most_runs = max(self.most_runs, self.node.loop.clock.runs)

    @staticmethod
    def _wants(one: RevisionWorkers) -> str:
        seen = one.observed.seen
        wanted = ", ".join(f"{each.cause} {each.want}" for each in one.observed.row.wanted)
        return f"{wanted}; {seen.queued} queued, {seen.in_flight} in flight, {seen.ready} ready, {seen.starting} starting"

    # -- limits, and the table

    def _check_start(self, one: RevisionWorkers, count: int) -> None:
        if self._decided_s[one.key] < self.now_s - self.allocation_s - LATE_S:
            raise Broken(f"{one.key}: a start by a row of another time")
        replicas, row = one.replicas, one.observed.row
        awake = len(replicas.ready) + replicas.starting + count
        if awake > row.awake:
            raise Broken(f"{one.key}: starts {count}, to {awake}, but the row names {row.awake}")
        most = one.revision.policy.scale.max
        if awake + len(replicas.parked) > most:
            raise Broken(
                f"{one.key}: {awake} awake and {len(replicas.parked)} parked are more than max, {most}"
            )
        proves = any(
            each.phase is Phase.PROVING and (each is one or each.replicas.total)
            for each in self.node.members.values()
        )
        for name, limit, held in self._limits(one):
            if limit is not None and held + count > limit + proves:
                raise Broken(f"{one.key}: {held + count} workers exceed the limit {name!r}, {limit}")

    def _limits(self, one: RevisionWorkers) -> list[tuple[str, int | None, int]]:
        members = list(self.node.members.values())
        return [
            ("node", self.node.most, sum(each.replicas.total for each in members)),
            (one.owner, self.node.owners.get(one.owner), sum(each.replicas.total for each in members if each.owner == one.owner)),
        ]  # fmt: skip

    def _check_gpus(self) -> None:
        gpus = self.node.reconciler.gpus
        booked = gpus._ledger.booked
        for gpu in gpus.gpus:
            if booked[gpu.id] > gpu.memory_mb:
                raise Broken(f"GPU {gpu.id} has {gpu.memory_mb} MiB, and {booked[gpu.id]} are booked")

    def _check_memory(self) -> None:
        """Raise Broken if the existing processes use more memory of a GPU than it has."""
        gpus, held = self.node.reconciler.gpus, Counter[str]()
        for one in self.node.members.values():
            for replica in one.replicas:
                if (found := gpus.of(replica)) is not None:
                    self._full[replica.child.pid] = found.full
        processes = self.node.world.processes
        self._full = {pid: full for pid, full in self._full.items() if pid in processes}
        for pid, full in self._full.items():
            held.update(dict.fromkeys(full, CONTEXT_MB) if processes[pid].is_parked else full)
        for gpu in gpus.gpus:
            if held[gpu.id] > gpu.memory_mb:
                raise Broken(f"GPU {gpu.id} has {gpu.memory_mb} MiB, and processes hold {held[gpu.id]}")

    # -- when nothing is left to do

    def _on_quiet(self) -> bool:
        try:
            return self._check()
        except BaseException:
            self.close()
            raise

    def _check(self) -> bool:
        acted, self._acted = self._acted, []
        if self.node.faults:
            raise Broken(self.node.faults[0])
        if self._stage == 0:
            self._quiets += 1
            self.wakes += self.rests
            if self.wakes > MOST_WAKES:
                raise Broken(
                    f"the node is idle and does not come to rest: {self.node.reconciler.agenda._due}"
                )
            self._check_gpus()
            if self.node.reconciler.gpus.gpus:
                self._check_memory()
            self._note_times()
            if self._quiets % LOOK_EVERY:
                return False
            self._look_again()
        elif self._stage == 1:
            if not self._shares_anew():
                for one, text in acted:
                    self._excuse(one, text)
            self._look_again()
        else:
            if acted and not self._allocation_due:
                one, text = acted[0]
                raise Broken(f"{one.key}: a second look without an event does this: {text}")
            self._check_rows()
            self._check_calls()
            self._stage = 0
            return False
        self._stage += 1
        return True

    def _look_again(self) -> None:
        limits = self.node.reconciler.limits
        self._shared = bool(limits._short)
        self._allocation_due = limits._pending and self._due_s(ALLOCATION) < math.inf
        self._rows = {one.key: one.observed.row.wants for one in self._members()}
        self._before = {
            key: (
                one.observed.seen.unfinished > 0 or one.replicas.in_flight > 0,
                self._due_s(key),
            )
            for key, one in self.node.members.items()
        }
        for one in self._members():
            self.looks += 1
            one.look()

    def _due_s(self, key: str) -> float:
        """Return when the next look at a revision, or the next allocation, is due if no event causes an
        earlier one.
        """
        return self.node.reconciler.agenda._due.get(key, math.inf)

    def _members(self) -> list[RevisionWorkers]:
        return [one for one in self.node.members.values() if one.key in self.node.reconciler.limits.members]

    def _shares_anew(self) -> bool:
        """Return True if a new allocation of workers is allowed without an event: it was due soon, or the
        load of a revision has changed, which no event reports.
        """
        changed = [
            one
            for one in self._members()
            if one.observed.row.wants != self._rows.get(one.key, one.observed.row.wants)
        ]
        under_way = self._shared and any(one.events.unrecovered for one in self._members())
        return self._allocation_due or under_way or any(self._is_soon(one) for one in changed)

    def _excuse(self, one: RevisionWorkers, text: str) -> None:
        """Raise Broken unless a look was due soon.

        No event reports that fewer calls run, or that calls last long. After the last call, a look waits for
        the timer of the idle period.
        """
        if one.events.unrecovered and not text.startswith("start"):
            return
        if not self._is_soon(one):
            due_s = self._before[one.key][1]
            raise Broken(f"{one.key}: a look without an event does this: {text} (due at {due_s - 1000:.3f})")

    def _is_soon(self, one: RevisionWorkers) -> bool:
        busy, due_s = self._before[one.key]
        if one.phase is Phase.PROVEN:
            # The next look comes when the revision goes live, in a moment. A signal may have arrived before.
            return True
        if one.events.unrecovered and (one.replicas.ready or not self._dead_starts[one.key]):
            # A worker has died. The look for this death comes a moment before the regular look.
            return True
        within_s = max(one.revision.policy.scale.scale_down_s / CHECKS, MIN_RECHECK_S) if busy else QUIET_S
        if busy and one.observed.seen.load is not None:
            within_s = max(within_s, one.observed.seen.load.delay_s)
        return due_s <= self.now_s + within_s

    def _check_calls(self) -> None:
        """Raise Broken if a call that has not ended is neither in a queue nor at a worker."""
        members = self.node.members.values()
        if any(one.events.unrecovered for one in members):
            return
        there = {call.id for one in members for call in one.revision.dispatcher.queue}
        there |= {
            call.id for one in members for each in one.replicas for call in each.outstanding.calls.values()
        }
        if lost := self.node.open_calls.keys() - there:
            raise Broken(f"calls are in no queue and at no worker: {sorted(lost)[:5]}")

    def _check_rows(self) -> None:
        short = self.node.reconciler.limits._short
        for one in self._members():
            row, seen = one.observed.update_row(self.now_s)
            missing = row.start(seen)
            if not missing:
                continue
            if one not in short:
                raise Broken(f"{one.key}: {missing} workers are missing, and it waits for none")
            if short[one].reached is None and self._due_s(ALLOCATION) == math.inf:
                raise Broken(
                    f"{one.key}: waits for {missing} workers, and no allocation is due: {short[one]}"
                )

    # -- who waits

    def _note_times(self) -> None:
        now_s, draining = self.now_s, dict[Replica, float]()
        for one in self.node.members.values():
            for asked_s in one.replicas.asked_s:
                self.longest_start_s = max(self.longest_start_s, now_s - asked_s)
            for replica in one.replicas:
                if replica.state is ReplicaState.DRAINING:
                    since_s = draining[replica] = self._draining_since_s.get(replica, now_s)
                    self.longest_drain_s = max(self.longest_drain_s, now_s - since_s)
        self._draining_since_s = draining
        for one in self._members():
            self._note_wait(one)

    def _note_wait(self, one: RevisionWorkers) -> None:
        waits = len(one.revision.dispatcher.queue) > 0 and not one.replicas.ready and self._can_have_room(one)
        if not waits:
            self._waiting_since_s.pop(one.key, None)
            self._rivals.pop(one.key, None)
            return
        since_s = self._waiting_since_s.setdefault(one.key, self.now_s)
        rivals = self._rivals.setdefault(one.key, set())
        rivals |= {
            each.key
            for each in self._members()
            if each is not one and (each.observed.urgent or each.observed.seen.unfinished)
        }
        waited_s = self.now_s - since_s
        self.longest_wait_s = max(self.longest_wait_s, waited_s)
        turn_s = PATIENCE_S + self.longest_start_s + self.longest_drain_s + SLACK_S
        if waited_s > turn_s * (1 + len(rivals)):
            raise Broken(
                f"{one.key}: its calls wait for {waited_s:.1f} s, and {len(rivals)} others took {turn_s:.1f} s each"
            )

    def _can_have_room(self, one: RevisionWorkers) -> bool:
        """Return True if a worker of a revision could start beside all workers that stay in any case."""
        history = one.function
        if history.paused or history.account.exhausted or one.breaker.failures or one.events.unexplained:
            return False
        others = [each for each in self._members() if each is not one]
        kept = {each.key: self._kept(each) for each in others}
        for name, limit, _ in self._limits(one):
            beside = sum(kept[each.key] for each in others if name in ("node", each.owner))
            if limit is not None and beside >= limit:
                return False
        return one.gpu_need is None or self._fits(one.gpu_need, [(each, kept[each.key]) for each in others])

    @staticmethod
    def _kept(one: RevisionWorkers) -> int:
        return max(one.revision.policy.scale.min, one.phase in (Phase.PROVING, Phase.PROVEN))

    def _fits(self, need: GpuNeed, others: list[tuple[RevisionWorkers, int]]) -> bool:
        gpus = self.node.reconciler.gpus.gpus
        if any(kept and each.gpu_need is not None for each, kept in others):
            # The GPUs of these workers are unknown here. Assume that no GPU has free memory.
            return False
        return place(gpus, [], need) is not None

    # -- at the end

    def check_end(self) -> None:
        """Raise Broken unless the node is at rest: nothing happens any more."""
        node, agenda = self.node, self.node.reconciler.agenda
        if node.open_calls:
            raise Broken(
                f"{len(node.open_calls)} calls were accepted and have not ended: {[*node.open_calls][:5]}"
            )
        for one in self._members():
            row, seen = one.observed.update_row(self.now_s)
            if one not in node.reconciler.limits._short and (row.awake, row.held) != (seen.ready, seen.held):
                raise Broken(f"{one.key}: has {seen}, but the row is {row}")
            stand, ladder = one.observed.stand, one.function.ladder
            # A plan may keep a worker for more than a month.
            planned = ladder.plans and stand.rung is RungName.READY and stand.again_s == math.inf
            holds = one.revision.policy.scale.min or row.wanted or planned
            if seen.held and not holds:
                raise Broken(
                    f"{one.key}: {seen.held} workers stay although nothing holds them: {row}, {seen}"
                )
            if (due_s := self._due_s(one.key)) < math.inf:
                raise Broken(
                    f"{one.key}: a look is due at {due_s - 1000:.3f} although nothing happens: {row}"
                )
        if agenda._timer is not None:
            raise Broken(f"the timer is set to {agenda._timer_at_s - 1000:.3f}, although nothing happens")
