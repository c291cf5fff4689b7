"""Time limits of the dispatcher and its replicas: random calls on scripted workers, in simulated time.

Callers have deadlines and leave, handler calls hang or take longer than the function allows. The workers behave as
the real ones: they start groups in order, send answers before they start the next group, and return the waiting
groups when they drain.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import orjson
from hypothesis import example, given
from pilotflame.errors import Cancelled, DeadlineExceeded, Overloaded, PilotflameError
from pilotflame.runtime.calls.batching.outstanding import BatchEnd
from pilotflame.runtime.calls.batching.queue import MAX_WAITING_BYTES
from pilotflame.runtime.calls.link.child import EndCause
from pilotflame.runtime.calls.link.frames import Frame, FrameKind, Timing
from pilotflame.runtime.calls.link.worker_spec import WorkerSpec
from pilotflame.runtime.calls.serving.dispatcher import Dispatcher, Policy
from pilotflame.runtime.calls.serving.invocation import Invocation, Output
from pilotflame.runtime.calls.serving.latency_curve_store import LatencyCurveStore
from pilotflame.runtime.calls.serving.replica import Replica, ReplicaState
from pilotflame.runtime.calls.serving.replicas import ReplicaList
from pilotflame.runtime.calls.serving.time_limits import CANCEL_GRACE_S as GRACE_S
from pilotflame.runtime.ground.access.fair_share import SharedRoom
from pilotflame.runtime.ground.settings.function_settings import FunctionSettings
from pilotflame.runtime.ground.settings.scale_spec import ScaleSpec
from pilotflame.runtime.ground.telemetry.timeline import Activation, WorkerTiming
from simulated_time import run_simulated

LIMIT_S = 10.0
# By how much a timer may be early or late.
TOLERANCE_S = 0.01


@dataclass
class Plan:
    """One call: when it arrives, how long its handler call takes, its caller's timeout, and when the caller leaves."""

    at_s: float
    takes_s: float
    timeout_s: float
    leaves_s: float = math.inf
    heeds: bool = False
    """True if the handler ends at once when it is cancelled."""


class Worker:
    """A simulated worker. It replaces both the child process and the link of a replica."""

    output = None
    pid = 1

    def __init__(self, name: str, slots: int, window: int, batching: bool, plans: dict[str, Plan]) -> None:
        self.name, self.link, self.closed, self.plans = name, self, False, plans
        self.running: dict[int, tuple[float, list[tuple[int, Plan]], asyncio.TimerHandle | None]] = {}
        self.killed_after_s: list[float] = []
        self._slots, self._window, self._batching = slots, window, batching
        self._queue: deque[list[tuple[int, Plan]]] = deque()
        self._group: list[tuple[int, Plan]] = []
        self._cancelled: set[int] = set()
        self._draining = False
        self._loop = asyncio.get_running_loop()

    # -- the child

    def kill_stuck(self, reason: str) -> None:
        now_s = self._loop.time()
        self.killed_after_s += [now_s - started_s for started_s, _, _ in self.running.values()]
        self.kill()

    def kill_after(self, timeout_s: float) -> None:
        assert not self.running, "a worker with calls has a time limit to exit"

    def kill(self) -> None:
        if not self.closed:
            self.closed = True
            for _, _, timer in self.running.values():
                if timer is not None:
                    timer.cancel()
            self.running.clear()
            self._loop.call_soon(self._on_close)

    # -- the link

    def bind(self, on_frame: Callable[[Frame], None], on_close: Callable[[], None]) -> None:
        self._on_frame, self._on_close = on_frame, on_close

    def send(self, kind: int, channel: int = 0) -> None:
        if kind == FrameKind.CANCEL:
            self._cancelled.add(channel)
            group = next((key for key, (_, calls, _) in self.running.items() if channel in dict(calls)), None)
            if group is not None and all(
                one in self._cancelled and plan.heeds for one, plan in self.running[group][1]
            ):
                self._loop.call_soon(self._end, group)
        elif kind == FrameKind.DRAIN and not self._draining:
            self._draining = True
            for channel, _ in [call for group in self._queue for call in group]:
                self._answer(channel, FrameKind.RETURNED)
            self._queue.clear()
            self._leave()

    def send_json(self, kind: int, channel: int, head: dict[str, Any], body: bytes = b"") -> None:
        if kind == FrameKind.ACTIVATE:
            ready = {"window": self._window, "slots": self._slots, "batching": self._batching}
            self._answer(0, FrameKind.READY, orjson.dumps(ready))
        elif kind == FrameKind.INVOKE:
            if self._draining:
                self._answer(channel, FrameKind.RETURNED)
                return
            self._group.append((channel, self.plans[head["id"]]))
            if not head.get("more"):
                self._queue.append(self._group)
                self._group = []
                self._start()

    def flush(self) -> None:
        pass

    def _answer(self, channel: int, kind: int, head: bytes = b"") -> None:
        self._loop.call_soon(lambda: self.closed or self._on_frame(Frame(kind, channel, head, b"1")))

    def _start(self) -> None:
        while self._queue and len(self.running) < self._slots:
            group = self._queue.popleft()
            takes_s = max(plan.takes_s for _, plan in group)
            timer = None if takes_s == math.inf else self._loop.call_later(takes_s, self._end, group[0][0])
            self.running[group[0][0]] = (self._loop.time(), group, timer)

    def _end(self, key: int) -> None:
        if key not in self.running:
            return
        started_s, group, timer = self.running.pop(key)
        if timer is not None:
            timer.cancel()
        took_s = self._loop.time() - started_s
        for channel, plan in group:
            if channel in self._cancelled and plan.heeds:
                error = Cancelled("The caller went away.").to_wire(private=True)
                self._answer(channel, FrameKind.ERROR, orjson.dumps(error))
            else:
                self._answer(channel, FrameKind.RESULT, Timing(0.0, took_s, len(group), 1.0).pack())
        self._loop.call_soon(self._start)
        self._loop.call_soon(self._leave)

    def _leave(self) -> None:
        if self._draining and not self.running and not self._queue:
            self.kill()


