"""The command line against a real gateway, in this process and as processes: what it prints, where, and its exit codes."""

from __future__ import annotations

import functools
import json
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner
from pilotflame.runtime.cli import cli
from pilotflame.runtime.command.commands import doctor
from pilotflame.runtime.command.commands.doctor import (
    containers,
    database_answers,
    peers_answer,
    private_files,
)
from pilotflame.runtime.command.commands.lazy_group import LazyGroup
from pilotflame.runtime.command.commands.snapshot import snapshot
from pilotflame.runtime.ground.settings.gateway_settings import GatewaySettings
from pilotflame.runtime.ground.storing.postgres import PostgresConnection, migrate
from pilotflame.snapshot.peering.chunk_server import ChunkServer, listening
from pilotflame.snapshot.peering.served_chunks import ServedChunks
from safetensors.numpy import save_file

ECHO = "def handler(event):\n    return event\n"
SHOUT = (
    "def handler(event):\n    print('heard', event, flush=True)\n    return {'said': str(event).upper()}\n"
)


def one_paragraph(done, *named: str) -> None:
    """Check that the command failed with exit code 1 and one line on stderr that contains these texts.

    After an empty line, the traceback of the function may follow.
    """
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    paragraph, _, trace = done.stderr.partition("\n\n")
    assert paragraph.rstrip("\n").count("\n") == 0
    assert not trace or "  File " in trace
    for text in named:
        assert text in done.stderr


# -- help


def test_help_needs_nothing_heavy(run):
    done = run("--help")
    assert done.returncode == 0
    assert "Exit codes: 0 done" in done.stdout


