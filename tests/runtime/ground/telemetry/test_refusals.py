"""What a user reads when the operating system refuses something: a noun and a remedy."""

from __future__ import annotations

import errno
import gzip
import json
import os
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import pytest
from live import failure, gateway_here
from pilotflame.errors import GatewayError, LauncherError, RequirementsError
from pilotflame.runtime.command.client.exit_codes import exit_code_of
from pilotflame.runtime.front.api.invoke import Invoker
from pilotflame.runtime.front.http import requests
from pilotflame.runtime.front.http.guard import Guard
from pilotflame.runtime.front.http.incoming_bodies import IncomingBodies
from pilotflame.runtime.front.listening.sockets import bind
from pilotflame.runtime.ground.telemetry.refusals import explained, explaining
from pilotflame.runtime.node.functions.deploy import Preparation
from pilotflame.runtime.node.functions.function_folder import FunctionFolder
from pilotflame.runtime.node.launching.child_output import ChildOutput
from pilotflame.runtime.node.launching.process_launcher import _spawn_base
from pilotflame.runtime.node.packaging.requirements import check_requirements

COMMAND = [sys.executable, "-m", "pilotflame.runtime.cli"]


def test_a_command_in_a_deleted_folder(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    for words in (["init", "f"], ["deploy"]):
        script = f'cd {gone} && rmdir {gone} && "$0" "$@"; status=$?; mkdir -p {gone}; exit $status'
        done = subprocess.run(
            ["sh", "-c", script, *COMMAND, *words], capture_output=True, text=True, check=False
        )
        assert done.returncode == 1, done.stderr
        assert "the current folder no longer exists. Change to another folder" in done.stderr


def test_a_limit_of_threads_has_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    def starts() -> None:
        raise ExceptionGroup(
            "unhandled errors", [ExceptionGroup("more", [RuntimeError("can't start new thread")])]
        )

    assert exit_code_of(starts) == 1
    assert "ulimit -u" in capsys.readouterr().err

    def grows() -> None:
        raise MemoryError

    assert exit_code_of(grows, as_json=True) == 1
    error = json.loads(capsys.readouterr().err)["error"]
    assert (error["type"], "ulimit -v" in error["remedy"]) == ("gateway_error", True)

    def breaks() -> None:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        exit_code_of(breaks)


@pytest.mark.parametrize(
    ("number", "remedy"),
    [(errno.EADDRNOTAVAIL, "--host ::1"), (errno.EADDRINUSE, "--port"), (errno.EACCES, "1024")],
)
def test_an_address_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch, number: int, remedy: str) -> None:
    def refused(_self: object, _address: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(socket.socket, "bind", refused)
    with pytest.raises(GatewayError) as caught:
        bind("127.0.0.1", 0)
    assert remedy in caught.value.remedy


async def test_an_environment_that_was_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LauncherError, match="was moved or removed while the gateway runs") as caught:
        await _spawn_base(str(tmp_path / "moved" / "bin" / "python"), {}, ChildOutput("base"))
    assert "Start the gateway again" in caught.value.remedy
    monkeypatch.setattr(sys, "executable", str(tmp_path / "moved" / "bin" / "python"))
    with pytest.raises(RequirementsError, match="was moved or removed") as unmet:
        check_requirements("nothing-of-this-name>=2")
    assert "Start the gateway again" in unmet.value.remedy


