"""The commands about jobs against a real gateway: what they print, where, and their exit codes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pilotflame.runtime.command.client.client import Client

Run = Callable[..., Any]

# One function for all tests, controlled by its event. An event with `wait` waits until the test opens that FIFO.
DOES = """
def handler(event):
    print('doing', event, flush=True)
    if isinstance(event, dict) and 'fail' in event:
        raise ValueError(event['fail'])
    if isinstance(event, dict) and 'wait' in event:
        with open(event['wait']) as fifo:
            return fifo.read()
    return event
"""
STREAMS = "def handler(event):\n    for n in range(event):\n        yield {'n': n}\n"
PIXELS = "def handler(event) -> bytes:\n    return b'\\x89PNG'\n"
NO_JOB = "job-aaaaaaaaaaaaaaaaaaaaaaaaaa"


@pytest.fixture(scope="module")
def served(served_for_cog: str) -> str:
    """Share the gateway of the tests of Cog, because these commands need no plugin."""
    return served_for_cog


@pytest.fixture(scope="module")
def deploy_once(served: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """Yield a function that deploys a source at its first use. The functions are deleted after the module."""
    names: dict[str, str] = {}
    with Client(served) as client:

        def deploy(source: str, **settings: Any) -> str:
            if source not in names:
                folder = tmp_path_factory.mktemp("job-function")
                (folder / "handler.py").write_text(source)
                names[source] = f"jobs-{len(names)}"
                client.deploy(folder, overrides={"name": names[source], **settings})
            return names[source]

        yield deploy
        for name in names.values():
            client.delete("v1", "functions", name)


@pytest.fixture
def does(deploy_once: Callable[..., str]) -> str:
    return deploy_once(DOES, **{"scale.max": 1})


@pytest.fixture
def fifo(tmp_path: Path) -> Iterator[Path]:
    """A FIFO that a handler waits for. It is opened at the end, so that a cancelled handler stops waiting."""
    os.mkfifo(tmp_path / "fifo")
    yield tmp_path / "fifo"
    os.close(os.open(tmp_path / "fifo", os.O_RDWR | os.O_NONBLOCK))


def go(fifo: Path, word: str = "gone on") -> None:
    """Let the waiting handler return `word`: opening a FIFO blocks until both ends are open."""
    fifo.write_text(word)


def failed(done: Any, code: int, *named: str) -> None:
    """Check that the command ended with this code, a last line on stderr with these texts, and nothing on stdout."""
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith("error: ")
    for text in named:
        assert text in line


# -- run


def test_a_job_is_submitted_and_its_id_printed(pilotflame: Run, does: str):
    done = pilotflame("run", does, '{"n": 1}')
    assert (done.returncode, done.stderr) == (0, "")
    job_id = done.stdout.strip()
    assert pilotflame("jobs", "follow", does, job_id).stdout == '{"n": 1}\n'
    told = json.loads(pilotflame("run", does, "1", "--json").stdout)
    assert set(told) == {"id", "status", "replayed"}
    assert told["replayed"] is False


def test_wait_prints_the_output(pilotflame: Run, does: str, tmp_path: Path):
    done = pilotflame("run", does, '["später"]', "--wait")
    assert (done.returncode, done.stdout) == (0, '["später"]\n')
    assert done.stderr.startswith("job job-")
    (tmp_path / "event.json").write_text('{"from": "file"}')
    assert pilotflame("run", does, f"@{tmp_path / 'event.json'}", "--wait").stdout == '{"from": "file"}\n'
    assert pilotflame("run", does, "-", "--wait", given=b'"stdin"').stdout == '"stdin"\n'
    assert pilotflame("run", does, "--wait").stdout == "null\n"
    job = json.loads(pilotflame("run", does, "7", "--wait", "--json").stdout)
    assert (job["status"], job["output"], job["attempts"]) == ("COMPLETED", 7, 1)


def test_output_of_other_types_is_printed_as_it_is(pilotflame: Run, deploy_once: Callable[..., str]):
    name = deploy_once(PIXELS)
    assert pilotflame("run", name, "--wait").stdout == "\ufffdPNG"
    streams = deploy_once(STREAMS)
    assert json.loads(pilotflame("run", streams, "2", "--wait").stdout) == [{"n": 0}, {"n": 1}]


def test_a_job_that_does_not_complete_is_exit_code_4(pilotflame: Run, does: str, fifo: Path):
    failed(pilotflame("run", does, '{"fail": "no good"}', "--wait"), 4, "FAILED", "no good", "line 5")
    slow = pilotflame("run", does, json.dumps({"wait": str(fifo)}), "--timeout", "0.2", "--wait", "--json")
    assert slow.returncode == 4
    assert json.loads(slow.stdout)["status"] == "TIMED_OUT"


def test_the_same_key_is_the_same_job(pilotflame: Run, does: str):
    first = pilotflame("run", does, "5", "--idempotency-key", "once")
    again = pilotflame("run", does, "5", "--idempotency-key", "once", "--wait")
    assert f"job {first.stdout.strip()}" in again.stderr
    assert "before" in again.stderr
    assert again.stdout == "5\n"
    failed(pilotflame("run", does, "6", "--idempotency-key", "once"), 1, "key")


@pytest.mark.parametrize(
    ("event", "named"),
    [("{wrong", "not JSON"), ("NaN", "NaN"), ("@/no/such/file", "/no/such/file"), ("text", "quotes")],
)
def test_a_malformed_event_is_explained(pilotflame: Run, does: str, event: str, named: str):
    failed(pilotflame("run", does, event), 1, named)


def test_settings_of_a_job_arrive(pilotflame: Run, does: str, fifo: Path):
    """While one job runs, waiting jobs with a low priority run last, and one times out."""
    running = pilotflame("run", does, json.dumps({"wait": str(fifo)})).stdout.strip()
    low = [pilotflame("run", does, f'"low{n}"', "--low-priority").stdout.strip() for n in range(12)]
    late = pilotflame("run", does, '"late"', "--ttl", "0.05").stdout.strip()
    soon = pilotflame("run", does, '"soon"').stdout.strip()
    failed(pilotflame("jobs", "follow", does, late), 4, "TIMED_OUT")
    go(fifo)
    ended = {
        job: json.loads(pilotflame("jobs", "follow", does, job, "--json").stdout.splitlines()[-1])["data"]
        for job in (running, soon, *low)
    }
    assert {job["status"] for job in ended.values()} == {"COMPLETED"}
    lines = [line["text"] for line in map(json.loads, pilotflame("logs", does, "--json").stdout.splitlines())]
    assert lines.index("doing soon") < lines.index("doing low11")


# -- jobs


def test_jobs_are_listed(pilotflame: Run, does: str):
    for event in ("1", '{"fail": "listed"}'):
        pilotflame("run", does, event, "--wait")
    shown = pilotflame("jobs", "list", does, "--limit", 2).stdout.splitlines()
    assert shown[0].split() == ["id", "status", "age", "attempts", "delay", "execution"]
    assert [line.split()[1] for line in shown[1:]] == ["FAILED", "COMPLETED"]
    found = json.loads(pilotflame("jobs", "list", does, "--status", "failed", "--json").stdout)["jobs"]
    assert {job["status"] for job in found} == {"FAILED"}
    assert pilotflame("jobs", "list", does, "--status", "nonsense").returncode == 2


def test_a_function_without_jobs_says_how(pilotflame: Run, deployed: Callable[..., str]):
    name = deployed("def handler(event):\n    return event\n")
    done = pilotflame("jobs", "list", name)
    assert (done.returncode, done.stdout) == (0, "")
    assert f"pilotflame run {name}" in done.stderr


def test_a_job_is_shown_whole(pilotflame: Run, does: str):
    job = json.loads(pilotflame("run", does, '{"fail": "shown"}', "--wait", "--json").stdout)["id"]
    shown = pilotflame("jobs", "get", does, job)
    assert shown.returncode == 0
    for text in (
        job,
        "FAILED",
        "ago",
        "handler_failed",
        "ValueError: shown",
        "handler.py",
        "it printed",
        "doing",
    ):
        assert text in shown.stdout, shown.stdout
    found = json.loads(pilotflame("jobs", "get", does, job, "--json").stdout)
    assert "doing {'fail': 'shown'}" in found["logs"]
    failed(pilotflame("jobs", "get", does, job, "--output-only"), 4, job, "FAILED", "shown")
    done = json.loads(pilotflame("run", does, '{"deep": [1]}', "--wait", "--json").stdout)["id"]
    assert pilotflame("jobs", "get", does, done, "--output-only").stdout == '{"deep": [1]}\n'
    assert '\noutput:\n{"deep": [1]}\n' in pilotflame("jobs", "get", does, done).stdout


def test_jobs_are_cancelled_and_purged(pilotflame: Run, does: str, fifo: Path):
    running = pilotflame("run", does, json.dumps({"wait": str(fifo)})).stdout.strip()
    waiting = [pilotflame("run", does, str(n)).stdout.strip() for n in range(3)]
    failed(
        pilotflame("jobs", "get", does, waiting[1], "--output-only"), 1, waiting[1], "pilotflame jobs follow"
    )
    assert pilotflame("jobs", "cancel", does, waiting[0]).stdout == f"{waiting[0]} CANCELLED\n"
    refused = pilotflame("jobs", "purge", does)
    assert (refused.returncode, "Not a terminal" in refused.stderr) == (2, True)
    assert pilotflame("jobs", "purge", does, "--yes").stdout == "2 cancelled\n"
    assert json.loads(pilotflame("jobs", "purge", does, "-y", "--json").stdout) == {"cancelled": 0}
    assert pilotflame("jobs", "cancel", does, running).stdout == f"{running} CANCELLED\n"
    failed(pilotflame("jobs", "follow", does, running), 4, "CANCELLED")


def test_a_purge_asks_a_person(pilotflame: Run, does: str):
    asked = pilotflame("jobs", "purge", does, given=b"n\n", person=True)
    assert (asked.returncode, asked.stdout.strip()) == (130, "")
    assert f"0 waiting jobs of {does}?" in asked.stderr
    assert pilotflame("jobs", "purge", does, given=b"y\n", person=True).stdout.lstrip() == "0 cancelled\n"


def test_a_refused_job_does_not_stop_the_others(pilotflame: Run, does: str):
    bad = json.loads(pilotflame("run", does, '{"fail": "again"}', "--wait", "--json").stdout)["id"]
    good = json.loads(pilotflame("run", does, "1", "--wait", "--json").stdout)["id"]
    done = pilotflame("jobs", "retry", does, good, NO_JOB, bad, "--json")
    assert done.returncode == 1
    told = json.loads(done.stdout)
    assert [job["id"] for job in told["jobs"]] == [bad]
    assert {name: error["type"] for name, error in told["errors"].items()} == {good: "job_conflict", NO_JOB: "unknown_job"}  # fmt: skip
    failed(pilotflame("jobs", "follow", does, bad), 4, "FAILED")
    assert "retried by hand 1" in pilotflame("jobs", "get", does, bad).stdout
    assert pilotflame("jobs", "cancel", does, good).stdout == f"{good} COMPLETED\n"


def test_a_stream_is_followed(pilotflame: Run, deploy_once: Callable[..., str]):
    name = deploy_once(STREAMS)
    job = pilotflame("run", name, "3").stdout.strip()
    assert pilotflame("jobs", "follow", name, job).stdout == '{"n": 0}\n{"n": 1}\n{"n": 2}\n'
    events = [
        json.loads(line) for line in pilotflame("jobs", "follow", name, job, "--json").stdout.splitlines()
    ]
    assert [event["event"] for event in events] == ["output"] * 3 + ["completed"]
    assert events[-1]["data"]["id"] == job


def test_ctrl_c_ends_the_following_not_the_job(
    pilotflame: Run, start: Run, served: str, does: str, fifo: Path
):
    job = pilotflame("run", does, json.dumps({"wait": str(fifo)})).stdout.strip()
    process = start("jobs", "follow", does, job, PILOTFLAME_URL=served)
    assert "IN_PROGRESS\n" in iter(process.stderr.readline, "")
    process.send_signal(signal.SIGINT)
    out, rest = process.communicate(timeout=20)
    assert (process.returncode, out) == (130, "")
    assert f"pilotflame jobs follow {does} {job}" in rest
    go(fifo)
    assert pilotflame("jobs", "follow", does, job).stdout == '"gone on"\n'


def test_unknown_jobs_and_functions_are_named(pilotflame: Run, does: str):
    for command in ("get", "follow", "cancel", "retry"):
        failed(pilotflame("jobs", command, does, NO_JOB), 1, NO_JOB)
    for command in (("run", "nobody"), ("jobs", "list", "nobody"), ("jobs", "purge", "nobody", "--yes"), ("webhooks", "list", "nobody")):  # fmt: skip
        failed(pilotflame(*command), 1, "nobody")
    failed(pilotflame("webhooks", "redeliver", does, "msg_0"), 1, "msg_0", "pilotflame webhooks list")
    failed(pilotflame("webhooks", "secret", "nobody"), 1, "nobody")


def test_a_webhook_to_a_private_address_is_refused(pilotflame: Run, does: str):
    failed(pilotflame("run", does, "1", "--webhook", "http://10.0.0.1/x"), 1, "10.0.0.1")
