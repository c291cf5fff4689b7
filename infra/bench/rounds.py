"""Rounds: lanes that take turns, their order rotated, each beside the ceiling of the same round."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lane import Lane, LaneError
from percentiles import median
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Entry:
    """One contestant: a lane, and the arguments of its turns. Several entries may share a lane."""

    lane: Lane
    name: str
    turn: dict[str, Any] = field(default_factory=dict)
    before: Lane | None = None
    """A lane that has a turn just before each of this entry, which is not measured."""


def plain(lanes: Iterable[Lane]) -> list[Entry]:
    """An entry for each lane, under its own name."""
    return [Entry(lane, lane.name) for lane in lanes]


class Rounds:
    """Seconds of every contestant in every round. `ceiling` is the contestant that the others are shown beside."""

    def __init__(self, size_bytes: int, ceiling: str) -> None:
        self.size_bytes = size_bytes
        self.ceiling = ceiling
        self.seconds: dict[str, list[float]] = {}
        self.failed: dict[str, str] = {}
        self._known: list[Lane] = []

    def play(self, entries: Sequence[Entry], rounds: int) -> None:
        """Play one round after another. A first round, whose times are discarded, warms caches and checks every result.

        A contestant that fails drops out, and the report names it.
        """
        for entry in entries:
            if entry.lane not in self._known:
                self._known.append(entry.lane)
                self._ready(entry)
            if entry.before is not None and entry.before not in self._known:
                self._known.append(entry.before)
                entry.before.wait_ready()
        for entry in self._playing(entries):
            self._turn(entry, check=True)
        for number in range(rounds):
            playing = self._playing(entries)
            turned = number * len(playing) // max(1, rounds)
            order = playing[turned:] + playing[:turned]
            for entry in order if number % 2 == 0 else order[::-1]:
                seconds = self._turn(entry)
                if seconds is not None:
                    self.seconds.setdefault(entry.name, []).append(seconds)
            self._tell(number + 1, rounds)

    def rates(self, name: str) -> list[float]:
        """GB/s (10^9), a round each."""
        return [self.size_bytes / 1e9 / seconds for seconds in self.seconds.get(name, [])]

    def ratio(self, name: str, to: str) -> float:
        """Median over the rounds of how much faster `name` was than `to` in the same round."""
        pairs = zip(self.seconds[name], self.seconds[to], strict=True)
        return median([other / own for own, other in pairs])

    def best_ratio(self, name: str, others: Sequence[str]) -> float:
        """How much faster `name` was than the best of the others: the smallest of its ratios to them."""
        known = [other for other in others if other in self.seconds]
        return min(self.ratio(name, other) for other in known)

    def as_rows(self) -> list[dict[str, Any]]:
        rows = []
        for name, seconds in self.seconds.items():
            rows.append(
                {
                    "contestant": name,
                    "gb_s": round(median(self.rates(name)), 3),
                    "of_ceiling": round(self.ratio(name, self.ceiling), 3),
                    "worst_gb_s": round(min(self.rates(name)), 3),
                    "best_gb_s": round(max(self.rates(name)), 3),
                    "seconds": [round(second, 4) for second in seconds],
                }
            )
        return rows + [{"contestant": name, "failed": why} for name, why in self.failed.items()]

    def print(self, title: str) -> None:
        table = Table(title=title, title_justify="left")
        table.add_column("contestant")
        for column in ("GB/s", "of ceiling", "worst", "best"):
            table.add_column(column, justify="right")
        for row in self.as_rows():
            if "failed" in row:
                table.add_row(row["contestant"], "failed")
                continue
            figures = (row["gb_s"], row["of_ceiling"], row["worst_gb_s"], row["best_gb_s"])
            table.add_row(row["contestant"], *(f"{figure:.2f}" for figure in figures))
        Console(width=110).print(table)

    def _ready(self, entry: Entry) -> None:
        try:
            entry.lane.wait_ready()
        except LaneError as error:
            self._out(entry, error)

    def _playing(self, entries: Sequence[Entry]) -> list[Entry]:
        return [entry for entry in entries if entry.name not in self.failed]

    def _turn(self, entry: Entry, check: bool = False) -> float | None:
        try:
            if entry.before is not None:
                entry.before.turn()
            return float(entry.lane.turn(check=check, **entry.turn)["seconds"])
        except LaneError as error:
            self._out(entry, error)
            return None

    def _out(self, entry: Entry, error: LaneError) -> None:
        self.failed[entry.name] = str(error)
        self.seconds.pop(entry.name, None)
        print(f"  {entry.name} is out: {str(error)[-400:]}", file=sys.stderr, flush=True)

    def _tell(self, number: int, rounds: int) -> None:
        told = ", ".join(f"{name} {self.rates(name)[-1]:.2f}" for name in self.seconds)
        print(f"  round {number} of {rounds}, GB/s: {told}", flush=True)
