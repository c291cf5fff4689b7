"""Runs the steps of a causal model in a thread: each continues all rows by a token, and reads a part of one prompt."""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
import time
import traceback
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from ...errors import EngineStopped, InputInvalid, OutputNotFinite, Overloaded
from ..failure import is_out_of_memory
from .admission import Admission, EngineLoad, Targets
from .causal_model import CausalModel
from .contract import Sampling
from .prefixes import Prefix, Prefixes
from .prompt_reader import PromptReader
from .rows import Rows
from .sampling import Logprobs, Sampler, check_finite
from .schedule import Chunk, ScheduledSequence, StepSchedule

NO_TARGETS = Targets()
LEAST_RETRY_S = 0.1
"""The shortest time after which a refused request should come again."""
LEAST_SLICE_S = 1e-3
"""The shortest time for reading a prompt, which then reads a layer. 0 would mean all of it."""
LOG = logging.getLogger(__name__)


class Token(NamedTuple):
    """A token that was made."""

    id: int
    logprobs: Logprobs | None
    ends: bool
    """True if it is one of the tokens that end a sequence."""
    last: bool
    """True if none may follow: it ends the sequence, or the grammar is complete."""


@dataclass(eq=False, slots=True)
class _Run:
    """One sequence, and where its tokens go."""

    sequence: ScheduledSequence
    ids: list[int]
    sampler: Sampler
    ends: Collection[int]
    prefix: Prefix | None
    """The beginning of the prompt that is stored."""
    adapter: str
    """The name of its adapter; "" for none."""
    targets: Targets
    loop: asyncio.AbstractEventLoop
    out: asyncio.Queue[Token | Exception]
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


_Made = tuple[_Run, Token | Exception]
"""A run, and its next token or why there is none."""


