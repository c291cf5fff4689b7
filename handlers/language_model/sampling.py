"""Chooses the next token of a sequence from the model's logits, as the request asks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ...errors import OutputNotFinite
from .contract import Sampling

LEAST_TEMPERATURE = 0.01
"""A lower temperature is as good as this one, and would exceed the range of the numbers."""


class Logprobs(NamedTuple):
    """Natural logarithms of the model's own probabilities, without penalties and temperature."""

    chosen: float
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens, the likeliest first."""


def check_finite(largest: float, what: str) -> None:
    """Raise OutputNotFinite if `largest`, the largest logit of a row, is NaN or infinite. A smaller logit may be -inf."""
    if not math.isfinite(largest):
        message = f"{what} {largest} as the largest logit of the next token, which is not a finite number."
        raise OutputNotFinite(
            message, remedy="Change the prompt or the sampling, or check the model's weights and its dtype."
        )


class Grammar(Protocol):
    """Says which tokens may follow."""

    complete: bool
    """True if no token may follow, except one that ends the sequence."""

    def mask(self, logits: Tensor) -> Tensor:
        """Return the logits (vocabulary,), with -inf for each token that may not follow."""

    def accept(self, token: int) -> None:
        """Learn which token follows."""


class Sampler:
    """Chooses the tokens of one sequence."""

    def __init__(
        self,
        sampling: Sampling,
        prompt: Collection[int],
        ends: Collection[int],
        grammar: Grammar | None = None,
    ) -> None:
        """`ends` are the tokens that end a sequence."""
        self._sampling, self._grammar = sampling, grammar
        self._ends = sorted({*ends} | {*sampling.stop_token_ids})
        self._made: Counter[int] = Counter()
        self._prompt = sorted(set(prompt)) if sampling.repetition_penalty != 1 else []
        self._generator: torch.Generator | None = None

    @property
    def greedy(self) -> bool:
        """True if `choose` would only take the largest logit. Then call `note` instead."""
        return self._sampling.greedy and self._grammar is None

    @property
    def complete(self) -> bool:
        """True if the grammar permits no other token."""
        return self._grammar is not None and self._grammar.complete

    def choose(self, logits: Tensor) -> tuple[int, Logprobs | None]:
        """Return the next token. `logits` has the shape (vocabulary,)."""
        raw = logits.float()
        scores = self._allowed(self._penalised(raw))
        check_finite(float(scores.max()), "With the request's penalties and limits, there is")
        token = int(scores.argmax()) if not self._sampling.temperature else self._drawn(scores)
        self.note(token)
        return token, self._logprobs(raw, token)

    def note(self, token: int) -> None:
        """Learn which token follows."""
        self._made[token] += 1
        if self._grammar is not None:
            self._grammar.accept(token)

    def _penalised(self, scores: Tensor) -> Tensor:
        of = self._sampling
        if of.logit_bias:
            scores = scores.clone()
            kept = {token: bias for token, bias in of.logit_bias.items() if 0 <= token < len(scores)}
            scores[list(kept)] += torch.tensor(list(kept.values()), device=scores.device)
        if of.repetition_penalty != 1 and (seen := [*self._prompt, *self._made]):
            scores = scores.clone()
            values = scores[seen]
            scores[seen] = torch.where(
                values > 0, values / of.repetition_penalty, values * of.repetition_penalty
            )
        if (of.presence_penalty or of.frequency_penalty) and self._made:
            counts = torch.tensor(list(self._made.values()), dtype=scores.dtype, device=scores.device)
            scores = scores.clone()
            scores[list(self._made)] -= counts * of.frequency_penalty + of.presence_penalty
        return scores

    def _allowed(self, scores: Tensor) -> Tensor:
        if self._grammar is not None:
            scores = self._grammar.mask(scores)
        if self._made.total() < self._sampling.min_tokens and self._ends:
            others = scores.clone()
            others[[token for token in self._ends if token < len(scores)]] = -math.inf
            # There may be no other token to choose.
            scores = others if bool(others.isfinite().any()) else scores
        return scores

    def _drawn(self, scores: Tensor) -> int:
        of = self._sampling
        scores = scores / max(of.temperature, LEAST_TEMPERATURE)
        if of.min_p:
            scores = scores.masked_fill(scores < scores.max() + math.log(of.min_p), -math.inf)
        if 0 < of.top_k < len(scores):
            scores = scores.masked_fill(scores < scores.topk(of.top_k).values[-1], -math.inf)
        probabilities = scores.softmax(-1)
        if of.top_p < 1:
            ordered, order = probabilities.sort(descending=True)
            beyond = ordered.cumsum(-1) - ordered >= of.top_p
            probabilities = probabilities.masked_fill(
                torch.zeros_like(beyond).scatter(-1, order, beyond), 0.0
            )
        return int(torch.multinomial(probabilities, 1, generator=self._random(scores.device)))

    def _random(self, device: torch.device) -> torch.Generator:
        if self._generator is None:
            self._generator = torch.Generator(device)
            if self._sampling.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(self._sampling.seed)
        return self._generator

    def _logprobs(self, raw: Tensor, token: int) -> Logprobs | None:
        if (count := self._sampling.top_logprobs) is None:
            return None
        found = raw.log_softmax(-1)
        top = found.topk(min(count, len(found)))
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        return Logprobs(float(found[token]), tuple(pairs))
