"""Holds the deployed functions with their live revisions. Deploys, deletes and restores functions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import GatewayError, PilotflameError, UnknownFunction
from ..access.secrets import Secrets
from ..launching.fetcher_client import FetcherClient
from ..launching.launcher import Launcher
from ..serving.latency_curve_store import LatencyCurveStore
from ..serving.revision import Revision
from ..telemetry.logs import LogBook, Logs
from ..telemetry.metrics import Census
from ..telemetry.timeline import Timeline
from .deploy import Deployment, prepare, worker_spec
from .live import Live, policy_of
from .store import RevisionRecord, Store

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FunctionEvents:
    """Lists of callbacks, which are called in their order on the event loop. Append to subscribe."""

    activated: list[Callable[[str, str], None]] = field(default_factory=list)
    """Called when the start of a worker has succeeded or failed, with the function's name and the outcome."""
    live: list[Callable[[str], None]] = field(default_factory=list)
    """Called with a function's name when a deploy has made a revision of it live."""
    deleted: list[Callable[[str], None]] = field(default_factory=list)
    """Called with a function's name when its deletion begins. From then on it accepts no more requests."""


@dataclass(eq=False)
class Functions:
    """All functions of one gateway. Its methods must be called in the thread of the event loop."""

    store: Store
    environments: Path
    launcher: Launcher
    tasks: asyncio.TaskGroup
    weights: FetcherClient
    secrets: Secrets
    events: FunctionEvents
    logs: Logs
    drain_s: float
    _live: dict[str, Live] = field(default_factory=dict, init=False)
    _locks: dict[str, asyncio.Lock] = field(default_factory=dict, init=False)
    _closing: bool = field(default=False, init=False)
    _retirements: set[asyncio.Task[None]] = field(default_factory=set, init=False)

    def live(self, name: str) -> Revision:
        """Return the live revision of the function `name`. Raise what `get` raises."""
        return self.get(name).revision

    def get(self, name: str) -> Live:
        """Return the function `name`.

        Raise UnknownFunction if it does not exist. Raise GatewayError if the gateway is shutting down.
        """
        if (live := self._live.get(name)) is None:
            raise UnknownFunction.named(name)
        self._check_open()
        return live

    def all(self) -> list[Live]:
        """Return all functions, sorted by name."""
        return [self._live[name] for name in sorted(self._live)]

    def census(self) -> Mapping[str, Census]:
        """Return the census of each function's live revision, by the function's name."""
        return {name: live.revision.census() for name, live in self._live.items()}

    def note_cold(self, name: str, timeline: Timeline) -> None:
        """Remember a function's latest cold start for its status, unless the function was deleted."""
        if (live := self._live.get(name)) is not None:
            live.note_cold(timeline)

    def log(self, name: str, text: str) -> None:
        """Write a line with the source `gateway` to the log of a function, if that exists."""
        if (live := self._live.get(name)) is not None:
            live.logs.write("gateway", text)

    async def deploy(self, request: Deployment) -> Live:
        """Create a revision, check that it starts, make it live, and return its function.

        The old revision finishes its invocations in the background. If the deploy fails, its error is raised
        and the old revision stays live.
        """
        said: list[str] = []
        try:
            staged, fields = await asyncio.to_thread(
                prepare, self.store, self.environments, request, said.append
            )
        except PilotflameError as error:
            LOG.warning("a deploy was refused: %s", error)
            raise
        name = fields.settings.name
        logs = self.logs.of_function(name)
        for text in said:
            logs.write("deploy", text)
        async with self._locks.setdefault(name, asyncio.Lock()):
            old = self._live.get(name)
            self._check_open()
            record = await asyncio.to_thread(self.store.place, staged, fields)
            live = await self._create(record, logs)
            try:
                await live.prove(check=request.check)
                self._check_open()
            except BaseException as error:
                if isinstance(error, PilotflameError):
                    text = f"revision {record.revision} was not deployed: {error}\n{error.trace}".rstrip()
                    logs.write("deploy", text, "error", revision=record.revision)
                await live.revision.retire(0.0)
                await asyncio.to_thread(self.store.withdraw, record)
                raise
            await self._uninterrupted(self._go_live(name, live, old))
            return live

    async def _go_live(self, name: str, live: Live, old: Live | None) -> None:
        """Make a placed revision live, and begin to retire the old one."""
        await asyncio.to_thread(self.store.promote, live.record)
        self._live[name] = live
        live.revision.scale()
        live.logs.write("gateway", f"revision {live.record.revision} is live")
        for callback in self.events.live:
            callback(name)
        retirement = self.tasks.create_task(self._retire(name, old))
        self._retirements.add(retirement)
        retirement.add_done_callback(self._retirements.discard)

    async def _uninterrupted(self, change: Coroutine[Any, Any, None]) -> None:
        """Await `change` and raise its error. Cancelling the caller does not cancel `change`."""

        async def outcome() -> Exception | None:
            try:
                await change
            except (PilotflameError, OSError) as error:
                return error
            return None

        if error := await asyncio.shield(self.tasks.create_task(outcome())):
            raise error

    def _check_open(self) -> None:
        if self._closing:
            raise GatewayError("The gateway is shutting down.", remedy="Try again when it is up.")

    async def delete(self, name: str) -> None:
        """Delete a function: refuse new invocations, finish the accepted ones, then remove secrets and files.

        Accepted invocations have `drain_s` to finish, and fail after that. Raise what `get` raises, or
        UnknownFunction if the function was deployed again or deleted while this waited for its lock.
        """
        live = self.get(name)
        async with self._locks.setdefault(name, asyncio.Lock()):
            if self._live.get(name) is not live:
                raise UnknownFunction(f"{name!r} was changed meanwhile.", remedy="Check it, and try again.")
            await self._uninterrupted(self._take_away(name, live))

    async def _take_away(self, name: str, live: Live) -> None:
        del self._live[name]
        for callback in self.events.deleted:
            callback(name)
        await live.revision.retire(self.drain_s)
        live.logs.write("gateway", f"{name} was deleted")
        # The secrets go first, so that a crash in between does not leave them to a new function of this name.
        await asyncio.to_thread(self.secrets.forget, name)
        await asyncio.to_thread(self.store.delete, name)

    async def restore(self) -> None:
        """Make the stored functions live. Their zygotes and workers (`scale.min`) start in the background."""
        for name, record in (await asyncio.to_thread(self.store.functions)).items():
            self._live[name] = live = await self._create(record, self.logs.of_function(name))
            if record.settings.scale.rest == "zygote":
                self.tasks.create_task(live.revision.pool.zygote.warm())
            live.revision.scale()

    async def close(self) -> None:
        """Refuse new requests, finish the accepted ones within `drain_s`, and end all processes."""
        self._closing = True
        async with asyncio.TaskGroup() as tasks:
            for live in self._live.values():
                tasks.create_task(live.revision.retire(self.drain_s))
        # Replaced revisions may still be finishing their invocations.
        if self._retirements:
            await asyncio.wait(self._retirements)

    async def _create(self, record: RevisionRecord, logs: LogBook) -> Live:
        # `worker_spec` and `LatencyCurveStore.open` read files, so they run in threads.
        spec = await asyncio.to_thread(worker_spec, self.store, record, self.weights.cache)
        # Measured latency curves are valid for revisions with the same `key` and the same weights. So the key
        # holds all else of a revision that affects the speed of its workers.
        settings = f"{record.settings.concurrency} {record.settings.threads}"
        key = f"{record.code_digest} {record.requirements_digest} {settings}"
        curves = await asyncio.to_thread(LatencyCurveStore.open, self.store.curves, key, spec.manifest)
        if spec.source:
            self.tasks.create_task(self.weights.warm())

        def activated(outcome: str) -> None:
            for callback in self.events.activated:
                callback(record.function, outcome)

        revision = Revision(
            spec, policy_of(record), self.launcher, logs.of(record.revision), self.tasks, activated, self.weights,
            lambda: self.secrets.of(record.function), curves,
        )  # fmt: skip
        return Live(record, revision, logs)

    async def _retire(self, name: str, old: Live | None) -> None:
        """Retire the replaced revision, if there is one, and remove old revisions from the store."""
        if old is not None:
            await old.revision.retire(self.drain_s)
        try:
            await asyncio.to_thread(self.store.prune, name)
        # Files of old revisions that cannot be removed do no harm, so this is only logged.
        except (OSError, PilotflameError) as error:
            (old or self._live[name]).logs.write("gateway", f"old revisions were not removed: {error}")