@dataclass(eq=False)
class Engine:
    """A model, its rows and its thread, which begins with the first sequence.

    `window` limits the number of rows times the tokens of the longest. Each step runs in a context of `gate`, which waits for weights
    that still arrive.
    """

    model: CausalModel
    most_rows: int
    window: int
    prefixes: Prefixes | None = None
    gate: Callable[[], AbstractContextManager[Any]] = nullcontext
    _commands: queue.SimpleQueue[tuple[bool, _Run]] = field(default_factory=queue.SimpleQueue, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)
    _arrived: int = field(default=0, init=False)
    _stopped: str = field(default="", init=False)
    """Why the thread has ended; "" while it runs."""

    def __post_init__(self) -> None:
        if self.model.why_alone:
            self.most_rows = 1
        self._schedule = StepSchedule(self.most_rows, self.window)
        self._rows = self.model.new_rows()
        self._members: list[_Run] = []
        """The runs of the rows, by the number of the row."""
        self._runs: dict[ScheduledSequence, _Run] = {}
        self._reader = PromptReader(self.model, self.gate)
        self._admission = Admission(self._reader.times, self._reader.slices)

    async def generate(
        self, ids: Sequence[int], sampler: Sampler, ends: Collection[int], most_new: int, priority: int = 0,
        targets: Targets = NO_TARGETS, adapter: str = "", tenant: str = "",
    ) -> AsyncGenerator[Token]:  # fmt: skip
        """Yield the tokens that follow `ids`: at most `most_new`, and none after one of `ends`.

        The prompt and these tokens must fit into the model and the window. If the caller closes this iterator, the sequence
        leaves the engine with the next step. Raise what a step has raised, and Overloaded if the tokens would come later than `targets`
        says, whose times are of `time.monotonic`. The adapter must have arrived. Tenants share the engine equally.
        """
        self._arrived += 1
        prefix = self.prefix(ids, adapter)
        stored = len(prefix.ids) if prefix is not None else 0
        sequence = ScheduledSequence(self._arrived, len(ids), len(ids) + most_new, priority, stored, tenant)
        loop = asyncio.get_running_loop()
        run = _Run(
            sequence, list(ids), sampler, frozenset(ends), prefix, adapter, targets, loop, asyncio.Queue()
        )
        self._begin(run)
        try:
            for left in range(most_new - 1, -1, -1):
                item = await run.out.get()
                if isinstance(item, Exception):
                    raise item
                if item.last or not left:
                    run.over = True
                yield item
                if run.over:
                    return
        finally:
            if not run.over:
                self._commands.put((False, run))

    def prefix(self, ids: Sequence[int], adapter: str = "") -> Prefix | None:
        """Return the beginning of a prompt that is stored; None if there is none, as with an adapter, which changes keys and values."""
        return self.prefixes.longest(ids) if self.prefixes is not None and not adapter else None

    def rehearse(self) -> None:
        """Read a prompt of a few tokens and make two, in this thread, so that later steps find all kernels loaded."""
        rows, one = self.model.new_rows(), self._reader.new_row(4)
        self.model.forward(one, [[1, 1, 1, 1]])
        rows.join(one)
        drawn = Sampler(Sampling(seed=0), (), ())
        for _ in range(2):
            logits = self.model.forward(rows, [[1]])
            logits.argmax(-1).tolist()
            drawn.choose(logits[0])

    def _begin(self, run: _Run) -> None:
        self._commands.put((True, run))
        if self._thread is None:
            # A daemon: the worker's end does not wait for it.
            self._thread = threading.Thread(target=self._work, name="language-model", daemon=True)
            self._thread.start()
        if self._stopped:
            run.put(EngineStopped(self._stopped))

    # -- in the thread

    def _work(self) -> None:
        """Run steps. If a failure cannot be undone, fail all sequences, also those that come later, and end."""
        try:
            while True:
                try:
                    self._take_commands()
                    with self.gate():
                        self._step()
                except Exception as error:
                    LOG.exception("a step of the language model failed")
                    if not self._fail(error):
                        # No sequence has caused it, so that the next step would fail, too.
                        raise
        except BaseException as error:
            LOG.exception("the language model has stopped")
            self._stop(error)

    def _stop(self, error: BaseException) -> None:
        # `_begin` reads this after it has added its command. So each sequence gets the error here or there.
        self._stopped = f"The language model has stopped: {type(error).__name__}: {error}"
        traceback.clear_frames(error.__traceback__)
        runs = [*self._runs.values()]
        while not self._commands.empty():
            runs.append(self._commands.get()[1])
        for run in runs:
            run.put(EngineStopped(self._stopped))

    def _step(self) -> None:
        self._refuse_late()
        slice_s = self._admission.chunk_s(self._load(()))
        step = self._schedule.step(self._reader.tokens(slice_s))
        for sequence in step.dropped:
            self._leave(self._runs[sequence])
        if (continued := self._continue()) is None:
            return
        made, late_s = continued
        slice_s = max(LEAST_SLICE_S, slice_s - late_s) if step.rows else 0.0
        found = self._read(step.chunk, slice_s) if step.chunk is not None else None
        self._schedule.done(step, read=found is not None)
        for run, token in [*made, *(found or ())]:
            self._give(run, token)

    def _give(self, run: _Run, token: Token | Exception) -> None:
        ends = not run.put(token) or isinstance(token, Exception)
        if isinstance(token, Token):
            run.ids.append(token.id)
            ends = ends or token.last or len(run.ids) >= run.sequence.most_tokens
        if ends:
            self._end(run)

    def _take_commands(self) -> None:
        """Add and remove sequences. Wait for one if there is nothing to do."""
        idle = not self._members and not self._schedule.reading and not self._schedule.waiting
        if idle:
            # Otherwise memory without a row would stay on the device, also while the worker is parked.
            self._rows.free()
        while idle or not self._commands.empty():
            begins, run = self._commands.get()
            idle = False
            if begins:
                if (refusal := self._refusal(run)) is not None:
                    run.put(refusal)
                    continue
                self._runs[run.sequence] = run
                self._schedule.add(run.sequence)
            elif run.sequence in self._runs:
                self._end(run)

    def _load(self, unread: Sequence[int]) -> EngineLoad:
        token_s = [run.targets.token_s for run in self._members]
        # A longer chunk would slow the rows without a target.
        shortest_s = min(token_s, default=math.inf) if math.inf not in token_s else math.inf
        return EngineLoad(len(self._members), unread, self.most_rows, shortest_s)

    def _refusal(self, run: _Run) -> Overloaded | None:
        """Return why a sequence that arrives now would be late; None if it is in time."""
        if run.targets == NO_TARGETS:
            return None
        load = self._load(self._schedule.unread_before(run.sequence))
        if (token_s := self._admission.later_token_s(load)) > run.targets.token_s:
            return _overloaded(f"A token would take {token_s * 1e3:.0f} ms at present.", LEAST_RETRY_S)
        return self._late(run, load, run.sequence.most_tokens - run.sequence.tokens)

    def _late(self, run: _Run, load: EngineLoad, most_new: int) -> Overloaded | None:
        """Return the refusal of a sequence whose first token would come too late; None if it is in time."""
        unread = run.sequence.tokens - run.sequence.stored
        first_s = self._admission.first_token_s(load, unread, most_new)
        late_s = time.monotonic() + first_s - run.targets.first_by_s
        text = f"The first token would come {late_s:.2f} s later than the request allows."
        return _overloaded(text, late_s) if late_s > 0 else None

    def _refuse_late(self) -> None:
        """Fail the sequences that are next and would be late, if they have made no token."""
        while (sequence := self._schedule.next) is not None:
            run = self._runs[sequence]
            refusal = self._late(run, self._load(()), 1)
            if refusal is None or len(run.ids) > run.prompt:
                return
            run.put(refusal)
            self._end(run)

    def _continue(self) -> tuple[list[_Made], float] | None:
        """Make the next token of each row. Return also by how many seconds this took longer than predicted.

        Return None if memory has run out and the youngest row waits again, so that the others have room.
        """
        if not (members := self._members):
            return [], 0.0
        predicted_s = self._admission.step_s(len(members))
        began_s = time.perf_counter()
        try:
            logits = self.model.forward(
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

    def _read(self, chunk: Chunk, slice_s: float) -> list[_Made] | None:
        """Read a chunk for about `slice_s` seconds, or to its end if this is 0. Return None if it is not read yet.

        After the last chunk, the sequence joins the rows with its next token.
        """
        run = self._runs[chunk.sequence]
        try:
            if chunk.begin == chunk.sequence.stored:
                self._load_adapter(run)
            logits = self._reader.read(chunk, run.ids, self._fill(run), run.adapter, slice_s)
            if logits is None:
                return None
            if not chunk.last:
                return []
            self._rows.join(self._reader.row(chunk.sequence))
        except Exception as error:
            # The rows of the other sequences are not affected.
            LOG.exception("a prompt could not be read")
            self._give(run, _freed(error))
            return []
        self._members.append(run)
        self._reader.forget(chunk.sequence)
        return _choose([run], logits)

    def _fill(self, run: _Run) -> Callable[[Rows], None] | None:
        """Return what puts the stored prefix of a run into its row."""
        if run.prefix is None or self.prefixes is None:
            return None
        return partial(self.prefixes.fill, prefix=run.prefix)

    def _load_adapter(self, run: _Run) -> None:
        if run.adapter and self.model.adapters is not None:
            used = [*self._members, *(self._runs[one] for one in self._schedule.reading)]
            self.model.adapters.load(run.adapter, {other.adapter for other in used})

    def _end(self, run: _Run) -> None:
        self._schedule.remove(run.sequence)
        self._leave(run)
        del self._runs[run.sequence]
        if made := len(run.ids) - run.prompt:
            self._admission.note_answer(made)

    def _leave(self, run: _Run) -> None:
        """Take a run out of the rows, or stop to read its prompt."""
        if run in self._members:
            row = self._members.index(run)
            self._rows.leave(row)
            # The last row has the number of this one now.
            last = self._members.pop()
            if last is not run:
                self._members[row] = last
        else:
            self._reader.forget(run.sequence)

    def _fail(self, error: Exception) -> bool:
        """Fail the sequences of a step that failed for an unknown reason. The sequences that wait are not affected.

        Return False if there are no such sequences.
        """
        failed = [*self._members, *(self._runs[one] for one in self._schedule.reading)]
        for run in failed:
            run.put(_freed(error))
            self._reader.forget(run.sequence)
            self._schedule.remove(run.sequence)
            del self._runs[run.sequence]
        self._rows.free()
        self._members, self._rows = [], self.model.new_rows()
        return bool(failed)


def _choose(runs: Sequence[_Run], logits: Tensor) -> list[_Made]:
    """Choose the next token of each run from the logits: (runs, vocabulary)."""
    largest, likeliest = (found.tolist() for found in logits.max(-1))
    made: list[_Made] = []
    for row, run in enumerate(runs):
        try:
            check_finite(largest[row], "The model computed")
            if run.sampler.greedy:
                token, logprobs = likeliest[row], None
                run.sampler.note(token)
            else:
                token, logprobs = run.sampler.choose(logits[row])
        except (InputInvalid, OutputNotFinite) as error:
            made.append((run, error))
        except Exception as error:
            # Only the request that asks for this choice fails.
            LOG.exception("a token could not be chosen")
            made.append((run, error))
        else:
            ends = token in run.ends
            made.append((run, Token(token, logprobs, ends, ends or run.sampler.complete)))
    return made


def _freed(error: Exception) -> Exception:
    """Return an error without the variables of its frames, which have a pass's keys, values and other large tensors."""
    traceback.clear_frames(error.__traceback__)
    return error


def _overloaded(text: str, late_s: float) -> Overloaded:
    retry_s = round(max(late_s, LEAST_RETRY_S), 3)
    remedy = "Try again as Retry-After says, or allow more time."
    return Overloaded(text, remedy=remedy, details={"retry_after_s": retry_s})
