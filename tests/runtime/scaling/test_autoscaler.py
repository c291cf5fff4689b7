"""The autoscaler: its promises, for every spec and every state."""

import math
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pilotflame.runtime.scaling.autoscaler import (
    TARGET_S,
    Decision,
    Load,
    ScaleSpec,
    Stats,
    decide,
    sufficient_load,
    wanted,
)

NOW_S = 1_000_000.0


@st.composite
def specs(draw: st.DrawFn) -> ScaleSpec:
    least = draw(st.integers(0, 5))
    return ScaleSpec(
        min=least,
        max=draw(st.integers(max(1, least), 20)),
        buffer=draw(st.integers(0, 3)),
        concurrency=draw(st.integers(1, 64)),
        scale_to_zero_s=draw(st.floats(0, 3600) | st.just(math.inf)),
        scale_down_s=draw(st.floats(0, 3600)),
    )


def loads() -> st.SearchStrategy[Load | None]:
    seconds = st.floats(0, 1000)
    known = st.builds(
        Load,
        work_s=seconds,
        wake_s=seconds,
        started_s=seconds,
        stuck=st.floats(0, 20),
        lasting=st.floats(0, 500),
    )
    return st.none() | known


@st.composite
def states(draw: st.DrawFn) -> Stats:
    ready = draw(st.integers(0, 20))
    idle = draw(st.lists(st.floats(0, NOW_S), max_size=ready))
    load = draw(loads())
    if load is not None:
        # Only ready workers with work are stuck.
        load = replace(load, stuck=min(load.stuck, ready - len(idle)))
    return Stats(
        queued=draw(st.integers(0, 500)),
        in_flight=draw(st.integers(0, 500)),
        starting=draw(st.integers(0, 20)),
        ready=ready,
        idle_since_s=tuple(sorted(idle)),
        prewarm=draw(st.integers(0, 30)),
        load=load,
        recent=draw(st.integers(0, 30)),
        recent_until_s=draw(st.floats(NOW_S + 0.001, NOW_S + 3600)),
    )


def applied(stats: Stats, decision: Decision) -> Stats:
    """The state once the decision has been carried out."""
    return replace(
        stats,
        starting=stats.starting + decision.start,
        ready=stats.ready - decision.stop,
        idle_since_s=stats.idle_since_s[decision.stop :],
    )


@given(specs(), states())
def test_it_is_never_above_max_nor_below_min(spec: ScaleSpec, stats: Stats) -> None:
    assert spec.min <= wanted(spec, stats) <= spec.max
    decision = decide(spec, stats, NOW_S)
    have = stats.ready + stats.starting
    after = have + decision.start - decision.stop
    assert not (decision.start and decision.stop)
    assert decision.start >= 0
    assert decision.stop >= 0
    if decision.start:
        assert after <= spec.max
    if decision.stop:
        assert after >= spec.min
    # Below min it starts.
    assert after >= spec.min or decision.start
    assert after >= spec.min


@given(specs(), st.integers(1, 500), st.integers(0, 5), loads())
def test_from_zero_to_one_is_at_once(spec: ScaleSpec, queued: int, prewarm: int, load: Load | None) -> None:
    stats = Stats(queued=queued, in_flight=0, starting=0, ready=0, prewarm=prewarm, load=load)
    assert decide(spec, stats, NOW_S).start >= 1


@given(specs())
def test_without_load_there_is_what_the_owner_asked_for(spec: ScaleSpec) -> None:
    stats = Stats(queued=0, in_flight=0, starting=0, ready=0)
    assert decide(spec, stats, NOW_S) == Decision(start=spec.min)


@given(specs(), states(), st.integers(0, 50), st.integers(0, 50), st.floats(0, 10), st.floats(0, 10))
def test_more_load_never_wants_fewer(
    spec: ScaleSpec, stats: Stats, queued: int, in_flight: int, work_s: float, lasting: float
) -> None:
    more = replace(stats, queued=stats.queued + queued, in_flight=stats.in_flight + in_flight)
    if stats.load is not None:
        load = replace(stats.load, work_s=stats.load.work_s + work_s, lasting=stats.load.lasting + lasting)
        more = replace(more, load=load)
    assert wanted(spec, more) >= wanted(spec, stats)


