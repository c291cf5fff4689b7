"""The ladder that follows from measurements."""

from hypothesis import given
from hypothesis import strategies as st
from pilotflame.runtime.ground.telemetry.rung_name import RungName
from pilotflame.runtime.node.scaling.rung_figures import (
    GUESSED_WAKE_S,
    LEAST_WAKE_S,
    WAKES_KEPT,
    HoldingPrices,
    RungFigures,
    differs,
)

READY, ZYGOTE, LOCAL = RUNGS = (RungName.READY, RungName.ZYGOTE, RungName.LOCAL)
PRICES = HoldingPrices(memory_byte_s=1e-9, device_s=2.0, waiting_s=0.5)


@given(
    st.dictionaries(st.sampled_from(RUNGS), st.floats(0, 1e12)),
    st.dictionaries(st.sampled_from(RUNGS), st.lists(st.floats(0, 1e4), min_size=1, max_size=20).map(tuple)),
    st.floats(0, 1e3),
    st.floats(0, 8),
)
def test_whatever_was_measured_a_lower_rung_costs_no_more_and_wakes_no_faster(
    held: dict[RungName, float], wakes: dict[RungName, tuple[float, ...]], build_s: float, devices: float
) -> None:
    for rungs in (RUNGS, (READY, LOCAL), (READY,)):
        ladder = RungFigures(held, wakes, build_s, devices).ladder(rungs, PRICES)
        holds, wake_times = [one.hold_per_s for one in ladder.rungs], [one.wake_s for one in ladder.rungs]
        assert holds == sorted(holds, reverse=True)
        assert wake_times == sorted(wake_times)
        assert all(wake_s >= LEAST_WAKE_S for wake_s in wake_times[1:])
        assert ladder.wait_per_s == 0.5


def test_measured_memory_and_the_device_are_priced() -> None:
    figures = RungFigures().with_held(READY, 3e9).with_held(ZYGOTE, 1e9).with_held(LOCAL, 0.0)
    assert [one.hold_per_s for one in figures.ladder(RUNGS, PRICES).rungs] == [3.0, 1.0, 0.0]
    figures = figures.with_wake(ZYGOTE, 0.1, devices=1.0)
    assert [one.hold_per_s for one in figures.ladder(RUNGS, PRICES).rungs] == [5.0, 1.0, 0.0]


def test_a_wake_takes_the_90th_percentile_of_the_last() -> None:
    figures = RungFigures(build_s=2.0)
    assert figures.wake(ZYGOTE) == GUESSED_WAKE_S[ZYGOTE]
    assert figures.wake(LOCAL) == GUESSED_WAKE_S[LOCAL] + 2.0
    for tenth in range(1, 11):
        figures = figures.with_wake(ZYGOTE, tenth / 10, devices=0.0)
    assert figures.wake(ZYGOTE) == 0.9
    for _ in range(WAKES_KEPT):
        figures = figures.with_wake(ZYGOTE, 7.0, devices=0.0)
    assert figures.wakes_s[ZYGOTE] == (7.0,) * WAKES_KEPT


def test_a_new_revision_begins_with_the_figures_of_the_last_as_guesses() -> None:
    old = RungFigures().with_held(READY, 3e9)
    for _ in range(5):
        old = old.with_wake(LOCAL, 4.0, devices=0.0)
    new = old.of_next_revision(1.5)
    assert (new.held(READY), new.wake(LOCAL), new.build_s) == (3e9, 4.0, 1.5)
    assert len(new.wakes_s[LOCAL]) == 1


def test_plans_are_made_anew_only_when_a_figure_has_changed_by_a_fifth() -> None:
    one = RungFigures({READY: 100.0}).ladder(RUNGS, PRICES)
    assert not differs(one, RungFigures({READY: 115.0}).ladder(RUNGS, PRICES))
    assert differs(one, RungFigures({READY: 200e6}).ladder(RUNGS, PRICES))
    assert differs(one, one.__class__(one.rungs[:2], one.wait_per_s))
    assert differs(one, one.__class__(one.rungs, 1.0))
