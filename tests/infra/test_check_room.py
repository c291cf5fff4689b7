"""`make check ROOM=...`: which tests belong to a room, and the plugin that leaves out the slowest tests."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def check_room() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_room", ROOT / "infra" / "check_room.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_room_and_a_file_have_tests_at_the_same_path(check_room: ModuleType) -> None:
    for room in ("runtime/front/api", "snapshot/sources/schemes.py", "handlers", "errors.py"):
        assert (ROOT / check_room.tests_of(Path(room))).exists()


def test_the_facts_of_the_tree_are_tests_that_exist(check_room: ModuleType) -> None:
    for fact in check_room.FACTS:
        path, _, name = fact.partition("::")
        assert f"def {name}" in (ROOT / path).read_text(), fact


def test_the_slowest_tests_are_left_out_and_failures_are_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "def test_fast(): pass\ndef test_slow(): pass\ndef test_wrong(): assert 1 == 2\n"
    )
    cache = tmp_path / ".pytest_cache" / "v" / "pilotflame"
    cache.mkdir(parents=True)
    known = {"test_it.py::test_fast": 0.1, "test_it.py::test_slow": 30.0, "test_it.py::test_wrong": 0.2}
    (cache / "durations").write_text(json.dumps(known))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "fast_first", "-q", "--budget-s", "10", "--rootdir", tmp_path],
        cwd=tmp_path, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
    )  # fmt: skip
    assert "1 failed, 1 passed" in done.stdout
    assert "1 slow tests were left out" in done.stdout
    assert done.stdout.index("FAILED test_it.py::test_wrong: assert 1 == 2") < done.stdout.index(
        "= FAILURES ="
    )
    assert json.loads((cache / "durations").read_text())["test_it.py::test_fast"] < 0.1
