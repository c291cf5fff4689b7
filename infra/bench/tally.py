"""What a run of load came to: latencies, statuses, errors, and what the generator itself spent."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from http1 import Answer, Request
from percentiles import percentile, summary_ms


@dataclass
class Tally:
    """One run. Only right answers (2xx, and the expected body) have a latency and count towards the rate."""

    latencies_ns: list[int] = field(default_factory=list)
    statuses: dict[int, int] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)
    second_statuses: dict[int, int] = field(default_factory=dict)  # of requests repeated after a refusal
    wrong_bodies: int = 0
    wrong_sample: str = ""
    captured: dict[str, list[str]] = field(default_factory=dict)
    send_lag_ns: list[int] = field(default_factory=list)  # open loop: how late the generator itself was
    warmup_answers: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0  # the generator's own

    @property
    def right(self) -> int:
        return len(self.latencies_ns)

    @property
    def answers(self) -> int:
        return sum(self.statuses.values())

    @property
    def clean(self) -> bool:
        """Whether every answer was right and no connection failed."""
        return self.right == self.answers > 0 and not self.errors

    def on_time(self, deadline_s: float) -> float:
        """The share of all that were sent, or should have been, that got a right answer so soon."""
        sent = self.answers + sum(self.errors.values())
        return sum(latency <= deadline_s * 1e9 for latency in self.latencies_ns) / sent if sent else 0.0

    @property
    def per_second(self) -> float:
        return self.right / self.wall_s if self.wall_s else 0.0

    @property
    def generator_share(self) -> float:
        """The share of one core that the generator used. Near 1, the generator limits the rate instead of the server."""
        return self.cpu_s / self.wall_s if self.wall_s else 0.0

    def p_ms(self, share: float) -> float:
        return percentile(self.latencies_ns, share) / 1e6

    def summary(self) -> dict[str, Any]:
        """Everything but the single latencies."""
        return {
            "answers": self.answers,
            "right": self.right,
            "per_second": self.per_second,
            "latency_ms": summary_ms(self.latencies_ns),
            "send_lag_ms": summary_ms(self.send_lag_ns) if self.send_lag_ns else None,
            "statuses": dict(self.statuses),
            "errors": dict(self.errors),
            "wrong_bodies": self.wrong_bodies,
            "wrong_sample": self.wrong_sample,
            "wall_s": self.wall_s,
            "generator_share": self.generator_share,
        }

    def to_json(self) -> str:
        return json.dumps(vars(self), separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> Tally:
        fields = json.loads(text)
        for name in ("statuses", "second_statuses"):
            fields[name] = {int(status): count for status, count in fields[name].items()}
        return Tally(**fields)


class Judge:
    """Says whether an answer is right, and enters it in the tally."""

    def __init__(self, request: Request, tally: Tally) -> None:
        self._request = request
        self._tally = tally
        self._accepted: set[bytes] = set() if request.expect is None else {request.expect}
        for name in request.capture:
            tally.captured[name] = []

    def enter(self, answer: Answer, latency_ns: int) -> None:
        tally = self._tally
        tally.statuses[answer.status] = tally.statuses.get(answer.status, 0) + 1
        for name in self._request.capture:
            tally.captured[name].append(answer.header(name))
        if 200 <= answer.status < 300 and self._is_right(answer.body):
            tally.latencies_ns.append(latency_ns)
        elif not tally.wrong_sample:
            tally.wrong_sample = f"{answer.status}: {answer.body[:300]!r}"

    def error(self, what: str) -> None:
        self._tally.errors[what] = self._tally.errors.get(what, 0) + 1

    def _is_right(self, body: bytes) -> bool:
        if self._request.expect is None or body in self._accepted:
            return True
        if _same_json(body, self._request.expect):
            self._accepted.add(body)
            return True
        self._tally.wrong_bodies += 1
        return False


def _same_json(one: bytes, other: bytes) -> bool:
    try:
        return bool(json.loads(one) == json.loads(other))
    except ValueError:
        return False
