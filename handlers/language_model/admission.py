"""Predicts when a request gets its first token, and how fast the later tokens come.

`EngineSteps` refuses requests that would be too late.

This module does no I/O and knows neither torch nor a clock. A late answer is of no use, and its work makes other answers late, too.
So under overload a few refusals keep all other requests in time. A request with a target never slows a request without a target.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .schedule import ChunkTimes
from .times import TimeLine

DECAY = 0.98
"""With each later step, the weight of a measured step in the prediction is multiplied by this."""
LENGTHS = 200
"""The number of latest answers whose lengths are kept."""
SHARE = 0.9
"""The part of `EngineLoad.token_s` that a step may take for its rows and for reading a prompt."""
READING_SHARE = 0.75
"""The time for reading a prompt in each step, as a share of the time of the rows. It is below 1, because the last layer may end late."""
READING_SHARE_ABOVE = 0.25
"""Replaces READING_SHARE for the prompts of a tenant that has more than its share of the rows while other tenants have rows."""
DEFAULT_LENGTH = 128
"""The expected tokens of an answer while no answer has ended."""


class Targets(NamedTuple):
    """What a caller needs, in seconds."""

    first_by_s: float = math.inf
    """The latest time for the first token, on the engine's clock."""
    token_s: float = math.inf
    """The mean time of a later token."""


NO_TARGETS = Targets()


class EngineLoad(NamedTuple):
    """What an engine has to do."""

    rows: int
    unread: Sequence[int]
    """The number of unread tokens of each prompt that waits or is being read."""
    most_rows: int
    token_s: float = math.inf
    """The shortest target of the rows for the mean time of a token; infinite if a row has no target."""

    @property
    def idle(self) -> bool:
        """True if no request runs, and no prompt waits."""
        return not self.rows and not self.unread


@dataclass
class Admission:
    """The predictions of one engine."""

    chunks: ChunkTimes
    slices: float = 1.0
    """The number of steps over which the pass of a chunk is spread while there are rows."""
    _fastest_s: float = field(default=0.0, init=False)
    """The seconds of the fastest step; 0 before the first one."""
    _steps: TimeLine = field(default_factory=lambda: TimeLine(DECAY))
    _lengths: deque[int] = field(default_factory=lambda: deque(maxlen=LENGTHS))

    def note_step(self, rows: int, taken_s: float) -> None:
        """Learn how long a step of the rows took."""
        self._steps.note(rows, taken_s)
        self._fastest_s = min(self._fastest_s or taken_s, taken_s)

    def note_answer(self, tokens: int) -> None:
        """Learn how long an answer was."""
        self._lengths.append(tokens)

    def step_s(self, rows: int) -> float:
        """Return the seconds of a step of `rows` rows; 0 before the first one."""
        pass_s, row_s = self._steps.fit()
        return pass_s + row_s * rows

    def first_token_s(self, load: EngineLoad, tokens: int, most_new: int) -> float:
        """Return in how many seconds a prompt of `tokens` tokens has been read, if it arrives now.

        Return 0 if the engine is idle: a wrong prediction could refuse all prompts, and no measurement would correct it.
        """
        if load.idle:
            return 0.0
        read_s = self._reading_s([*load.unread, tokens], load)
        if (behind := load.rows + len(load.unread) + 1 - load.most_rows) <= 0:
            return read_s
        # The mean time until one of the rows ends is the time of an answer, divided by the number of rows.
        free_s = behind * self._length(most_new) * self._token_s(load.most_rows) / load.most_rows
        return max(read_s, free_s + self._reading_s([tokens], load))

    def later_token_s(self, load: EngineLoad) -> float:
        """Return the mean time of the later tokens of a request that arrives now. Without other work, it is the time of the fastest step."""
        if load.idle:
            return self._fastest_s
        return self._token_s(min(load.most_rows, load.rows + len(load.unread) + 1))

    def chunk_s(self, load: EngineLoad, *, above_share: bool = False) -> float:
        """Return the seconds in each step for reading a prompt: a share of the time of the rows' step or, if it is longer, the rest
        of the target time for a token.

        Without rows, return 0, which means no limit, because no caller waits for a token. `above_share` is True if the prompt's
        tenant has more than its share of the rows.
        """
        if not load.rows:
            return 0.0
        step_s = self.step_s(load.rows)
        rest_s = SHARE * load.token_s - step_s if load.token_s < math.inf else 0.0
        return max((READING_SHARE_ABOVE if above_share else READING_SHARE) * step_s, rest_s)

    def _token_s(self, rows: int) -> float:
        """Return the time of a token with `rows` rows. It is the time of two steps, because a step may take twice as long while a
        prompt is read.
        """
        return 2 * self.step_s(rows)

    def _length(self, most: int) -> float:
        """Return the mean length of answers of at most `most` tokens."""
        known = self._lengths or (DEFAULT_LENGTH,)
        return sum(min(one, most) for one in known) / len(known)

    def _reading_s(self, prompts: Sequence[int], load: EngineLoad) -> float:
        """Return how long it takes to read prompts one after the other, beside the rows."""
        pass_s, token_s = self.chunks.line()
        slice_s = self.chunk_s(load)
        if not slice_s:
            return sum(pass_s + tokens * token_s for tokens in prompts)
        most = self.chunks.fitting(slice_s * self.slices)
        read_s = sum(math.ceil(tokens / most) * pass_s + tokens * token_s for tokens in prompts)
        return read_s * (1 + self.step_s(load.rows) / slice_s)
