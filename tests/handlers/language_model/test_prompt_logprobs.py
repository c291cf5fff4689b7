"""The engine, which reads a prompt in parts, finds the logprobs of one pass over the whole prompt."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from pilotflame.errors import InputInvalid
from pilotflame.foreign_json import excess
from pilotflame.handlers.language_model.admission import Admission
from pilotflame.handlers.language_model.causal_model import CausalModel
from pilotflame.handlers.language_model.contract import Delta, GenerationRequest, TokenLogprob
from pilotflame.handlers.language_model.engine import Engine
from pilotflame.handlers.language_model.prompt_logprobs import (
    MOST_VALUES,
    PromptLogprobs,
    check_prompt_logprobs,
)
from pilotflame.handlers.language_model.sampling import Logprobs, Sampler
from pilotflame.handlers.language_model.schedule import ChunkTimes
from pilotflame.runtime.front.generation.deltas import MOST_BYTES, VALUE_BYTES
from tiny_causal import KINDS, tiny

from .test_engine import GREEDY, prompts, tokens


async def scored(engine: Engine, ids: list[int], top: int, new: int = 3) -> PromptLogprobs:
    found, first = PromptLogprobs(ids, top), list[Logprobs]()
    async for _ in engine.generate(ids, Sampler(GREEDY, ids, ()), (), new, scored=found):
        if not first:
            assert found.complete
            first = found.taken()
        # A prompt that is read again does not collect them again.
        assert found.found == []
    found.found = first
    return found


def check(model: Any, ids: list[int], found: PromptLogprobs, top: int) -> None:
    with torch.inference_mode():
        wanted = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    assert len(found.found) == len(ids) - 1
    for place, one in enumerate(found.found):
        row, token = wanted[place], ids[place + 1]
        assert one.chosen == pytest.approx(float(row[token]), abs=1e-3)
        assert [value for _, value in one.top] == pytest.approx(row.topk(top).values.tolist(), abs=1e-3)
        assert one.rank is not None
        assert float(row.sort(descending=True).values[one.rank - 1]) == pytest.approx(one.chosen, abs=1e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sliced", [False, True])
async def test_a_prompt_that_is_read_in_parts_beside_others(
    kind: str, sliced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChunkTimes, "tokens_within", lambda *_: 7)
    if sliced:
        monkeypatch.setattr(Admission, "chunk_s", lambda _, load, **__: 1e-9 if load.rows else 0.0)
    model = tiny(kind)
    # The window is too small for all of them, so that some are read again.
    engine = Engine(CausalModel(model, model.config), 4, 160)
    given = [*prompts(5, 60), [5]]
    others = [tokens(engine, one, 30) for one in prompts(3, 30, seed=2)]
    found = await asyncio.gather(*(scored(engine, ids, 2, 40) for ids in given), *others)
    for ids, one in zip(given, found, strict=False):
        check(model, ids, one, 2)  # type: ignore[arg-type]


def test_the_logprobs_of_a_prompt_are_limited_and_sent_once() -> None:
    most = MOST_VALUES // 26
    check_prompt_logprobs(GenerationRequest(prompt="a", prompt_logprobs=20), most)
    check_prompt_logprobs(GenerationRequest(prompt="a", n=128), MOST_VALUES)
    for count, n, text in ((most + 1, 1, f"a prompt of {most} tokens at most"), (2, 2, "n 1 only")):
        with pytest.raises(InputInvalid, match=text) as caught:
            check_prompt_logprobs(GenerationRequest(prompt="a", prompt_logprobs=20, n=n), count)
        assert caught.value.details == {"field": "prompt_logprobs"}


@pytest.mark.parametrize("top", [0, 1, 20])
def test_the_largest_logprobs_of_a_prompt_stay_below_the_limits_of_answers(top: int) -> None:
    likeliest = [(" antidisestablish", 100_000, -10.123456789)] * top
    one = TokenLogprob(token=" antidisestablish", id=100_000, logprob=-10.123456789, top=likeliest, rank=1)
    delta = Delta(prompt_logprobs=[one] * (MOST_VALUES // (6 + top)))
    piece = delta.model_dump_json()
    assert not excess(piece)
    assert len(piece) + VALUE_BYTES * (1 + piece.count(",")) < MOST_BYTES