class Revision:
    """Replaces the pool and the revision of a dispatcher. At most one worker at a time is sent invocations."""

    def __init__(self, make: Callable[[str], Worker], policy: Policy) -> None:
        self.replicas = ReplicaList()
        self.workers: list[Worker] = []
        self._make = make
        spec = WorkerSpec(function="f", revision="r1-1", code=Path("/"))
        curves = LatencyCurveStore(Path("/nonexistent"))
        room = SharedRoom(MAX_WAITING_BYTES)
        self.dispatcher = Dispatcher(
            spec, policy, self.replicas, curves, self.scale, lambda _end: None, room
        )  # fmt: skip

    def explain(self, error: PilotflameError) -> PilotflameError:
        return error

    def scale(self) -> None:
        """Start a worker if there is none."""
        states = (ReplicaState.READY, ReplicaState.RESTORING)
        if not any(replica.state in states for replica in self.replicas):
            self.workers.append(self._make(f"w{len(self.workers)}"))
            activation = Activation(time.monotonic())
            limit: Any = SimpleNamespace(end=lambda: None)
            made = Replica(self.workers[-1], activation, self, self, {}, limit, measure=False, weights_s=None)  # type: ignore[arg-type]
            self.replicas.add(made)

    def on_ready(self, replica: Replica) -> None:
        self.dispatcher.dispatch()

    def on_end(
        self, replica: Replica, invocation: Invocation, outcome: Output | PilotflameError,
        timing: WorkerTiming, now_s: float, batch: BatchEnd | None,
    ) -> None:  # fmt: skip
        self.dispatcher.complete(replica, invocation, outcome, timing, now_s, batch)
        self.dispatcher.dispatch()

    def on_returned(self, invocation: Invocation) -> None:
        self.dispatcher.requeue(invocation)
        self.dispatcher.dispatch()
        self.scale()

    def on_split(self, invocations: list[Invocation]) -> None:
        self.dispatcher.limits.restart(invocations)

    def on_start_failed(self, error: PilotflameError, worker: str = "") -> None: ...
    def on_resized(self, replica: Replica) -> None: ...
    def on_leaving(self, replica: Replica) -> None: ...
    def on_parked(self, replica: Replica, freed_bytes: int, reserved: list[int]) -> None: ...

    def on_lost(self, replica: Replica, unstarted: list[Invocation], started: list[Invocation]) -> None:
        self.replicas.remove(replica)
        self.dispatcher.recover(unstarted, started, EndCause("signal 9"))
        self.scale()


@dataclass
class Outcome:
    """What became of one call."""

    plan: Plan
    result: Output | BaseException | None
    ended_s: float
    batched: bool = False