@given(specs(), states())
def test_what_was_decided_is_enough(spec: ScaleSpec, stats: Stats) -> None:
    """No flapping: once a decision is applied, the same moment asks for nothing more."""
    after = decide(spec, applied(stats, decide(spec, stats, NOW_S)), NOW_S)
    assert (after.start, after.stop) == (0, 0)


@given(specs(), states())
def test_what_the_window_needed_stays_while_there_is_load(spec: ScaleSpec, stats: Stats) -> None:
    stats = replace(stats, in_flight=max(1, stats.in_flight))
    decision = decide(spec, stats, NOW_S)
    if decision.stop:
        left = stats.ready + stats.starting - decision.stop
        assert left >= min(stats.recent, spec.max)
        assert left >= 1


@given(specs(), states())
def test_the_last_one_stays_for_its_own_delay(spec: ScaleSpec, stats: Stats) -> None:
    stats = replace(stats, queued=0, in_flight=0)
    decision = decide(spec, stats, NOW_S)
    if decision.stop and stats.ready + stats.starting - decision.stop == 0:
        assert stats.idle_since_s[-1] + spec.scale_to_zero_s <= NOW_S


@given(specs(), states())
def test_zero_is_reached_when_idle(spec: ScaleSpec, stats: Stats) -> None:
    idle = tuple(stats.idle_since_s[:1]) * stats.ready
    stats = replace(stats, queued=0, in_flight=0, starting=0, prewarm=0, idle_since_s=idle)
    spec = replace(spec, min=0, scale_to_zero_s=min(spec.scale_to_zero_s, 3600.0))
    now_s = NOW_S
    for _ in range(3):
        decision = decide(spec, replace(stats, recent=stats.recent * (stats.recent_until_s > now_s)), now_s)
        stats = applied(stats, decision)
        now_s = decision.wake_at_s or now_s
    assert stats.ready == 0 or not idle


@given(specs(), states())
def test_the_busy_and_the_needed_are_never_stopped(spec: ScaleSpec, stats: Stats) -> None:
    decision = decide(spec, stats, NOW_S)
    if decision.stop:
        assert stats.ready + stats.starting - decision.stop >= wanted(spec, stats)


@given(specs(), states())
def test_it_wakes_in_the_future_if_some_may_become_spare(spec: ScaleSpec, stats: Stats) -> None:
    decision = decide(spec, stats, NOW_S)
    after = applied(stats, decision)
    spare = after.ready + after.starting - max(wanted(spec, after), spec.min)
    if decision.wake_at_s is not None:
        assert NOW_S < decision.wake_at_s < math.inf
    elif not decision.start and spare > 0 and after.idle_since_s:
        loaded = after.queued + after.in_flight
        assert spec.scale_to_zero_s == math.inf or (
            loaded and after.ready + after.starting <= max(1, spec.min)
        )


@given(specs(), states())
def test_without_load_it_stops_some_when_it_wakes(spec: ScaleSpec, stats: Stats) -> None:
    stats = replace(stats, queued=0, in_flight=0, ready=len(stats.idle_since_s))
    decision = decide(spec, stats, NOW_S)
    after, wake_s = applied(stats, decision), decision.wake_at_s
    if wake_s is not None:
        if after.recent_until_s <= wake_s:
            after = replace(after, recent=0)
        assert decide(spec, after, wake_s).stop >= 1


@given(
    specs(),
    st.integers(1, 60),
    st.floats(0.001, 5),
    st.floats(0.001, 20),
    st.integers(0, 5),
    st.integers(0, 5),
)
def test_none_starts_for_what_has_ended_before_it_is_awake(
    spec: ScaleSpec, queued: int, each_s: float, wake_s: float, ready: int, starting: int
) -> None:
    load = Load(queued * each_s, wake_s, started_s=starting * wake_s, stuck=0.0, lasting=0.0)
    stats = Stats(queued, in_flight=0, starting=starting, ready=ready, load=load)
    spec = replace(spec, min=0, buffer=0)
    start = decide(spec, stats, NOW_S).start
    if queued * each_s <= (ready + starting) * wake_s:
        assert not start
    # What is left then is enough for each of them, and no caller waits longer than for a start.
    if start and ready + starting:
        left_s = queued * each_s - (ready + starting) * wake_s
        have = ready + starting + start
        assert left_s / (have - 1) > max(wake_s, TARGET_S) * (1 - 1e-9)
        assert have in (spec.max, math.ceil(queued / spec.concurrency)) or left_s / have <= max(
            wake_s, TARGET_S
        ) * (1 + 1e-9)


