"""Defines the status of a function, and what it consists of, as the control routes return them."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal, Self

from pydantic import BaseModel

from ....snapshot.sources.location import shown
from ...ground.billing.budget import BudgetState
from ...ground.settings.function_settings import FunctionSettings
from ...ground.telemetry.cold_starts import ColdStart
from ...ground.telemetry.invocation_end import Source
from ...ground.telemetry.rung_name import RungName
from .progress import DeployStep, Replaced
from .revision_record import RevisionRecord


class Workers(BaseModel, frozen=True):
    """How many workers there are, by state."""

    ready: int
    parked: int
    """Workers whose weights have given back their device memory. A parked worker wakes faster than a new worker starts."""
    starting: int
    draining: int


class DesiredWorkers(BaseModel, frozen=True):
    """How many workers the live revision should have now, and why (docs/workers.md)."""

    awake: int
    held: int
    """The number of awake and parked workers together."""
    because: list[str]


class Process(BaseModel, frozen=True):
    """One process of a function, and the memory that the process holds."""

    pid: int
    role: str
    name: str
    rss_mb: float
    uss_mb: float
    pss_mb: float


class LastError(BaseModel, frozen=True):
    """An error in the function's log, cut to one line."""

    at: datetime
    source: str
    request_id: str
    text: str


class BudgetUse(BaseModel, frozen=True):
    """How much a function has used of its budget for the day. A limit that is None does not apply."""

    state: BudgetState
    money: float
    money_per_day: float | None
    worker_s: float
    seconds_per_day: float | None


class SourceStatus(BaseModel, frozen=True):
    """The status of an event source of a function. Counts begin when the gateway starts the source."""

    queue: str
    state: Literal["connecting", "connected", "failing"]
    in_flight: int
    completed: int
    left: int
    """The number of messages that stay in the queue, because their job failed or their output could not be sent."""
    lag_s: float | None
    """How long the latest message had waited when the gateway first received it; 0 if the queue was empty after that."""
    backlog: int | None = None
    """About how many messages waited at the last query. The gateway queries this number after a request that returned
    as many messages as requested. 0 after an empty response.
    """
    last_error: str
    """Why the latest request to the queue failed; "" if the latest request succeeded."""
    last_error_at: datetime | None


class ScheduleStatus(BaseModel, frozen=True):
    """A schedule of a function, and the time at which it fires next."""

    cron: str
    timezone: str
    workers: int
    for_s: float
    next_at: datetime | None


class FailingStarts(BaseModel, frozen=True):
    """The starts of workers that have failed since a worker was last ready."""

    failures: int
    next_at: datetime | None
    """Until then no worker starts without a call, and after many failures no worker at all. None if that time is over."""
    error: str


class FunctionStatus(BaseModel, frozen=True):
    """The status of a function, as the control routes return it. Callers that do not own it get the defaults of private fields."""

    name: str
    revision: str
    created_at: datetime
    dialect: str = "pilotflame"
    entry: str = ""
    kind: str
    streaming: bool
    batch: int | None
    snapshot: str | None = None
    snapshots: dict[str, str] = {}
    stopped: str = ""
    """Why the function refuses calls now, as "budget"; "" if it accepts calls."""
    failing: FailingStarts | None = None
    """None if the latest start of a worker succeeded."""
    workers: Workers
    desired: DesiredWorkers
    standby: bool
    zygote: bool
    rung: RungName
    """How warm the function is on this node."""
    next_rung: RungName | None = None
    """The next rung that the keep-alive policy plans, if there is no request before `next_rung_at`."""
    next_rung_at: datetime | None = None
    cold_because: str = ""
    """Without a ready worker: the latest decision of the gateway after which the function held less; "" if unknown."""
    cold_since: datetime | None = None
    """When that was decided."""
    queued: int
    in_flight: int
    activations: int = 0
    """How many workers of this revision were started, without the workers that its deploy started."""
    rest_mb: float | None = None
    """The memory (PSS) of the function's zygote and standby in MiB, at the last measurement."""
    memory_bytes: int | None = None
    """The memory (PSS) of all processes of the function. None if the caller did not ask for it, or if it is not measured yet."""
    last_cold_start_ms: float | None = None
    """How long the latest cold start took, of this revision or an earlier one: from the arrival of the invocation
    until it was sent to the new worker, without the handler's own time."""
    last_cold_start_phases_ms: dict[str, float] = {}
    """The phases that sum to `last_cold_start_ms`."""
    latest_cold_starts: list[ColdStart] = []
    """The latest cold starts, the newest last. Only the status of a single function has them, not the list of all functions."""
    invocations: dict[Source, dict[str, int]] = {}
    """How many invocations have ended since the gateway started, by source and by HTTP status."""
    latency_curve: list[tuple[float, float]] = []
    """Pairs of a batch size and the median seconds that a batch of this size takes."""
    budget: BudgetUse | None = None
    """None if the function has no budget."""
    warnings: list[str] = []
    last_errors: list[LastError] = []
    sources: list[SourceStatus] = []
    schedules: list[ScheduleStatus] = []
    settings: FunctionSettings
    setting_origins: dict[str, str] = {}
    input_schema: dict[str, Any]
    output_schema: dict[str, Any]
    processes: list[Process] = []
    input_example: Any = {}
    """An example of an input that fits `input_schema`."""

    def without_schemas(self) -> Self:
        """Return the status for a list of functions: schemas may be long, and only the function's own page has them."""
        return self.model_copy(update={"input_schema": {}, "output_schema": {}, "input_example": {}})


class Deployed(FunctionStatus, frozen=True):
    """The status of a function after a deploy, and what the deploy did."""

    replaces: Replaced | None
    """The revision that was live before the deploy. None if the deploy has created the function."""
    steps: list[DeployStep]


class Prefetched(BaseModel, frozen=True):
    """What a prefetch has brought to this node. `image` and `snapshot` are None if the function has none.

    `snapshots` has the URLs of named snapshots. `fetched_bytes` counts the bytes fetched for all snapshots.
    """

    function: str
    image: Literal["present", "pulled"] | None = None
    snapshot: str | None = None
    snapshots: dict[str, str] = {}
    fetched_bytes: int = 0


class RevisionFacts(BaseModel, frozen=True):
    """A stored revision of a function. `size_bytes` is the size of the revision's files, without files that a newer
    revision shares.
    """

    revision: str
    number: int
    created_at: datetime
    state: Literal["live", "draining", "stored"]
    code_digest: str
    snapshot: str | None
    snapshots: dict[str, str] = {}
    size_bytes: int

    @classmethod
    def of(cls, record: RevisionRecord, size_bytes: int, *, live: bool, busy: bool) -> RevisionFacts:
        snapshots = snapshots_of(record)
        return cls(
            revision=record.revision, number=record.number, created_at=record.created_at,
            state="live" if live else "draining" if busy else "stored", code_digest=record.code_digest,
            snapshot=snapshots.pop("", None), snapshots=snapshots, size_bytes=size_bytes,
        )  # fmt: skip


def snapshots_of(record: RevisionRecord) -> dict[str, str]:
    """Return the paths or URLs of a revision's weights, by the name of the snapshot. A single unnamed snapshot has the
    name "".

    Credentials in a URL are left out.
    """
    return {
        name: shown(stored.url) if stored.url is not None else str(stored.root)
        for name, stored in record.snapshots.items()
    }
