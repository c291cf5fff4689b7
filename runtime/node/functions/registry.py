"""Holds the deployed functions with their live revisions. Deploys, deletes and restores functions."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import shutil
import threading
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from ....errors import Forbidden, GatewayError, PilotflameError, RevisionsDraining, UnknownFunction
from ....handlers.recognise import Dialects
from ...calls.serving.revision import Revision
from ...ground.access.deploy_policy import Deployer, DeployPolicies
from ...ground.access.fair_threads import FairThreads
from ...ground.access.host_claims import HostClaims
from ...ground.access.keys import Caller, Scope
from ...ground.access.secrets import Secrets
from ...ground.settings.function_settings import FunctionSettings
from ...ground.settings.gateway_settings import GatewaySettings
from ...ground.telemetry.background import BackgroundTasks
from ...ground.telemetry.invocation_end import GenerationEnd
from ...ground.telemetry.logs import LogChannel, Logs
from ...ground.telemetry.metrics import WorkerCounts
from ...ground.telemetry.rung_name import RungName
from ..launching.fetcher_client import FetcherClient
from ..launching.launcher import Launcher
from ..packaging.environment import discard_unused, shrink_cache
from ..packaging.reuse import FileDigests, lacking
from ..reconciling.function_histories import FunctionHistories
from ..reconciling.gpu_places import GpuPlaces
from ..reconciling.reconciler import Reconciler
from ..scaling.rung_figures import HoldingPrices
from .deploy import Deployment, prepare, stored_outside
from .function_events import FunctionEvents
from .live import LIGHT_S, Live, ladder_spec_of
from .progress import Progress
from .revision_maker import RevisionMaker
from .status import Prefetched, RevisionFacts
from .store import RevisionRecord, Store
from .stored_faults import UNREAD, StoredFaults

LOG = logging.getLogger(__name__)
DEPLOY_THREADS = 4
"""The deploys that work on files at a time, such as the installation of requirements, which takes minutes."""
# After a start of the gateway, a zygote is launched when the zygote before it is ready, or after this time.
WARM_TURN_S = 30.0
# While this number of replaced revisions of a function run calls, no other revision of it is replaced: each holds its
# workers, a zygote and its weights.
MOST_DRAINING = 3
# A deletion waits this long for the end of the function's processes, unless calls run.
DELETED_S = 1.0


@dataclass(eq=False)
class Functions:
    """All functions of one gateway. Its methods must be called in the thread of the event loop."""

    store: Store
    environments: Path
    launcher: Launcher
    tasks: BackgroundTasks
    weights: FetcherClient
    secrets: Secrets
    events: FunctionEvents
    logs: Logs
    settings: GatewaySettings
    histories: FunctionHistories
    reconciler: Reconciler
    dialects: Dialects
    policies: DeployPolicies
    # Sorted by name.
    _live: dict[str, Live] = field(default_factory=dict, init=False)
    # The revisions that the property `running` returns.
    _running: set[Live] = field(default_factory=set, init=False)
    # The locks by function. A lock vanishes when no deploy and no delete holds it or waits for it, so that locks of
    # deleted functions do not accumulate.
    _locks: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary, init=False)
    # Pairs (function, revision) of revisions that are checked now and may become live. Their files must not be removed.
    _proving: list[tuple[str, str]] = field(default_factory=list, init=False)
    # Only one function is paused or resumed at a time, so that memory and disk agree.
    _pausing: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    # Functions whose secrets have changed since their processes were started last.
    _renewing: set[str] = field(default_factory=set, init=False)
    _closing: bool = field(default=False, init=False)
    # True if there may be an environment that no revision needs, which a crash or a failed deploy has left.
    _untidy: bool = field(default=True, init=False)
    # The replaced and the deleted revisions that still finish their invocations, by the task that ends them.
    _retirements: dict[asyncio.Task[None], Live | None] = field(default_factory=dict, init=False)
    _threads: FairThreads = field(default_factory=lambda: FairThreads(DEPLOY_THREADS, "deploy"), init=False)

    def __post_init__(self) -> None:
        self.hosts = HostClaims(
            self.settings.app_hosts, lambda: [live.record.settings for live in self._live.values()]
        )
        for changed in (self.events.live, self.events.deleted):
            changed.append(self.hosts.update)
        self._maker = RevisionMaker(
            self.store, self.environments, self.launcher, self.weights, self.secrets, self.dialects, self.policies,
            self.histories, self.reconciler, self.tasks, self.events, self._threads,
        )  # fmt: skip
        self._faults = StoredFaults(self.store, self.policies, self.events, self._threads, self._check_open)

    def observe_calls(self, observer: str) -> None:
        """Let all workers that start from now on have a `CallObserver`, named as `WorkerSpec.observers` does."""
        self._maker.call_observers.append(observer)

    @property
    def drain_s(self) -> float:
        return self.settings.drain_s

    @property
    def prices(self) -> HoldingPrices:
        """The prices of holding and of waiting on this node."""
        settings = self.settings
        memory_byte_s = settings.price_memory_gb_hour / 3600 / 1e9
        return HoldingPrices(memory_byte_s, settings.price_device_hour / 3600, settings.price_waiting_s)

    @property
    def gpus(self) -> GpuPlaces:
        return self.reconciler.gpus

    def live(self, name: str) -> Revision:
        """Return the live revision of the function `name`. Raise the errors of `get`."""
        return self.get(name).revision

    def get(self, name: str) -> Live:
        """Return the function `name`.

        Raise UnknownFunction if it does not exist. Raise GatewayError if the gateway is shutting down.
        """
        if (live := self._live.get(name)) is None:
            raise UnknownFunction.named(name)
        self._check_open()
        return live

    def reset(self, name: str) -> Live:
        """Let a function start workers at once, although the last starts failed. Also run its waiting jobs."""
        live = self.get(name)
        live.workers.reset()
        self.events.note_live(name)
        return live

    async def pause(self, name: str, *, paused: bool) -> Live:
        """Pause a function, or resume it if `paused` is False. Raise the errors of `get`.

        A pause also holds after a restart of the gateway. New calls are refused, and jobs and messages of queues wait.
        Running calls end, and then the function's processes end.
        """
        self.get(name)
        # Do not take the function's own lock here, because a deploy may hold it for minutes.
        async with self._pausing:
            await asyncio.to_thread(self.store.pause, name, paused=paused)
            live = self.get(name)
            if live.function.paused != paused:
                live.function.paused = paused
                live.function.decisions.note("pause" if paused else "resume", "owner")
                live.logs.write("gateway", f"{name} is paused" if paused else f"{name} is resumed")
                live.workers.look()
                self.events.note_live(name)
        return live

    def all(self) -> list[Live]:
        """Return all functions, sorted by name."""
        return list(self._live.values())

    @property
    def running(self) -> list[Live]:
        """All revisions that may have processes: live revisions, revisions that a deploy checks, retiring revisions."""
        return list(self._running)

    def worker_counts(self) -> Mapping[str, WorkerCounts]:
        """Return the counts of workers and calls of each function's live revision, by the function's name."""
        return {name: live.workers.worker_counts() for name, live in self._live.items()}

    def expect(self, name: str, invocations: int) -> None:
        """Start workers for messages that wait for a function. Do nothing if it is gone or the gateway shuts down."""
        with contextlib.suppress(GatewayError, UnknownFunction):
            self.get(name).workers.expect(invocations, "backlog")

    def log(self, name: str, text: str) -> None:
        """Write a line with the source `gateway` to the log of a function, if the function exists."""
        if (live := self._live.get(name)) is not None:
            live.logs.write("gateway", text)

    def note_refused(self, name: str, error: PilotflameError) -> None:
        """Report to subscribers that a caller's request was refused with `error`."""
        for callback in self.events.refused:
            callback(name, error)

    def note_generated(self, generation: GenerationEnd) -> None:
        """Report to subscribers that an answer of a language model has ended."""
        for callback in self.events.generated:
            callback(generation)

    async def deploy(self, request: Deployment, progress: Progress | None = None) -> Live:
        """Create a revision, check that it starts, make it live, and return its function.

        The old revision finishes its invocations in the background. If the deploy fails, raise its error. Then the old
        revision stays live.
        """
        said, progress = list[str](), progress or Progress()

        deployer = Deployer(request.owner, request.deployer)
        prepared = functools.partial(
            prepare,
            self.store,
            self.environments,
            self.dialects,
            request,
            said.append,
            self.secrets.of,
            progress,
            functools.partial(self._check_deploy, deployer=deployer, progress=progress),
            self.policies,
        )
        try:
            staged, fields = await self._threads.run(
                prepared, owner=request.owner, undo=lambda made: _remove(made[0])
            )
        except PilotflameError as error:
            self._untidy = True
            LOG.warning("a deploy was refused: %s", error)
            raise
        name = fields.settings.name
        logs = self.logs.of_function(name)
        for text in said:
            logs.write("deploy", text)
        with contextlib.ExitStack() as failing:
            failing.callback(self._threads.start, functools.partial(_remove, staged))
            self.gpus.hardware.check(name, fields.settings.resources)
            async with self._lock(name):
                self._check_open()
                failing.pop_all()
                place = functools.partial(self.store.place, staged, fields)
                record = await self._threads.run(place, undo=self.store.withdraw)
                withdraw = functools.partial(self.store.withdraw, record)
                return await self._replace(
                    record, logs, check=request.check, withdraw=withdraw, progress=progress
                )

    async def lacking(self, name: str, wanted: FileDigests, owner: str) -> tuple[str, list[str]]:
        """Return a function's live revision, and the paths of the `wanted` files that its code does not have.

        The work counts for `owner`, and ends if this is cancelled. Raise the errors of `get`.
        """
        record, gone = self.get(name).record, threading.Event()
        missing = functools.partial(lacking, self.store.code(record), wanted, gone)
        try:
            return record.revision, await self._threads.run(missing, owner=owner)
        finally:
            gone.set()

    async def restart(self, name: str) -> Live:
        """Replace a function's processes by new processes of the same revision, and return the function.

        First, a new worker must become ready for each worker that is ready now, as far as `max_workers` has room. Then
        the old workers drain. If the new workers do not become ready, raise the error and keep the old workers. Raise
        the errors of `get`.
        """
        return await self._revive(name, lambda live: live)

    def renew(self, name: str) -> None:
        """Replace a function's processes in the background, because its secrets have changed.

        Do nothing if the function has no processes. If the new zygote or the new workers fail, the log says why, and
        the old processes stay.
        """
        known = name in self._live or any(function == name for function, _ in self._proving)
        if known and name not in self._renewing:
            self._renewing.add(name)
            self.tasks.create_task(self._renew(name))

    async def _renew(self, name: str) -> None:
        while draining := await self._renew_now(name):
            await asyncio.wait(draining, return_when=asyncio.FIRST_COMPLETED)

    async def _renew_now(self, name: str) -> list[asyncio.Task[None]]:
        """Replace a function's processes. If too many revisions drain, return the tasks that end them instead."""
        async with self._lock(name):
            live, draining = self._live.get(name), self._draining(name)
            needed = live is not None and not self._closing and live.workers.holdings.exist
            if needed and len(draining) >= MOST_DRAINING:
                self.log(name, f"{name} has changed secrets, which wait for the end of a replaced revision")
                return draining
            # The code below reads the present secrets. So a later change needs another replacement.
            self._renewing.discard(name)
            if live is None or not needed:
                return []
            try:
                # Start a worker to check the secrets only if the function has a ready worker now.
                await self._replace(live.record, live.logs, check=bool(live.workers.replicas.ready))
            except PilotflameError as error:
                text = f"{name} does not have its changed secrets: {error.message}"
                live.logs.write("gateway", text, "error")
        return []

    async def rollback(self, name: str, revision: str | None = None) -> Live:
        """Make the old revision live that `Store.find` returns for `revision`, and return the function.

        It replaces the live revision as in a deploy. Raise the errors of `get` and of `Store.find`.
        """
        return await self._revive(name, lambda live: self.store.find(live, revision))

    async def _revive(self, name: str, choose: Callable[[RevisionRecord], RevisionRecord]) -> Live:
        self.get(name)
        async with self._lock(name):
            old = self.get(name)
            record = await self._threads.run(functools.partial(choose, old.record))
            return await self._replace(record, old.logs, check=True)

    async def prefetch(self, name: str) -> Prefetched:
        """Bring the image and the weights of a function to this node, so that its next cold start needs no network.

        Raise the errors of `get`, LauncherError, SourceError, CacheError or SnapshotError.
        """
        live = self.get(name)
        if live.function.barred and (error := live.function.refusal()) is not None:
            raise error
        spec, image = live.revision.spec, None
        if spec.image:
            image = "pulled" if await self.launcher.provide(spec) else "present"
        fetched_bytes = await self.weights.prefetch(spec, self.secrets.of(name)) if spec.remote else 0
        urls = {weights.name: weights.source for weights in spec.remote}
        return Prefetched(
            function=name,
            image=image,
            snapshot=urls.pop("", None),
            snapshots=urls,
            fetched_bytes=fetched_bytes,
        )

    async def revisions(self, name: str) -> list[RevisionFacts]:
        """Return a function's stored revisions, the newest first. Raise the errors of `get`."""
        self.get(name)
        records = await self._threads.run(functools.partial(self.store.revisions, name))
        sizes = await self._threads.run(functools.partial(self.store.sizes, name))
        live, busy = self.get(name).record.revision, self._busy(name)
        return [
            RevisionFacts.of(
                record,
                sizes.get(record.revision, 0),
                live=record.revision == live,
                busy=record.revision in busy,
            )
            for record in records
        ]

    async def _replace(
        self,
        record: RevisionRecord,
        logs: LogChannel,
        *,
        check: bool,
        withdraw: Callable[[], None] = lambda: None,
        progress: Progress | None = None,
    ) -> Live:
        """Check that a placed revision starts, make it live, and return its function.

        If one of these steps fails, call `withdraw` in a thread. The caller must hold the function's lock.
        """
        old = self._live.get(record.function)
        live: Live | None = None
        self._proving.append((record.function, record.revision))
        try:
            deployer = Deployer(record.deployed_by, record.deployer)
            # While a deploy waited for the lock, another deploy may have made a revision live.
            self._check_deploy(record.settings, stored_outside(record), deployer, progress)
            await self._faults.check_signatures(record)
            live = await self._create(record, old.logs if old is not None else logs)
            ready = len(old.workers.replicas.ready) if old is not None else 0
            await live.prove(check=check, ready=ready, progress=progress or Progress())
            self._check_open()
            self.hosts.check(record.settings)
        except BaseException as error:
            _log_failure(logs, record, error)
            await self._uninterrupted(self._abandon(record, live, withdraw))
            raise
        await self._uninterrupted(self._go_live(live, old, withdraw))
        return live

    async def _abandon(self, record: RevisionRecord, live: Live | None, withdraw: Callable[[], None]) -> None:
        self._untidy = True
        try:
            if live is not None:
                await self._end(live, 0.0)
            if record.function not in self._live:
                await self.histories.forget(record.function)
            await self._threads.run(withdraw)
        finally:
            self._proving.remove((record.function, record.revision))

    async def _go_live(self, live: Live, old: Live | None, withdraw: Callable[[], None]) -> None:
        """Make a placed revision live, and begin to retire the old revision."""
        name = live.record.function
        try:
            await self._threads.run(functools.partial(self.store.promote, live.record))
        except BaseException as error:
            _log_failure(live.logs, live.record, error)
            await self._abandon(live.record, live, withdraw)
            raise
        self._proving.remove((name, live.record.revision))
        known = name in self._live
        self._live[name] = live
        if not known:
            self._live = dict(sorted(self._live.items()))
        # A revision that the policies allow may replace a revision that they do not allow any more.
        live.function.barred = ""
        self._adopt(live)
        live.workers.go_live()
        live.logs.write("gateway", f"revision {live.record.revision} is live")
        self.events.note_live(name)
        self._begin_retirement(self._retire(name, old), old)

    def _begin_retirement(self, end: Coroutine[Any, Any, None], old: Live | None) -> asyncio.Task[None]:
        """Run `end`, which retires the revision `old` and removes files."""
        retirement = self.tasks.create_task(end)
        self._retirements[retirement] = old
        retirement.add_done_callback(self._retirements.pop)
        return retirement

    def _busy(self, name: str, besides: Live | None = None) -> set[str]:
        """Return the ids of a function's replaced revisions that still finish their invocations, `besides` left out."""
        retiring = [
            old.record for old in self._retirements.values() if old is not None and old is not besides
        ]
        return {record.revision for record in retiring if record.function == name}

    def _draining(self, name: str) -> list[asyncio.Task[None]]:
        """Return the tasks that end a function's replaced revisions which still run calls."""
        return [
            task
            for task, old in list(self._retirements.items())
            if old is not None and old.record.function == name and old.workers.observed.unfinished
        ]

    def _check_deploy(
        self, settings: FunctionSettings, outside: Mapping[str, str], deployer: Deployer, progress: Progress | None
    ) -> None:  # fmt: skip
        """Raise Forbidden, RevisionsDraining or PolicyViolation if a key may not make a revision with these settings live.

        A deploy calls this once it knows the settings, before it builds anything, and again when it holds the function's lock.
        Rollbacks and restarts only call it then. `progress` gets the live function once its owner is checked.
        """
        old = self._live.get(settings.name)
        # The new revision would get the function's secrets, and could get an environment variable that changes what it runs.
        if old is not None and not self._same_owner(old.record, deployer):
            message = f"{settings.name} was deployed with another key."
            raise Forbidden(message, remedy="Choose another name, or let an admin delete it first.")
        self._check_draining(old)
        if progress is not None:
            progress.note_target(settings.name, old.record if old is not None else None)
        self.policies.check(settings, outside, deployer.key_id)

    def _check_draining(self, old: Live | None) -> None:
        """Raise RevisionsDraining if the revision `old` cannot be replaced now."""
        if old is None or len(draining := self._draining(old.record.function)) < MOST_DRAINING:
            return
        running = [one for task in draining if (one := self._retirements.get(task)) is not None]
        revisions = ", ".join(one.record.revision for one in running)
        raise RevisionsDraining(
            f"{len(draining)} replaced revisions of {old.record.function} still run calls ({revisions}), and each holds"
            " its processes and weights.",
            remedy="Try again when the calls of one of them have ended: the latest end is the function's timeout_s after"
            " its replacement.",
        )

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    async def _uninterrupted(self, change: Coroutine[Any, Any, None]) -> None:
        """Await `change` and raise its error. If the caller is cancelled, `change` still goes on."""

        async def outcome() -> Exception | None:
            try:
                await change
            except Exception as error:  # noqa: BLE001  whatever it is, it belongs to the caller
                return error
            return None

        if error := await asyncio.shield(self.tasks.create_task(outcome())):
            raise error

    def owns(self, caller: Caller, name: str) -> bool:
        """Return True if the caller may change this function, and so may see all of it: settings, logs and tracebacks.

        A caller needs the scope `deploy`. With a key that is not trusted, callers own the functions of their owner only.
        """
        if not (caller.has(Scope.DEPLOY) and caller.allows(name)):
            return False
        live = self._live.get(name) if caller.confined else None
        return not caller.confined or (
            live is not None and self._same_owner(live.record, Deployer(caller.owner, caller.name))
        )

    def signed_as(self, name: str) -> str:
        """Return the name whose secret signs webhooks of a function. The owners of untrusted functions do not share it."""
        live = self._live.get(name)
        if live is None or not self.policies.confined(live.record.deployed_by):
            return name
        return f"function:{name}:{live.record.deployer}"

    def check_owner(self, caller: Caller, name: str) -> None:
        """Raise Forbidden if the caller may not deploy a function of this name, or does not own the function that has it."""
        caller.check_deploy(name)
        if name in self._live and not self.owns(caller, name):
            remedy = "Use the key with which it was deployed, a key of the same name, or a trusted one."
            raise Forbidden(f"{name} was deployed with another key.", remedy=remedy)

    def _same_owner(self, record: RevisionRecord, other: Deployer) -> bool:
        return self.policies.same_owner(Deployer(record.deployed_by, record.deployer), other)

    def _check_open(self) -> None:
        if self._closing:
            raise GatewayError("The gateway is shutting down.", remedy="Try again when it is up.")

    async def delete(self, name: str) -> None:
        """Delete a function: refuse new invocations, and remove its secrets and files.

        Accepted invocations finish in the background, and their revisions keep their code until then. Raise the errors
        of `get`, or UnknownFunction if another caller has deployed or deleted the function while this method waited for
        its lock.
        """
        revision = self.get(name).record.revision
        async with self._lock(name):
            # While this method waited, `renew` or `restart` may have replaced the processes, and so the object.
            live = self._live.get(name)
            if live is None or live.record.revision != revision:
                raise UnknownFunction(f"{name!r} was changed meanwhile.", remedy="Check it, and try again.")
            await self._uninterrupted(self._take_away(name, live))
        ending = [task for task, old in self._retirements.items() if old is live]
        if ending and not live.workers.observed.unfinished:
            await asyncio.wait(ending, timeout=DELETED_S)

    async def _take_away(self, name: str, live: Live) -> None:
        del self._live[name]
        for callback in self.events.deleted:
            callback(name)
        live.function.secrets = self.secrets.of(name)
        deleted = asyncio.Event()
        self._begin_retirement(self._retire_deleted(name, live, deleted), live)
        try:
            await self.histories.forget(name)
            # Remove the secrets before the files. Then, after a crash in between, a new function with this name does not
            # get the old secrets.
            await asyncio.to_thread(self.secrets.forget, name)
            await self._threads.run(functools.partial(self.store.delete, name, busy=self._busy(name)))
            live.logs.end()
        finally:
            deleted.set()

    async def _retire_deleted(self, name: str, live: Live, deleted: asyncio.Event) -> None:
        """Retire the revision of a deleted function. Then remove what a new function of this name does not use."""
        await self._end(live)
        await deleted.wait()
        busy = self._busy(name, besides=live)
        self._note_removed(name)
        await self._tidy(live, lambda: self.store.sweep(name, busy=busy) or True)

    def _note_removed(self, name: str) -> None:
        """If no revision of a deleted function runs, and there is no new function of this name, report its end."""
        if name not in self._live and all(one.record.function != name for one in self._running):
            for callback in self.events.removed:
                callback(name)

    async def restore(self) -> None:
        """Make the stored functions live. Their zygotes and workers (`scale.min`) start in the background."""
        warming, unread = list[Live](), list[Live]()
        paused = await asyncio.to_thread(self.store.paused)
        for name, record in sorted((await asyncio.to_thread(self.store.functions)).items()):
            logs = self.logs.of_function(name)
            fault = await self._faults.of(record, logs, read=False)
            self._live[name] = live = await self._create(record, logs, barred=fault)
            if fault == UNREAD:
                unread.append(live)
            live.function.paused = name in paused
            planning = self._adopt(live)
            # The plan of the idle period depends on its age, which counts on from before the restart. So the plan may
            # no longer hold a zygote.
            await asyncio.wait([planning])
            rests_warm = record.settings.scale.rest == "zygote" and not live.function.stopped
            if rests_warm and live.function.ladder.plans_zygote:
                warming.append(live)
            live.workers.go_live()
        self.hosts.update()
        warming.sort(key=_expected_waiting, reverse=True)
        self.tasks.create_task(self._warm(warming), name="warm")
        self.tasks.create_task(self._faults.read_weights(unread, self._is_live), name="compare")

    def _is_live(self, live: Live) -> bool:
        return self._live.get(live.record.function) is live and not self._closing

    async def _warm(self, functions: list[Live]) -> None:
        """Launch zygotes one after the other. A slow zygote delays the next zygote by at most WARM_TURN_S.

        If a function is called before its turn, it launches its zygote at once.
        """
        for live in functions:
            if self._is_live(live):
                light = live.builds_within(LIGHT_S)
                warm = self.tasks.create_task(live.workers.carry_out.open_ahead(shared_only=light))
                await asyncio.wait([warm], timeout=WARM_TURN_S)

    def _adopt(self, live: Live) -> asyncio.Task[None]:
        """Let the function's ladder move this revision from now on, within the function's budget.

        Return the task that plans the function's idle period.
        """
        live.open_account()
        ladder, build_s = live.function.ladder, float(live.record.handler.get("build_s", 0.0))
        return ladder.adopt(live.workers, ladder_spec_of(live.record, self.prices), build_s, self.tasks)

    async def close(self) -> None:
        """Refuse new requests, finish accepted requests within `drain_s`, and end all processes."""
        self._closing = True
        for live in self._running:
            live.workers.drain.limit_shutdown(self.drain_s)
        retiring = [self._end(live) for live in self._live.values()]
        # Replaced revisions may still be finishing their invocations.
        if ends := {*map(self.tasks.create_task, retiring), *self._retirements}:
            await asyncio.wait(ends)
        await self.histories.close()

    def close_threads(self) -> None:
        """Start no more work of deploys. Before the process ends, it waits for threads that still run."""
        self._threads.close()

    async def _create(self, record: RevisionRecord, logs: LogChannel, *, barred: str = "") -> Live:
        """Make a revision without processes. `barred` says why a policy does not allow its function to run."""
        live = await self._maker.make(record, logs, barred=barred)
        self._running.add(live)
        return live

    async def _end(self, live: Live, timeout_s: float | None = None) -> None:
        """End the processes of a revision, after its invocations have finished or `timeout_s` is over."""
        try:
            await live.workers.retire(timeout_s)
        finally:
            self._running.discard(live)

    async def _retire(self, name: str, old: Live | None) -> None:
        """Retire the replaced revision, if there is one, and remove old revisions from the store."""
        if old is not None:
            await self._end(old)
        busy = self._busy(name, besides=old)
        if old is not None:
            self._note_removed(name)
        busy |= {revision for function, revision in self._proving if function == name}
        if (function := old or self._live.get(name)) is not None:
            await self._tidy(
                function, lambda: self.store.prune(name, busy=busy) + self.store.sweep(name, busy=busy)
            )

    async def _tidy(self, function: Live, prune: Callable[[], object]) -> None:
        """Call `prune` in a thread. If it has removed a revision, or a deploy has failed, remove unused environments.

        If there were unused environments, also shrink the cache that uv keeps for further environments.
        """

        untidy, self._untidy = self._untidy, False
        # A deleted function whose calls run has no record in the store.
        running = {live.record.requirements_digest for live in self._running}

        def needed() -> set[str]:
            return self.store.environments() | running

        def tidy() -> None:
            # Shrink the cache after the environments are gone: until then, the cache shares files with them as hard
            # links, and does not count such files.
            if (prune() or untidy) and discard_unused(self.environments, needed):
                shrink_cache(self.environments)

        try:
            await self._threads.run(tidy)
        # Only log this error, because files that cannot be removed do no harm.
        except (OSError, PilotflameError) as error:
            function.logs.write("gateway", f"old revisions were not removed: {error}")


def _log_failure(logs: LogChannel, record: RevisionRecord, error: BaseException) -> None:
    if isinstance(error, PilotflameError):
        text = f"revision {record.revision} was not deployed: {error}\n{error.trace}".rstrip()
        logs.write("deploy", text, "error", revision=record.revision)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _expected_waiting(live: Live) -> float:
    """Return the seconds that a function's callers are expected to wait in each second without a zygote."""
    ladder = live.function.ladder
    return ladder.step_down(live.record.function, RungName.ZYGOTE, RungName.LOCAL).waiting
