"""The slow suites: each path exists, and a suite runs if one of its paths, one of its tests or the packages have changed."""

from __future__ import annotations

import subprocess
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

    def commit(settings: str) -> str:
        (tmp_path / "pyproject.toml").write_text(settings)
        git("add", ".")
        git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "it")
        return git("rev-parse", "HEAD").strip()

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    git("init", "-q")
    first = commit(text)
    second = commit(text.replace('"pilotflame.runtime.jobs.stored",', "", 1))
    assert slow_suites.changed_files(first) == []
    (tmp_path / "not_committed.py").touch()
    git("add", ".")
    assert slow_suites.changed_files(second) == ["not_committed.py"]
    commit(text.replace('"transformers>=', '"transformers>', 1))
    assert slow_suites.changed_files(first) == ["not_committed.py", "pyproject.toml"]


def test_a_module_counts_as_changed_only_if_its_code_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow_suites, "ROOT", tmp_path)
    then = 'X = 1\n"""A number."""\n\n\ndef f():\n    """Return 1."""\n    return 1  # one\n'

    def git(*words: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    for name in ("a.py", "b.py", "gone.py", "c.md"):
        (tmp_path / name).write_text(then)
    git("add", ".")
    git("commit", "-q", "-m", "it")
    since = git("rev-parse", "HEAD").strip()
    (tmp_path / "gone.py").unlink()
    (tmp_path / "a.py").write_text('X = 1\n"""One."""\n\n\ndef f():\n    return (\n        1\n    )\n')
    (tmp_path / "b.py").write_text(then.replace("X = 1", "X = 2"))
    (tmp_path / "c.md").write_text("")
    (tmp_path / "new.py").write_text("def")
    git("add", ".")
    assert slow_suites.changed_files(since) == ["b.py", "c.md", "gone.py", "new.py"]


def test_all_suites_run_if_the_commit_is_unknown() -> None:
    assert left_out(slow_suites.changed_files("f" * 40)) == {}
