"""The contract with platforms, black box: $PORT, probes, `POST /`, and an end by SIGTERM that drops nothing.

For one function alone and for the gateway, as processes and in containers with a read-only root and no root user.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from containers import PODMAN, made_image, podman, require_podman
from live import GATE_MODULE, LIMIT_S, Gate, events, failure, free_port, home_client, short_folder, until

pytestmark = pytest.mark.timeout(300)

PLAIN = """
import gate, glob, os, time
def setup(context):
    gate.wait("setup")
def handler(event):
    if event == "wait":
        gate.wait("call")
    if event == "orphan":
        leave_an_orphan()
    if event in ("orphan", "zombies"):
        return sum(open(path).read().rpartition(")")[2].split()[:2] == ["Z", "1"] for path in glob.glob("/proc/[0-9]*/stat"))
    print("heard", event)
    return {"echo": event, "user": os.getuid()}
def leave_an_orphan():
    child = os.fork()
    if child == 0:
        parent = os.getpid()
        if os.fork() == 0:
            while os.getppid() == parent:
                time.sleep(0.01)
        os._exit(0)
    os.waitpid(child, 0)
"""
STREAM = """
import gate
def handler(event):
    yield "first"
    gate.wait("stream")
    yield "last"
"""
SERVE = ("-m", "pilotflame.runtime.cli", "serve")
LAME_DUCK_S = 0.5


@dataclass(frozen=True)
class Kind:
    """How the function is served: alone or by a gateway, as a process or in a container."""

    alone: bool
    contained: bool

    def __str__(self) -> str:
        return f"{'alone' if self.alone else 'gateway'}-{'container' if self.contained else 'process'}"


KINDS = [Kind(alone=alone, contained=contained) for alone in (True, False) for contained in (False, True)]


class Instance:
    """A running process or container that serves the function `echo`."""

    def __init__(self, kind: Kind, port: int, process: asyncio.subprocess.Process) -> None:
        self.kind, self.process = kind, process
        self.url = f"http://127.0.0.1:{port}"
        self.client = httpx.AsyncClient(base_url=self.url, timeout=60)

    async def fresh(self, method: str, path: str, **request: object) -> httpx.Response:
        """Send a request on a new connection."""
        async with httpx.AsyncClient(base_url=self.url, timeout=60) as client:
            return await client.request(method, path, **request)  # type: ignore[arg-type]

    async def ready(self) -> int:
        with contextlib.suppress(httpx.TransportError):
            return (await self.fresh("GET", "/readyz")).status_code
        return 0

    async def call(self, event: object) -> httpx.Response:
        return await self.client.post("/" if self.kind.alone else "/invoke/echo", json=event)

    async def refuses_connections(self) -> None:
        async def refused() -> bool:
            try:
                await self.fresh("GET", "/healthz")
            except httpx.ConnectError:
                return True
            except (httpx.ReadError, httpx.RemoteProtocolError):
                # The gateway closed its listening socket before it accepted this connection, or before the request was sent.
                return False
            return False

        await until(refused, "a refused connection")

    async def exit_code(self) -> int:
        async with asyncio.timeout(LIMIT_S):
            return await self.process.wait()


def command(kind: Kind, folder: Path, gate: Gate, variables: dict[str, str], name: str) -> list[str]:
    """Return the command line of an instance."""
    words = [*SERVE, *([str(folder), "--set", f"env.GATE={gate.path}"] if kind.alone else [])]
    if not kind.contained:
        return [sys.executable, *words]
    where = gate.path.parent
    # Run as a user that the image does not know, as some platforms do.
    return [
        *PODMAN, "run", "--rm", "--name", name, "--network", "host", "--ulimit", "nofile=1024:1024",
        "--ulimit", "nproc=1024:1024", "--read-only", "--user", "1000", "-v", f"{where}:{where}",
        *(f"--env={key}={value}" for key, value in variables.items()),
        made_image(), "/usr/local/bin/python", *words,
    ]  # fmt: skip


@contextlib.asynccontextmanager
async def running(kind: Kind, handler: str, gate: Gate, *more: str, **others: str) -> AsyncIterator[Instance]:
    """Run an instance, and yield it once it answers health checks. A function alone is not ready then."""
    if kind.contained:
        require_podman()
    folder, port, name = gate.path.parent / "echo", free_port(), f"pf-standalone-{uuid.uuid4().hex[:8]}"
    folder.mkdir(exist_ok=True)
    (folder / "handler.py").write_text(handler)
    (folder / "gate.py").write_text(GATE_MODULE)
    for path in (gate.path, gate.path.parent):
        path.chmod(0o777)
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PILOTFLAME_")}
    variables = {"PORT": str(port), "PILOTFLAME_LAME_DUCK_S": str(LAME_DUCK_S), **others}
    if not kind.alone:
        variables["PILOTFLAME_STATE_DIR"] = str(gate.path.parent / "state")
    arguments = await asyncio.to_thread(command, kind, folder, gate, variables, name)
    process = await asyncio.create_subprocess_exec(
        *arguments, *more, env={**kept, **variables}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    )
    instance = Instance(kind, port, process)
    try:

        async def alive() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return (await instance.client.get("/healthz")).status_code == 200
            return False

        await until(alive, "an answer to /healthz")
        if not kind.alone:
            order = {"path": str(folder), "overrides": {"env.GATE": str(gate.path)}, "check": False}
            response = await instance.client.post("/v1/functions", json=order)
            assert response.status_code == 201, response.text
        yield instance
    finally:
        await instance.client.aclose()
        if process.returncode is None:
            process.terminate()
            gate.open()
            await process.wait()
        assert process.stdout is not None
        await process.stdout.read()
        if kind.contained:
            names = await asyncio.to_thread(podman, "ps", "-a", "--format", "{{.Names}}")
            assert name not in names.split()


@pytest.fixture
async def gate() -> AsyncIterator[Gate]:
    with short_folder() as folder:
        async with Gate(folder / "gate.sock") as found:
            yield found


async def meets_the_contract_alone(instance: Instance, gate: Gate) -> None:
    """Check what a platform sees of a function alone, from its start until it is ready, and what it refuses."""
    first = asyncio.create_task(instance.call({"n": 1}))
    setup = await gate.next("setup")
    response = await instance.fresh("GET", "/readyz")
    assert (response.status_code, response.json()) == (503, {"status": "starting"})
    assert not first.done()
    setup.go()
    answer = (await first).json()
    assert answer == {"echo": {"n": 1}, "user": 1000 if instance.kind.contained else os.getuid()}
    assert await instance.ready() == 200
    named = await instance.client.post("/invoke/echo", json=2)
    assert named.json()["echo"] == 2
    assert 'function="echo"' in (await instance.client.get("/metrics")).text
    for method, path in (("POST", "/v1/functions"), ("DELETE", "/v1/functions/echo"), ("GET", "/v1/keys")):
        refused = failure(await instance.client.request(method, path, json={"path": "/"}))
        assert (refused["status"], refused["type"]) == (403, "forbidden")
    # Callers at the platform's address are not the owner, so they may not read usage, logs, or the state of functions.
    one = "/v1/functions/echo"
    for path in ("/v1/usage", "/v1/console", "/v1/logs", "/v1/functions", one, f"{one}/decisions", f"{one}/load", f"{one}/arrivals"):  # fmt: skip
        refused = failure(await instance.client.get(path))
        assert (path, refused["status"], refused["type"]) == (path, 403, "forbidden")
    assert (await instance.client.get("/")).status_code == 200
    if instance.kind.contained:
        await instance.call("orphan")

        async def reaped() -> bool:
            return bool((await instance.call("zombies")).json() == 0)

        await until(reaped, "the end of an orphan")


@pytest.mark.parametrize("kind", KINDS, ids=str)
async def test_the_contract_and_an_end_that_drops_no_request(kind: Kind, gate: Gate) -> None:
    # Serve for 4 s after SIGTERM, so that the clients see the 503 even on a busy machine.
    async with running(kind, PLAIN, gate, PILOTFLAME_LAME_DUCK_S="4") as instance:
        if kind.alone:
            await meets_the_contract_alone(instance, gate)
        call = asyncio.create_task(instance.call("wait"))
        await gate.next("call") if kind.alone else (await gate.next("setup")).go()
        idle = httpx.AsyncClient(base_url=instance.url)
        assert (await idle.get("/readyz")).status_code == 200
        instance.process.send_signal(signal.SIGTERM)

        async def sent_away() -> bool:
            return await instance.ready() == 503

        await until(sent_away, "503 of /readyz")
        # Load balancers that have not yet seen the 503 still send requests, on old and on new connections.
        path = "/" if kind.alone else "/invoke/echo"
        clients = (instance.fresh, idle.request)
        late = [asyncio.create_task(client("POST", path, json=n)) for n, client in enumerate(clients)]
        await instance.refuses_connections()
        assert not call.done()
        gate.open()
        assert (await call).json()["echo"] == "wait"
        for n, response in enumerate(await asyncio.gather(*late)):
            assert (response.status_code, response.headers["Connection"]) == (200, "close")
            assert response.json()["echo"] == n
        assert await instance.exit_code() == 0
        await idle.aclose()
        assert instance.process.stdout is not None
        printed = await instance.process.stdout.read()
        if kind.alone:
            assert b"heard 2\n" in printed
            assert b"has drained and ended\n" in printed


@pytest.mark.parametrize("kind", KINDS[:2], ids=str)
async def test_sigterm_ends_no_stream(kind: Kind, gate: Gate) -> None:
    async with running(kind, STREAM, gate) as instance:
        path = "/" if kind.alone else "/invoke/echo"
        async with instance.client.stream("POST", path, json=None) as response:
            pieces = response.aiter_text()
            text = await anext(pieces)
            arrival = await gate.next("stream")
            instance.process.send_signal(signal.SIGTERM)
            await instance.refuses_connections()
            arrival.go()
            text += "".join([piece async for piece in pieces])
        assert [name for _, name, _ in events(text)] == ["output", "output", "completed"]
        assert await instance.exit_code() == 0


async def test_calls_wait_for_the_start_within_limits(gate: Gate) -> None:
    # A function alone already runs in its image, so image.name has no effect.
    given = ("max_queue=1", "hold_s=0.3", "image.name=localhost/none", "resources.memory_mb=64")
    limits = [word for setting in given for word in ("--set", setting)]
    async with running(KINDS[0], PLAIN, gate, *limits) as instance:
        patient = {"X-Scale-Up-Timeout": "60"}
        first = asyncio.create_task(
            instance.fresh("POST", "/predictions", json={"input": 1}, headers=patient)
        )
        setup = await gate.next("setup")

        async def full() -> bool:
            error = failure(await instance.call(2))
            assert (error["status"], error["type"]) in {(503, "activation_timeout"), (429, "queue_full")}
            return error["status"] == 429

        await until(full, "429 while another call waits")
        assert (await instance.fresh("GET", "/predictions/none")).status_code == 404
        setup.go()
        assert (await first).json()["output"]["echo"] == 1
        event = {"ce-id": "1", "ce-source": "/test", "ce-type": "t", "ce-specversion": "1.0"}
        response = await instance.client.post("/", json=3, headers=event)
        assert response.json()["echo"] == 3
        # A function alone also refuses a foreign host name, because a web page can make it resolve to this machine.
        refused = await instance.client.post("/", json=4, headers={"Host": "evil.example"})
        assert failure(refused)["status"] == 403


async def test_a_function_alone_with_keys(gate: Gate) -> None:
    state = gate.path.parent / "kept"
    gate.open()
    closed = {"PILOTFLAME_AUTH": "always", "PILOTFLAME_STATE_DIR": str(state)}
    async with running(KINDS[0], PLAIN, gate, **closed) as instance:
        assert failure(await instance.call(1))["status"] == 401
        assert (await instance.client.get("/healthz")).status_code == 200
        tokens = {}
        async with home_client(state) as owner:
            for function in ("echo", "other"):
                made = await owner.post("/v1/keys", json={"name": function, "functions": [function]})
                tokens[function] = {"Authorization": f"Bearer {made.json()['key']}"}
        for _ in range(2):
            response = await instance.client.post("/", json=1, headers=tokens["echo"])
            assert response.json()["echo"] == 1
            other = failure(await instance.client.post("/", json=1, headers=tokens["other"]))
            assert (other["status"], other["type"]) == (404, "unknown_function")


async def test_a_kept_state_folder_serves_no_other_function(gate: Gate) -> None:
    gate.open()
    kept = {"PILOTFLAME_STATE_DIR": str(gate.path.parent / "kept"), "PILOTFLAME_LAME_DUCK_S": "0"}
    async with running(KINDS[0], PLAIN, gate, "--name", "first", **kept) as instance:
        assert (await instance.call(1)).status_code == 200
    async with running(KINDS[0], PLAIN, gate, "--name", "second", **kept) as instance:
        assert (await instance.call(1)).status_code == 200
        refused = failure(await instance.client.post("/invoke/first", json=1))
        assert (refused["status"], refused["type"]) == (404, "unknown_function")
        async with home_client(Path(kept["PILOTFLAME_STATE_DIR"])) as owner:
            listed = (await owner.get("/v1/functions")).json()["functions"]
        assert [one["name"] for one in listed] == ["second"]


async def test_a_platform_warms_a_function_alone(gate: Gate) -> None:
    """The hook needs no key. Like a call, it waits for the first deploy."""
    async with running(KINDS[0], PLAIN, gate) as instance:
        hook = {"workers": 2, "wait_s": 60, "cause": "poststart"}
        warming = asyncio.create_task(instance.client.post("/v2/echo/warmup", json=hook))
        await gate.next("setup")
        gate.open()
        assert (await warming).json() == {"workers": {"ready": 2, "parked": 0, "starting": 0, "draining": 0}}


async def test_sigterm_during_the_start(gate: Gate, capfd: pytest.CaptureFixture[str]) -> None:
    async with running(KINDS[0], PLAIN, gate, PILOTFLAME_LAME_DUCK_S="0") as instance:
        waiting = asyncio.create_task(instance.call(1))
        await gate.next("setup")
        instance.process.send_signal(signal.SIGTERM)
        assert failure(await waiting)["status"] == 503
        assert await instance.exit_code() == 0
    assert "Traceback" not in capfd.readouterr().err


async def test_a_function_that_cannot_start_ends_the_process(
    gate: Gate, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = "import gate\ngate.wait('import')\nraise OSError('no weights here')"
    async with running(KINDS[0], broken, gate) as instance:
        waiting = asyncio.create_task(instance.call(1))
        (await gate.next("import")).go()
        assert failure(await waiting)["status"] == 503
        assert await instance.exit_code() == 1
    assert "OSError: no weights here" in capfd.readouterr().err


def test_what_names_no_function_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, *SERVE, "--set", "scale.max=2"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "FOLDER" in done.stderr
    done = subprocess.run(
        [sys.executable, *SERVE, "--json"], capture_output=True, text=True, check=False,
        env={**os.environ, "PORT": "http"},
    )  # fmt: skip
    assert done.returncode == 1
    assert "port" in json.loads(done.stderr)["error"]["message"]
