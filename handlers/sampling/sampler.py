"""Chooses the next tokens of sequences from the model's logits, as each request asks."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ...errors import OutputNotFinite
from .draws import drawn, rows_of
from .sampling import Sampling


class Logprobs(NamedTuple):
    """Natural logarithms of the model's own probabilities, without penalties and temperature."""

    chosen: float
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens, the likeliest first."""
    rank: int | None = None
    """1 if the chosen token is the likeliest one; None if it was not counted."""


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


ChosenToken = tuple[int, Logprobs | None]
"""A token, and its logprobs if the request asks for them."""


class TokenLimits:
    """The tokens that no answer to a request may have. The samplers of all answers share this object, so only the engine's
    thread uses it.
    """

    def __init__(self, allowed: Collection[int] | None, bad_words: Sequence[Sequence[int]] = ()) -> None:
        """`bad_words` has the tokens of each text that may not be made."""
        self._allowed = None if allowed is None else torch.tensor(sorted({*allowed}))
        self._prepared: Tensor | None = None
        """The allowed tokens that the model has, on its device."""
        self._bad = dict[tuple[int, ...], list[int]]()
        """The last tokens of bad words, by the tokens before them."""
        for *before, last in bad_words:
            self._bad.setdefault(tuple(before), []).append(last)
        self._lengths = sorted({*map(len, self._bad)})

    @property
    def memory(self) -> int:
        """How many of the last tokens `forbid` needs."""
        return max(self._lengths, default=0)

    @property
    def none(self) -> bool:
        return self._allowed is None and not self._bad

    def allow(self, scores: Tensor) -> None:
        """In scores (vocabulary,), set each token that is not allowed to -inf."""
        if self._allowed is None:
            return
        if self._prepared is None:
            self._prepared = self._allowed[self._allowed < len(scores)].to(scores.device)
        kept = scores[self._prepared]
        scores.fill_(-math.inf)[self._prepared] = kept

    def forbid(self, scores: Tensor, last: Sequence[int]) -> None:
        """In scores (vocabulary,), set each token that would complete a bad word after the tokens `last` to -inf."""
        befores = (tuple(last[len(last) - length :]) for length in self._lengths if length <= len(last))
        ended = [token for before in befores for token in self._bad.get(before, ()) if token < len(scores)]
        scores[ended] = -math.inf


class Sampler:
    """Chooses the tokens of one sequence, and counts the chosen tokens for the penalties."""

    def __init__(
        self,
        sampling: Sampling,
        prompt: Collection[int],
        ends: Collection[int],
        grammar: Grammar | None = None,
        limits: TokenLimits | None = None,
    ) -> None:
        """`ends` are the tokens that end a sequence. Without `limits`, only `sampling.allowed_token_ids` limits the tokens."""
        self.sampling, self._grammar = sampling, grammar
        self._limits = limits or TokenLimits(sampling.allowed_token_ids)
        self._ends = sorted({*ends} | {*sampling.stop_token_ids})
        self._made: Counter[int] = Counter()
        self._prompt = sorted(set(prompt)) if sampling.repetition_penalty != 1 else []
        self._last = deque[int](maxlen=self._limits.memory)
        self._generator: torch.Generator | None = None

    @property
    def greedy(self) -> bool:
        """True if `choose` would only take the largest logit. Then call `note` instead."""
        return self.sampling.greedy and self._grammar is None and self._limits.none

    @property
    def complete(self) -> bool:
        """True if the grammar permits no other token."""
        return self._grammar is not None and self._grammar.complete

    def choose(self, logits: Tensor) -> ChosenToken:
        """Return the next token. `logits` has the shape (vocabulary,). Raise the error that makes a choice impossible."""
        (found,) = choose([self], logits[None])
        if isinstance(found, Exception):
            raise found
        return found

    def note(self, token: int) -> None:
        """Learn which token follows."""
        self._made[token] += 1
        self._last.append(token)
        if self._grammar is not None:
            self._grammar.accept(token)

    def limit(self, scores: Tensor) -> None:
        """Apply the penalties of the request to scores (vocabulary,), and set each token that may not follow to -inf."""
        of = self.sampling
        self._limits.allow(scores)
        if of.logit_bias:
            biases = {token: bias for token, bias in of.logit_bias.items() if 0 <= token < len(scores)}
            scores[list(biases)] += torch.tensor(list(biases.values()), device=scores.device)
        if of.repetition_penalty != 1 and (seen := [*{*self._prompt, *self._made}]):
            values = scores[seen]
            scores[seen] = torch.where(
                values > 0, values / of.repetition_penalty, values * of.repetition_penalty
            )
        if (of.presence_penalty or of.frequency_penalty) and self._made:
            counts = torch.tensor(list(self._made.values()), dtype=scores.dtype, device=scores.device)
            scores[list(self._made)] -= counts * of.frequency_penalty + of.presence_penalty
        self._limits.forbid(scores, [*self._last])
        if self._grammar is not None:
            scores.copy_(self._grammar.mask(scores))
        if self._made.total() < of.min_tokens and self._ends:
            ends = [token for token in self._ends if token < len(scores)]
            kept = scores[ends]
            scores[ends] = -math.inf
            if not bool(scores.isfinite().any()):
                # Permit the ends again if no other token may follow.
                scores[ends] = kept

    def random(self) -> float:
        """Return the next random number of this sequence, from 0 to 1."""
        if self._generator is None:
            self._generator = torch.Generator()
            if self.sampling.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(self.sampling.seed)
        return float(torch.rand((), generator=self._generator, dtype=torch.float64))


def choose(
    samplers: Sequence[Sampler], logits: Tensor, rows: Sequence[int] | None = None
) -> list[ChosenToken | Exception]:
    """Choose and note the next token of each sampler from its row of `logits` (rows, vocabulary), all at once. `rows` are
    the numbers of these rows.

    Return for each row its choice, or the error that makes one impossible. An error changes no other row.
    """
    rows = range(len(samplers)) if rows is None else rows
    random = [one.random() if one.sampling.temperature else 0.0 for one in samplers]
    if len(samplers) > 1:
        with suppress(Exception):
            return _chosen(samplers, rows_of(logits, rows), random)
    # Choose row by row. For all rows at once, there may be too little memory.
    made: list[ChosenToken | Exception] = []
    for sampler, row, share in zip(samplers, rows, random, strict=True):
        try:
            made += _chosen([sampler], logits[row : row + 1], [share])
        except Exception as error:  # noqa: BLE001  only this row fails
            made.append(error)
    return made


def _chosen(
    samplers: Sequence[Sampler], logits: Tensor, random: Sequence[float]
) -> list[ChosenToken | Exception]:
    """Do what `choose` says, with a random number for each row. Raise what fails for all rows, before a token is noted."""
    scores, failed = logits.to(torch.float32, copy=True), dict[int, Exception]()
    for row, sampler in enumerate(samplers):
        try:
            sampler.limit(scores[row])
        except Exception as error:  # noqa: BLE001  only this row fails
            failed[row] = error
    largest, tokens = (found.tolist() for found in scores.max(-1))
    rows = [row for row, sampler in enumerate(samplers) if row not in failed and sampler.sampling.temperature]
    rows = [row for row in rows if math.isfinite(largest[row])]
    if rows:
        asked = [samplers[row].sampling for row in rows]
        for row, token in zip(
            rows, drawn(rows_of(scores, rows), asked, [random[row] for row in rows]), strict=True
        ):
            tokens[row] = token
    logprobs = _logprobs(samplers, logits, tokens)
    made: list[ChosenToken | Exception] = []
    for row, sampler in enumerate(samplers):
        if row in failed:
            made.append(failed[row])
            continue
        try:
            check_finite(largest[row], "With the request's penalties and limits, there is")
            sampler.note(tokens[row])
            made.append((tokens[row], logprobs.get(row)))
        except Exception as error:  # noqa: BLE001  only this row fails
            made.append(error)
    return made


def _logprobs(samplers: Sequence[Sampler], logits: Tensor, tokens: Sequence[int]) -> dict[int, Logprobs]:
    """Return the logprobs of the rows that ask for them, by the number of the row."""
    counts = {
        row: count for row, one in enumerate(samplers) if (count := one.sampling.top_logprobs) is not None
    }
    if not counts:
        return {}
    found = rows_of(logits, [*counts]).float().log_softmax(-1)
    return dict(
        zip(counts, logprobs_of(found, [tokens[row] for row in counts], [*counts.values()]), strict=True)
    )


def logprobs_of(found: Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[Logprobs]:
    """For each row of `found` (rows, vocabulary), return the logprobs of its token in `tokens`, and of as many of the likeliest
    tokens as `counts` says.
    """
    chosen = found.gather(1, torch.tensor(tokens, device=found.device)[:, None])[:, 0].tolist()
    top = found.topk(min(max(counts), found.shape[-1]))
    lines = zip(chosen, counts, top.indices.tolist(), top.values.tolist(), strict=True)
    return [
        Logprobs(value, tuple(zip(ids[:count], values[:count], strict=True)))
        for value, count, ids, values in lines
    ]