@pytest.mark.parametrize(
    ("number", "part"),
    [
        (errno.ENOSPC, "the disk or its quota is full. Free space"),
        (errno.EDQUOT, "the disk or its quota is full. Free space"),
        (errno.EROFS, "the file system is read-only. Name"),
        (errno.EMFILE, "the number of open files is limited. Raise the limit: `ulimit -n`"),
        (errno.ENFILE, "the number of open files is limited. Raise"),
        (errno.EACCES, "this user has no right to it. Give"),
        (errno.ENOENT, "it does not exist, or was removed. Put"),
        (errno.EIO, "the disk has failed. Check"),
        (errno.EADDRINUSE, "another program listens there. Choose"),
        (errno.EADDRNOTAVAIL, "does not have the address. Use"),
        (errno.ECONNREFUSED, "Connection refused. Check the address"),
        (errno.EHOSTUNREACH, "No route to host. Check the address"),
        (errno.ETXTBSY, "Text file busy. Check it"),
    ],
)  # fmt: skip
def test_each_refusal_has_a_noun_and_a_remedy(number: int, part: str) -> None:
    error = ExceptionGroup("unhandled errors", [OSError(number, os.strerror(number))])
    message = str(explained(error))
    assert part in message
    assert message.startswith("The system refuses ")
    assert str(explained(OSError(number, os.strerror(number), "/data/x"))).startswith("/data/x: ")


def test_errors_with_numbers_of_their_own() -> None:
    assert "Name or service not known. Check the address" in str(
        explained(socket.gaierror(socket.EAI_NONAME, "Name or service not known"))
    )
    assert "a connection: " in str(explained(ssl.SSLError(1, "wrong version number")))
    assert explained(TimeoutError()) is None


def test_what_is_explained_has_its_traceback_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """The traceback is needed, because a bug may raise OSError, too."""
    with pytest.raises(GatewayError), explaining():
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), "/data/x")
    assert "/data/x: it does not exist" in caplog.text
    assert "Traceback" in caplog.text


async def test_a_deploy_and_a_rollback_on_a_full_disk(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream of a deploy's events has the error, too."""

    def full(*_given: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/secret/folder")

    async with gateway_here(state) as gateway:
        function = await gateway.deploy("def handler(event):\n    return event\n")
        with monkeypatch.context() as patched:
            patched.setattr(Preparation, "run", full)
            error = failure(await gateway.send("def handler(event):\n    return 2\n", name=function.name))
            assert (error["status"], error["message"]) == (
                503,
                "/secret/folder: the disk or its quota is full.",
            )
            folder = state.with_name("code")
            folder.mkdir()
            streamed = await gateway.client.post(
                "/v1/functions", json={"path": str(folder)}, headers={"Accept": "text/event-stream"}
            )
            assert "event: error" in streamed.text
            assert "the disk or its quota is full" in streamed.text
        monkeypatch.setattr(FunctionFolder, "find", full)
        error = failure(await gateway.client.post(f"/v1/functions/{function.name}/rollback"))
        assert error["status"] == 503
        assert "the disk or its quota is full" in error["message"]
        assert "/secret" not in str(error)
        assert await function.answer(1) == 1


@pytest.mark.parametrize(
    "error",
    [OSError(errno.EMFILE, "x"), MemoryError(), RuntimeError("can't start new thread")],
    ids=lambda error: type(error).__name__,
)
async def test_a_refusal_after_a_call_has_run_invites_no_retry_and_before_it_does(
    state: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async def refused(*_given: object) -> None:
        raise error

    async with gateway_here(state) as gateway:
        function = await gateway.deploy("def handler(event):\n    yield event\n")
        path = f"/invoke/{function.name}"
        with monkeypatch.context() as patched:
            patched.setattr(Guard, "find_signer", refused)
            before = await gateway.client.post(path, json=1)
        assert (before.status_code, before.headers["Retry-After"]) == (503, "2")
        for owner, name, headers in (
            (requests, "_collect", {}),
            (IncomingBodies, "unpack", {"Content-Encoding": "gzip"}),
        ):
            with monkeypatch.context() as patched:
                patched.setattr(owner, name, refused)
                body = gzip.compress(b"1") if headers else b"1" * (4 << 20)
                unread = await gateway.client.post(path, content=body, headers=headers)
            assert (unread.status_code, unread.headers["Retry-After"]) == (503, "2")
        monkeypatch.setattr(Invoker, "_stream", refused)
        after = await gateway.client.post(path, json=1)
        assert failure(after)["status"] == 500
        assert "is limited" in failure(after)["message"]
        assert "Retry-After" not in after.headers
        assert after.headers["x-should-retry"] == "false"