@dataclass
class Run:
    outcomes: list[Outcome] = field(default_factory=list)
    workers: list[Worker] = field(default_factory=list)
    timers: int = 0


async def run(plans: list[Plan], slots: int, ahead: int, max_batch: int, limit_s: float | None) -> Run:
    started_s = time.monotonic()
    limits = {"timeout_s": LIMIT_S, "execution_timeout_s": limit_s}
    named = {f"i{number}": plan for number, plan in enumerate(plans)}
    settings = FunctionSettings(name="f", **limits)  # type: ignore[arg-type]
    policy = Policy(settings, ScaleSpec(concurrency=slots * max_batch), max_batch=max_batch)
    revision = Revision(lambda name: Worker(name, slots, slots + ahead, max_batch > 1, named), policy)
    revision.scale()

    async def call(name: str, plan: Plan) -> Outcome:
        await asyncio.sleep(plan.at_s)
        now_s = time.monotonic()
        deadline_s = now_s + plan.timeout_s
        invocation = Invocation(name, b"1", now_s=now_s, deadline_s=deadline_s, hold_until_s=deadline_s)
        try:
            revision.dispatcher.submit(invocation)
            async with asyncio.timeout(plan.leaves_s):
                result: Output | BaseException | None = await asyncio.shield(invocation.output)
        except TimeoutError:
            revision.dispatcher.cancel(invocation)
            result = None
        except PilotflameError as error:
            result = error
        return Outcome(plan, result, time.monotonic() - now_s, invocation.attempt > 1)

    outcomes = await asyncio.gather(*(call(name, plan) for name, plan in named.items()))
    last_s = max(plan.at_s for plan in plans) + 3 * len(plans) * (LIMIT_S + GRACE_S)
    await asyncio.sleep(max(0.0, started_s + last_s - time.monotonic()))
    assert not any(worker.running for worker in revision.workers), "a stuck call stays at a worker"
    return Run(list(outcomes), revision.workers, len(revision.dispatcher._deadlines._timers))


def simulated(*arguments: Any) -> Run:
    return run_simulated(run(*arguments))


times = st.integers(1, 40).map(lambda tenths: tenths / 4)
plans = st.builds(
    Plan,
    at_s=st.integers(0, 20).map(lambda tenths: tenths / 4),
    takes_s=times | st.sampled_from([0.0, LIMIT_S + GRACE_S / 2, LIMIT_S + 2 * GRACE_S, math.inf]),
    timeout_s=times.filter(lambda timeout_s: timeout_s <= LIMIT_S),
    leaves_s=st.just(math.inf) | times,
    heeds=st.booleans(),
)


@given(
    st.lists(plans, min_size=1, max_size=12), st.integers(1, 4), st.integers(0, 2), st.sampled_from([1, 3]),
    st.sampled_from([None, 3.0]),
)  # fmt: skip
@example([Plan(0.0, 9.0, 1.0), Plan(0.0, 9.5, 10.0)], 4, 0, 1, None)
@example([Plan(0.0, math.inf, 1.0), Plan(0.5, 9.5, 10.0)], 4, 0, 1, None)
@example([Plan(0.0, 2.0, 10.0), Plan(0.0, 2.0, 10.0)], 1, 1, 1, 3.0)
def test_a_limit_ends_what_it_limits_and_nothing_else(
    calls: list[Plan], slots: int, ahead: int, max_batch: int, limit_s: float | None
) -> None:
    found = simulated(calls, slots, ahead, max_batch, limit_s)
    for outcome in found.outcomes:
        plan, result = outcome.plan, outcome.result
        assert outcome.ended_s <= min(plan.timeout_s, plan.leaves_s) + TOLERANCE_S
        assert result is None or isinstance(result, (Output, DeadlineExceeded, Overloaded)), (plan, result)
        if isinstance(result, DeadlineExceeded):
            # A call ends with DeadlineExceeded only because of its own deadline or the time of its own handler call.
            late = outcome.ended_s >= plan.timeout_s - TOLERANCE_S
            assert late or (limit_s is not None and plan.takes_s >= limit_s), (plan, result.message)
    for worker in found.workers:
        # A worker is killed only when all its running calls have taken longer than the function allows.
        most_s = (limit_s or LIMIT_S) + (0.0 if max_batch > 1 and limit_s else GRACE_S)
        assert all(ran_s >= most_s - TOLERANCE_S for ran_s in worker.killed_after_s)
    assert found.timers == 0
