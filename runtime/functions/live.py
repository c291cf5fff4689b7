"""Holds a deployed function with its live revision, and describes its status for the control routes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import psutil
from pydantic import BaseModel

from ...snapshot.sources.location import shown
from ..scaling.autoscaler import ScaleSpec
from ..serving.dispatcher import Policy
from ..serving.revision import Revision
from ..settings.function_settings import FunctionSettings
from ..telemetry.log_files import LogQuery, function_file
from ..telemetry.logs import LogBook, Logs
from ..telemetry.timeline import Timeline
from .store import RevisionRecord

# How many of the latest errors the status shows, and how much of each.
LAST_ERRORS = 5
MAX_ERROR_CHARS = 500


class Workers(BaseModel, frozen=True):
    """How many workers there are, by state."""

    ready: int
    starting: int
    draining: int


class Process(BaseModel, frozen=True):
    """One process of a function and the memory it holds."""

    pid: int
    role: str
    name: str
    rss_mb: float
    uss_mb: float
    pss_mb: float


class LastError(BaseModel, frozen=True):
    """What the function's log says of a failure, in one line."""

    at: datetime
    source: str
    request_id: str
    text: str


class FunctionStatus(BaseModel, frozen=True):
    """The status of a function, as the control routes return it."""

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
    last_errors: list[LastError] = []
    settings: FunctionSettings
    input_schema: dict[str, Any]
    output_schema: dict[str, Any]
    processes: list[Process] = []


# The facts of a handler that the status shows. These values are shown until the facts are known.
_FACTS = {"dialect": "pilotflame", "entry": "", "kind": "plain", "streaming": False, "batch": None, "input_schema": {},
          "output_schema": {}}  # fmt: skip


class Live:
    """A deployed function: the record of a revision, the revision itself, and the function's log.

    During a deploy there is such an object for the new revision before it is live.
    """

    def __init__(self, record: RevisionRecord, revision: Revision, logs: LogBook) -> None:
        self.record = record
        self.revision = revision
        self.logs = logs
        self.warnings = list(record.warnings)
        self._last_cold: Timeline | None = None

    async def prove(self, *, check: bool) -> None:
        """Start the zygote and, with `check`, a worker. Raise the error if one of them fails to start.

        The zygote also tells the facts of the handler. They are put into the record and the policy.
        """
        source = await self.revision.pool.zygote.open()
        if source.spawn_reason:
            self.warnings.append(f"Workers are spawned, not forked: {source.spawn_reason}.")
        # The record is stored when the revision goes live, so the warnings survive a restart.
        found = {"handler": source.facts, "warnings": tuple(self.warnings)}
        self.record = self.record.model_copy(update=found)
        self.revision.configure(policy_of(self.record))
        if check:
            await self.revision.try_start()

    def note_cold(self, timeline: Timeline) -> None:
        """Remember the timeline of the latest cold start, which `status` shows."""
        self._last_cold = timeline

    async def last_errors(self, logs: Logs) -> list[LastError]:
        """Return the latest errors in the function's log, the newest last."""
        query = LogQuery(LAST_ERRORS, level="error")
        lines = await logs.history(function_file(self.record.function), query)
        return [
            LastError(
                at=datetime.fromtimestamp(line.at, UTC), source=line.source, request_id=line.request_id,
                text=line.text.partition("\n")[0][:MAX_ERROR_CHARS],
            )
            for line in lines
        ]  # fmt: skip

    def status(self, processes: list[Process] | None = None) -> FunctionStatus:
        """Return the status of the function. It shows `processes` if these were measured."""
        record, census, cold = self.record, self.revision.census(), self._last_cold
        facts, settings = record.handler, record.settings
        snapshot = str(record.snapshot_root) if record.snapshot_root else None
        if record.snapshot_url:
            # The URL may hold credentials, which `shown` removes.
            snapshot = shown(record.snapshot_url)
            settings = settings.model_copy(update={"snapshot": snapshot})
        return FunctionStatus(
            name=record.function, revision=record.revision, created_at=record.created_at, snapshot=snapshot,
            workers=Workers(ready=census.ready, starting=census.starting, draining=census.draining),
            standby=census.standby, zygote=census.zygote, queued=census.queued, in_flight=census.in_flight,
            activations=self.revision.pool.activations,
            last_cold_start_ms=cold.total_s * 1000 if cold else None,
            last_cold_start_phases_ms={name: s * 1000 for name, s in cold.phases().items()} if cold else {},
            warnings=self.warnings, settings=settings, processes=processes or [],
            **{key: facts.get(key, missing) for key, missing in _FACTS.items()},
        )  # fmt: skip

    async def processes(self) -> list[Process]:
        """Measure the memory of the function's processes, in a thread, since that takes long system calls."""
        pool = self.revision.pool
        rows = [(replica.child.pid, "worker", replica.name) for replica in pool.replicas]
        zygote = pool.zygote
        if zygote.standby is not None:
            rows.append((zygote.standby.pid, "standby", zygote.standby.name))
        if zygote.source is not None and zygote.source.zygote_pid is not None:
            rows.append((zygote.source.zygote_pid, "zygote", "zygote"))
        return await asyncio.to_thread(lambda: [process for row in rows for process in _measure(*row)])


def policy_of(record: RevisionRecord) -> Policy:
    """Return the policy by which the gateway queues, sends and limits the invocations of a revision."""
    settings, batch = record.settings, record.handler.get("batch") or 1
    scale, in_flight = settings.scale, settings.concurrency * batch
    return Policy(
        scale=ScaleSpec(scale.min, scale.max, scale.buffer, in_flight, scale.idle_timeout_s),
        timeout_s=settings.timeout_s, execution_timeout_s=settings.execution_timeout_s, max_batch=batch,
        interruptible=record.handler.get("kind") in ("async", "async_generator"),
        streaming=bool(record.handler.get("streaming")),
        aggregates=bool(record.handler.get("aggregate", True)), idempotent=settings.idempotent,
        hold_s=settings.hold_s, max_queue=settings.max_queue, max_body_bytes=settings.max_body_bytes,
        standby=scale.standby and scale.rest == "zygote", keep_zygote=scale.rest == "zygote",
    )  # fmt: skip


def _measure(pid: int, role: str, name: str) -> Iterator[Process]:
    """Yield the process with its memory. Yield nothing if it has ended or may not be measured."""
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        memory = psutil.Process(pid).memory_full_info()
        sizes = {f"{kind}_mb": round(getattr(memory, kind) / (1 << 20), 1) for kind in ("rss", "uss", "pss")}
        yield Process(pid=pid, role=role, name=name, **sizes)