def test_help_loads_nothing_heavy():
    heavy = ("aiohttp", "httpx", "pydantic", "rich", "torch", "uvloop")
    code = (
        "import sys; from pilotflame.runtime.cli import main; main(['--help']);"
        f"sys.exit(' '.join(name for name in {heavy} if name in sys.modules) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the words of every command, groups included."""
    context = click.Context(group)
    for name in group.list_commands(context):
        yield (*path, name)
        if isinstance(command := group.get_command(context, name), click.Group):
            yield from commands(command, (*path, name))


@pytest.mark.parametrize("words", list(commands(cli)), ids=" ".join)
def test_every_command_teaches_with_an_example(words: tuple[str, ...]):
    shown = CliRunner().invoke(cli, [*words, "--help"])
    assert shown.exit_code == 0
    assert "Example" in shown.output
    assert f"pilotflame {' '.join(words)}" in shown.output
    assert "--json" in shown.output or "\nCommands:\n" in shown.output


@pytest.mark.parametrize("group", [cli, snapshot])
def test_the_list_of_commands_says_of_each_what_its_help_says(group: LazyGroup):
    context = click.Context(group)
    for name in group.list_commands(context):
        text = group.get_command(context, name).help
        summary = group.summary(name)
        assert summary.endswith("."), name
        assert " ".join(text.split()).startswith(summary.removesuffix(".")), name


# -- the life of a function


def test_the_life_of_a_function(run, served, tmp_path: Path):
    folder, pilotflame = tmp_path / "life-of-one", functools.partial(run, PILOTFLAME_URL=served)
    made = pilotflame("init", folder, "--json")
    assert json.loads(made.stdout)["name"] == "life-of-one"
    deployed = pilotflame("deploy", folder, "--set", "scale.max=2", "--set", "env.MODE=fast", "--json")
    status = json.loads(deployed.stdout)
    assert status["name"] == "life-of-one"
    assert status["settings"]["scale"]["max"] == 2
    assert status["settings"]["env"] == {"MODE": "fast"}
    answered = pilotflame("invoke", "life-of-one", '{"name": "Ada"}')
    assert (answered.stdout, answered.stderr, answered.returncode) == ('{"greeting": "Hello, Ada."}\n', "", 0)
    listed = pilotflame("list")
    assert "life-of-one" in listed.stdout
    assert "of 2" in listed.stdout
    shown = pilotflame("status", "life-of-one", "--memory")
    assert "handler.py, plain" in shown.stdout
    assert "zygote" in shown.stdout
    assert "MiB" in shown.stdout
    assert pilotflame("delete", "life-of-one", "--yes").stdout == "life-of-one is deleted\n"
    one_paragraph(pilotflame("status", "life-of-one"), "life-of-one")


TYPED = """
import pydantic

class Order(pydantic.BaseModel):
    item: str
    count: int = pydantic.Field(ge=2)

def handler(event: Order):
    return event.item * event.count
"""


def test_deploy_prints_a_call_that_works(run, served, tmp_path: Path):
    """The body of the call is test_input.json, or is made from the handler's schema."""
    pilotflame = functools.partial(run, PILOTFLAME_URL=served)
    for name, wanted in (("call-init", "Hello"), ("call-typed", "hello")):
        folder = tmp_path / name
        if name == "call-typed":
            folder.mkdir()
            (folder / "handler.py").write_text(TYPED)
        else:
            pilotflame("init", folder)
        told = pilotflame("deploy", folder).stdout.strip().rpartition("call it: pilotflame ")[2]
        answered = pilotflame(*shlex.split(told))
        assert (answered.returncode, wanted in answered.stdout) == (0, True), (told, answered.stderr)
        status = json.loads(pilotflame("status", name, "--json").stdout)
        assert pilotflame("invoke", name, json.dumps(status["input_example"])).returncode == 0
        pilotflame("delete", name, "--yes")


def test_the_settings_in_force_and_where_they_come_from(pilotflame, deployed, tmp_path: Path):
    lists = ("--set", "aliases=prod,canary", "--set", "cors.origins=https://shop.example")
    name = deployed(ECHO, "--set", "scale.max=3", "--set", "env.TOKEN=hidden", *lists)
    shown = {
        line.split()[0]: " ".join(line.split()[1:])
        for line in pilotflame("status", name, "--all").stdout.splitlines()
        if line.strip()
    }
    assert shown["scale.max"] == "3 --set"
    assert shown["scale.min"] == "0 default"
    assert shown["env.TOKEN"] == "(set) --set"
    assert shown["threads"] == "- default"
    assert shown["aliases"] == "prod, canary --set"
    assert shown["cors.origins"] == "https://shop.example --set"
    assert shown["source"] == "- default"


def test_the_status_lists_event_sources(pilotflame, tmp_path: Path):
    (tmp_path / "handler.py").write_text(ECHO)
    queue = "http://127.0.0.1:1/000000000000/orders"
    table = f'[[source]]\ntype = "sqs"\nqueue = "{queue}"\nregion = "us-east-1"\n'
    (tmp_path / "pilotflame.toml").write_text(f'name = "ordered"\n{table}')
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        assert pilotflame("secrets", "set", "ordered", name, given=b"any\n").returncode == 0
    assert pilotflame("deploy", tmp_path, "--no-check").returncode == 0
    lines = [line.split() for line in pilotflame("status", "ordered").stdout.splitlines()]
    assert [
        "source",
        "state",
        "in",
        "flight",
        "completed",
        "left",
        "waiting",
        "lag",
        "last",
        "error",
    ] in lines
    (found,) = [line for line in lines if line[:1] == ["orders"]]
    assert found[1] in ("connecting", "failing")
    assert found[2:5] == ["0", "0", "0"]
    pilotflame("delete", "ordered", "--yes")


def test_a_gateway_reads_its_file(start, run, short_tmp: Path, tmp_path: Path):
    file = tmp_path / "gateway.toml"
    file.write_text(f'port = 0\nstate_dir = "{short_tmp}/filed"\ndrain_s = 1\n')
    process = start("serve", "--json", "--config", file)
    assert json.loads(process.stdout.readline())["url"].startswith("http://127.0.0.1:")
    assert (short_tmp / "filed").is_dir()
    file.write_text("prot = 0\n")
    one_paragraph(run("serve", "--config", file), "prot is not a setting", "did you mean port")
    one_paragraph(run("serve", PILOTFLAME_CONFIG=str(tmp_path / "no.toml")), "no.toml")


def test_settings_are_described(pilotflame):
    assert "1 to 1024" in pilotflame("settings", "scale.max").stdout
    (described,) = json.loads(pilotflame("settings", "PILOTFLAME_PORT", "--json").stdout)["settings"]
    assert (described["name"], described["default"]) == ("port", "8600")
    one_paragraph(pilotflame("settings", "scale.mx"), "did you mean scale.max")


def test_restart_rollback_and_revisions(pilotflame, deployed, tmp_path: Path):
    name = deployed("def handler(event):\n    return 1\n")
    (tmp_path / name / "handler.py").write_text(
        "import os\ndef handler(event):\n    return os.environ['TOKEN']\n"
    )
    assert pilotflame("deploy", tmp_path / name, "--name", name).returncode == 0
    assert pilotflame("secrets", "set", name, "TOKEN", given=b"new\n").returncode == 0
    restarted = pilotflame("restart", name)
    assert "runs in new processes" in restarted.stdout, restarted.stderr
    assert pilotflame("invoke", name).stdout == '"new"\n'
    assert "is live again" in pilotflame("rollback", name).stdout
    assert pilotflame("invoke", name).stdout == "1\n"
    listed = json.loads(pilotflame("revisions", name, "--json").stdout)["revisions"]
    assert [(one["number"], one["state"] == "live") for one in listed] == [(2, False), (1, True)]
    assert "stored" in (text := pilotflame("revisions", name).stdout) or "draining" in text
    one_paragraph(pilotflame("rollback", name), "no older revision")
    one_paragraph(pilotflame("rollback", name, "r7"), "r7")
    assert "starts workers again" in pilotflame("reset", name).stdout
    one_paragraph(pilotflame("restart", "nobody"), "nobody")


def test_credentials_are_named_and_not_deployed(pilotflame, tmp_path: Path):
    (tmp_path / ".env").write_text("TOKEN=1")
    (tmp_path / "handler.py").write_text("def handler(event):\n    return open('.env').read()\n")
    for upload in ((), ("--upload",)):
        done = pilotflame("deploy", tmp_path, "--name", "no-env", *upload)
        assert "not deployed, since they look like credentials: .env; " in done.stderr
        assert "FileNotFoundError" in pilotflame("invoke", "no-env", 1).stderr
    (tmp_path / ".pilotflameignore").write_text("!.env\n")
    done = pilotflame("deploy", tmp_path, "--name", "no-env")
    assert "credentials" not in done.stderr
    assert pilotflame("delete", "no-env", "--yes").returncode == 0


def test_a_second_deploy_is_a_new_revision(pilotflame, deployed, tmp_path: Path):
    name = deployed("def handler(event):\n    return 1\n")
    first = json.loads(pilotflame("status", name, "--json").stdout)["revision"]
    (tmp_path / name / "handler.py").write_text("def handler(event):\n    return 2\n")
    again = pilotflame("deploy", tmp_path / name, "--name", name)
    assert again.returncode == 0
    assert first not in again.stdout
    assert pilotflame("invoke", name).stdout == "2\n"


def test_upload_sends_the_files(pilotflame, deployed):
    name = deployed(ECHO, "--upload", "--set", "scale.max=3")
    status = json.loads(pilotflame("status", name, "--json").stdout)
    assert status["settings"]["scale"]["max"] == 3
    assert pilotflame("invoke", name, "[1, null]").stdout == "[1, null]\n"


def test_an_upload_has_its_folders_name_and_says_what_it_replaces(pilotflame, tmp_path: Path):
    for name in ("Alpha Two", "beta"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "handler.py").write_text(ECHO)
    created = pilotflame("deploy", tmp_path / "Alpha Two", "--upload")
    assert created.stdout.startswith("alpha-two r1-")
    assert "creates alpha-two at http://127.0.0.1:" in created.stderr
    updated = pilotflame("deploy", tmp_path / "Alpha Two")
    assert "updates alpha-two (revision 1, deployed without a key) at http://127.0.0.1:" in updated.stderr
    steps = re.findall(r"^  ([a-z ]+?) +\d+\.\d\d s$", created.stderr, re.MULTILINE)
    assert steps == ["upload", "code", "packages", "import", "build", "proof start"]
    told = pilotflame("deploy", tmp_path / "beta", "--upload", "--json")
    other = json.loads(told.stdout)
    assert (other["name"], other["replaces"], told.stderr) == ("beta", None, "")
    assert [step["name"] for step in other["steps"]] == steps
    assert all(step["seconds"] >= 0 for step in other["steps"])
    again = json.loads(pilotflame("deploy", tmp_path / "beta", "--upload", "--json").stdout)["replaces"]
    assert (again["revision"], again["number"], again["deployed_by"]) == (other["revision"], 1, "local")
    for name in ("alpha-two", "beta"):
        pilotflame("delete", name, "--yes")


def test_no_check_defers_errors_to_the_first_call(pilotflame, deployed, tmp_path: Path):
    source = "def setup(context):\n    raise ValueError('no device')\n\n" + ECHO
    name = deployed(source, "--no-check")
    one_paragraph(pilotflame("invoke", name, "1"), "handler.py", "line 2", "no device")
    (tmp_path / "handler.py").write_text(source)
    one_paragraph(pilotflame("deploy", tmp_path, "--name", "checked"), "handler.py", "line 2", "no device")


@pytest.mark.parametrize("upload", [(), ("--upload",)], ids=["folder", "upload"])
@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("scale.max=many", "scale.max is 'many'"),
        ("scale.mx=1", "did you mean scale.max"),
        ("env.1=x", "env.1"),
    ],
)
def test_a_bad_set_is_named_as_such(
    pilotflame, tmp_path: Path, setting: str, said: str, upload: tuple[str, ...]
):
    (tmp_path / "handler.py").write_text(ECHO)
    (tmp_path / "pilotflame.toml").write_text("hold_s = 1\n")
    done = pilotflame("deploy", tmp_path, "--name", "bad-set", "--set", setting, *upload)
    one_paragraph(done, said, "Correct --set.")
    assert "staging" not in done.stderr
    (tmp_path / "pilotflame.toml").write_text("hold = 1\n")
    done = pilotflame("deploy", tmp_path, "--name", "bad-set", "--set", setting, *upload)
    one_paragraph(done, said, "Correct --set and pilotflame.toml.")


