"""Collects the logprobs of a prompt's tokens while the prompt is read."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .sampler import Logprobs, logprobs_of

ROWS = 64
"""How many rows of logits are turned into logprobs at a time. Each row takes the memory of a vocabulary."""


class PromptLogprobs:
    """The logprobs of one prompt."""

    def __init__(self, ids: Sequence[int], count: int) -> None:
        """`count` is the number of likeliest tokens to report in each place."""
        self._ids, self._count = ids, count
        self.found: list[Logprobs] = []
        """The logprobs of the second token and of all later tokens."""

    @property
    def complete(self) -> bool:
        return len(self.found) == len(self._ids) - 1

    def taken(self) -> list[Logprobs]:
        """Return the logprobs, and forget them."""
        found, self.found = self.found, []
        return found

    def add(self, begin: int, logits: Tensor) -> None:
        """Note the logits (tokens, vocabulary) after the tokens from number `begin` on. A prompt may be read again, so skip tokens
        that were noted before.
        """
        # Skip the logits after the last token of the prompt, because they are for the answer.
        for first in range(len(self.found) - begin, min(len(logits), len(self._ids) - 1 - begin), ROWS):
            rows = logits[first : min(first + ROWS, len(self._ids) - 1 - begin)]
            following = self._ids[begin + first + 1 :][: len(rows)]
            logprobs = rows.float().log_softmax(-1)
            better = logprobs > logprobs[range(len(rows)), following][:, None]
            ranks = (better.sum(-1) + 1).tolist()
            found = logprobs_of(logprobs, following, [self._count] * len(rows))
            self.found += [one._replace(rank=rank) for one, rank in zip(found, ranks, strict=True)]
