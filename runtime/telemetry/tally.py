"""Tallies: what the gateway counts of each function, in plain numbers; they become metrics when somebody looks.

Counting happens with every request, looking every few seconds: so the former is a list and an index.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator

from .timeline import Timeline

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Tally:
    """Observations by the bucket that they fall into, and their sum."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """(bound, how many are at most that), as Prometheus has them."""
        found, total = [], 0
        for bound, count in zip((*map(str, map(float, self.bounds)), "+Inf"), self.counts, strict=True):
            total += count
            found.append((bound, float(total)))
        return found


class FunctionTally:
    """All of one function."""

    def __init__(self) -> None:
        self.codes = Counter[int]()
        self.refusals = Counter[str]()
        self.activations = Counter[str]()
        self.duration = Tally(SECONDS)
        self.batch = Tally(SIZES)
        self.cold: dict[str, Tally] = {}
        self.queue, self.wait, self.link, self.exec, self.respond = (Tally(SECONDS) for _ in range(5))

    def answered(self, code: int, line: Timeline) -> None:
        self.codes[code] += 1
        self.duration.observe(line.total_s)
        sent_s, answered_s = line.sent_s, line.answered_s
        self.queue.observe(max(0.0, (sent_s or line.responded_s) - line.received_s))
        if answered_s:
            self.batch.observe(line.batch)
            self.wait.observe(line.wait_s)
            self.link.observe(max(0.0, answered_s - sent_s - line.wait_s - line.exec_s))
            self.exec.observe(line.exec_s)
            self.respond.observe(max(0.0, line.responded_s - answered_s))
        if line.activation is not None:
            for phase, seconds in line.phases().items():
                self.cold.setdefault(phase, Tally(SECONDS)).observe(seconds)

    def phases(self) -> Iterator[tuple[str, Tally]]:
        """By the names that they are exported under."""
        yield from (
            ("queue", self.queue), ("wait", self.wait), ("batch", self.link), ("exec", self.exec),
            ("respond", self.respond),
        )  # fmt: skip
