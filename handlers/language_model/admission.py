"""Predicts when a request gets its first token, and how fast the later ones come. Requests that would be too late are refused at once.

It does no I/O and knows neither torch nor a clock. A request that is too late is of no use, but takes the place of others, which are late then
too. So under overload a few refusals keep all others in time.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .schedule import ChunkTimes

DECAY = 0.98
"""How much less each earlier step counts."""
LENGTHS = 200
"""The answers whose lengths are known."""
SHARE = 0.9
"""The share of the callers' time for a token that a step may take."""
DEFAULT_LENGTH = 128
"""The tokens of an answer before any has ended."""


class Targets(NamedTuple):
    """What a caller needs, in seconds. `first_by_s` is a time on the engine's clock, and `token_s` the mean time of a later token."""

    first_by_s: float = math.inf
    token_s: float = math.inf


class StepTimes:
    """Learns how long a step of the rows takes: a line over the number of rows, by least squares with weights that decay."""

    def __init__(self) -> None:
        # The weighted sums of 1, n, t, n² and n t, for steps of n rows that took t seconds.
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)

    def note(self, rows: int, taken_s: float) -> None:
        latest = (1.0, rows, taken_s, rows * rows, rows * taken_s)
        self._sums = tuple(DECAY * one + new for one, new in zip(self._sums, latest, strict=True))  # type: ignore[assignment]

    def step_s(self, rows: int) -> float:
        """Return the seconds of a step of `rows` rows; 0 before the first one."""
        count, n, t, nn, nt = self._sums
        if not count:
            return 0.0
        spread = count * nn - n * n
        row_s = (count * nt - n * t) / spread if spread > 1e-3 * nn * count else 0.0
        row_s = min(max(row_s, 0.0), t / n)
        return max(0.0, (t - row_s * n) / count) + row_s * rows


class AnswerLengths:
    """The lengths of the latest answers."""

    def __init__(self) -> None:
        self._latest: deque[int] = deque()
        self._sorted: list[int] = []

    def note(self, tokens: int) -> None:
        if len(self._latest) == LENGTHS:
            self._sorted.remove(self._latest.popleft())
        self._latest.append(tokens)
        insort(self._sorted, tokens)

    def mean(self, most: int) -> float:
        """Return the mean length of answers of at most `most` tokens."""
        if not self._sorted:
            return float(min(DEFAULT_LENGTH, most))
        return sum(min(one, most) for one in self._sorted) / len(self._sorted)


class EngineLoad(NamedTuple):
    """What an engine has to do."""

    rows: int
    unread: Sequence[int]
    """The tokens to read of each prompt that waits or is being read, in their order."""
    most_rows: int
    token_s: float = math.inf
    """The shortest mean time of a token that a caller needs."""


@dataclass
class Admission:
    """The predictions of one engine."""

    chunks: ChunkTimes
    steps: StepTimes = field(default_factory=StepTimes)
    lengths: AnswerLengths = field(default_factory=AnswerLengths)

    def first_token_s(self, load: EngineLoad, tokens: int, most_new: int) -> float:
        """Return in how many seconds a prompt of `tokens` has been read, if it arrives now."""
        read_s = self._reading_s([*load.unread, tokens], load)
        if (behind := load.rows + len(load.unread) + 1 - load.most_rows) <= 0:
            return read_s
        # One of the rows ends in the mean time of an answer, divided by the number of rows.
        token_s = 2 * self.steps.step_s(load.most_rows)
        free_s = behind * self.lengths.mean(most_new) * token_s / load.most_rows
        return max(read_s, free_s + self._reading_s([tokens], load))

    def rows_within(self, token_s: float, most_rows: int) -> int:
        """Return how many rows may run so that a token takes no longer than `token_s`, at least 1."""
        # While prompts are read, a step takes twice as long at least.
        fitting = (rows for rows in range(most_rows, 1, -1) if 2 * self.steps.step_s(rows) <= token_s)
        return next(fitting, 1)

    def chunk_s(self, rows: int, token_s: float) -> float:
        """Return the longest time of a chunk beside `rows` rows: the rest of the callers' time for a token, or another step.

        It is 0 without rows, because then no caller waits for a token.
        """
        if not rows:
            return 0.0
        step_s = self.steps.step_s(rows)
        return max(step_s, SHARE * token_s - step_s) if token_s < math.inf else step_s

    def _reading_s(self, prompts: Sequence[int], load: EngineLoad) -> float:
        """Return how long it takes to read prompts one after the other, beside the rows."""
        pass_s, token_s = self.chunks.line()
        chunk_s = self.chunk_s(load.rows, load.token_s)
        if not chunk_s:
            return sum(pass_s + tokens * token_s for tokens in prompts)
        most = self.chunks.fitting(chunk_s)
        steps = sum(math.ceil(tokens / most) for tokens in prompts)
        return steps * (self.steps.step_s(load.rows) + pass_s) + sum(prompts) * token_s
