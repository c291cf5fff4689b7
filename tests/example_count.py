"""How many examples a test draws: the number for CI, times PILOTFLAME_TEST_EXAMPLES / 50.

`PILOTFLAME_TEST_EXAMPLES=200 make test` draws four times the number.
"""

import os

USUAL = 50
DRAWN = int(os.environ.get("PILOTFLAME_TEST_EXAMPLES", str(USUAL)))


def examples(in_ci: int) -> int:
    return max(1, in_ci * DRAWN // USUAL)
