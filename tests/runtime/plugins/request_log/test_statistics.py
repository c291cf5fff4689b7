"""Statistics of numbers: mean, quantiles, and the shift of a window from the first window."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.runtime.plugins.request_log.statistics import WINDOW, FunctionStatistics, ReferenceWindow

FIELD = "/output/score"
NUMBERS = st.lists(st.floats(-1e6, 1e6) | st.sampled_from([0.0, 1.0]), min_size=10, max_size=200)


def read(statistics: FunctionStatistics) -> dict[str, Any]:
    return {reading.name: dict(reading.values) for reading in statistics.readings("tone")}


def shift(before: list[float], now: list[float]) -> float | None:
    """Return the shift in the metrics after two windows of calls."""
    statistics = FunctionStatistics([FIELD])
    for number in before + now:
        statistics.add({"output": {"score": number}})
    found: float | None = read(statistics)["value_shift"].get(("tone", FIELD))
    return found


@given(NUMBERS, NUMBERS)
def test_a_shift_is_never_negative_and_zero_for_the_same_values(
    before: list[float], now: list[float]
) -> None:
    reference = ReferenceWindow(before)
    assert reference.shift_of(before) == 0
    assert 0 <= reference.shift_of(now) < math.inf


def test_a_shift_is_small_for_the_same_distribution_and_large_for_another() -> None:
    draw = random.Random(1)

    def normal(mean: float) -> list[float]:
        return [draw.gauss(mean, 1.0) for _ in range(WINDOW)]

    assert shift(normal(0.0), []) is None
    same, moved = shift(normal(0.0), normal(0.0)), shift(normal(0.0), normal(1.0))
    assert same is not None
    assert moved is not None
    assert same < 0.05 < 0.5 < moved
    # A class whose share grows from a tenth to a half.
    rare, often = [0.0] * (WINDOW * 9 // 10) + [1.0] * (WINDOW // 10), [0.0, 1.0] * (WINDOW // 2)
    classes = shift(rare, often)
    assert classes is not None
    assert classes > 0.5


def test_mean_and_quantiles_are_those_of_the_values() -> None:
    statistics = FunctionStatistics([FIELD, "/input/ages/*"])
    for number in range(1001):
        statistics.add({"input": {"ages": [1, [2, 3]]}, "output": {"score": number}})
    found = read(statistics)
    assert found["value_count"] == {("tone", FIELD): 1001, ("tone", "/input/ages/*"): 3003}
    assert found["value_mean"] == {("tone", FIELD): 500, ("tone", "/input/ages/*"): 2}
    assert found["value_quantile"]["tone", FIELD, "0.5"] == pytest.approx(500, abs=5)
    assert found["value_quantile"]["tone", FIELD, "0.99"] == pytest.approx(990, abs=5)


@pytest.mark.parametrize(
    "value",
    [None, True, "7", "[redacted]", {}, [], math.nan, math.inf, [[[1]]]],
)
def test_values_that_are_no_numbers_do_not_count(value: Any) -> None:
    statistics = FunctionStatistics([FIELD])
    statistics.add({"output": {"score": value}})
    statistics.add({"output": None})
    assert read(statistics)["value_count"] == {}
