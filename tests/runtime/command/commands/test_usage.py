"""`pilotflame usage`: the table, CSV and JSON of what functions have used."""

import csv
import json
import re
from datetime import UTC, datetime, timedelta

import pytest

ECHO = "def handler(event):\n    return event\n"


def test_the_table_has_a_row_a_function_and_a_sum(pilotflame, deployed):
    name = deployed(ECHO)
    assert pilotflame("invoke", name, "1").returncode == 0
    done = pilotflame("usage", name)
    assert done.returncode == 0, done.stderr
    head, row, total = (re.split(r"\s{2,}", line.strip()) for line in done.stdout.splitlines())
    assert head[0] == "function"
    assert {"memory GB h", "using USD", "holding USD", "cost USD", "always on USD", "saved USD"} < {*head}
    assert row[0] == name
    assert total[0] == "all"
    assert row[1:] == total[1:]
    assert pilotflame("usage", name, "--by", "day").stdout.splitlines()[0].startswith("day")


def test_csv_and_json_have_the_same_figures(pilotflame, deployed):
    name = deployed(ECHO)
    assert pilotflame("invoke", name, "1").returncode == 0
    found = json.loads(pilotflame("usage", name, "--json").stdout)
    (row,) = csv.DictReader(pilotflame("usage", name, "--csv").stdout.splitlines())
    assert row.pop("function") == name == found["rows"][0]["key"]
    assert row.keys() == found["total"].keys()
    assert float(row["invocations"]) == found["total"]["invocations"] == 1
    assert (found["prices"]["device_hour"], found["currency"]) == (2.88, "USD")
    (hour,) = csv.DictReader(pilotflame("usage", name, "--by", "hour", "--csv").stdout.splitlines())
    assert datetime.fromisoformat(hour["hour"]) > datetime.now(UTC) - timedelta(hours=2)


def test_the_gateway_and_the_bases_have_rows_of_their_own(pilotflame, deployed):
    deployed(ECHO)
    rows = {row["key"]: row["usage"] for row in json.loads(pilotflame("usage", "--json").stdout)["rows"]}
    for held in ("(gateway)", "(bases)"):
        assert rows[held]["holding_gb_s"] == rows[held]["memory_gb_s"]
        assert rows[held]["invocations"] == 0
    table = pilotflame("usage").stdout
    assert re.search(r"^\(gateway\)(\s+-){5}\s+\d", table, re.MULTILINE)


def test_an_unknown_function_is_named_and_a_deleted_one_is_known(pilotflame, deployed, tmp_path):
    for wrong in ("nosuch", "nosuch --csv", "nosuch --since 1h"):
        done = pilotflame("usage", *wrong.split())
        assert (done.returncode, done.stdout) == (1, "")
        assert "There is no function 'nosuch'" in done.stderr
    name = deployed(ECHO)
    assert pilotflame("delete", name, "--yes").returncode == 0
    assert pilotflame("usage", name).returncode == 0


def test_a_failed_first_deploy_leaves_no_function_in_the_usage(pilotflame, tmp_path):
    (tmp_path / "handler.py").write_text("def setup(context):\n    raise ValueError\n" + ECHO)
    assert pilotflame("deploy", tmp_path, "--name", "never-live").returncode == 1
    assert "never-live" not in pilotflame("usage").stdout
    assert "There is no function" in pilotflame("usage", "never-live").stderr


def test_a_time_in_which_nothing_was_used_is_said_to_be_so(pilotflame, deployed):
    name = deployed(ECHO)
    done = pilotflame("usage", name, "--since", "2020-01-01", "--until", "2020-02-01")
    assert (done.returncode, done.stdout) == (0, "")
    assert "nothing was used" in done.stderr


@pytest.mark.parametrize("wrong", [("--since", "soon"), ("--by", "week")])
def test_options_that_are_wrong_are_named(pilotflame, wrong):
    done = pilotflame("usage", *wrong)
    assert done.returncode == 2
    assert wrong[0] in done.stderr
