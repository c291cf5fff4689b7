"""The order: a job as its function's settings would have it, whoever submits it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..settings.function_settings import FunctionSettings
from .job import NewJob


def order(settings: FunctionSettings, given: bytes, **said: Any) -> NewJob:
    """A new job whose input is `given`. `said`, fields of NewJob, is what its caller says himself."""
    usual = NewJob(
        settings.name,
        given,
        execution_timeout_s=settings.timeout_s,
        ttl_s=settings.ttl_s,
        max_attempts=settings.attempts,
        max_queued=settings.max_jobs,
        max_queued_bytes=settings.max_jobs_bytes,
    )
    return replace(usual, **said)
