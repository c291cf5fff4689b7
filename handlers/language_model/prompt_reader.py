"""Reads prompts chunk by chunk, each into a row of its own."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from .causal_model import CausalModel
from .pass_slices import PassSlices
from .rows import Rows
from .schedule import Chunk, ChunkTimes, ScheduledSequence

LAYERS_A_STEP = 4
"""The number of layers that a chunk's pass should run through in one step."""


class PromptReader:
    """The prompts that an engine reads, one chunk at a time. While the engine has rows, a chunk is read in slices, between the steps of the rows.

    With adapters, each pass is whole, because peft changes the layers for the time of a pass.
    """

    def __init__(self, model: CausalModel, gate: Callable[[], AbstractContextManager[Any]]) -> None:
        self._model, self._gate = model, gate
        layers = model.layers if model.adapters is None else []
        self._passes = PassSlices(layers, model.wait) if layers else None
        self.slices = max(1.0, len(layers) / LAYERS_A_STEP)
        """The number of steps over which the pass of a chunk is spread while there are rows."""
        self._chunk: Chunk | None = None
        """The chunk whose pass has begun and not ended."""
        self._taken_s = 0.0
        self._rows: dict[ScheduledSequence, Rows] = {}
        """The row of each prompt whose first chunk has begun."""
        self.times = ChunkTimes()

    def tokens(self, slice_s: float) -> int:
        """Return how many tokens the next chunk has, if each step has `slice_s` seconds for it. `slice_s` is 0 without rows."""
        if self._chunk is not None:
            return self._chunk.end - self._chunk.begin
        return self.times.tokens_within(slice_s * self.slices)

    def read(
        self,
        chunk: Chunk,
        ids: Sequence[int],
        fill: Callable[[Rows], None] | None,
        adapter: str,
        slice_s: float,
        *,
        every: bool = False,
    ) -> Tensor | None:
        """Read a chunk of the tokens `ids` for about `slice_s` seconds, or to its end if `slice_s` is 0.

        Return the logits after the chunk, (1, vocabulary). With `every`, return the logits after each of its tokens, (tokens,
        vocabulary). Return None if the chunk is not read yet; then call this again with the same chunk. Before the first chunk,
        `fill` puts the stored prefix into the row. Raise what the model raises.
        """
        begins = self._chunk != chunk
        if begins:
            self._begin(chunk, fill)
        began_s = time.perf_counter()
        try:
            logits = self._pass(chunk, ids, adapter, slice_s, begins=begins, every=every)
        except Exception:
            self._chunk = None
            raise
        if logits is not None:
            self._model.wait()
        self._taken_s += time.perf_counter() - began_s
        if logits is not None:
            self.times.note(chunk.end - chunk.begin, self._taken_s)
            self._chunk = None
        return logits

    def row(self, sequence: ScheduledSequence) -> Rows:
        """Return the row of a prompt that is read."""
        return self._rows[sequence]

    def forget(self, sequence: ScheduledSequence) -> None:
        """Forget a prompt. The memory of its row is freed, unless other rows use it."""
        if self._chunk is not None and self._chunk.sequence is sequence:
            self._stop()
        self._rows.pop(sequence, None)

    def _stop(self) -> None:
        if self._passes is not None:
            self._passes.stop()
        self._chunk = None

    def new_row(self, columns: int) -> Rows:
        """Return a row without tokens, with room for `columns`."""
        rows = self._model.new_rows(columns)
        rows.lengths = [0]
        return rows

    def _begin(self, chunk: Chunk, fill: Callable[[Rows], None] | None) -> None:
        self._stop()
        if chunk.begin == chunk.sequence.stored:
            self._rows[chunk.sequence] = rows = self.new_row(chunk.sequence.tokens)
            if fill is not None:
                fill(rows)
        self._chunk, self._taken_s = chunk, 0.0

    def _pass(
        self, chunk: Chunk, ids: Sequence[int], adapter: str, slice_s: float, *, begins: bool, every: bool
    ) -> Tensor | None:
        passes, rows, part = self._passes, self._rows[chunk.sequence], [[*ids[chunk.begin : chunk.end]]]
        if passes is not None and not begins:
            return passes.advance(slice_s or math.inf)
        if passes is None or not slice_s:
            # Do not enter the gate, because this thread is within the gate already.
            return self._model.forward(rows, part, [adapter], every=every)

        def gated() -> Tensor:
            with self._gate():
                return self._model.forward(rows, part, [adapter], every=every)

        return passes.begin(gated, slice_s)
