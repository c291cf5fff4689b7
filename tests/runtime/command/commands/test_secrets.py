"""`pilotflame secrets` against a real gateway: values from files and pipes, and what workers get."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Run = Callable[..., Any]

RETURNS_TOKEN = "import os\ndef handler(event):\n    return os.environ.get('TOKEN')\n"


def test_secrets_come_from_a_file_or_standard_input(run: Run, served: str, tmp_path: Path):
    at = ("--url", served)
    (tmp_path / "token").write_text("from a file\n")
    early = run("secrets", "set", "guarded", "TOKEN", "--from-file", tmp_path / "token", *at)
    assert early.returncode == 0
    assert "no function guarded is deployed yet" in early.stderr
    (tmp_path / "handler.py").write_text(RETURNS_TOKEN)
    assert run("deploy", tmp_path, "--name", "guarded", *at).returncode == 0
    assert run("invoke", "guarded", *at).stdout == '"from a file"\n'
    done = run("secrets", "set", "guarded", "TOKEN", *at, given=b"from a pipe\r\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert "from a pipe" not in done.stdout
    assert run("secrets", "list", "guarded", *at).stdout == "TOKEN\n"
    assert json.loads(run("secrets", "list", "guarded", "--json", *at).stdout)["secrets"] == ["TOKEN"]
    run("deploy", tmp_path, "--name", "guarded", *at)
    assert run("invoke", "guarded", *at).stdout == '"from a pipe"\n'
    assert run("secrets", "unset", "guarded", "TOKEN", *at).stdout == "guarded no longer has TOKEN\n"
    unknown = run("secrets", "unset", "guarded", "TOKEN", *at)
    assert unknown.returncode == 1
    assert "'TOKEN'" in unknown.stderr
    assert run("secrets", "list", "guarded", *at).stderr == "guarded has no secrets\n"
    assert run("secrets", "set", "guarded", "TOKEN", *at, given=b"\xff").returncode == 2
    (tmp_path / "token").write_text("\n")
    for empty in (("--from-file", tmp_path / "token"), ()):
        refused = run("secrets", "set", "guarded", "TOKEN", *empty, *at)
        assert refused.returncode == 2
        assert "There is no value for TOKEN" in refused.stderr
    assert run("secrets", "list", "guarded", *at).stdout == ""
    assert run("delete", "guarded", "--yes", *at).returncode == 0
