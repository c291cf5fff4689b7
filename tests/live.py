"""Real gateways for tests, functions deployed to them, and gates at which handlers wait for the test.

Tests wait for events, each wait with a time limit of its own, instead of sleeping.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Self

import httpx
from pilotflame.runtime.calls.link.worker_spec import WorkerSpec
from pilotflame.runtime.ground.access.control_socket import find_control_socket
from pilotflame.runtime.ground.settings.gateway_settings import GatewaySettings
from pilotflame.runtime.node.functions.revisions import Revisions
from pilotflame.runtime.startup.server import Server, serve
from pilotflame.snapshot.caching.memory import unmount
from pilotflame.snapshot.caching.node import node_tiers

LIMIT_S = float(os.environ.get("PILOTFLAME_TEST_LIMIT_S", "30"))
CALL_LIMIT_S = 100.0

# This module is deployed with each handler as `gate.py`. It sends a word to the test. `wait` then blocks until the test calls `Arrival.go`.
GATE_MODULE = """
import asyncio, os, socket

ADDRESS = os.environ.get("GATE", "")

def _say(word):
    link = socket.socket(socket.AF_UNIX)
    link.connect(ADDRESS or os.environ["GATE"])
    link.sendall(f"{os.getpid()} {word}\\n".encode())
    return link

def say(word):
    _say(word).close()

def wait(word=""):
    with _say(word) as link:
        link.recv(1)

async def wait_async(word=""):
    reader, writer = await asyncio.open_unix_connection(os.environ["GATE"])
    try:
        writer.write(f"{os.getpid()} {word}\\n".encode())
        await reader.read(1)
    finally:
        writer.close()
"""

# The policy of an API key with which processes may be deployed.
TRUSTED = {"kind": "trusted"}

# A gateway in a separate process, for tests of signals and /proc.
PROCESS = """
import json, sys
from pathlib import Path
from pilotflame.runtime.main import run
from pilotflame.runtime.ground.settings.gateway_settings import GatewaySettings

settings = json.loads(sys.argv[1])
folder = settings.pop("watch", None)
run(
    GatewaySettings(**settings),
    on_listening=lambda url: print(url, flush=True),
    folder=Path(folder) if folder else None,
)
"""


async def until(condition: Callable[[], Awaitable[object]], what: str) -> None:
    """Poll until `condition` holds. Fail, naming `what`, if it does not within the limit."""
    try:
        async with asyncio.timeout(LIMIT_S):
            while not await condition():
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"never came: {what}") from None


async def gone(pid: int) -> None:
    """Wait until a process has ended; it need not be a child of this one."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(descriptor, ended.set)
    try:
        async with asyncio.timeout(LIMIT_S):
            await ended.wait()
    finally:
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)


