"""Makes a revision of a function live: after a deploy, a rollback or a restart, or because its secrets have changed."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import shutil
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from ....errors import Forbidden, FunctionBarred, PilotflameError
from ...ground.access.deploy_policy import Deployer
from ...ground.settings.function_settings import FROM_OVERRIDE, SETTINGS_FILE, FunctionSettings
from ...ground.telemetry.log_files import NOT_DEPLOYED
from ...ground.telemetry.logs import LogChannel
from ...ground.telemetry.refusals import explaining
from ..packaging.reuse import FileDigests, lacking
from ..packaging.revision_files import PackedFiles
from .deploy import Deployment, Preparation, stored_outside
from .live import Live
from .progress import DeployProgress
from .registry import Functions
from .retirements import MOST_DRAINING, Retirements
from .revision_record import RevisionFields, RevisionRecord
from .revisions import Revisions
from .status import RevisionFacts

PublishRevision: TypeAlias = Callable[[RevisionRecord], Awaitable[None]]
LOG = logging.getLogger(__name__)


@dataclass(eq=False)
class Rollouts:
    """The deploys, rollbacks and restarts of one gateway. For one function, they run one after the other.

    Each of them replaces the live revision: it starts the new revision, checks it, and makes it live. Then the old
    revision finishes its invocations in the background. If the new revision fails, the old revision stays live.
    """

    functions: Functions
    revisions: Revisions
    retirements: Retirements
    # Functions whose secrets have changed since their processes were started last.
    _renewing: set[str] = field(default_factory=set, init=False)

    async def deploy(self, request: Deployment, progress: DeployProgress | None = None) -> Live:
        """Create a revision, check that it starts, make it live, and return its function.

        If the deploy fails, raise its error.
        """
        with explaining():
            return await self._settled(await self._deploy(request, progress))

    async def _deploy(self, request: Deployment, progress: DeployProgress | None) -> Live:
        functions, said, progress = self.functions, list[str](), progress or DeployProgress()
        deployer = Deployer(request.owner, request.deployer)
        check = functools.partial(self._check_new, deployer=deployer, progress=progress)
        preparation = Preparation(
            functions.store, self.revisions.environments, self.revisions.dialects, request, said.append,
            functions.secrets.of, progress, check, functions.policies,
        )  # fmt: skip
        try:
            staged, fields = await self.revisions.threads.run(
                preparation.run, owner=request.owner, undo=lambda made: _remove(made[0])
            )
        except PilotflameError as error:
            self.retirements.untidy = True
            LOG.warning("a deploy was refused: %s", error)
            raise
        name = fields.settings.name
        with contextlib.ExitStack() as failing:
            failing.callback(self.revisions.threads.start, functools.partial(_remove, staged))
            self.revisions.reconciler.gpus.hardware.check(name, fields.settings.resources)
            async with functions.lock(name):
                functions.check_open()
                if request.authorize is not None:
                    # Check the right again: while the deploy waited for the lock, another key may have deployed this
                    # name.
                    request.authorize(name)
                    for accept in functions.events.deploying:
                        await accept(fields.settings, request.owner)
                record, publish, withdraw = await self._place(staged, fields)
                failing.pop_all()
                logs = functions.logs.of_function(name)
                for text in said:
                    logs.write("deploy", text)
                old = functions.find(name)
                live = await self._replace(
                    record, publish, check=request.check, withdraw=withdraw, progress=progress
                )
                live.warnings += _dropped(old.record if old is not None else record, record)
                return live

    async def _place(
        self, staged: Path, fields: RevisionFields
    ) -> tuple[RevisionRecord, PublishRevision, Callable[[], None]]:  # fmt: skip
        """Place a staged revision. Return its record, and the functions that publish and withdraw it."""
        store, shared, packed, least = self.functions.store, self.functions.shared, None, 1
        with contextlib.ExitStack() as undo:
            if shared is not None:
                packed, least = await shared.prepare(staged, fields.settings.name)
                undo.callback(packed.file.close)
            place = functools.partial(store.place, staged, fields, least)
            record = await self.revisions.threads.run(place, undo=store.withdraw)
            undo.callback(store.withdraw, record)
            return record, functools.partial(self._publish, packed=packed), undo.pop_all().close

    async def _publish(self, record: RevisionRecord, packed: PackedFiles | None = None) -> None:
        """Publish a revision to all gateways. If its function is new, await the callbacks of `creating` first."""
        functions, shared, name = self.functions, self.functions.shared, record.function
        old = functions.find(name)
        new = old is None and (shared is None or await shared.is_new(name))
        for prepare in functions.events.creating if new else ():
            await prepare(name)
        if shared is not None:
            await shared.publish(record, packed, paused=old is not None and old.function.paused)

    async def _settled(self, live: Live) -> Live:
        """Wait until the other gateways serve a revision that was made live here, as far as they can."""
        if (shared := self.functions.shared) is not None:
            await shared.settle(live.record.function)
        return live

    async def adopt(self, record: RevisionRecord) -> None:
        """Make a placed revision live, because another gateway has done so. The caller must hold the function's lock.

        The other gateway has checked the revision. So start a worker to check it here only if the function has ready
        workers here.
        """
        old = self.functions.find(record.function)
        self.revisions.reconciler.gpus.hardware.check(record.function, record.settings.resources)
        # Drop the other gateway's warnings: the start of the revision here finds its warnings again.
        record = record.model_copy(update={"warnings": ()})
        await self._replace(record, check=old is not None and bool(old.workers.replicas.ready))

    async def lacking(self, name: str, wanted: FileDigests, owner: str) -> tuple[str, list[str]]:
        """Return a function's live revision, and the paths of the `wanted` files that its code does not have.

        Owners share the threads fairly, and this work counts as work of `owner`. It ends if the caller is cancelled.
        Raise the errors of `Functions.get`.
        """
        record, gone = self.functions.get(name).record, threading.Event()
        missing = functools.partial(lacking, self.functions.store.code(record), wanted, gone)
        try:
            return record.revision, await self.revisions.threads.run(missing, owner=owner)
        finally:
            gone.set()

    async def restart(self, name: str) -> Live:
        """Replace a function's processes by new processes of the same revision, and return the function.

        First, a new worker must become ready for each worker that is ready now, as far as `max_workers` has room. Then
        the old workers drain. If the new workers do not become ready, raise the error and keep the old workers. Raise
        the errors of `Functions.get`.
        """
        return await self._revive(name, lambda live: live)

    async def rollback(self, name: str, revision: str | None = None) -> Live:
        """Make an older revision live, and return the function. `revision` is the revision's id or number; None for the
        newest revision before the live one.

        The older revision is started and checked first, as in a deploy. Raise the errors of `Functions.get` and of
        `FunctionFolder.find`.
        """

        def choose(live: RevisionRecord) -> RevisionRecord:
            if (shared := self.functions.shared) is not None:
                return shared.fetch_old(live, revision)
            return self.functions.store.function(name).find(live, revision)

        return await self._revive(name, choose)

    async def _revive(self, name: str, choose: Callable[[RevisionRecord], RevisionRecord]) -> Live:
        self.functions.get(name)
        async with self.functions.lock(name):
            live = self.functions.get(name).record
            record = await self.revisions.threads.run(functools.partial(choose, live))
            revived = await self._replace(record, self._publish, check=True)
        return await self._settled(revived)

    async def stored(self, name: str) -> list[RevisionFacts]:
        """Return a function's stored revisions, the newest first. Raise the errors of `Functions.get`."""
        self.functions.get(name)
        folder, run = self.functions.store.function(name), self.revisions.threads.run
        records, sizes = await run(folder.records), await run(folder.sizes)
        live, busy = self.functions.get(name).record.revision, self.retirements.busy(name)
        return [
            RevisionFacts.of(
                record, sizes.get(record.revision, 0), live=record.revision == live, busy=record.revision in busy
            )
            for record in records
        ]  # fmt: skip

    def renew(self, name: str) -> None:
        """Replace a function's processes in the background, because its secrets have changed.

        Do nothing if the function has no processes. If the new zygote or the new workers fail, the log says why, and
        the old processes stay.
        """
        proving = any(function == name for function, _ in self.functions.proving)
        if (proving or self.functions.find(name) is not None) and name not in self._renewing:
            self._renewing.add(name)
            self.functions.tasks.create_task(self._renew(name))

    async def _renew(self, name: str) -> None:
        while draining := await self._renew_now(name):
            await asyncio.wait(draining, return_when=asyncio.FIRST_COMPLETED)

    async def _renew_now(self, name: str) -> Mapping[asyncio.Task[None], Live]:
        """Replace a function's processes. If too many replaced revisions drain, do nothing, and return these revisions
        by the tasks that end them.
        """
        async with self.functions.lock(name):
            live, draining = self.functions.find(name), self.retirements.draining(name)
            needed = live is not None and not self.functions.closing and live.workers.inventory.exist
            if needed and len(draining) >= MOST_DRAINING:
                text = f"{name} has changed secrets, which wait for the end of a replaced revision"
                self.functions.log(name, text)
                return draining
            # Remove the name before the code below reads the secrets, so that a later change of secrets causes another
            # replacement.
            self._renewing.discard(name)
            if live is None or not needed:
                return {}
            try:
                # Start a worker to check the secrets only if the function has a ready worker now.
                await self._replace(live.record, check=bool(live.workers.replicas.ready))
            except PilotflameError as error:
                text = f"{name} does not have its changed secrets: {error.message}"
                live.logs.write("gateway", text, "error")
        return {}

    async def _replace(
        self, record: RevisionRecord, publish: PublishRevision | None = None, *, check: bool, withdraw: Callable[[], None] = lambda: None,
        progress: DeployProgress | None = None,
    ) -> Live:  # fmt: skip
        """Check that a placed revision starts, make it live, and return its function. Before it is live, await `publish`.

        If one of these steps fails, call `withdraw` in a thread. The caller must hold the function's lock.
        """
        if record.lost:
            remedy = f"Roll back to another revision, or deploy it again. See `pilotflame revisions {record.function}`."
            raise FunctionBarred(f"The files of {record.revision} are damaged.", remedy=remedy)
        functions, progress = self.functions, progress or DeployProgress()
        old, logs = functions.find(record.function), functions.logs.of_function(record.function)
        live: Live | None = None
        functions.proving.append((record.function, record.revision))
        try:
            # Check the settings again: while a deploy waited for the lock, another deploy may have made a revision
            # live.
            self._check(record.settings, stored_outside(record), record.owner, progress)
            await self.revisions.check_signatures(record)
            live = await self.revisions.make(record)
            ready = len(old.workers.replicas.ready) if old is not None else 0
            await live.prove(check=check, ready=ready, progress=progress)
            live.warnings += _unreachable(record.settings, functions.settings.max_body_bytes)
            functions.check_open()
            functions.hosts.check(record.settings)
        except BaseException as error:
            _log_failure(logs, record, error)
            await functions.tasks.complete(self._abandon(record, live, withdraw))
            raise
        await functions.tasks.complete(self._go_live(live, old, withdraw, publish))
        return live

    async def _abandon(self, record: RevisionRecord, live: Live | None, withdraw: Callable[[], None]) -> None:
        self.retirements.untidy = True
        try:
            if live is not None:
                await self.revisions.end(live, 0.0)
            if self.functions.find(record.function) is None:
                await self.revisions.histories.forget(record.function)
                logs = self.functions.logs.of_function(record.function)
                # Mark the end of the function's log: another owner may deploy the next function of this name, and must
                # not see these lines.
                logs.write("gateway", NOT_DEPLOYED.format(record.function))
            await self.revisions.threads.run(withdraw)
        finally:
            self.functions.proving.remove((record.function, record.revision))

    async def _go_live(
        self, live: Live, old: Live | None, withdraw: Callable[[], None], publish: PublishRevision | None
    ) -> None:  # fmt: skip
        """Make a placed revision live, and begin to retire the old revision."""
        name = live.record.function
        try:
            if publish is not None:
                await publish(live.record)
            await self.revisions.threads.run(functools.partial(self.functions.store.promote, live.record))
        except BaseException as error:
            _log_failure(live.logs, live.record, error)
            await self._abandon(live.record, live, withdraw)
            raise
        if publish is not None and self.functions.shared is not None:
            self.functions.shared.confirm(name)
        self.functions.proving.remove((name, live.record.revision))
        # The new revision may run, even if the policies did not allow the old revision any more.
        live.function.barred = ""
        self.functions.put(live)
        live.workers.go_live()
        live.logs.write("gateway", f"revision {live.record.revision} is live")
        self.functions.events.live(name)
        self.retirements.retire(old, name)

    def _check_new(
        self, settings: FunctionSettings, outside: Mapping[str, str], deployer: Deployer, progress: DeployProgress
    ) -> None:  # fmt: skip
        """Check a deploy before anything is built. Raise the errors of `_check`, or SnapshotError if other gateways
        could not get the weights.
        """
        self._check(settings, outside, deployer, progress)
        if self.functions.shared is not None:
            self.functions.shared.check(settings, outside)

    def _check(
        self, settings: FunctionSettings, outside: Mapping[str, str], deployer: Deployer, progress: DeployProgress
    ) -> None:  # fmt: skip
        """Raise Forbidden, RevisionsDraining or PolicyViolation if a key may not make a revision with these settings live.

        A deploy calls this once it knows the settings, before it builds anything, and again when it holds the
        function's lock. Rollbacks and restarts call it only when they hold the lock. Once the owner is checked, report
        the target to `progress`.
        """
        old, policies = self.functions.find(settings.name), self.functions.policies
        if old is not None:
            # Refuse another owner. The new revision would get the function's secrets. They are environment variables,
            # so they could also change what the new revision runs.
            if not policies.same_owner(old.record.owner, deployer):
                message = f"{settings.name} was deployed with another key."
                raise Forbidden(message, remedy="Choose another name, or let an admin delete it first.")
            self.retirements.check_room(settings.name)
        progress.note_target(settings.name, old.record if old is not None else None)
        policies.check(settings, outside, deployer.key_id)


