"""The real reconciler in random histories of a simulated node (histories.py)."""

import pytest
from histories import run_history

HISTORIES, PARTS = 200, 10


@pytest.mark.parametrize("part", range(PARTS))
def test_what_must_hold_holds_in_random_histories(part: int) -> None:
    for seed in range(part, HISTORIES, PARTS):
        run_history(seed)
