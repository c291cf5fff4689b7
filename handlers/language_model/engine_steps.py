"""Runs the steps of an engine: each continues all rows by a token, and reads a part of one prompt."""

from __future__ import annotations

import asyncio
import logging
import math
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from ...errors import InputInvalid, OutputNotFinite, Overloaded
from ..failure import is_out_of_memory
from ..sampling.prompt_logprobs import PromptLogprobs
from ..sampling.sampler import Logprobs, Sampler, check_finite, choose
from .admission import NO_TARGETS, Admission, EngineLoad, Targets
from .causal_model import CausalModel
from .prompt_reader import PromptReader
from .rows import Rows
from .schedule import Chunk, ScheduledSequence, StepSchedule

LEAST_RETRY_S = 0.1
"""The shortest time for which the caller of a refused request should wait before they try again."""
LEAST_SLICE_S = 1e-3
"""The shortest time for reading a prompt in a step. A step reads at least one layer of a chunk. A time of 0 would mean the whole chunk."""
LOG = logging.getLogger(__name__)


class Token(NamedTuple):
    """A token that was made."""

    id: int
    logprobs: Logprobs | None
    ends: bool
    """True if it is one of the tokens that end a sequence."""
    last: bool
    """True if no token may follow: this token ends the sequence, or the grammar is complete."""


@dataclass(eq=False, slots=True)
class SequenceRun:
    """One sequence, and where its tokens go."""

    sequence: ScheduledSequence
    ids: list[int]
    sampler: Sampler
    ends: Collection[int]
    fill: Callable[[Rows], None] | None
    """Puts the stored beginning of the prompt into a row; None if nothing is stored."""
    adapter: str
    """The name of its adapter; "" for none."""
    targets: Targets
    loop: asyncio.AbstractEventLoop
    out: asyncio.Queue[Token | Exception]
    scored: PromptLogprobs | None = None
    """Collects the logprobs of the prompt; None if it has all of them, or the request does not ask for them."""
    over: bool = False
    prompt: int = field(init=False)
    """The tokens of the prompt."""

    def __post_init__(self) -> None:
        self.prompt = len(self.ids)

    def put(self, item: Token | Exception) -> bool:
        """Give the caller a token. Return False if its event loop is closed."""
        try:
            self.loop.call_soon_threadsafe(self.out.put_nowait, item)
        except RuntimeError:
            return False
        return True


Made = tuple[SequenceRun, Token | Exception]
"""A run, and its next token or why there is none."""


