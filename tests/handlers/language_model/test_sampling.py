"""The choice of tokens: what each parameter forbids, favours and reports."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.handlers.language_model.contract import Sampling
from pilotflame.handlers.language_model.sampling import Sampler
from torch import Tensor

LOGITS = torch.tensor([2.0, 1.0, 0.5, -1.0, 1.5])


def drawn(count: int = 400, **fields: object) -> Counter[int]:
    sampler = Sampler(Sampling(seed=1, **fields), [], [])  # type: ignore[arg-type]
    return Counter(sampler.choose(LOGITS)[0] for _ in range(count))


def chosen(prompt: list[int] = [], ends: list[int] = [], **fields: object) -> int:  # noqa: B006
    return Sampler(Sampling(temperature=0.0, **fields), prompt, ends).choose(LOGITS)[0]  # type: ignore[arg-type]


def test_the_likeliest_tokens_of_each_limit() -> None:
    assert set(drawn()) == {0, 1, 2, 3, 4}
    assert set(drawn(top_k=2)) == {0, 4}
    assert set(drawn(top_p=0.5)) == {0, 4}
    assert set(drawn(top_p=0.01)) == {0}
    assert set(drawn(min_p=0.5)) == {0, 4}
    assert set(drawn(temperature=0.05)) == {0}


def test_min_p_comes_before_top_p_and_top_k() -> None:
    """As in vLLM: the probabilities of the tokens that min_p leaves add up to 1."""
    # 0 and 4 have 0.715 of the probability of all tokens, and 0.731 of what min_p leaves.
    assert set(drawn(min_p=0.2)) == {0, 1, 2, 4}
    assert set(drawn(top_p=0.72)) == {0, 1, 4}
    assert set(drawn(min_p=0.2, top_p=0.72)) == {0, 4}
    assert set(drawn(min_p=0.5, top_p=0.61)) == {0}
    assert set(drawn(min_p=0.5, top_k=1)) == {0}


def test_draws_follow_the_probabilities() -> None:
    shares = LOGITS.softmax(-1).tolist()
    found = drawn(4000)
    for token, share in enumerate(shares):
        assert found[token] / 4000 == pytest.approx(share, abs=0.03)


def test_what_moves_the_largest_logit() -> None:
    assert chosen() == 0
    assert chosen(logit_bias={3: 100.0}) == 3
    assert chosen(logit_bias={0: -100.0, 999_999: 5.0}) == 4
    assert chosen([0], repetition_penalty=4.0) == 4
    assert chosen(ends=[0], min_tokens=1) == 4
    assert chosen(stop_token_ids=(0,), min_tokens=1) == 4


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_tokens_that_were_made_lose(name: str) -> None:
    sampler = Sampler(Sampling(temperature=0.0, **{name: 0.7}), [], [])  # type: ignore[arg-type]
    assert [sampler.choose(LOGITS)[0] for _ in range(3)] == [0, 4, 0]
    greedy = Sampler(Sampling(temperature=0.0), [], [])
    assert [greedy.choose(LOGITS)[0] for _ in range(3)] == [0, 0, 0]


@given(st.lists(st.floats(-20, 20), min_size=2, max_size=50), st.integers(0, 20))
def test_logprobs_are_those_of_the_model(logits: list[float], count: int) -> None:
    values = torch.tensor(logits)
    sampling = Sampling(temperature=0.0, top_logprobs=count, logit_bias={1: 100.0})
    token, found = Sampler(sampling, [], []).choose(values)
    assert token == 1
    assert found is not None
    wanted = values.log_softmax(-1)
    assert math.isclose(found.chosen, float(wanted[1]), abs_tol=1e-5)
    assert len(found.top) == min(count, len(logits))
    assert [one[1] for one in found.top] == sorted((one[1] for one in found.top), reverse=True)


def test_a_grammar_decides_and_learns() -> None:
    class Alternating:
        def __init__(self) -> None:
            self.seen: list[int] = []

        def mask(self, logits: Tensor) -> Tensor:
            allowed = torch.full_like(logits, -math.inf)
            allowed[len(self.seen) % 2 + 2] = 0.0
            return logits + allowed

        def accept(self, token: int) -> None:
            self.seen.append(token)

    grammar = Alternating()
    sampler = Sampler(Sampling(temperature=0.0), [], [], grammar)
    assert not sampler.greedy
    assert [sampler.choose(LOGITS)[0] for _ in range(4)] == [2, 3, 2, 3] == grammar.seen
