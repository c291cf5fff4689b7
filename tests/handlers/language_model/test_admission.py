"""Requests that would be late are refused at once, and the others are in time."""

from __future__ import annotations

import asyncio
import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.errors import Overloaded
from pilotflame.handlers.language_model.admission import (
    Admission,
    AnswerLengths,
    EngineLoad,
    StepTimes,
    Targets,
)
from pilotflame.handlers.language_model.contract import Sampling
from pilotflame.handlers.language_model.sampling import Sampler
from pilotflame.handlers.language_model.schedule import ChunkTimes

from .test_engine import engine_of

GREEDY = Sampling(temperature=0.0)


def learned(pass_s: float, token_s: float, step_s: float, row_s: float) -> Admission:
    """Return the predictions for a model whose passes and steps take these times."""
    made = Admission(ChunkTimes())
    for tokens in (4, 64, 16, 512):
        made.chunks.note(tokens, pass_s + token_s * tokens)
    for rows in (1, 4, 2, 16):
        made.steps.note(rows, step_s + row_s * rows)
    return made


@given(st.floats(1e-4, 1.0), st.floats(0, 0.1), st.lists(st.integers(1, 16), min_size=2, max_size=40))
def test_the_line_of_steps_is_found(step_s: float, row_s: float, rows: list[int]) -> None:
    times = StepTimes()
    assert times.step_s(3) == 0
    for count in rows:
        times.note(count, step_s + row_s * count)
    if len(set(rows)) == 1:
        assert times.step_s(rows[0]) == pytest.approx(step_s + row_s * rows[0])
    elif max(rows) >= 2 * min(rows):
        assert times.step_s(20) == pytest.approx(step_s + row_s * 20, rel=0.05)


def test_the_mean_length_of_answers() -> None:
    lengths = AnswerLengths()
    assert (lengths.mean(40), lengths.mean(4000)) == (40, 128)
    for tokens in [1000, *[10] * 200]:
        lengths.note(tokens)
    assert lengths.mean(4000) == 10
    assert lengths.mean(5) == 5


def test_the_first_token_of_an_idle_engine_takes_a_pass() -> None:
    made = learned(0.01, 0.001, 0.02, 0.001)
    assert made.first_token_s(EngineLoad(0, (), 4), 100, 10) == pytest.approx(0.11)
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
    assert 0 < base <= made.first_token_s(EngineLoad(rows, [*unread, 5], 4, token_s), tokens, new)
    assert base <= made.first_token_s(EngineLoad(rows, unread, 4, token_s), tokens + 50, new) + 1e-9
    assert base <= made.first_token_s(EngineLoad(rows, unread, 4, token_s), tokens, new + 50) + 1e-9


def test_the_rows_and_chunks_that_keep_to_a_time_for_a_token() -> None:
    made = learned(0.01, 0.001, 0.02, 0.01)
    assert made.rows_within(math.inf, 16) == 16
    assert made.rows_within(0.2, 16) == 8
    assert made.rows_within(0.001, 16) == 1
    assert made.chunk_s(0, 0.2) == 0
    assert made.chunk_s(1, math.inf) == pytest.approx(0.03)
    assert made.chunk_s(1, 0.2) == pytest.approx(0.9 * 0.2 - 0.03)


async def test_a_request_that_would_be_late_is_refused_and_the_others_go_on() -> None:
    engine, _ = engine_of("llama", rows=2)
    prompt = [5] * 40

    async def run(targets: Targets, new: int = 30) -> int:
        tokens = engine.generate(prompt, Sampler(GREEDY, prompt, ()), (), new, targets=targets)
        return len([token async for token in tokens])

    # The engine learns its times.
    assert await asyncio.gather(run(Targets()), run(Targets())) == [30, 30]
    assert await run(Targets(time.monotonic() + 60, 60.0)) == 30
    with pytest.raises(Overloaded) as caught:
        await run(Targets(time.monotonic() - 1))
    assert caught.value.details["retry_after_s"] >= 1
    # Two long requests take the rows for longer than the third may wait.
    async with asyncio.TaskGroup() as tasks:
        long = [tasks.create_task(run(Targets(), 400)) for _ in range(2)]
        await asyncio.sleep(0.1)
        with pytest.raises(Overloaded):
            await run(Targets(time.monotonic() + 0.01))
    assert [task.result() for task in long] == [400, 400]
    assert await run(Targets(time.monotonic() + 60)) == 30
