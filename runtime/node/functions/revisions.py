"""Makes the `Live` objects of stored revisions, with the spec of their workers, their latency curves, and the listeners to their events."""

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
from ...ground.access.fair_share import SharedRoom
from ...ground.access.fair_threads import FairThreads
from ...ground.telemetry.invocation_end import InvocationEnd
from ...ground.telemetry.logs import LogChannel
from ..launching.fetcher_client import FetcherClient
from ..launching.launcher import Launcher
from ..packaging.snapshots import check_signatures
from ..reconciling.function import Function
from ..reconciling.function_histories import FunctionHistories
from ..reconciling.node_parts import NodeParts
from ..reconciling.reconciler import Reconciler
from ..reconciling.revision_workers import Listeners, RevisionWorkers
from .deploy import requirements_of, worker_spec
from .environment_launcher import EnvironmentLauncher
from .live import Live, policy_of
from .registry import Functions
from .revision_record import RevisionRecord
from .status import Prefetched

DEPLOY_THREADS = 4
"""The number of deploys that may work on files at the same time. Such work may take minutes, for example the installation of requirements.
"""


@dataclass(eq=False)
class Revisions:
    """All revisions of a node that may have processes, and the parts of the node that they use."""

    functions: Functions
    environments: Path
    launcher: Launcher
    weights: FetcherClient
    histories: FunctionHistories
    reconciler: Reconciler
    dialects: Dialects
    threads: FairThreads = field(default_factory=lambda: FairThreads(DEPLOY_THREADS, "deploy"), init=False)
    """The threads in which deploys work on files."""
    waiting: SharedRoom = field(default_factory=lambda: SharedRoom(MAX_WAITING_BYTES), init=False)
    """Limits the bytes of the bodies that wait in the queues of all functions, for each owner."""
    call_observers: list[str] = field(default_factory=list, init=False)
    """The functions of plugins ("package.module:name") that return the `CallObserver`s of all revisions made from now on."""
    running: set[Live] = field(default_factory=set, init=False)
    """All revisions that may have processes: live revisions, revisions that a deploy checks, retiring revisions."""

    async def make(self, record: RevisionRecord, *, barred: str = "") -> Live:
        """Return a revision without processes. `barred` says why the function may not run; "" if it may."""
        functions, logs = self.functions, self.functions.logs.of_function(record.function)
        spec = await self._spec(record)
        curves = await self.threads.run(functools.partial(self._curves, record, spec))
        if spec.remote and not barred:
            functions.tasks.create_task(self.weights.warm(spec, functions.secrets.of(record.function)))
        function = await self.histories.of(record.function)
        if barred:
            function.barred = barred
            logs.write("gateway", barred, "error")
        launcher = EnvironmentLauncher(
            self.launcher, self.environments, functools.partial(requirements_of, dialects=self.dialects),
            self.threads.run,
        )  # fmt: skip
        workers = RevisionWorkers(
            spec, policy_of(record),
            NodeParts(self.reconciler, launcher, self.weights, functions.tasks, self.waiting),
            logs.of(record.revision), functools.partial(self._secrets_of, function), curves, function,
            self._listeners(function, logs),
        )  # fmt: skip
        shared = functions.shared
        told = functools.partial(shared.warnings, function.name) if shared is not None else list[str]
        live = Live(record, workers, logs, told)
        self.running.add(live)
        return live

    async def check_signatures(self, record: RevisionRecord, *, read: bool = True) -> bool:
        """Raise SnapshotError if a snapshot of the revision lacks a required signature, or if its weights differ from the signed ones.

        Without `read`, return False if weights have to be read. Raise GatewayError if the gateway shuts down meanwhile.
        """
        if not (signers := self.functions.policies.snapshot_signers):
            return True
        code, stored = self.functions.store.code(record), record.snapshots.items()
        places = {name: at.url or code / (at.root or "") for name, at in stored}
        progress = (lambda _done, _total: self.functions.check_open()) if read else None
        check = functools.partial(check_signatures, code.parent, places, signers, progress)
        return await self.threads.run(check)

    async def end(self, live: Live, timeout_s: float | None = None) -> None:
        """End the processes of a revision, after its invocations have finished or `timeout_s` is over."""
        try:
            await live.workers.retire(timeout_s)
        finally:
            self.running.discard(live)

    async def prefetch(self, name: str) -> Prefetched:
        """Bring the image and the weights of a function to this node, so that its next cold start needs no network.

        Raise the errors of `Functions.get`, LauncherError, SourceError, CacheError or SnapshotError.
        """
        live = self.functions.get(name)
        if live.function.barred and (error := live.function.refusal()) is not None:
            raise error
        spec, image = live.revision.spec, None
        if spec.image:
            image = "pulled" if await self.launcher.provide(spec) else "present"
        fetched_bytes = await self.weights.prefetch(spec, self.functions.secrets.of(name))
        urls = {weights.name: weights.source for weights in spec.remote}
        return Prefetched(
            function=name, image=image, snapshot=urls.pop("", None), snapshots=urls, fetched_bytes=fetched_bytes
        )  # fmt: skip

    def _secrets_of(self, function: Function) -> dict[str, str]:
        return self.functions.secrets.of(function.name) if function.secrets is None else function.secrets

    async def _spec(self, record: RevisionRecord) -> WorkerSpec:
        # Make the spec in a thread, because this reads files.
        store, policies = self.functions.store, self.functions.policies
        made = functools.partial(worker_spec, store, record, self.weights.cache, self.dialects, policies)
        spec = await self.threads.run(made)
        if seen := self.reconciler.gpus.hardware.environment(spec.resources, contained=bool(spec.image)):
            spec = spec.model_copy(update={"env": {**spec.env, **seen}})
        if self.call_observers:
            spec = spec.model_copy(update={"observers": tuple(self.call_observers)})
        return spec

    def _curves(self, record: RevisionRecord, spec: WorkerSpec) -> LatencyCurveStore:
        """Open the measured latency curves of the revision. Revisions with the same `key` and the same weights share
        them.

        So the key must contain everything that affects the speed of a revision's workers, except the weights.
        """
        settings = f"{record.settings.concurrency} {record.settings.threads}"
        key = f"{record.code_digest} {record.requirements_digest} {settings}"
        manifests = [weights.manifest for weights in spec.weights]
        return LatencyCurveStore.open(self.functions.store.curves, key, *manifests)

    def _listeners(self, function: Function, logs: LogChannel) -> Listeners:
        """Return the listeners that report the events of a revision to all subscribers of `Functions.events`."""
        name, events = function.name, self.functions.events
        return Listeners(
            functools.partial(events.activated, name), functools.partial(events.called, name),
            functools.partial(self._note_end, function, logs), events.begun, functools.partial(events.processes, name),
        )  # fmt: skip

    def _note_end(self, function: Function, logs: LogChannel, end: InvocationEnd) -> None:
        """Report the end of an invocation to the function and to all callbacks of `events.ended`."""
        if end.timeline.activation is not None:
            function.note_cold(end)
        if end.error is not None:
            _log_error(logs, end, end.error)
        self.functions.events.ended(end)


def _log_error(logs: LogChannel, end: InvocationEnd, error: PilotflameError) -> None:
    """Log an error of an invocation that was sent to a worker. Leave out the failure of a handler, which is already in
    the log.
    """
    if end.timeline.sent_s and error.status >= 500 and not isinstance(error, FAILURES):
        text = f"{error.code}: {error.whole.message}"
        logs.write("gateway", text, "error", request_id=end.request_id, revision=end.revision)
