"""`pilotflame simulate`: its table, its JSON, its figures, and errors in its input."""

from __future__ import annotations

import asyncio
import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from live import gateway_process
from pilotflame.errors import CodeError
from pilotflame.runtime.batching.simulator import (
    DurationModel,
    Run,
    SimulatedAttempt,
    SimulatedCall,
    SimulatedFunction,
    Simulator,
    poisson,
)
from pilotflame.runtime.cli import cli
from pilotflame.runtime.commands.simulate import figures, percentile

CURVE = ["--curve", "1:20.5,32:36"]


def run(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(cli, ["simulate", *CURVE, *arguments])
    assert done.exit_code == code, done.output
    return done.output


def rows(*arguments: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(run(*arguments, "--json"))["runs"]
    return found


def test_two_workers_answer_what_one_cannot() -> None:
    one, two = rows("--rate", "1100", "--duration", "1", "--deadline", "0.08", "--workers", "1,2")
    assert (one["workers"], two["workers"], one["calls"]) == (1, 2, 1100)
    assert one["on_time_share"] < 0.9 < two["on_time_share"]
    assert one["refused"] + one["dropped"] > 0 == two["late"] + two["expired"]
    assert one["busy_share"] > 0.9 > two["busy_share"]


def test_the_table_has_a_line_for_each_number_of_workers() -> None:
    text = run("--rate", "50", "--duration", "1", "--workers", "1-3")
    lines = text.splitlines()
    assert lines[0] == "50 calls"
    assert [line.split()[:2] for line in lines[2:]] == [[str(count), "100.0%"] for count in (1, 2, 3)]
    assert "mean batch" in lines[1]


BATCHED = """
import time, pilotflame
def example():
    return 1
@pilotflame.batch(max_size=4)
def handler(events):
    time.sleep(0.01)
    return events
"""


async def test_the_curve_that_a_gateway_has_learned_is_used(state: Path) -> None:
    async with gateway_process(state) as gateway:
        function = await gateway.deploy(BATCHED, {"max_queue": 7}, name="learned", check=False)
        at = ["simulate", "--function", "learned", "--url", gateway.url, "--rate", "20", "--duration", "1"]
        early = await asyncio.to_thread(CliRunner().invoke, cli, at)
        assert isinstance(early.exception, CodeError)
        for _ in range(3):
            await function.answer(1)
        done = await asyncio.to_thread(CliRunner().invoke, cli, [*at, "--json"])
        assert done.exit_code == 0, done.output
        (found,) = json.loads(done.stdout)["runs"]
        assert 0.01 <= found["latency_p50_s"] < 0.5
    assert CliRunner().invoke(cli, ["simulate", "--rate", "1"]).exit_code == 2


@pytest.mark.parametrize("zipped", [False, True])
def test_a_trace_is_read_in_either_form_and_played_as_fast_as_asked(zipped: bool, tmp_path: Path) -> None:
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
        f"2023-11-16 18:15:{second:02}.6805900,374,44\n" for second in range(46, 56)
    )
    path = tmp_path / ("calls.csv.gz" if zipped else "calls.csv")
    path.write_bytes(gzip.compress(text.encode()) if zipped else text.encode())
    (slow,), (fast,) = rows(str(path)), rows(str(path), "--speed", "300")
    assert slow["calls"] == fast["calls"] == 10
    assert slow["batch_mean"] == 1.0
    assert slow["per_second"] == pytest.approx(10 / 9, rel=0.01)
    # All calls arrive within thirty milliseconds.
    assert fast["batch_mean"] > 2


@pytest.mark.parametrize(
    ("content", "said"),
    [("when,what\n1,2\n", "no column named timestamp"), ("timestamp\nyesterday\n", "'yesterday', which is not a time"),
     ("timestamp\n1\nnan\n", "'nan', which is not a time"),
     ("timestamp\n", "has no calls"), ("", "no column named timestamp")],
)  # fmt: skip
def test_a_malformed_trace_is_named(content: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "calls.csv"
    path.write_text(content)
    done = CliRunner().invoke(cli, ["simulate", *CURVE, str(path)])
    assert done.exit_code != 0
    assert said in str(done.exception or done.output)


def test_seconds_are_a_time_too(tmp_path: Path) -> None:
    path = tmp_path / "calls.csv"
    path.write_text("id,Timestamp\na,17.5\nb,18.5\n")
    assert rows(str(path))[0]["calls"] == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["--curve", "20"],
        ["--curve", "1:20,1:30"],
        ["--curve", "1:-3"],
        ["--curve", "1:nan"],
        ["--curve", "1:inf"],
        ["--workers", "0"],
        ["--workers", "two"],
    ],
)
def test_malformed_options_are_named_with_an_example(arguments: list[str]) -> None:
    done = CliRunner().invoke(cli, ["simulate", "--rate", "5", *CURVE, *arguments])
    assert done.exit_code != 0
    assert repr(arguments[1]) in str(done.exception)


def test_it_asks_for_arrivals_or_a_rate_and_not_for_both(tmp_path: Path) -> None:
    assert "either a file of ARRIVALS or a --rate" in run(code=2)
    (tmp_path / "calls.csv").write_text("timestamp\n1\n")
    assert "either a file" in run(str(tmp_path / "calls.csv"), "--rate", "5", code=2)


def test_a_trace_that_was_cut_off_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cut.csv.gz"
    path.write_bytes(gzip.compress(b"timestamp\n1\n2\n")[:25])
    done = CliRunner().invoke(cli, ["simulate", *CURVE, str(path)])
    assert done.exit_code == 1
    assert "cannot be read" in str(done.exception)


def test_too_many_calls_are_refused() -> None:
    assert "more than 5,000,000 calls" in run("--rate", "1e9", "--duration", "1e9", code=2)


# -- figures


def test_shares_are_of_the_calls_and_add_up() -> None:
    def retry(attempt: SimulatedAttempt) -> SimulatedCall | None:
        if attempt.retry_after_s is None or attempt.tries > 1:
            return None
        return replace(attempt.call, at_s=attempt.ended_s + attempt.retry_after_s, tries=2)

    function = SimulatedFunction(DurationModel(((1.0, 0.013), (2.0, 0.016))))
    run = Simulator(function, next_call=retry).run(poisson(400, 400, timeout_s=0.25))
    found = figures(run)
    assert found["calls"] == 400 < len(run.attempts)
    fates = [found[name] for name in ("on_time", "late", "refused", "dropped", "expired", "full")]
    assert sum(fates) == 400
    assert found["on_time_share"] == found["on_time"] / 400 < 1
    assert 0 < found["latency_p50_s"] <= found["latency_p99_s"] <= 0.25
    assert found["retry_after_p50_s"] > 0
    assert found["batch_mean"] == pytest.approx(sum(run.sizes) / len(run.sizes))
    assert 0.5 < found["busy_share"] <= 1


def test_one_call_alone() -> None:
    function = SimulatedFunction(DurationModel(((1.0, 0.02),), noise=0.0), transit_s=0.001)
    found = figures(Simulator(function).run([SimulatedCall(5.0)]))
    assert found["latency_p99_s"] == pytest.approx(0.022)
    assert found["batch_mean"] == found["batch_p95"] == found["on_time_share"] == 1


def test_nothing_has_no_percentiles() -> None:
    assert percentile([], 0.5) is None
    assert figures(Run())["latency_p50_s"] is None
