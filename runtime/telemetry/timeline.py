"""The timeline of one invocation: its phases, which sum to its total.

queue     from accepted until sent to a worker or, in a cold start, until the activation was requested
fork      (cold) until the child has connected; 0 with a standby
restore   (cold) until the worker is ready: weights are mapped and `setup` runs
dispatch  (cold) until the invocation was sent
link      to the worker and back
wait      in the worker, until its batch starts
exec      in the handler
respond   from the worker's result to the response

Fetching weights is no phase: it runs beside the phases, and is reported with those it ran beside.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

FETCH = "fetch"
# The `traceparent` header of W3C Trace Context.
TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[\x21-\x7e]{0,256})?")
PHASES = ("queue", "fork", "restore", "dispatch", "link", "wait", "exec", "respond")
WARM_PHASES = ("queue", "link", "wait", "exec", "respond")
_WARM = ", ".join(f"{name};dur=%.3f" for name in (*WARM_PHASES, "total"))

WorkerTiming = tuple[float, float, int, float]
"""A worker's measures of an invocation: seconds of waiting, seconds in the handler, batch size, cost."""


@dataclass(slots=True)
class Fetch:
    """A fetch of weights to this node, in monotonic seconds; `ended_s` is 0 while it runs."""

    started_s: float
    ended_s: float = 0.0
    fetched_bytes: int = 0


@dataclass(slots=True)
class Activation:
    """One start of a worker, in monotonic seconds; 0 for what has not happened yet."""

    asked_s: float
    forked_s: float = 0.0
    ready_s: float = 0.0
    fetch: Fetch | None = None

    def mark_forked(self, now_s: float) -> None:
        self.forked_s = now_s

    def mark_fetching(self, fetch: Fetch) -> None:
        self.fetch = fetch

    def mark_ready(self, now_s: float) -> None:
        self.ready_s = now_s


@dataclass(slots=True)
class Timeline:
    """When what happened to an invocation, in monotonic seconds; 0 for what has not happened yet."""

    received_s: float
    sent_s: float = 0.0
    completed_s: float = 0.0
    """When the worker's result arrived."""
    responded_s: float = 0.0
    wait_s: float = 0.0
    """How long it waited in the worker, by the worker's clock, as `exec_s`."""
    exec_s: float = 0.0
    batch: int = 1
    cost: float = 1.0
    activation: Activation | None = None
    """The activation that it waited for, if its start was cold."""

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
    def total_s(self) -> float:
        """Until the latest known time: the head of a stream is sent before the worker's result."""
        return max(self.received_s, self.sent_s, self.completed_s, self.responded_s) - self.received_s

    def phases(self) -> dict[str, float]:
        """Return seconds by phase, in order. An activation already under way counts from the arrival.

        Without a worker's result (it died, or the deadline passed) the last phase lasts until the response.
        """
        start, phases = self.received_s, dict[str, float]()
        completed_s = self.completed_s or self.responded_s
        sent_s = self.sent_s or completed_s
        if (activation := self.activation) is not None:
            ends = (activation.asked_s, activation.forked_s, activation.ready_s)
            for name, end in zip(("queue", "fork", "restore"), ends, strict=True):
                phases[name] = max(0.0, end - start)
                start = max(start, end)
        phases["dispatch" if phases else "queue"] = max(0.0, sent_s - start)
        phases["link"] = max(0.0, completed_s - sent_s - self.wait_s - self.exec_s)
        phases["wait"], phases["exec"] = self.wait_s, self.exec_s
        phases["respond"] = max(0.0, self.responded_s - completed_s) if self.responded_s else 0.0
        return phases

    def fetch_overlap(self) -> dict[str, float]:
        """Return the seconds for which weights were fetched beside each phase, where there are any."""
        fetch = self.activation.fetch if self.activation is not None else None
        if fetch is None:
            return {}
        start, beside = self.received_s, dict[str, float]()
        end_s = min(fetch.ended_s or start + self.total_s, start + self.total_s)
        for name, seconds in self.phases().items():
            common_s = min(start + seconds, end_s) - max(start, fetch.started_s)
            if common_s > 0:
                beside[name] = common_s
            start += seconds
        return beside

    def server_timing(self) -> str:
        """Return the Server-Timing header: durations in milliseconds, and the total."""
        if self.activation is None:
            return self._warm_timing()
        parts = [f"{name};dur={seconds * 1000:.3f}" for name, seconds in self.phases().items()]
        if beside := self.fetch_overlap():
            listed = " ".join(f"{name} {seconds * 1000:.3f}" for name, seconds in beside.items())
            parts.append(f'{FETCH};dur={sum(beside.values()) * 1000:.3f};desc="beside {listed}"')
        return ", ".join(parts) + f", total;dur={self.total_s * 1000:.3f}"

    def _warm_timing(self) -> str:
        """Return the header of a warm invocation in one formatting step: every response carries it."""
        received_s, responded_s = self.received_s, self.responded_s
        completed_s = self.completed_s or responded_s
        sent_s = self.sent_s or completed_s
        return _WARM % (
            max(0.0, sent_s - received_s) * 1000,
            max(0.0, completed_s - sent_s - self.wait_s - self.exec_s) * 1000,
            self.wait_s * 1000,
            self.exec_s * 1000,
            max(0.0, responded_s - completed_s) * 1000 if responded_s else 0.0,
            (max(received_s, sent_s, completed_s, responded_s) - received_s) * 1000,
        )


def parse_server_timing(header: str) -> dict[str, float]:
    """Return milliseconds by phase from a Server-Timing header."""
    found = dict[str, float]()
    for part in header.split(","):
        name, _, duration = part.strip().partition(";dur=")
        if duration:
            found[name] = float(duration.partition(";")[0])
    return found