def test_errors_are_json_for_programs(pilotflame, run, tmp_path: Path):
    def error(done, code: int) -> dict[str, str]:
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", 1)
        return json.loads(done.stderr)["error"]

    unknown = error(pilotflame("status", "nobody", "--json"), 1)
    assert unknown["type"] == "unknown_function"
    assert unknown["remedy"]
    assert error(run("list", "--json", "--url", "http://127.0.0.1:1"), 3)["type"] == "gateway_unreachable"
    assert error(run("status", "--json"), 2)["type"] == "usage"
    assert error(run("deploy", tmp_path / "no", "--json"), 2)["type"] == "usage"


def completed(run, words: str, **variables: str) -> list[str]:
    """Return what bash is offered for the last of these words."""
    given = {
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
        "_PILOTFLAME_COMPLETE": "bash_complete",
    }
    return [line.partition(",")[2] for line in run(**given, **variables).stdout.splitlines() if line]


def test_a_shell_completes_commands_functions_and_templates(run, served, deployed):
    name = deployed(ECHO)
    assert completed(run, "pilotflame rest") == ["restart", "restore"]
    assert name in completed(run, "pilotflame status ", PILOTFLAME_URL=served)
    assert name in completed(run, f"pilotflame invoke --url {served} {name[:4]}")
    assert completed(run, "pilotflame init -t text-e") == ["text-embedding"]
    assert completed(run, "pilotflame status x", PILOTFLAME_URL="http://127.0.0.1:1") == []
    assert "_PILOTFLAME_COMPLETE" in run(_PILOTFLAME_COMPLETE="bash_source").stdout


