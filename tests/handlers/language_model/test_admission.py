"""Requests that would be late are refused at once, and the others are in time."""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import aclosing

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.errors import Overloaded
from pilotflame.handlers.language_model.admission import (
    NO_TARGETS,
    READING_SHARE,
    READING_SHARE_ABOVE,
    Admission,
    EngineLoad,
    Targets,
)
from pilotflame.handlers.language_model.engine import Engine
from pilotflame.handlers.language_model.schedule import ChunkTimes
from pilotflame.handlers.sampling.sampler import Sampler
from pilotflame.handlers.sampling.sampling import Sampling

from .test_engine import engine_of

GREEDY = Sampling(temperature=0.0)


def learned(pass_s: float, token_s: float, step_s: float, row_s: float) -> Admission:
    """Return the predictions for a model whose passes and steps take these times."""
    made = Admission(ChunkTimes())
    for tokens in (4, 64, 16, 512):
        made.chunks.note(tokens, pass_s + token_s * tokens)
    for rows in (1, 4, 2, 16):
        made.note_step(rows, step_s + row_s * rows)
    return made


def test_the_first_token_comes_after_the_prompts_before_it_and_idle_engines_predict_nothing() -> None:
    made = learned(0.01, 0.001, 0.02, 0.001)
    assert made.first_token_s(EngineLoad(0, (), 4), 100, 10) == 0
    assert made.first_token_s(EngineLoad(0, [200], 4), 100, 10) == pytest.approx(0.01 + 0.2 + 0.11)


@given(
    st.integers(0, 4), st.lists(st.integers(1, 2000), max_size=6), st.integers(1, 2000), st.integers(1, 500),
    st.sampled_from([math.inf, 0.1, 0.5]),
)  # fmt: skip
def test_more_work_never_makes_the_first_token_earlier(
    rows: int, unread: list[int], tokens: int, new: int, token_s: float
) -> None:
    made = learned(0.01, 0.001, 0.02, 0.001)
    base = made.first_token_s(EngineLoad(rows, unread, 4, token_s), tokens, new)
    assert 0 <= base <= made.first_token_s(EngineLoad(rows, [*unread, 5], 4, token_s), tokens, new)
    assert base <= made.first_token_s(EngineLoad(rows, unread, 4, token_s), tokens + 50, new) + 1e-9
    assert base <= made.first_token_s(EngineLoad(rows, unread, 4, token_s), tokens, new + 50) + 1e-9


def test_requests_that_wait_for_a_row_wait_for_answers_of_the_usual_length() -> None:
    made = learned(0.01, 0.001, 0.02, 0.01)
    full = EngineLoad(4, (), 4)
    read_s = made.first_token_s(EngineLoad(3, (), 4), 10, 40)
    assert made.first_token_s(full, 10, 40) == pytest.approx(40 * 2 * 0.06 / 4 + read_s, rel=0.2)
    for tokens in [1000, *[10] * 200]:
        made.note_answer(tokens)
    assert made.first_token_s(full, 10, 4000) == pytest.approx(10 * 2 * 0.06 / 4 + read_s, rel=0.2)


def test_the_time_of_a_token_and_the_chunk_that_it_leaves() -> None:
    made = learned(0.01, 0.001, 0.02, 0.01)
    assert made.later_token_s(EngineLoad(0, (), 4)) == pytest.approx(0.03)
    assert made.later_token_s(EngineLoad(0, [5], 4)) == pytest.approx(2 * 0.04)
    assert (
        made.later_token_s(EngineLoad(2, [5], 4))
        == made.later_token_s(EngineLoad(4, (), 4))
        == pytest.approx(2 * 0.06)
    )
    assert made.chunk_s(EngineLoad(0, (), 4, 0.2)) == 0
    assert made.chunk_s(EngineLoad(1, (), 4)) == pytest.approx(READING_SHARE * 0.03)
    above = made.chunk_s(EngineLoad(1, (), 4), above_share=True)
    assert above == pytest.approx(READING_SHARE_ABOVE * 0.03)
    assert made.chunk_s(EngineLoad(1, (), 4, 0.2)) == pytest.approx(0.9 * 0.2 - 0.03)
    assert made.chunk_s(EngineLoad(1, (), 4, 0.001)) == pytest.approx(READING_SHARE * 0.03)


PROMPT = [5] * 40


async def run(
    engine: Engine, targets: Targets = NO_TARGETS, new: int = 30, begun: asyncio.Event | None = None
) -> int:
    made = 0
    async with aclosing(
        engine.generate(PROMPT, Sampler(GREEDY, PROMPT, ()), (), new, targets=targets)
    ) as tokens:
        async for _ in tokens:
            made += 1
            if begun is not None:
                begun.set()
    return made


async def test_a_request_that_would_be_late_is_refused_and_the_others_go_on() -> None:
    engine, _ = engine_of("llama", rows=2)
    # The engine learns its times from these requests.
    assert await asyncio.gather(run(engine), run(engine)) == [30, 30]
    assert await run(engine, Targets(time.monotonic() + 60, 60.0)) == 30
    with pytest.raises(Overloaded) as caught:
        await run(engine, Targets(time.monotonic() - 1))
    assert caught.value.details["retry_after_s"] >= 1
    with pytest.raises(Overloaded, match="A token would take"):
        await run(engine, Targets(token_s=1e-9))
    # Two long requests occupy both rows, so the third would have to wait until one of them ends.
    begun = [asyncio.Event(), asyncio.Event()]
    async with asyncio.TaskGroup() as tasks:
        long = [tasks.create_task(run(engine, new=400, begun=event)) for event in begun]
        for event in begun:
            await event.wait()
        with pytest.raises(Overloaded):
            await run(engine, Targets(time.monotonic()))
    assert [task.result() for task in long] == [400, 400]
    assert await run(engine, Targets(time.monotonic() + 60)) == 30


async def test_a_slow_moment_does_not_refuse_the_requests_of_an_idle_engine() -> None:
    engine, _ = engine_of("llama", rows=2)
    assert await run(engine) == 30
    engine._steps._admission.chunks.note(4, 1000.0)
    for _ in range(100):
        engine._steps._admission.note_step(1, 1000.0)
    assert await run(engine, Targets(time.monotonic() + 5, 5.0)) == 30


async def test_a_target_does_not_slow_a_request_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = engine_of("llama", rows=4)
    loads: list[EngineLoad] = []
    chunk_s = Admission.chunk_s

    def seen(self: Admission, load: EngineLoad, *, above_share: bool = False) -> float:
        assert not above_share
        loads.append(load)
        return chunk_s(self, load)

    monkeypatch.setattr(Admission, "chunk_s", seen)
    assert await asyncio.gather(run(engine), run(engine, Targets(token_s=60.0)), run(engine)) == [30] * 3
    assert {load.token_s for load in loads if load.rows > 1} == {math.inf}
    assert max(load.rows for load in loads) == 3
    loads.clear()
    assert await asyncio.gather(*(run(engine, Targets(token_s=60.0)) for _ in range(2))) == [30] * 2
    assert {load.token_s for load in loads if load.rows} == {60.0}
