"""The functions: every deployed name with its live revision. Deploys, replaces, deletes and brings back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
from pydantic import BaseModel, ConfigDict

from ...errors import GatewayError, PilotflameError, UnknownFunction
from ...snapshot.sources.location import shown
from ..access.secrets import Secrets
from ..launching.fetcher_client import FetcherClient
from ..launching.launcher import Launcher
from ..scaling import autoscaler
from ..serving.dispatcher import Policy
from ..serving.latency_curve_store import LatencyCurveStore
from ..serving.revision import Revision
from ..settings.function_settings import FunctionSettings
from ..telemetry.logs import LogBook
from ..telemetry.metrics import Census
from ..telemetry.timeline import Timeline
from .deploy import Deployment, prepare, worker_spec
from .store import RevisionRecord, Store

KEPT_REVISIONS = 5


class Workers(BaseModel):
    """How many workers there are, by state."""

    model_config = ConfigDict(frozen=True)

    ready: int
    starting: int
    draining: int


class Process(BaseModel):
    """One process of a function and what it holds."""

    model_config = ConfigDict(frozen=True)

    pid: int
    role: str
    name: str
    rss_mb: float
    uss_mb: float
    pss_mb: float


class FunctionStatus(BaseModel):
    """What the control routes say of a function."""

    model_config = ConfigDict(frozen=True)

    name: str
    revision: str
    created_at: datetime
    dialect: str = "pilotflame"
    entry: str = ""
    kind: str
    streaming: bool
    batch: int | None
    snapshot: str | None
    workers: Workers
    standby: bool
    zygote: bool
    queued: int
    in_flight: int
    activations: int
    last_cold_start_ms: float | None
    last_cold_start_phases_ms: dict[str, float]
    warnings: list[str]
    settings: FunctionSettings
    input_schema: dict[str, Any]
    output_schema: dict[str, Any]
    processes: list[Process] = []


@dataclass(slots=True)
class Live:
    """A function as it runs now."""

    record: RevisionRecord
    revision: Revision
    logs: LogBook
    warnings: list[str] = field(default_factory=list)
    last_cold: Timeline | None = None


class Functions:
    """All functions of one gateway. Only the event loop's thread touches it."""

    def __init__(
        self,
        store: Store,
        environments: Path,
        launcher: Launcher,
        tasks: asyncio.TaskGroup,
        weights: FetcherClient,
        vault: Secrets,
        *,
        drain_s: float,
    ) -> None:
        self._store = store
        self._environments = environments
        self._launcher = launcher
        self._tasks = tasks
        self._weights = weights
        self._vault = vault
        self._drain_s = drain_s
        self.on_activation: Callable[[str, str], None] = _unheard
        self.on_live: Callable[[str], None] = _ignore
        self.on_gone: Callable[[str], None] = _ignore
        self._live: dict[str, Live] = {}
        self._changing: dict[str, asyncio.Lock] = {}
        self._closing = False
        self._leaving: set[asyncio.Task[None]] = set()

    # -- reading

    def live(self, name: str) -> Revision:
        """The revision that answers for `name` now. Raises UnknownFunction."""
        return self.get(name).revision

    def get(self, name: str) -> Live:
        live = self._live.get(name)
        if live is None:
            raise UnknownFunction.named(name)
        if self._closing:
            raise GatewayError("The gateway is shutting down.", remedy="Send the request to another one.")
        return live

    def all(self) -> list[Live]:
        return [self._live[name] for name in sorted(self._live)]

    def census(self) -> Mapping[str, Census]:
        return {name: live.revision.census() for name, live in self._live.items()}

    def status(self, live: Live, processes: list[Process] | None = None) -> FunctionStatus:
        census, record, cold = live.revision.census(), live.record, live.last_cold
        facts = record.handler
        return FunctionStatus(
            name=record.function,
            revision=record.revision,
            created_at=record.created_at,
            dialect=facts.get("dialect", "pilotflame"),
            entry=facts.get("entry", ""),
            kind=facts.get("kind", "plain"),
            streaming=facts.get("streaming", False),
            batch=facts.get("batch"),
            snapshot=_weights_of(record),
            workers=Workers(ready=census.ready, starting=census.starting, draining=census.draining),
            standby=census.standby,
            zygote=census.zygote,
            queued=census.queued,
            in_flight=census.in_flight,
            activations=live.revision.pool.activations,
            last_cold_start_ms=cold.total_s * 1000 if cold else None,
            last_cold_start_phases_ms={name: s * 1000 for name, s in cold.phases().items()} if cold else {},
            warnings=live.warnings,
            settings=record.settings.model_copy(update={"snapshot": _weights_of(record)})
            if record.snapshot_url
            else record.settings,
            input_schema=facts.get("input_schema", {}),
            output_schema=facts.get("output_schema", {}),
            processes=processes or [],
        )

    def note_cold(self, name: str, timeline: Timeline) -> None:
        """Remembers an invocation that waited for an activation, for `status`."""
        if (live := self._live.get(name)) is not None:
            live.last_cold = timeline

    def say(self, name: str, text: str) -> None:
        """A line of the gateway's in a function's log, if the function is still there."""
        if (live := self._live.get(name)) is not None:
            live.logs.write("gateway", text)

    async def processes(self, live: Live) -> list[Process]:
        """What each process of the function holds; reading it takes the kernel a moment, so in a thread."""
        pool = live.revision.pool
        rows = [(replica.child.pid, "worker", replica.name) for replica in pool.replicas]
        if pool.zygote.standby is not None:
            rows.append((pool.zygote.standby.pid, "standby", pool.zygote.standby.name))
        if pool.zygote.source is not None and pool.zygote.source.forks:
            rows.append((pool.zygote.source.zygote.child.pid, "zygote", "zygote"))
        return await asyncio.to_thread(
            lambda: [found for row in rows if (found := _measure(*row)) is not None]
        )

    # -- changing

    async def deploy(self, order: Deployment) -> Live:
        """Makes a new revision, proves that it starts, and lets it answer from now on; the old one drains.

        Whatever is wrong with it is raised, and the old revision stays as it was.
        """
        logs = LogBook()
        prepared = await asyncio.to_thread(prepare, self._store, self._environments, order, _sayer(logs))
        name = prepared.fields.settings.name
        async with self._changing.setdefault(name, asyncio.Lock()):
            if (old := self._live.get(name)) is not None:
                logs = old.logs
            self._check_open()
            record = await asyncio.to_thread(self._store.place, prepared.staging, prepared.fields)
            live = await self._make(record, logs)
            try:
                await self._prove(live, check=order.check)
                self._check_open()
            except BaseException:
                await live.revision.retire(0.0)
                await asyncio.to_thread(self._store.withdraw, record)
                raise
            await self._to_the_end(self._go_live(name, live, old))
            return live

    async def _go_live(self, name: str, live: Live, old: Live | None) -> None:
        await asyncio.to_thread(self._store.promote, live.record)
        self._live[name] = live
        live.revision.scale()
        live.logs.write("gateway", f"revision {live.record.revision} is live")
        self.on_live(name)
        leaving = self._tasks.create_task(self._retire(name, old))
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)

    async def _to_the_end(self, change: Coroutine[Any, Any, None]) -> None:
        """Runs a change that must not stop half-way, even if its caller leaves meanwhile."""

        async def outcome() -> Exception | None:
            try:
                await change
            except (PilotflameError, OSError) as error:
                return error
            return None

        error = await asyncio.shield(self._tasks.create_task(outcome()))
        if error is not None:
            raise error

    def _check_open(self) -> None:
        if self._closing:
            raise GatewayError("The gateway is shutting down.", remedy="Deploy when it is up again.")

    async def delete(self, name: str) -> None:
        """Takes a function away: nothing new is accepted, what runs is finished, then its files go."""
        live = self.get(name)
        async with self._changing.setdefault(name, asyncio.Lock()):
            if self._live.get(name) is not live:
                raise UnknownFunction(
                    f"Function {name!r} was changed meanwhile.", remedy="Look, and try again."
                )
            await self._to_the_end(self._take_away(name, live))

    async def _take_away(self, name: str, live: Live) -> None:
        del self._live[name]
        self.on_gone(name)
        await live.revision.retire(self._drain_s)
        # Before its files: after a crash between the two, the name must not come back with secrets of nobody's.
        await asyncio.to_thread(self._vault.forget, name)
        await asyncio.to_thread(self._store.delete, name)

    async def restore(self) -> None:
        """Brings back what the store holds, without starting a worker; zygotes follow in the background."""
        for name, record in (await asyncio.to_thread(self._store.functions)).items():
            self._live[name] = live = await self._make(record, LogBook())
            if record.settings.scale.rest == "zygote":
                self._tasks.create_task(live.revision.pool.zygote.warm())
            live.revision.scale()

    async def close(self) -> None:
        """Refuses what is new, finishes what runs, ends all processes."""
        self._closing = True
        async with asyncio.TaskGroup() as tasks:
            for live in self._live.values():
                tasks.create_task(live.revision.retire(self._drain_s))
        if self._leaving:  # revisions that were replaced a moment ago still answer what they have
            await asyncio.wait(self._leaving)

    async def _make(self, record: RevisionRecord, logs: LogBook) -> Live:
        # In a thread: it reads the handler's file.
        spec = await asyncio.to_thread(worker_spec, self._store, record, self._weights.cache)
        if spec.source:
            self._tasks.create_task(self._weights.warm())
        revision = Revision(
            spec,
            policy_of(record),
            self._launcher,
            logs,
            self._tasks,
            lambda outcome: self.on_activation(record.function, outcome),
            self._weights,
            lambda: self._vault.of(record.function),
            await asyncio.to_thread(
                LatencyCurveStore.open, self._store.curves, _pace_of(record), spec.manifest
            ),
        )
        return Live(record, revision, logs)

    async def _prove(self, live: Live, *, check: bool) -> None:
        """Launches the zygote, and one worker to see its setup succeed."""
        source = await live.revision.pool.zygote.open()
        live.record = live.record.model_copy(update={"handler": source.facts})
        live.revision.configure(policy_of(live.record))
        if not source.forks:
            live.warnings.append(f"Workers are spawned, not forked: {source.why_not}.")
        if check:
            await live.revision.try_start()

    async def _retire(self, name: str, old: Live | None) -> None:
        if old is not None:
            await old.revision.retire(self._drain_s)
        try:
            await asyncio.to_thread(self._store.prune, name, KEPT_REVISIONS)
        except (OSError, PilotflameError) as error:  # old files are in nobody's way
            (old or self._live[name]).logs.write("gateway", f"old revisions were not removed: {error}")