def test_warmup_starts_workers(pilotflame, deployed):
    name = deployed(ECHO)
    workers = json.loads(pilotflame("warmup", name, "--workers", 2, "--json").stdout)["workers"]
    assert workers["ready"] + workers["starting"] >= 1
    ready = pilotflame("warmup", name, "--workers", 2, "--wait", "--for", "10m", "--cause", "rollout")
    assert (ready.returncode, ready.stdout) == (0, f"{name}: 2 ready, 0 starting\n")
    assert pilotflame("warmup", name, "--for", "soon").returncode == 2


def test_a_script_learns_that_a_warmup_failed(pilotflame, deployed):
    source = "import os\ndef setup(context):\n    os._exit(3)\n" + ECHO
    name = deployed(source, "--no-check")
    failed = pilotflame("warmup", name, "--wait", "--json")
    assert failed.returncode == 1
    assert "exit code 3" in json.loads(failed.stderr)["error"]["message"]


def test_prefetch_goes_on_after_an_error(pilotflame, deployed):
    name = deployed(ECHO)
    nothing = {"function": name, "image": None, "snapshot": None, "snapshots": {}, "fetched_bytes": 0}
    assert json.loads(pilotflame("prefetch", name, name, "--json").stdout) == {"functions": [nothing]}
    assert nothing in json.loads(pilotflame("prefetch", "--all", "--json").stdout)["functions"]
    mixed = pilotflame("prefetch", "nobody", name, "--json")
    assert mixed.returncode == 1
    failed, fine = json.loads(mixed.stdout)["functions"]
    assert failed["error"]["type"] == "unknown_function"
    assert fine == nothing
    assert "nobody" in pilotflame("prefetch", "nobody").stdout
    for wrong in ((), ("--all", name)):
        refused = pilotflame("prefetch", *wrong)
        assert refused.returncode == 2
        assert "--all" in refused.stderr


# -- invoke


def test_events_come_from_arguments_files_and_stdin(pilotflame, deployed, tmp_path: Path):
    name = deployed(ECHO)
    (tmp_path / "event.json").write_text('{"from": "file"}')
    assert pilotflame("invoke", name, '"argument"').stdout == '"argument"\n'
    assert pilotflame("invoke", name, f"@{tmp_path / 'event.json'}").stdout == '{"from": "file"}\n'
    assert pilotflame("invoke", name, "-", given='"später"'.encode()).stdout == '"später"\n'
    assert pilotflame("invoke", name).stdout == "null\n"


def test_bytes_pass_as_they_are(pilotflame, deployed):
    name = deployed("def handler(event: bytes) -> bytes:\n    return event[::-1]\n")
    done = pilotflame("invoke", name, "-", "--content-type", "application/octet-stream", given=b"olleh\n")
    assert done.stdout == "\nhello"


def test_timing_shows_the_phases_beside_the_answer(pilotflame, deployed):
    name = deployed(ECHO)
    done = pilotflame("invoke", name, "7", "--timing")
    assert done.stdout == "7\n"
    assert "in all, worker" in done.stderr
    assert all(phase in done.stderr for phase in ("link", "wait", "exec", "respond"))
    envelope = json.loads(pilotflame("invoke", name, "7", "--json").stdout)
    assert envelope["answer"] == 7
    assert envelope["cold"] is False
    phases = envelope["timing_ms"]
    assert sum(phases.values()) == pytest.approx(2 * phases["total"], rel=0.02)


def test_timing_shows_the_cold_start_that_list_shows(pilotflame, deployed):
    name = deployed(ECHO, "--set", "scale.rest=local")
    said = pilotflame("invoke", name, "7", "--timing").stderr
    (row,) = (
        one for one in json.loads(pilotflame("list", "--json").stdout)["functions"] if one["name"] == name
    )
    assert row["activations"] == 1
    shown = re.match(r"cold start ([\d.]+) ms, with the call ([\d.]+) ms in all, worker ", said)
    assert shown is not None, said
    assert float(shown[1]) == pytest.approx(row["last_cold_start_ms"], abs=0.11)
    assert float(shown[1]) < float(shown[2])


def test_a_stream_is_printed_piece_by_piece(start, served, deployed):
    name = deployed(
        "import time\n\ndef handler(event):\n    yield {'n': 0}\n    time.sleep(1)\n    yield 'last\\u2028'\n"
    )
    process = start("invoke", name, "--timing", PILOTFLAME_URL=served)
    assert process.stdout.readline() == '{"n": 0}\n'
    # The command prints the first piece at once, although the second one comes a second later.
    assert process.poll() is None
    rest, said = process.communicate(timeout=30)
    assert json.loads(rest) == "last\u2028"
    assert process.returncode == 0
    # The total time is not negative.
    assert "-" not in said.splitlines()[0].partition(" in all")[0]


def test_a_stream_that_fails_ends_with_its_error(pilotflame, deployed):
    name = deployed("def handler(event):\n    yield 1\n    raise KeyError('gone')\n")
    done = pilotflame("invoke", name)
    assert (done.returncode, done.stdout) == (1, "1\n")
    assert "gone" in done.stderr
    assert "line 3" in done.stderr


