"""`pilotflame list`: the functions, and the memory of all processes."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from pilotflame.runtime.command.commands import functions as commands

ECHO = "def handler(event):\n    return event\n"


def test_the_memory_of_bases_and_gateway_is_in_the_sum(pilotflame, deployed):
    names = [deployed(ECHO) for _ in range(2)]
    found = json.loads(pilotflame("list", "--json").stdout)
    held, functions = found["memory"], {one["name"]: one for one in found["functions"]}
    assert all(functions[name]["memory_bytes"] > 1e6 for name in names)
    assert held["bases_bytes"] > 1e6 < held["gateway_bytes"]
    assert held["total_bytes"] == held["functions_bytes"] + held["bases_bytes"] + held["gateway_bytes"]
    assert sum(one["memory_bytes"] for one in functions.values()) <= held["functions_bytes"]
    rows = [line.split() for line in pilotflame("list").stdout.splitlines()]
    last = {row[0]: row[1:] for row in rows if row[0] in ("(bases)", "(gateway)", "all")}
    assert list(last) == ["(bases)", "(gateway)", "all"]
    assert all(unit == "MiB" and float(size) > 1 for size, unit in last.values())


def test_without_functions_there_is_no_table(run_here, tmp_path, start):
    state = tmp_path / "empty"
    process = start("serve", "--json", "--port", 0, "--state-dir", state)
    url = json.loads(process.stdout.readline())["url"]
    done = run_here("list", PILOTFLAME_URL=url)
    assert (done.stdout, done.returncode) == ("", 0)
    assert "no functions yet" in done.stderr


def test_the_status_names_the_fields_of_prefixes() -> None:
    prefixes = {"assistant": {"messages": [{"role": "system", "content": "long"}], "tools": "tools.json"}}
    for origins, origin in (
        ({"prefixes.assistant.tools": "pilotflame.toml"}, "pilotflame.toml"),
        ({"prefixes": "--set"}, "--set"),
    ):
        rows = commands._settings({"settings": {"prefixes": prefixes}, "setting_origins": origins})
        assert rows == [("prefixes.assistant", "messages, tools", origin)]


def test_the_status_shows_the_settings_that_differ_and_with_all_the_others(pilotflame, deployed):
    name = deployed(ECHO, "--set", "timeout_s=7")
    shown, everything = pilotflame("status", name).stdout, pilotflame("status", name, "--all").stdout
    assert "timeout_s" in shown
    assert "max_queue" not in shown
    assert "other settings by default: --all" in shown
    assert "max_queue" in everything
    assert "--all" not in everything


STATUS = {
    "name": "f", "revision": "r1", "created_at": "2026-01-02", "kind": "async_generator", "batch": None, "entry": "p.py:P",
    "workers": {"ready": 1, "parked": 0, "starting": 2, "draining": 0}, "stopped": "", "zygote": True, "standby": False,
    "queued": 3, "in_flight": 4, "activations": 5, "last_cold_start_ms": None, "memory_bytes": None,
    "settings": {"handler": "handler.py", "scale": {"max": 4}}, "snapshot": None, "snapshots": {},
}  # fmt: skip


FAILING = {
    "failures": 3,
    "error": "No licence.",
    "next_at": datetime(2026, 1, 2, 3, 4, 5).astimezone().isoformat(),
}


@pytest.mark.parametrize(
    ("changed", "fact", "text"),
    [
        ({}, "workers", "1 of 4, 2 starting"),
        ({"stopped": "budget"}, "workers", "1 of 4, 2 starting, budget used up"),
        ({"stopped": "paused"}, "workers", "1 of 4, 2 starting, paused"),
        ({"failing": FAILING}, "workers", "1 of 4, 2 starting, 3 starts failed"),
        ({"failing": FAILING}, "starts fail", "No licence. The next start: not before 2026-01-02 03:04:05"),
        ({}, "at rest", "zygote"),
        ({"standby": True, "rest_mb": 12.4}, "at rest", "zygote + standby, 12 MiB"),
        ({"zygote": False, "rest_mb": 12.4}, "at rest", "files only"),
        ({}, "handler", "handler.py, async generator"),
        ({"dialect": "cog", "batch": 8}, "handler", "p.py:P (cog), async generator, batches of up to 8"),
        ({}, "snapshot", "none"),
        ({}, "requests", "3 queued, 4 running"),
        ({}, "activations", "5, the last cold start -"),
        (
            {"budget": {"money": 1.23456, "money_per_day": 5.0, "worker_s": 9, "seconds_per_day": None}},
            "budget",
            "used today: 1.235 of 5 money",
        ),
    ],
)
def test_the_facts_of_a_function(changed: dict[str, Any], fact: str, text: str) -> None:
    facts = dict(commands._facts(STATUS | changed))
    assert facts[fact] == text
    assert ("budget" in facts, "cold because" in facts) == ("budget" in changed, False)


def test_a_function_that_is_cold_says_why() -> None:
    cold = {"cold_because": "went down to files alone", "cold_since": "2026-01-02T03:04:05+00:00"}
    assert dict(commands._facts(STATUS | cold))["cold because"].startswith(
        "it went down to files alone, at 2026-01-0"
    )


def test_a_row_of_the_list_and_the_rows_of_memory() -> None:
    assert commands._row(STATUS) == ("f", "r1", "1 of 4, 2 starting", "zygote", "-", "3", "4", "5", "-")
    functions = [{"memory_bytes": 1 << 20}, {"memory_bytes": None}]
    memory = {"bases_bytes": 1024, "gateway_bytes": 2048, "functions_bytes": 3 << 20, "total_bytes": 9 << 20}
    rows = commands._memory_rows({"functions": functions, "memory": memory})
    assert [(row[0], row[4]) for row in rows] == [
        ("(bases)", "1.0 KiB"), ("(gateway)", "2.0 KiB"), ("(deploying or deleted)", "2.0 MiB"), ("all", "9.0 MiB"),
    ]  # fmt: skip
    rows = commands._memory_rows({"functions": functions, "memory": memory | {"functions_bytes": 1 << 20}})
    assert len(rows) == 3
    assert [row[4] for row in commands._memory_rows({"functions": functions})] == ["1.0 MiB"]
    assert [row[4] for row in commands._memory_rows({"functions": functions[1:]})] == ["-"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        ([], "-"),
        (["a", 1], "a, 1"),
        ([{}, {}], "2 tables"),
        ("x", "x"),
        (True, "true"),
        (1.5, "1.5"),
    ],
)
def test_a_setting_is_shown_as_it_is_written(value: Any, text: str) -> None:
    assert commands._shown(value) == text


def test_the_example_of_a_call_is_the_test_input_or_the_gateways(tmp_path: Path) -> None:
    assert commands._example(tmp_path, {"name": "Ada"}) == """'{"name": "Ada"}'"""
    (tmp_path / "test_input.json").write_text("[1]")
    assert commands._example(tmp_path, {"name": "Ada"}) == "'[1]'"
    (tmp_path / "test_input.json").write_text(json.dumps("x" * 10_000))
    assert commands._example(tmp_path, None) == f"@{tmp_path}/test_input.json"


def test_sources_schedules_and_processes_are_rows() -> None:
    source = {"queue": "https://sqs/1/jobs", "state": "polling", "in_flight": 1, "completed": 2, "left": 3, "backlog": None,
              "lag_s": None, "last_error_at": None, "last_error": ""}  # fmt: skip
    assert commands._source_row(source) == ("jobs", "polling", "1", "2", "3", "-", "-", "-")
    late = source | {
        "backlog": 7,
        "lag_s": 90.0,
        "last_error_at": "2026-01-02T03:04:05+00:00",
        "last_error": "no",
    }
    assert commands._source_row(late)[5:7] == ("7", "1 min")
    assert commands._source_row(late)[7].endswith(" no")
    schedule = {"cron": "0 8 * * *", "timezone": "UTC", "workers": 2, "for_s": 60, "next_at": None}
    assert commands._schedule_row(schedule) == ("0 8 * * * UTC", "2", "1 min", "never")
    process = {"name": "w1", "pid": 7, "uss_mb": 1.04, "pss_mb": 2.0, "rss_mb": 3.0}
    assert commands._process_row(process) == ("w1", "7", "1.0 MiB", "2.0 MiB", "3.0 MiB")


@pytest.mark.parametrize(
    ("found", "row"),
    [
        ({"function": "f", "image": None, "fetched_bytes": 0, "snapshot": None}, ("f", "-", "-", "-", "")),
        (
            {"function": "f", "image": "i", "fetched_bytes": 2048, "snapshot": "s3://b"},
            ("f", "i", "2.0 KiB", "s3://b", ""),
        ),
        (
            {"function": "f", "error": {"type": "unknown_function", "message": "No."}},
            ("f", "-", "-", "-", "No."),
        ),
    ],
)
def test_what_was_prefetched_is_a_row(found: dict[str, Any], row: tuple[str, ...]) -> None:
    assert commands._prefetched_row(found) == row
