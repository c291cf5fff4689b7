"""A node with the real reconciler and simulated processes: its functions are deployed, called, paused and deleted.

`SimulatedFunction` does what `functions/rollouts.py` does with revisions, without files.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from pilotflame.errors import PilotflameError, RevisionRetired
from pilotflame.runtime.calls.batching.latency_curve import Point
from pilotflame.runtime.calls.link.worker_spec import WorkerSpec
from pilotflame.runtime.calls.serving.invocation import Invocation
from pilotflame.runtime.calls.serving.latency_curve_store import LatencyCurveStore
from pilotflame.runtime.ground.billing.account import Account
from pilotflame.runtime.ground.billing.budget import BudgetSpec
from pilotflame.runtime.ground.billing.usage import Prices
from pilotflame.runtime.ground.settings.function_settings import FunctionSettings, Scale
from pilotflame.runtime.ground.settings.resources import Resources
from pilotflame.runtime.ground.telemetry.logs import LogChannel
from pilotflame.runtime.node.functions.live import ladder_spec_of, policy_of
from pilotflame.runtime.node.functions.revision_record import RevisionRecord
from pilotflame.runtime.node.launching.gpu_driver import GpuDriver, GpuUse
from pilotflame.runtime.node.reconciling import revision_workers
from pilotflame.runtime.node.reconciling.function import Function as Known
from pilotflame.runtime.node.reconciling.gpu_bookings import GpuBookings
from pilotflame.runtime.node.reconciling.node_parts import NodeParts
from pilotflame.runtime.node.reconciling.reconciler import Reconciler
from pilotflame.runtime.node.reconciling.revision_workers import Listeners, RevisionWorkers
from pilotflame.runtime.node.scaling.idle_distribution import SharedPrior
from pilotflame.runtime.node.scaling.placement import Gpu
from pilotflame.runtime.node.scaling.rung_figures import HoldingPrices
from simulated_processes import CallPlan, Nature, SimulatedLauncher, World
from simulated_time import SimulatedLoop

# The price of memory. At this price, a plan ends within minutes.
MEMORY_BYTE_S = 3e-13
# The time that calls may wait in the queue of a retired revision.
DRAIN_S = 30.0
# The longest time of the write between proof and go-live of a deploy, and of work in a thread.
STORED_S = THREAD_S = 0.05
KEPT_LINES = 500


class NoDriver(GpuDriver):
    """A driver without measurements. The node then relies on the workers' reports of their memory."""

    library = package = visible = cdi_kind = "simulated"

    def uses(self) -> list[GpuUse]:
        return []

    def held_by(self, pid: int) -> Mapping[str, int]:
        return {}

    def environment(self, ids: Sequence[str], memory_mb: int | None) -> dict[str, str]:
        return {}


class CurvesInMemory(LatencyCurveStore):
    def __init__(self) -> None:
        super().__init__(Path("/nonexistent/curves.json"))

    def write(self, device: str, points: Sequence[Point]) -> None:
        self._curves[device] = list(points)


@dataclass
class Setup:
    """One revision to deploy: its owner's settings, and the behaviour of its processes."""

    scale: dict[str, Any]
    nature: Nature
    owner: str = ""
    timeout_s: float = 600.0
    concurrency: int = 1
    batch: int = 1
    idempotent: bool = True
    gpus: int = 0
    gpu_mb: int = 0
    seconds_per_day: float | None = None
    price_waiting_s: float = 0.001


@dataclass
class SimulatedFunction:
    name: str
    function: Known
    live: RevisionWorkers | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    log: LogChannel = field(default_factory=LogChannel)
    deploys: list[asyncio.Task[None]] = field(default_factory=list)


