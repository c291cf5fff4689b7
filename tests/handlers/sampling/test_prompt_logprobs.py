"""The engine, which reads a prompt in parts, finds the logprobs of one pass over the whole prompt."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from pilotflame.handlers.language_model.admission import Admission
from pilotflame.handlers.language_model.causal_model import CausalModel
from pilotflame.handlers.language_model.engine import Engine
from pilotflame.handlers.language_model.schedule import ChunkTimes
from pilotflame.handlers.sampling.prompt_logprobs import PromptLogprobs
from pilotflame.handlers.sampling.sampler import Logprobs, Sampler
from tiny_causal import KINDS, tiny

from ..language_model.test_engine import GREEDY, prompts, tokens


async def scored(engine: Engine, ids: list[int], top: int, new: int = 3) -> PromptLogprobs:
    found, first = PromptLogprobs(ids, top), list[Logprobs]()
    async for _ in engine.generate(ids, Sampler(GREEDY, ids, ()), (), new, scored=found):
        if not first:
            assert found.complete
            first = found.taken()
        # A prompt that is read again does not collect its logprobs again.
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
    # The window is too small for all prompts, so that some are read again.
    engine = Engine(CausalModel(model, model.config), 4, 160)
    given = [*prompts(5, 60), [5]]
    others = [tokens(engine, one, 30) for one in prompts(3, 30, seed=2)]
    found = await asyncio.gather(*(scored(engine, ids, 2, 40) for ids in given), *others)
    for ids, one in zip(given, found, strict=False):
        check(model, ids, one, 2)  # type: ignore[arg-type]