def test_a_worker_whose_call_does_not_end_does_not_count() -> None:
    spec, load = ScaleSpec(max=4), Load(work_s=0.001, wake_s=0.01, started_s=0.0, stuck=0.0, lasting=0.0)
    stats = Stats(queued=1, in_flight=1, starting=0, ready=1, load=load)
    assert decide(spec, stats, NOW_S) == Decision(wake_at_s=NOW_S + TARGET_S)
    assert decide(spec, replace(stats, load=replace(load, stuck=1.0)), NOW_S).start == 1


def test_a_lasting_load_near_the_limit_asks_for_one_more() -> None:
    spec, load = (
        ScaleSpec(max=4, concurrency=10),
        Load(0.0, wake_s=0.01, started_s=0.0, stuck=0.0, lasting=7.9),
    )
    stats = Stats(queued=0, in_flight=9, starting=0, ready=1, load=load)
    decision = decide(spec, stats, NOW_S)
    assert (decision.start, decision.wake_at_s) == (0, NOW_S + 1.0)
    assert sufficient_load(spec, stats) == math.inf
    assert decide(spec, replace(stats, load=replace(load, lasting=8.1)), NOW_S).start == 1


@given(specs(), st.integers(1, 20))
def test_a_prewarm_is_met_within_max(spec: ScaleSpec, prewarm: int) -> None:
    stats = Stats(queued=0, in_flight=0, starting=0, ready=0, prewarm=prewarm)
    assert decide(spec, stats, NOW_S).start == min(spec.max, max(spec.min, prewarm))


@given(st.integers(1, 50))
def test_one_caller_after_the_other_needs_one_worker(concurrency: int) -> None:
    spec = ScaleSpec(max=10, concurrency=concurrency)
    stats = Stats(queued=0, in_flight=1, starting=0, ready=1)
    assert decide(spec, stats, NOW_S).start == 0


@pytest.mark.parametrize(
    ("concurrency", "load", "want"),
    [(10, 8, 1), (10, 9, 2), (10, 10, 2), (1, 2, 3), (1, 1, 1), (4, 3, 1), (4, 4, 2), (10, 0, 0)],
)
def test_one_more_is_wanted_near_the_limit_not_after_it(concurrency: int, load: int, want: int) -> None:
    spec = ScaleSpec(max=100, concurrency=concurrency)
    assert wanted(spec, Stats(queued=load, in_flight=0, starting=0, ready=0)) == want
    assert wanted(spec, Stats(queued=0, in_flight=load, starting=0, ready=0)) == want


def test_when_it_wakes_the_timeout_has_passed_however_the_sum_is_rounded() -> None:
    spec, stats = (
        ScaleSpec(scale_to_zero_s=28.71),
        Stats(0, 0, starting=0, ready=1, idle_since_s=(999489.074,)),
    )
    decision = decide(spec, stats, 999489.074)
    assert decision.wake_at_s is not None
    assert decide(spec, stats, decision.wake_at_s).stop == 1


def test_a_buffer_stands_by_only_while_there_is_load() -> None:
    spec = ScaleSpec(max=10, buffer=2)
    assert wanted(spec, Stats(queued=0, in_flight=0, starting=0, ready=0)) == 0
    assert wanted(spec, Stats(queued=1, in_flight=0, starting=0, ready=0)) == 3


@given(specs(), st.integers(0, 20), st.integers(0, 500))
def test_up_to_the_sufficient_load_no_more_workers_are_wanted(spec: ScaleSpec, ready: int, load: int) -> None:
    ready = max(ready, spec.min)
    stats = Stats(queued=0, in_flight=0, starting=0, ready=ready)
    load = int(min(load, sufficient_load(spec, stats)))
    assert wanted(spec, replace(stats, in_flight=load)) <= ready


