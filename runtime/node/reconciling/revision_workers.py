"""The life of one revision: it is deployed and proven, goes live, is warmed, and retires.

The observations of the revision are in observed.py, and its steps in carry_out.py. The reconciler (reconciler.py) decides
when to observe the revision and when to take steps.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ....errors import ActivationTimeout
from ...calls.link.worker_spec import WorkerSpec
from ...calls.serving.call_ends import activation_timeout, retired
from ...calls.serving.dispatcher import Policy
from ...calls.serving.invocation import Invocation
from ...calls.serving.latency_curve_store import LatencyCurveStore
from ...calls.serving.replicas import ReplicaList
from ...calls.serving.revision import Revision
from ...calls.serving.start_limit import MOST_TIMES
from ...ground.settings.scale_spec import ReachedLimit
from ...ground.telemetry.invocation_end import InvocationEnd
from ...ground.telemetry.logs import RevisionLog
from ...ground.telemetry.metrics import WorkerCounts
from ...ground.telemetry.rung_name import RungName
from ..scaling.placement import GpuNeed, need_of
from ..scaling.revision_state import Phase
from ..scaling.warm_requests import WarmRequest
from .bar import Bar
from .carry_out import CarryOut
from .drain import Drain
from .function import Function
from .inventory import Inventory
from .node_parts import NodeParts
from .observed import CallReports, ObservedRevision
from .pool import STOP_TIMEOUT_S, Pool
from .prewarms import WARM_S
from .process_events import ProcessEvents
from .start_outcomes import StartOutcomes

# Workers for expected invocations (`RevisionWorkers.expect`) are kept for this time.
EXPECTED_S = 10.0
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
        self.spec, self.function, self.node, self.logs = spec, function, node, logs
        self.phase, self.rollover = Phase.NEW, 0
        # A number makes the key unique: while the processes of a revision are replaced, the reconciler has two members for it.
        self.key = f"{spec.function}/{next(_NUMBERS)}"
        self.replicas, self.starts, self.drain = ReplicaList(), StartOutcomes(), Drain()
        self.breaker = self.starts.breaker
        self.revision = Revision(
            spec, policy, self.replicas, CallReports(self), curves, logs, function.load, function.arrivals, listeners.called,
            listeners.ended, listeners.begun, node.waiting,
        )  # fmt: skip
        self.events = ProcessEvents(self, listeners.activated, listeners.processes)
        self.pool = Pool(
            spec, policy.settings.scale, self.replicas, node.launcher, logs, node.tasks, self.revision, self.events,
            node.weights, secrets, not curves.known, node.gpus, self, function.worker_numbers,
        )  # fmt: skip
        self.gpu_need: GpuNeed | None = need_of(spec.resources)
        """The GPUs that each worker needs."""
        self.inventory, self.bar, self.carry_out = Inventory(self), Bar(self), CarryOut(self)
        self.observed = ObservedRevision(self, self.events, self.inventory, self.bar)
        node.limits.join(self)
        function.account.attach(self.bar)
        self.bar.update()

    # -- what others ask about it

    @property
    def owner(self) -> str:
        """The owner of the key that deployed it. All functions of an owner share a limit of workers."""
        return self.revision.policy.owner

    @property
    def rung(self) -> RungName:
        return self.inventory.rung

    @property
    def slow(self) -> tuple[int, int]:
        return self.revision.slow

    @property
    def warm_until_s(self) -> float | None:
        """The end of the time for which a signal holds workers; None without such a signal."""
        now_s = time.monotonic()
        if self.phase is Phase.RETIRING or self.breaker.backoff_until_s > now_s:
            return None
        asked = self.function.prewarms.requests.at(now_s)
        return asked.until_s if asked is not None else None

    @property
    def reached(self) -> ReachedLimit | None:
        """The limit that keeps wanted workers from starting, or None."""
        return self.node.limits.reached(self)

    def worker_counts(self) -> WorkerCounts:
        return self.inventory.worker_counts()

    # -- its looks

    def look(self) -> None:
        self.node.reconciler.look(self)

    def settle(self, now_s: float) -> None:
        """At the end of a look, record the load, the prewarmed workers that were used, and the end of the drain."""
        self.function.prewarms.settle()
        self.observed.note_load(now_s)
        if self.phase is Phase.RETIRING and not self.observed.unfinished:
            self.drain.note_empty()

    def note_limit(self, reached: ReachedLimit | None, missing: int) -> None:
        if reached is not None:
            self.carry_out.note_refused(reached.name, reached.most, missing, self.observed.seen)
        self.revision.dispatcher.limits.reached = reached

    def renew_standby(self) -> bool:
        return self.carry_out.renew_standby()

    # -- who wants workers

    def warm(self, workers: int, cause: str = "warmup", for_s: float = WARM_S) -> None:
        """Have this number of workers before they are needed, and keep them for `for_s` seconds.

        `cause` is the signal that asks for the workers. The first word of `cause` is the kind of signal.
        """
        self.function.prewarms.requests.add(WarmRequest(workers, time.monotonic() + for_s, cause))
        self.look()

    def end_warm_ups(self) -> None:
        """Keep no workers for a signal any more. Workers without calls may end now."""
        self.function.prewarms.requests.clear()
        self.look()

    def expect(self, invocations: int, cause: str) -> None:
        """Start the workers that `invocations` invocations need. The invocations run already, or are about to come."""
        workers = self.observed.ahead(invocations)
        if workers > len(self.replicas.ready) + self.replicas.starting:
            self.warm(workers, cause, EXPECTED_S)

    async def wait_ready(self, workers: int, timeout_s: float) -> None:
        """Wait until `workers` workers are ready. Raise ActivationTimeout, the error of a failed start, or an error
        that says why no worker may start.
        """
        if self.phase is Phase.RETIRING:
            raise retired(self.spec)
        if len(self.replicas.ready) >= workers:
            return
        if (error := self.bar.crash_loop()) is not None:
            raise error
        try:
            await self.starts.reached(workers, timeout_s)
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

    async def prove(self, rollover: int = 0) -> None:
        """Start a worker, to show that workers of this revision start. Raise the error of a start that fails.

        At the same time, start further workers, up to `rollover` in all, as far as the limits allow. They stay when the
        revision goes live.
        """
        self.phase, self.rollover = Phase.PROVING, rollover
        self.look()
        self.function.account.check()
        await self._wait_first()
        if self.replicas.starting:
            # The first worker has shown that the revision works. If another start fails, for example for lack of
            # memory, or takes too long, the revision is not the cause.
            with contextlib.suppress(TimeoutError):
                await self.starts.reached(rollover, self.spec.start_timeout_s, settled=True)
        self.phase = Phase.PROVEN
        self.look()

    async def _wait_first(self) -> None:
        """Wait until a worker is ready. If `start_timeout_s` ends while a worker is starting, wait again.

        `StartLimit` ends that start before the last of these waits ends.
        """
        for left in reversed(range(MOST_TIMES + 1)):
            try:
                await self.wait_ready(1, self.spec.start_timeout_s)
                break
            except ActivationTimeout:
                if not (left and self.replicas.starting):
                    raise

    def go_live(self) -> None:
        """Follow the load from now on: this revision has replaced the previous live revision."""
        self.observed.demand.note_need(self.rollover, time.monotonic())
        self.phase, self.rollover = Phase.LIVE, 0
        self.look()

    async def retire(self, timeout_s: float | None = None) -> None:
        """Run the accepted invocations to their deadlines, and end the processes.

        Fail the invocations that have not ended in time, if there is a `timeout_s` or the gateway ends (see `Drain`).
        """
        self.phase = Phase.RETIRING
        if timeout_s is not None:
            self.drain.limit(timeout_s)
        self.revision.retire()
        self.starts.refuse(retired(self.spec))
        self.function.ladder.release(self)
        self.look()
        await self.drain.wait()
        # From now on, fail the invocations that exiting workers give back, because no worker would run them.
        self.revision.dispatcher.close(self.drain.end)
        self.node.limits.leave(self)
        try:
            await self.carry_out.close(self.drain)
            await self.events.wait_told(STOP_TIMEOUT_S)
        finally:
            self.node.limits.forget(self)
            self.function.account.detach(self.bar)