class Arrival:
    """A handler that has sent a word to the gate."""

    def __init__(self, line: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pid, _, self.word = line.rstrip("\n").partition(" ")
        self.pid = int(pid)
        self._reader, self._writer = reader, writer

    def go(self) -> None:
        # A closed writer means that the process has died.
        if not self._writer.is_closing():
            self._writer.write(b"x")

    def close(self) -> None:
        self._writer.close()

    async def left(self) -> None:
        """Wait until the handler has continued, or its process has died."""
        async with asyncio.timeout(LIMIT_S):
            await self._reader.read()


WAITS_ASYNC = """
import asyncio, gate
async def handler(event):
    try:
        await gate.wait_async("begun")
    except asyncio.CancelledError:
        gate.say("cancelled")
        raise
    return event
"""
"""The source of a handler that waits at a Gate, and says so if it is cancelled."""


class Gate:
    """A unix socket at which handlers report to the test and wait for it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.arrived: list[Arrival] = []
        self._waiting: asyncio.Queue[Arrival] = asyncio.Queue()
        self._open = False

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._meet, self.path)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.open()
        self._server.close()
        for arrival in self.arrived:
            arrival.close()

    async def next(self, word: str | None = None, limit_s: float = LIMIT_S) -> Arrival:
        """Return the next arrival, or the next that says `word`; others are skipped."""
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    arrival = await self._waiting.get()
                    if word in (None, arrival.word):
                        return arrival
        except TimeoutError:
            heard = [arrival.word for arrival in self.arrived]
            raise AssertionError(f"no handler arrived at the gate with {word!r}; before: {heard}") from None

    def open(self) -> None:
        """Let all waiting handlers continue, and all later ones."""
        self._open = True
        for arrival in self.arrived:
            arrival.go()

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # An empty line: the handler died or was cancelled before it sent a word.
        if not (line := await reader.readline()):
            writer.close()
            return
        arrival = Arrival(line.decode(), reader, writer)
        self.arrived.append(arrival)
        self._waiting.put_nowait(arrival)
        if self._open:
            arrival.go()


class Function:
    """A deployed function."""

    def __init__(self, name: str, client: httpx.AsyncClient, described: dict[str, Any]) -> None:
        self.name = name
        self.client = client
        self.described = described

    @property
    def path(self) -> str:
        return f"/invoke/{self.name}"

    async def call(self, event: Any = None, **headers: str) -> httpx.Response:
        """Invoke the function. In the names of headers, _ stands for -."""
        named = {key.replace("_", "-"): value for key, value in headers.items()}
        # Without this limit a call could wait forever: a hanging stream sends comments, so httpx does not
        # time out, and uvloop swallows the exception of pytest-timeout.
        async with asyncio.timeout(CALL_LIMIT_S):
            return await self.client.post(self.path, json=event, headers=named)

    async def answer(self, event: Any = None, **headers: str) -> Any:
        """Return the answer of an invocation that must succeed."""
        response = await self.call(event, **headers)
        assert response.status_code == 200, response.text
        return response.json()

    async def error(self, event: Any = None, **headers: str) -> dict[str, Any]:
        """Return the typed error of an invocation that must fail, with its status."""
        return failure(await self.call(event, **headers))

    async def status(self, *, memory: bool = False) -> dict[str, Any]:
        response = await self.client.get(
            f"/v1/functions/{self.name}", params={"memory": "1"} if memory else {}
        )
        assert response.status_code == 200, response.text
        return dict(response.json())

    async def pids(self, role: str) -> list[int]:
        """Return the pids of the function's processes with this role: "worker", "standby" or "zygote"."""
        rows = (await self.status(memory=True))["processes"]
        return [row["pid"] for row in rows if row["role"] == role]

    async def settled(self, **wanted: Any) -> dict[str, Any]:
        """Wait until the counts of workers (0 unless given) and all other values of the status are exactly as wanted."""
        counts = {"ready": 0, "parked": 0, "starting": 0, "draining": 0} | {
            key: wanted.pop(key) for key in ("ready", "parked", "starting", "draining") if key in wanted
        }
        found: dict[str, Any] = {}

        async def so() -> bool:
            found.update(await self.status())
            return found["workers"] == counts and all(found[key] == value for key, value in wanted.items())

        await until(so, f"{self.name} with {counts} {wanted}")
        return found

    async def lines(self, count: int = 1000) -> list[dict[str, Any]]:
        response = await self.client.get(f"/v1/functions/{self.name}/logs", params={"lines": count})
        return [json.loads(line) for line in response.text.splitlines()]

    async def logged(self, text: str) -> dict[str, Any]:
        """Return the first log line that contains `text`, now or later."""
        query = {"follow": "1", "lines": "1000"}
        async with (
            asyncio.timeout(LIMIT_S),
            self.client.stream("GET", f"/v1/functions/{self.name}/logs", params=query) as response,
        ):
            async for line in response.aiter_lines():
                if text in line:
                    return dict(json.loads(line))
        raise AssertionError(f"the log ended without {text!r}")


def failure(response: httpx.Response) -> dict[str, Any]:
    """Return the typed error of a response that must carry one; `status` is its HTTP status."""
    assert response.status_code >= 400, response.text
    error = response.json()["error"]
    assert error["type"]
    assert error["message"]
    return {"status": response.status_code, "details": {}, **error}


def events(text: str) -> list[tuple[str, str, Any]]:
    """Return (id, event, data) of each server-sent event."""
    found = []
    for block in text.strip().split("\n\n"):
        if not block.startswith(":"):
            fields = dict(line.split(": ", 1) for line in block.splitlines())
            found.append((fields["id"], fields["event"], json.loads(fields["data"])))
    return found


def home_client(state: Path) -> httpx.AsyncClient:
    """Return a client on the control socket of the gateway with this state folder. It needs no API key."""
    found = find_control_socket(state)
    assert found is not None, state
    transport = httpx.AsyncHTTPTransport(uds=str(found.path))
    return httpx.AsyncClient(base_url="http://home", headers=found.headers, transport=transport, timeout=60)


class Gateway:
    """A gateway at `url`: in this process (`server`) or in another one (`process`)."""

    _numbers = itertools.count(1)

    def __init__(self, url: str, state: Path, *, keep_bases: bool = False) -> None:
        self.url = url
        self.state = state
        self.keeps_bases = keep_bases
        self.client = httpx.AsyncClient(base_url=url, timeout=60, limits=httpx.Limits(max_connections=None))
        self.server: Server | None = None
        self.process: asyncio.subprocess.Process | None = None
        self._kept: dict[tuple[str, tuple[str, ...]], WorkerSpec] = {}

    @property
    def address(self) -> tuple[str, int]:
        parts = httpx.URL(self.url)
        return parts.host, parts.port or 0

    async def send(
        self,
        handler: str | None,
        settings: Mapping[str, Any] | None = None,
        *,
        files: Mapping[str, str] | None = None,
        name: str = "",
        gate: Gate | None = None,
        check: bool = True,
    ) -> httpx.Response:
        """Deploy a folder with `handler` and `files`; return the response, also if it is an error."""
        overrides = dict(settings or {}) | {"name": name or f"f{next(self._numbers)}"}
        if gate is not None:
            overrides["env.GATE"] = str(gate.path)
        with tempfile.TemporaryDirectory(prefix="pf-fn-") as folder:
            sources = {"gate.py": GATE_MODULE, **(files or {})}
            if handler is not None:
                sources["handler.py"] = handler
            for file, text in sources.items():
                path = Path(folder) / file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            order = {"path": folder, "overrides": overrides, "check": check}
            return await self.client.post("/v1/functions", json=order)

    def at_home(self) -> httpx.AsyncClient:
        """Return a client on the control socket, which needs no API key."""
        return home_client(self.state)

    async def deploy(
        self, handler: str | None, settings: Mapping[str, Any] | None = None, **how: Any
    ) -> Function:
        """Deploy a function that must be accepted."""
        response = await self.send(handler, settings, **how)
        assert response.status_code == 201, response.text
        function = self.function(response.json()["name"], response.json())
        if self.keeps_bases and self.server is not None:
            await self.keep_base(self.server.node.revisions, function.name)
        return function

    async def keep_base(self, revisions: Revisions, name: str) -> None:
        """Let the base that this function was forked from run as long as the gateway: starting one takes 0.25 s."""
        spec = revisions.functions.live(name).spec
        if spec.image or (kept := (spec.python, spec.preload)) in self._kept:
            return
        # The launcher identifies specs by object identity, and no code makes it forget this copy.
        self._kept[kept] = spec.model_copy()
        await revisions.launcher.prepare(self._kept[kept])

    def function(self, name: str, described: dict[str, Any] | None = None) -> Function:
        return Function(name, self.client, described or {})


def give_memory_back(folder: Path) -> None:
    """Remove from shared memory the caches whose folder is in `folder`. Fetchers that were killed have left them.

    Leave other caches. They may belong to running gateways of other test processes or of the user.
    """
    for parent, _, files in os.walk(folder):
        # A folder with a file `lock` is the folder of a cache.
        for tier in node_tiers(Path(parent)) if "lock" in files else ():
            if tier.kind == "tmpfs":
                unmount(tier.root)
                shutil.rmtree(tier.root, ignore_errors=True)


def free_port() -> int:
    """Return a port of loopback that was free a moment ago, for a server that cannot choose one itself."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def short_folder() -> Any:
    """A temporary folder whose path is short enough for a unix socket in it. Caches in it leave no memory in use."""
    with tempfile.TemporaryDirectory(prefix="pf-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        try:
            yield Path(folder)
        finally:
            give_memory_back(Path(folder))


@contextlib.asynccontextmanager
async def gateway_here(state: Path, **settings: Any) -> AsyncIterator[Gateway]:
    """Run a gateway on this event loop, or several gateways behind a proxy (`round_robin.py`). For the
    settings see `one_gateway_here`.
    """
    # Imported here, because round_robin imports this module.
    import round_robin

    several = round_robin.GATEWAYS > 1 and "database" not in settings
    open_gateway = round_robin.gateways_here if several else one_gateway_here
    async with open_gateway(state, **settings) as found:
        yield found


@contextlib.asynccontextmanager
async def one_gateway_here(
    state: Path, *, keep_bases: bool = True, **settings: Any
) -> AsyncIterator[Gateway]:
    """Run a gateway on this event loop. Its own task starts and stops it, since a fixture may be torn down in
    another task.

    With `keep_bases`, the base of a deleted function keeps running, so that the next function need not start
    it.
    """
    started: asyncio.Future[Server] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()

    async def live() -> None:
        async with serve(GatewaySettings(**{"port": 0, "state_dir": state, **settings})) as server:
            started.set_result(server)
            await stop.wait()

    task = asyncio.create_task(live())
    first: list[asyncio.Future[Any]] = [task, started]
    await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
    if not started.done():
        await task
    server = await started
    gateway = Gateway(server.url, state, keep_bases=keep_bases)
    gateway.server = server
    try:
        async with gateway.client:
            yield gateway
    finally:
        stop.set()
        await task


@contextlib.asynccontextmanager
async def gateway_process(
    state: Path, *, environ: Mapping[str, str] | None = None, python: str = sys.executable, **settings: Any
) -> AsyncIterator[Gateway]:
    """Run a gateway in another process. Kill it at the end if it still runs."""
    order = json.dumps({"port": 0, "state_dir": str(state), **settings})
    log = await asyncio.to_thread((state.parent / "gateway.log").open, "wb")
    process = await asyncio.create_subprocess_exec(
        python, "-c", PROCESS, order,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=log,
        env={**os.environ, **(environ or {})},
    )  # fmt: skip
    log.close()
    try:
        assert process.stdout is not None
        async with asyncio.timeout(LIMIT_S):
            url = (await process.stdout.readline()).decode().strip()
        assert url, (state.parent / "gateway.log").read_text()
        gateway = Gateway(url, state)
        gateway.process = process
        async with gateway.client:
            yield gateway
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        # Wait until the gateway's children have closed the pipe, too. They must end before the event loop
        # closes.
        if process.stdout is not None:
            async with asyncio.timeout(LIMIT_S):
                await process.stdout.read()