# -- logs


def test_logs_are_printed_and_followed(pilotflame, start, served, deployed):
    name = deployed(SHOUT)
    pilotflame("invoke", name, '"one"')
    assert pilotflame("logs", name, "-n", 0).stdout == ""
    process = start("logs", name, "-f", "-n", 1, "--json", PILOTFLAME_URL=served)
    # When the command has printed an old line, it follows new lines.
    assert json.loads(process.stdout.readline())["text"] == "heard one"
    assert pilotflame("invoke", name, '"two"').returncode == 0
    assert json.loads(process.stdout.readline())["text"] == "heard two"
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=10)
    assert process.returncode == 130
    assert said.strip() == ""
    assert "heard one" in pilotflame("logs", name).stdout


def test_logs_are_searched_by_time_request_and_level_also_of_a_deleted_function(pilotflame, deployed):
    name = deployed("def handler(event):\n    print('heard', event)\n    return 1 / event\n")
    reply = json.loads(pilotflame("invoke", name, "1", "--json").stdout)
    failed = pilotflame("invoke", name, "0")
    assert "ZeroDivisionError" in failed.stderr
    assert "return 1 / event" in failed.stderr
    pilotflame("delete", name, "--yes")
    shown = pilotflame("logs", name).stdout
    assert re.search(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} \S+ +\[\w+\] heard 1$", shown, re.MULTILINE)
    assert pilotflame("logs", name, "--request", reply["request_id"]).stdout.count("\n") == 1
    errors = pilotflame("logs", name, "--level", "error", "--json", "--since", "10m").stdout.splitlines()
    assert "ZeroDivisionError" in json.loads(errors[0])["text"]
    assert pilotflame("logs", name, "--until", "10m").stdout == ""
    assert pilotflame("logs", name, "--until", "2020-01-01").stdout == ""
    assert pilotflame("logs", name, "--since", "soon").returncode == 2
    assert pilotflame("logs", name, "--audit").returncode == 2
    audit = pilotflame("logs", "--audit", "-n", 1).stdout
    assert f'did="Delete a function" function="{name}" outcome="200"' in audit


def test_what_the_gateway_says_is_one_of_the_logs(pilotflame, tmp_path):
    (tmp_path / "handler.py").write_text("")
    assert pilotflame("deploy", tmp_path, "--name", "x", "--set", "nothing=1").returncode == 1
    assert "a deploy was refused" in pilotflame("logs", "--level", "warning").stdout


# -- what goes wrong


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"app.py": ""}, ("handler.py", "app.py")),
        ({"handler.py": "def handler(event)\n    return 1\n"}, ("handler.py", "line 1", "SyntaxError")),
        ({"handler.py": "\nimport no_such_thing\n"}, ("handler.py", "line 2", "no_such_thing")),
        ({"handler.py": "def handle(event): ...\n"}, ("handler.py", "`handler`")),
        ({"handler.py": "def handler(a, b, c): ...\n"}, ("(a, b, c)",)),
        ({"handler.py": ECHO, "pilotflame.toml": "idle_timeout_s = 5\n"}, ("idle_timeout_s",)),
        ({"handler.py": ECHO, "pilotflame.toml": "[scale]\nmaxx = 5\n"}, ("scale.maxx", "scale.max")),
        ({"handler.py": ECHO, "pilotflame.toml": "= 5\n"}, ("pilotflame.toml", "line 1")),
        ({"handler.py": ECHO, "requirements.txt": "no-such-package-at-all>=3\n"}, ("no-such-package-at-all", "--install")),
        ({"handler.py": ECHO, "pilotflame.toml": 'snapshot = "nowhere"\n'}, ("nowhere", "--snapshot")),
    ],
    ids=["missing", "syntax", "import", "name", "arity", "setting", "subsetting", "toml", "requirement", "snapshot"],
)  # fmt: skip
def test_a_folder_that_cannot_be_deployed(
    pilotflame, tmp_path: Path, files: dict[str, str], named: tuple[str, ...]
):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    one_paragraph(pilotflame("deploy", tmp_path, "--name", "broken"), *named)
    assert "broken" not in pilotflame("list").stdout


def test_unknown_functions_are_named(pilotflame):
    for command in (("invoke",), ("status",), ("logs",), ("warmup",), ("delete", "--yes")):
        one_paragraph(pilotflame(command[0], "nobody", *command[1:]), "nobody")


def test_a_wrong_body_is_explained(pilotflame, deployed):
    name = deployed("def handler(event: dict[str, int]):\n    return event\n")
    one_paragraph(pilotflame("invoke", name, "{wrong"), "not JSON")
    one_paragraph(pilotflame("invoke", name, '{"count": "many"}'), "input.count", "integer")
    one_paragraph(pilotflame("invoke", name, "@/no/such/file"), "/no/such/file")


def test_a_failing_handler_is_located(pilotflame, deployed):
    name = deployed("def handler(event):\n    return 1 / 0\n")
    one_paragraph(pilotflame("invoke", name, "1"), "ZeroDivisionError", "handler.py", "line 2")


