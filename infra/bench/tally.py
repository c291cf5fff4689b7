"""The result of a run of load: latencies, statuses and errors, and the CPU time of the generator."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from http1 import Answer, Request
from percentiles import percentile


@dataclass
class Tally:
    """One run. Only right answers (2xx, and the expected body) have a latency and count towards the rate."""

    latencies_ns: list[int] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    second_statuses: Counter[int] = field(default_factory=Counter)
    """The statuses of requests that were repeated after a refusal."""
    captured: list[str] = field(default_factory=list)
    wrong_sample: str = ""
    warmup_answers: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0

    @property
    def right(self) -> int:
        return len(self.latencies_ns)

    @property
    def answers(self) -> int:
        return sum(self.statuses.values())

    @property
    def clean(self) -> bool:
        """Return True if every answer was right and no connection failed."""
        return self.right == self.answers > 0 and not self.errors

    @property
    def per_second(self) -> float:
        return self.right / self.wall_s if self.wall_s else 0.0

    def on_time(self, deadline_s: float) -> float:
        """Return the share of requests that got a right answer within `deadline_s`."""
        sent = self.answers + sum(self.errors.values())
        return sum(latency <= deadline_s * 1e9 for latency in self.latencies_ns) / sent if sent else 0.0

    def p_ms(self, share: float) -> float:
        return percentile(self.latencies_ns, share) / 1e6

    def enter(self, request: Request, answer: Answer | None, latency_ns: int) -> None:
        """Enter an answer, or None for a lost connection."""
        if answer is None:
            self.errors["connection lost"] += 1
            return
        self.statuses[answer.status] += 1
        if request.capture:
            self.captured.append(answer.header(request.capture))
        if 200 <= answer.status < 300 and _is_right(answer.body, request.expect):
            self.latencies_ns.append(latency_ns)
        elif not self.wrong_sample:
            self.wrong_sample = f"{answer.status}: {answer.body[:300]!r}"

    def summary(self) -> dict[str, Any]:
        """Return the result without the single latencies. `generator_share`: the part of a core that the generator used.

        Near 1, the generator limits the rate instead of the server.
        """
        return {
            "answers": self.answers, "right": self.right, "per_second": self.per_second, "p50_ms": self.p_ms(0.5),
            "p99_ms": self.p_ms(0.99), "statuses": self.statuses, "errors": self.errors,
            "wrong_sample": self.wrong_sample, "generator_share": self.cpu_s / max(self.wall_s, 1e-9),
        }  # fmt: skip

    def to_json(self) -> str:
        return json.dumps(vars(self), separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> Tally:
        fields = json.loads(text)
        for name in ("statuses", "second_statuses"):
            fields[name] = Counter({int(status): times for status, times in fields[name].items()})
        return Tally(**fields)


def _is_right(body: bytes, expected: bytes | None) -> bool:
    if expected is None or body == expected:
        return True
    try:
        return bool(json.loads(body) == json.loads(expected))
    except ValueError:
        return False
