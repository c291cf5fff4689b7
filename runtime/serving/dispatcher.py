"""The line: those who wait for a worker of one revision, and those who run. Hands them out in groups, and minds their time."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Any

from ...errors import ActivationTimeout, DeadlineExceeded, PilotflameError, RevisionRetired, WorkerDied
from ..batching.assignment import hand_out
from ..batching.latency_curve import Point
from ..batching.queue import Lanes, Queue
from ..link.worker_spec import WorkerSpec
from .deadlines import Deadlines
from .invocation import Invocation
from .latency_curve_store import LatencyCurveStore
from .outstanding import GroupEnd
from .policy import Policy
from .pool import Pool
from .replica import Replica

MAX_ATTEMPTS = 3
CANCEL_GRACE_S = 5.0
# What async handlers get to be interrupted in.
INTERRUPT_S = 1.0
SMOOTHING = 0.3
WAY_SMOOTHING = 0.1


class Dispatcher:
    """Belongs to one revision, and to its event loop."""

    def __init__(
        self,
        spec: WorkerSpec,
        policy: Policy,
        pool: Pool,
        curves: LatencyCurveStore,
        on_change: Callable[[], None],
    ) -> None:
        """`on_change` is called when somebody left who was not answered: perhaps fewer workers are wanted.

        `curves` say how fast it was when it last ran; if they do not, the first worker measures it, if it can.
        """
        self.policy = policy
        self.queue: Queue[Invocation] = Queue(spec.function, limit=policy.batch, most=policy.max_queue)
        self.traits = ""
        """The device and dtype of its workers, once there was one."""
        pool.measuring = not curves.known
        self._curves = curves
        self._spec = spec
        self._pool = pool
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._alarms = Deadlines(self._loop, self._on_alarm)
        self._gather: asyncio.TimerHandle | None = None
        self._activation_s = 0.0
        self._over = False

    def __len__(self) -> int:
        """How many wait."""
        return len(self.queue)

    def configure(self, policy: Policy) -> None:
        """What is known once the handler was looked at."""
        self.policy = policy
        self.queue.limit, self.queue.most = policy.batch, policy.max_queue

    # -- in

    def submit(self, invocation: Invocation) -> bool:
        """Whether it went to a worker that was free, and nobody waits. Raises QueueFull, Overloaded, RevisionRetired."""
        if self._over:
            raise self._retired()
        now_s = time.monotonic()
        if self.policy.batch == 1 and not len(self.queue) and (replica := self._pool.pick()) is not None:
            self._alarms.set(invocation, invocation.deadline_s, now_s)
            self._send(replica, [invocation], now_s)
            return True
        invocation.timeline.waits_cold = not self._pool.ready
        self.queue.admit(invocation, now_s, self._lanes(now_s))
        self._alarms.set(invocation, min(invocation.deadline_s, invocation.hold_until_s), now_s)
        self.pump()
        return False

    def _lanes(self, now_s: float) -> Lanes:
        """Where groups run, or will once the workers that start are ready. A slot of a handler that takes singles is a lane."""
        ready = self._pool.ready
        at_once = max(1, self.policy.scale.concurrency // self.policy.batch)
        count = sum(replica.given.slots for replica in ready) + at_once * self._pool.restoring
        if ready:
            curve = self.queue.curve
            return Lanes(count, min(replica.given.free_at(now_s, curve) for replica in ready))
        asked_s = min((replica.activation.asked_s for replica in self._pool.replicas), default=now_s)
        return Lanes(max(count, at_once), max(now_s, asked_s + self._activation_s))

    def put_back(self, invocation: Invocation) -> None:
        """A worker gives it back, or died with it."""
        if invocation.ended:
            return
        invocation.worker, invocation.overrun_s = "", math.inf
        if self._over:
            invocation.fail(self._retired())
            return
        if invocation.execution_s is not None:
            invocation.deadline_s = invocation.hold_until_s
        now_s = time.monotonic()
        self._alarms.set(invocation, _wait_until(invocation, now_s), now_s)  # not when its call was to end
        self.queue.put_back(invocation)

    # -- out

    def pump(self) -> None:
        """Hands out what waits, as far as workers are free."""
        now_s = time.monotonic()
        for step in hand_out(self.queue, self._pool.pick, self._pool.ready, now_s):
            for invocation in step.refused:
                invocation.fail(self.queue.refusal(invocation, now_s, self._lanes(now_s)))
            if step.worker is not None and step.taken:
                self._send(step.worker, step.taken, now_s)
            if step.look_at_s is not None:
                self._look_at(step.look_at_s, now_s)

    def _look_at(self, when_s: float, now_s: float) -> None:
        """Looks at the queue again then, if nothing happens before."""
        if self._gather is not None:
            self._gather.cancel()
        self._gather = self._loop.call_later(max(0.0, when_s - now_s), self.pump)

    def _send(self, replica: Replica, group: list[Invocation], now_s: float) -> None:
        limit_s = self.policy.execution_timeout_s
        for invocation in group:
            line = invocation.timeline
            if line.waits_cold and replica.activation.ready_s > line.received_s:
                line.activation = replica.activation
            if invocation.execution_s is not None:  # from here on its deadline is that of its execution
                invocation.deadline_s = now_s + invocation.execution_s
                self._alarms.set(invocation, invocation.deadline_s, now_s)
            if limit_s is not None:
                self._time_execution(invocation, now_s, limit_s)
        replica.send(group, now_s)
        for invocation in group:
            if invocation.on_sent is not None:
                invocation.on_sent()

    def fail_waiting(self, error: PilotflameError) -> None:
        """Nobody will serve those who wait."""
        for invocation in list(self.queue):
            self.queue.drop(invocation)
            invocation.fail(error)

    def close(self) -> None:
        """Nobody is handed out any more, and what comes back from workers that end is failed."""
        self._over = True
        self.fail_waiting(self._retired())
        if self._gather is not None:
            self._gather.cancel()

    def _retired(self) -> RevisionRetired:
        return RevisionRetired(
            f"Revision {self._spec.revision} was stopped before this invocation could run."
        )

    # -- time

    def cancel(self, invocation: Invocation) -> None:
        """The caller has gone: the invocation leaves the queue, or its worker is told."""
        invocation.abandon()
        self._drop(invocation)

    def _drop(self, invocation: Invocation) -> None:
        if not self.queue.drop(invocation) and (replica := self._replica_of(invocation)) is not None:
            # A plain handler cannot be interrupted: it may finish, but not outlive the deadline it was given.
            left_s = max(0.0, invocation.deadline_s - time.monotonic())
            replica.cancel(invocation, left_s + CANCEL_GRACE_S)
        self._on_change()

    def _replica_of(self, invocation: Invocation) -> Replica | None:
        return next((one for one in self._pool.replicas if one.name == invocation.worker), None)

    def _time_execution(
        self, invocation: Invocation, now_s: float, limit_s: float, began_s: float | None = None
    ) -> None:
        invocation.overrun_s = (now_s if began_s is None else began_s) + limit_s
        self._alarms.set(invocation, min(invocation.deadline_s, invocation.overrun_s), now_s)

    def _on_alarm(self, invocation: Invocation) -> None:
        now_s = time.monotonic()
        waited_s = now_s - invocation.timeline.received_s
        if now_s >= invocation.deadline_s - 0.001:
            invocation.fail(
                DeadlineExceeded(
                    f"The invocation did not end within its deadline ({waited_s:.1f} s).",
                    remedy="Raise timeout_s in pilotflame.toml, or ask for less.",
                )
            )
            self._drop(invocation)
        elif invocation.worker and now_s >= invocation.overrun_s - 0.001:
            self._on_overrun(invocation, now_s)
        elif not invocation.worker and not self._pool.ready and now_s >= invocation.hold_until_s - 0.001:
            invocation.fail(
                ActivationTimeout(
                    f"No worker of {self._spec.function!r} was ready within the hold time ({waited_s:.1f} s).",
                    remedy="Try again: the activation goes on. hold_s in pilotflame.toml, or the header"
                    " X-Scale-Up-Timeout (seconds), lets callers wait longer.",
                )
            )
            self._drop(invocation)
        elif invocation.worker:
            self._alarms.set(invocation, min(invocation.deadline_s, invocation.overrun_s), now_s)
        else:  # once it was held for as long as that, it is held for load: only the deadline counts
            self._alarms.set(invocation, _wait_until(invocation, now_s), now_s)

    def _on_overrun(self, invocation: Invocation, now_s: float) -> None:
        """One call of the handler has taken longer than it may."""
        replica, limit_s = self._replica_of(invocation), self.policy.execution_timeout_s
        if replica is None or limit_s is None:
            return
        began_s = replica.began_s(invocation)
        if began_s is None or now_s < began_s + limit_s - 0.001:  # it stands, or stood, behind another
            self._time_execution(invocation, now_s, limit_s, began_s)
        elif invocation.companions:  # it may be one of them alone: all are run again, each by itself
            replica.replace(invocation)
        else:
            invocation.fail(
                DeadlineExceeded(
                    f"One call of the handler took longer than execution_timeout_s, which is {limit_s:g} s.",
                    remedy="Raise execution_timeout_s in pilotflame.toml, or do less in one call.",
                )
            )
            if self.policy.on_loop:
                replica.cancel(invocation, INTERRUPT_S)
            else:
                replica.replace(invocation)
        self._on_change()

    # -- what is heard of workers

    def on_ready(self, replica: Replica) -> None:
        if not replica.warmth.get("curve"):  # measuring it takes seconds, and is done once
            took_s = replica.activation.ready_s - replica.activation.asked_s
            self._activation_s += (SMOOTHING if self._activation_s else 1.0) * (took_s - self._activation_s)
        self._learn(replica.warmth)
        self.pump()

    def _learn(self, warmth: dict[str, Any]) -> None:
        """What the worker measured before it was ready, or what is remembered of others like it."""
        self.on_limit()
        curve, traits = self.queue.curve, f"{warmth.get('device', '')} {warmth.get('dtype', '')}".strip()
        if measured := warmth.get("curve"):
            curve.recall(Point(*point) for point in measured)
            self._pool.measuring = False
        elif traits != self.traits:
            curve.recall(self._curves.at(traits))
        self.traits = traits

    def on_limit(self) -> None:
        """A group may go to any worker: it is as large as fits into the memory of each of those that are there."""
        limits = [replica.limit for replica in self._pool.ready if replica.limit is not None]
        self.queue.limit = max(1, min([self.policy.batch, *limits]))

    def on_cost(self, invocation: Invocation, cost: float) -> None:
        self.queue.charge(invocation, cost)

    def on_call(self, invocations: list[Invocation]) -> None:
        """Their handler is called again, with fewer of them: each call has all of its time."""
        now_s, limit_s = time.monotonic(), self.policy.execution_timeout_s
        for invocation in invocations:
            if limit_s is not None and not invocation.ended:
                self._time_execution(invocation, now_s, limit_s)

    def on_ended(self, ended: GroupEnd) -> None:
        if ended.seconds > 0:
            now_s = time.monotonic()
            self.queue.ended(now_s, ended.size, ended.cost, ended.seconds)
            if self.policy.batch > 1:  # after this turn of the loop, all of the group have their answers
                self._loop.call_soon(self._note_way_back, now_s)

    def _note_way_back(self, ended_s: float) -> None:
        """What a deadline must leave: the loop's turn, in which a caller may be the last, and as much again on his side."""
        took_s = 2 * (time.monotonic() - ended_s)
        self.queue.margin_s += WAY_SMOOTHING * (took_s - self.queue.margin_s)

    def on_worker_died(self, unstarted: list[Invocation], started: list[Invocation], cause: str) -> None:
        """What it had not started waits again; what it had is run once more, or its caller is told."""
        repeated = [invocation for invocation in started if self._may_repeat(invocation, cause)]
        for invocation in [*repeated, *unstarted]:
            self.put_back(invocation)
        self.pump()

    def _may_repeat(self, invocation: Invocation, cause: str) -> bool:
        """What ran together with others is repeated, alone: it may have been any one of them that the worker died of,
        and whoever takes batches is called again with fewer when one fails.
        """
        if invocation.companions:
            invocation.company, invocation.companions = 1, 0
            invocation.attempt += 1
            return True
        harmless = self.policy.idempotent and invocation.stream is None
        if harmless and invocation.attempt < MAX_ATTEMPTS:
            invocation.attempt += 1
            return True
        remedy = "See `pilotflame logs` for its last words."
        if not harmless:
            remedy += " If running it twice is harmless, set idempotent = true in pilotflame.toml: then it is repeated."
        invocation.fail(
            WorkerDied(
                f"The worker that ran this invocation died of {cause} (attempt {invocation.attempt}).",
                remedy=remedy,
            )
        )
        return False


def _wait_until(invocation: Invocation, now_s: float) -> float:
    """When to look again at one that waits: at the end of the hold time, if that is to come, or at its deadline."""
    held = invocation.hold_until_s > now_s + 0.001
    return min(invocation.deadline_s, invocation.hold_until_s) if held else invocation.deadline_s
