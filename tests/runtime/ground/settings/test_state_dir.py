"""The state folder is private, and used by one gateway at a time."""

import os
import signal
import stat
from pathlib import Path

import pytest
from live import gateway_here
from pilotflame.errors import GatewayError
from pilotflame.runtime.ground.settings.state_dir import locked_state_dir


def test_it_is_made_and_private(tmp_path: Path) -> None:
    with locked_state_dir(tmp_path / "a" / "state") as state:
        assert stat.S_IMODE(state.stat().st_mode) == 0o700
        assert (state / "lock").read_text() == f"{os.getpid()}\n"


def test_a_folder_that_somebody_else_has_made_becomes_private(tmp_path: Path) -> None:
    (made := tmp_path / "state").mkdir(mode=0o755)
    made.chmod(0o2777)
    with locked_state_dir(made) as state:
        assert stat.S_IMODE(state.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o2770, 0o777], ids=oct)
def test_a_folder_of_another_owner_is_used_and_others_rights_are_told(
    tmp_path: Path, mode: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    (made := tmp_path / "state").mkdir()
    made.chmod(mode)
    monkeypatch.setattr(Path, "chmod", refuse)
    with locked_state_dir(made):
        pass
    assert ("chmod o-rwx" in caplog.text) == bool(mode & stat.S_IRWXO)


async def test_other_users_can_read_no_file_in_a_folder_of_another_owner(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *_: object, **__: object) -> None:
        if path == state:
            raise PermissionError(1, "Operation not permitted")

    def readable(folder: Path) -> list[Path]:
        """Return the files that other users can reach and read."""
        found = [path for path in folder.iterdir() if path.stat().st_mode & stat.S_IRWXO]
        return [each for path in found for each in (readable(path) if path.is_dir() else [path])]

    state.mkdir()
    state.chmod(0o777)
    monkeypatch.setattr(Path, "chmod", refuse)
    async with gateway_here(state) as gateway:
        function = await gateway.deploy("def handler(event):\n    return event\n")
        assert (await gateway.client.post(f"/v2/{function.name}/run", json={"input": 1})).status_code == 200
        assert (state / "jobs.sqlite3-wal").exists()
        assert (state / "usage.sqlite3").exists()
        assert readable(state) == []


def test_a_second_gateway_is_told_which_process_has_it(tmp_path: Path) -> None:
    with locked_state_dir(tmp_path):
        with pytest.raises(GatewayError) as caught, locked_state_dir(tmp_path):
            pass
        assert f"process {os.getpid()}" in caught.value.message
        assert caught.value.details == {"pid": os.getpid()}
        assert caught.value.remedy
    with locked_state_dir(tmp_path):
        pass


def test_a_holder_that_wrote_no_pid_is_still_refused(tmp_path: Path) -> None:
    with locked_state_dir(tmp_path):
        (tmp_path / "lock").write_bytes(b"\xff")
        with pytest.raises(GatewayError, match="Another gateway"), locked_state_dir(tmp_path):
            pass


def test_a_killed_gateway_leaves_no_lock(tmp_path: Path) -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with locked_state_dir(tmp_path):
            os.write(write, b"x")
            signal.pause()
    assert os.read(read, 1) == b"x"
    os.close(read)
    os.close(write)
    with pytest.raises(GatewayError, match=f"process {child}"), locked_state_dir(tmp_path):
        pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with locked_state_dir(tmp_path):
        pass


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(GatewayError, match="cannot be used: Not a directory"),
        locked_state_dir(tmp_path / "file" / "state"),
    ):
        pass
