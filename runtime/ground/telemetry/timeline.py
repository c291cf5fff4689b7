"""Measures the phases of one invocation. The durations of its phases sum to its total duration.

A cold start is an invocation that waited for the start of a worker, whatever its cause, and was sent before the worker ended
another one. Phases marked "cold" exist only in cold starts. The duration of a cold start (`cold_start_s`) is the sum of its first
four phases, so it excludes the handler's own time.

queue     from its arrival until it is sent or, in a cold start, until the start of a worker is requested
fork      (cold) then until the worker's process is connected, which takes no time if a standby is used; with
          remote weights, also until their files can be mapped
restore   (cold) then until the worker is ready, while it maps the weights and runs `setup`
dispatch  (cold) then until the invocation is sent to the worker
link      the transfers between gateway and worker, in both directions
wait      from its arrival in the worker until its batch starts
exec      while the handler runs
respond   from the arrival of the worker's result in the gateway until the response

A fetch of weights, or a copy of weights to a device, is not a phase, because it overlaps with phases. Fetches and
copies are reported separately as "fetch" and "copy", or "fetch-NAME" and "copy-NAME" for each named snapshot, with the
time of overlap with each phase.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass

FETCH, CONTEXT, COPY = "fetch", "context", "copy"
# Matches the value of the `traceparent` header, as W3C Trace Context defines it.
TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[\x21-\x7e]{0,256})?")
PHASES = ("queue", "fork", "restore", "dispatch", "link", "wait", "exec", "respond")
# The phases in which an invocation waits for a worker.
COLD_START_PHASES = PHASES[:4]
WARM_PHASES = ("queue", "link", "wait", "exec", "respond")
_WARM = ", ".join(f"{name};dur=%.3f" for name in (*WARM_PHASES, "total"))

WorkerTiming = tuple[float, float, int, float]
"""A worker's measurements of an invocation: seconds waiting, seconds in the handler, batch size, cost."""


@dataclass(slots=True)
class Transfer:
    """A move of a snapshot's weights, or the preparation of a move. Its times are monotonic seconds. `ended_s` is 0
    while it runs.
    """

    started_s: float
    ended_s: float = 0.0
    name: str = ""
    """The name of the snapshot, "" if the function has only one."""


@dataclass(slots=True)
class Fetch(Transfer):
    """A fetch of a snapshot to this node."""

    fetched_bytes: int = 0


class StartCause(enum.StrEnum):
    """Why a worker was started."""

    ZERO = "zero"
    """No worker of the revision was awake."""
    SCALE_UP = "scale-up"
    """The awake workers were too few."""
    CRASH = "crash"
    """The worker takes the place of a worker that has died."""
    DEPLOY = "deploy"
    """The worker proves that a new revision works."""


@dataclass(slots=True)
class Activation:
    """One start of a worker: the monotonic times of its steps. A time is 0 until its step has ended."""

    asked_s: float
    forked_s: float = 0.0
    ready_s: float = 0.0
    fetches: tuple[Fetch, ...] = ()
    copies: tuple[Transfer, ...] = ()
    """The copies of the worker's snapshots to its device."""
    contexts: tuple[Transfer, ...] = ()
    """The times in which the worker made its context on the device. A standby may have made it before the start."""
    signal: str = ""
    """The signal that started the worker ahead of need; "" if the worker is for waiting invocations."""
    cause: StartCause = StartCause.ZERO

    def mark_forked(self, now_s: float) -> None:
        self.forked_s = now_s

    def mark_fetching(self, fetches: Iterable[Fetch]) -> None:
        self.fetches = tuple(fetches)

    def mark_copied(self, copy: Transfer) -> None:
        """Record the start or the end of a copy. A copy that has ended is not replaced: a later copy of the same name
        is not part of the worker's start.
        """
        known = next((one for one in self.copies if one.name == copy.name), None)
        if known is None or not known.ended_s:
            self.copies = (*(one for one in self.copies if one is not known), copy)

    def mark_context(self, context: Transfer) -> None:
        self.contexts = self.contexts or (context,)

    def mark_ready(self, now_s: float) -> None:
        self.ready_s = now_s


