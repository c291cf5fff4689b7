"""The commands of access against real gateways: the first key without one and with one, keys and secrets over HTTP."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pilotflame.runtime.cli import cli, run_command
from pilotflame.runtime.commands.access import COMMANDS

# Fixtures of the command line's tests stand one folder higher: start, served, short_tmp.
Run = Callable[..., Any]

TELLS = "import os\ndef handler(event):\n    return os.environ.get('TOKEN')\n"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command in this process: starting one takes longer than all that it does."""

    def ran(*arguments: object, given: bytes = b"", **variables: str) -> subprocess.CompletedProcess[str]:
        with monkeypatch.context() as patch:
            for name in ("PILOTFLAME_URL", "PILOTFLAME_API_KEY", "PILOTFLAME_STATE_DIR", "PILOTFLAME_AUTH"):
                patch.delenv(name, raising=False)
            for name, value in variables.items():
                patch.setenv(name, value)
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
            words = [str(argument) for argument in arguments]
            code = run_command(words)
            said = capsys.readouterr()
            return subprocess.CompletedProcess(words, code, said.out, said.err)

    return ran


@pytest.mark.parametrize("group", COMMANDS)
def test_every_command_teaches_with_an_example(group: Any):
    for name in group.commands:
        shown = CliRunner().invoke(cli, [group.name, name, "--help"])
        assert shown.exit_code == 0
        assert f"pilotflame {group.name} {name}" in shown.output


def test_the_life_of_keys_with_and_without_a_gateway(run: Run, start: Run, short_tmp: Path):
    """Made in the files, used and revoked through the gateway, seen in the files again."""
    home = ("--state-dir", short_tmp / "keys-home")
    assert run("keys", "list", *home).stderr == "no keys: pilotflame keys create NAME\n"
    made = run("keys", "create", "laptop", "--scope", "admin", "--expires", "30d", *home)
    admin = made.stdout.strip()
    assert made.stdout.startswith("pf_")
    assert made.stdout.count("\n") == 1
    assert "laptop: admin all" in made.stderr
    with_key = {"PILOTFLAME_API_KEY": admin}
    process = start("serve", "--json", "--port", 0, *home)
    url = json.loads(process.stdout.readline())["url"]
    refused = run("list", "--url", url)
    assert refused.returncode == 1
    assert "PILOTFLAME_API_KEY" in refused.stderr
    assert run("list", "--url", url, "--api-key", admin).returncode == 0
    # Through the gateway's own socket, without a key; and over HTTP with one.
    shop = json.loads(run("keys", "create", "shop", "--function", "f", "--rate", 5, *home, "--json").stdout)
    listed = json.loads(run("keys", "list", "--json", "--url", url, **with_key).stdout)["keys"]
    assert [key["name"] for key in listed] == ["laptop", "shop"]
    shown = run("keys", "list", *home).stdout
    assert "5 a second" in shown
    assert shop["key"].rpartition("_")[2] not in shown
    # By a whole key as well, which is not repeated.
    revoked = run("keys", "revoke", shop["key"], "--url", url, **with_key)
    assert revoked.stdout == f"{shop['id']} is revoked\n"
    again = run("keys", "revoke", shop["key"], *home)
    assert again.returncode == 1
    assert shop["key"] not in again.stderr
    process.terminate()
    assert process.wait(30) == 0
    assert [key["name"] for key in json.loads(run("keys", "list", *home, "--json").stdout)["keys"]] == [
        "laptop"
    ]


@pytest.mark.parametrize(
    "option", [("--expires", "soon"), ("--expires", "0d"), ("--scope", "root"), ("--rate", "x")]
)
def test_a_wrong_option_is_told(run: Run, short_tmp: Path, option: tuple[str, str]):
    done = run("keys", "create", "a", *option, "--state-dir", short_tmp / "wrong")
    assert (done.returncode, done.stdout) == (2, "")
    assert not (short_tmp / "wrong" / "access").exists()


def test_a_wish_that_cannot_be_is_one_paragraph(run: Run, short_tmp: Path):
    done = run(
        "keys", "create", "a", "--scope", "admin", "--function", "f", "--state-dir", short_tmp / "wish"
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "covers all functions" in done.stderr


def test_a_key_that_is_none_is_not_echoed(run: Run):
    done = run("list", "--api-key", "s3cr3t wörd")
    assert (done.returncode, done.stdout) == (1, "")
    assert "s3cr3t" not in done.stderr
    assert "s3cr3t" not in run("list", "--help", PILOTFLAME_API_KEY="s3cr3t").stdout


def test_secrets_come_from_a_file_or_standard_input(run: Run, served: str, tmp_path: Path):
    at = ("--url", served)
    (tmp_path / "token").write_text("from a file\n")
    early = run("secrets", "set", "told", "TOKEN", "--from-file", tmp_path / "token", *at)
    assert early.returncode == 0
    assert "no function told is deployed yet" in early.stderr
    (tmp_path / "handler.py").write_text(TELLS)
    assert run("deploy", tmp_path, "--name", "told", *at).returncode == 0
    assert run("invoke", "told", *at).stdout == '"from a file"\n'
    done = run("secrets", "set", "told", "TOKEN", *at, given=b"from a pipe\r\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert "from a pipe" not in done.stdout
    assert run("secrets", "list", "told", *at).stdout == "TOKEN\n"
    assert json.loads(run("secrets", "list", "told", "--json", *at).stdout)["secrets"] == ["TOKEN"]
    run("deploy", tmp_path, "--name", "told", *at)
    assert run("invoke", "told", *at).stdout == '"from a pipe"\n'
    assert run("secrets", "unset", "told", "TOKEN", *at).stdout == "told no longer has TOKEN\n"
    unknown = run("secrets", "unset", "told", "TOKEN", *at)
    assert unknown.returncode == 1
    assert "'TOKEN'" in unknown.stderr
    assert run("secrets", "list", "told", *at).stderr == "told has no secrets\n"
    assert run("secrets", "set", "told", "TOKEN", *at, given=b"\xff").returncode == 2
    assert run("delete", "told", "--yes", *at).returncode == 0
