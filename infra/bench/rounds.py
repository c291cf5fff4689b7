"""Interleaved rounds: subjects take turns and the order rotates, so that other work on the machine affects all of them.

Ratios are taken round by round, and the median of the rounds is reported.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from percentiles import median
from report import Report
from subject_process import SubjectError, SubjectProcess

T = TypeVar("T")


def rotated(order: Sequence[T], number: int) -> list[T]:
    """Return the order of round `number`. Each round starts with the next subject."""
    start = number % max(1, len(order))
    return [*order[start:], *order[:start]]


@dataclass(frozen=True)
class Entry:
    """A subject, and the arguments of its turns. Several entries may share a process."""

    process: SubjectProcess
    name: str
    turn: dict[str, Any] = field(default_factory=dict)


class Rounds:
    """The seconds of each subject in each round, for one object of `size_bytes`."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.seconds: dict[str, list[float]] = {}
        self.failed: dict[str, str] = {}

    def run(self, entries: Sequence[Entry], rounds: int) -> None:
        """Run a round that warms up and checks each result, and then `rounds` measured rounds.

        A subject that fails takes part in no further round.
        """
        for entry in entries:
            self._turn(entry, check=True)
        for number in range(rounds):
            for entry in rotated(entries, number):
                if entry.name not in self.failed and (seconds := self._turn(entry)):
                    self.seconds.setdefault(entry.name, []).append(seconds)
            latest = ", ".join(f"{name} {self.rates(name)[-1]:.2f}" for name in self.seconds)
            print(f"  round {number + 1} of {rounds}, GB/s: {latest}", file=sys.stderr, flush=True)

    def rates(self, name: str) -> list[float]:
        """Return GB/s (10^9 bytes), a value for each round."""
        return [self.size_bytes / 1e9 / seconds for seconds in self.seconds.get(name, [])]

    def ratio(self, name: str, to: str) -> float:
        """Return how many times faster `name` was than `to` in the same round: the median of the rounds."""
        pairs = zip(self.seconds[name], self.seconds[to], strict=True)
        return median([other / own for own, other in pairs])

    def enter(self, report: Report, group: str) -> None:
        """Enter the rate of each subject, and a note for each subject that failed."""
        for name in self.seconds:
            report.row(group=group, subject=name, gb_s=median(self.rates(name)), seconds=self.seconds[name])
        for name, why in self.failed.items():
            report.note(f"{group}: {name} failed: {why[-300:]}")

    def _turn(self, entry: Entry, check: bool = False) -> float | None:
        try:
            return entry.process.turn(check=check, **entry.turn)
        except SubjectError as error:
            self.failed[entry.name] = str(error)
            self.seconds.pop(entry.name, None)
            return None
