"""The line through measured times is found, whatever the sizes of the passes are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.handlers.language_model.times import TimeLine


@given(st.floats(1e-4, 1.0), st.floats(0, 0.1), st.lists(st.integers(1, 16), min_size=2, max_size=40))
def test_the_line_is_found(pass_s: float, item_s: float, sizes: list[int]) -> None:
    line = TimeLine(0.98)
    assert line.fit() == (0.0, 0.0)
    for items in sizes:
        line.note(items, pass_s + item_s * items)
    found_pass_s, found_item_s = line.fit()
    if len(set(sizes)) == 1:
        assert found_pass_s + found_item_s * sizes[0] == pytest.approx(pass_s + item_s * sizes[0])
    elif max(sizes) >= 2 * min(sizes):
        assert found_pass_s + found_item_s * 20 == pytest.approx(pass_s + item_s * 20, rel=0.05)


def test_passes_of_one_size_show_no_line() -> None:
    line = TimeLine(0.98)
    for _ in range(3):
        line.note(4, 2.0)
    assert line.fit() == pytest.approx((2.0, 0.0))
    assert line.fit(level=1.0) == pytest.approx((0.0, 0.5))
    assert line.fit(least=0.1) == pytest.approx((1.8, 0.05))