def test_no_gateway_is_exit_code_3(run):
    # The socket is bound but does not listen, so connections are refused.
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        done = run("list", "--url", f"http://127.0.0.1:{taken.getsockname()[1]}")
    assert done.returncode == 3
    assert "pilotflame serve" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("nonsense",),
        ("invoke",),
        ("deploy", "/no/such/folder"),
        ("deploy", ".", "--set", "scale.max"),
        ("delete", "hello"),
        ("logs", "hello", "-n", "many"),
        ("serve", "--port", "70000"),
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_is_exit_code_2(pilotflame, arguments: tuple[str, ...]):
    done = pilotflame(*arguments)
    assert done.returncode == 2
    assert "Error" in done.stderr


# -- serve, dev, test


def test_serve_says_where_it_listens_and_ends_on_a_signal(start, short_tmp: Path):
    process = start("serve", "--port", 0, "--state-dir", short_tmp / "polite")
    assert "listens on http://127.0.0.1:" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    out, said = process.communicate(timeout=20)
    assert (process.returncode, out) == (0, "")
    assert "Traceback" not in said


def test_the_first_line_has_the_format_of_the_log(start, short_tmp: Path):
    process = start("serve", "--port", 0, "--state-dir", short_tmp / "lines", PILOTFLAME_LOG_FORMAT="json")
    line = json.loads(process.stderr.readline())
    assert (line["source"], line["level"]) == ("gateway", "info")
    assert "listens on http://127.0.0.1:" in line["text"]
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=20)
    assert all(json.loads(line) for line in said.splitlines())


def test_serve_names_what_it_cannot_have(run, served, short_tmp: Path):
    port = served.rpartition(":")[2]
    one_paragraph(run("serve", "--port", port, "--state-dir", short_tmp / "other"), port, "--port")
    one_paragraph(run("serve", "--port", 0, "--state-dir", short_tmp / "served"), str(short_tmp / "served"))
    one_paragraph(run("serve", PILOTFLAME_PROT="1"), "PILOTFLAME_PROT", "PILOTFLAME_PORT")
    # The variables of the snapshot engine and of the client are no settings of the gateway, and are not refused.
    known = {
        "PILOTFLAME_S3_ANONYMOUS": "1",
        "PILOTFLAME_URL": "http://127.0.0.1:1",
        "PILOTFLAME_API_KEY": "x",
    }
    one_paragraph(run("serve", PILOTFLAME_STATE_DIR="/dev/null/x", **known), "/dev/null/x")


def test_dev_follows_changes_and_keeps_the_last_good_revision(start, run, tmp_path: Path, short_tmp: Path):
    handler = tmp_path / "handler.py"
    handler.write_text("def handler(event):\n    return 'first'\n")
    process = start("dev", tmp_path, "--name", "mine", "--port", 0, TMPDIR=str(short_tmp))
    url = next(word for word in process.stderr.readline().split() if word.startswith("http"))

    def wait_for(text: str) -> str:
        return next(line for line in iter(process.stderr.readline, "") if text in line)

    wait_for("pilotflame: mine r1-")
    assert run("invoke", "mine", "--url", url).stdout == '"first"\n'
    handler.write_text("def handler(event):\n    return 'second'\n")
    wait_for("pilotflame: mine r2-")
    assert run("invoke", "mine", "--url", url).stdout == '"second"\n'
    handler.write_text("def handler(event):\n    return (\n")
    assert "line 2" in wait_for("not deployed")
    assert run("invoke", "mine", "--url", url).stdout == '"second"\n'
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 0
    assert not list(short_tmp.glob("pilotflame-dev-*"))


def test_test_answers_and_leaves_nothing_behind(run, tmp_path: Path, short_tmp: Path):
    folder = tmp_path / "greeter"
    run("init", folder)
    done = run("test", folder, TMPDIR=str(short_tmp))
    assert (done.returncode, done.stdout) == (0, '{"greeting": "Hello, Ada!"}\n')
    assert "cold start" in done.stderr
    assert not list(short_tmp.glob("pilotflame-test-*"))
    outcome = json.loads(run("test", folder, "--json", TMPDIR=str(short_tmp)).stdout)
    assert outcome["cold"] is True
    assert outcome["answer"] == {"greeting": "Hello, Ada!"}


def test_test_shows_what_was_printed(run, tmp_path: Path, short_tmp: Path):
    (tmp_path / "handler.py").write_text("print('loaded')\n" + SHOUT)
    (tmp_path / "test_input.json").write_text('"hi"')
    done = run("test", tmp_path, "--name", "loud", TMPDIR=str(short_tmp))
    assert "printed | loaded" in done.stderr
    assert "printed | heard hi" in done.stderr
    assert "is live" not in done.stderr
    printed = json.loads(run("test", tmp_path, "--name", "loud", "--json", TMPDIR=str(short_tmp)).stdout)[
        "printed"
    ]
    assert printed == ["loaded", "heard hi"]


def test_test_fails_as_the_function_fails(run, tmp_path: Path, short_tmp: Path):
    (tmp_path / "handler.py").write_text("def handler(event):\n    return event['absent']\n")
    one_paragraph(run("test", tmp_path, TMPDIR=str(short_tmp)), "test_input.json")
    (tmp_path / "test_input.json").write_text("{,")
    one_paragraph(run("test", tmp_path, TMPDIR=str(short_tmp)), "test_input.json is not JSON")
    (tmp_path / "test_input.json").write_text("{}")
    one_paragraph(run("test", tmp_path, TMPDIR=str(short_tmp)), "KeyError", "line 2")
    dies = "import os\ndef handler(event):\n    print('on fire', flush=True)\n    os._exit(3)\n"
    (tmp_path / "handler.py").write_text(dies)
    one_paragraph(run("test", tmp_path, TMPDIR=str(short_tmp)), "The end of its log", "on fire")
    assert not list(short_tmp.glob("pilotflame-test-*"))


