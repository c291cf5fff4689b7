"""What was learned of a source comes back, and a broken file costs nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from pilotflame.snapshot.fetching.concurrency_control import Habit
from pilotflame.snapshot.fetching.learned import MAX_SOURCES, recall, remember


def test_a_habit_is_remembered_per_host_and_bucket(tmp_path: Path) -> None:
    file = tmp_path / "learned.json"
    remember(file, "s3://bucket/a/b", Habit(12, 0.05))
    remember(file, "http://host:8080/x", Habit(3, 0.001))
    assert recall(file, "s3://bucket/else") == Habit(12, 0.05)
    assert recall(file, "http://host:8080/") == Habit(3, 0.001)
    assert recall(file, "http://host:8081/") is None
    remember(file, "s3://bucket", Habit(14, 0.06))
    assert recall(file, "s3://bucket") == Habit(14, 0.06)


def test_no_more_than_so_many_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "learned.json"
    for number in range(MAX_SOURCES + 1):
        remember(file, f"s3://bucket-{number}", Habit(1, 0.0))
    assert recall(file, "s3://bucket-0") is None
    assert recall(file, f"s3://bucket-{MAX_SOURCES}") == Habit(1, 0.0)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"s3://b": 3}', '{"s3://b": {"connections": 0, "latency_s": 0.1}}', "[" * 100_000,
     '{"s3://b": {"connections": 4, "latency_s": NaN}}', '{"s3://b": {"connections": 4000, "latency_s": 0.1}}'],
)  # fmt: skip
def test_nonsense_is_forgotten(tmp_path: Path, text: str) -> None:
    file = tmp_path / "learned.json"
    file.write_text(text)
    assert recall(file, "s3://b") is None
    remember(file, "s3://b", Habit(2, 0.1))
    assert recall(file, "s3://b") == Habit(2, 0.1)


def test_where_nothing_can_be_written_nothing_is(tmp_path: Path) -> None:
    file = tmp_path / "no" / "learned.json"
    remember(file, "s3://b", Habit(2, 0.1))
    assert recall(file, "s3://b") is None