@given(specs(), states())
def test_who_works_with_others_is_looked_at_again(spec: ScaleSpec, stats: Stats) -> None:
    stats = replace(stats, in_flight=max(1, stats.in_flight))
    decision = decide(spec, stats, NOW_S)
    if not decision.start and stats.ready + stats.starting - decision.stop > max(1, spec.min):
        assert decision.wake_at_s is not None
        assert decision.wake_at_s > NOW_S


# -- parked workers


@st.composite
def parked_states(draw: st.DrawFn) -> Stats:
    parked = draw(st.lists(st.floats(0, NOW_S), max_size=10))
    return replace(draw(states()), parked_since_s=tuple(sorted(parked)))


def parking(spec: ScaleSpec, park_after_s: float) -> ScaleSpec:
    return replace(spec, park_after_s=park_after_s)


def carried_out(stats: Stats, decision: Decision) -> Stats:
    """The state once the pool has carried the decision out. Those that wake get work."""
    woken = min(decision.start, stats.parked)
    stopping = max(0, decision.stop - stats.parked)
    parked = stats.parked_since_s[decision.stop : stats.parked - woken]
    idle = stats.idle_since_s[stopping:]
    return replace(
        stats,
        starting=stats.starting + decision.start - woken,
        ready=stats.ready + woken - stopping - decision.park,
        idle_since_s=idle[decision.park :],
        parked_since_s=tuple(sorted((*parked, *idle[: decision.park]))),
    )


# Both ready workers are stuck. That is why as many are wanted, so they do not stop although more are there.
ALL_STUCK = Stats(
    queued=1, in_flight=2, starting=3, ready=2, recent_until_s=NOW_S + 1,
    load=Load(work_s=2.0, wake_s=1.0, started_s=1.0, stuck=2.0, lasting=0.0),
)  # fmt: skip


@given(specs(), parked_states(), st.floats(0, 3600) | st.just(math.inf))
@example(ScaleSpec(max=4, buffer=1, scale_to_zero_s=math.inf, scale_down_s=0.0), ALL_STUCK, math.inf)
def test_parked_workers_wake_before_others_start_and_stop_before_them(
    spec: ScaleSpec, stats: Stats, park_after_s: float
) -> None:
    spec = parking(spec, park_after_s)
    want = wanted(spec, stats)
    decision = decide(spec, stats, NOW_S)
    assert not (decision.start and (decision.stop or decision.park))
    after = carried_out(stats, decision)
    # Who is wanted is awake, and not only held.
    assert after.awake >= want
    assert after.ready >= 0
    assert decision.stop <= stats.ready + stats.parked
    assert decision.park <= len(stats.idle_since_s)
    again = decide(spec, after, NOW_S)
    assert again.start == 0
    if not decision.start:
        assert (again.stop, again.park) == (0, 0)
    if decision.wake_at_s is not None:
        assert decision.wake_at_s > NOW_S


@given(specs(), parked_states(), st.floats(0, 3600))
def test_who_is_not_needed_is_parked_in_time(spec: ScaleSpec, stats: Stats, park_after_s: float) -> None:
    spec = parking(spec, park_after_s)
    after = carried_out(stats, decision := decide(spec, stats, NOW_S))
    if decision.start or stats.queued or after.awake <= wanted(spec, after) or not after.idle_since_s:
        return
    assert after.idle_since_s[0] + park_after_s > NOW_S
    assert decision.wake_at_s is not None
    assert decision.wake_at_s <= after.idle_since_s[0] + park_after_s


@given(specs(), parked_states())
def test_parked_workers_stay_as_long_as_idle_ones(spec: ScaleSpec, stats: Stats) -> None:
    stats = replace(stats, queued=0, in_flight=0)
    decision = decide(spec, stats, NOW_S)
    if decision.stop and stats.held - decision.stop == 0:
        assert max(stats.idle_since_s + stats.parked_since_s) + spec.scale_to_zero_s <= NOW_S