# -- doctor, snapshot, init


def test_doctor_examines_this_machine(run, short_tmp: Path):
    done = run("doctor", "--state-dir", short_tmp / "looked-at", "--json")
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert done.returncode == 0, checks
    assert {"Python", "Linux", "fork", "unix sockets", "torch", "memory", "port"} <= set(checks)
    assert {"limits of processes", "private files", "container engine"} <= set(checks)
    assert not (short_tmp / "looked-at").exists()


def test_doctor_says_what_this_kernel_does_not_keep_apart():
    assert "5.13" in private_files(0).remedy
    assert "signals" in private_files(5).remedy
    assert not private_files(6).remedy


def test_doctor_names_the_keys_that_are_useless_without_a_container_engine(run, short_tmp: Path):
    state, engine = short_tmp / "contained", {"DOCKER_HOST": "unix:///nonexistent/engine.sock"}
    assert run("keys", "create", "me", "--scope", "admin", "--state-dir", state).returncode == 0
    for name, *options in (("team", "--image", "registry/*"), ("ci", "--trusted")):
        made = run("keys", "create", name, "--scope", "deploy", *options, "--state-dir", state, **engine)
        assert made.returncode == 0, made.stderr
    shown = run("keys", "list", "--state-dir", state).stdout
    assert shown.count("deploy (containers)") == 1
    settings = GatewaySettings(state_dir=state)
    assert containers(settings, None).remedy.endswith("nothing else can be deployed: team.")
    assert "team" not in containers(GatewaySettings(state_dir=short_tmp / "other"), None).remedy


def test_doctor_asks_the_peers():
    token, sockets = "the token of the cluster", [listening("127.0.0.1", 0) for _ in range(2)]
    servers = [ChunkServer(sock, ServedChunks([]), token) for sock in sockets]
    urls = [f"http://127.0.0.1:{sock.getsockname()[1]}" for sock in sockets]
    for server in servers:
        server.start()
    assert peers_answer(urls, token) == ("peers", "ok", "2 of 2 answer", "")
    refused = peers_answer(urls[:1], "the token of another one")
    assert (refused.verdict, refused.found[:13]) == ("note", "0 of 1 answer")
    assert "PILOTFLAME_PEERS_TOKEN" in refused.remedy
    for server in servers:
        server.close()
    alone = peers_answer([*urls, "http://name.invalid:1"], token)
    assert alone.found.startswith("0 of 2 answer; http://127.0.0.1:")
    assert "PILOTFLAME_PEERS_PORT" in alone.remedy


def test_doctor_examines_the_database(postgres_url: str, monkeypatch: pytest.MonkeyPatch):
    # A busy machine may answer late.
    monkeypatch.setattr(doctor, "SLOW_DATABASE_MS", 10_000.0)
    check = database_answers(postgres_url)
    assert (check.name, check.verdict) == ("database", "ok")
    assert "0004_pre_members.sql" in check.found
    connection = PostgresConnection(postgres_url)
    migrate(connection)
    connection.close()
    assert re.fullmatch(
        r"PostgreSQL 1\d\.\S+, \d+\.\d ms away, its clock [+-]0\.\d s", database_answers(postgres_url).found
    )
    away = database_answers("host=/nowhere user=postgres")
    assert (away.verdict, away.found[:27]) == ("fail", "The database cannot be used")
    assert "the setting `database`" in away.remedy


def test_doctor_says_what_is_wrong_and_what_to_do(run, tmp_path: Path):
    (tmp_path / "file").write_text("")
    done = run("doctor", "--state-dir", tmp_path / "file" / "state")
    assert done.returncode == 1
    line = next(line for line in done.stdout.splitlines() if "state folder" in line)
    assert line.startswith("fail")
    assert "PILOTFLAME_STATE_DIR" in line


def test_snapshot_create_inspect_verify(pilotflame, tmp_path: Path):
    file = tmp_path / "model.safetensors"
    save_file({"first": np.zeros((300, 2), np.float32), "second.weight": np.ones(7, np.float32)}, file)
    one_paragraph(pilotflame("snapshot", "verify", tmp_path), "pilotflame snapshot create")
    created = pilotflame("snapshot", "create", tmp_path)
    assert "2 tensors (2 F32)" in created.stdout
    shown = pilotflame("snapshot", "inspect", tmp_path)
    assert "second.weight" in shown.stdout
    assert "300×2" in shown.stdout
    facts = json.loads(pilotflame("snapshot", "inspect", tmp_path, "--tensors", "--json").stdout)
    assert [tensor["shape"] for tensor in facts["tensors"]] == [[300, 2], [7]]
    assert json.loads(pilotflame("snapshot", "verify", file, "--json").stdout)["verified"] is True
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    one_paragraph(pilotflame("snapshot", "verify", tmp_path), "model.safetensors", "second.weight")


