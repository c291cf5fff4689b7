"""Decides whether the store may accept a new job."""

from __future__ import annotations

from ....errors import IdempotencyConflict, QueueFull
from ...ground.access.fair_share import share_used
from .job import Job, JobCounts, NewJob
from .large_bodies import same_body
from .stored_bytes import StoredBytes


def is_same(job: Job, new: NewJob) -> bool:
    """Return True if the job has the input of `new`."""
    same = same_body(job.large_input, new.large_input) and (bool(new.large_input) or job.input == new.input)
    return same and job.content_type == new.content_type


def check_same(job: Job, new: NewJob) -> None:
    """Raise IdempotencyConflict if the job was submitted with the idempotency key of `new` and another input."""
    if not is_same(job, new):
        raise IdempotencyConflict(
            f"Job {job.id} was submitted with the same idempotency key and another input.",
            remedy="Use a new key for a new input.",
        )


def check_room(new: NewJob, stored: StoredBytes, all_jobs: JobCounts, own: JobCounts) -> None:
    """Raise QueueFull if the queue or the store has no room for this owner. The error does not tell what other callers
    have queued.

    `all_jobs` counts the jobs of the function, and `own` the jobs of the owner among them.
    """
    if (refusal := stored.refusal(new.owner, len(new.input))) is not None:
        raise refusal
    most_bytes = new.max_queued_bytes
    if new.max_queued is not None and all_jobs.in_queue >= new.max_queued:
        raise QueueFull(
            f"The queue of {new.function!r} has as many jobs as max_jobs allows, which is {new.max_queued}.",
            remedy="Try again later, or raise max_jobs or scale.max in pilotflame.toml.",
        )
    # An empty queue accepts an input of any size.
    if most_bytes is not None and all_jobs.in_queue and all_jobs.queued_bytes + len(new.input) > most_bytes:
        raise QueueFull(
            f"The queue of {new.function!r} has no room for {len(new.input)} bytes; the limit is {most_bytes}.",
            remedy="Try again later, or raise scale.max in pilotflame.toml.",
        )
    if not new.owner:
        return
    if new.max_queued is not None and share_used(own.in_queue, new.max_queued - all_jobs.in_queue):
        raise _share_used(new, f"{own.in_queue} jobs", "max_jobs or scale.max")
    if (
        most_bytes is not None
        and own.in_queue
        and share_used(own.queued_bytes, most_bytes - all_jobs.queued_bytes)
    ):
        raise _share_used(new, f"{own.queued_bytes} bytes", "scale.max")


def _share_used(new: NewJob, held: str, settings: str) -> QueueFull:
    message = (
        f"The queue of {new.function!r} has your {held}. The rest of its room is kept for other callers."
    )
    return QueueFull(message, remedy=f"Try again later, or raise {settings} in pilotflame.toml.")
