"""Which idle function gives memory back first."""

from hypothesis import given
from hypothesis import strategies as st
from pilotflame.runtime.node.scaling.eviction import (
    Gaps,
    StepDown,
    steps_down,
    waiting_per_byte,
)

USUAL = Gaps([60.0] * 20)


def resting(
    name: str, *, idle_s: float = 10.0, extra_wake_s: float = 5.0, freed: float = 1e9, gaps: Gaps = USUAL
) -> StepDown:
    return StepDown(name, idle_s, extra_wake_s, freed, gaps)


def test_the_function_that_is_called_most_rarely_goes_first() -> None:
    busy, rare = Gaps([1.0] * 20), Gaps([3600.0] * 20)
    both = [[resting("busy", gaps=busy, idle_s=0.5)], [resting("rare", gaps=rare)]]
    assert [step.name for step in steps_down(both, 1)] == ["rare"]


def test_large_memory_and_a_short_wake_go_first() -> None:
    for other in (resting("other", freed=4e9), resting("other", extra_wake_s=0.1)):
        assert [step.name for step in steps_down([[resting("one")], [other]], 1)] == ["other"]


def test_nobody_can_step_down() -> None:
    assert steps_down([], 1) == []


def test_a_function_of_which_nothing_is_known_is_called_less_often_the_longer_it_is_idle() -> None:
    rates = [Gaps(()).rate(idle_s) for idle_s in (0.0, 10.0, 1000.0)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == 0.5


@given(st.lists(st.floats(0, 1e6), max_size=300), st.floats(0, 1e6))
def test_the_rate_is_the_longer_gaps_over_what_they_still_lasted(idles: list[float], idle_s: float) -> None:
    longer = [gap for gap in idles if gap > idle_s]
    expected = (len(longer) + 0.5) / (sum(gap - idle_s for gap in longer) + idle_s + 1)
    assert abs(Gaps(idles).rate(idle_s) / expected - 1) < 1e-3


@st.composite
def nodes(draw: st.DrawFn) -> list[list[StepDown]]:
    """Return, for some idle functions, the steps down that each could take from its present rung."""
    figures = st.tuples(st.floats(0, 1e5), st.floats(1e-3, 100), st.floats(1, 1e9))
    return [
        [
            resting(str(number), idle_s=idle_s, extra_wake_s=wake_s, freed=freed)
            for idle_s, wake_s, freed in of
        ]
        for number, of in enumerate(draw(st.lists(st.lists(figures, max_size=3), max_size=8)))
    ]


@given(nodes(), st.floats(0, 3e9))
def test_steps_are_taken_from_the_cheapest_until_enough_is_free(
    ladders: list[list[StepDown]], needed: float
) -> None:
    taken, left = steps_down(ladders, needed), [list(steps) for steps in ladders]
    for place, step in enumerate(taken):
        assert sum(one.freed_bytes for one in taken[:place]) < needed
        assert waiting_per_byte(step) == min(waiting_per_byte(steps[0]) for steps in left if steps)
        next(steps for steps in left if steps and steps[0] is step).pop(0)
    assert sum(one.freed_bytes for one in taken) >= needed or not any(left)
