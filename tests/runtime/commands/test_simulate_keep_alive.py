"""`pilotflame simulate --policy`: what each keep-alive policy would have cost, for a trace or for what a gateway remembers."""

from __future__ import annotations

import asyncio
import json
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

import pytest
from live import gateway_process

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
    lines = run("simulate", timer, "--policy", "policy", "--policy", "envelope").stdout.splitlines()
    assert lines[0].startswith("2 functions, 1700 calls in 1 d")
    assert [line.split("  ")[0] for line in lines[2:]] == ["the policy", "envelope alone"]
    split = run("simulate", timer, "--policy", "policy", "--split", 7).stdout
    assert split.startswith("7 functions, 1700 calls")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--policy", "fixed:soon"), "has no timeout"),
        (("--policy", "best"), "no policy 'best'"),
        (("--policy", "hybrid"), "`make bench-policy` in the source tree compares with hybrid"),
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


def test_a_picture_is_refused_with_what_to_use(run: Any, timer: Path) -> None:
    done = run("simulate", timer, "--policy", "all", "--plot", "bills.svg")
    assert done.returncode == 2
    assert "--plot is gone. --json has the figures of each policy." in done.stderr
    assert "--plot" not in run("simulate", "--help").stdout


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
    async with gateway_process(state, price_memory_gb_hour=5.0, price_waiting_s=0.002) as gateway:
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
    assert known["prices"] == pytest.approx({"memory_gb_hour": 5.0, "device_hour": 2.88, "waiting_s": 0.002})
    calls = known["arrivals"]
    downs = [
        datetime.fromisoformat(one["at"]).timestamp() for one in decisions if one["action"] == "step_down"
    ]
    lower_s = [
        min(at_s for at_s in calls if at_s > down_s) - down_s
        for down_s in downs
        if calls[0] < down_s < calls[-1]
    ]
    # The log begins with the first call, so the replay does not know how that one found the function.
    assert cold[1:] == [False, True, False, True, True]
    assert found["cold_starts"] == len(lower_s) == 3
    assert found["rung_s"]["zygote"] == pytest.approx(sum(lower_s), abs=0.7 * len(lower_s))
    assert sum(found["rung_s"].values()) == pytest.approx(calls[-1] - calls[0], abs=0.5)
