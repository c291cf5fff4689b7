"""A causal model that several callers use at once, with a thread that runs its steps."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import traceback
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ...errors import EngineStopped
from ..sampling.prompt_logprobs import PromptLogprobs
from ..sampling.sampler import Sampler
from ..sampling.sampling import Sampling
from .admission import NO_TARGETS, Targets
from .causal_model import CausalModel
from .engine_steps import EngineSteps, SequenceRun, Token
from .prefixes import Prefix, Prefixes
from .schedule import ScheduledSequence

LOG = logging.getLogger(__name__)


@dataclass(eq=False)
class Engine:
    """A model, its rows and its thread, which begins with the first sequence.

    The number of rows times the tokens of the longest row is at most `window`. Each step runs in a context of `gate`, which waits for weights
    that still arrive.
    """

    model: CausalModel
    most_rows: int
    window: int
    prefixes: Prefixes | None = None
    gate: Callable[[], AbstractContextManager[Any]] = nullcontext
    _commands: queue.SimpleQueue[tuple[bool, SequenceRun]] = field(
        default_factory=queue.SimpleQueue, init=False
    )
    _thread: threading.Thread | None = field(default=None, init=False)
    _arrived: int = field(default=0, init=False)
    _stopped: str = field(default="", init=False)
    """Why the thread has ended; "" while it runs."""

    def __post_init__(self) -> None:
        if self.model.why_alone:
            self.most_rows = 1
        self._steps = EngineSteps(self.model, self.most_rows, self.window, self.gate)

    async def generate(
        self, ids: Sequence[int], sampler: Sampler, ends: Collection[int], most_new: int, priority: int = 0,
        targets: Targets = NO_TARGETS, adapter: str = "", tenant: str = "", scored: PromptLogprobs | None = None,
    ) -> AsyncGenerator[Token]:  # fmt: skip
        """Yield the tokens that follow `ids`: at most `most_new`, and none after one of `ends`.

        The prompt and these tokens must fit into the model and the window. If the caller closes this iterator, the sequence
        leaves the engine with the next step. Raise what a step has raised, and Overloaded if the tokens would come later than
        `targets` permits. Times in `targets` are those of `time.monotonic`. The adapter must have arrived. Tenants share the engine
        equally. `scored` has the logprobs of the prompt when the first token comes.
        """
        self._arrived += 1
        stored, fill = 0, None
        # Use no stored prefix for the logprobs of a prompt, because the logits of a stored prefix are not known.
        prefix = self.prefix(ids, adapter) if scored is None else None
        if self.prefixes is not None and prefix is not None:
            stored, fill = len(prefix.ids), partial(self.prefixes.fill, prefix=prefix)
        sequence = ScheduledSequence(self._arrived, len(ids), len(ids) + most_new, priority, stored, tenant)
        loop = asyncio.get_running_loop()
        run = SequenceRun(
            sequence,
            list(ids),
            sampler,
            frozenset(ends),
            fill,
            adapter,
            targets,
            loop,
            asyncio.Queue(),
            scored,
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
        """Return the longest stored prefix of a prompt; None if there is none. With an adapter there is none, because an adapter
        changes keys and values.
        """
        return self.prefixes.longest(ids) if self.prefixes is not None and not adapter else None

    def rehearse(self) -> None:
        """Read a prompt of a few tokens and make two tokens, in this thread, so that later steps find all kernels loaded."""
        rows, one = self.model.new_rows(), self._steps.reader.new_row(4)
        self.model.forward(one, [[1, 1, 1, 1]])
        rows.join(one)
        drawn = Sampler(Sampling(seed=0), (), ())
        for _ in range(2):
            logits = self.model.forward(rows, [[1]])
            logits.argmax(-1).tolist()
            drawn.choose(logits[0])

    def _begin(self, run: SequenceRun) -> None:
        self._commands.put((True, run))
        if self._thread is None and not self._stopped:
            # Make it a daemon, so that the worker's end does not wait for it.
            thread = threading.Thread(target=self._work, name="language-model", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                # The system may refuse another thread. Without a thread, the sequence would wait for ever, so give it an error.
                self._stop(error)
                return
            self._thread = thread
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
                        self._steps.step()
                except Exception as error:
                    LOG.exception("a step of the language model failed")
                    if not self._steps.fail(error):
                        # No sequence has caused the error, so the next step would fail, too.
                        raise
        except BaseException as error:
            LOG.exception("the language model has stopped")
            self._stop(error)

    def _stop(self, error: BaseException) -> None:
        # Set this before `_commands` is emptied. `_begin` reads it after it has added its command, so each sequence gets the
        # error from this method or from `_begin`.
        self._stopped = f"The language model has stopped: {type(error).__name__}: {error}"
        traceback.clear_frames(error.__traceback__)
        runs = self._steps.runs
        while not self._commands.empty():
            runs.append(self._commands.get()[1])
        for run in runs:
            run.put(EngineStopped(self._stopped))

    def _take_commands(self) -> None:
        """Add and remove the sequences that callers begin and give up. If there is no sequence, wait for one."""
        idle = self._steps.rest()
        while idle or not self._commands.empty():
            begins, run = self._commands.get()
            idle = False
            if begins:
                self._steps.add(run)
            else:
                self._steps.remove(run)
