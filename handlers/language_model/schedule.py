"""Chooses the next step of an engine: the part of a prompt that it reads, and the rows that it continues.

It does no I/O and knows neither torch nor a clock. A step continues all rows by a token, and then reads one chunk of one
prompt, or a part of the chunk. A sequence joins the rows once its prompt is read, and leaves them at any step.

All rows are as wide as the longest one. So n rows hold n times the tokens of the longest one. This product stays within the window.
If the sequences get longer than expected, the youngest leaves the rows and waits again, with the tokens that it has made.

Tenants share the engine (`fair_queue.py`): each token that is read or made counts, and the prompt of the tenant that was served least is read
next, also in the middle of a longer prompt. Rows and window are shared equally. While a tenant below its share waits, rows of a tenant
above its share leave and wait again.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from ...fair_queue import FairQueue
from .times import TimeLine

LEAST_CHUNK, MOST_CHUNK = 4, 512
"""The fewest and the most tokens of a chunk. The last chunk of a prompt may have fewer."""
REGAINED = 64
"""After memory has run out, each step raises the limit of the rows' tokens by 1/REGAINED of the limit, and by the number of rows."""
DECAY = 0.95
"""The weight of a chunk's time is multiplied by this with each later chunk."""


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
    tenant: str = ""
    read: int = 0
    """How many tokens of the prompt have been read, or are stored."""

    deadline_s: float = field(init=False)
    """The number of its arrival: a tenant's sequences are served in this order. The fair queue requires this attribute name."""

    def __post_init__(self) -> None:
        self.read, self.deadline_s = self.stored, float(self.number)


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
    reading: list[ScheduledSequence] = field(default_factory=list)
    """The sequences whose prompts are being read, the last one first. Each of them already counts as a row."""
    _waiting: FairQueue[ScheduledSequence] = field(default_factory=FairQueue)
    _unfinished: ScheduledSequence | None = field(default=None, init=False)
    """The sequence whose chunk is read in part."""
    _room: int = field(default=0, init=False)
    """The window, or less after memory has run out."""

    def __post_init__(self) -> None:
        self._room = self.window

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def unread_before(self, sequence: ScheduledSequence) -> list[int]:
        """Return the tokens to read of each prompt that is being read, or that waits and is expected to come before `sequence`."""
        turns = Counter[str]()
        before = list(self.reading)
        own = 1 + sum(one.tenant == sequence.tenant for one in self._waiting)
        for one in sorted(self._waiting, key=_age):
            turns[one.tenant] += one.priority == sequence.priority
            # Tenants take turns: count as many prompts of each tenant as the tenant of `sequence` has up to `sequence`.
            rival = one.priority == sequence.priority and turns[one.tenant] <= own
            if one.priority < sequence.priority or rival:
                before.append(one)
        return [one.tokens - one.read for one in before]

    @property
    def next(self) -> ScheduledSequence | None:
        """The waiting sequence that will be read next."""
        return self._waiting.first()

    def add(self, sequence: ScheduledSequence) -> None:
        """Add a sequence, which waits until it can be read. It must fit into the window when no other sequence runs."""
        queue, tenant, priority = self._waiting, sequence.tenant, sequence.priority
        others = {
            one.tenant for one in (*self.rows, *self.reading, *queue.heads()) if one.priority == priority
        }
        queue.add(sequence)
        if tenant not in others and others:
            # Raise the tenant's service to the least of the others, so that its time without a sequence gives it no advantage.
            behind = min(queue.served(other, priority) for other in others) - queue.served(tenant, priority)
            queue.charge(tenant, priority, max(0.0, behind))

    def remove(self, sequence: ScheduledSequence) -> None:
        """Forget a sequence that has ended or is not wanted any more, wherever it is."""
        if self._unfinished is sequence:
            self._unfinished = None
        if not self._waiting.remove(sequence):
            (self.reading if sequence in self.reading else self.rows).remove(sequence)

    def step(self, chunk_tokens: int) -> EngineStep:
        """Return the next step, which reads at most `chunk_tokens` of a prompt. Call `done` when it is done."""
        dropped = self._above_window()
        for sequence in dropped:
            self._wait_again(sequence)
        self._admit()
        dropped += self._make_place()
        chunk = None
        if self.reading:
            reading = self._unfinished or self.reading[-1]
            chunk = Chunk(reading, reading.read, min(reading.tokens, reading.read + max(1, chunk_tokens)))
        return EngineStep(chunk, tuple(self.rows), tuple(dropped))

    def done(self, step: EngineStep, *, read: bool = True) -> None:
        """Record a step. Its rows have one more token.

        `read` is False if the pass of the chunk has not ended. The next step then has the same chunk, unless its sequence has
        left: the caller must give that step the same `chunk_tokens`.
        """
        for sequence in step.rows:
            sequence.tokens += 1
            self._waiting.charge(sequence.tenant, sequence.priority, 1.0)
        self._room = min(self.window, self._room + len(step.rows) + self._room // REGAINED)
        if step.chunk is None or step.chunk.sequence not in self.reading:
            return
        sequence = step.chunk.sequence
        self._unfinished = None if read else sequence
        if read:
            self._waiting.charge(sequence.tenant, sequence.priority, float(step.chunk.end - sequence.read))
            sequence.read = step.chunk.end
            if step.chunk.last:
                sequence.tokens += 1
                self.rows.append(sequence)
                self.reading.remove(sequence)

    def _turn(self, sequence: ScheduledSequence) -> tuple[int, float]:
        """Return a sequence's priority, and how much its tenant was served. The smaller pair is served first."""
        return sequence.priority, self._waiting.served(sequence.tenant, sequence.priority)

    def _above_window(self) -> list[ScheduledSequence]:
        """Take sequences out until the others fit into the window after one more token."""
        dropped: list[ScheduledSequence] = []
        while len(self.rows) > 1 and _held(self.rows) > self._room:
            dropped.append(self._take_youngest(self.rows))
        # Then take out sequences that are being read. They lose only what was read of their prompts.
        while self.reading and len(places := [*self.rows, *self.reading]) > 1 and _held(places) > self._room:
            dropped.append(self._take_youngest(self.reading))
        return dropped

    def _make_place(self) -> list[ScheduledSequence]:
        """Let rows of tenants above their share wait again, if a sequence of a tenant below its share then fits."""
        head, kept, left = self._waiting.first(), list(self.rows), list[ScheduledSequence]()
        if head is None or not self._comes_first(head):
            return []
        while not self._fits(head, kept) and (row := self._excess(head, kept)) is not None:
            kept.remove(row)
            left.append(row)
        if not left or not self._fits(head, kept):
            return []
        self.rows = kept
        self._waiting.remove(head)
        self.reading.append(head)
        for row in left:
            self._wait_again(row)
        return left

    def _excess(self, head: ScheduledSequence, rows: list[ScheduledSequence]) -> ScheduledSequence | None:
        """Return the youngest row of the tenant with the most rows or tokens, if this tenant is above its share and the tenant of `head` is not."""
        victims = [one for one in rows if one.tenant != head.tenant and one.priority >= head.priority]
        if not victims:
            return None
        of: dict[str, list[ScheduledSequence]] = {head.tenant: [head]}
        for one in (*rows, *self.reading):
            of.setdefault(one.tenant, []).append(one)
        tenants = len(of.keys() | {one.tenant for one in self._waiting.heads()})
        above = {tenant: self._part(held) * tenants for tenant, held in of.items()}
        most = max((one.tenant for one in victims), key=above.__getitem__)
        if above[head.tenant] > 1 or above[most] <= 1:
            return None
        return max((one for one in victims if one.tenant == most), key=_age)

    def above_share(self, sequence: ScheduledSequence) -> bool:
        """Return True if the tenant of `sequence` has more than its share of the rows or of the window, and other tenants have rows."""
        tenants = {one.tenant for one in (*self.rows, sequence)}
        own = [one for one in (*self.rows, *self.reading) if one.tenant == sequence.tenant]
        return len(tenants) > 1 and self._part(own) * len(tenants) > 1

    def _part(self, held: list[ScheduledSequence]) -> float:
        """Return the part of the rows or of the window that a tenant's sequences use, whichever is larger. Return 0 for a single
        sequence, which is never above a share.
        """
        return max(len(held) / self.most_rows, _held(held) / self._room) if len(held) > 1 else 0.0

    def drop_youngest(self) -> ScheduledSequence | None:
        """Let the youngest row wait again, because memory has run out. Return None if there is one row.

        This lowers the limit of tokens to those of the other rows. The limit then rises with each step.
        """
        if len(self.rows) < 2:
            return None
        youngest = self._take_youngest(self.rows)
        self._room = _held(self.rows)
        self._wait_again(youngest)
        return youngest

    def _take_youngest(self, sequences: list[ScheduledSequence]) -> ScheduledSequence:
        """Remove a sequence of the lowest priority, and return it: the youngest one of the tenant with the most sequences."""
        count = Counter(one.tenant for one in (*self.rows, *self.reading))
        youngest = max(sequences, key=lambda one: (one.priority, count[one.tenant], one.number))
        sequences.remove(youngest)
        return youngest

    def _wait_again(self, sequence: ScheduledSequence) -> None:
        if self._unfinished is sequence:
            self._unfinished = None
        sequence.read = sequence.stored
        self.add(sequence)

    def _admit(self) -> None:
        """Begin to read the sequences that are next, while they fit."""
        while (head := self._waiting.first()) is not None and self._comes_first(head) and self._fits(head):
            self._waiting.remove(head)
            self.reading.append(head)

    def _comes_first(self, sequence: ScheduledSequence) -> bool:
        """Return True if a waiting sequence is to be read now: before the rest of a prompt of a lower priority, or before the rest
        of a longer prompt if its tenant was served less.
        """
        if not self.reading:
            return True
        other = self.reading[-1]
        shorter = sequence.tokens - sequence.read < other.tokens - other.read
        return sequence.priority < other.priority or (shorter and self._turn(sequence) < self._turn(other))

    def _fits(self, sequence: ScheduledSequence, rows: list[ScheduledSequence] | None = None) -> bool:
        """Return True if another sequence fits beside these rows, within `most_rows` and the window."""
        places = [*(self.rows if rows is None else rows), *self.reading]
        return not places or (len(places) < self.most_rows and _held([*places, sequence]) <= self._room)


def _held(sequences: list[ScheduledSequence]) -> int:
    """Return the tokens for which these rows need memory after the next step: each row needs as many as the longest row."""
    return len(sequences) * max((one.tokens + 1 for one in sequences), default=0)


def _age(sequence: ScheduledSequence) -> tuple[int, int]:
    return sequence.priority, sequence.number


class ChunkTimes:
    """Learns how long a chunk takes: a time for the weights, which each pass reads, and a time for each token."""

    def __init__(self) -> None:
        self._times = TimeLine(DECAY)
        self._chosen = LEAST_CHUNK
        """The last result of `tokens_within` beside rows. The next one is at most twice as large, since the line may be wrong for larger chunks."""

    def note(self, tokens: int, taken_s: float) -> None:
        self._times.note(tokens, taken_s)

    def line(self) -> tuple[float, float]:
        """Return the seconds of a pass without its tokens, and the seconds of a token. If all chunks have one size, the first number is 0."""
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