def _dropped(old: RevisionRecord, new: RevisionRecord) -> Iterator[str]:
    """Yield a warning if the deploy of the replaced revision set settings by options, and the new revision does not set
    them.
    """
    given = {key for key, origin in old.setting_origins.items() if origin == FROM_OVERRIDE}
    if dropped := sorted(given - new.setting_origins.keys()):
        keys = ", ".join(dropped)
        yield f"{keys}: set as an option of the previous deploy, and not now. Set it again, or in {SETTINGS_FILE}."


def _unreachable(settings: FunctionSettings, most: int) -> list[str]:
    """Return a warning if a function sets a larger `max_body_bytes` than the gateway accepts."""
    if "max_body_bytes" not in settings.model_fields_set or settings.max_body_bytes <= most:
        return []
    return [
        f"max_body_bytes is {settings.max_body_bytes}, but requests to this gateway have at most {most} bytes:"
        " raise PILOTFLAME_MAX_BODY_BYTES, and start the gateway again."
    ]


def _log_failure(logs: LogChannel, record: RevisionRecord, error: BaseException) -> None:
    if isinstance(error, PilotflameError):
        text = f"revision {record.revision} was not deployed: {error.whole}\n{error.trace}".rstrip()
        logs.write("deploy", text, "error", revision=record.revision)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
