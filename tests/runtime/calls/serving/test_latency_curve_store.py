"""Latency curves on disk: curves that were written are read again, and a damaged file counts as empty."""

from __future__ import annotations

from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given
from pilotflame.runtime.calls.batching.latency_curve import Point
from pilotflame.runtime.calls.serving import latency_curve_store
from pilotflame.runtime.calls.serving.latency_curve_store import LatencyCurveStore

finite = st.floats(0, 1e6, allow_nan=False)


@given(
    st.dictionaries(
        st.sampled_from(["cpu", "cpu F32", "cuda:x BF16"]),
        st.lists(st.builds(Point, finite, finite, finite), max_size=8),
    )
)
def test_what_was_written_is_read(tmp_path_factory, known: dict[str, list[Point]]) -> None:
    folder = tmp_path_factory.mktemp("curves") / "deep"
    written = LatencyCurveStore.open(folder, "code")
    for device, points in known.items():
        written.write(device, points)
    found = LatencyCurveStore.open(folder, "code")
    assert found.known == bool(known)
    assert {device: list(found.of_device(device)) for device in known} == known


@pytest.mark.parametrize("damage", [b"", b"{", b'{"cpu": [{"size": "x"}]}', b"[]", b"\xff"])
def test_a_damaged_file_holds_nothing(tmp_path: Path, damage: bytes) -> None:
    written = LatencyCurveStore.open(tmp_path, "code")
    written.write("cpu", [Point(1, 1, 1)])
    (file,) = tmp_path.glob("*.json")
    file.write_bytes(damage)
    again = LatencyCurveStore.open(tmp_path, "code")
    assert not again.known
    again.write("cpu", [Point(2, 2, 2)])
    assert LatencyCurveStore.open(tmp_path, "code").of_device("cpu") == [Point(2, 2, 2)]


def test_other_code_or_weights_have_other_curves(tmp_path: Path) -> None:
    manifest = tmp_path / "manifest.json"
    manifest.write_text("{}")
    LatencyCurveStore.open(tmp_path / "c", "code", manifest).write("cpu", [Point(1, 1, 1)])
    assert LatencyCurveStore.open(tmp_path / "c", "code", manifest).known
    assert not LatencyCurveStore.open(tmp_path / "c", "other", manifest).known
    assert not LatencyCurveStore.open(tmp_path / "c", "code").known
    manifest.write_text('{"other": 1}')
    assert not LatencyCurveStore.open(tmp_path / "c", "code", manifest).known


def test_small_changes_are_not_written(tmp_path: Path) -> None:
    stored = LatencyCurveStore(tmp_path / "x.json")
    points = [Point(1, 0.0201, 0.021), Point(2, 0.1, 0.2)]
    assert stored.differs("cpu", points)
    stored.write("cpu", points)
    assert not stored.differs("cpu", points)
    assert not stored.differs("cpu", [Point(1, 0.0203, 9.0), Point(2, 0.115, 0.2)])
    assert stored.differs("cpu", [Point(1, 0.0201, 0.021), Point(2, 0.13, 0.2)])
    assert stored.differs("cpu", points[:1])
    assert stored.differs("cuda:x", points)
    stored.write("fast", [Point(1, 2e-6, 3e-6)])
    assert not stored.differs("fast", [Point(1, 9e-6, 3e-5)])


def test_the_latest_curve_is_the_one_that_was_stored_last(tmp_path: Path) -> None:
    stored = LatencyCurveStore(tmp_path / "x.json")
    for device, took_s in (("cpu", 1), ("cuda", 2), ("cpu", 3)):
        stored.write(device, [Point(1, took_s, took_s)])
    for found in (stored, LatencyCurveStore(tmp_path / "x.json")):
        assert found.latest() == [Point(1, 3, 3)]


def test_a_disk_that_refuses_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused = LatencyCurveStore(tmp_path / "file" / "x.json")
    refused.write("cpu", [Point(1, 1, 1)])
    assert list(refused.of_device("cpu")) == [Point(1, 1, 1)]


def test_old_files_are_removed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(latency_curve_store, "MAX_FILES", 2)
    for name in ("a", "b", "c"):
        LatencyCurveStore.open(tmp_path, name).write("cpu", [Point(1, 1, 1)])
    assert len(list(tmp_path.glob("*.json"))) == 2
    assert LatencyCurveStore.open(tmp_path, "c").known
