"""The slow suites: each path exists, and a suite runs if one of its paths, one of its tests or the packages have changed."""

from __future__ import annotations

import tomllib

import pytest
from slow_suites import ROOT, is_of, left_out

SUITES = tomllib.loads((ROOT / "tests/slow_suites.toml").read_text())["suite"]


@pytest.mark.parametrize("place", [place for suite in SUITES for place in (*suite["paths"], *suite["tests"])])
def test_each_place_exists(place: str) -> None:
    assert (ROOT / place).exists()


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite["name"])
def test_a_suite_runs_if_one_of_its_places_has_changed(suite: dict[str, list[str]]) -> None:
    name = str(suite["name"])
    assert name in left_out(["README.md"])
    for place in (*suite["paths"], *suite["tests"]):
        within = place if (ROOT / place).is_file() else f"{place}/any.py"
        assert name not in left_out(["README.md", within])
    assert name not in left_out(["pyproject.toml"])
    assert all(is_of(ROOT / test, suite["tests"]) for test in suite["tests"])
    assert not is_of(ROOT / "tests/test_readme.py", suite["tests"])