@dataclass(slots=True)
class Timeline:
    """The monotonic times of one invocation's steps. A time is 0 until its step has happened."""

    received_s: float
    sent_s: float = 0.0
    completed_s: float = 0.0
    """When the worker's result arrived in the gateway."""
    responded_s: float = 0.0
    wait_s: float = 0.0
    """How long the invocation waited in the worker. The worker measures this time and `exec_s`, the time in the handler."""
    exec_s: float = 0.0
    batch: int = 1
    cost: float = 1.0
    activation: Activation | None = None
    """The start of the worker that the invocation waited for; None if it did not wait for a start."""

    def mark_sent(self, now_s: float, activation: Activation | None) -> None:
        self.sent_s, self.activation = now_s, activation

    def mark_completed(self, now_s: float, timing: WorkerTiming) -> None:
        self.completed_s = now_s
        self.wait_s, self.exec_s, self.batch, self.cost = timing

    def mark_responded(self, now_s: float) -> None:
        self.responded_s = now_s

    @property
    def cold(self) -> bool:
        return self.activation is not None

    @property
    def cold_start_s(self) -> float:
        """The time from the invocation's arrival until it was sent to the started worker; 0 without a cold start."""
        return max(0.0, self.sent_s - self.received_s) if self.activation is not None else 0.0

    def cold_start_phases(self) -> dict[str, float]:
        """Return the seconds of the phases that sum to `cold_start_s`; {} without a cold start."""
        if self.activation is None:
            return {}
        phases = self.phases()
        return {name: phases[name] for name in COLD_START_PHASES}

    @property
    def total_s(self) -> float:
        """The seconds from the invocation's arrival until its latest step so far.

        The latest step is not always the response: the head of a stream is sent before the worker's result arrives.
        """
        return max(self.received_s, self.sent_s, self.completed_s, self.responded_s) - self.received_s

    def warm_phases(self) -> tuple[float, float, float, float, float]:
        """Return the seconds of each phase in `WARM_PHASES`.

        Here, the phase `queue` also includes the cold phases (`fork`, `restore`, `dispatch`). If no result arrived,
        because the worker died or the deadline passed, then the time from sending the invocation to the response counts
        as phase `link`. If it was never sent, all its time counts as phase `queue`.
        """
        responded_s, wait_s, exec_s = self.responded_s, self.wait_s, self.exec_s
        completed_s = self.completed_s or responded_s
        sent_s = self.sent_s or completed_s
        queue_s, link_s = max(0.0, sent_s - self.received_s), max(0.0, completed_s - sent_s - wait_s - exec_s)
        return queue_s, link_s, wait_s, exec_s, max(0.0, responded_s - completed_s) if responded_s else 0.0

    def phases(self) -> dict[str, float]:
        """Return the seconds of each phase, in the order of the phases.

        If the start of the worker was requested before the invocation arrived, only the time since its
        arrival counts.
        """
        phases = dict(zip(WARM_PHASES, self.warm_phases(), strict=True))
        if (activation := self.activation) is None:
            return phases
        start = self.received_s
        sent_s = start + phases.pop("queue")
        marks = (activation.asked_s, activation.forked_s, activation.ready_s, sent_s)
        cold = dict[str, float]()
        for name, end in zip(PHASES, marks, strict=False):
            cold[name] = max(0.0, end - start)
            start = max(start, end)
        return cold | phases

    def overlap(self, transfer: Transfer) -> dict[str, float]:
        """Return, for each phase, the seconds in which a transfer ran. Phases without the transfer are left out."""
        start, beside = self.received_s, dict[str, float]()
        end_s = min(transfer.ended_s or start + self.total_s, start + self.total_s)
        for name, seconds in self.phases().items():
            common_s = min(start + seconds, end_s) - max(start, transfer.started_s)
            if common_s > 0:
                beside[name] = common_s
            start += seconds
        return beside

    def server_timing(self) -> str:
        """Return the value of the Server-Timing header: each phase and the total, in milliseconds."""
        if self.activation is None:
            # One formatting operation for all phases, because this runs for every response.
            queue_s, link_s, wait_s, exec_s, respond_s = self.warm_phases()
            return _WARM % (
                queue_s * 1000, link_s * 1000, wait_s * 1000, exec_s * 1000, respond_s * 1000,
                self.total_s * 1000,
            )  # fmt: skip
        parts = [f"{name};dur={seconds * 1000:.3f}" for name, seconds in self.phases().items()]
        told = {
            FETCH: self.activation.fetches, CONTEXT: self.activation.contexts, COPY: self.activation.copies,
        }  # fmt: skip
        for kind, transfers in told.items():
            for one in transfers:
                if beside := self.overlap(one):
                    listed = " ".join(f"{name} {seconds * 1000:.3f}" for name, seconds in beside.items())
                    name = f"{kind}-{one.name}" if one.name else kind
                    parts.append(f'{name};dur={sum(beside.values()) * 1000:.3f};desc="beside {listed}"')
        parts.append(f'start;desc="{self.activation.cause}"')
        return ", ".join(parts) + f", total;dur={self.total_s * 1000:.3f}"


def parse_server_timing(header: str) -> dict[str, float]:
    """Return the milliseconds of each phase in `header`, the value of a Server-Timing header."""
    return {name: float(ms) for name, ms in re.findall(r"([^\s,;]+);dur=(\d+\.?\d*)", header)}
