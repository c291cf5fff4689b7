"""The desired state of a revision: its properties for every spec and every state."""

import math
from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.runtime.ground.settings.scale_spec import ScaleSpec
from pilotflame.runtime.node.scaling.desired_state import desired
from pilotflame.runtime.node.scaling.load import (
    STUCK_WEIGHT,
    needed,
    sufficient_load,
    sufficient_queue,
    wanted,
)
from pilotflame.runtime.node.scaling.recent_need import Peak
from pilotflame.runtime.node.scaling.revision_state import NOTHING_WRONG, Phase, RevisionState
from pilotflame.runtime.node.scaling.seen import TARGET_S, Load, Seen
from pilotflame.runtime.node.scaling.table import Proposal, Rank

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


def peaks() -> st.SearchStrategy[Peak]:
    return st.builds(Peak, st.integers(0, 30), st.floats(NOW_S + 0.001, NOW_S + 3600))


class Decision(NamedTuple):
    """What a row makes the reconciler do."""

    start: int = 0
    stop: int = 0
    park: int = 0
    again_s: float = math.inf


def decide(
    spec: ScaleSpec, seen: Seen, now_s: float, ahead: int = 0, state: RevisionState = NOTHING_WRONG
) -> Decision:
    signal = Proposal(Rank.AHEAD, "warmup", ahead) if ahead else None
    row = desired(spec, seen, now_s, state, signal)
    return Decision(row.start(seen), row.stop(seen), row.park(seen), row.again_s)


@st.composite
def states(draw: st.DrawFn) -> Seen:
    ready = draw(st.integers(0, 20))
    idle = draw(st.lists(st.floats(0, NOW_S), max_size=ready))
    load = draw(loads())
    if load is not None:
        # Only ready workers with work are stuck.
        load = load._replace(stuck=min(load.stuck, ready - len(idle)))
    # Only busy workers run calls.
    in_flight = draw(st.integers(ready - len(idle), 500)) if ready > len(idle) else 0
    return Seen(
        queued=draw(st.integers(0, 500)),
        in_flight=in_flight,
        starting=draw(st.integers(0, 20)),
        ready=ready,
        idle_since_s=tuple(sorted(idle)),
        load=load,
        recent=draw(peaks()),
        recent_awake=draw(peaks()),
    )


def carried_out(seen: Seen, decision: Decision) -> Seen:
    """Return the state after the pool has carried the decision out. Workers that wake get work."""
    woken = min(decision.start, seen.parked)
    stopping = max(0, decision.stop - seen.parked)
    parked = seen.parked_since_s[decision.stop : seen.parked - woken]
    idle = seen.idle_since_s[stopping:]
    return replace(
        seen,
        starting=seen.starting + decision.start - woken,
        ready=seen.ready + woken - stopping - decision.park,
        idle_since_s=idle[decision.park :],
        parked_since_s=tuple(sorted((*parked, *idle[: decision.park]))),
    )


AHEAD = st.integers(0, 30)


@given(specs(), states(), AHEAD)
def test_it_is_never_above_max_nor_below_min(spec: ScaleSpec, seen: Seen, ahead: int) -> None:
    decision = decide(spec, seen, NOW_S, ahead)
    after = seen.awake + decision.start - decision.stop
    assert not (decision.start and decision.stop)
    if decision.start:
        assert after <= spec.max
    # Workers that start cannot be stopped, and no worker with calls is stopped in their place.
    assert after <= max(spec.max, seen.starting + seen.ready - len(seen.idle_since_s))
    assert after >= spec.min


@given(specs(), st.integers(1, 500), st.integers(0, 5), loads())
def test_from_zero_to_one_is_at_once(spec: ScaleSpec, queued: int, ahead: int, load: Load | None) -> None:
    seen = Seen(queued=queued, in_flight=0, starting=0, ready=0, load=load)
    assert decide(spec, seen, NOW_S, ahead).start >= 1


@given(specs())
def test_without_load_there_is_what_the_owner_asked_for(spec: ScaleSpec) -> None:
    seen = Seen(queued=0, in_flight=0, starting=0, ready=0)
    assert decide(spec, seen, NOW_S) == Decision(start=spec.min)


@given(specs(), states(), st.integers(0, 50), st.integers(0, 50), st.floats(0, 10), st.floats(0, 10))
def test_more_load_never_wants_fewer(
    spec: ScaleSpec, seen: Seen, queued: int, in_flight: int, work_s: float, lasting: float
) -> None:
    more = replace(seen, queued=seen.queued + queued, in_flight=seen.in_flight + in_flight)
    if (load := seen.load) is not None:
        load = load._replace(work_s=load.work_s + work_s, lasting=load.lasting + lasting)
        more = replace(more, load=load)
    assert wanted(spec, more) >= wanted(spec, seen)


