"""infra/versions.py: each library has tests, and the table names the environment in which they fail."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "infra"))

import versions  # noqa: E402


def test_each_library_has_a_floor_and_tests() -> None:
    found = versions.libraries()
    assert sorted(found) == sorted(versions.TESTS)
    assert [name for name, (_, requirement) in found.items() if not requirement.specifier] == []
    paths = {path for paths in versions.TESTS.values() for path in paths.split()}
    assert [path for path in paths if not (ROOT / "tests" / path).exists()] == []


def test_the_table_names_where_a_librarys_tests_fail() -> None:
    installed = dict.fromkeys(versions.TESTS, "0.1") | {"rich": "99.0"}
    failed = ["tests/runtime/ground/settings/test_schedule.py::test_next[utc]"]
    table = versions.table({"lowest": installed, "newest": installed}, {"lowest": failed, "newest": []})
    lines = {line.split()[1]: line.split(maxsplit=4) for line in table.splitlines()}
    assert lines["library"] == ["extra", "library", "lowest", "newest", "outcome"]
    assert lines["cronsim"] == ["-", "cronsim", "0.1", "0.1", "failed at lowest"]
    assert lines["boto3"] == ["s3", "boto3", "0.1", "0.1", "passed"]
    assert lines["rich"] == ["-", "rich", "99.0", "99.0", "passed, 14 untested"]


def test_nothing_runs_for_the_digest_of_the_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Made(Exception):
        pass

    def make(folder: Path, resolution: str) -> dict[str, str]:
        raise Made

    monkeypatch.setattr(versions, "RECORD", tmp_path / "versions.txt")
    monkeypatch.setattr(versions, "make_environment", make)
    monkeypatch.setattr(sys, "argv", ["versions.py", "--if-changed"])
    with pytest.raises(Made):
        versions.main()
    versions.RECORD.write_text(f"sha256 of the requirements: {versions.digest()}\n")
    assert versions.main() == 0
    monkeypatch.setattr(versions, "tools", lambda: ["pytest==1"])
    with pytest.raises(Made):
        versions.main()
