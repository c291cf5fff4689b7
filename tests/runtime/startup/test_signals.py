"""The table of signals: whichever signal a gateway gets, the running calls are answered."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import trustme
from live import GATE_MODULE, LIMIT_S, Gate, failure, gateway_process, gone, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

WAITS = "import gate\ndef handler(event):\n    print('at work', flush=True)\n    gate.wait(str(event))\n    return event"


# The actions of a gateway: "drain" ends it after its calls, "go on" does not end it.
TABLE = {
    signal.SIGTERM: "drain", signal.SIGINT: "drain", signal.SIGQUIT: "drain", signal.SIGHUP: "go on",
    signal.SIGUSR1: "go on", signal.SIGUSR2: "go on", signal.SIGPIPE: "go on", signal.SIGXFSZ: "go on",
}  # fmt: skip


@pytest.mark.parametrize("number", [number for number, action in TABLE.items() if action == "drain"])
async def test_a_running_call_is_answered(state: Path, gate: Gate, number: signal.Signals):
    async with gateway_process(state) as gateway:
        assert gateway.process is not None
        function = await gateway.deploy(WAITS, gate=gate)
        call = asyncio.create_task(function.answer(1))
        begun = await gate.next("1")
        gateway.process.send_signal(number)
        await until(lambda: refused(gateway.url), "a refused connection")
        begun.go()
        assert await call == 1
        async with asyncio.timeout(LIMIT_S):
            assert await gateway.process.wait() == 0


async def test_a_gateway_goes_on_after_other_signals(state: Path, gate: Gate):
    async with gateway_process(state) as gateway:
        assert gateway.process is not None
        function = await gateway.deploy(WAITS, gate=gate)
        for number in (number for number, action in TABLE.items() if action == "go on"):
            call = asyncio.create_task(function.answer(1))
            begun = await gate.next("1")
            gateway.process.send_signal(number)
            # When a further call is answered, the gateway has received the signal.
            second = asyncio.create_task(function.answer(2))
            (await gate.next("2")).go()
            assert await second == 2, number
            begun.go()
            assert await call == 1, number
            assert gateway.process.returncode is None, number
        gateway.process.terminate()
        async with asyncio.timeout(LIMIT_S):
            assert await gateway.process.wait() == 0


async def refused(url: str) -> bool:
    try:
        async with httpx.AsyncClient() as client:
            await client.get(f"{url}/readyz")
    except httpx.ConnectError:
        return True
    except (httpx.ReadError, httpx.RemoteProtocolError):
        # The gateway closed its listening socket before it accepted this connection, or before the request was sent.
        return False
    return False


async def test_signals_to_its_processes_end_no_call(state: Path, gate: Gate):
    """A terminal sends its signals to all processes of the job. The base, zygotes and workers leave them to the gateway."""
    async with gateway_process(state) as gateway:
        function = await gateway.deploy(WAITS, gate=gate)
        call = asyncio.create_task(function.answer(1))
        begun = await gate.next("1")
        pids = [row["pid"] for row in (await function.status(memory=True))["processes"]]
        assert gateway.process is not None
        children = (
            Path(f"/proc/{gateway.process.pid}/task/{gateway.process.pid}/children").read_text().split()
        )
        for number in (signal.SIGHUP, signal.SIGINT):
            for pid in {*pids, *map(int, children)}:
                os.kill(pid, number)
        # No child of the gateway is in its process group.
        assert all(os.getpgid(int(pid)) != os.getpgid(gateway.process.pid) for pid in children)
        begun.go()
        assert await call == 1
        assert (await function.pids("worker")) == [begun.pid]


@contextlib.asynccontextmanager
async def on_terminal(state: Path, *words: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, int, str]]:
    """A command of pilotflame on a terminal of its own. Yields its process, the terminal, and the URL of the gateway."""
    terminal, side = pty.openpty()
    # Make `side` the controlling terminal of the process. Otherwise the process gets no SIGHUP when the terminal closes.
    takes = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
    module = ["-m", "pilotflame.runtime.cli", *words, "--port", "0", "--json"]
    command = [sys.executable, "-c", takes, sys.executable, *module]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PILOTFLAME_")}
    read, write = os.pipe()
    process = await asyncio.create_subprocess_exec(
        *command, stdin=side, stdout=write, stderr=side, start_new_session=True,
        env={**kept, "PILOTFLAME_STATE_DIR": str(state)},
    )  # fmt: skip
    os.close(side)
    os.close(write)
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read))
    said = bytearray()

    def hear() -> None:
        try:
            said.extend(os.read(terminal, 65536))
        except OSError:
            # The other side is closed: the command has ended.
            loop.remove_reader(terminal)

    loop.add_reader(terminal, hear)
    try:
        async with asyncio.timeout(LIMIT_S):
            line = (await reader.readline()).decode()
        assert line, said.decode()
        yield process, terminal, httpx.Response(200, content=line).json()["url"]
    finally:
        loop.remove_reader(terminal)
        with contextlib.suppress(OSError):
            os.close(terminal)
        transport.close()
        if process.returncode is None:
            process.kill()
        await process.wait()


def folder_of(path: Path, gate: Gate) -> Path:
    path.mkdir()
    (path / "handler.py").write_text(WAITS)
    (path / "gate.py").write_text(GATE_MODULE)
    (path / "pilotflame.toml").write_text(f'name = "waits"\n[env]\nGATE = "{gate.path}"\n')
    return path


@pytest.mark.parametrize("how", ["serve", "serve FOLDER", "dev"])
async def test_a_closed_terminal_ends_no_call(state: Path, gate: Gate, tmp_path: Path, how: str):
    folder = folder_of(tmp_path / "waits", gate)
    words = {"serve": ["serve"], "serve FOLDER": ["serve", str(folder)], "dev": ["dev", str(folder)]}[how]
    async with (
        on_terminal(state, *words) as (process, terminal, url),
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        path = "/" if how == "serve FOLDER" else "/invoke/waits"
        if how == "serve":
            assert (await client.post("/v1/functions", json={"path": str(folder)})).status_code == 201
        else:
            found = "/readyz" if how == "serve FOLDER" else "/v1/functions"
            await until(lambda: deployed(client, found), "a deployed function")
        call = asyncio.create_task(client.post(path, json=1))
        begun = await gate.next("1")
        asyncio.get_running_loop().remove_reader(terminal)
        # The kernel sends SIGHUP to the process whose terminal this is. Later writes to the terminal fail.
        os.close(terminal)
        if how != "dev":
            second = asyncio.create_task(client.post(path, json=2))
            (await gate.next("2")).go()
            assert (await second).json() == 2
        if how == "serve":
            # A deploy starts processes, whose standard error is the closed terminal.
            (folder / "handler.py").write_text("print('imported')\n" + WAITS)
            assert (await client.post("/v1/functions", json={"path": str(folder)})).status_code == 201
        begun.go()
        assert (await call).json() == 1
        if how == "dev":
            async with asyncio.timeout(LIMIT_S):
                assert await process.wait() == 0
            await gone(begun.pid)
        else:
            assert process.returncode is None
            process.terminate()
            async with asyncio.timeout(LIMIT_S):
                assert await process.wait() == 0


async def deployed(client: httpx.AsyncClient, path: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        response = await client.get(path)
        return response.status_code == 200 and response.json().get("functions") != []
    return False


async def test_sighup_means_the_same_with_tls(state: Path, gate: Gate, tmp_path: Path):
    issued, files = (
        trustme.CA().issue_cert("127.0.0.1"),
        {"tls_cert": tmp_path / "chain.pem", "tls_key": tmp_path / "key.pem"},
    )
    issued.cert_chain_pems[0].write_to_path(files["tls_cert"])
    issued.private_key_pem.write_to_path(files["tls_key"])
    files["tls_key"].chmod(0o600)
    async with gateway_process(state, **{key: str(path) for key, path in files.items()}) as gateway:
        assert gateway.process is not None
        async with httpx.AsyncClient(base_url=gateway.url, verify=False, timeout=60) as gateway.client:
            function = await gateway.deploy(WAITS, gate=gate)
            call = asyncio.create_task(function.answer(1))
            begun = await gate.next("1")
            gateway.process.send_signal(signal.SIGHUP)

            async def reloaded() -> bool:
                return "certificate was read again" in (state.parent / "gateway.log").read_text()

            await until(reloaded, "the new certificate")
            begun.go()
            assert await call == 1


async def test_calls_beyond_drain_s_end_by_name(state: Path, gate: Gate):
    async with gateway_process(state, drain_s=0.3) as gateway:
        assert gateway.process is not None
        settings = {"scale.max": 1}
        once = await gateway.deploy(WAITS, settings, gate=gate)
        again = await gateway.deploy(WAITS, {**settings, "idempotent": True}, gate=gate)
        calls = {}
        for function, event in ((once, "once"), (again, "again")):
            calls[event] = asyncio.create_task(function.call(event))
            await gate.next(event)
        calls["waits"] = asyncio.create_task(once.call("waits"))
        await once.settled(ready=1, in_flight=1, queued=1)
        gateway.process.terminate()
        for event, call in calls.items():
            response = await call
            error = failure(response)
            assert error["type"] == "shutting_down", event
            assert error["remedy"]
            repeatable = event != "once"
            assert error["status"] == (503 if repeatable else 500)
            assert ("retry-after" in response.headers) is repeatable
            assert response.headers.get("x-should-retry") == (None if repeatable else "false")
        async with asyncio.timeout(LIMIT_S):
            assert await gateway.process.wait() == 0
    log = "".join(file.read_text() for file in (state / "logs").rglob("*.jsonl"))
    assert "shutting_down" in log
    assert "worker_died" not in log
