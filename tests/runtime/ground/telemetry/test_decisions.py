"""Decisions: a limited number is kept, each is taken once, and its description in words has all its figures."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.runtime.ground.telemetry.decisions import (
    KEPT,
    MAX_DECISIONS,
    DecisionRecord,
    Decisions,
    describe,
    seconds,
)

NAMES = st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=20).filter(lambda name: name.strip("_"))


def told(action: str, cause: str, **figures: float) -> str:
    return describe(DecisionRecord(0.0, action, cause, figures))


@pytest.mark.parametrize(
    ("decision", "text"),
    [
        (
            ("start", "load", {"workers": 2, "queued": 9, "in_flight": 0, "starting": 0, "ready": 1}),
            "started 2 workers: 9 invocations waited, 1 worker ready",
        ),
        (
            ("start", "load", {"workers": 1, "queued": 1, "in_flight": 3, "starting": 2, "ready": 3, "drain_s": 4}),
            "started 1 worker: 1 invocation waited, 3 workers ready, 3 invocations running, 2 workers already starting, drain 4.0 s",
        ),
        (
            ("start", "load", {"workers": 1, "queued": 1, "work_s": 1.5, "wake_s": 0.2, "lasting": 0.25}),
            "started 1 worker: 1 invocation waited, 0 workers ready, the calls need 1.5 s, a start takes 200 ms, load of the last"
            " seconds 0.25",
        ),
        (
            ("start", "schedule 0 8 * * *", {"workers": 1, "queued": 0, "ready": 0}),
            "started 1 worker ahead of calls, the schedule 0 8 * * * asks for it: 0 invocations waited, 0 workers ready",
        ),
        (
            ("stop", "idle", {"workers": 1, "ready": 3, "idle_s": 60.04}),
            "stopped 1 worker after 60.0 s idle: 3 workers had been ready",
        ),
        (
            ("stop", "idle", {"workers": 2, "recent": 1, "queued": 0, "in_flight": 1, "starting": 0, "ready": 3}),
            "stopped 2 workers without work: 3 workers had been ready, 1 worker needed lately, 1 invocation running",
        ),
        (
            ("evict", "pressure", {"rung": 2, "idle_s": 1200, "freed_bytes": 4.2e6, "extra_wake_s": 0.8}),
            "was evicted to files alone after 0:20:00 idle, memory is short: it held 4.2 MB, the next call waits 800 ms"
            " longer",
        ),
        (
            ("step_down", "plan", {"rung": 1, "idle_s": 12, "hold_per_hour": 0.5, "saved_per_hour": 0.00123456, "wake_s": 0.03,
                                   "expert": 2, "periods": 40, "expected_in_s": 90}),
            "went down to a zygote alone after 12.0 s idle, the keep-alive policy (by its last 32 idle times): this costs 0.5"
            " an hour, 0.00123 less than before, the next call waits 30 ms, by habit it comes in 90.0 s, learned from 40"
            " idle periods",
        ),
        (("park", "idle", {"freed_bytes": 4.2e6}), "a worker was parked: it gave 4.2 MB of device memory back"),
        (("wake", "load", {"workers": 2, "queued": 1}), "woke 2 parked workers: 1 invocation waited"),
        (("step_up", "plan", {"rung": 99}), "went up to another rung, the keep-alive policy"),
        (
            ("prewarm", "upstream", {"used": 0.0, "ready_s": 30.0}),
            "a worker that was started ahead of calls (the function that comes before it was called) was not used: it"
            " was ready for 30.0 s",
        ),
        (
            ("prewarm", "hook rollout-7", {"used": 1.0}),
            "a worker that was started ahead of calls (rollout-7 asked for it) was used",
        ),
        (
            ("expect", "upstream transcribe", {"probability_share": 1.0, "for_s": 60.0}),
            "expects a call, because transcribe was called: probability 100%, for 60.0 s",
        ),
        (("refuse", "limit", {"owner_share": 0.5}), "did not start a worker, limit: owner 50%"),
        (
            ("refuse", "max_workers", {"workers": 2, "max_workers": 8}),
            "did not start 2 workers, all functions together may have no more: max workers 8",
        ),
        (
            ("budget", "exhausted", {"used_share": 1.0, "money": 5.0, "worker_s": 90.0}),
            "today's budget is used up: used 100%, money 5, worker 90.0 s",
        ),
        (("pause", "owner", {}), "was paused by its owner"),
        (("resume", "owner", {}), "was resumed by its owner"),
        (("stop", "paused", {"workers": 1, "ready": 1}), "stopped 1 worker, its owner has paused it: 1 worker had been ready"),
        (("made_up", "some_rule", {}), "made up, some rule"),
        # Stored decisions may lack the number of workers.
        (("start", "load", {}), "started 1 worker: 0 invocations waited, 0 workers ready"),
        (("stop", "idle", {}), "stopped 1 worker without work"),
        (("end", "replaced", {}), "ended 1 worker with 0 running calls, other calls had waited for its place since its revision was replaced"),
        (("park", "pressure", {}), "a worker was parked, memory is short: it gave 0.0 MB of device memory back"),
        (("wake", "load", {"queued": 1}), "woke 1 parked worker: 1 invocation waited"),
    ],
)  # fmt: skip
def test_a_decision_is_told_in_plain_words(decision: tuple[str, str, dict[str, float]], text: str) -> None:
    action, cause, figures = decision
    assert told(action, cause, **figures) == text


@given(
    st.sampled_from(["start", "stop", "expect", "prewarm", "step_down", "evict", "refuse", "budget"]) | NAMES,
    NAMES,
    st.dictionaries(NAMES, st.floats(allow_nan=False, allow_infinity=False)),
)
def test_whatever_others_note_has_words_with_all_its_figures(
    action: str, cause: str, figures: dict[str, float]
) -> None:
    text = told(action, cause, **{f"x{name}_seen": value for name, value in figures.items()})
    assert text.strip()
    assert "\n" not in text
    for name, value in figures.items():
        assert f"x{name}_seen".replace("_", " ") + f" {value:.6g}" in text


def test_times_are_told_in_a_unit_that_fits() -> None:
    assert [seconds(value) for value in (0.0123, 4.2, 599, 600, 90_000)] == [
        "12.3 ms", "4.2 s", "599.0 s", "0:10:00", "1 day, 1:00:00",
    ]  # fmt: skip


def test_each_decision_is_taken_once_and_the_oldest_are_dropped() -> None:
    decisions = Decisions()
    assert decisions.take() == []
    decisions.note("start", "load", workers=1)
    stopped = decisions.note("stop", "idle")
    decisions.note("refuse", "max_workers")
    decisions.take()
    assert decisions.cooled == stopped
    decisions = Decisions()
    decisions.note("start", "load", workers=1)
    decisions.note("stop", "idle")
    assert [one.action for one in decisions.take()] == ["start", "stop"]
    assert decisions.take() == []
    assert len(decisions.since(0.0)) == 2
    for number in range(MAX_DECISIONS + 5):
        decisions.note("start", "load", number=number)
    taken = decisions.take()
    assert len(taken) == MAX_DECISIONS
    assert (taken[0].figures["number"], taken[-1].figures["number"]) == (5, MAX_DECISIONS + 4)
    assert decisions.since(taken[-1].at + 1) == []
    # Only KEPT decisions stay in memory after they were taken, because a gateway may have thousands of functions.
    assert decisions.since(0.0) == taken[-KEPT:]
    assert decisions.take() == []
