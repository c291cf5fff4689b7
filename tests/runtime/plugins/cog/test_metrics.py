"""The rules of Cog for the metrics of a prediction."""

from __future__ import annotations

from typing import Any

import pytest
from pilotflame.runtime.plugins.cog.metrics import MAX_METRICS, CogMetrics


def test_modes_and_nested_names() -> None:
    metrics = CogMetrics()
    steps: list[Any] = ["a"]
    for name, value, mode in (
        ("n", 1, "incr"), ("n", 2, "incr"), ("list", "a", "append"), ("list", "b", "append"), ("word", "x", "replace"),
        ("t.a", 1.5, "replace"), ("t.b.c", True, "replace"), ("word", "y", "replace"), ("steps", steps, "replace"),
        ("kept", {"a": 1}, "replace"), ("kept.b", 2, "replace"),
    ):  # fmt: skip
        metrics.record(name, value, mode)
    steps.append("later")
    assert metrics.nested() == {
        "n": 3, "list": ["a", "b"], "word": "y", "t": {"a": 1.5, "b": {"c": True}}, "steps": ["a"], "kept": {"a": 1, "b": 2},
    }  # fmt: skip
    assert metrics.nested() == metrics.nested()


def test_a_metric_keeps_its_type_until_it_is_deleted() -> None:
    metrics = CogMetrics()
    metrics.record("count", 1)
    for value in ("x", 1.0, True, [1]):
        with pytest.raises(TypeError, match="count"):
            metrics.record("count", value)
    metrics.record("count", None)
    metrics.record("count", "x")
    assert metrics.nested() == {"count": "x"}


@pytest.mark.parametrize("value", [2**70, "\ud800", {"n": 2**70}])
def test_what_json_cannot_hold_is_refused_when_it_is_recorded(value: Any) -> None:
    metrics = CogMetrics()
    with pytest.raises(TypeError):
        metrics.record("n", value)
    metrics.record("n", 2**62)
    for _ in range(2):
        metrics.record("n", 2**62, "incr")
    with pytest.raises(TypeError):
        metrics.record("n", 2**62, "incr")
    assert metrics.nested() == {"n": 3 * 2**62}


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".a",
        "a.",
        "a..b",
        "1a",
        "a-b",
        "a__b",
        "a_",
        "a.b.c.d.e",
        "a" * 129,
        "predict_time",
        "total_time",
        "cog.x",
    ],
)
def test_names_that_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        CogMetrics().record(name, 1)


def test_values_and_modes_that_are_refused() -> None:
    metrics = CogMetrics()
    for value, mode in ((object(), "replace"), ([object()], "replace"), ("x", "incr"), (True, "incr")):
        with pytest.raises(TypeError):
            metrics.record("a", value, mode)
    with pytest.raises(ValueError, match="mode"):
        metrics.record("a", 1, "add")
    for number in range(MAX_METRICS):
        metrics.record(f"m{number}", number)
    with pytest.raises(ValueError, match="1000"):
        metrics.record("more", 1)
