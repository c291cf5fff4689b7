"""Defines `JobStore`: what any store of jobs does. `sqlite` has the store of one gateway, and `postgres` the store of several.

The methods of `JobStore` are grouped by their users. An id or a state that a method returns is durably stored. With an
`owner`, a method treats jobs of other owners as if they did not exist. All methods raise JobStoreFailed if the store
cannot be read or written.

Claim: `claim` keeps queued jobs for this gateway, so that no other gateway runs them too. `take` starts an attempt of a
claimed job. A job is free again after `unclaim`, after the end of an attempt that queues it again, or when its gateway
is dead.

Repeats: if the answer to `submit`, `start`, `record`, `claim`, `take` or `finish` was lost, the caller may repeat the
call. The repeated call returns what the lost answer said, and nothing is done twice. So the caller makes the id of a
new job, with `new_job_id`.

Fence: the start of an attempt increments the job's `attempts`. The new value is the attempt's fence. The attempt passes
the fence with every change that it requests. So an attempt that reports after its job was requeued changes nothing.

The start of an attempt is stored when the attempt has been sent to a worker, so that no start waits for the store. If
the gateway dies between the sending and the storing, the job runs again, and the first run does not count as an attempt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from ....errors import UnknownJob
from ...ground.access.keys import ALL
from ..webhooks.delivery import Delivery, DeliveryState
from ..webhooks.sender import Outbox
from .alert import Alert
from .job import Job, JobCounts, JobOutcome, JobState, NewJob
from .job_changes import JobChanges


class JobQueries(Protocol):
    """Queries on jobs, webhook deliveries and alerts. Lists have no inputs, outputs and logs."""

    async def get(self, function: str, job_id: str, owner: str = ALL) -> Job:
        """Return an owner's job with its input and result.

        :raises JobExpired: if the job was deleted.
        :raises UnknownJob: if there is no such job.
        :raises JobBodyMissing: if its large input or output is missing.
        """

    async def glance(self, function: str, job_id: str, owner: str = ALL) -> Job:
        """Return an owner's job without input, output and logs. Raise JobExpired or UnknownJob."""

    async def glance_any(self, job_id: str) -> Job:
        """Return the job with this id, of any function and owner, without input, output and logs. Raise UnknownJob."""

    async def glances(self, job_ids: Collection[str]) -> list[Job]:
        """Return the jobs with these ids, of any functions and owners, without input, output and logs. Leave out unknown ids."""

    async def find(
        self, job_id: str, allows: Callable[[str], bool], among: Collection[str], owner: str = ALL
    ) -> Job:
        """Return the owner's job with this id if `allows(function)` is true for its function.

        If there is no such job, raise UnknownJob, or JobExpired if it was deleted and belonged to a function in `among`.
        Raise JobBodyMissing if its large input or output is missing.
        """

    async def newest(
        self, function: str, states: Collection[JobState] = (), limit: int = 100, before_id: str = "",
        owner: str = ALL,
    ) -> list[Job]:  # fmt: skip
        """Return up to `limit` of the owner's jobs in these states (default: all), the newest first.

        With `before_id`, return only jobs that are older than that job. Raise JobExpired or UnknownJob if that job is missing.
        """

    async def latest(
        self, functions: Collection[str], limit: int, before_id: str = "", owner: str = ALL
    ) -> list[Job]:
        """Return up to `limit` of the owner's jobs of these functions, the newest first. Raise UnknownJob if
        `before_id` is not the id of such a job.
        """

    async def newer_ids(
        self, functions: Collection[str], limit: int, than_id: str, owner: str = ALL
    ) -> list[str]:
        """Return the ids of the owner's jobs of these functions that are newer than `than_id`: the `limit` oldest, oldest
        first. If there is no job `than_id`, the list is empty.
        """

    async def pieces(self, job_id: str, after: int, limit: int = 1000) -> list[tuple[int, bytes]]:
        """Return (number, piece) for the pieces of a streamed output that follow the number `after`.

        The list has at most `limit` pieces, and a few MiB.
        """

    async def counts(self, function: str, owner: str = ALL) -> JobCounts:
        """Return how many jobs of a function an owner has in each state."""

    async def all_counts(self) -> dict[str, JobCounts]:
        """Return how many jobs each function has in each state."""

    async def functions_waiting(self) -> list[str]:
        """Return the functions that have jobs in the queue, sorted."""

    async def deliveries(
        self, function: str, states: Sequence[DeliveryState] = (), subject: str = "", limit: int = 100,
        owner: str = ALL,
    ) -> list[Delivery]:  # fmt: skip
        """Return up to `limit` deliveries of the owner's jobs and functions in these states (default: all), newest first.

        With `subject`, return only the deliveries of this subject. The bodies are left out.
        """

    async def pending_deliveries(self) -> dict[str, int]:
        """Return how many deliveries of each function must still be sent, now or later."""

    async def begun_alerts(self) -> list[tuple[str, str]]:
        """Return (function, condition) of the alerts that have begun and not ended."""

    async def stored_bytes(self, *owners: str) -> dict[str, int]:
        """Return the bytes of inputs and results of each owner, by default of all owners. `ALL` has the sum."""


