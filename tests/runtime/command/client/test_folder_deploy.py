"""Deploys to a gateway that does not see the folder, as one in a container: once, and after each change."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pilotflame.errors import CodeError
from pilotflame.runtime.command.client.client import Client
from pilotflame.runtime.command.client.folder_deploy import Changes, FolderDeploy
from pilotflame.runtime.command.client.options import FunctionSource

WEIGHTS_BYTES = 2 << 20


@pytest.fixture
def distant(start, run_here, short_tmp: Path, tmp_path: Path) -> tuple[str, str, Path]:
    """The address, an API key and the state folder of a gateway that takes no folders by path."""
    state = short_tmp / tmp_path.name[-8:]
    where = ("--host", "0.0.0.0", "--port", 0, "--state-dir", state)
    process = start("serve", "--json", *where, PILOTFLAME_LAME_DUCK_S="0")
    url = json.loads(process.stdout.readline())["url"].replace("0.0.0.0", "127.0.0.1")
    made = run_here("keys", "create", "me", "--scope", "admin", "--json", "--state-dir", state)
    return url, json.loads(made.stdout)["key"], state


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "far-off"
    found.mkdir()
    (found / "model.bin").write_bytes(os.urandom(WEIGHTS_BYTES))
    return answering(found, 1)


def answering(folder: Path, answer: object) -> Path:
    (folder / "handler.py").write_text(f"def handler(event):\n    return {answer}\n")
    return folder


def ignore(_event: str, _told: dict[str, Any]) -> None: ...


def answer(client: Client) -> Any:
    with client.call("far-off") as reply:
        return reply.value()


def test_a_gateway_that_does_not_see_the_folder_is_sent_what_it_lacks(
    distant: tuple[str, str, Path], folder: Path, monkeypatch: pytest.MonkeyPatch
):
    url, key, state = distant
    sent: list[int] = []
    with Client(url, api_key=key) as client:
        client._connection._http.event_hooks["request"].append(
            lambda request: sent.append(len(request.content))
        )

        def largest(deploy: FolderDeploy) -> int:
            sent.clear()
            deploy.run(ignore)
            return max(sent)

        deploy = FolderDeploy(client, FunctionSource(folder), upload=False, check=False)
        assert largest(deploy) > WEIGHTS_BYTES
        assert answer(client) == 1
        assert not deploy.has_changed()
        answering(folder, 2)
        assert deploy.has_changed()
        assert largest(deploy) < 10_000
        assert answer(client) == 2
        # All revisions share one file with the weights on the gateway's disk.
        copies = list((state / "functions/far-off").glob("r*/code/model.bin"))
        assert len({copy.stat().st_ino for copy in copies}) == 1 < len(copies)
        # A new command also sends only the changed files, although it does not know the function's name at first.
        answering(folder, 3)
        again = FolderDeploy(client, FunctionSource(folder), upload=False, check=False)
        assert largest(again) < 10_000
        # If the live revision has changed since the request for the lacking files, all files are sent.
        stale = {"revision": "r1-00000000", "lacking": ["handler.py"]}
        monkeypatch.setattr(client, "post", lambda *_path, **_body: stale)
        answering(folder, 4)
        assert largest(again) > WEIGHTS_BYTES
        assert answer(client) == 4


def test_watch_deploys_each_change(
    start: Callable[..., Any], distant: tuple[str, str, Path], folder: Path, run_here: Callable[..., Any]
):
    url, key, _state = distant
    where = {"PILOTFLAME_URL": url, "PILOTFLAME_API_KEY": key}
    process = start("deploy", folder, "--watch", **where)

    def told() -> str:
        return str(process.stdout.readline())

    def error() -> str:
        return next(line for line in iter(process.stderr.readline, "") if line.startswith("error: "))

    assert told().startswith("far-off r1-")
    answering(folder, "(")
    assert "handler.py, line 2" in error()
    assert run_here("invoke", "far-off", **where).stdout == "1\n"
    answering(folder, 2)
    assert told().startswith("far-off r")
    assert run_here("invoke", "far-off", **where).stdout == "2\n"
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=20)
    assert (process.returncode, "Traceback" in said) == (130, False)


def test_watch_fails_at_once_where_no_edit_helps(run_here, served: str, folder: Path):
    assert run_here("deploy", folder, "--watch", "--url", "http://gateway.invalid:1").returncode == 3


def test_a_folder_that_is_gone_is_not_watched(tmp_path: Path):
    with pytest.raises(CodeError, match="cannot be watched"):
        Changes(tmp_path / "gone").next()
