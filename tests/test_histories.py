"""The real reconciler in random histories of a simulated node (histories.py)."""

import pytest
from example_count import examples
from histories import run_history

HISTORIES, PARTS = examples(80), 4
# Seeds of histories in which a property did not hold at an earlier commit.
FOUND = (3847, 3966, 9906, 100378, 100782, 102293, 202563, 202651, 600024)


@pytest.mark.parametrize("part", range(PARTS))
def test_what_must_hold_holds_in_random_histories(part: int) -> None:
    for seed in range(part, HISTORIES, PARTS):
        run_history(seed)


@pytest.mark.parametrize("seed", FOUND)
def test_what_must_hold_holds_where_it_once_did_not(seed: int) -> None:
    run_history(seed)
