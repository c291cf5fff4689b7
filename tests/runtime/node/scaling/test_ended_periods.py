"""The history of one function learns from its ended idle periods."""

from dataclasses import replace

from pilotflame.runtime.node.scaling.ended_periods import MOST_OBSERVATIONS, EndedPeriods
from pilotflame.runtime.node.scaling.idle_distribution import Prior, SharedPrior
from pilotflame.runtime.node.scaling.idle_period import IdlePeriod
from pilotflame.runtime.node.scaling.ladder import Ladder, Rung

LADDER = Ladder((Rung(2.0, 0.0), Rung(1.0, 1.0), Rung(0.0, 5.0)), 1.0)


def ended(past: EndedPeriods, begun_s: float, woken_s: float) -> None:
    past.add(IdlePeriod(begun_s, 1.0, begun_s), woken_s, LADDER)
    past.note_arrival(woken_s)


def learned(past: EndedPeriods, now_s: float) -> int:
    learning = past.take(LADDER, now_s)
    history, _ = learning.settle(0.0)
    past.keep(learning, history)
    return past.history.periods


def test_a_period_is_learned_once_the_longest_wake_after_it_is_over() -> None:
    shared = SharedPrior()
    past = EndedPeriods(shared, LADDER)
    ended(past, 10.0, 20.0)
    past.note_arrival(21.0)
    assert past.follows_until_s == 25.0
    assert learned(past, 24.9) == 0
    assert shared.prior == Prior()
    # A history that is stored before then already has the period.
    assert past.learning(LADDER).history().periods == 1
    assert learned(past, 25.0) == 1
    assert past.history.idles == (10.0,)
    # The arrival at 21 s waits for the rest of a wake that began at 20 s.
    assert [wait.waited_s for wait in past.history.waits] == [0.0, 1.0, 5.0 + 4.0]
    assert shared.prior == Prior().learn(10.0, 0)
    assert learned(past, 100.0) == 1


def test_at_most_so_many_periods_wait_for_their_later_arrivals() -> None:
    past = EndedPeriods(SharedPrior(), LADDER)
    for number in range(MOST_OBSERVATIONS + 3):
        ended(past, number * 0.01, number * 0.01 + 0.005)
    assert learned(past, 1.0) == 3


def test_another_ladder_discards_the_plans_that_were_made_for_the_last() -> None:
    past = EndedPeriods(SharedPrior(), LADDER)
    ended(past, 10.0, 20.0)
    assert learned(past, 100.0) == 1
    assert past.history.experts is not None
    slower = replace(LADDER, wait_per_s=3.0)
    assert past.take(slower, 100.0).known.experts is None
    assert past.ladder is slower
