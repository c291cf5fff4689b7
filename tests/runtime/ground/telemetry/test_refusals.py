"""What a user reads when the operating system refuses something: a noun and a remedy."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from live import short_folder
from pilotflame.errors import GatewayError, LauncherError, RequirementsError
from pilotflame.runtime.command.client.exit_codes import exit_code_of
from pilotflame.runtime.front.listening.sockets import bind
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
    assert (error["type"], "ulimit -v" in error["message"]) == ("system_error", True)

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
        await _spawn_base(str(tmp_path / "moved" / "bin" / "python"), {})
    assert "Start the gateway again" in caught.value.remedy
    monkeypatch.setattr(sys, "executable", str(tmp_path / "moved" / "bin" / "python"))
    with pytest.raises(RequirementsError, match="was moved or removed") as unmet:
        check_requirements("nothing-of-this-name>=2")
    assert "Start the gateway again" in unmet.value.remedy


def test_test_in_a_long_temporary_folder(tmp_path: Path) -> None:
    """Jobs of a cluster have such folders. The path of a socket is at most 107 bytes long."""
    folder = tmp_path / "echo"
    folder.mkdir()
    (folder / "handler.py").write_text("def handler(event):\n    return event\n")
    (folder / "test_input.json").write_text("7")
    with short_folder() as short:
        deep = short / ("job" * 40)
        deep.mkdir()
        done = subprocess.run(
            [*COMMAND, "test", folder],
            env={**os.environ, "TMPDIR": str(deep)},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert "TMPDIR" in done.stderr
