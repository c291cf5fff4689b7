"""A model of the store of jobs: the same behaviour with jobs in a dictionary, without disk and indexes."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from job_store_tests import KEEP_S
from pilotflame.errors import IdempotencyConflict, JobConflict, JobExpired, PilotflameError, UnknownJob
from pilotflame.runtime.ground.access.keys import ALL
from pilotflame.runtime.jobs.stored.job import JobCounts, JobOutcome, JobState, NewJob
from pilotflame.runtime.jobs.stored.large_bodies import UNSENT_S

QUEUED, RUNNING = JobState.IN_QUEUE, JobState.IN_PROGRESS


@dataclass
class ModelJob:
    """A job of the model."""

    new: NewJob
    number: int
    created_s: float
    stale_s: float
    max_attempts: int
    state: JobState = QUEUED
    attempts: int = 0
    started_s: float = 0.0
    retries: int = 0
    forgotten: bool = False
    """True if its function was deleted."""
    due_s: float = 0.0
    expires_s: float = 0.0
    until_s: float = 0.0
    """When the job is deleted. This is later than `expires_s` if a webhook needs the job."""
    outcome: JobOutcome | None = None
    """The outcome with which the last attempt has ended the job."""
    output: bytes | None = None
    logs: str = ""
    progress: bytes | None = None
    pieces: list[bytes] = field(default_factory=list)
    given_up: bool = False
    """True if the job waits again because its gateway seemed dead. The attempt of that gateway may still end
    it.
    """

    @property
    def place(self) -> tuple[int, int]:
        return self.new.priority, self.number


class Model:
    """`events` are the pending webhook deliveries of each function: (job id, event). Bodies of more than `most_inline` bytes are files."""

    def __init__(self, most_inline: float = math.inf) -> None:
        self.most_inline = most_inline
        self.now_s = 1_000_000.0
        self.jobs: dict[str, ModelJob] = {}
        self.deleted: dict[str, tuple[str, str, float]] = {}
        self.finished: dict[tuple[str, str, str], int] = {}
        self.retried: dict[tuple[str, str], int] = {}
        self.events: dict[str, list[tuple[str, str]]] = {}
        self.arrived = 0

    def replayed(self, new: NewJob) -> str | PilotflameError | None:
        """Return the id of the job that a submit returns again, the error that it raises, or None for a new job."""
        for job_id, job in self.jobs.items():
            same = (job.new.function, job.new.owner, job.new.idempotency)
            if new.idempotency and same == (new.function, new.owner, new.idempotency):
                return job_id if job.new.input == new.input else IdempotencyConflict("")
        return JobConflict("") if new.wanted_id in self.jobs else None

    def submit(self, job_id: str, new: NewJob) -> None:
        self.arrived += 1
        self.jobs[job_id] = ModelJob(new, self.arrived, self.now_s, self.now_s + new.ttl_s, new.max_attempts)

    def absent(self, function: str, job_id: str, owner: str = ALL) -> type[PilotflameError] | None:
        job = self.jobs.get(job_id)
        if job is not None and job.new.function == function and owner in (ALL, job.new.owner):
            return None
        was = self.deleted.get(job_id)
        return JobExpired if was and was[0] == function and owner in (ALL, was[1]) else UnknownJob

    def held(self, job_id: str, fence: int) -> bool:
        job = self.jobs.get(job_id)
        return job is not None and job.state is RUNNING and job.attempts == fence

    def ended(self, job_id: str, fence: int, outcome: JobOutcome) -> bool:
        job = self.jobs.get(job_id)
        return job is not None and job.state.final and (job.attempts, job.outcome) == (fence, outcome)

    def take(self, job_id: str) -> int | None:
        """Return the fence of a new attempt, or of the running attempt. All attempts run on the same
        worker.
        """
        job = self.jobs.get(job_id)
        if job is None or job.state.final:
            return None
        if job.state is QUEUED:
            job.state, job.due_s, job.started_s, job.given_up = RUNNING, 0.0, self.now_s, False
            job.attempts += 1
            self.notify(job_id, "start")
        return job.attempts

    def end(self, job_id: str, outcome: JobOutcome) -> None:
        job = self.jobs[job_id]
        job.outcome = outcome
        job.state, job.output, job.logs = outcome.state, outcome.output, outcome.logs
        job.expires_s = job.until_s = self.now_s + KEEP_S
        self.notify(job_id, "completed")

    def requeue(self, job_id: str, delay_s: float, *, counted: bool, logs: str = "") -> None:
        job = self.jobs[job_id]
        if counted and job.attempts >= job.max_attempts:
            self.end(job_id, JobOutcome(JobState.FAILED, logs=logs, error={"type": "worker_died"}))
            return
        job.max_attempts += 0 if counted else 1
        self.queue(job, delay_s)

    def queue(self, job: ModelJob, delay_s: float = 0.0) -> None:
        job.state, job.due_s, job.expires_s = QUEUED, self.now_s + delay_s if delay_s else 0.0, 0.0
        job.output, job.logs, job.progress, job.pieces, job.given_up = None, "", None, [], False

    def retry(self, job_id: str) -> bool:
        job = self.jobs[job_id]
        if job.state not in (JobState.FAILED, JobState.TIMED_OUT) or job.forgotten:
            return False
        self.queue(job)
        job.retries += 1
        job.max_attempts = job.attempts + job.new.max_attempts
        job.stale_s = self.now_s + job.new.ttl_s
        key = (job.new.function, job.new.owner)
        self.retried[key] = self.retried.get(key, 0) + 1
        return True

    def expire(self) -> None:
        for job_id, job in list(self.jobs.items()):
            if job.state is QUEUED and job.stale_s <= self.now_s:
                self.end(job_id, JobOutcome(JobState.TIMED_OUT, error={"type": "deadline_exceeded"}))
            elif job.state.final and job.until_s <= self.now_s:
                if (job_id, "completed") in self.events.get(job.new.function, ()) and len(
                    job.output or b""
                ) > self.most_inline:
                    job.until_s = self.now_s + UNSENT_S
                    continue
                key = (job.new.function, job.new.owner, job.state)
                self.finished[key] = self.finished.get(key, 0) + 1
                self.deleted[job_id] = (job.new.function, job.new.owner, self.now_s + KEEP_S)
                del self.jobs[job_id]
        for job_id, (_, _, until_s) in list(self.deleted.items()):
            if until_s <= self.now_s:
                del self.deleted[job_id]

    def stored_bytes(self) -> dict[str, int]:
        found = Counter[str]({ALL: 0})
        for job in self.jobs.values():
            size = len(job.new.input) + len(job.output or b"") + len(job.logs) + sum(map(len, job.pieces))
            found[ALL] += size
            if job.new.owner:
                found[job.new.owner] += size
        return dict(found)

    def notify(self, job_id: str, event: str) -> None:
        new = self.jobs[job_id].new
        if new.webhook is not None and event in new.webhook.events:
            events = self.events.setdefault(new.function, [])
            # A new output replaces the pending one.
            if event == "output" and (job_id, event) in events:
                events.remove((job_id, event))
            events.append((job_id, event))

    def due(self, function: str) -> list[str]:
        found = [
            (job.place, job_id)
            for job_id, job in self.jobs.items()
            if job.new.function == function and job.state is QUEUED
            and job.due_s <= self.now_s and job.stale_s > self.now_s
        ]  # fmt: skip
        return [job_id for _, job_id in sorted(self._in_turns(sorted(found)))]

    def _in_turns(self, found: list[tuple[tuple[int, int], str]]) -> list[tuple[tuple[int, int, str], str]]:
        """Return the jobs with their place: the priority, the owner's turn and the owner."""
        turns: Counter[tuple[int, str]] = Counter()
        placed = []
        for (priority, _), job_id in found:
            owner = self.jobs[job_id].new.owner
            # The store begins with the owners after "", so "" has the last turn.
            placed.append(((priority, turns[priority, owner], owner or "\uffff"), job_id))
            turns[priority, owner] += 1
        return placed

    def next_due(self, function: str) -> float | None:
        queued = [job for job in self.jobs.values() if job.new.function == function and job.state is QUEUED]
        return min((job.due_s for job in queued if job.due_s), default=None)

    def next_expiry(self) -> float:
        times = [job.stale_s for job in self.jobs.values() if job.state is QUEUED]
        times += [job.until_s for job in self.jobs.values() if job.state.final]
        times += [until_s for _, _, until_s in self.deleted.values()]
        return min(times, default=math.inf)

    def owned(self, function: str, owner: str) -> dict[str, ModelJob]:
        jobs = self.jobs.items()
        return {i: job for i, job in jobs if job.new.function == function and owner in (ALL, job.new.owner)}

    def counts(self, function: str, owner: str = ALL) -> JobCounts:
        owned = self.owned(function, owner).values()

        def sum_of(ended: dict[tuple[str, ...], int], *last: str) -> int:
            keys = [key for key in ended if key[0] == function and owner in (ALL, key[1])]
            return sum(ended[key] for key in keys if key[2:] == last)

        def count(*states: JobState) -> int:
            kept = sum(job.state in states for job in owned)
            return kept + sum(sum_of(self.finished, state) for state in states)

        queued = [job for job in owned if job.state is QUEUED]
        return JobCounts(
            count(QUEUED), count(RUNNING), count(JobState.COMPLETED), count(JobState.FAILED, JobState.TIMED_OUT),
            count(JobState.CANCELLED), sum_of(self.retried),
            sum(len(job.new.input) for job in queued),
        )  # fmt: skip
