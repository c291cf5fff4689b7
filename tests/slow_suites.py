"""Leaves out the slow suites whose paths have not changed lately, if TESTS_CHANGED_SINCE is set, as "2 days ago".

`.ci/run` sets it. The suites are in slow_suites.toml. If packages have changed (constraints.txt, pyproject.toml), all suites run.
"""

from __future__ import annotations

import os
import subprocess
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ALWAYS = ("pyproject.toml", "constraints.txt")
VARIABLE = "TESTS_CHANGED_SINCE"


def changed_files(since: str) -> list[str]:
    """Return the files of all commits since a time, as git writes it, and the files that differ from the last commit."""
    log = ("log", "--since", since, "--name-only", "--pretty=format:")
    found = [
        subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for words in (log, ("diff", "HEAD", "--name-only"))
    ]
    return sorted({line for text in found for line in text.splitlines() if line})


def left_out(changed: Iterable[str]) -> dict[str, list[str]]:
    """Return the tests (files and folders) of the suites that need not run, by the suite's name."""
    changed = list(changed)
    if any(file in ALWAYS for file in changed):
        return {}
    suites = tomllib.loads((ROOT / "tests/slow_suites.toml").read_text())["suite"]
    return {
        suite["name"]: suite["tests"]
        for suite in suites
        if not any(_below(file, place) for file in changed for place in (*suite["paths"], *suite["tests"]))
    }


def unchanged() -> dict[str, list[str]]:
    """Return the tests to leave out in this run, by the suite's name."""
    since = os.environ.get(VARIABLE)
    return left_out(changed_files(since)) if since else {}


def is_of(path: Path, tests: Iterable[str]) -> bool:
    """Return True if a test file is one of these files, or in one of these folders."""
    return any(_below(str(path.relative_to(ROOT)), place) for place in tests)


def _below(file: str, place: str) -> bool:
    return file == place or file.startswith(f"{place}/")
