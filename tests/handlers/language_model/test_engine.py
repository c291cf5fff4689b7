"""The engine makes the tokens that transformers' `generate` makes, whatever runs beside a sequence."""

from __future__ import annotations

import asyncio
import random
import threading
import weakref
from collections.abc import Callable, Collection
from typing import Never

import pytest
from pilotflame.errors import EngineStopped
from pilotflame.handlers.language_model.admission import Admission
from pilotflame.handlers.language_model.causal_model import CausalModel
from pilotflame.handlers.language_model.engine import Engine
from pilotflame.handlers.language_model.engine_steps import EngineSteps
from pilotflame.handlers.language_model.pass_slices import PassSlices
from pilotflame.handlers.language_model.rows import Rows
from pilotflame.handlers.language_model.schedule import ChunkTimes, StepSchedule
from pilotflame.handlers.sampling.sampler import Sampler
from pilotflame.handlers.sampling.sampling import Sampling
from tiny_causal import KINDS, VOCABULARY, generated, tiny
from torch import Tensor

GREEDY = Sampling(temperature=0.0)


def engine_of(kind: str, rows: int = 4, window: int = 4000) -> tuple[Engine, object]:
    model = tiny(kind)
    return Engine(CausalModel(model, model.config), rows, window), model


def prompts(count: int, longest: int, seed: int = 1) -> list[list[int]]:
    drawn = random.Random(seed)
    return [[drawn.randrange(3, VOCABULARY) for _ in range(drawn.randint(1, longest))] for _ in range(count)]


async def tokens(
    engine: Engine, prompt: list[int], new: int, sampling: Sampling = GREEDY, ends: Collection[int] = ()
) -> list[int]:
    sampler = Sampler(sampling, prompt, ends)
    return [token.id async for token in engine.generate(prompt, sampler, ends, new)]