class EngineSteps:
    """The sequences of an engine, its rows and its schedule. Only the engine's thread calls it.

    The number of rows times the tokens of the longest row is at most `window`.
    """

    def __init__(
        self, model: CausalModel, most_rows: int, window: int, gate: Callable[[], AbstractContextManager[Any]]
    ) -> None:  # fmt: skip
        self._model, self._most_rows = model, most_rows
        self._schedule = StepSchedule(most_rows, window)
        self._rows = model.new_rows()
        self._members: list[SequenceRun] = []
        """The runs of the rows, by the number of the row."""
        self._runs: dict[ScheduledSequence, SequenceRun] = {}
        self.reader = PromptReader(model, gate)
        self._admission = Admission(self.reader.times, self.reader.slices)

    @property
    def runs(self) -> list[SequenceRun]:
        """The sequences that have not ended."""
        return [*self._runs.values()]

    def add(self, run: SequenceRun) -> None:
        """Add a sequence, which waits until it can be read. Refuse it if its tokens would be late."""
        if (refusal := self._refusal(run)) is not None:
            run.put(refusal)
            return
        self._runs[run.sequence] = run
        self._schedule.add(run.sequence)

    def remove(self, run: SequenceRun) -> None:
        """Forget a sequence whose caller wants no more tokens."""
        if run.sequence in self._runs:
            self._end(run)

    def rest(self) -> bool:
        """If there is no sequence, free the memory of the rows and return True.

        If this were not called, memory without a row would stay on the device, also while the worker is parked.
        """
        if self._runs:
            return False
        self._rows.free()
        return True

    def step(self) -> None:
        """Continue all rows by a token, and read a part of a prompt."""
        self._refuse_late()
        load = self._load(())
        reading = self._schedule.reading[-1:]
        step = self._schedule.step(self.reader.tokens(self._reading_s(reading, load)))
        for sequence in step.dropped:
            self._leave(self._runs[sequence])
        if (continued := self._continue()) is None:
            return
        made, late_s = continued
        found = None
        if step.chunk is not None:
            slice_s = self._reading_s([step.chunk.sequence], load)
            slice_s = max(LEAST_SLICE_S, slice_s - late_s) if step.rows else 0.0
            found = self._read(step.chunk, slice_s)
        self._schedule.done(step, read=found is not None)
        for run, token in [*made, *(found or ())]:
            self._give(run, token)

    def _reading_s(self, reading: Sequence[ScheduledSequence], load: EngineLoad) -> float:
        """Return the seconds that a step has for reading a prompt. `reading` has the sequence of this prompt, if there is one."""
        above = any(self._schedule.above_share(one) for one in reading)
        return self._admission.chunk_s(load, above_share=above)

    def _give(self, run: SequenceRun, token: Token | Exception) -> None:
        ends = not run.put(token) or isinstance(token, Exception)
        if isinstance(token, Token):
            run.ids.append(token.id)
            ends = ends or token.last or len(run.ids) >= run.sequence.most_tokens
        if ends:
            self._end(run)

    def _load(self, unread: Sequence[int]) -> EngineLoad:
        token_s = [run.targets.token_s for run in self._members]
        # If a row has no target, ask for no longer chunks, because they would slow this row.
        shortest_s = min(token_s, default=math.inf) if math.inf not in token_s else math.inf
        return EngineLoad(len(self._members), unread, self._most_rows, shortest_s)

    def _refusal(self, run: SequenceRun) -> Overloaded | None:
        """Return why a sequence that arrives now would be late; None if it is in time."""
        if run.targets == NO_TARGETS:
            return None
        load = self._load(self._schedule.unread_before(run.sequence))
        if (token_s := self._admission.later_token_s(load)) > run.targets.token_s:
            return _overloaded(f"A token would take {token_s * 1e3:.0f} ms at present.", LEAST_RETRY_S)
        return self._late(run, load, run.sequence.most_tokens - run.sequence.tokens)

    def _late(self, run: SequenceRun, load: EngineLoad, most_new: int) -> Overloaded | None:
        """Return the refusal of a sequence whose first token would come too late; None if it is in time."""
        unread = run.sequence.tokens - run.sequence.stored
        first_s = self._admission.first_token_s(load, unread, most_new)
        late_s = time.monotonic() + first_s - run.targets.first_by_s
        text = f"The first token would come {late_s:.2f} s later than the request allows."
        return _overloaded(text, late_s) if late_s > 0 else None

    def _refuse_late(self) -> None:
        """Refuse the next waiting sequence while it would be late and has made no token."""
        while (sequence := self._schedule.next) is not None:
            run = self._runs[sequence]
            refusal = self._late(run, self._load(()), 1)
            if refusal is None or len(run.ids) > run.prompt:
                return
            run.put(refusal)
            self._end(run)

    def _continue(self) -> tuple[list[Made], float] | None:
        """Make the next token of each row. Also return by how many seconds this took longer than predicted.

        If memory has run out, and there are several rows, let the youngest row wait again and return None.
        """
        if not (members := self._members):
            return [], 0.0
        predicted_s = self._admission.step_s(len(members))
        began_s = time.perf_counter()
        try:
            logits = self._model.forward(
                self._rows, [[run.ids[-1]] for run in members], [run.adapter for run in members]
            )
        except Exception as error:
            LOG.exception("a step of the language model failed")
            if is_out_of_memory(error) and (dropped := self._schedule.drop_youngest()) is not None:
                self._leave(self._runs[dropped])
                return None
            return [(run, _freed(error)) for run in members], 0.0
        made = _choose(members, logits)
        taken_s = time.perf_counter() - began_s
        self._admission.note_step(len(members), taken_s)
        return made, max(0.0, taken_s - predicted_s)

    def _read(self, chunk: Chunk, slice_s: float) -> list[Made] | None:
        """Read a chunk for about `slice_s` seconds, or to its end if `slice_s` is 0. Return None if the chunk is not read yet.

        After the last chunk, the sequence joins the rows with its next token.
        """
        run = self._runs[chunk.sequence]
        try:
            if chunk.begin == chunk.sequence.stored:
                self._load_adapter(run)
            scored = run.scored
            logits = self.reader.read(
                chunk, run.ids, run.fill, run.adapter, slice_s, every=scored is not None
            )
            if logits is None:
                return None
            if scored is not None:
                scored.add(chunk.begin, logits)
                logits = logits[-1:]
                run.scored = None if scored.complete else scored
            if not chunk.last:
                return []
            self._rows.join(self.reader.row(chunk.sequence))
        except Exception as error:
            # Fail only this sequence, because the rows of the other sequences are not affected.
            LOG.exception("a prompt could not be read")
            self._give(run, _freed(error))
            return []
        self._members.append(run)
        self.reader.forget(chunk.sequence)
        return _choose([run], logits)

    def _load_adapter(self, run: SequenceRun) -> None:
        if run.adapter and self._model.adapters is not None:
            used = [*self._members, *(self._runs[one] for one in self._schedule.reading)]
            self._model.adapters.load(run.adapter, {other.adapter for other in used})

    def _end(self, run: SequenceRun) -> None:
        self._schedule.remove(run.sequence)
        self._leave(run)
        del self._runs[run.sequence]
        if made := len(run.ids) - run.prompt:
            self._admission.note_answer(made)

    def _leave(self, run: SequenceRun) -> None:
        """Take a run out of the rows, or stop reading its prompt."""
        if run in self._members:
            row = self._members.index(run)
            self._rows.leave(row)
            # `Rows.leave` has given the last row the number of the removed row.
            last = self._members.pop()
            if last is not run:
                self._members[row] = last
        else:
            self.reader.forget(run.sequence)

    def fail(self, error: Exception) -> bool:
        """Fail the sequences of a step that failed for an unknown reason. The sequences that wait are not affected.

        Return False if the step had no sequences.
        """
        failed = [*self._members, *(self._runs[one] for one in self._schedule.reading)]
        for run in failed:
            run.put(_freed(error))
            self.reader.forget(run.sequence)
            self._schedule.remove(run.sequence)
            del self._runs[run.sequence]
        self._rows.free()
        self._members, self._rows = [], self._model.new_rows()
        return bool(failed)