@given(specs(), states(), AHEAD, st.floats(0, 3600) | st.just(math.inf))
def test_a_second_look_does_nothing(spec: ScaleSpec, seen: Seen, ahead: int, park_after_s: float) -> None:
    spec = replace(spec, park_after_s=park_after_s)
    after = carried_out(seen, decide(spec, seen, NOW_S, ahead))
    assert decide(spec, after, NOW_S, ahead)[:3] == (0, 0, 0)


@given(specs(), states())
def test_what_the_window_needed_stays_while_there_is_load(spec: ScaleSpec, seen: Seen) -> None:
    seen = replace(seen, in_flight=max(1, seen.in_flight))
    decision = decide(spec, seen, NOW_S)
    if decision.stop:
        left = seen.awake - decision.stop
        assert left >= min(seen.recent.workers, spec.max)
        assert left >= 1


@given(specs(), states())
def test_the_last_one_stays_for_its_own_delay(spec: ScaleSpec, seen: Seen) -> None:
    seen = without_calls(seen)
    decision = decide(spec, seen, NOW_S)
    if decision.stop and seen.awake - decision.stop == 0:
        assert seen.idle_since_s[-1] + spec.scale_to_zero_s <= NOW_S


@given(specs(), states())
def test_zero_is_reached_when_idle_and_no_timer_is_left(spec: ScaleSpec, seen: Seen) -> None:
    spec = replace(spec, min=0, scale_to_zero_s=min(spec.scale_to_zero_s, 3600.0))
    seen, now_s = replace(without_calls(seen), starting=0), NOW_S
    for _ in range(4):
        decision = decide(spec, in_window(seen, now_s), now_s)
        seen, now_s = carried_out(seen, decision), min(decision.again_s, now_s + 4000)
    assert seen.held == 0
    assert decide(spec, in_window(seen, now_s), now_s) == Decision()


def without_calls(seen: Seen) -> Seen:
    return replace(seen, queued=0, in_flight=0, ready=len(seen.idle_since_s))


def in_window(seen: Seen, now_s: float) -> Seen:
    """Return the state at a later time, if nothing else has happened."""
    peaks = {
        name: peak if peak.until_s > now_s else Peak()
        for name, peak in (("recent", seen.recent), ("recent_awake", seen.recent_awake))
    }
    return replace(seen, **peaks)


@given(specs(), states())
def test_the_busy_and_the_needed_are_never_stopped(spec: ScaleSpec, seen: Seen) -> None:
    decision = decide(spec, seen, NOW_S)
    if decision.stop:
        assert seen.awake - decision.stop >= min(wanted(spec, seen), spec.max)


@given(specs(), states(), AHEAD)
def test_the_next_look_is_in_the_future_and_there_is_one_if_workers_may_become_spare(
    spec: ScaleSpec, seen: Seen, ahead: int
) -> None:
    after = carried_out(seen, decide(spec, seen, NOW_S, ahead))
    decision = decide(spec, after, NOW_S, ahead)
    assert decision.again_s > NOW_S
    spare = after.held - max(wanted(spec, after), ahead, 1 if after.calls else 0)
    if spare > 0 and after.idle_since_s and not (spec.scale_to_zero_s == math.inf and not after.calls):
        assert decision.again_s < math.inf or after.held <= max(1, spec.min)


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
    seen = Seen(queued, in_flight=0, starting=starting, ready=ready, load=load)
    spec = replace(spec, min=0, buffer=0)
    start = decide(spec, seen, NOW_S).start
    if queued * each_s <= (ready + starting) * wake_s:
        assert not start
    # If one worker fewer started, the remaining work would take longer than a start, and longer than TARGET_S. With all
    # that start, it takes at most the longer of these times, unless more workers are not allowed or would have no call.
    if start and ready + starting:
        left_s = queued * each_s - (ready + starting) * wake_s
        have = ready + starting + start
        assert left_s / (have - 1) > max(wake_s, TARGET_S) * (1 - 1e-9)
        assert have in (spec.max, math.ceil(queued / spec.concurrency)) or left_s / have <= max(
            wake_s, TARGET_S
        ) * (1 + 1e-9)


