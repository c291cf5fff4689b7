"""The registry of deployed functions, each with its live revision. Deploys, replaces, deletes and restores them."""

from __future__ import annotations

import asyncio
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
from ..telemetry.logs import LogBook
from ..telemetry.metrics import Census
from ..telemetry.timeline import Timeline
from .deploy import Deployment, prepare, worker_spec
from .live import Live, policy_of
from .store import RevisionRecord, Store


@dataclass(frozen=True, slots=True)
class FunctionEvents:
    """Callbacks of the registry, called in order in the event loop. Append to a list to subscribe."""

    activated: list[Callable[[str, str], None]] = field(default_factory=list)
    """A revision's activation ended: the function's name, and the outcome."""
    live: list[Callable[[str], None]] = field(default_factory=list)
    """A deploy made a revision of this function live."""
    deleted: list[Callable[[str], None]] = field(default_factory=list)
    """A delete of this function has begun, and it accepts no more requests."""


@dataclass(eq=False)
class Functions:
    """All functions of one gateway. Used only in the event loop's thread."""

    store: Store
    environments: Path
    launcher: Launcher
    tasks: asyncio.TaskGroup
    weights: FetcherClient
    secrets: Secrets
    events: FunctionEvents
    drain_s: float
    _live: dict[str, Live] = field(default_factory=dict, init=False)
    _locks: dict[str, asyncio.Lock] = field(default_factory=dict, init=False)
    _closing: bool = field(default=False, init=False)
    _retirements: set[asyncio.Task[None]] = field(default_factory=set, init=False)

    def live(self, name: str) -> Revision:
        """Return the live revision of `name`. Raise UnknownFunction."""
        return self.get(name).revision

    def get(self, name: str) -> Live:
        """Raise UnknownFunction, or GatewayError while the gateway shuts down."""
        if (live := self._live.get(name)) is None:
            raise UnknownFunction.named(name)
        self._check_open()
        return live

    def all(self) -> list[Live]:
        """Return all functions, sorted by name."""
        return [self._live[name] for name in sorted(self._live)]

    def census(self) -> Mapping[str, Census]:
        """Return the counts of each function."""
        return {name: live.revision.census() for name, live in self._live.items()}

    def note_cold(self, name: str, timeline: Timeline) -> None:
        """Keep the timeline of a cold start of a function, which may be deleted meanwhile."""
        if (live := self._live.get(name)) is not None:
            live.note_cold(timeline)

    def log(self, name: str, text: str) -> None:
        """Write a line into a function's log, as the gateway."""
        if (live := self._live.get(name)) is not None:
            live.logs.write("gateway", text)

    async def deploy(self, request: Deployment) -> Live:
        """Create a revision, prove that it starts, and make it live; the old one drains.

        If that fails, the error is raised and the old revision stays live.
        """
        logs, loop = LogBook(), asyncio.get_running_loop()

        def log(text: str) -> None:
            loop.call_soon_threadsafe(logs.write, "deploy", text)

        staged, fields = await asyncio.to_thread(prepare, self.store, self.environments, request, log)
        name = fields.settings.name
        async with self._locks.setdefault(name, asyncio.Lock()):
            if (old := self._live.get(name)) is not None:
                logs = old.logs
            self._check_open()
            record = await asyncio.to_thread(self.store.place, staged, fields)
            live = await self._create(record, logs)
            try:
                await live.prove(check=request.check)
                self._check_open()
            except BaseException:
                await live.revision.retire(0.0)
                await asyncio.to_thread(self.store.withdraw, record)
                raise
            await self._uninterrupted(self._go_live(name, live, old))
            return live

    async def _go_live(self, name: str, live: Live, old: Live | None) -> None:
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
        """Run a change to its end, even if this caller is cancelled meanwhile."""

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
        """Delete a function: it accepts nothing new, finishes what it accepted, then its files are removed."""
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
        # Before its files: after a crash in between, a new function of this name must not get the old secrets.
        await asyncio.to_thread(self.secrets.forget, name)
        await asyncio.to_thread(self.store.delete, name)

    async def restore(self) -> None:
        """Load what the store holds, without starting a worker; zygotes start in the background."""
        for name, record in (await asyncio.to_thread(self.store.functions)).items():
            self._live[name] = live = await self._create(record, LogBook())
            if record.settings.scale.rest == "zygote":
                self.tasks.create_task(live.revision.pool.zygote.warm())
            live.revision.scale()

    async def close(self) -> None:
        """Refuse new requests, finish the accepted ones, end all processes."""
        self._closing = True
        async with asyncio.TaskGroup() as tasks:
            for live in self._live.values():
                tasks.create_task(live.revision.retire(self.drain_s))
        # Replaced revisions may still be draining.
        if self._retirements:
            await asyncio.wait(self._retirements)

    async def _create(self, record: RevisionRecord, logs: LogBook) -> Live:
        # In threads: both read files.
        spec = await asyncio.to_thread(worker_spec, self.store, record, self.weights.cache)
        # All that the speed of workers depends on, besides the weights and the machine.
        settings = f"{record.settings.concurrency} {record.settings.threads}"
        key = f"{record.code_digest} {record.requirements_digest} {settings}"
        curves = await asyncio.to_thread(LatencyCurveStore.open, self.store.curves, key, spec.manifest)
        if spec.source:
            self.tasks.create_task(self.weights.warm())

        def activated(outcome: str) -> None:
            for callback in self.events.activated:
                callback(record.function, outcome)

        revision = Revision(
            spec,
            policy_of(record),
            self.launcher,
            logs,
            self.tasks,
            activated,
            self.weights,
            lambda: self.secrets.of(record.function),
            curves,
        )
        return Live(record, revision, logs)

    async def _retire(self, name: str, old: Live | None) -> None:
        if old is not None:
            await old.revision.retire(self.drain_s)
        try:
            await asyncio.to_thread(self.store.prune, name)
        # Old files do no harm.
        except (OSError, PilotflameError) as error:
            (old or self._live[name]).logs.write("gateway", f"old revisions were not removed: {error}")
