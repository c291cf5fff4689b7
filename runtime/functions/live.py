"""A deployed function as it runs now, and its status for the control routes."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Any

import psutil
from pydantic import BaseModel, ConfigDict

from ...snapshot.sources.location import shown
from ..scaling.autoscaler import ScaleSpec
from ..serving.dispatcher import Policy
from ..serving.revision import Revision
from ..settings.function_settings import FunctionSettings
from ..telemetry.logs import LogBook
from ..telemetry.timeline import Timeline
from .store import RevisionRecord


class Workers(BaseModel):
    """How many workers there are, by state."""

    model_config = ConfigDict(frozen=True)

    ready: int
    starting: int
    draining: int


class Process(BaseModel):
    """One process of a function and the memory it holds."""

    model_config = ConfigDict(frozen=True)

    pid: int
    role: str
    name: str
    rss_mb: float
    uss_mb: float
    pss_mb: float


class FunctionStatus(BaseModel):
    """The status of a function, as the control routes return it."""

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


class Live:
    """A function with its live revision."""

    def __init__(self, record: RevisionRecord, revision: Revision, logs: LogBook) -> None:
        self.record = record
        self.revision = revision
        self.logs = logs
        self.warnings: list[str] = []
        self._last_cold: Timeline | None = None
        self._configure()

    def _configure(self) -> None:
        """Tell the revision what is known of its handler."""
        self.revision.configure(policy_of(self.record))

    async def prove(self, *, check: bool) -> None:
        """Start the zygote, and with `check` a worker, to see that both succeed."""
        source = await self.revision.pool.zygote.open()
        self.record = self.record.model_copy(update={"handler": source.facts})
        self._configure()
        if source.spawn_reason:
            self.warnings.append(f"Workers are spawned, not forked: {source.spawn_reason}.")
        if check:
            await self.revision.try_start()

    def note_cold(self, timeline: Timeline) -> None:
        """Keep the timeline of a cold start for the status."""
        self._last_cold = timeline

    def status(self, processes: list[Process] | None = None) -> FunctionStatus:
        """Return the status, with `processes` if they were measured."""
        record, census, cold, facts = (
            self.record,
            self.revision.census(),
            self._last_cold,
            self.record.handler,
        )
        snapshot, settings = _shown_snapshot(record), record.settings
        if record.snapshot_url:
            settings = settings.model_copy(update={"snapshot": snapshot})
        return FunctionStatus(
            name=record.function,
            revision=record.revision,
            created_at=record.created_at,
            dialect=facts.get("dialect", "pilotflame"),
            entry=facts.get("entry", ""),
            kind=facts.get("kind", "plain"),
            streaming=facts.get("streaming", False),
            batch=facts.get("batch"),
            snapshot=snapshot,
            workers=Workers(ready=census.ready, starting=census.starting, draining=census.draining),
            standby=census.standby,
            zygote=census.zygote,
            queued=census.queued,
            in_flight=census.in_flight,
            activations=self.revision.pool.activations,
            last_cold_start_ms=cold.total_s * 1000 if cold else None,
            last_cold_start_phases_ms={name: s * 1000 for name, s in cold.phases().items()} if cold else {},
            warnings=self.warnings,
            settings=settings,
            input_schema=facts.get("input_schema", {}),
            output_schema=facts.get("output_schema", {}),
            processes=processes or [],
        )

    async def processes(self) -> list[Process]:
        """Measure each process of the function, in a thread because the kernel takes a while."""
        pool = self.revision.pool
        rows = [(replica.child.pid, "worker", replica.name) for replica in pool.replicas]
        zygote = pool.zygote
        if zygote.standby is not None:
            rows.append((zygote.standby.pid, "standby", zygote.standby.name))
        if zygote.source is not None and zygote.source.zygote_pid is not None:
            rows.append((zygote.source.zygote_pid, "zygote", "zygote"))
        measured = await asyncio.to_thread(lambda: [_measure(*row) for row in rows])
        return [process for process in measured if process is not None]


def policy_of(record: RevisionRecord) -> Policy:
    """Return how the gateway treats a revision's invocations."""
    settings, batch = record.settings, record.handler.get("batch") or 1
    scale = settings.scale
    return Policy(
        scale=ScaleSpec(
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


def _shown_snapshot(record: RevisionRecord) -> str | None:
    """Return where a revision's weights are, without the credentials that a URL may hold."""
    if record.snapshot_url:
        return shown(record.snapshot_url)
    return str(record.snapshot_root) if record.snapshot_root else None


def _measure(pid: int, role: str, name: str) -> Process | None:
    try:
        memory = psutil.Process(pid).memory_full_info()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None
    sizes = {f"{kind}_mb": round(getattr(memory, kind) / (1 << 20), 1) for kind in ("rss", "uss", "pss")}
    return Process(pid=pid, role=role, name=name, **sizes)
