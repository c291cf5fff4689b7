"""The slow suites: each path exists, and a suite runs if one of its paths, one of its tests or the packages have changed."""

from __future__ import annotations

import os
import subprocess
import time
import tomllib
from pathlib import Path

import pytest
import slow_suites
from slow_suites import ROOT, is_of, left_out, packages

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


def test_a_new_folder_in_pyproject_toml_changes_no_packages() -> None:
    now = (ROOT / "pyproject.toml").read_text()
    assert packages(now.replace('"pilotflame.runtime.jobs.stored",', "", 1)) == packages(now)
    assert packages(now.replace('"transformers>=', '"transformers>', 1)) != packages(now)


def test_pyproject_toml_counts_as_changed_only_if_its_packages_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow_suites, "ROOT", tmp_path)
    text = (ROOT / "pyproject.toml").read_text()

    def commit(settings: str, at: str) -> None:
        (tmp_path / "pyproject.toml").write_text(settings)
        named = ("-c", "user.name=a", "-c", "user.email=a@b")
        for words in (("init", "-q"), ("add", "."), (*named, "commit", "-q", "-m", "it")):
            dates = {"GIT_AUTHOR_DATE": at, "GIT_COMMITTER_DATE": at}
            subprocess.run(["git", *words], cwd=tmp_path, check=True, env=os.environ | dates)

    now = time.time()
    commit(text, f"{now - 1_000_000:.0f} +0000")
    commit(text.replace('"pilotflame.runtime.jobs.stored",', "", 1), f"{now:.0f} +0000")
    assert slow_suites.changed_files("2 days ago") == []
    commit(text.replace('"transformers>=', '"transformers>', 1), f"{now + 1:.0f} +0000")
    assert slow_suites.changed_files("2 days ago") == ["pyproject.toml"]
