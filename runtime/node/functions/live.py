"""Represents a deployed function with its live revision, and makes the function's status for the control routes."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from statistics import fmean

import psutil

from ...calls.serving.dispatcher import Policy
from ...ground.billing.budget import BudgetSpec
from ...ground.settings.scale_spec import WINDOW_S, ScaleSpec
from ...ground.telemetry.decisions import describe
from ...ground.telemetry.log_files import LogLine, LogQuery, function_file
from ...ground.telemetry.logs import LogChannel, Logs
from ...ground.telemetry.rung_name import RungName
from ..reconciling.function import Function
from ..reconciling.revision_workers import RevisionWorkers
from ..scaling.measured_ladder import PLANNED, LadderSpec
from ..scaling.rung_figures import HoldingPrices
from .progress import DeployProgress
from .revision_record import RevisionRecord
from .status import (
    BudgetUse,
    DesiredWorkers,
    FailingStarts,
    FunctionStatus,
    LastError,
    Process,
    ScheduleStatus,
    Workers,
    snapshots_of,
)

# How many of the latest errors the status shows, and how many characters of each.
LAST_ERRORS = 5
MAX_ERROR_CHARS = 500
# A function is light if its zygote takes at most this time to import and build the handler.
LIGHT_S = 0.25


# The facts of a handler that the status shows, and the values that it shows until the facts are known.
_FACTS = {"dialect": "pilotflame", "entry": "", "kind": "plain", "streaming": False, "batch": None, "input_schema": {},
          "output_schema": {}, "input_example": {}}  # fmt: skip


class Live:
    """A deployed function: the record of a revision, the revision with its workers, and the function's log.

    During a deploy, there is a Live for the new revision before that revision is live.
    """

    def __init__(
        self, record: RevisionRecord, workers: RevisionWorkers, logs: LogChannel, told: Callable[[], list[str]] = list
    ) -> None:  # fmt: skip
        """`told` returns the present warnings that gateways with the same database do not serve the latest change of
        the function.
        """
        self.record, self._told = record, told
        self.workers, self.revision = workers, workers.revision
        self.logs = logs
        self.warnings = list(record.warnings)
        self.since_s = time.monotonic()
        """When this object was made, in monotonic seconds."""
        self._rest_mb: float | None = None

    @property
    def function(self) -> Function:
        """The Function object that all revisions of the function share."""
        return self.workers.function

    def builds_within(self, seconds: float) -> bool:
        """Return True if the zygote took at most `seconds` to import and build the handler."""
        return bool(self.record.handler.get("build_s", math.inf) <= seconds)

    @property
    def devices(self) -> float:
        """The mean number of GPUs that a worker of the function has. A worker with a share of a GPU's memory counts as
        this share.
        """
        held = [self.workers.inventory.devices(replica) for replica in self.workers.replicas]
        return fmean(held) if held else 0.0

    @property
    def unavailable(self) -> str:
        """Why calls of the function fail now; "" if they do not. A function without workers is available: a call starts one."""
        if stopped := self.function.stopped:
            return f"The function is stopped: {stopped}."
        if not self.workers.worker_counts().ready and self.workers.breaker.failures:
            return "The latest starts of its workers have failed."
        return ""

    def open_account(self) -> None:
        """Give the function's account the budget of this revision, which is live now."""
        budget = self.record.settings.budget
        spec = BudgetSpec(budget.money_per_day, budget.seconds_per_day)
        self.function.account.open(spec, self.record.deployed_by)

    def budget(self) -> BudgetUse | None:
        """Return how much of the budget is used today; None if there is no budget."""
        account = self.function.account
        limits = account.budget
        if not account.limited:
            return None
        account.check()
        return BudgetUse(
            state=account.state, money=account.spent.money, money_per_day=limits.money_per_day,
            worker_s=account.spent.seconds, seconds_per_day=limits.seconds_per_day,
        )  # fmt: skip

    def note_rest(self, held_mb: float) -> None:
        """Record how much memory the zygote and the standby hold. `status` shows it."""
        self._rest_mb = held_mb

    async def prove(self, *, check: bool, progress: DeployProgress, ready: int = 0) -> None:
        """Start the zygote and, with `check`, a worker. Raise the error if one of them fails to start.

        With `check`, also start further workers, so that there are `ready` in all, as far as `scale.max` and the other
        limits allow. These workers stay when the revision goes live. The zygote also reports the facts of the handler.
        This method puts them into the record, and configures the policy with them.
        """
        began_s = time.monotonic()
        progress.begin("import")
        with self.logs.listen(lambda line: _tell_warning(progress, line)):
            source = await self.workers.carry_out.open()
        build_s = float(source.facts.get("build_s", 0.0)) - float(source.facts.get("import_s", 0.0))
        progress.add("import", time.monotonic() - began_s - build_s)
        progress.add("build", build_s)
        if source.spawn_reason:
            self.warnings.append(f"Workers are spawned, not forked: {source.spawn_reason}.")
        self.warnings += source.facts.get("notes", ())
        if source.facts.get("streaming") and self.record.settings.response_cache.ttl_s is not None:
            self.warnings.append("response_cache has no effect: the handler streams its output.")
        # Put the warnings into the record, which is stored when the revision goes live. So the status still shows them
        # after a restart of the gateway.
        found = {"handler": source.facts, "warnings": tuple(self.warnings)}
        self.record = self.record.model_copy(update=found)
        self.revision.configure(policy_of(self.record))
        if check:
            with progress.step("proof start"):
                await self.workers.prove(min(ready, self.record.settings.scale.max))

    def limit_batches(self, most: int | None) -> None:
        """From now on, form batches of at most `most` invocations. If `most` is None, only the handler limits batches."""
        self.revision.configure(policy_of(self.record, most))

    @property
    def rest_mb(self) -> float | None:
        """The memory of the zygote and the standby in MiB, when it was last measured."""
        return round(self._rest_mb, 1) if self._rest_mb is not None else None

    def last_cold_phases_ms(self) -> dict[str, float]:
        """Return the milliseconds of each phase of the latest cold start, or nothing if there was none."""
        latest = self.function.cold_starts.latest
        phases = latest.cold_start_phases() if latest is not None else {}
        return {name: seconds * 1000 for name, seconds in phases.items()}

    async def last_errors(self, logs: Logs) -> list[LastError]:
        """Return the latest errors in the function's log, the newest last."""
        query = LogQuery(LAST_ERRORS, level="error", since_deletion=True)
        lines = await logs.history(function_file(self.record.function), query)
        return [
            LastError(
                at=datetime.fromtimestamp(line.at, UTC), source=line.source, request_id=line.request_id,
                text=line.text.partition("\n")[0][:MAX_ERROR_CHARS],
            )
            for line in lines
        ]  # fmt: skip

    def status(self, processes: Sequence[Process] = ()) -> FunctionStatus:
        """Return the status of the function. `processes` are its processes with their memory, if the caller has
        measured them.
        """
        record, worker_counts, cold = (
            self.record,
            self.workers.worker_counts(),
            self.function.cold_starts.latest,
        )
        facts, settings = record.handler, record.settings
        budget, account = self.budget(), self.function.account
        told = (account.describe() if account.scarce else "", self.function.barred)
        warnings = [*self.warnings, *filter(None, told), *self._told()]
        snapshots, step = snapshots_of(record), self.function.ladder.next_step
        # Show the URLs of snapshots without their credentials.
        settings = settings.with_snapshots({name: snapshots[name] for name in settings.snapshot_urls})
        snapshot = snapshots.pop("", None)
        cooled, cooled_at = self.cooled
        return FunctionStatus(
            name=record.function, revision=record.revision, created_at=record.created_at, snapshot=snapshot,
            snapshots=snapshots, stopped=self.function.stopped, failing=self.failing(), workers=Workers(
                ready=worker_counts.ready, parked=worker_counts.parked, starting=worker_counts.starting, draining=worker_counts.draining
            ),
            cold_because=cooled, cold_since=cooled_at,
            desired=self.desired(), standby=worker_counts.standby, zygote=worker_counts.zygote, rung=self.workers.inventory.stands_on,
            next_rung=step.rung if step else None, next_rung_at=datetime.fromtimestamp(step.at, UTC) if step else None,
            queued=worker_counts.queued, in_flight=worker_counts.in_flight,
            activations=self.workers.inventory.activations,
            rest_mb=self.rest_mb,
            last_cold_start_ms=cold.cold_start_s * 1000 if cold else None,
            last_cold_start_phases_ms=self.last_cold_phases_ms(),
            schedules=self.schedules(datetime.now(UTC)),
            latency_curve=[(point.size, point.p50_s) for point in self.revision.dispatcher.durations.learned],
            budget=budget, warnings=warnings, settings=settings, setting_origins=record.setting_origins, processes=list(processes),
            **{key: facts.get(key, missing) for key, missing in _FACTS.items()},
        )  # fmt: skip

    @property
    def cooled(self) -> tuple[str, datetime | None]:
        """Why the function has no ready worker, and since when: the latest decision after which it used less memory.
        The text is "" if the function has a ready worker, or if the reason is not known.
        """
        decision, counts = self.function.decisions.cooled, self.workers.worker_counts()
        if counts.ready:
            return "", None
        if decision is None:
            if counts.starting or counts.queued or self.unavailable or self.workers.inventory.activations:
                return "", None
            since = datetime.fromtimestamp(time.time() - (time.monotonic() - self.since_s), UTC)
            return "has had no call since its deploy or the start of the gateway", since
        return describe(decision), datetime.fromtimestamp(decision.at, UTC)

    def failing(self) -> FailingStarts | None:
        """Return the failed starts since a worker was last ready; None if there is none."""
        breaker = self.workers.breaker
        if breaker.error is None:
            return None
        wait_s = breaker.backoff_until_s - time.monotonic()
        next_at = datetime.fromtimestamp(time.time() + wait_s, UTC) if wait_s > 0 else None
        error = breaker.error.whole.message.partition("\n")[0][:MAX_ERROR_CHARS]
        return FailingStarts(failures=breaker.failures, next_at=next_at, error=error)

    def desired(self) -> DesiredWorkers:
        """Return how many workers the revision should have now, and why."""
        row, limit = self.workers.observed.desired(), self.workers.reached
        replicas = self.workers.replicas
        missing = row.awake - len(replicas.ready) - replicas.starting
        limits = (
            [f"{limit.name} ({limit.most}) refuses {missing}"] if limit is not None and missing > 0 else []
        )
        because = [*row.reasons(time.monotonic()), *limits]
        return DesiredWorkers(awake=row.awake, held=row.held, because=because)

    def schedules(self, now: datetime) -> list[ScheduleStatus]:
        """Return the function's schedules, and when each of them fires next."""
        return [
            ScheduleStatus(next_at=schedule.next_fire(now), **dict(schedule))
            for schedule in self.record.settings.schedule
        ]

    async def processes(self) -> list[Process]:
        """Measure the memory of the function's processes, in a thread, because the system calls take long."""
        rows = self.workers.inventory.processes()
        return await asyncio.to_thread(lambda: [process for row in rows for process in memory_of(*row)])