class JobRequests(Protocol):
    """The changes that callers request."""

    async def submit(self, new: NewJob, job_id: str = "") -> tuple[Job, bool]:
        """Queue a new job and return (job, False).

        If a job with the same idempotency key exists, return (that job, True) and queue nothing. The new job has the id
        `new.wanted_id`, else `job_id`. Without both, the store makes an id. Only calls with `job_id` and without
        `new.wanted_id`, or with an idempotency key, may be repeated. If the new job has `new.wanted_id`, the repeated call returns True.

        :raises IdempotencyConflict: if the job with the same key has another input.
        :raises JobConflict: if another job has the id: of another function or owner, or with another input.
        :raises QueueFull: if the job would exceed the limits `max_queued` or `max_queued_bytes` of `new`, or
            `most_stored_bytes`.
        """

    async def cancel(self, function: str, job_id: str, owner: str = ALL) -> Job:
        """End a job as CANCELLED unless it is already final, and return it. Raise the errors of `get`."""

    async def retry(self, function: str, job_id: str, owner: str = ALL) -> Job:
        """Queue a FAILED or TIMED_OUT job again under its id, with new attempts and a new ttl. Return the job.

        Raise JobConflict if the job is in another state or its function was deleted, or the errors of `get`.
        """

    async def purge(self, function: str, owner: str = ALL, *, running: bool = False) -> int:
        """Cancel an owner's queued jobs. Return their number.

        With `running`, which is for a deleted function, also cancel the running jobs, and forbid the retry of ended jobs. Count
        all of them. Jobs that are submitted after the start of the purge are not cancelled.
        """

    async def redeliver(self, function: str, delivery_id: str, owner: str = ALL) -> Delivery:
        """Make a delivery pending again, with the same id and a new count of attempts, and return it.

        Raise UnknownDelivery if the owner has no delivery with this id.
        """

    async def alert(self, alert: Alert) -> None:
        """Add the delivery of an alert, and store whether its condition has begun."""

    async def drop_alerts(self, function: str, conditions: Collection[str]) -> None:
        """Delete the records that these conditions of a function have begun, so that no alert is sent for their ends."""