@pytest.mark.parametrize("kind", KINDS)
async def test_sequences_that_run_together_are_as_if_alone(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Prompts are read in chunks, between the steps of other sequences.
    monkeypatch.setattr(ChunkTimes, "tokens_within", lambda *_: 7)
    engine, model = engine_of(kind)
    given = prompts(9, 60)
    found = await asyncio.gather(*(tokens(engine, one, 10 + index) for index, one in enumerate(given)))
    wanted = [generated(model, one, 10 + index) for index, one in enumerate(given)]  # type: ignore[arg-type]
    assert found == wanted


@pytest.fixture
def one_layer_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each step read one layer of a chunk while there are rows."""
    monkeypatch.setattr(Admission, "chunk_s", lambda _, load, **__: 1e-9 if load.rows else 0.0)
    monkeypatch.setattr(ChunkTimes, "tokens_within", lambda *_: 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("one_layer_a_step")
async def test_a_chunk_that_takes_several_steps_changes_no_token(kind: str) -> None:
    engine, model = engine_of(kind, window=300)
    given = prompts(7, 60, seed=12)
    found = await asyncio.gather(*(tokens(engine, one, 30 + index) for index, one in enumerate(given)))
    assert found == [generated(model, one, 30 + index) for index, one in enumerate(given)]  # type: ignore[arg-type]


@pytest.mark.usefixtures("one_layer_a_step")
async def test_a_caller_who_leaves_while_a_layer_of_the_prompt_waits_stops_its_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, model = engine_of("llama", rows=3)
    first, second, third = prompts(3, 60, seed=13)
    stop, stopped = PassSlices.stop, set[bool]()

    def noted(self: PassSlices) -> None:
        stopped.add(self.paused)
        stop(self)

    monkeypatch.setattr(PassSlices, "stop", noted)

    async def leave() -> None:
        stream = engine.generate(second, Sampler(GREEDY, second, ()), (), 400)
        reading = asyncio.ensure_future(anext(stream))
        while not (
            reading.done() or ((passes := engine._steps.reader._passes) is not None and passes.paused)
        ):
            await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait([reading])
        await stream.aclose()

    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(tokens(engine, first, 1000))
        while True not in stopped:
            await leave()
        last = tasks.create_task(tokens(engine, third, 30))
    assert (await running, await last) == (generated(model, first, 1000), generated(model, third, 30))  # type: ignore[arg-type]
    assert not engine._steps._runs


async def test_rows_that_grow_beyond_the_window_are_made_again_in_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ChunkTimes, "tokens_within", lambda *_: 16)
    engine, model = engine_of("llama", rows=4, window=120)
    given = prompts(6, 20, seed=2)
    found = await asyncio.gather(*(tokens(engine, one, 60) for one in given))
    assert found == [generated(model, one, 60) for one in given]  # type: ignore[arg-type]


async def test_a_long_sequence_moves_the_columns() -> None:
    engine, model = engine_of("mistral", rows=2)
    given = prompts(2, 30, seed=3)
    found = await asyncio.gather(*(tokens(engine, one, 400) for one in given))
    assert found == [generated(model, one, 400) for one in given]  # type: ignore[arg-type]


async def test_a_caller_who_leaves_frees_the_row_and_changes_no_other() -> None:
    engine, model = engine_of("llama", rows=2)
    first, second, third = prompts(3, 20, seed=4)

    async def leave() -> None:
        stream = engine.generate(first, Sampler(GREEDY, first, ()), (), 400)
        for _ in range(5):
            await anext(stream)
        await stream.aclose()

    _, *found = await asyncio.gather(leave(), tokens(engine, second, 50), tokens(engine, third, 50))
    assert found == [generated(model, one, 50) for one in (second, third)]  # type: ignore[arg-type]
    assert not engine._steps._members
    assert not engine._steps._runs


async def test_the_row_of_a_caller_who_leaves_is_free_within_two_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, _ = engine_of("llama", rows=2)
    first, second = prompts(2, 20, seed=14)
    step, members = EngineSteps.step, list[int]()

    def counted(self: EngineSteps) -> None:
        step(self)
        members.append(len(self._members))

    monkeypatch.setattr(EngineSteps, "step", counted)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(tokens(engine, second, 200))
        stream = engine.generate(first, Sampler(GREEDY, first, ()), (), 400)
        while members[-1:] != [2]:
            await anext(stream)
        left_at = len(members)
        await stream.aclose()
    assert 1 in members[left_at : left_at + 2]


async def test_an_end_token_ends_a_sequence() -> None:
    engine, model = engine_of("llama")
    (prompt,) = prompts(1, 20, seed=5)
    whole = generated(model, prompt, 30)  # type: ignore[arg-type]
    end = whole[12]
    assert await tokens(engine, prompt, 30, ends={end}) == whole[: whole.index(end) + 1]


async def test_a_step_that_fails_fails_its_sequences_only(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, model = engine_of("llama", rows=2)
    given = prompts(4, 10, seed=6)
    forward, calls = engine.model.forward, 0

    def failing(*arguments: object, **options: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("out of memory")
        return forward(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.model, "forward", failing)
    found = await asyncio.gather(*(tokens(engine, one, 20) for one in given), return_exceptions=True)
    failed = [one for one in found if isinstance(one, RuntimeError)]
    assert 1 <= len(failed) <= 2
    for one, answer in zip(given, found, strict=True):
        if not isinstance(answer, RuntimeError):
            assert answer == generated(model, one, 20)  # type: ignore[arg-type]


def test_a_caller_whose_loop_is_closed_stops_nothing() -> None:
    engine, model = engine_of("llama", rows=2)
    (prompt,) = prompts(1, 10, seed=9)

    async def begin() -> object:
        stream = engine.generate(prompt, Sampler(GREEDY, prompt, ()), (), 400)
        await anext(stream)
        return stream

    loop = asyncio.new_event_loop()
    kept = loop.run_until_complete(begin())
    loop.close()
    assert asyncio.run(tokens(engine, prompt, 20)) == generated(model, prompt, 20)  # type: ignore[arg-type]
    assert kept is not None


async def test_a_seed_repeats_a_draw_also_beside_others() -> None:
    engine, _ = engine_of("llama")
    given = prompts(4, 20, seed=7)
    drawn = Sampling(temperature=1.0, seed=5, top_p=0.9)
    alone = [await tokens(engine, one, 20, drawn) for one in given]
    together = await asyncio.gather(*(tokens(engine, one, 20, drawn) for one in given))
    assert together == alone
    other = await tokens(engine, given[0], 20, Sampling(temperature=1.0, seed=6, top_p=0.9))
    assert other != alone[0]


async def test_a_model_with_a_state_runs_one_sequence_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pilotflame.handlers.language_model.causal_model.why_alone", lambda *_: "it is so")
    engine, model = engine_of("llama")
    assert engine.most_rows == 1
    given = prompts(3, 20, seed=8)
    found = await asyncio.gather(*(tokens(engine, one, 20) for one in given))
    assert found == [generated(model, one, 20) for one in given]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1e-300),
        Sampling(repetition_penalty=0.01, temperature=0.01),
        Sampling(min_tokens=5, stop_token_ids=tuple(range(1000)), temperature=0.0),
        Sampling(logit_bias={999_999: 100.0, 5: -100.0}, min_p=1.0, top_p=1e-9),
    ],
)
async def test_odd_sampling_harms_no_other_request(sampling: Sampling) -> None:
    engine, model = engine_of("llama")
    one, other = prompts(2, 20, seed=10)
    odd, found = await asyncio.gather(
        tokens(engine, one, 20, sampling, range(1000)), tokens(engine, other, 40)
    )
    assert odd
    assert found == generated(model, other, 40)  # type: ignore[arg-type]


async def test_a_choice_or_a_prompt_that_fails_ends_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, model = engine_of("llama")
    one, other = prompts(2, 20, seed=11)

    class Broken(Sampler):
        greedy = False

        def limit(self, _scores: object) -> Never:
            raise ValueError("no choice")

    async def broken() -> list[int]:
        stream = engine.generate(one, Broken(GREEDY, one, ()), (), 20)
        return [token.id async for token in stream]

    found = await asyncio.gather(
        broken(), tokens(engine, [VOCABULARY + 5], 9), tokens(engine, other, 40), return_exceptions=True
    )
    assert [type(one) for one in found[:2]] == [ValueError, IndexError]
    assert found[2] == generated(model, other, 40)  # type: ignore[arg-type]
    assert not engine._steps._runs


# -- the end of the thread


class Broken(BaseException):
    """An exception that no model catches by chance."""


def broken(*_: object, **__: object) -> Never:
    raise Broken("no more steps")


def failing(*_: object) -> Never:
    raise KeyError("no such sequence")


@pytest.mark.parametrize(
    ("owner", "method", "raises"),
    [
        (StepSchedule, "step", broken),
        (StepSchedule, "done", broken),
        (StepSchedule, "step", failing),
        (Admission, "chunk_s", failing),
        (EngineSteps, "fail", failing),
        (Engine, "_take_commands", failing),
        (Sampler, "note", broken),
    ],
)
async def test_the_end_of_the_thread_fails_all_sequences(
    owner: type, method: str, raises: Callable[..., Never], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, model = engine_of("llama", rows=1)
    before = prompts(1, 9)[0]
    assert await tokens(engine, before, 3) == generated(model, before, 3)  # type: ignore[arg-type]
    monkeypatch.setattr(owner, method, raises)
    if method == "fail":
        monkeypatch.setattr(StepSchedule, "step", failing)
    async with asyncio.timeout(30):
        found = await asyncio.gather(
            *(tokens(engine, one, 3) for one in prompts(3, 9)), return_exceptions=True
        )
        # A sequence that comes later fails at once.
        with pytest.raises(EngineStopped, match="The language model has stopped"):
            await tokens(engine, before, 3)
    # A failure that can be undone fails the sequences of its step with its own error.
    assert {type(one) for one in found} <= {EngineStopped, KeyError}


async def test_a_thread_that_does_not_start_stops_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = engine_of("llama", rows=1)

    def full(_thread: threading.Thread) -> Never:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", full)
    async with asyncio.timeout(30):
        for _ in range(2):
            with pytest.raises(EngineStopped, match="can't start new thread"):
                await tokens(engine, prompts(1, 9)[0], 3)


async def test_a_pass_in_slices_that_ends_its_thread_is_an_error() -> None:
    passes = PassSlices([], lambda: None)
    with pytest.raises(RuntimeError, match="no more steps"):
        passes.begin(broken, 1.0)
    assert passes.begin(lambda: Tensor([1.0]), 1.0) is not None


async def test_an_engine_without_sequences_holds_no_row_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, model = engine_of("llama")
    join, freed = Rows.join, asyncio.Event()
    loop = asyncio.get_running_loop()

    def joined(self: Rows, other: Rows) -> None:
        join(self, other)
        weakref.finalize(self.cache.layers[0].keys, loop.call_soon_threadsafe, freed.set)

    monkeypatch.setattr(Rows, "join", joined)
    for new in (1, 5):
        freed.clear()
        prompt = prompts(1, 60)[0]
        assert await tokens(engine, prompt, new) == generated(model, prompt, new)  # type: ignore[arg-type]
        async with asyncio.timeout(30):
            await freed.wait()
