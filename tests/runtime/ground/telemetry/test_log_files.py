"""Log files: what was written is found again, within limits of size, age and memory."""

import math
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pilotflame.errors import UnknownFunction
from pilotflame.runtime.ground.telemetry import log_files as module
from pilotflame.runtime.ground.telemetry.log_files import LogFiles, LogLine, LogQuery, function_file


@pytest.fixture
def files(tmp_path: Path) -> Iterator[LogFiles]:
    found = LogFiles(tmp_path, max_bytes=40_000, keep_s=1000.0)
    found.start()
    yield found
    found.close()


def line(number: int, **fields: str) -> LogLine:
    return LogLine(1000.0 + number, "w1", f"line {number}", **fields)


def texts(lines: list[LogLine]) -> list[str]:
    return [found.text for found in lines]


def test_what_was_written_is_found(files: LogFiles, tmp_path: Path) -> None:
    for number in range(10):
        level = "error" if number % 3 == 0 else "info"
        files.write("functions/a", line(number, level=level, request_id=f"r{number % 2}"))
    files.write("functions/b", line(50))
    assert texts(files.search("functions/a", LogQuery(3))) == ["line 7", "line 8", "line 9"]
    assert texts(files.search("functions/a", LogQuery(since_s=1002.0, until_s=1004.0))) == [
        "line 2", "line 3", "line 4",
    ]  # fmt: skip
    assert texts(files.search("functions/a", LogQuery(request_id="r0", level="error"))) == [
        "line 0",
        "line 6",
    ]
    assert files.search("functions/a", LogQuery(0)) == []
    assert files.search("functions/none", LogQuery()) == []
    again = LogFiles(tmp_path, max_bytes=40_000, keep_s=1000.0)
    again.start()
    assert again.search("functions/b", LogQuery()) == [line(50)]
    again.close()


def test_a_log_has_a_limited_size_and_keeps_the_newest(files: LogFiles, tmp_path: Path) -> None:
    for number in range(2000):
        files.write("gateway", line(number))
        if number % 50 == 0:
            files.search("gateway", LogQuery(1))
    found = files.search("gateway", LogQuery(10_000))
    assert texts(found) == [f"line {number}" for number in range(2000 - len(found), 2000)]
    assert len(found) > 100
    size = sum(path.stat().st_size for path in tmp_path.glob("gateway*"))
    assert size < 60_000
    assert [facts.name for facts in files.facts()] == ["gateway"]


def test_files_that_nobody_writes_are_removed_in_the_end(tmp_path: Path) -> None:
    (tmp_path / "functions").mkdir()
    old, new = tmp_path / "functions" / "old.jsonl.1", tmp_path / "functions" / "new.jsonl"
    for path in (old, new):
        path.write_bytes(line(1).encode())
    os.utime(old, (time.time() - 2000, time.time() - 2000))
    files = LogFiles(tmp_path, max_bytes=40_000, keep_s=1000.0)
    files.start()
    files.search("functions/new", LogQuery())
    files.close()
    assert (old.exists(), new.exists()) == (False, True)


def test_lines_beyond_the_limit_of_memory_are_counted_and_said(
    files: LogFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_BYTES", 10 * module.LINE_BYTES)
    with files._changing:
        # The thread cannot write while this lock is held, as if the disk were slow.
        for number in range(100):
            files.write("gateway", line(number))
    found = texts(files.search("gateway", LogQuery(1000)))
    files.write("gateway", line(100))
    found = texts(files.search("gateway", LogQuery(1000)))
    assert files.dropped > 50
    assert f"{files.dropped} lines were not stored: the disk is too slow or full" in found
    assert found[-1] == "line 100"


@pytest.mark.parametrize("name", ["gateway", "functions/a"])
def test_a_disk_that_cannot_be_written_ends_nothing(files: LogFiles, tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.jsonl").mkdir()
    files.write(name, line(1))
    files.search(name, LogQuery())
    assert files.dropped == 1
    (tmp_path / f"{name}.jsonl").rmdir()
    files.write(name, line(2))
    assert texts(files.search(name, LogQuery())) == [
        "line 2", "1 line was not stored: the disk is too slow or full",
    ]  # fmt: skip


def test_half_a_line_of_a_crash_is_skipped(files: LogFiles, tmp_path: Path) -> None:
    (tmp_path / "gateway.jsonl").write_bytes(line(1).encode() + b'{"at": 10')
    assert texts(files.search("gateway", LogQuery())) == ["line 1"]


def test_searches_and_writes_at_the_same_time_lose_nothing(files: LogFiles) -> None:
    def write() -> None:
        for number in range(500):
            files.write("gateway", LogLine(number, "w", "x"))

    thread = threading.Thread(target=write)
    thread.start()
    while thread.is_alive():
        found = [one.at for one in files.search("gateway", LogQuery(10_000))]
        assert found == sorted(found)
    assert files.search("gateway", LogQuery(1))[0].at == 499


@pytest.mark.parametrize("name", ["../keys", "a/b", "", "x" * 200, "a\n"])
def test_a_name_leads_to_no_other_file(name: str) -> None:
    with pytest.raises(UnknownFunction):
        function_file(name)
    assert LogQuery().until_s == math.inf


def test_a_folder_that_cannot_be_listed_ends_no_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(_files: LogFiles) -> list[Path]:
        raise OSError("stale file handle")

    monkeypatch.setattr(LogFiles, "_all_paths", stale)
    files = LogFiles(tmp_path, max_bytes=40_000, keep_s=1000.0)
    files.start()
    files.write("functions/a", line(1))
    assert texts(files.search("functions/a", LogQuery())) == ["line 1"]
    files.close()
    assert (tmp_path / "functions").stat().st_mode & 0o077 == 0
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "functions").iterdir()} == {0o600}


def test_a_search_finds_the_last_hundred_lines_by_default(files: LogFiles) -> None:
    for number in range(150):
        files.write("gateway", line(number))
    assert texts(files.search("gateway", LogQuery())) == [f"line {number}" for number in range(50, 150)]


def test_few_files_are_open_at_a_time(files: LogFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_OPEN_FILES", 2)
    for number in range(10):
        files.write(f"functions/f{number % 5}", line(number))
        files.search(f"functions/f{number % 5}", LogQuery())
    assert len(files._open) == 2
    assert all(len(files.search(f"functions/f{number}", LogQuery())) == 2 for number in range(5))


def test_after_a_failed_write_the_file_is_opened_anew(
    files: LogFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write("gateway", line(1))
    files.search("gateway", LogQuery())
    (tmp_path / "gateway.jsonl").unlink()
    real, failures = os.write, [OSError("stale file handle")]

    def failing(file: int, data: bytes) -> int:
        if failures and b"line 2" in data:
            raise failures.pop()
        return real(file, data)

    monkeypatch.setattr(os, "write", failing)
    files.write("gateway", line(2))
    files.search("gateway", LogQuery())
    files.write("gateway", line(3))
    found = texts(files.search("gateway", LogQuery()))
    assert sorted(found) == ["1 line was not stored: the disk is too slow or full", "line 3"]


@pytest.mark.parametrize(("age_s", "renamed"), [(400, False), (600, True)])
def test_a_file_is_renamed_when_its_first_line_is_older_than_half_of_the_time(
    files: LogFiles, tmp_path: Path, age_s: float, renamed: bool
) -> None:
    (tmp_path / "gateway.jsonl").write_bytes(LogLine(time.time() - age_s, "w1", "first").encode())
    files.write("gateway", line(1))
    assert len(files.search("gateway", LogQuery())) == 2
    assert (tmp_path / "gateway.jsonl.1").exists() == renamed
