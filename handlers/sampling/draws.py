"""Draws a token for each row of logits, by the temperature, top_k, top_p and min_p of each row."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .sampling import Sampling

LEAST_TEMPERATURE = 0.01
"""Lower temperatures are raised to this one, which already takes the likeliest token nearly always. Logits that are divided by
less could exceed the range of float32.
"""
CANDIDATES = 256, 4096
"""The limits (top_k, top_p, min_p) are tried on the 256 likeliest tokens, then on 4096, and then on the whole vocabulary. The first
of these groups with all tokens that the limits permit is used. It is nearly always a small one, and sorting a whole vocabulary takes
much longer.
"""


def drawn(scores: Tensor, samplings: Sequence[Sampling], random: Sequence[float]) -> list[int]:
    """Return a token for each row of `scores` (rows, vocabulary). This changes `scores`. `random` has a number from 0 to 1 for each row."""
    heat = [max(of.temperature, LEAST_TEMPERATURE) for of in samplings]
    scores /= torch.tensor(heat, device=scores.device)[:, None]
    tokens = [0] * len(samplings)
    limited = [row for row, of in enumerate(samplings) if _limits(of)]
    free = [row for row, of in enumerate(samplings) if not _limits(of)]
    if free:
        picked = _picked(rows_of(scores, free).softmax(-1), [random[row] for row in free])
        for row, token in zip(free, picked[:, 0].tolist(), strict=True):
            tokens[row] = token
    whole = scores.shape[-1]
    for count in (*(one for one in CANDIDATES if one < whole), whole):
        if not limited:
            break
        found = _among(
            rows_of(scores, limited),
            [samplings[row] for row in limited],
            [random[row] for row in limited],
            count,
        )
        for row, token in zip(limited, found, strict=True):
            tokens[row] = token
        limited = [row for row, token in zip(limited, found, strict=True) if token < 0]
    return tokens


def rows_of(scores: Tensor, rows: Sequence[int]) -> Tensor:
    """Return these rows. If they are all rows, return `scores` itself, because a copy takes as long as a draw."""
    return scores if len(rows) == len(scores) else scores[[*rows]]


def _limits(of: Sampling) -> bool:
    return of.top_p < 1 or of.top_k > 0 or of.min_p > 0


def _among(scores: Tensor, samplings: Sequence[Sampling], random: Sequence[float], count: int) -> list[int]:
    """Return a token for each row from its `count` likeliest tokens; -1 if the limits of the row may permit other tokens, too."""
    values, order = scores.topk(count) if count < scores.shape[-1] else scores.sort(descending=True)

    def column(numbers: list[float]) -> Tensor:
        return torch.tensor(numbers, device=scores.device)[:, None]

    last = torch.tensor([min(of.top_k, count) - 1 if of.top_k > 0 else count - 1 for of in samplings])
    least = values[:, :1] + column([math.log(of.min_p) if of.min_p else -math.inf for of in samplings])
    # Never keep a token that may not follow (-inf), even if fewer than top_k other tokens are left.
    kept = (
        (values > -math.inf)
        & (values >= least)
        & (values >= values.gather(1, last.to(values.device)[:, None]))
    )
    # As in vLLM, top_p applies to what min_p and top_k leave.
    whole = ~kept[:, -1:] if count < scores.shape[-1] else torch.ones_like(kept[:, -1:])
    alone = column([float(of.top_k <= 0 and not of.min_p) for of in samplings]) > 0
    values = values.masked_fill(~kept, -math.inf)
    total = torch.where(whole, values.logsumexp(-1, keepdim=True), scores.logsumexp(-1, keepdim=True))
    shares = (values - total).exp()
    kept &= shares.cumsum(-1) - shares < column([of.top_p for of in samplings])
    certain = whole | (alone & ~kept[:, -1:])
    tokens = order.gather(1, _picked(shares.masked_fill(~kept, 0.0), random))
    return torch.where(certain, tokens, -1)[:, 0].tolist()


def _picked(shares: Tensor, random: Sequence[float]) -> Tensor:
    """Draw a column for each row with its shares as weights, from a random number for each row. Return (rows, 1)."""
    sums = shares.cumsum(-1, dtype=torch.float64)
    wanted = torch.tensor(random, dtype=torch.float64, device=shares.device)[:, None] * sums[:, -1:]
    # Stay below the sum, so that a share of 0 at the end is never picked.
    largest = torch.nextafter(sums[:, -1:], torch.zeros_like(wanted))
    return torch.searchsorted(sums, torch.minimum(wanted, largest), right=True)
