"""In random histories of NaN, memory errors, callers who leave and tenants who share the rows, each other sequence has the tokens that it has alone."""

from __future__ import annotations

import asyncio
import random
from functools import cache
from typing import Any

import pytest
import torch
from example_count import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from pilotflame.errors import OutputNotFinite
from pilotflame.handlers.language_model import rows as rows_module
from pilotflame.handlers.language_model.causal_model import CausalModel
from pilotflame.handlers.language_model.engine import Engine
from pilotflame.handlers.language_model.schedule import ChunkTimes
from pilotflame.handlers.sampling.sampler import Sampler
from pilotflame.handlers.sampling.sampling import Sampling
from tiny_causal import VOCABULARY, generated, tiny

POISON = VOCABULARY - 1
"""The token whose vector is NaN."""
NEW = 24
GREEDY = Sampling(temperature=0.0)
KINDS = ("llama", "mistral", "qwen3_moe")


@cache
def poisoned(kind: str) -> Any:
    model = tiny(kind)
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = float("nan")
    return model


@cache
def known(kind: str) -> list[tuple[list[int], list[int]]]:
    """Return prompts, each with the tokens that the model generates for it alone."""
    drawn, model = random.Random(3), poisoned(kind)
    found = []
    while len(found) < 8:
        prompt = [drawn.randrange(3, POISON) for _ in range(drawn.choice([2, 5, 20, 90]))]
        answer = generated(model, prompt, NEW)
        if POISON not in answer:
            found.append((prompt, answer))
    return found


class Faults:
    """Makes memory run out in some passes of the model and in some allocations of keys and values."""

    def __init__(self, engine: Engine, drawn: random.Random, share: float) -> None:
        self.drawn, self.share = drawn, share
        self.charged = self.rows = 0
        """The faults that may fail a caller, and the rows of the present pass."""
        self.forward, self.run, self.zeros = engine.model.forward, engine.model._pass, rows_module._zeros
        engine.model.forward = self.noted_forward  # type: ignore[method-assign]
        engine.model._pass = self.failing_pass  # type: ignore[method-assign]

    def fail(self) -> None:
        if self.drawn.random() < self.share:
            # Only a fault in a pass with a single row may fail a caller. With several rows, the youngest row
            # waits again.
            self.charged += self.rows < 2
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    def noted_forward(self, rows: Any, ids: list[list[int]], *more: Any, **named: Any) -> Any:
        self.rows = len(ids)
        try:
            return self.forward(rows, ids, *more, **named)
        finally:
            self.rows = 0

    def failing_pass(self, *arguments: Any) -> Any:
        self.fail()
        found = self.run(*arguments)
        # Fail also at this later moment, when keys and values have been written.
        self.fail()
        return found

    def failing_zeros(self, *arguments: Any) -> Any:
        self.fail()
        return self.zeros(*arguments)


async def run_history(kind: str, seed: int) -> None:
    drawn = random.Random(seed)
    model = poisoned(kind)
    engine = Engine(CausalModel(model, model.config), drawn.choice([2, 4, 8]), drawn.choice([200, 600, 4000]))
    faults = Faults(engine, drawn, drawn.choice([0.0, 0.02, 0.05]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_module, "_zeros", faults.failing_zeros)
        patch.setattr(ChunkTimes, "tokens_within", lambda *_: drawn.choice([3, 16, 512]))
        outcomes = await asyncio.gather(*(one_caller(engine, kind, drawn) for _ in range(12)))
    assert sum(outcomes) <= faults.charged
    async with asyncio.timeout(30):
        # The engine's thread removes a sequence only after it has given out the last token.
        while engine._steps._runs or engine._steps._members:
            await asyncio.sleep(0)


async def one_caller(engine: Engine, kind: str, drawn: random.Random) -> bool:
    """Send a request and check its tokens. Return True if it has failed because memory ran out."""
    prompt, answer = drawn.choice(known(kind))
    act = drawn.choice(["plain", "plain", "leave", "poison"])
    if act == "poison":
        place = drawn.randrange(len(prompt) + 1)
        prompt = [*prompt[:place], POISON, *prompt[place:]]
    most, leaves_at = drawn.randint(1, NEW), drawn.randint(1, NEW)
    for _ in range(drawn.randint(0, 3)):
        await asyncio.sleep(0)
    made: list[int] = []
    tenant = drawn.choice("aaab")
    stream = engine.generate(prompt, Sampler(GREEDY, prompt, ()), (), most, tenant=tenant)
    try:
        async for token in stream:
            made.append(token.id)
            if act == "leave" and len(made) == leaves_at:
                break
    except OutputNotFinite:
        assert act == "poison"
        return False
    except RuntimeError as error:
        if "can't allocate" not in str(error):
            raise
        return True
    finally:
        await stream.aclose()
    assert act != "poison"
    assert made == answer[: len(made)]
    assert act == "leave" or len(made) == most
    return False


@settings(max_examples=examples(4), deadline=None)
@given(st.sampled_from(KINDS), st.integers(0, 1 << 32))
def test_nan_memory_errors_and_callers_who_leave_change_no_other_token(kind: str, seed: int) -> None:
    asyncio.run(run_history(kind, seed))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_histories(kind: str) -> None:
    for seed in range(60):
        asyncio.run(run_history(kind, seed))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
async def test_a_row_whose_logits_are_not_finite_ends_alone(
    value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = poisoned("llama")
    engine = Engine(CausalModel(model, model.config), 4, 4000)
    forward = engine.model.forward
    (bad, _), (good, answer) = known("llama")[:2]

    def spoiled(rows: Any, ids: list[list[int]], *more: Any, **named: Any) -> torch.Tensor:
        logits = forward(rows, ids, *more, **named)
        if len(ids) == 2:
            logits = logits.clone()
            logits[engine._steps._members.index(victim()), 7] = value
        return logits

    def victim() -> Any:
        return next(run for run in engine._steps._members if run.ids[: len(bad)] == bad)

    monkeypatch.setattr(engine.model, "forward", spoiled)

    for sampling in (GREEDY, Sampling(temperature=1.0, seed=1)):
        failure, other = await asyncio.gather(
            drained(engine, bad, sampling, 400), drained(engine, good), return_exceptions=True
        )
        assert isinstance(failure, OutputNotFinite)
        assert other == answer


async def drained(
    engine: Engine, prompt: list[int], sampling: Sampling = GREEDY, new: int = NEW
) -> list[int]:
    stream = engine.generate(prompt, Sampler(sampling, prompt, ()), (), new)
    return [token.id async for token in stream]
