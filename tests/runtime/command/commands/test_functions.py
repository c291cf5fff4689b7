"""`pilotflame list`: the functions, and the memory of all processes."""

import json

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
