"""The timeline of one invocation: its phases, which sum to its total.

queue     accepted, until sent to a worker or until an activation was asked for
fork      (cold) until the child has dialled in; 0 with a standby
restore   (cold) weights mapped and `setup` run, until the worker is ready
dispatch  (cold) ready, until the invocation was sent
link      to the worker and back
wait      in the worker, until its batch starts
exec      in the handler
respond   from the worker's answer to the response

Fetching weights from elsewhere is no phase: it goes on beside them, and is told with the phases it went on beside.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

FETCH = "fetch"
# The `traceparent` header of W3C Trace Context.
TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[\x21-\x7e]{0,256})?")
_WARM = ", ".join(f"{name};dur=%.3f" for name in ("queue", "link", "wait", "exec", "respond", "total"))
PHASES = ("queue", "fork", "restore", "dispatch", "link", "wait", "exec", "respond")


@dataclass(slots=True)
class Fetch:
    """Weights on their way to this node, in monotonic seconds; `ended_s` is 0 while bytes are still coming."""

    started_s: float
    ended_s: float = 0.0
    fetched_bytes: int = 0


@dataclass(slots=True)
class Activation:
    """One start of a worker, in monotonic seconds."""

    asked_s: float
    forked_s: float = 0.0
    ready_s: float = 0.0
    restore_s: float = 0.0  # of the restore phase, the part that mapped the weights
    fetch: Fetch | None = None


@dataclass(slots=True)
class Timeline:
    """When what happened to an invocation, in monotonic seconds of the gateway; wait and exec are the worker's durations."""

    received_s: float
    sent_s: float = 0.0
    answered_s: float = 0.0
    responded_s: float = 0.0
    wait_s: float = 0.0
    exec_s: float = 0.0
    batch: int = 1
    cost: float = 1.0
    waits_cold: bool = False  # no worker was ready when it arrived
    activation: Activation | None = None

    @property
    def cold(self) -> bool:
        return self.activation is not None

    @property
    def total_s(self) -> float:
        """Until the latest that is known: the head of a stream leaves before there is an answer."""
        return max(self.received_s, self.sent_s, self.answered_s, self.responded_s) - self.received_s

    def phases(self) -> dict[str, float]:
        """Seconds by phase, in order. An activation that was already under way counts from the arrival.

        Without an answer of a worker's (it died, or time was up) the last phase reached lasts until the response.
        """
        start, phases = self.received_s, dict[str, float]()
        answered_s = self.answered_s or self.responded_s
        sent_s = self.sent_s or answered_s
        if (activation := self.activation) is not None:
            ends = (activation.asked_s, activation.forked_s, activation.ready_s)
            for name, end in zip(("queue", "fork", "restore"), ends, strict=True):
                phases[name] = max(0.0, end - start)
                start = max(start, end)
        phases["dispatch" if phases else "queue"] = max(0.0, sent_s - start)
        inside = self.wait_s + self.exec_s
        phases["link"] = max(0.0, answered_s - sent_s - inside)
        phases["wait"], phases["exec"] = self.wait_s, self.exec_s
        phases["respond"] = max(0.0, self.responded_s - answered_s) if self.responded_s else 0.0
        return phases

    def fetching(self) -> tuple[float, dict[str, float]]:
        """Seconds for which weights were coming while this invocation went on, and beside which phases."""
        fetch = self.activation.fetch if self.activation is not None else None
        if fetch is None:
            return 0.0, {}
        start, beside = self.received_s, dict[str, float]()
        end_s = min(fetch.ended_s or start + self.total_s, start + self.total_s)
        for name, seconds in self.phases().items():
            common_s = min(start + seconds, end_s) - max(start, fetch.started_s)
            if common_s > 0:
                beside[name] = common_s
            start += seconds
        return sum(beside.values()), beside

    def server_timing(self) -> str:
        """The Server-Timing header: durations in milliseconds, and the total."""
        if self.activation is None:
            return self._warm_timing()
        parts = [f"{name};dur={seconds * 1000:.3f}" for name, seconds in self.phases().items()]
        fetch_s, beside = self.fetching()
        if fetch_s:
            told = " ".join(f"{name} {seconds * 1000:.3f}" for name, seconds in beside.items())
            parts.append(f'{FETCH};dur={fetch_s * 1000:.3f};desc="beside {told}"')
        return ", ".join(parts) + f", total;dur={self.total_s * 1000:.3f}"

    def _warm_timing(self) -> str:
        """The same in one go, for every answer says it: `phases` without an activation."""
        received_s, responded_s = self.received_s, self.responded_s
        answered_s = self.answered_s or responded_s
        sent_s = self.sent_s or answered_s
        link_s = answered_s - sent_s - self.wait_s - self.exec_s
        return _WARM % (
            max(0.0, sent_s - received_s) * 1000,
            max(0.0, link_s) * 1000,
            self.wait_s * 1000,
            self.exec_s * 1000,
            max(0.0, responded_s - answered_s) * 1000 if responded_s else 0.0,
            (max(received_s, sent_s, answered_s, responded_s) - received_s) * 1000,
        )


def parse_server_timing(header: str) -> dict[str, float]:
    """Milliseconds by phase, from a Server-Timing header."""
    found = dict[str, float]()
    for part in header.split(","):
        name, _, duration = part.strip().partition(";dur=")
        if duration:
            found[name] = float(duration.partition(";")[0])
    return found
