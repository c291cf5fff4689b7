"""Leaves out the slow suites whose paths have not changed since the commit in TESTS_CHANGED_SINCE, if the variable is set.

`.ci/run` sets it to the commit that tests/all_passed.txt names, at which each suite passed. slow_suites.toml
names the suites. All suites run if constraints.txt has changed, or the packages or pytest's settings in
pyproject.toml.
"""

from __future__ import annotations

import ast
import os
import subprocess
import tomllib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = "pyproject.toml"
ALWAYS = (SETTINGS, "constraints.txt")
VARIABLE = "TESTS_CHANGED_SINCE"


def changed_files(since: str) -> list[str]:
    """Return the files that differ from a commit, also files that are not committed.

    A module counts only if it differs in more than comments, docstrings and the breaks of lines. pyproject.toml counts only if a part that `packages` returns has changed. If the commit is unknown,
    pyproject.toml alone is returned, so all suites run.
    """
    try:
        found = _git("diff", "--name-only", "--no-renames", since, "--").splitlines()
        then = packages(_git("show", f"{since}:{SETTINGS}"))
    except subprocess.CalledProcessError:
        return [SETTINGS]
    return [
        name for name in found
        if (packages((ROOT / name).read_text()) != then if name == SETTINGS else not _same_code(name, since))
    ]  # fmt: skip


def _same_code(name: str, since: str) -> bool:
    """Return True if a file is a module whose code is the same as at a commit."""
    if not name.endswith(".py") or not (ROOT / name).exists():
        return False
    with suppress(subprocess.CalledProcessError, SyntaxError):
        return _code((ROOT / name).read_text()) == _code(_git("show", f"{since}:{name}"))
    return False


def _code(text: str) -> str:
    """Return the syntax tree of a module, without docstrings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            body[:] = [one for one in body if not _is_text(one)]
    return ast.dump(tree)


def _is_text(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def packages(settings: str) -> list[object]:
    """Return the parts of pyproject.toml that name what the tests run with, and pytest's settings."""
    tables = tomllib.loads(settings)
    project = tables["project"]
    return [
        tables["build-system"], project["dependencies"], project["optional-dependencies"], tables["tool"]["pytest"],
    ]  # fmt: skip


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout


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
