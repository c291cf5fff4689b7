"""The timeline: phases that sum to the total, whenever the invocation arrived."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pilotflame.runtime.ground.telemetry.timeline import (
    PHASES,
    WARM_PHASES,
    Activation,
    Fetch,
    Timeline,
    Transfer,
    parse_server_timing,
)

TIMES = st.floats(0, 1000)


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    asked, forked, ready = sorted(draw(st.tuples(TIMES, TIMES, TIMES)))
    cold = draw(st.booleans())
    received = draw(TIMES)
    sent = max(received, ready if cold else 0.0) + draw(TIMES)
    inside = draw(TIMES)
    share = draw(st.floats(0, 1))
    completed = sent + inside + draw(TIMES)
    return Timeline(
        received_s=received + 1,
        sent_s=sent + 1,
        completed_s=completed + 1,
        responded_s=draw(st.just(0.0) | TIMES.map(lambda more: completed + 1 + more)),
        wait_s=inside * share,
        exec_s=inside - inside * share,
        activation=Activation(asked + 1, forked + 1, ready + 1) if cold else None,
    )


@given(timelines())
def test_the_phases_sum_to_the_total_whenever_it_arrived(timeline: Timeline) -> None:
    phases = timeline.phases()
    assert math.isclose(sum(phases.values()), timeline.total_s, rel_tol=1e-9, abs_tol=1e-6)
    assert all(seconds >= 0 for seconds in phases.values())


@given(timelines())
def test_the_phases_are_named_and_in_order(timeline: Timeline) -> None:
    names = list(timeline.phases())
    assert names == [name for name in PHASES if name in names]
    assert {"fork", "restore", "dispatch"} <= set(names) if timeline.cold else names == list(WARM_PHASES)  # fmt: skip


@given(timelines())
def test_the_header_has_the_same_phases(timeline: Timeline) -> None:
    parsed = parse_server_timing(timeline.server_timing())
    assert parsed.pop("total") == pytest.approx(timeline.total_s * 1000, abs=0.001)
    assert list(parsed) == list(timeline.phases())
    for name, seconds in timeline.phases().items():
        assert parsed[name] == pytest.approx(seconds * 1000, abs=0.001)


@pytest.mark.parametrize(
    ("received", "expected"),
    [
        (0.0, {"queue": 1.0, "fork": 2.0, "restore": 3.0, "dispatch": 4.0}),
        (2.0, {"queue": 0.0, "fork": 1.0, "restore": 3.0, "dispatch": 4.0}),
        (5.0, {"queue": 0.0, "fork": 0.0, "restore": 1.0, "dispatch": 4.0}),
        (8.0, {"queue": 0.0, "fork": 0.0, "restore": 0.0, "dispatch": 2.0}),
    ],
)
def test_an_activation_under_way_counts_from_the_arrival(received: float, expected: dict[str, float]) -> None:
    timeline = Timeline(received, sent_s=10.0, completed_s=15.0, wait_s=1.0, exec_s=3.0, activation=Activation(1.0, 3.0, 6.0))  # fmt: skip
    assert timeline.phases() == expected | {"link": 1.0, "wait": 1.0, "exec": 3.0, "respond": 0.0}


@given(
    st.dictionaries(st.from_regex(r"[a-z]+", fullmatch=True), st.floats(0, 1e6).map(lambda x: round(x, 3)))
)
@example({})
def test_a_header_of_any_phases_round_trips(phases: dict[str, float]) -> None:
    header = ", ".join(f"{name};dur={ms:.3f}" for name, ms in phases.items())
    assert parse_server_timing(header) == pytest.approx(phases)


@given(st.text())
def test_parts_of_a_header_without_a_duration_are_left_out(text: str) -> None:
    assert parse_server_timing(f'cache;desc="{text.replace(";dur=", "")}", a;dur=1.5').get("a") in (1.5, None)
    assert parse_server_timing("miss, db;dur=53.2") == {"db": 53.2}


def test_each_named_fetch_has_its_own_metric() -> None:
    activation = Activation(1.0, 3.0, 6.0)
    activation.mark_fetching(
        [Fetch(1.0, 2.5, name="base"), Fetch(1.0, 0.0, name="style-2"), Fetch(20.0, 21.0, name="late")]
    )
    timeline = Timeline(1.0, sent_s=10.0, completed_s=15.0, wait_s=1.0, exec_s=3.0, activation=activation)
    timeline.mark_responded(16.0)
    found = parse_server_timing(timeline.server_timing())
    # "style-2" still runs. "late" began after the response, so it is left out.
    assert (found["fetch-base"], found["fetch-style-2"]) == (1500.0, found["total"])
    assert "fetch-late" not in found
    assert 'fetch-base;dur=1500.000;desc="beside fork 1500.000"' in timeline.server_timing()
    activation.mark_fetching([Fetch(1.0, 2.5)])
    assert parse_server_timing(timeline.server_timing())["fetch"] == 1500.0


def test_the_copy_of_a_start_stays_that_of_the_start() -> None:
    activation = Activation(1.0, 3.0, 6.0)
    timeline = Timeline(1.0, sent_s=10.0, completed_s=15.0, wait_s=1.0, exec_s=3.0, activation=activation)
    timeline.mark_responded(16.0)

    def copied() -> list[float]:
        found = parse_server_timing(timeline.server_timing())
        return [found.get(name, 0.0) for name in ("copy-base", "copy-style")]

    activation.mark_copied(Transfer(4.0, name="base"))
    activation.mark_copied(Transfer(5.0, 6.0, "style"))
    assert copied() == [12_000.0, 1000.0]
    activation.mark_copied(Transfer(4.0, 12.0, "base"))
    assert copied() == [8000.0, 1000.0]
    activation.mark_context(Transfer(3.5, 4.0))
    # Another snapshot reports the same context, which counts once.
    activation.mark_context(Transfer(3.6, 4.0))
    assert parse_server_timing(timeline.server_timing())["context"] == 500.0
    # The copy of a later wake-up of a parked worker does not replace the copy of the start.
    activation.mark_copied(Transfer(30.0, 31.0, "base"))
    assert copied() == [8000.0, 1000.0]
