"""Chooses the next step of an engine: the part of a prompt that it reads, and the rows that it continues.

It does no I/O and knows neither torch nor a clock. A step continues all rows by a token, and then reads one chunk of one
prompt, or a part of the chunk. A sequence joins the rows once its prompt is read, and leaves them at any step.

All rows are as wide as the longest one. So n rows hold n times the tokens of the longest one. This product stays within the window.
If the sequences get longer than expected, the youngest leaves the rows and waits again, with the tokens that it has made.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import NamedTuple

from .times import TimeLine

LEAST_CHUNK, MOST_CHUNK = 4, 512
"""The tokens of a chunk."""
REGAINED = 64
"""After memory has run out, each step gives the rows one part in REGAINED of their room more."""
DECAY = 0.95
"""How much less each earlier chunk counts."""


@dataclass(eq=False, slots=True)
class ScheduledSequence:
    """A prompt and the tokens that follow it."""

    number: int
    """The order of arrival."""
    tokens: int
    """The tokens of the prompt, and those that were made."""
    most_tokens: int
    """The tokens at which it ends at the latest."""
    priority: int = 0
    """Sequences with a lower priority number come first."""
    stored: int = 0
    """The tokens at its beginning whose keys and values are stored, so that no step reads them."""
    read: int = 0
    """How many tokens of the prompt have been read, or are stored."""

    def __post_init__(self) -> None:
        self.read = self.stored

    @property
    def place(self) -> tuple[int, int]:
        return self.priority, self.number


class Chunk(NamedTuple):
    """The tokens [begin, end) of a sequence, which one or more steps read. The last chunk of a sequence makes its next token."""

    sequence: ScheduledSequence
    begin: int
    end: int

    @property
    def last(self) -> bool:
        return self.end == self.sequence.tokens


class EngineStep(NamedTuple):
    """One step: first, the sequences in `dropped` leave the rows. Then the rows continue, and `chunk` is read."""

    chunk: Chunk | None
    rows: tuple[ScheduledSequence, ...]
    dropped: tuple[ScheduledSequence, ...] = ()


@dataclass(slots=True)
class StepSchedule:
    """The sequences of an engine. `most_rows` and `window` (tokens) are limits."""

    most_rows: int
    window: int
    rows: list[ScheduledSequence] = field(default_factory=list)
    """The sequences that each step continues by a token."""
    reading: ScheduledSequence | None = None
    """The sequence whose prompt is being read. It has a place in the rows already."""
    _waiting: list[tuple[tuple[int, int], ScheduledSequence]] = field(default_factory=list)
    _room: int = field(default=0, init=False)
    """The window, or less after memory has run out."""

    def __post_init__(self) -> None:
        self._room = self.window

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def unread_before(self, sequence: ScheduledSequence) -> list[int]:
        """Return the tokens to read of each prompt that is being read, or that waits and comes before `sequence`."""
        reading = [self.reading] if self.reading is not None else []
        before = [one for place, one in self._waiting if place < sequence.place]
        return [one.tokens - one.read for one in (*reading, *before)]

    @property
    def next(self) -> ScheduledSequence | None:
        """The sequence that waits for its place the longest."""
        return self._waiting[0][1] if self._waiting else None

    def add(self, sequence: ScheduledSequence) -> None:
        """Let a sequence wait for its place. Alone, it must fit into the window."""
        heapq.heappush(self._waiting, (sequence.place, sequence))

    def remove(self, sequence: ScheduledSequence) -> None:
        """Forget a sequence that has ended or is not wanted any more, wherever it is."""
        if self.reading is sequence:
            self.reading = None
        elif sequence in self.rows:
            self.rows.remove(sequence)
        else:
            self._waiting = [entry for entry in self._waiting if entry[1] is not sequence]
            heapq.heapify(self._waiting)

    def step(self, chunk_tokens: int) -> EngineStep:
        """Return the next step, which reads at most `chunk_tokens` of a prompt. Call `done` when it is done."""
        dropped = tuple(self._dropped())
        self._admit()
        chunk = None
        if (reading := self.reading) is not None:
            chunk = Chunk(reading, reading.read, min(reading.tokens, reading.read + max(1, chunk_tokens)))
        return EngineStep(chunk, tuple(self.rows), dropped)

    def done(self, step: EngineStep, *, read: bool = True) -> None:
        """Record a step. Its rows have one more token.

        `read` is False if a part of the chunk is left. Then the next step must get the same number of tokens, and has the same chunk, unless
        its sequence has left.
        """
        for sequence in step.rows:
            sequence.tokens += 1
        self._room = min(self.window, self._room + len(step.rows) + self._room // REGAINED)
        if read and step.chunk is not None and step.chunk.sequence is self.reading:
            sequence = step.chunk.sequence
            sequence.read = step.chunk.end
            if step.chunk.last:
                sequence.tokens += 1
                self.rows.append(sequence)
                self.reading = None

    def _dropped(self) -> list[ScheduledSequence]:
        """Take the youngest sequences out of the rows until the rows fit into the window after one more token."""
        dropped: list[ScheduledSequence] = []
        while len(self.rows) > 1 and self._held() > self._room:
            dropped.append(self._take_youngest())
        # A sequence that is being read has no row yet, so it waits again at no cost but its reading.
        if self.reading is not None and self.rows and self._held(self.reading) > self._room:
            dropped.append(self.reading)
            self.reading = None
        for sequence in dropped:
            self._wait_again(sequence)
        return dropped

    def drop_youngest(self) -> ScheduledSequence | None:
        """Let the youngest row wait again, because memory has run out. Return None if there is one row.

        The rows get no more tokens at first, and then more with each step.
        """
        if len(self.rows) < 2:
            return None
        youngest = self._take_youngest()
        self._room = self._held()
        self._wait_again(youngest)
        return youngest

    def _take_youngest(self) -> ScheduledSequence:
        youngest = max(self.rows, key=lambda one: one.place)
        self.rows.remove(youngest)
        return youngest

    def _wait_again(self, sequence: ScheduledSequence) -> None:
        sequence.read = sequence.stored
        self.add(sequence)

    def _admit(self) -> None:
        if self.reading is None and self._waiting and len(self.rows) < self.most_rows:
            sequence = self._waiting[0][1]
            if not self.rows or self._held(sequence) <= self._room:
                heapq.heappop(self._waiting)
                self.reading = sequence

    def _held(self, *more: ScheduledSequence) -> int:
        """Return the tokens that the rows hold after the next step, together with `more` sequences."""
        sequences = (*self.rows, *more)
        return len(sequences) * max((one.tokens + 1 for one in sequences), default=0)


class ChunkTimes:
    """Learns how long a chunk takes: a time for the weights, which each pass reads, and a time for each token."""

    def __init__(self) -> None:
        self._times = TimeLine(DECAY)
        self._chosen = LEAST_CHUNK
        """The last result of `tokens_within` beside rows. The next one is at most twice as large, since the line may be wrong there."""

    def note(self, tokens: int, taken_s: float) -> None:
        self._times.note(tokens, taken_s)

    def line(self) -> tuple[float, float]:
        """Return the seconds of a pass, and of each token. Chunks of one size show no line: then a pass costs nothing."""
        return self._times.fit(least=0.1, level=1.0)

    def tokens_within(self, seconds: float) -> int:
        """Return how many tokens the next chunk should have, so that it takes `seconds`. `seconds` is 0 without rows."""
        if not seconds:
            return MOST_CHUNK
        self._chosen = max(LEAST_CHUNK, min(2 * self._chosen, self.fitting(seconds)))
        return self._chosen

    def fitting(self, seconds: float) -> int:
        """Return how many tokens a pass reads in this time, within the limits of a chunk."""
        pass_s, token_s = self.line()
        within = int((seconds - pass_s) / token_s) if token_s else LEAST_CHUNK
        return max(LEAST_CHUNK, min(MOST_CHUNK, within))
