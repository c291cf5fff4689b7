"""The schedule of an engine in random histories: no sequence is lost or stuck, and the rows stay within their limits."""

from __future__ import annotations

import math
import random

import pytest
from example_count import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from pilotflame.handlers.language_model.schedule import (
    DECAY,
    LEAST_CHUNK,
    MOST_CHUNK,
    ChunkTimes,
    EngineStep,
    ScheduledSequence,
    StepSchedule,
)


class History:
    """Runs an engine's schedule with random arrivals and aborts, and checks each step."""

    def __init__(self, rows: int, window: int, random_: random.Random) -> None:
        self.schedule, self.random = StepSchedule(rows, window), random_
        self.arrived = 0
        self.open: set[ScheduledSequence] = set()
        self.ended: list[ScheduledSequence] = []

    def arrive(self) -> None:
        prompt = self.random.randint(1, max(1, self.schedule.window // 2))
        new = self.random.randint(1, max(1, self.schedule.window - prompt))
        self.arrived += 1
        stored = self.random.choice([0, 0, self.random.randrange(prompt)])
        sequence = ScheduledSequence(
            self.arrived,
            prompt,
            prompt + new,
            self.random.choice([0, 0, 1]),
            stored,
            self.random.choice("aaab"),
        )
        self.schedule.add(sequence)
        self.open.add(sequence)

    def abort(self) -> None:
        if self.open:
            self.end(self.random.choice(sorted(self.open, key=lambda one: one.number)))

    def end(self, sequence: ScheduledSequence) -> None:
        self.schedule.remove(sequence)
        self.open.discard(sequence)
        self.ended.append(sequence)

    def step(self) -> EngineStep:
        schedule = self.schedule
        step = schedule.step(self.random.choice([1, 7, MOST_CHUNK]))
        assert len(step.rows) + len(schedule.reading) <= schedule.most_rows
        places = [*step.rows, *schedule.reading]
        assert len(places) < 2 or len(places) * (max(one.tokens for one in places) + 1) <= schedule.window
        assert len(set(step.rows)) == len(step.rows)
        assert self.open.issuperset(step.rows)
        if step.chunk is not None:
            assert step.chunk.begin < step.chunk.end <= step.chunk.sequence.tokens
            assert step.chunk.begin == step.chunk.sequence.read >= step.chunk.sequence.stored
            assert step.chunk.sequence not in step.rows
        if self.open:
            assert step.chunk is not None or step.rows
        schedule.done(step, read=self.random.random() < 0.7)
        for sequence in list(self.open):
            if sequence.tokens >= sequence.most_tokens:
                self.end(sequence)
        return step


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(1, 6), st.integers(4, 200), st.randoms(use_true_random=False))
def test_every_sequence_ends_within_the_limits(rows: int, window: int, random_: random.Random) -> None:
    run_history(rows, window, random_)


@pytest.mark.slow
def test_many_histories() -> None:
    for seed in range(4_000):
        drawn = random.Random(seed)
        run_history(drawn.randint(1, 16), drawn.randint(4, 200), drawn)


def run_history(rows: int, window: int, random_: random.Random) -> None:
    history = History(rows, window, random_)
    for _ in range(60):
        if random_.random() < 0.3:
            history.arrive()
        if random_.random() < 0.05:
            history.abort()
        if random_.random() < 0.05:
            history.schedule.drop_youngest()
        history.step()
    left, most = len(history.open), 0
    while history.open:
        history.step()
        most += 1
        assert most < (left + 1) * window * 40, "a sequence is stuck"
    assert len(history.ended) == history.arrived
    assert not history.schedule.rows
    assert not history.schedule.waiting
    assert not history.schedule.reading


def test_earlier_sequences_come_first_and_priorities_before_them() -> None:
    schedule = StepSchedule(1, 100)
    sequences = [
        ScheduledSequence(1, 4, 6),
        ScheduledSequence(2, 4, 6),
        ScheduledSequence(3, 4, 6, priority=-1),
    ]
    for sequence in sequences:
        schedule.add(sequence)
    order = []
    while schedule.waiting or schedule.rows or schedule.reading:
        step = schedule.step(100)
        schedule.done(step)
        for sequence in (*step.rows, *([step.chunk.sequence] if step.chunk else [])):
            if sequence.tokens >= sequence.most_tokens:
                schedule.remove(sequence)
                order.append(sequence.number)
    assert order == [3, 1, 2]


def test_a_sequence_that_is_removed_is_in_no_later_step() -> None:
    schedule = StepSchedule(4, 1000)
    sequences = [ScheduledSequence(number, 10, 500) for number in range(4)]
    for sequence in sequences:
        schedule.add(sequence)
    for _ in range(3):
        schedule.done(schedule.step(MOST_CHUNK))
    for sequence in sequences:
        schedule.remove(sequence)
        step = schedule.step(MOST_CHUNK)
        assert sequence not in step.rows
        assert step.chunk is None or step.chunk.sequence is not sequence
        schedule.done(step)
    assert schedule.step(MOST_CHUNK) == EngineStep(None, ())


def test_the_youngest_makes_room_and_is_read_again_with_its_tokens() -> None:
    schedule = StepSchedule(2, 24)
    old, young = ScheduledSequence(1, 6, 20), ScheduledSequence(2, 6, 20)
    for sequence in (old, young):
        schedule.add(sequence)
    dropped: tuple[ScheduledSequence, ...] = ()
    while not dropped:
        step = schedule.step(MOST_CHUNK)
        dropped = step.dropped
        schedule.done(step)
    assert dropped == (young,)
    assert (young.read, young.tokens) == (0, 11)


@given(st.floats(0.0, 0.2), st.floats(1e-4, 0.05), st.lists(st.integers(1, 512), min_size=2, max_size=30))
def test_the_line_of_chunks_is_found(pass_s: float, token_s: float, sizes: list[int]) -> None:
    times = ChunkTimes()
    for size in sizes:
        times.note(size, pass_s + token_s * size)
    found_pass_s, found_token_s = times.line()
    # The line goes through the weighted mean of the chunks, where the latest chunks weigh most.
    weights = [DECAY**back for back in reversed(range(len(sizes)))]
    middle = sum(weight * size for weight, size in zip(weights, sizes, strict=True)) / sum(weights)
    assert math.isclose(found_pass_s + found_token_s * middle, pass_s + token_s * middle, rel_tol=1e-6)
    # Chunks of different sizes determine both times, unless the time of a token is negligible.
    if max(sizes[-4:]) >= 2 * min(sizes[-4:]) and token_s * middle >= 0.2 * pass_s:
        assert math.isclose(found_token_s, token_s, rel_tol=1e-3)


def test_a_chunk_takes_as_long_as_a_step() -> None:
    times = ChunkTimes()
    assert times.tokens_within(0.0) == MOST_CHUNK
    assert times.tokens_within(0.1) == LEAST_CHUNK
    for size in (4, 64, 16, 512):
        times.note(size, 0.05 + 0.001 * size)
    assert times.tokens_within(0.0) == MOST_CHUNK
    found = [times.tokens_within(0.1) for _ in range(6)]
    assert found[:4] == [8, 16, 32, found[3]]
    assert set(found[3:]) <= {49, 50}
    assert times.tokens_within(0.01) == LEAST_CHUNK
    assert [times.tokens_within(10.0) for _ in range(9)][-1] == MOST_CHUNK


def test_prompts_that_come_later_are_not_before_an_urgent_one() -> None:
    schedule = StepSchedule(2, 1000)
    for number in (1, 2, 3):
        schedule.add(ScheduledSequence(number, 100, 110, priority=2))
    assert schedule.unread_before(ScheduledSequence(4, 20, 30)) == []
    assert schedule.unread_before(ScheduledSequence(4, 20, 30, priority=2)) == [100, 100, 100]
    # The first prompt is being read, so it comes before all others.
    step = schedule.step(60)
    schedule.done(step)
    assert schedule.unread_before(ScheduledSequence(4, 20, 30)) == [40]


class Caller:
    """A tenant that sends a prompt, waits until its answer has ended, pauses, and sends the next one."""

    def __init__(self, tenant: str, pause: int) -> None:
        self.tenant, self.pause, self.due = tenant, pause, pause
        self.sequence: ScheduledSequence | None = None
        self.sent = self.made = 0
        self.firsts, self.gaps = list[int](), list[int]()
        self.last = 0

    def begin(self, schedule: StepSchedule, at: int, number: int) -> None:
        self.sequence = ScheduledSequence(number, 20, 50, tenant=self.tenant)
        self.sent, self.made = at, 20
        schedule.add(self.sequence)

    def note(self, schedule: StepSchedule, at: int) -> None:
        assert self.sequence is not None
        if self.sequence.tokens > self.made:
            (self.firsts if self.made == 20 else self.gaps).append(
                at - (self.sent if self.made == 20 else self.last)
            )
            self.made, self.last = self.sequence.tokens, at
        if self.made >= 50:
            schedule.remove(self.sequence)
            self.sequence, self.due = None, at + self.pause


def steps_of_others(window: int, greedy: bool, tenants: str = "abcdefgh") -> tuple[list[int], list[int]]:
    """Return the steps to the first token and between tokens, for seven tenants beside an ordinary or a
    greedy one.
    """
    schedule, callers = (
        StepSchedule(16, window),
        [Caller(name, 7 + number) for number, name in enumerate(tenants[1:])],
    )
    flood: list[ScheduledSequence] = []
    beside = Caller(tenants[0], 5)
    for at in range(3000):
        if greedy and len(flood) < 64:
            flood += [
                ScheduledSequence(10_000 + at * 128 + number, 500, 900, tenant=tenants[0])
                for number in range(128)
            ]
            for sequence in flood[-128:]:
                schedule.add(sequence)
        for caller in callers if greedy else [*callers, beside]:
            if caller.sequence is None and at >= caller.due:
                caller.begin(schedule, at, at)
        schedule.done(schedule.step(16))
        for sequence in [one for one in flood if one.tokens >= one.most_tokens]:
            schedule.remove(sequence)
            flood.remove(sequence)
        for caller in callers if greedy else [*callers, beside]:
            if caller.sequence is not None:
                caller.note(schedule, at)
    assert schedule.rows
    return [one for caller in callers for one in caller.firsts], [
        one for caller in callers for one in caller.gaps
    ]


@pytest.mark.parametrize("window", [16_000, 65_536])
def test_a_tenant_with_128_long_prompts_delays_no_other_by_more_than_an_ordinary_one(window: int) -> None:
    firsts, gaps = steps_of_others(window, greedy=False)
    slow_firsts, slow_gaps = steps_of_others(window, greedy=True)
    assert len(slow_firsts) > len(firsts) / 2
    for usual, slow in ((firsts, slow_firsts), (gaps, slow_gaps)):
        assert sum(slow) / len(slow) <= 2 * sum(usual) / len(usual)
        assert max(slow) <= 2 * max(usual)


def test_without_tenants_the_others_would_wait() -> None:
    firsts, _ = steps_of_others(65_536, greedy=False, tenants="aaaaaaaa")
    slow, _ = steps_of_others(65_536, greedy=True, tenants="aaaaaaaa")
    assert not slow or max(slow) > 4 * max(firsts)


def test_a_tenant_is_above_its_share_only_beside_rows_of_others() -> None:
    schedule = StepSchedule(8, 10_000)
    many = [ScheduledSequence(number, 10, 50, tenant="many") for number in range(6)]
    for one in many:
        schedule.add(one)
        schedule.done(schedule.step(100))
    assert not schedule.above_share(many[0])
    few = ScheduledSequence(6, 10, 50, tenant="few")
    schedule.add(few)
    schedule.done(schedule.step(100))
    assert few in schedule.rows
    assert schedule.above_share(many[0])
    assert not schedule.above_share(few)
    # A new prompt of this tenant, too, delays the rows of the others.
    assert schedule.above_share(ScheduledSequence(7, 10, 50, tenant="many"))
    assert not schedule.above_share(ScheduledSequence(8, 10, 50, tenant="third"))