@given(
    specs(),
    st.integers(0, 50),
    st.integers(0, 200),
    st.integers(0, 8),
    st.integers(0, 5),
    st.integers(0, 5),
    st.floats(0.0001, 5),
    st.floats(0.001, 20),
    st.floats(0, 8),
)
def test_a_sufficient_queue_needs_no_further_worker(
    spec: ScaleSpec,
    queued: int,
    more: int,
    in_flight: int,
    starting: int,
    ready: int,
    each_s: float,
    wake_s: float,
    lasting: float,
) -> None:
    load = Load(queued * each_s, wake_s, starting * wake_s / 2, stuck=0.0, lasting=lasting, each_s=each_s)
    seen = Seen(queued, in_flight=in_flight, starting=starting, ready=ready, load=load)
    # Leave out the owner's minimum, which is no part of the load.
    spec = replace(spec, min=0)
    if (most := sufficient_queue(spec, seen)) < 0:
        return
    assert not decide(spec, seen, NOW_S).start
    longer = min(more, int(most))
    later = replace(seen, queued=longer, load=load._replace(work_s=longer * each_s))
    assert min(spec.max, needed(spec, later)) <= max(1, needed(spec, seen))
    assert not decide(spec, later, NOW_S).start


def test_each_call_that_waits_needs_a_look_if_workers_are_stuck_missing_or_unpredictable() -> None:
    spec, load = ScaleSpec(max=4), Load(0.001, 0.01, started_s=0.0, stuck=0.0, lasting=0.0, each_s=0.001)
    seen = Seen(queued=1, in_flight=1, starting=0, ready=1, load=load)
    assert sufficient_queue(spec, seen) == 110
    assert sufficient_queue(spec, replace(seen, load=None)) == -1
    assert sufficient_queue(spec, replace(seen, load=load._replace(stuck=1.0))) == -1
    assert sufficient_queue(spec, replace(seen, load=load._replace(lasting=3.0))) == -1
    assert sufficient_queue(spec, replace(seen, ready=0)) == -1
    # If calls take long, even the first call that waits needs another worker.
    assert sufficient_queue(spec, replace(seen, load=load._replace(each_s=8.0))) == 0


def test_a_worker_whose_call_does_not_end_does_not_count() -> None:
    spec, load = ScaleSpec(max=4), Load(work_s=0.001, wake_s=0.01, started_s=0.0, stuck=0.0, lasting=0.0)
    seen = Seen(queued=1, in_flight=1, starting=0, ready=1, load=load)
    assert decide(spec, seen, NOW_S) == Decision(again_s=NOW_S + TARGET_S)
    stuck = replace(seen, load=load._replace(stuck=1.0))
    assert decide(spec, stuck, NOW_S).start == 1
    # However many calls a worker takes at a time, a stuck worker runs no call that waits.
    assert decide(ScaleSpec(max=4, concurrency=42), stuck, NOW_S).start == 1
    # The calls that wait may take long, too, so each of them gets a worker, up to STUCK_WEIGHT.
    assert decide(spec, replace(stuck, queued=2), NOW_S).start == 2
    assert decide(ScaleSpec(max=9), replace(stuck, queued=50), NOW_S).start == STUCK_WEIGHT
    # The calls that wait are short, so a second worker that is awake or starts is enough.
    assert decide(spec, replace(stuck, ready=2, in_flight=2), NOW_S).start == 0
    assert decide(spec, replace(stuck, starting=1), NOW_S).start == 0


def test_a_lasting_load_near_the_limit_asks_for_one_more() -> None:
    spec, load = (
        ScaleSpec(max=4, concurrency=10),
        Load(0.0, wake_s=0.01, started_s=0.0, stuck=0.0, lasting=7.9),
    )
    seen = Seen(queued=0, in_flight=9, starting=0, ready=1, load=load)
    decision = decide(spec, seen, NOW_S)
    assert (decision.start, decision.again_s) == (0, NOW_S + 1.0)
    assert sufficient_load(spec, seen) == math.inf
    assert decide(spec, replace(seen, load=load._replace(lasting=8.1)), NOW_S).start == 1


def test_the_queue_of_a_past_burst_is_no_load_that_lasts() -> None:
    spec, load = ScaleSpec(max=4), Load(0.0, wake_s=0.01, started_s=0.0, stuck=0.0, lasting=8.0)
    assert decide(spec, Seen(queued=0, in_flight=1, starting=0, ready=1, load=load), NOW_S).start == 0


