"""The choice of tokens: what each parameter forbids, favours and reports."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.errors import OutputNotFinite
from pilotflame.handlers.sampling import draws, sampler
from pilotflame.handlers.sampling.sampler import Sampler, TokenLimits, choose
from pilotflame.handlers.sampling.sampling import Sampling
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


def test_only_the_allowed_tokens_are_made() -> None:
    assert chosen(allowed_token_ids=(2, 3)) == 2
    assert set(drawn(allowed_token_ids=(1, 3, 999_999))) == {1, 3}
    assert chosen(allowed_token_ids=(2, 3), logit_bias={3: 100.0}) == 3
    # A ban is stronger than a bias, and an end that may not come yet is stronger than a permission.
    assert chosen(ends=[2], allowed_token_ids=(2, 3), min_tokens=1) == 3
    assert not Sampling(temperature=0.0, allowed_token_ids=(2,)).greedy


def test_a_bad_word_is_not_made() -> None:
    def made(words: list[list[int]], count: int = 4) -> list[int]:
        sampler = Sampler(Sampling(temperature=0.0), [], [], None, TokenLimits(None, words))
        assert not sampler.greedy
        return [sampler.choose(LOGITS)[0] for _ in range(count)]

    assert made([[0]]) == [4, 4, 4, 4]
    assert made([[0, 0]]) == [0, 4, 0, 4]
    assert made([[0, 0, 0], [4]]) == [0, 0, 1, 0]
    assert made([[0], [4, 4], [999_999]]) == [4, 1, 4, 1]


def test_the_limits_of_a_request_are_prepared_once_for_all_its_answers() -> None:
    limits = TokenLimits((3, 2, 3, 3, 999_999), [[2, 2], [2, 3], [9, 9, 2]])
    samplers = [Sampler(Sampling(temperature=0.0), [], [], None, limits) for _ in range(2)]
    assert [one.greedy for one in samplers] == [False, False]
    assert [choose(samplers, torch.stack([LOGITS, LOGITS]))[0] for _ in range(1)] == [(2, None)]
    prepared = limits._prepared
    assert prepared is not None
    assert prepared.tolist() == [2, 3]
    # After 2, both tokens would end a bad word, so that none is left.
    assert all(isinstance(one, OutputNotFinite) for one in choose(samplers, torch.stack([LOGITS, LOGITS])))
    assert limits._prepared is prepared


def test_many_rows_at_once_are_as_one_by_one() -> None:
    """No row sees what another one asks for."""
    asked = [
        Sampling(seed=1), Sampling(seed=2, top_p=0.9), Sampling(seed=3, top_k=7), Sampling(seed=4, min_p=0.02, top_p=0.8),
        Sampling(temperature=0.0, top_logprobs=3), Sampling(seed=5, temperature=2.0, top_p=0.99), Sampling(seed=6, top_k=400),
        Sampling(seed=7, top_k=300, top_p=0.6, top_logprobs=0), Sampling(temperature=0.0, presence_penalty=1.0),
    ]  # fmt: skip
    logits = torch.randn(20, len(asked), 1000, generator=torch.Generator().manual_seed(0))
    alone = [Sampler(of, [], []) for of in asked]
    together = [Sampler(of, [], []) for of in asked]
    before = logits.clone()
    for step in logits:
        wanted = [sampler.choose(row) for sampler, row in zip(alone, step, strict=True)]
        found = choose(together, step)
        assert [one[0] for one in found] == [one[0] for one in wanted]  # type: ignore[index]
        assert [one[1] is None for one in found] == [one[1] is None for one in wanted]  # type: ignore[index]
    assert torch.equal(logits, before)


@given(
    st.lists(st.floats(-5, 5), min_size=2, max_size=600), st.floats(0.05, 1), st.integers(0, 600), st.sampled_from([0.0, 0.01, 0.5])
)  # fmt: skip
def test_a_draw_is_among_the_tokens_that_the_limits_leave(
    logits: list[float], top_p: float, top_k: int, min_p: float
) -> None:
    """Compute each limit by its definition, on the whole vocabulary."""
    scores = torch.tensor(logits)
    left = scores.masked_fill(scores < scores.max() + (math.log(min_p) if min_p else -math.inf), -math.inf)
    if 0 < top_k < len(scores):
        left = left.masked_fill(left < left.topk(top_k).values[-1], -math.inf)
    ordered, order = left.softmax(-1).sort(descending=True)
    # Tolerate 1e-5, because sums in other orders differ in their last digits.
    kept = {
        int(one)
        for one, sum_before in zip(order, ordered.cumsum(-1) - ordered, strict=True)
        if sum_before < top_p + 1e-5
    }
    least = min(float(left[one]) for one in kept)
    sampler = Sampler(Sampling(seed=3, top_p=top_p, top_k=top_k, min_p=min_p), [], [])
    for _ in range(20):
        assert float(left[sampler.choose(scores)[0]]) >= least


def test_an_impossible_choice_fails_its_row_only() -> None:
    samplers = [
        Sampler(Sampling(seed=1, allowed_token_ids=(999_999,)), [], []),
        Sampler(Sampling(temperature=0.0), [], []),
    ]
    broken, found = choose(samplers, torch.stack([LOGITS, LOGITS]))
    assert isinstance(broken, OutputNotFinite)
    assert found == (0, None)


@pytest.mark.parametrize("failing", ["drawn", "logprobs_of"])
def test_rows_that_fail_together_are_chosen_one_by_one(monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    """The single choices use the same random numbers. Only a row that also fails alone has the error."""
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    asked = [Sampling(seed=seed, top_logprobs=1) for seed in range(3)]

    def made() -> list[Any]:
        samplers = [Sampler(of, [], []) for of in asked]
        return [choose(samplers, logits, [3, 0, 2]) for _ in range(3)]

    wanted = made()
    whole = getattr(sampler, failing)

    def failed(scores: Tensor, *others: Any) -> Any:
        if len(scores) > 1 or not others[0] or others[0] == [asked[2]]:
            raise MemoryError("no room for the rows")
        return whole(scores, *others)

    monkeypatch.setattr(sampler, failing, failed)
    for found, right in zip(made(), wanted, strict=True):
        assert found[:2] == right[:2]
        assert isinstance(found[2], MemoryError) == (failing == "drawn")


def test_a_row_with_few_possible_tokens_is_drawn_from_the_likeliest_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts: list[int] = []
    among = draws._among

    def noted(scores: Tensor, of: Any, random: Any, count: int) -> list[int]:
        counts.append(count)
        return among(scores, of, random, count)

    monkeypatch.setattr(draws, "_among", noted)
    for fields in ({"top_k": 50}, {"top_p": 0.99}, {"min_p": 0.01}):
        asked = Sampling(seed=1, allowed_token_ids=(7, 9), **fields)  # type: ignore[arg-type]
        assert Sampler(asked, [], []).choose(torch.zeros(10_000))[0] in {7, 9}
    assert counts == [256] * 3
