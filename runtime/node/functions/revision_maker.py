"""Makes the live part of a stored revision: the description of its workers, its curves, and the listeners to its events."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path

from ....errors import PilotflameError
from ....handlers.recognise import Dialects
from ...calls.batching.queue import MAX_WAITING_BYTES
from ...calls.link.worker_spec import WorkerSpec
from ...calls.serving.latency_curve_store import LatencyCurveStore
from ...calls.serving.revision import FAILURES
from ...ground.access.deploy_policy import DeployPolicies
from ...ground.access.fair_share import SharedRoom
from ...ground.access.fair_threads import FairThreads
from ...ground.access.secrets import Secrets
from ...ground.telemetry.background import BackgroundTasks
from ...ground.telemetry.invocation_end import InvocationEnd
from ...ground.telemetry.logs import LogChannel
from ..launching.fetcher_client import FetcherClient
from ..launching.launcher import Launcher
from ..reconciling.function import Function
from ..reconciling.function_histories import FunctionHistories
from ..reconciling.node_parts import NodeParts
from ..reconciling.reconciler import Reconciler
from ..reconciling.revision_workers import Listeners, RevisionWorkers
from .deploy import requirements_of, worker_spec
from .environment_launcher import EnvironmentLauncher
from .function_events import FunctionEvents
from .live import Live, policy_of
from .store import RevisionRecord, Store


@dataclass
class RevisionMaker:
    """The parts of a node that revisions are made with."""

    store: Store
    environments: Path
    launcher: Launcher
    weights: FetcherClient
    secrets: Secrets
    dialects: Dialects
    policies: DeployPolicies
    histories: FunctionHistories
    reconciler: Reconciler
    tasks: BackgroundTasks
    events: FunctionEvents
    threads: FairThreads
    waiting: SharedRoom = field(default_factory=lambda: SharedRoom(MAX_WAITING_BYTES), init=False)
    """The bodies that wait in the queues of all functions."""
    call_observers: list[str] = field(default_factory=list, init=False)
    """Names the `CallObserver`s of workers, as `WorkerSpec.observers` does."""

    async def make(self, record: RevisionRecord, logs: LogChannel, *, barred: str = "") -> Live:
        """Return a revision without processes. `barred` says why a policy does not allow its function to run."""
        spec = await self._spec(record)
        curves = await self.threads.run(functools.partial(self._curves, record, spec))
        if spec.remote and not barred:
            self.tasks.create_task(self.weights.warm(spec, self.secrets.of(record.function)))
        function = await self.histories.of(record.function)
        if barred:
            function.barred = barred
            logs.write("gateway", barred, "error")
        launcher = EnvironmentLauncher(
            self.launcher, self.environments, functools.partial(requirements_of, dialects=self.dialects),
            self.threads.run,
        )  # fmt: skip
        workers = RevisionWorkers(
            spec, policy_of(record), NodeParts(self.reconciler, launcher, self.weights, self.tasks, self.waiting),
            logs.of(record.revision), functools.partial(self._secrets_of, function), curves, function,
            self._listeners(function, logs),
        )  # fmt: skip
        return Live(record, workers, logs)

    def _secrets_of(self, function: Function) -> dict[str, str]:
        return self.secrets.of(function.name) if function.secrets is None else function.secrets

    async def _spec(self, record: RevisionRecord) -> WorkerSpec:
        # It reads files.
        spec = await self.threads.run(
            functools.partial(
                worker_spec, self.store, record, self.weights.cache, self.dialects, self.policies
            )
        )
        if seen := self.reconciler.gpus.hardware.environment(spec.resources, contained=bool(spec.image)):
            spec = spec.model_copy(update={"env": {**spec.env, **seen}})
        if self.call_observers:
            spec = spec.model_copy(update={"observers": tuple(self.call_observers)})
        return spec

    def _curves(self, record: RevisionRecord, spec: WorkerSpec) -> LatencyCurveStore:
        """Open the measured latency curves of revisions with the same `key` and the same weights.

        So the key holds everything except the weights that affects the speed of a revision's workers.
        """
        settings = f"{record.settings.concurrency} {record.settings.threads}"
        key = f"{record.code_digest} {record.requirements_digest} {settings}"
        manifests = [weights.manifest for weights in spec.weights]
        return LatencyCurveStore.open(self.store.curves, key, *manifests)

    def _listeners(self, function: Function, logs: LogChannel) -> Listeners:
        """Return the listeners that pass the events of a revision on to all subscribers of `events`."""
        name, events = function.name, self.events

        def called(at_s: float) -> None:
            for callback in events.called:
                callback(name, at_s)

        def activated(outcome: str) -> None:
            for callback in events.activated:
                callback(name, outcome)

        def processes_changed() -> None:
            for callback in events.processes:
                callback(name)

        ended = functools.partial(self._note_end, function, logs)
        return Listeners(activated, called, ended, events.begun, processes_changed)

    def _note_end(self, function: Function, logs: LogChannel, end: InvocationEnd) -> None:
        """Report the end of an invocation to the function and to all callbacks of `events.ended`."""
        if end.timeline.activation is not None:
            function.note_cold(end)
        if end.error is not None:
            _log_error(logs, end, end.error)
        for callback in self.events.ended:
            callback(end)


def _log_error(logs: LogChannel, end: InvocationEnd, error: PilotflameError) -> None:
    """Log an error of an invocation that was sent to a worker. The failure of a handler is already in the log."""
    if end.timeline.sent_s and error.status >= 500 and not isinstance(error, FAILURES):
        text = f"{error.code}: {error.message}"
        logs.write("gateway", text, "error", request_id=end.request_id, revision=end.revision)
