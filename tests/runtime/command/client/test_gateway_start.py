"""Commands wait for a gateway on this machine that is starting, and for no other."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest
from pilotflame.errors import GatewayUnreachable
from pilotflame.runtime.command.client.client import Client
from pilotflame.runtime.command.client.gateway_start import announced_start, wait_for_gateway, wait_for_start
from pilotflame.runtime.ground.settings.state_dir import locked_state_dir


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def test_a_command_waits_for_a_gateway_that_starts(start, run, short_tmp: Path, port: int):
    start("serve", "--port", port, "--state-dir", short_tmp / "late")
    listed = run("list", PILOTFLAME_URL=f"http://127.0.0.1:{port}")
    assert listed.returncode == 0, listed.stderr
    assert f"waiting for a gateway to start at http://127.0.0.1:{port}\n" in listed.stderr


def test_keys_wait_for_a_gateway_that_starts(start, short_tmp: Path, port: int):
    state = short_tmp / "keyed"
    with socket.socket(socket.AF_UNIX) as announcement:
        announcement.bind(f"\0pilotflame/starting/{port}")
        announcement.listen()
        announcement.settimeout(10)
        with locked_state_dir(state):
            process = start(
                "keys", "create", "first", "--scope", "admin", "--state-dir", state, PILOTFLAME_PORT=str(port)
            )
            waiting, _ = announcement.accept()
        waiting.close()
    _, said = process.communicate(timeout=20)
    assert process.returncode == 0, said


def test_a_gateway_that_cannot_start_is_not_waited_for(start, run, served: str, port: int, short_tmp: Path):
    # The gateway of the fixture `served` has this state folder.
    start("serve", "--port", port, "--state-dir", short_tmp / "served")
    failed = run("list", PILOTFLAME_URL=f"http://127.0.0.1:{port}")
    assert failed.returncode == 3
    assert "No gateway answers" in failed.stderr


def test_only_a_gateway_on_this_machine_is_waited_for():
    said: list[str] = []
    with (
        Client("http://gateway.invalid:8600", on_wait=said.append) as client,
        pytest.raises(GatewayUnreachable),
    ):
        client.get("v1", "functions")
    assert said == []


def test_an_announcement_ends_with_its_block(port: int):
    assert not wait_for_start(port)
    with announced_start(port), announced_start(port):
        waited: list[bool] = []
        thread = threading.Thread(target=lambda: waited.append(wait_for_start(port)))
        thread.start()
        # The announcement is still there when this wait has run out of time.
        assert wait_for_start(port, 0.05)
        assert waited == []
    thread.join(10)
    assert waited == [True]
    assert not wait_for_start(port)


def test_a_socket_that_listens_is_not_waited_for():
    with socket.create_server(("127.0.0.1", 0)) as server:
        wait_for_gateway("127.0.0.1", server.getsockname()[1], lambda: pytest.fail("it listens"))


def test_what_begins_to_listen_without_an_announcement_is_found(port: int):
    with socket.socket() as server:
        server.bind(("127.0.0.1", port))
        wait_for_gateway("127.0.0.1", port, server.listen)
        socket.create_connection(("127.0.0.1", port)).close()
