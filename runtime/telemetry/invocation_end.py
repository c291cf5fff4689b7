"""Defines the event that an invocation has ended. Metrics, status, load history, usage and alerts learn from it."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from ...errors import PilotflameError
from .timeline import Timeline

# Plain strings: an enum's hash is computed in Python, and every invocation is counted by its source.
Source: TypeAlias = Literal["http", "job", "queue", "batch"]
"""The submitter of an invocation: a caller who waits, a job, a message of an event source, a line of a batch."""


class InvocationEnd(NamedTuple):
    """An invocation that has ended with an output or an error. Its caller, if it has one, has not gone before."""

    function: str
    revision: str
    request_id: str
    source: Source
    timeline: Timeline
    error: PilotflameError | None = None
    """Why it failed; None if it has an output."""

    @property
    def code(self) -> int:
        """The HTTP status of its response. An invocation of a job has the status that a caller would get."""
        return 200 if self.error is None else self.error.status