@given(specs(), st.integers(1, 20))
def test_a_prewarm_is_met_within_max(spec: ScaleSpec, ahead: int) -> None:
    seen = Seen(queued=0, in_flight=0, starting=0, ready=0)
    assert decide(spec, seen, NOW_S, ahead).start == min(spec.max, max(spec.min, ahead))


@given(st.integers(1, 50))
def test_one_caller_after_the_other_needs_one_worker(concurrency: int) -> None:
    spec = ScaleSpec(max=10, concurrency=concurrency)
    seen = Seen(queued=0, in_flight=1, starting=0, ready=1)
    assert decide(spec, seen, NOW_S).start == 0


@pytest.mark.parametrize(
    ("concurrency", "load", "want"),
    [(10, 8, 1), (10, 9, 2), (10, 10, 2), (1, 2, 3), (1, 1, 1), (4, 3, 1), (4, 4, 2), (10, 0, 0)],
)
def test_one_more_is_wanted_near_the_limit_not_after_it(concurrency: int, load: int, want: int) -> None:
    spec = ScaleSpec(max=100, concurrency=concurrency)
    assert wanted(spec, Seen(queued=load, in_flight=0, starting=0, ready=0)) == want
    assert wanted(spec, Seen(queued=0, in_flight=load, starting=0, ready=0)) == want


def test_when_it_wakes_the_timeout_has_passed_however_the_sum_is_rounded() -> None:
    spec, seen = (
        ScaleSpec(scale_to_zero_s=28.71),
        Seen(0, 0, starting=0, ready=1, idle_since_s=(999489.074,)),
    )
    decision = decide(spec, seen, 999489.074)
    assert decide(spec, seen, decision.again_s).stop == 1


def test_a_buffer_stands_by_only_while_there_is_load() -> None:
    spec = ScaleSpec(max=10, buffer=2)
    assert wanted(spec, Seen(queued=0, in_flight=0, starting=0, ready=0)) == 0
    assert wanted(spec, Seen(queued=1, in_flight=0, starting=0, ready=0)) == 3


@given(specs(), st.integers(0, 20), st.integers(0, 500))
def test_up_to_the_sufficient_load_no_more_workers_are_wanted(spec: ScaleSpec, ready: int, load: int) -> None:
    ready = max(ready, spec.min)
    seen = Seen(queued=0, in_flight=0, starting=0, ready=ready)
    load = int(min(load, sufficient_load(spec, seen)))
    assert wanted(spec, replace(seen, in_flight=load)) <= ready


# -- parked workers


@st.composite
def parked_states(draw: st.DrawFn) -> Seen:
    parked = draw(st.lists(st.floats(0, NOW_S), max_size=10))
    return replace(draw(states()), parked_since_s=tuple(sorted(parked)))


@given(specs(), parked_states(), st.floats(0, 3600) | st.just(math.inf))
def test_parked_workers_wake_before_others_start_and_stop_before_them(
    spec: ScaleSpec, seen: Seen, park_after_s: float
) -> None:
    spec = replace(spec, park_after_s=park_after_s)
    decision = decide(spec, seen, NOW_S)
    assert not (decision.start and (decision.stop or decision.park))
    after = carried_out(seen, decision)
    # Parked workers do not count: as many workers as are wanted are awake.
    assert after.awake >= wanted(spec, seen)
    assert after.ready >= 0
    assert decision.stop <= seen.ready + seen.parked
    assert decision.park <= len(seen.idle_since_s)


@given(specs(), parked_states(), st.floats(0, 3600))
def test_who_is_not_needed_is_parked_in_time(spec: ScaleSpec, seen: Seen, park_after_s: float) -> None:
    spec = replace(spec, park_after_s=park_after_s)
    after = carried_out(seen, decision := decide(spec, seen, NOW_S))
    needed = max(wanted(spec, after), min(after.recent_awake.workers, spec.max))
    if decision.start or seen.queued or after.awake <= needed or not after.idle_since_s:
        return
    assert after.idle_since_s[0] + park_after_s > NOW_S
    assert decide(spec, after, NOW_S).again_s <= after.idle_since_s[0] + park_after_s


@given(specs(), parked_states())
def test_parked_workers_stay_as_long_as_idle_ones(spec: ScaleSpec, seen: Seen) -> None:
    seen = replace(seen, queued=0, in_flight=0, ready=len(seen.idle_since_s))
    decision = decide(spec, seen, NOW_S)
    if decision.stop and seen.held - decision.stop == 0:
        assert max(seen.idle_since_s + seen.parked_since_s) + spec.scale_to_zero_s <= NOW_S


