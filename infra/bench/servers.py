"""The contestants: context managers that start a server, wait until it answers, and leave nothing behind."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

import process_tree
import psutil

_HERE = Path(__file__).parent
_START_S = 60.0
_STOP_S = 10.0


class ServerError(Exception):
    """A contestant did not start, or did not end."""


class Server:
    """One server process and its children: start, wait until it listens, stop."""

    def __init__(self, name: str, command: list[str], log: Path, env: dict[str, str] | None = None) -> None:
        self.name = name
        self.url = ""
        self.state = ""  # our gateway's state folder
        self.left_over: list[str] = []  # descendants that outlived the server's own end and had to be killed
        self._log = log
        self._mark = uuid.uuid4().hex
        with log.open("wb") as errors:
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
        """CPU time of the server and all its children so far."""
        return process_tree.cpu_s(self.pid)

    def pause(self) -> None:
        """Suspend all processes of the server, so that they use no CPU time while another contestant is measured."""
        for process in {*process_tree.tree(self.pid), *process_tree.session(self.pid)}:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()

    def resume(self) -> None:
        """Resume the processes of a paused server."""
        for process in {*process_tree.tree(self.pid), *process_tree.session(self.pid)}:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    def wait_line(self, timeout_s: float = _START_S) -> None:
        """Wait for the JSON line with the `url` that the server prints when it listens."""
        assert self._process.stdout is not None
        deadline, data = time.monotonic() + timeout_s, b""
        descriptor = self._process.stdout.fileno()
        while b"\n" not in data:
            ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(descriptor, 4096) if ready else b""
            if not chunk:
                raise ServerError(f"{self.name} printed no address: {data!r} {self.errors()}")
            data += chunk
            data = data if data.lstrip().startswith(b"{") else data.partition(b"\n")[2]
        self.url = str(json.loads(data.partition(b"\n")[0])["url"])

    def wait_answer(self, url: str, path: str, body: bytes, timeout_s: float = _START_S) -> None:
        """Wait for the first 200, for a server that does not say when it listens."""
        deadline = time.monotonic() + timeout_s
        while not _answers(url, path, body):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise ServerError(f"{self.name} does not answer: {self.errors()}")
            time.sleep(0.02)
        self.url = url

    def errors(self) -> str:
        """The end of what it wrote to stderr."""
        return self._log.read_text(errors="replace")[-2000:]

    def stop(self) -> None:
        """Send TERM to the server, and then KILL to each process of its tree, its session and its mark that is left."""
        self.resume()
        known = process_tree.tree(self.pid)
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.left_over.append(f"{self.pid} {self.name} itself")
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()  # type: ignore[union-attr]
        self._end_the_rest(known)

    def _end_the_rest(self, known: list[psutil.Process]) -> None:
        rest = {*known, *process_tree.session(self.pid), *process_tree.marked(self._mark)}
        # A child told by its parent's death (PDEATHSIG, a closed pipe) is given a moment to follow it.
        psutil.wait_procs(rest, timeout=1.0)
        alive = [process for process in rest if process_tree.alive(process)]
        self.left_over += [str(process.pid) for process in alive]
        stuck = process_tree.end(alive, _STOP_S)
        if stuck:
            raise ServerError(f"{self.name} left processes that cannot be ended: {stuck}")


def _answers(url: str, path: str, body: bytes) -> bool:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=5)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def free_port() -> int:
    """Return a free port of the loopback interface."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def running(name: str, command: list[str], env: dict[str, str] | None = None) -> Iterator[Server]:
    """A server from its command to its end; it is still to be waited for."""
    with tempfile.NamedTemporaryFile(prefix=f"{name}-", suffix=".log") as log:
        server = Server(name, command, Path(log.name), env)
        try:
            yield server
        finally:
            server.stop()


@contextmanager
def start_echo() -> Iterator[Server]:
    """The floor: aiohttp on uvloop, body in, body out. `POST /`."""
    with running("echo", [sys.executable, str(_HERE / "echo_server.py")]) as server:
        server.wait_line()
        yield server


@dataclass(frozen=True)
class LitServeSettings:
    """The options of LitServe that matter to a handler with next to no work."""

    workers_per_device: int = 1
    num_api_servers: int = 1
    fast_queue: bool = False
    max_batch_size: int = 1
    batch_timeout_s: float = 0.0
    enable_async: bool = False

    def __str__(self) -> str:
        batch = (
            f", batch {self.max_batch_size}/{self.batch_timeout_s * 1e3:g} ms"
            if self.max_batch_size > 1
            else ""
        )
        queue = "fast_queue" if self.fast_queue else "queue"
        loop = ", async" if self.enable_async else ""
        return f"{self.workers_per_device} workers, {self.num_api_servers} api servers, {queue}{batch}{loop}"


@contextmanager
def start_litserve(settings: LitServeSettings | None = None) -> Iterator[Server]:
    """LitServe with our hello handler's work. `POST /predict`."""
    port = free_port()
    wire = json.dumps({**asdict(settings or LitServeSettings()), "port": port})
    with running("litserve", [sys.executable, str(_HERE / "litserve_server.py"), wire]) as server:
        server.wait_answer(f"http://127.0.0.1:{port}", "/predict", b'{"name": "x"}')
        yield server


@contextmanager
def start_pilotflame(
    env: dict[str, str] | None = None, python: str | Path = sys.executable
) -> Iterator[Server]:
    """Start a gateway of ours with the pilotflame that this interpreter imports. `POST /invoke/hello`."""
    with tempfile.TemporaryDirectory(prefix="pilotflame-bench-") as state:
        command = [str(python), "-m", "pilotflame.runtime.cli", "serve"]
        command += ["--port", "0", "--state-dir", state, "--json"]
        with running("pilotflame", command, env) as server:
            server.wait_line()
            server.state = state
            yield server
