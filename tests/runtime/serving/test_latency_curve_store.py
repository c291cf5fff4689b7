"""Curves on disk: what was written is read, and what cannot be read is not known."""

from __future__ import annotations

from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given
from pilotflame.runtime.batching.latency_curve import Point
from pilotflame.runtime.serving import latency_curve_store

finite = st.floats(0, 1e6, allow_nan=False)


@given(
    st.dictionaries(
        st.sampled_from(["cpu", "cpu F32", "cuda:x BF16"]),
        st.lists(st.builds(Point, finite, finite, finite), max_size=8),
    )
)
def test_what_was_written_is_read(tmp_path_factory, known: dict[str, list[Point]]) -> None:
    folder = tmp_path_factory.mktemp("curves") / "deep"
    written = latency_curve_store.LatencyCurveStore.of(folder, "code", None)
    for traits, points in known.items():
        written.write(traits, points)
    found = latency_curve_store.LatencyCurveStore.of(folder, "code", None)
    assert found.known == bool(known)
    assert {traits: list(found.at(traits)) for traits in known} == known


@pytest.mark.parametrize("damage", [b"", b"{", b'{"cpu": [{"size": "x"}]}', b"[]", b"\xff"])
def test_a_file_that_is_not_what_was_written_is_nothing(tmp_path: Path, damage: bytes) -> None:
    written = latency_curve_store.LatencyCurveStore.of(tmp_path, "code", None)
    written.write("cpu", [Point(1, 1, 1)])
    (file,) = tmp_path.glob("*.json")
    file.write_bytes(damage)
    again = latency_curve_store.LatencyCurveStore.of(tmp_path, "code", None)
    assert not again.known
    again.write("cpu", [Point(2, 2, 2)])
    assert latency_curve_store.LatencyCurveStore.of(tmp_path, "code", None).at("cpu") == [Point(2, 2, 2)]


def test_other_code_or_other_weights_are_others(tmp_path: Path) -> None:
    manifest = tmp_path / "manifest.json"
    manifest.write_text("{}")
    latency_curve_store.LatencyCurveStore.of(tmp_path / "c", "code", manifest).write("cpu", [Point(1, 1, 1)])
    assert latency_curve_store.LatencyCurveStore.of(tmp_path / "c", "code", manifest).known
    assert not latency_curve_store.LatencyCurveStore.of(tmp_path / "c", "other", manifest).known
    assert not latency_curve_store.LatencyCurveStore.of(tmp_path / "c", "code", None).known
    manifest.write_text('{"other": 1}')
    assert not latency_curve_store.LatencyCurveStore.of(tmp_path / "c", "code", manifest).known


def test_what_hardly_differs_is_no_news() -> None:
    kept = latency_curve_store.LatencyCurveStore()
    points = [Point(1, 0.0201, 0.021), Point(2, 0.1, 0.2)]
    assert kept.news("cpu", points)
    kept.write("cpu", points)
    assert not kept.news("cpu", points)
    assert not kept.news("cpu", [Point(1, 0.0203, 9.0), Point(2, 0.115, 0.2)])
    assert kept.news("cpu", [Point(1, 0.0201, 0.021), Point(2, 0.13, 0.2)])
    assert kept.news("cpu", points[:1])
    assert kept.news("cuda:x", points)
    kept.write("fast", [Point(1, 2e-6, 3e-6)])
    assert not kept.news("fast", [Point(1, 9e-6, 3e-5)])


def test_a_disk_that_refuses_is_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused = latency_curve_store.LatencyCurveStore(tmp_path / "file" / "x.json")
    refused.write("cpu", [Point(1, 1, 1)])
    assert list(refused.at("cpu")) == [Point(1, 1, 1)]


def test_old_files_go(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(latency_curve_store, "MAX_FILES", 2)
    for name in ("a", "b", "c"):
        latency_curve_store.LatencyCurveStore.of(tmp_path, name, None).write("cpu", [Point(1, 1, 1)])
    assert len(list(tmp_path.glob("*.json"))) == 2
    assert latency_curve_store.LatencyCurveStore.of(tmp_path, "c", None).known
