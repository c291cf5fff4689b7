"""infra/bench/clairvoyant.py: the policy stays near the best that any policy could do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "infra" / "bench"


@pytest.fixture(scope="module")
def script() -> str:
    return f"import sys; sys.path.insert(0, {str(BENCH)!r}); import clairvoyant as c, json; "


def _run(code: str) -> object:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return json.loads(done.stdout)


def test_the_clairvoyant_share_of_small_cases(script: str) -> None:
    """Three arrivals at once, batches of one and two that take 1 s and 1.5 s."""
    cases = [((0.0, 0.0, 0.0), timeout_s) for timeout_s in (0.9, 1.0, 1.5, 2.4, 2.5)]
    found = _run(
        script + f"print(json.dumps([c.clairvoyant_share(a, (0.0, 1.0, 1.5), t) * 3 for a, t in {cases!r}]))"
    )
    assert found == pytest.approx([0, 1, 2, 2, 3])


def test_the_policy_reaches_nine_tenths_of_the_clairvoyant_share(script: str) -> None:
    """On each curve at 1.2 times its capacity, where the size of the batches decides who is late."""
    found = _run(script + "print(json.dumps([c.shares(curve, 1.2, 500) for curve in c.CURVES.values()]))")
    assert isinstance(found, list)
    assert len(found) == 4
    for ours, ideal in found:
        assert 0.9 * ideal <= ours