def test_a_buffer_that_the_last_moments_needed_is_not_parked_between_two_calls() -> None:
    spec = ScaleSpec(max=4, buffer=1, park_after_s=10.0)
    needed = Peak(2, NOW_S + 9)
    seen = Seen(
        0, 0, starting=0, ready=2, idle_since_s=(NOW_S - 50, NOW_S - 1), recent=needed, recent_awake=needed
    )
    assert decide(spec, seen, NOW_S)[:3] == (0, 0, 0)


# -- proposals and caps beside the load


def revision_states() -> st.SearchStrategy[RevisionState]:
    until_s = st.just(0.0) | st.floats(NOW_S + 0.001, NOW_S + 300)
    return st.builds(
        RevisionState,
        st.sampled_from([Phase.NEW, Phase.LIVE, Phase.RETIRING]),
        st.just(0),
        st.sampled_from(["", "budget"]),
        st.integers(0, 9),
        until_s,
        st.booleans(),
        st.booleans(),
    )


@given(specs(), states(), AHEAD, revision_states())
def test_no_standing_starts_or_keeps_a_worker(
    spec: ScaleSpec, seen: Seen, ahead: int, state: RevisionState
) -> None:
    bounded, free = (decide(spec, seen, NOW_S, ahead, one) for one in (state, NOTHING_WRONG))
    assert bounded.start <= free.start
    assert bounded.stop >= free.stop or free.stop == bounded.start == 0


@given(specs(), states(), AHEAD)
def test_a_budget_that_is_used_up_ends_all_workers_and_starts_none(
    spec: ScaleSpec, seen: Seen, ahead: int
) -> None:
    decision = decide(spec, seen, NOW_S, ahead, RevisionState(stopped="budget"))
    assert (decision.start, decision.stop) == (0, seen.ready + seen.parked)


@given(specs(), states(), AHEAD)
def test_a_revision_that_retires_has_workers_for_its_own_calls_only(
    spec: ScaleSpec, seen: Seen, ahead: int
) -> None:
    seen = without_calls(seen)
    decision = decide(spec, seen, NOW_S, ahead, RevisionState(Phase.RETIRING))
    assert (decision.start, decision.stop) == (0, seen.ready + seen.parked)


def test_a_revision_that_retires_is_looked_at_again_while_it_has_more_workers_than_its_calls_need() -> None:
    spec = ScaleSpec(min=2, max=2, scale_down_s=40.0)
    seen = Seen(queued=0, in_flight=1, starting=0, ready=2, idle_since_s=(NOW_S - 1.0,))
    assert decide(spec, seen, NOW_S, state=RevisionState(Phase.RETIRING)).again_s <= NOW_S + 40.0


def test_a_failed_start_delays_what_the_owner_keeps_and_ends_none_of_it() -> None:
    spec, failed = ScaleSpec(min=2), RevisionState(failures=1, backoff_until_s=NOW_S + 8)
    one = Seen(0, 0, starting=0, ready=1, idle_since_s=(NOW_S - 1000,))
    assert decide(spec, one, NOW_S, state=failed) == Decision(again_s=NOW_S + 8)
    assert decide(spec, one, NOW_S + 8, state=failed).start == 1


def test_callers_cause_one_start_at_a_time_after_a_failed_one_and_none_while_it_is_open() -> None:
    spec, failed = ScaleSpec(max=8), RevisionState(failures=3, backoff_until_s=NOW_S + 8)
    waiting = Seen(queued=5, in_flight=0, starting=0, ready=0)
    assert decide(spec, waiting, NOW_S, state=failed).start == 1
    assert decide(spec, replace(waiting, starting=1), NOW_S, state=failed).start == 0
    assert decide(spec, waiting, NOW_S, state=failed._replace(open=True)) == Decision(again_s=NOW_S + 8)
    assert decide(spec, waiting, NOW_S, state=RevisionState(unexplained=True)).start == 0


@given(specs(), states(), AHEAD, st.sampled_from((Phase.NEW, Phase.PROVING, Phase.RETIRING)))
def test_only_the_live_revision_has_workers_for_its_owner_and_for_signals(
    spec: ScaleSpec, seen: Seen, ahead: int, phase: Phase
) -> None:
    signal, state = Proposal(Rank.AHEAD, "warmup", ahead), RevisionState(phase)
    assert desired(spec, seen, NOW_S, state, signal) == desired(replace(spec, min=0), seen, NOW_S, state)
