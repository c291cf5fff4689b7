"""Which batch sizes are measured, and how often, within the budget. test_worker.py measures a real handler."""

from hypothesis import given
from hypothesis import strategies as st
from pilotflame.runtime.calls.batching.latency_curve import Point
from pilotflame.runtime.calls.worker.measurement import RUNS, schedule, sizes


def run(max_size: int, budget_s: float, takes_s: list[float]) -> tuple[list[int], list[Point]]:
    """Return (the sizes that ran, the curve) for calls that take `takes_s`, in turn."""
    points: list[Point] = []
    plan = schedule(max_size, points, budget_s)
    ran = [next(plan)]
    for number in range(10_000):
        try:
            ran.append(plan.send(takes_s[number % len(takes_s)]))
        except StopIteration:
            return ran, points
    raise AssertionError("it never ends")


@given(st.integers(1, 4096))
def test_sizes_double_up_to_the_last(max_size: int) -> None:
    found = sizes(max_size)
    assert found == sorted(set(found))
    assert (found[0], found[-1]) == (1, max_size)
    assert all(size & (size - 1) == 0 for size in found[:-1])


def test_each_size_is_warmed_up_and_then_timed() -> None:
    ran, points = run(6, 100.0, [9.0, 0.1, 0.3, 0.2])
    assert ran == [size for size in (1, 2, 4, 6) for _ in range(1 + RUNS)]
    assert points == [Point(size, 0.2, 0.3) for size in (1, 2, 4, 6)]


@given(st.integers(1, 4096), st.lists(st.floats(0.001, 10), min_size=1, max_size=9))
def test_it_stops_within_its_budget_and_measures_one_size_at_least(
    max_size: int, takes_s: list[float]
) -> None:
    ran, points = run(max_size, 4.0, takes_s)
    assert [point.size for point in points] == sizes(max_size)[: len(points)]
    assert points
    spent = [takes_s[number % len(takes_s)] for number in range(len(ran))]
    # Only the last warm-up and the run after it may exceed the budget.
    assert sum(spent[:-2]) <= 4.0 or len(ran) == 2
    assert all(0 < point.p50_s <= point.p95_s for point in points)


def test_a_size_that_would_not_fit_is_skipped() -> None:
    ran, points = run(32, 4.0, [0.4])
    assert ran == [1] * 4 + [2] * 4
    assert [point.size for point in points] == [1, 2]
