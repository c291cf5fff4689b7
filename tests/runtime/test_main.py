"""The gateway's process: signals, its address, its state folder, and an event loop that nothing blocks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import time

import httpx
import psutil
import pytest
from blockbuster import blockbuster_ctx
from live import LIMIT_S, Gate, Gateway, failure, gateway_here, gateway_process, gone, home_client, until
from pilotflame.errors import GatewayError
from pilotflame.runtime.ground.settings.gateway_settings import GatewaySettings
from pilotflame.runtime.main import run
from pilotflame.runtime.node.functions.registry import Functions
from pilotflame.runtime.node.launching.zygote_process import ChildProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")

WAITS = "import gate\ndef handler(event):\n    gate.wait(str(event))\n    return event"


async def refuses_connections(gateway: Gateway) -> None:
    """Wait until the gateway has begun to shut down. Its control socket stays open."""

    async def refused() -> bool:
        try:
            async with httpx.AsyncClient() as client:
                await client.get(f"{gateway.url}/readyz")
        except httpx.ConnectError:
            return True
        except (httpx.ReadError, httpx.RemoteProtocolError):
            # The gateway closed its listening socket before it accepted this connection, or before the request was sent.
            return False
        return False

    await until(refused, "a refused connection")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains(state, gate: Gate, number: signal.Signals):
    async with gateway_process(state) as gateway:
        function = await gateway.deploy(WAITS, {"scale.max": 2}, gate=gate)
        calls = [asyncio.create_task(function.answer(n)) for n in range(6)]
        await gate.next()
        await function.settled(ready=2, in_flight=2, queued=4)
        assert gateway.process is not None
        processes = psutil.Process(gateway.process.pid).children(recursive=True)
        gateway.process.send_signal(number)
        await refuses_connections(gateway)
        async with gateway.at_home() as home:
            response = await home.get("/readyz")
            assert (response.status_code, response.json()) == (503, {"status": "draining"})
            late = await home.post(function.path, json="late")
            assert failure(late)["status"] == 503
            assert "retry-after" in late.headers
        gate.open()
        assert await asyncio.gather(*calls) == list(range(6))
        async with asyncio.timeout(LIMIT_S):
            assert await gateway.process.wait() == 0
        for process in processes:
            await gone(process.pid)
        with pytest.raises(httpx.ConnectError):
            await httpx.AsyncClient().get(gateway.url)
        assert not (state / "run" / "link.sock").exists()


BIG = "def handler(event):\n    return b'x' * 16_000_000"


async def slow_reader(
    gateway: Gateway, path: str, more: str
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Call a function, and read only the header of the answer."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    sock.connect(gateway.address)
    sock.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=sock, limit=65536)
    writer.write(f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{more}Content-Length: 0\r\n\r\n".encode())
    await reader.readuntil(b"\r\n\r\n")
    return reader, writer


async def length(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
    """Read to the end of the connection. Return the number of bytes."""
    received = 0
    while piece := await reader.read(1 << 20):
        received += len(piece)
    writer.close()
    return received


async def test_slow_readers_get_their_whole_answer(state):
    async with gateway_process(state) as gateway:
        function = await gateway.deploy(BIG)
        # aiohttp reads the second request, because of Prefer, and not the transport of plain calls.
        readers = [await slow_reader(gateway, function.path, more) for more in ("", "Prefer: x\r\n")]
        assert gateway.process is not None
        gateway.process.terminate()
        # Wait longer than aiohttp waits for open requests at a shutdown (`shutdown_timeout`).
        await asyncio.sleep(2.5)
        assert gateway.process.returncode is None
        received = await asyncio.gather(*(length(*reader) for reader in readers))
        assert min(received) >= 16_000_000
        async with asyncio.timeout(LIMIT_S):
            assert await gateway.process.wait() == 0


@pytest.mark.parametrize("path", ["/v1/console?follow=1", "/v1/functions/kept/logs?follow=1"])
async def test_who_follows_is_told_that_the_gateway_ends(state, gate: Gate, path: str):
    async with gateway_process(state) as gateway:
        function = await gateway.deploy(WAITS, name="kept", gate=gate)
        call = asyncio.create_task(function.answer("last"))
        await gate.next("last")
        async with asyncio.timeout(LIMIT_S), gateway.client.stream("GET", path) as response:
            lines = response.aiter_lines()
            assert '"kept"' in await anext(lines)
            assert gateway.process is not None
            gateway.process.terminate()
            await refuses_connections(gateway)
            gate.open()
            # The answer is complete. httpx would raise an error if it were cut off.
            assert all([json.loads(line) async for line in lines])
        assert await call == "last"
        async with asyncio.timeout(LIMIT_S):
            assert await gateway.process.wait() == 0


async def test_a_gateway_after_a_killed_one_says_so_and_what_it_restored(state, gate: Gate):
    async def said() -> list[str]:
        async with home_client(state) as home:
            lines = (await home.get("/v1/logs/gateway")).text.splitlines()
        return [json.loads(line)["text"] for line in lines]

    async with gateway_process(state) as gateway:
        await gateway.deploy(WAITS, name="kept", gate=gate)
        run = await gateway.client.post("/v2/kept/run", json={"input": 1})
        await gate.next("1")
        # The handler may begin before its job is stored as running.
        job = f"/v2/kept/status/{run.json()['id']}"

        async def runs() -> bool:
            return bool((await gateway.client.get(job)).json()["status"] == "IN_PROGRESS")

        await until(runs, "a job that runs")
        assert gateway.process is not None
        pid = gateway.process.pid
        gateway.process.kill()
        await gateway.process.wait()
    async with gateway_process(state) as gateway:
        assert gateway.process is not None
        (line,) = [text for text in await said() if "without shutdown" in text]
        assert f"(process {pid}, started " in line
        assert "1 functions, 1 jobs that were running and run again, 0 jobs that failed" in line
        await gate.next("1")
        gate.open()
        gateway.process.terminate()
        async with asyncio.timeout(LIMIT_S):
            assert await gateway.process.wait() == 0
    async with gateway_process(state):
        assert len([text for text in await said() if "without shutdown" in text]) == 1


async def test_a_drain_ends_in_time(state, gate: Gate):
    async with gateway_process(state, drain_s=0.1) as gateway:
        function = await gateway.deploy(WAITS, {"scale.max": 1}, gate=gate)
        calls = [asyncio.create_task(function.call(n)) for n in range(2)]
        await gate.next()
        await function.settled(ready=1, in_flight=1, queued=1)
        assert gateway.process is not None
        gateway.process.terminate()
        for response in await asyncio.gather(*calls):
            assert failure(response)["type"] == "shutting_down"
        async with asyncio.timeout(LIMIT_S):
            assert await gateway.process.wait() == 0
    lines = (state / "logs" / "gateway.jsonl").read_text().splitlines()
    (told,) = [text for line in lines if (text := json.loads(line)["text"]).find("drained in") >= 0]
    assert told.endswith("running calls that did not end in time: 1")


async def test_a_process_that_the_kernel_cannot_end_holds_up_no_shutdown(
    state, gate: Gate, monkeypatch, caplog
):
    """A kill does not end the process, as if it were in a call of a driver. The process also occupies memory of a GPU."""
    monkeypatch.setattr("pilotflame.runtime.node.reconciling.pool.KILLED_S", 0.3)
    monkeypatch.setattr("pilotflame.runtime.ground.telemetry.background.END_S", 0.3)
    kill = ChildProcess.kill
    monkeypatch.setattr(ChildProcess, "kill", lambda child: None if child.pid == stuck else kill(child))
    source = "import gate\nasync def handler(event):\n    gate.wait()"
    async with asyncio.timeout(LIMIT_S):
        async with gateway_here(state, drain_s=0.2, keep_bases=False, gpus="0:1000") as gateway:
            function = await gateway.deploy(source, {"resources.gpus": 1}, gate=gate, check=False)
            call = asyncio.create_task(function.call())
            stuck = (await gate.next()).pid
            call.cancel()
    left = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert any(f"pid {stuck}" in message for message in left)
    # The base may have killed the process already, because at its end it kills its remaining children.
    with contextlib.suppress(ProcessLookupError):
        os.kill(stuck, signal.SIGKILL)
    await gone(stuck)


async def test_a_second_signal_ends_at_once(state, gate: Gate):
    async with gateway_process(state) as gateway:
        function = await gateway.deploy(WAITS, gate=gate)
        call = asyncio.create_task(function.call(1))
        worker = (await gate.next()).pid
        assert gateway.process is not None
        gateway.process.terminate()
        await refuses_connections(gateway)
        gateway.process.terminate()
        async with asyncio.timeout(LIMIT_S):
            assert await gateway.process.wait() == -signal.SIGTERM
        await gone(worker)
        with pytest.raises(httpx.HTTPError):
            await call


async def test_a_second_gateway_on_a_state_folder_is_refused(state):
    async with gateway_here(state) as gateway:
        with pytest.raises(GatewayError, match="Another gateway, process"):
            async with gateway_here(state):
                pass
        function = await gateway.deploy("def handler(event):\n    return event")
        assert await function.answer(1) == 1


async def test_an_address_in_use_or_of_another_machine_is_refused(state):
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(GatewayError, match="Cannot listen"):
        async with gateway_here(state, port=taken.getsockname()[1]):
            pass
    with pytest.raises(GatewayError, match="no address of this machine"):
        async with gateway_here(state, host="no.such.host.invalid"):
            pass


async def test_a_socket_path_that_is_too_long_is_refused(tmp_path):
    with pytest.raises(GatewayError, match="longer than 107 bytes"):
        async with gateway_here(tmp_path / ("x" * 120)):
            pass


async def test_nothing_blocks_the_event_loop(state, caplog):
    """Deploys, cold and warm calls, streams, logs, failures and deletes, with a tripwire on blocking calls."""
    escaped: list[dict] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: escaped.append(context))
    async with gateway_here(state) as gateway:
        with blockbuster_ctx(["pilotflame"]):
            source = (
                "import os\ndef setup(context):\n    print('up')\ndef handler(event):\n    return 1 / event"
            )
            function = await gateway.deploy(source, {"scale.idle_timeout_s": 0})
            for _ in range(2):
                assert await function.answer(1) == 1
                await function.settled(ready=0)
            assert (await function.error(0))["type"] == "handler_failed"
            stream = await gateway.deploy("def handler(event):\n    yield from range(100)")
            assert (await stream.call()).text.count("event: output") == 100
            await stream.client.post(f"/v2/{stream.name}/warmup", params={"workers": "2"})
            await function.logged("up")
            assert failure(await gateway.send("def handler("))["status"] == 422
            for path in ("/metrics", "/openapi.json", "/v1/functions", "/healthz"):
                assert (await gateway.client.get(path)).status_code == 200
            (zygote,) = await stream.pids("zygote")
            psutil.Process(zygote).kill()
            await gone(zygote)
            assert (await stream.call()).status_code == 200
            await gateway.client.delete(f"/v1/functions/{function.name}")
    assert escaped == []
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


async def test_the_tripwire_holds(state, monkeypatch):
    async with gateway_here(state) as gateway:
        function = await gateway.deploy("def handler(event):\n    return event")
        with blockbuster_ctx(["pilotflame"]):
            monkeypatch.setattr(Functions, "all", lambda _self: [time.sleep(0)])
            assert (await function.client.get("/v1/functions/x/logs")).status_code == 500


async def test_a_folder_that_does_not_exist_is_an_error(state):
    settings = GatewaySettings(port=0, state_dir=state)
    with pytest.raises(GatewayError, match="nowhere is not a folder"):
        run(settings, on_listening=lambda _url: None, folder=state.parent / "nowhere")
    assert not state.exists()


UPLOADS, UPLOAD_BYTES, PART_BYTES = 60, 4 << 20, 64 << 10


async def test_a_burst_of_large_bodies_leaves_no_memory_behind(state):
    """All bodies are in the gateway at the same time, and arrive in small parts that take turns."""
    async with gateway_process(state) as gateway:
        function = await gateway.deploy("def handler(event):\n    return event\n")
        assert gateway.process is not None
        process = psutil.Process(gateway.process.pid)
        before_bytes, url = process.memory_info().rss, httpx.URL(gateway.url)
        opened = [await asyncio.open_connection(url.host, url.port) for _ in range(UPLOADS)]
        head = f"POST /v2/{function.name}/run HTTP/1.1\r\nHost: {url.netloc.decode()}\r\nContent-Length: {UPLOAD_BYTES}\r\n\r\n"
        for _, writer in opened:
            writer.write(head.encode())
        for sent in range(0, UPLOAD_BYTES, PART_BYTES):
            for _, writer in opened:
                # Leave out the last byte of each body, so that no body is complete before all have arrived.
                writer.write(b"x" * (PART_BYTES - (sent + PART_BYTES == UPLOAD_BYTES)))
                await writer.drain()
        for reader, writer in opened:
            writer.write(b"x")
            # The body is not JSON, so the gateway refuses it when it has read the whole body.
            assert b" 400 " in await reader.readline()
            writer.close()
        kept_bytes = process.memory_info().rss - before_bytes
        assert kept_bytes < 40 << 20
