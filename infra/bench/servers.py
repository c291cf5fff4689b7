"""Servers under measurement: context managers that start a server, wait until it answers, and end all its processes."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import process_tree
import psutil

HERE = Path(__file__).parent
_START_S = 60.0
_STOP_S = 10.0
# A gateway with settings that the command line does not have.
_GATEWAY = """
import json, sys
from pilotflame.runtime.main import run
from pilotflame.runtime.ground.settings.gateway_settings import GatewaySettings

run(
    GatewaySettings(**json.loads(sys.argv[1])),
    on_listening=lambda url: print(json.dumps({"url": url}), flush=True),
)
"""


class ServerError(Exception):
    """A server did not start, answered wrongly, or did not end."""


class Server:
    """One server process and its children: start, wait until it listens, stop."""

    def __init__(
        self, name: str, command: list[str], log: Path, env: Mapping[str, str] | None = None, mark: str = ""
    ) -> None:
        self.name = name
        self.url = ""
        self.state = ""
        """The state folder, if the server is a gateway."""
        self.left_over: list[str] = []
        """The processes that were still alive after the server's own end."""
        self._log = log
        self._mark = mark or uuid.uuid4().hex
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **(env or {}), process_tree.MARK: self._mark},
                start_new_session=True,
                preexec_fn=process_tree.end_with_parent,  # noqa: PLW1509  it takes no lock
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def cpu_s(self) -> float:
        """Return the CPU time of the server and all its children so far."""
        return process_tree.cpu_s(self.pid)

    def pss_mb(self) -> float:
        """Return the memory of the server and all its children. Shared pages count once."""
        return process_tree.pss_mb(process_tree.tree(self.pid))

    def pause(self) -> None:
        """Suspend all processes of the server, so that they use no CPU time while another subject is measured."""
        self._each(psutil.Process.suspend)

    def resume(self) -> None:
        """Resume the processes of a paused server."""
        self._each(psutil.Process.resume)

    def _each(self, act: Callable[[psutil.Process], None]) -> None:
        for process in {*process_tree.tree(self.pid), *process_tree.session(self.pid)}:
            with contextlib.suppress(psutil.NoSuchProcess):
                act(process)

    def wait_line(self) -> None:
        """Wait for the JSON line with the `url` that the server prints when it listens."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], _START_S)
        line = self._process.stdout.readline() if ready else b""
        if not line:
            raise ServerError(f"{self.name} printed no address: {self.errors()}")
        self.url = str(json.loads(line)["url"])

    def wait_answer(self, url: str, path: str, body: bytes, start_s: float = _START_S) -> None:
        """Wait for the first 200, if the server does not report when it listens."""
        deadline = time.monotonic() + start_s
        while not _answers(url + path, body):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise ServerError(f"{self.name} does not answer: {self.errors()}")
            time.sleep(0.02)
        self.url = url

    def errors(self) -> str:
        """Return the end of what the server wrote to stderr."""
        return self._log.read_text(errors="replace")[-2000:]

    def end_alone(self, number: signal.Signals, timeout_s: float) -> int:
        """Send a signal to the server alone. Return its exit code, or -9 if it had to be killed after `timeout_s`."""
        self._process.send_signal(number)
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        # `communicate` would wait for children that keep the pipe open.
        self._process.stdout.close()  # type: ignore[union-attr]
        return code

    def stop(self) -> None:
        """Send SIGTERM to the server, and then SIGKILL to each process of its tree, session and mark that is left."""
        self.resume()
        known = process_tree.tree(self.pid)
        if self.end_alone(signal.SIGTERM, _STOP_S) == -signal.SIGKILL:
            self.left_over.append(f"{self.pid} {self.name} itself")
        rest = {*known, *process_tree.session(self.pid), *process_tree.marked(self._mark)}
        # Wait a moment: the death of the parent ends its children (PDEATHSIG, a closed pipe), but not in the
        # same instant.
        psutil.wait_procs(rest, timeout=1.0)
        alive = [process for process in rest if process_tree.alive(process)]
        self.left_over += [str(process.pid) for process in alive]
        if stuck := process_tree.end(alive, _STOP_S):
            raise ServerError(f"{self.name} left processes that cannot be ended: {stuck}")


def _answers(url: str, body: bytes) -> bool:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    # An HTTP error is an OSError too.
    with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=5) as answer:
        return bool(answer.status == 200)
    return False


@contextmanager
def running(name: str, command: list[str], env: Mapping[str, str] | None = None) -> Iterator[Server]:
    """Run a server during the block. The block must wait until the server listens."""
    with tempfile.NamedTemporaryFile(prefix=f"{name}-", suffix=".log") as log:
        server = Server(name, command, Path(log.name), env)
        try:
            yield server
        finally:
            server.stop()


def free_port() -> int:
    """Return a port of loopback that was free a moment ago, for a server that cannot choose one itself."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def start_echo() -> Iterator[Server]:
    """Run the floor of an HTTP answer: aiohttp on uvloop, which returns the body. `POST /`."""
    with running("echo", [sys.executable, str(HERE / "echo_server.py")]) as server:
        server.wait_line()
        yield server


@contextmanager
def start_litserve(
    options: Mapping[str, Any], body: bytes, env: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Run LitServe with the options of litserve_app.py. `POST /predict`."""
    port = free_port()
    command = [sys.executable, str(HERE / "litserve_app.py"), json.dumps({**options, "port": port})]
    with running("litserve", command, env) as server:
        server.wait_answer(f"http://127.0.0.1:{port}", "/predict", body)
        yield server


@contextmanager
def start_pilotflame(
    env: Mapping[str, str] | None = None, python: str | Path = sys.executable, state: Path | None = None
) -> Iterator[Server]:
    """Run a gateway of the pilotflame that this interpreter imports. `POST /invoke/{function}`."""
    with tempfile.TemporaryDirectory(prefix="pilotflame-bench-") as made:
        folder = str(state or made)
        # -P: the metadata of a build in the present folder would hide that of the installed package.
        command = [str(python), "-P", "-m", "pilotflame.runtime.cli", "serve"]
        command += ["--port", "0", "--state-dir", folder, "--json"]
        with running("pilotflame", command, env) as server:
            server.wait_line()
            server.state = folder
            yield server


def gateway_command(**settings: Any) -> list[str]:
    """Return the command of a gateway with these fields of `GatewaySettings`. It prints its address as JSON."""
    return [sys.executable, "-c", _GATEWAY, json.dumps({"port": 0, **settings})]
