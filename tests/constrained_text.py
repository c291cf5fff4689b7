"""Checks whether a grammar permits a text, and draws random texts that it permits. Uses the real llguidance."""

from __future__ import annotations

from typing import Any

import torch
from pilotflame.handlers.sampling.constraint import Constraints
from pilotflame.handlers.sampling.sampler import Sampler
from pilotflame.handlers.sampling.sampling import Sampling


def accepted(tokenizer: Any, grammar: str, text: str) -> bool:
    """Return whether the grammar permits the whole text."""
    constraint = Constraints(tokenizer, [tokenizer.eos_token_id]).new(grammar)
    for token in tokenizer.encode(text, add_special_tokens=False):
        if not constraint.mask(torch.zeros(len(tokenizer)))[token].isfinite():
            return False
        constraint.accept(token)
    return constraint.complete or bool(
        constraint.mask(torch.zeros(len(tokenizer)))[tokenizer.eos_token_id].isfinite()
    )


def drawn(tokenizer: Any, grammar: str, seed: int, most: int = 400) -> str | None:
    """Return a text that is sampled from random logits under the grammar. Return None if it has not ended
    after `most` tokens.
    """
    end = tokenizer.eos_token_id
    constraint = Constraints(tokenizer, [end]).new(grammar)
    sampler = Sampler(Sampling(seed=seed), (), [end], constraint)
    torch.manual_seed(seed)
    ids: list[int] = []
    while len(ids) < most:
        token, _ = sampler.choose(torch.randn(len(tokenizer) + 3) * 3)
        if token == end:
            return str(tokenizer.decode(ids))
        ids.append(token)
        if sampler.complete:
            return str(tokenizer.decode(ids))
    return None