class AttemptStore(Protocol):
    """What the dispatcher and its attempts need."""

    async def claim(
        self, function: str, limit: int, now_s: float, known: Collection[str] = (), after: str = "",
        most_bytes: float = math.inf,
    ) -> list[Job]:  # fmt: skip
        """Claim up to `limit` queued jobs that may start, and return them by priority. Within a priority, the owners take turns.

        The first turn belongs to the next owner after `after`, by id. The jobs of one owner are in the order of their arrival.
        Jobs whose ttl has passed, jobs that another gateway has claimed, and jobs with an id in `known` are left out. Jobs that this
        gateway has claimed before are returned again. The list ends with the job whose input makes
        the size of all inputs reach `most_bytes`. A job whose large input is missing is not returned, but ends as FAILED.
        """

    async def unclaim(self, job_ids: Collection[str]) -> None:
        """Let any gateway claim these jobs, unless they have been taken or have ended."""

    async def next_due(self, function: str, after_s: float = 0.0) -> float | None:
        """Return the earliest time after `after_s` at which a delayed job may start, or None."""

    async def take(self, job_id: str, worker: str = "") -> int | None:
        """Start an attempt on `worker` and return its fence. Return None if the job is not in the queue.

        If an attempt of this gateway runs on `worker` already, return its fence: an earlier call has started it.
        """

    async def start(self, new: NewJob, job_id: str, worker: str) -> int | None:
        """Store a new job whose first attempt has been sent to `worker`, and return what `take` returns."""

    async def admit(self, new: NewJob, job_id: str) -> Job:
        """Store a new job that already waits in its revision's queue. Raise the errors of `submit`."""

    async def record(self, new: NewJob, job: Job, outcome: JobOutcome) -> Job:
        """Store a new job without webhook whose first attempt has ended, and its result. Return the job.

        `job` has the id of the job, and the attempt's worker and times.
        """

    async def finish(self, job_id: str, fence: int, outcome: JobOutcome) -> bool:
        """End the attempt `fence` and its job. Return False if this is no longer the job's running attempt, unless it
        has ended the job with this outcome. If `requeue_dead` has queued the job again, and the attempt had stored
        no pieces, the attempt may still end the job while it waits.

        Raise JobConflict if the state of the outcome is not final.
        """

    async def requeue(
        self, job_id: str, fence: int, failure: JobOutcome, delay_s: float, *, counted: bool
    ) -> bool:
        """End the attempt `fence` and queue the job again, to start after `delay_s`.

        If this was the last attempt that the job may have, end the job with `failure` instead. With `counted=False`, the
        job may have one attempt more. This is for a failure that the job did not cause. Return False if this is no longer
        the job's running attempt.
        """

    async def add_pieces(self, job_id: str, fence: int, first_number: int, pieces: Sequence[bytes]) -> bool:
        """Store pieces of a streamed output. Pieces are numbered from 1, and `pieces[0]` has `first_number`.

        Pieces that are already stored are skipped. Return False if the job's running attempt does not have
        this fence any more. Raise JobConflict if there would be a gap between the stored pieces and `first_number`.
        """

    async def set_progress(self, job_id: str, fence: int, progress: bytes) -> bool:
        """Store a progress report. Return False if the job's running attempt does not have this fence any more."""

    async def tell_logs(self, job_id: str, fence: int, logs: str) -> bool:
        """Add the webhook delivery of "logs". Return False if the job's running attempt does not have this fence any more."""


class JobStore(JobQueries, JobRequests, AttemptStore, Outbox, Protocol):
    """The stored jobs of all functions, with their webhook deliveries."""

    on_commit: Callable[[JobChanges], object]
    """The event loop calls this function after each commit of a change, even if the caller of the change was cancelled."""
    most_stored_bytes: int
    """The limit of `StoredBytes`. `submit` raises QueueFull above it."""

    async def open(self) -> None:
        """Open the store, and create or upgrade its tables. Call this before any other method."""

    async def close(self) -> None:
        """Finish all calls that have begun. Later calls raise JobStoreFailed."""

    async def requeue_dead(self, *, expired: bool = True) -> tuple[int, int]:
        """Free the jobs that dead gateways have claimed, and queue the jobs again that dead gateways ran. End a job as
        FAILED if it has no attempt left.

        A gateway is dead if it is no longer a member or, with `expired`, if its lease has ended. Return how many jobs
        are queued again, and how many have FAILED.
        """

    async def free_bytes(self) -> int:
        """Return how many bytes are free on the disk with the jobs."""

    async def next_expiry(self, now_s: float) -> float:
        """Return the time at which `expire` has something to do, or infinity if nothing will expire."""

    async def expire(self, limit: int = 200) -> int:
        """Time out queued jobs whose ttl has passed, and delete ended jobs whose retention has passed.

        One call handles at most `limit` jobs, and returns how many it handled. Call it again as long as `next_expiry` returns
        a time that has passed.
        """

    async def shift(self, by_s: float, follow: Callable[[], object]) -> None:
        """Add `by_s`, the seconds by which the clock was set, to the times at which waits end and at which unfinished
        jobs began to wait.

        Then call `follow` before any other change, so that the clock of the store has the same shift.
        """


def unknown_job(job_id: str) -> UnknownJob:
    """Return the same error for unknown jobs and for jobs of other callers, so that it does not reveal which ids exist."""
    return UnknownJob(
        f"There is no job {job_id[:128]!r}.", remedy="Check the id, and which functions the API key covers."
    )
