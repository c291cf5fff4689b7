"""`pilotflame simulate`: how many calls are answered in time, and with --policy what keeping functions warm costs."""

from __future__ import annotations

import asyncio
import gzip
import json
from dataclasses import replace
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

import pytest
from click.testing import CliRunner
from live import gateway_process
from pilotflame.errors import CodeError
from pilotflame.runtime.calls.batching.simulator import (
    DurationModel,
    Run,
    SimulatedAttempt,
    SimulatedCall,
    SimulatedFunction,
    Simulator,
    poisson,
)
from pilotflame.runtime.cli import cli
from pilotflame.runtime.plugins.simulate.command import _money, figures, percentile

CURVE = ["--curve", "1:20.5,32:36"]


def queued(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(cli, ["simulate", *CURVE, *arguments])
    assert done.exit_code == code, done.output
    return done.output


def rows(*arguments: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(queued(*arguments, "--json"))["runs"]
    return found


def test_two_workers_answer_what_one_cannot() -> None:
    one, two = rows("--rate", "1100", "--duration", "1", "--deadline", "0.08", "--workers", "1,2")
    assert (one["workers"], two["workers"], one["calls"]) == (1, 2, 1100)
    assert one["on_time_share"] < 0.9 < two["on_time_share"]
    assert one["refused"] + one["dropped"] > 0 == two["late"] + two["expired"]
    assert one["busy_share"] > 0.9 > two["busy_share"]


def test_the_table_has_a_line_for_each_number_of_workers() -> None:
    text = queued("--rate", "50", "--duration", "1", "--workers", "1-3")
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
    # All calls arrive within thirty milliseconds, so batches form.
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
    assert "either a file of ARRIVALS or a --rate" in queued(code=2)
    (tmp_path / "calls.csv").write_text("timestamp\n1\n")
    assert "either a file" in queued(str(tmp_path / "calls.csv"), "--rate", "5", code=2)


def test_a_trace_that_was_cut_off_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cut.csv.gz"
    path.write_bytes(gzip.compress(b"timestamp\n1\n2\n")[:25])
    done = CliRunner().invoke(cli, ["simulate", *CURVE, str(path)])
    assert done.exit_code == 1
    assert "cannot be read" in str(done.exception)


def test_too_many_calls_are_refused() -> None:
    assert "more than 5,000,000 calls" in queued("--rate", "1e9", "--duration", "1e9", code=2)


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


# -- what keeping functions warm costs

RUNGS = ("--rung", "ready:1gpu+18:0", "--rung", "parked:18:0.4", "--rung", "local:16disk:12")
NAMES = [
    "the policy",
    "fixed 5 s",
    "fixed 60 s",
    "fixed 600 s",
    "always on",
]


@pytest.fixture
def timer(tmp_path: Path) -> Path:
    """Two functions: one is called every ten minutes, the other at random."""
    random = Random(5)
    timed = [(600.0 * number, "timer") for number in range(200)]
    called = [(at_s, "callers") for at_s in accumulate(random.expovariate(1 / 60) for _ in range(1500))]
    path = tmp_path / "calls.csv"
    path.write_text(
        "timestamp,function\n" + "".join(f"{at_s},{name}\n" for at_s, name in sorted(timed + called))
    )
    return path


def policies(done: Any) -> dict[str, dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    return {row["policy"].partition(",")[0]: row for row in json.loads(done.stdout)["policies"]}


def test_the_policy_is_compared_with_timeouts_and_always_on(timer: Path, run: Any) -> None:
    found = policies(run("simulate", timer, "--policy", "all", *RUNGS, "--json"))
    assert list(found) == NAMES
    assert found["the policy"]["bill"] < min(found[name]["bill"] for name in NAMES[1:])
    assert found["always on"]["waiting_s"] == found["always on"]["cold_starts"] == 0
    for row in found.values():
        assert row["bill"] == pytest.approx(row["holding"] + 0.001 * row["waiting_s"])
        assert set(row["rung_s"]) == {"ready", "parked", "local"}
        assert 0 <= row["wait_p50_s"] <= row["wait_p95_s"] <= row["wait_p99_s"] <= row["wait_max_s"] <= 12
    # The price of READY is that of a GPU and 18 GB, as in the gateway's settings.
    always = found["always on"]
    assert always["holding"] == pytest.approx(always["rung_s"]["ready"] * (2.88 + 18 * 0.0108) / 3600)


def test_prices_rungs_and_service_times_are_options(timer: Path, run: Any) -> None:
    command = (
        "simulate",
        timer,
        "--policy",
        "always-on",
        "--json",
        "--rung",
        "ready:2:0",
        "--rung",
        "local:0:3",
    )
    usual = policies(run(*command))["always on"]
    dear = policies(run(*command, "--price-memory", "1.08"))["always on"]
    assert dear["holding"] == pytest.approx(100 * usual["holding"])
    environment = policies(run(*command, PILOTFLAME_PRICE_MEMORY_GB_HOUR="1.08"))["always on"]
    assert environment["holding"] == pytest.approx(dear["holding"])
    command = (
        "simulate",
        timer,
        "--policy",
        "fixed:0:local",
        "--json",
        "--rung",
        "ready:1:0",
        "--rung",
        "local:0:3",
    )
    short, long = (policies(run(*command, "--service", ms))["fixed 0 s to local"] for ms in (1, 9000))
    assert long["rung_s"]["ready"] > short["rung_s"]["ready"] + 8 * 1000


def test_the_table_has_a_line_for_each_policy(timer: Path, run: Any) -> None:
    lines = run("simulate", timer, "--policy", "policy", "--policy", "fixed:60:zygote").stdout.splitlines()
    assert lines[0].startswith("2 functions, 1700 calls in 1 d")
    assert [line.split("  ")[0] for line in lines[2:]] == ["the policy", "fixed 60 s to zygote"]
    split = run("simulate", timer, "--policy", "policy", "--split", 7).stdout
    assert split.startswith("7 functions, 1700 calls")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--policy", "fixed:soon"), "has no timeout"),
        (("--policy", "best"), "no policy 'best'"),
        (("--policy", "envelope"), "no policy 'envelope'"),
        (("--policy", "hybrid"), "no policy 'hybrid'"),
        (("--policy", "optimum"), "`make bench-policy` in the source tree compares with optimum"),
        (("--policy", "fixed:5:attic"), "no rung 'attic'"),
        (("--policy", "all", "--rung", "ready:1"), "'ready:1' is no rung"),
        (("--policy", "all", "--rung", "ready:1:0"), "no ladder"),
        (("--policy", "all", "--rung", "ready:1:0", "--rung", "a:1:3", "--rung", "b:0:2"), "no ladder"),
        (("--policy", "all", "--rung", "ready:1:0", "--rung", "a:nan:3"), "no ladder"),
    ],
)
def test_what_is_wrong_is_told(arguments: tuple[str, ...], said: str, timer: Path, run: Any) -> None:
    done = run("simulate", timer, *arguments)
    assert done.returncode == 1
    assert said in done.stderr.replace("\n", " ")


def test_it_asks_for_a_trace_or_a_log(run: Any, timer: Path) -> None:
    for arguments in (("--policy", "all"), (timer, "--from-log", "embed")):
        done = run("simulate", *arguments)
        assert done.returncode == 2
        assert "--from-log FUNCTION" in done.stderr


async def test_what_a_gateway_remembers_is_replayed(state: Path, run: Any) -> None:
    async with gateway_process(state) as gateway:
        await gateway.deploy("def handler(event):\n    return event\n", name="kept")

        def simulate(*arguments: object) -> Any:
            return run("simulate", "--from-log", "kept", "--json", "--url", gateway.url, *arguments)

        nothing = await asyncio.to_thread(simulate)
        assert nothing.returncode == 1
        assert "remembers no call of 'kept'" in nothing.stderr
        function = gateway.function("kept")
        for number in range(12):
            await function.answer(number)
        found = json.loads((await asyncio.to_thread(simulate)).stdout)
        assert (found["functions"], found["calls"]) == (1, 12)
        assert len(found["policies"]) == len(NAMES)
        assert 0 < found["span_s"] < 60
        later = await asyncio.to_thread(simulate, "--since", "2099-01-01")
        assert "remembers no call" in later.stderr


async def test_a_replay_of_a_gateway_s_log_holds_the_rungs_that_the_gateway_held(
    state: Path, run: Any
) -> None:
    """The replay uses the prices of the gateway, not of its own environment. Tolerance: 0.7 s for each step down."""
    async with gateway_process(state, price_memory_gb_hour=15.0, price_waiting_s=0.002) as gateway:
        await gateway.deploy("def handler(event):\n    return event\n", name="kept")
        function, cold = gateway.function("kept"), list[bool]()
        for gap_s in (0.0, 0.2, 2.2, 0.3, 2.4, 2.2):
            await asyncio.sleep(gap_s)
            cold.append((await function.call()).headers["x-cold-start"] == "true")
        path = "/v1/functions/kept"
        known = (await gateway.client.get(f"{path}/arrivals")).json()
        decisions = (await gateway.client.get(f"{path}/decisions")).json()["decisions"]
        command = ("simulate", "--from-log", "kept", "--policy", "policy", "--json", "--url", gateway.url)
        found = policies(await asyncio.to_thread(run, *command))["the policy"]
    assert known["prices"] == pytest.approx({"memory_gb_hour": 15.0, "device_hour": 2.88, "waiting_s": 0.002})
    calls = known["arrivals"]
    downs = [
        datetime.fromisoformat(one["at"]).timestamp() for one in decisions if one["action"] == "step_down"
    ]
    lower_s = [
        min(at_s for at_s in calls if at_s > down_s) - down_s
        for down_s in downs
        if calls[0] < down_s < calls[-1]
    ]
    # The log begins with the first call, so the replay cannot know whether that call was a cold start.
    assert cold[1:] == [False, True, False, True, True]
    assert found["cold_starts"] == len(lower_s) == 3
    assert found["rung_s"]["zygote"] == pytest.approx(sum(lower_s), abs=0.7 * len(lower_s))
    assert sum(found["rung_s"].values()) == pytest.approx(calls[-1] - calls[0], abs=0.5)


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0, "0.00"),
        (0.000012345, "0.0000123"),
        (0.0123, "0.0123"),
        (0.5, "0.500"),
        (1, "1.00"),
        (1234.567, "1234.57"),
    ],
)
def test_an_amount_has_as_many_digits_as_tell_something(amount: float, text: str) -> None:
    assert _money(amount) == text
