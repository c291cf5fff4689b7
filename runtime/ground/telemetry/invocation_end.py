"""Defines the event that an invocation has ended. Metrics, status, load history, usage and alerts use this event."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol, TypeAlias

from ....errors import PilotflameError
from .timeline import Timeline

# These are plain strings, because Python code computes an enum's hash, and every invocation is counted by its source.
Source: TypeAlias = Literal["http", "job", "queue", "batch"]
"""The submitter of an invocation: a caller who waits, a job, a message of an event source, a line of a batch."""


class EndedCall(Protocol):
    """The input of an invocation that has ended. Observers may keep parts of it, but not the whole object."""

    @property
    def body(self) -> bytes: ...
    @property
    def content_type(self) -> str:
        """The type of the body; "" for JSON."""


class TraceContext(NamedTuple):
    """The place of an invocation in a trace. The values are headers of W3C Trace Context."""

    parent: str
    """The `traceparent` of the caller; "" for none."""
    state: str
    """The `tracestate` of the caller."""
    span: str
    """The `traceparent` of the invocation's own span."""


class InvocationEnd(NamedTuple):
    """An invocation that has ended with an output or an error. If it has a caller, the caller was still there at its
    end.
    """

    function: str
    revision: str
    request_id: str
    source: Source
    timeline: Timeline
    error: PilotflameError | None = None
    """The error with which the invocation failed; None if it has an output."""
    worker: str = ""
    """The name of the worker that it was last sent to; "" if it was never sent."""
    trace: TraceContext | None = None
    """Set if an observer makes a span of it."""
    call: EndedCall | None = None
    output: tuple[bytes, str] | None = None
    """The output and its content type, which is "" for JSON. None after an error."""

    @property
    def code(self) -> int:
        """The HTTP status of its response. An invocation of a job has the status that a caller would get."""
        return 200 if self.error is None else self.error.status


class GenerationEnd(NamedTuple):
    """An answer of a language model that has ended. Times are in monotonic seconds; 0 if there was no such piece of the answer."""

    function: str
    trace: TraceContext | None
    received_s: float
    first_s: float
    """When the first piece of the answer arrived in the gateway."""
    last_s: float
    """When the last piece arrived."""
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    error: PilotflameError | None = None