def policy_of(record: RevisionRecord) -> Policy:
    """How the gateway treats a revision's invocations."""
    settings, batch = record.settings, record.handler.get("batch") or 1
    scale = settings.scale
    return Policy(
        scale=autoscaler.ScaleSpec(
            scale.min, scale.max, scale.buffer, settings.concurrency * batch, scale.idle_timeout_s
        ),
        timeout_s=settings.timeout_s,
        execution_timeout_s=settings.execution_timeout_s,
        max_batch=batch,
        interruptible=record.handler.get("kind") in ("async", "async_generator"),
        streaming=bool(record.handler.get("streaming")),
        aggregates=bool(record.handler.get("aggregate", True)),
        hold_s=settings.hold_s,
        max_queue=settings.max_queue,
        max_body_bytes=settings.max_body_bytes,
        idempotent=settings.idempotent,
        standby=scale.standby and scale.rest == "zygote",
        keep_zygote=scale.rest == "zygote",
    )


def _pace_of(record: RevisionRecord) -> str:
    """All that the speed of a revision's workers depends on, beside its weights and the machine."""
    return f"{record.code_digest} {record.requirements_digest} {record.settings.concurrency} {record.settings.threads}"


def _weights_of(record: RevisionRecord) -> str | None:
    """Where a revision's weights lie, as it may be shown: a URL may hold credentials."""
    if record.snapshot_url:
        return shown(record.snapshot_url)
    return str(record.snapshot_root) if record.snapshot_root else None


def _sayer(logs: LogBook) -> Callable[[str], None]:
    """Writes to a log book from another thread."""
    loop = asyncio.get_running_loop()
    return lambda text: _ignore(loop.call_soon_threadsafe(logs.write, "deploy", text))


def _ignore(_: object) -> None:
    return None


def _unheard(_function: str, _outcome: str) -> None:
    return None


def _measure(pid: int, role: str, name: str) -> Process | None:
    try:
        memory = psutil.Process(pid).memory_full_info()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None
    mb = 1 << 20
    return Process(
        pid=pid, role=role, name=name,
        rss_mb=round(memory.rss / mb, 1), uss_mb=round(memory.uss / mb, 1), pss_mb=round(memory.pss / mb, 1),
    )  # fmt: skip