class SimulatedNode:
    """The functions of a node, and the parts that they share."""

    def __init__(
        self, rng: random.Random, loop: SimulatedLoop, tasks: asyncio.TaskGroup, gpus: Sequence[Gpu], most: int | None,
        owners: dict[str, int | None], *, verbose: bool = False,
    ) -> None:  # fmt: skip
        self.loop, self.most, self.owners = loop, most, owners
        loop.set_exception_handler(lambda _loop, context: self._note_fault(context))
        self.lines: deque[str] = deque(maxlen=None if verbose else KEPT_LINES)
        self.verbose = verbose
        self.world = World(rng, self.tell)
        self.launcher = SimulatedLauncher(self.world)
        self.reconciler = Reconciler(GpuBookings(gpus, NoDriver()), most, owners.get, DRAIN_S)
        self.functions = dict[str, SimulatedFunction]()
        self.members = dict[str, RevisionWorkers]()
        """The revisions whose processes have not all ended, by key."""
        self.calls = 0
        """How many calls were accepted."""
        self.open_calls = dict[str, Invocation]()
        """The accepted calls that have not ended."""
        self._retires_until_s = dict[str, float]()
        self.on_created: Callable[[RevisionWorkers], None] = lambda _workers: None
        self.on_event: Callable[[], None] = lambda: None
        """Called after each event, and at the end of each call."""
        self.faults = list[str]()
        """The errors of callbacks."""
        self.closed = False
        """True once the history has ended."""
        self.tasks, self._shared, self._numbers = tasks, SharedPrior(), itertools.count(1)
        revision_workers._NUMBERS = itertools.count()

    def tell(self, text: str) -> None:
        line = f"{self.loop.time() - 1000:11.4f}  {text}"
        self.lines.append(line)
        if self.verbose:
            print(line)

    def _note_fault(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.faults.append(f"{context.get('message')}: {type(error).__name__}: {error}")
        self.tell(self.faults[-1])

    async def in_thread(self, what: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Stand in for `asyncio.to_thread`: wait for a random time, then call `what`."""
        await asyncio.sleep(self.world.draw((0.0, THREAD_S)))
        return what(*arguments, **named)

    # -- functions

    def function(self, name: str) -> SimulatedFunction:
        if (found := self.functions.get(name)) is None:
            account = Account(name, Prices())
            history = Known.new(name, account, self._shared, lambda: None)
            found = self.functions[name] = SimulatedFunction(name, history)
        return found

    def create(self, function: SimulatedFunction, setup: Setup) -> tuple[RevisionWorkers, RevisionRecord]:
        settings = FunctionSettings(
            name=function.name, scale=Scale(**setup.scale), timeout_s=setup.timeout_s, concurrency=setup.concurrency,
            idempotent=setup.idempotent,
        )  # fmt: skip
        facts = {"batch": setup.batch if setup.batch > 1 else None, "build_s": 0.1}
        record = cast(
            "RevisionRecord", SimpleNamespace(settings=settings, handler=facts, deployed_by=setup.owner)
        )
        resources = Resources(gpus=setup.gpus or None, gpu_memory_mb=setup.gpu_mb or None)
        revision = f"r{next(self._numbers)}-{function.name}"
        spec = WorkerSpec(
            function=function.name, revision=revision, code=Path("/nonexistent"), resources=resources
        )
        self.launcher.natures[revision] = setup.nature
        workers = RevisionWorkers(
            spec, policy_of(record), NodeParts(self.reconciler, self.launcher, cast("Any", None), self.tasks),
            function.log.of(revision), dict, CurvesInMemory(), function.function, Listeners(),
        )  # fmt: skip
        self.members[workers.key] = workers
        self.on_created(workers)
        return workers, record

    async def deploy(self, name: str, setup: Setup, *, check: bool) -> None:
        function = self.function(name)
        async with function.lock:
            workers, record = self.create(function, setup)
            self.tell(f"deploy of {workers.key}: {setup}")
            old = function.live
            try:
                await workers.carry_out.open()
                workers.revision.configure(policy_of(record))
                if check:
                    ready = len(old.replicas.ready) if old is not None else 0
                    await workers.prove(min(ready, record.settings.scale.max))
            except (PilotflameError, asyncio.CancelledError) as error:
                if self.closed:
                    raise
                self.tell(f"deploy of {workers.key} fails: {type(error).__name__} {error}")
                await asyncio.shield(self.tasks.create_task(self._retire(workers, 0.0)))
                return
            # As in the registry, the deploy still goes live if it is cancelled from now on.
            await asyncio.shield(self.tasks.create_task(self._go_live(function, workers, record, setup)))

    async def _go_live(
        self, function: SimulatedFunction, workers: RevisionWorkers, record: RevisionRecord, setup: Setup
    ) -> None:
        old = function.live
        await asyncio.sleep(self.world.draw((0.0, STORED_S)))
        self.tell(f"{workers.key} is live")
        function.live = workers
        history = function.function
        history.account.open(BudgetSpec(seconds_per_day=setup.seconds_per_day), setup.owner)
        prices = HoldingPrices(memory_byte_s=MEMORY_BYTE_S, waiting_s=setup.price_waiting_s)
        history.ladder.adopt(workers, ladder_spec_of(record, prices), 0.1, self.tasks)
        workers.go_live()
        if old is not None:
            self.tasks.create_task(self._retire(old))

    async def delete(self, name: str) -> None:
        function = self.function(name)
        async with function.lock:
            if (live := function.live) is None:
                return
            self.tell(f"delete {live.key}")
            function.live = None
            await self._retire(live)
            function.function.account.note_removed()
            if function.live is None:
                function.function = Known.new(name, function.function.account, self._shared, lambda: None)

    async def _retire(self, workers: RevisionWorkers, timeout_s: float | None = None) -> None:
        self.tell(f"{workers.key} retires")
        self._retires_until_s[workers.key] = math.inf if timeout_s is None else self.loop.time() + timeout_s
        await workers.retire(timeout_s)
        self.tell(f"{workers.key} has ended")
        self.members.pop(workers.key, None)

    # -- calls

    def call(self, name: str, plan: CallPlan, *, leaves_s: float = math.inf, job: bool = False) -> None:
        """Send a call whose caller leaves after `leaves_s`."""
        function = self.function(name)
        if (live := function.live) is None:
            return
        now_s, number = self.loop.time(), len(self.world.plans)
        timeout_s = live.revision.policy.settings.timeout_s
        deadline_s = now_s + timeout_s
        invocation = Invocation(
            f"c{number}", b"1", now_s=now_s, deadline_s=deadline_s, hold_until_s=deadline_s,
            execution_s=timeout_s if job else None,
        )  # fmt: skip
        self.world.plans[invocation.id] = plan
        try:
            live.revision.submit(invocation)
        except PilotflameError as error:
            self.tell(f"{live.key} refuses {invocation.id}: {type(error).__name__}")
            return
        self.tell(f"{live.key} accepts {invocation.id} ({plan.takes_s:.2f} s)")
        self.calls += 1
        self.open_calls[invocation.id] = invocation
        invocation.output.add_done_callback(lambda output: self._note_end(live, invocation, output))
        if leaves_s < math.inf:
            self.loop.call_later(leaves_s, self._leave, live, invocation)

    def _leave(self, live: RevisionWorkers, invocation: Invocation) -> None:
        if not invocation.ended:
            self.tell(f"the caller of {invocation.id} leaves")
            live.revision.cancel(invocation)

    def _note_end(self, live: RevisionWorkers, invocation: Invocation, output: asyncio.Future[Any]) -> None:
        del self.open_calls[invocation.id]
        self.on_event()
        error = None if output.cancelled() else output.exception()
        if isinstance(error, RevisionRetired) and self.loop.time() < self._retires_until_s[live.key]:
            self.faults.append(f"{live.key}: {invocation.id} fails although its revision has time to run it")
        self.tell(f"{live.key} has ended {invocation.id} {type(error).__name__ if error is not None else ''}")