def _choose(runs: Sequence[SequenceRun], logits: Tensor) -> list[Made]:
    """Choose the next token of each run from the logits: (runs, vocabulary)."""
    largest, likeliest = (found.tolist() for found in logits.max(-1))
    made: list[Made] = []
    rows: list[int] = []
    for row, run in enumerate(runs):
        try:
            check_finite(largest[row], "The model computed")
        except OutputNotFinite as error:
            made.append((run, error))
            continue
        if run.sampler.greedy:
            run.sampler.note(likeliest[row])
            made.append((run, _token(run, likeliest[row], None)))
        else:
            rows.append(row)
    found = choose([runs[row].sampler for row in rows], logits, rows)
    for row, choice in zip(rows, found, strict=True):
        if isinstance(choice, Exception):
            if not isinstance(choice, InputInvalid | OutputNotFinite):
                # Only the request that asks for this choice fails.
                LOG.error("a token could not be chosen", exc_info=choice)
            made.append((runs[row], _freed(choice)))
        else:
            made.append((runs[row], _token(runs[row], *choice)))
    return made


def _token(run: SequenceRun, token: int, logprobs: Logprobs | None) -> Token:
    ends = token in run.ends
    return Token(token, logprobs, ends, ends or run.sampler.complete)


def _freed(error: Exception) -> Exception:
    """Return an error without the variables of its frames, which have a pass's keys, values and other large tensors."""
    traceback.clear_frames(error.__traceback__)
    return error


def _overloaded(text: str, late_s: float) -> Overloaded:
    retry_s = round(max(late_s, LEAST_RETRY_S), 3)
    remedy = "Try again as Retry-After says, or allow more time."
    return Overloaded(text, remedy=remedy, details={"retry_after_s": retry_s})