def test_init_lists_and_refuses(pilotflame, tmp_path: Path):
    names = [
        template["name"]
        for template in json.loads(pilotflame("init", "--list", "--json").stdout)["templates"]
    ]
    assert names == [
        "fastapi", "hello", "image-classification", "onnx", "openvino", "reranking", "speech-recognition", "stream", "text-classification",
        "text-embedding", "text-generation", "torch-module", "vllm",
    ]  # fmt: skip
    assert "hello" in pilotflame("init", "--list").stdout
    (tmp_path / "file").write_text("mine")
    one_paragraph(pilotflame("init", tmp_path), str(tmp_path), "not empty")
    one_paragraph(pilotflame("init", tmp_path / "x", "-t", "helo"), "helo", "text-embedding")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# -- handlers written for others


def test_deploy_names_the_platform_of_a_recognised_handler(pilotflame, tmp_path):
    folder = tmp_path / "greeter"
    folder.mkdir()
    (folder / "app.py").write_text("def lambda_handler(event, context):\n    return event['name']\n")
    done = pilotflame("deploy", folder)
    assert done.returncode == 0, done.stderr
    assert "recognised a handler of lambda: app.py:lambda_handler" in done.stderr
    assert "app.py:lambda_handler (lambda), plain" in pilotflame("status", "greeter").stdout
    assert pilotflame("invoke", "greeter", '{"name": "Ada"}').stdout.strip() == '"Ada"'
    pilotflame("delete", "greeter", "--yes")


def test_status_says_what_rest_costs(pilotflame, deployed):
    name, until_s, said = deployed("def handler(event):\n    return event"), time.monotonic() + 30, ""
    # The memory is measured some seconds after the deploy.
    while "MiB" not in said and time.monotonic() < until_s:
        said = pilotflame("status", name).stdout
    assert re.search(r"at rest +zygote \+ standby, [1-9]\d* MiB", said)


@pytest.mark.parametrize(
    ("words", "variables", "part"),
    [
        (("--state-dir", "{file}/state"), {}, "cannot be used"),
        (("--state-dir", "{state}", "--tls-cert", "{file}", "--tls-key", "{file}"), {}, "{file}"),
        (("--state-dir", "{state}"), {"PILOTFLAME_DRAIN_S": "many"}, "drain_s"),
    ],
)
def test_a_gateway_that_does_not_start_says_so_in_the_format_of_its_log(
    run, short_tmp: Path, tmp_path: Path, words: tuple[str, ...], variables: dict[str, str], part: str
):
    names = {"file": str(tmp_path / "file"), "state": str(short_tmp / "not-started")}
    Path(names["file"]).write_text("")
    given = [word.format_map(names) for word in words]
    for form in ("json", "collector"):
        done = run("serve", *given, "--port", 0, PILOTFLAME_LOG_FORMAT=form, **variables)
        assert (done.returncode, done.stdout) == (1, "")
        lines = [json.loads(line) for line in done.stderr.splitlines()]
        assert lines[-1]["level"] == "error"
        assert part.format_map(names) in lines[-1]["text"]


def test_plain_http_reads_no_authorities(run, served):
    assert run("list", PILOTFLAME_URL=served, SSL_CERT_FILE="/removed/cacert.pem").returncode == 0
    missing = run("list", PILOTFLAME_URL="http://gateway.invalid:8600", SSL_CERT_FILE="/removed/cacert.pem")
    assert missing.returncode == 3, missing.stderr
    one_paragraph(
        run("list", PILOTFLAME_URL="https://gateway.invalid:8600", SSL_CERT_FILE="/removed/cacert.pem"),
        "SSL_CERT_FILE is /removed/cacert.pem",
    )


def test_functions_inherit_what_an_operator_sets_for_all_programs(run, tmp_path: Path, short_tmp: Path):
    """`test` starts a gateway and a base. Both work although code of the operator prints a line at each start of Python."""
    site, folder = tmp_path / "site", tmp_path / "inherits"
    for made in (site, folder):
        made.mkdir()
    (site / "companylib.py").write_text("NAME = 'companylib'\n")
    (site / "sitecustomize.py").write_text("print('a line of the cluster', flush=True)\n")
    (folder / "handler.py").write_text(
        "import os, companylib\ndef handler(event):\n    return [companylib.NAME, *map(os.environ.get, event)]\n"
    )
    passed = {
        "SSL_CERT_FILE": "/etc/ca.pem", "REQUESTS_CA_BUNDLE": "/etc/ca.pem", "CURL_CA_BUNDLE": "/etc/ca.pem",
        "NO_PROXY": "127.0.0.1,.example", "no_proxy": "127.0.0.1,.example", "MALLOC_ARENA_MAX": "2",
        "https_proxy": "http://proxy.example:3128",
    }  # fmt: skip
    withheld = {"HTTP_PROXY": "http://user:secret@proxy.example:3128", "MALLOC_KEY": "x", "AWS_PROFILE": "x"}
    (folder / "test_input.json").write_text(json.dumps([*passed, *withheld]))
    done = run("test", folder, **passed, **withheld, PYTHONPATH=f"{site}:", TMPDIR=str(short_tmp))
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout[done.stdout.index("[") :])
    assert answer == ["companylib", *passed.values(), *[None] * len(withheld)]