def policy_of(record: RevisionRecord, most_batch: int | None = None) -> Policy:
    """Return the policy by which the gateway queues, sends and limits the invocations of a revision.

    A batch has at most `most_batch` invocations, and at most as many as the handler takes.
    """
    settings, batch = record.settings, record.handler.get("batch") or 1
    batch = min(batch, most_batch or batch)
    scale, in_flight = settings.scale, settings.concurrency * batch
    timeout_s = scale.idle_timeout_s
    return Policy(
        settings,
        ScaleSpec(
            scale.min, scale.max, scale.buffer, in_flight, WINDOW_S if timeout_s is None else timeout_s,
            WINDOW_S if timeout_s is None else min(timeout_s, WINDOW_S),
            math.inf if scale.park_after_s is None else scale.park_after_s,
        ),
        max_batch=batch,
        streaming=bool(record.handler.get("streaming")),
        aggregates=bool(record.handler.get("aggregate", True)),
        owner=record.deployed_by,
    )  # fmt: skip


def _tell_warning(progress: DeployProgress, line: LogLine) -> None:
    """If a log line is a warning of the gateway, add it to the progress of the deploy, which waits for an import or a
    build.
    """
    if (line.source, line.level) == ("gateway", "warning"):
        progress.note(line.text)


def ladder_spec_of(record: RevisionRecord, prices: HoldingPrices) -> LadderSpec:
    """Return the rungs that the owner of a revision allows, and the prices of holding and of waiting."""
    scale = record.settings.scale
    held = {RungName.ZYGOTE: scale.rest == "zygote", RungName.RESIDENT: bool(record.settings.snapshot_urls)}
    rungs = tuple(rung for rung in PLANNED if held.get(rung, True))
    planned = scale.idle_timeout_s is None and not scale.min
    return LadderSpec(rungs, prices, planned=planned, slow_share=scale.slow_share)


def memory_of(pid: int, role: str, name: str) -> Iterator[Process]:
    """Yield the process with its memory. Yield nothing if the process has ended or may not be measured."""
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        memory = psutil.Process(pid).memory_full_info()
        sizes = {f"{kind}_mb": round(getattr(memory, kind) / (1 << 20), 1) for kind in ("rss", "uss", "pss")}
        yield Process(pid=pid, role=role, name=name, **sizes)
