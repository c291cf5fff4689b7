"""`pilotflame keys` in the files of a gateway, through its control socket, and over HTTP."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pilotflame.runtime.command.commands.keys import _rights, _row

from ...conftest import COMMAND, environment

Run = Callable[..., Any]


def test_the_life_of_keys_with_and_without_a_gateway(run: Run, start: Run, short_tmp: Path):
    """Keys are created in the files, used and revoked through the gateway, and seen in the files again."""
    home = ("--state-dir", short_tmp / "keys-home")
    missing = run("keys", "list", *home)
    assert (missing.returncode, "does not exist" in missing.stderr) == (1, True)
    (short_tmp / "keys-home").mkdir()
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
    # Create a key through the gateway's own socket, which needs no key. List the keys over HTTP with a key.
    shop = json.loads(run("keys", "create", "shop", "--function", "f", "--rate", 5, *home, "--json").stdout)
    listed = json.loads(run("keys", "list", "--json", "--url", url, **with_key).stdout)["keys"]
    assert [key["name"] for key in listed] == ["laptop", "shop"]
    shown = run("keys", "list", *home).stdout
    assert "5 a second" in shown
    assert shop["key"].rpartition("_")[2] not in shown
    # The audit log has both keys, also the key that was created while no gateway ran.
    audit = run("logs", "--audit", "--url", url, **with_key).stdout.splitlines()
    assert 'by="the command line"' in audit[0]
    assert 'did="Create an API key"' in audit[0]
    assert 'did="Start the gateway"' in audit[1]
    assert 'from="the control socket"' in audit[2]
    assert 'name="shop"' in audit[2]
    # `revoke` also takes a whole key, and does not print it.
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


def test_a_key_of_an_issuer_has_no_token(run: Run, short_tmp: Path):
    home = ("--state-dir", short_tmp / "issuer-home")
    rule = ("--issuer", "https://issuer.example", "--audience", "here", "--subject", "repo:me/*")
    assert run("keys", "create", "me", "--scope", "admin", *home).returncode == 0
    made = run("keys", "create", "ci", *rule, *home)
    assert "pf_" not in made.stdout + made.stderr
    assert "tokens of https://issuer.example act as it" in made.stdout
    _, key = json.loads(run("keys", "list", "--json", *home).stdout)["keys"]
    assert key["issuer"] == {
        "url": "https://issuer.example", "audience": "here", "subject": "repo:me/*", "owner_claim": None,
    }  # fmt: skip
    lonely = run("keys", "create", "ci", "--audience", "here", *home)
    assert (lonely.returncode, "--audience needs --issuer" in lonely.stderr) == (2, True)
    lacking = run("keys", "create", "ci", "--issuer", "https://issuer.example", *home)
    assert (lacking.returncode, "--issuer needs --audience and --subject" in lacking.stderr) == (2, True)


def test_a_key_that_could_not_be_printed_is_in_the_audit_log(short_tmp: Path):
    home = short_tmp / "unprinted"
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [*COMMAND, "keys", "create", "a", "--scope", "admin", "--state-dir", home], stdout=full, env=environment(), check=False,
        )  # fmt: skip
    assert done.returncode == 1
    (line,) = (home / "logs/audit.jsonl").read_text().splitlines()
    (key,) = json.loads((home / "access/keys.json").read_text())["keys"]
    assert f'did="Create an API key" id="{key["id"]}"' in json.loads(line)["text"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_root_makes_no_files_that_another_users_gateway_could_not_read(run: Run, short_tmp: Path):
    home = short_tmp / "of-another"
    home.mkdir()
    os.chown(home, 12345, 12345)
    refused = run("keys", "create", "a", "--scope", "admin", "--state-dir", home / "state")
    assert (refused.returncode, "--reuid 12345" in refused.stderr) == (1, True)
    assert list(home.iterdir()) == []


def test_the_first_key_warns_of_what_closes(run: Run, short_tmp: Path):
    home = ("--state-dir", short_tmp / "first-key")
    for scope in ("invoke", "deploy", "read"):
        refused = run("keys", "create", "a", "--scope", scope, *home)
        assert (refused.returncode, refused.stdout) == (1, "")
        assert "pilotflame keys create NAME --scope admin" in refused.stderr
        assert ("no gateway has used it" in refused.stderr) == (scope == "invoke")
    first = run("keys", "create", "a", "--scope", "admin", *home)
    assert "warning: this is the gateway's first key" in first.stderr
    assert "PILOTFLAME_API_KEY" in first.stderr
    assert "warning" not in run("keys", "create", "b", *home).stderr


def test_a_key_is_revoked_by_its_name(run: Run, short_tmp: Path):
    home = ("--state-dir", short_tmp / "by-name")
    for name in ("laptop", "shop", "shop"):
        run("keys", "create", name, "--scope", "admin", *home)
    ids = {key["id"]: key["name"] for key in json.loads(run("keys", "list", *home, "--json").stdout)["keys"]}
    several = run("keys", "revoke", "shop", *home)
    assert several.returncode == 1
    assert all(key_id in several.stderr for key_id, name in ids.items() if name == "shop")
    assert run("keys", "revoke", "laptop", *home).returncode == 0
    left = json.loads(run("keys", "list", *home, "--json").stdout)["keys"]
    assert [key["name"] for key in left] == ["shop", "shop"]
    unknown = run("keys", "revoke", "laptop", *home, "--json")
    assert json.loads(unknown.stderr)["error"]["type"] == "unknown_key"
    assert "'laptop'" in unknown.stderr


@pytest.mark.parametrize(
    "option", [("--expires", "soon"), ("--expires", "0d"), ("--scope", "root"), ("--rate", "x")]
)
def test_a_wrong_option_is_exit_code_2(run: Run, short_tmp: Path, option: tuple[str, str]):
    done = run("keys", "create", "a", *option, "--state-dir", short_tmp / "wrong")
    assert (done.returncode, done.stdout) == (2, "")
    assert not (short_tmp / "wrong" / "access").exists()


def test_options_that_contradict_each_other_are_one_paragraph(run: Run, short_tmp: Path):
    done = run(
        "keys", "create", "a", "--scope", "admin", "--function", "f", "--state-dir", short_tmp / "wish"
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "covers all functions" in done.stderr
    assert "first key" not in done.stderr


def test_a_malformed_key_is_not_echoed(run: Run):
    done = run("list", "--api-key", "s3cr3t wörd")
    assert (done.returncode, done.stdout) == (1, "")
    assert "s3cr3t" not in done.stderr
    assert "s3cr3t" not in run("list", "--help", PILOTFLAME_API_KEY="s3cr3t").stdout


QUOTAS = {"rate_per_s": 5, "burst": 9, "concurrency": 3, "model_tokens_per_min": 700, "max_workers": 2}


def test_quotas_are_options_and_are_listed_with_their_units(run: Run, short_tmp: Path):
    home = ("--state-dir", short_tmp / "quotas")
    run("keys", "create", "a", "--scope", "admin", *home)
    options = ("--rate", "--burst", "--concurrency", "--tokens", "--max-workers")
    given = [word for pair in zip(options, QUOTAS.values(), strict=True) for word in pair]
    made = json.loads(
        run("keys", "create", "b", "--scope", "deploy", "--trusted", *given, *home, "--json").stdout
    )
    assert {name: made[name] for name in QUOTAS} == QUOTAS
    assert _row(made)[3] == "5 a second, 9 in succession, 3 running, 700 tokens a minute, 2 workers"
    assert _row({**made, **dict.fromkeys(QUOTAS)})[3] == "none"


@pytest.mark.parametrize(
    ("key", "rights"),
    [
        ({"scopes": ["invoke"], "functions": None}, "invoke all"),
        ({"scopes": ["invoke"], "functions": []}, "invoke nothing"),
        (
            {"scopes": ["read", "deploy"], "functions": ["f", "g"], "policy": {"kind": "trusted"}},
            "read, deploy f, g",
        ),
        (
            {"scopes": ["invoke", "deploy"], "functions": ["f"], "policy": {"kind": "container"}},
            "invoke, deploy (containers) f",
        ),
    ],
)
def test_rights_are_scopes_and_functions(key: dict[str, Any], rights: str):
    assert _rights(key) == rights
