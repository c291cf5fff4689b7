"""Remembers the latest cold starts of one function, each with its phases as a waterfall."""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

from typing_extensions import TypedDict

from .invocation_end import InvocationEnd
from .timeline import Timeline

KEPT = 20


class ColdPhase(TypedDict):
    """One phase of an invocation. `start_ms` counts from the invocation's arrival."""

    name: str
    start_ms: float
    duration_ms: float


class ColdStart(TypedDict):
    """An invocation that waited for the start of a worker, with all its phases in their order.

    The phases sum to `total_ms`. `cold_start_ms` is the wait for the worker: the first four phases.
    """

    at: float
    """When the invocation arrived, in Unix seconds."""
    request_id: str
    revision: str
    cause: str
    """Why the worker was started: "zero", "scale-up", "crash" or "deploy"."""
    cold_start_ms: float
    total_ms: float
    phases: list[ColdPhase]


class _Noted(NamedTuple):
    received_at: float
    request_id: str
    revision: str
    timeline: Timeline


class ColdStarts:
    """The last KEPT cold starts of a function, of all its revisions."""

    def __init__(self) -> None:
        self._noted: deque[_Noted] = deque(maxlen=KEPT)

    def note(self, end: InvocationEnd) -> None:
        """Remember an invocation that had a cold start. The time of its response may be added to its timeline later."""
        shift_s = time.time() - time.monotonic()
        received_at = end.timeline.received_s + shift_s
        self._noted.append(_Noted(received_at, end.request_id, end.revision, end.timeline))

    @property
    def latest(self) -> Timeline | None:
        """The timeline of the latest cold start; None if there was no cold start yet."""
        return self._noted[-1].timeline if self._noted else None

    def told(self, most: int = KEPT) -> list[ColdStart]:
        """Return up to `most` of the latest cold starts, the newest last."""
        return [_told(one) for one in list(self._noted)[-most:]]


def _told(noted: _Noted) -> ColdStart:
    start = noted.timeline.activation
    phases, start_ms = list[ColdPhase](), 0.0
    for name, seconds in noted.timeline.phases().items():
        phases.append(ColdPhase(name=name, start_ms=round(start_ms, 3), duration_ms=round(seconds * 1000, 3)))
        start_ms += seconds * 1000
    return ColdStart(
        at=round(noted.received_at, 3), request_id=noted.request_id, revision=noted.revision,
        cause=start.cause if start is not None else "",
        cold_start_ms=round(noted.timeline.cold_start_s * 1000, 3), total_ms=round(start_ms, 3), phases=phases,
    )  # fmt: skip
