"""A handler in a container that exceeds a limit, or reaches for what it must not have, is stopped and reported.
Meanwhile its neighbour answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from containers import made_image, require_podman, running_engine
from live import Function, Gateway, failure, gateway_here, short_folder, until
from pilotflame.runtime.calls.serving import time_limits
from pilotflame.runtime.node.launching import container, container_launcher

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

HANDLER = """
import os, pathlib, socket, time
def handler(event):
    return globals()[event["do"]](*event.get("with", []))
def eat(mb):
    return len(bytearray(b"x") * (mb << 20))
def fork():
    while True:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
def write(path, count):
    pathlib.Path(path).write_bytes(b"x" * count)
def read(path):
    return pathlib.Path(path).read_bytes().decode(errors="replace")
def readable(paths):
    return [path for path in paths if os.access(path, os.R_OK)]
def processes():
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]
def connect(host, port):
    socket.create_connection((host, port), timeout=2).close()
    return "connected"
def echo(value):
    return value
def where():
    return [os.getcwd(), os.environ["TMPDIR"]]
def end():
    os._exit(1)
"""
LIMITS = {"resources.memory_mb": 160, "resources.tmp_mb": 8}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def gateway() -> AsyncIterator[Gateway]:
    require_podman()
    with short_folder() as folder, running_engine(folder) as engine, pytest.MonkeyPatch.context() as patch:
        patch.setattr(container_launcher, "PIDS", 64)
        async with gateway_here(folder / "state", engine=engine.url) as found:
            yield found


@pytest.fixture(scope="module")
def image(gateway: Gateway) -> str:
    return made_image()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def function(gateway: Gateway, image: str) -> Function:
    fixed = {"image.name": image, "scale.idle_timeout_s": 60}
    return await gateway.deploy(HANDLER, {**fixed, **LIMITS}, name="greedy")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def neighbour(gateway: Gateway, image: str) -> Function:
    fixed = {"image.name": image, "scale.idle_timeout_s": 60}
    return await gateway.deploy("SECRET = 'of another'\n" + HANDLER, fixed, name="neighbour")


async def stopped(function: Function, neighbour: Function, do: str, *given: Any) -> dict[str, Any]:
    """Return the error of an invocation of `function`. The neighbour must answer during the invocation and after it."""
    failing = asyncio.ensure_future(function.error({"do": do, "with": given}))
    number = 0
    while not failing.done() or number < 3:
        assert await neighbour.answer({"do": "echo", "with": [number]}) == number
        number += 1
    assert await function.answer({"do": "echo", "with": ["again"]}) == "again"
    return await failing


async def test_a_handler_that_eats_memory(function: Function, neighbour: Function) -> None:
    error = await stopped(function, neighbour, "eat", 400)
    assert (error["status"], error["type"]) == (500, "out_of_memory")
    assert "SIGKILL), sent by the kernel because memory ran out" in error["message"]
    assert "resources.memory_mb of the function is 160." in error["message"]
    assert error["remedy"].startswith("Raise resources.memory_mb in pilotflame.toml")
    assert error["details"]["memory_mb"] == 160
    await function.logged("memory ran out")
    metrics = (await function.client.get("/metrics")).text
    assert 'pilotflame_failures_total{error="out_of_memory",function="greedy"} 1.0' in metrics


async def test_a_job_that_eats_memory(function: Function, neighbour: Function) -> None:
    order = {"input": {"do": "eat", "with": [400]}}
    response = await function.client.post(f"/v2/{function.name}/runsync", json=order)
    job = response.json()
    assert (job["status"], job["errorDetails"]["type"]) == ("FAILED", "out_of_memory"), job
    assert await neighbour.answer({"do": "echo", "with": [1]}) == 1


async def test_a_handler_that_needs_too_much_to_be_imported(gateway: Gateway, image: str) -> None:
    source = "held = bytearray(b'x') * (300 << 20)\n" + HANDLER
    response = await gateway.send(source, {"image.name": image, **LIMITS})
    error = failure(response)
    assert "sent by the kernel because memory ran out" in error["message"]
    assert "Raise resources.memory_mb, which is 160" in error["remedy"]


async def test_a_handler_that_forks_without_end(function: Function, neighbour: Function) -> None:
    error = await stopped(function, neighbour, "fork")
    assert (error["status"], error["type"]) == (500, "handler_failed")
    assert "BlockingIOError: [Errno 11] Resource temporarily unavailable" in error["message"]


async def test_a_handler_that_fills_its_disk(function: Function, neighbour: Function) -> None:
    error = await stopped(function, neighbour, "write", "/tmp/large", 16 << 20)
    assert (error["status"], error["type"]) == (500, "handler_failed")
    assert "OSError: [Errno 28] No space left on device" in error["message"]
    error = await stopped(function, neighbour, "write", "/usr/local/large", 1)
    assert "Read-only file system" in error["message"] or "Permission denied" in error["message"]


async def test_a_handler_that_reads_what_is_anothers(
    gateway: Gateway, function: Function, neighbour: Function
) -> None:
    secret = f"/v1/functions/{neighbour.name}/secrets/TOKEN"
    assert (await neighbour.client.put(secret, json={"value": "hush"})).status_code < 300
    paths = [path for path in gateway.state.rglob("*") if function.name not in path.parts]
    code = next(path for path in paths if path.name == "handler.py")
    assert any("secrets" in path.parts for path in paths)
    error = await stopped(function, neighbour, "read", str(code))
    assert (error["status"], error["type"]) == (500, "handler_failed")
    assert "FileNotFoundError" in error["message"]
    link = gateway.state / "run" / "link.sock"
    others = [str(path) for path in (*paths, Path(__file__)) if path.is_file() or path.is_socket()]
    assert await function.answer({"do": "readable", "with": [others]}) == [str(link)]
    # The handler sees only the processes of its own container, which have small pids.
    assert max(await function.answer({"do": "processes"})) < 1000


async def test_a_handler_that_connects_without_a_grant(
    gateway: Gateway, image: str, function: Function, neighbour: Function
) -> None:
    error = await stopped(function, neighbour, "connect", *gateway.address)
    assert (error["status"], error["type"]) == (500, "handler_failed")
    assert "ConnectionRefusedError" in error["message"] or "unreachable" in error["message"]
    granted = await gateway.deploy(
        HANDLER, {"image.name": image, "resources.network": "host"}, name="granted"
    )
    assert await granted.answer({"do": "connect", "with": list(gateway.address)}) == "connected"


@pytest.mark.parametrize("folder", ["/run", "/var/tmp"])
async def test_no_other_folder_can_fill_the_memory(
    function: Function, neighbour: Function, folder: str
) -> None:
    error = await stopped(function, neighbour, "write", f"{folder}/big", 2 << 20)
    assert error["type"] == "handler_failed"
    assert any(text in error["message"] for text in ("No space left", "Read-only", "Permission denied"))


# The handler is imported in the zygote's process, so it can replace the method that kills stuck workers.
DEAF = """
import time
from pilotflame.runtime.calls.worker import zygote
zygote.Zygote._signal = lambda *_, **__: None
def handler(event):
    while event == "stuck":
        try:
            time.sleep(0.1)
        except BaseException:
            pass
    return event
"""


async def test_a_stuck_worker_whose_zygote_kills_nothing(
    gateway: Gateway, image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(container, "KILLED_BY_ZYGOTE_S", 0.5)
    monkeypatch.setattr(time_limits, "CANCEL_GRACE_S", 0.2)
    fixed = {
        "image.name": image,
        "execution_timeout_s": 0.3,
        "scale.max": 1,
        "timeout_s": 15,
    }
    function = await gateway.deploy(DEAF, fixed, name="deaf")
    assert (await function.error("stuck"))["status"] == 504
    assert await function.answer("next") == "next"
    await function.logged("its container is removed")


async def test_a_worker_in_a_container_has_files_of_its_own(neighbour: Function) -> None:
    await neighbour.answer({"do": "write", "with": ["out.txt", 3]})
    assert await neighbour.answer({"do": "read", "with": ["out.txt"]}) == "xxx"
    folders = await neighbour.answer({"do": "where"})
    assert {Path(folder).name for folder in folders} == {"work", "tmp"}
    assert (await neighbour.error({"do": "end"}))["type"] == "worker_died"

    async def removed() -> bool:
        return not await neighbour.answer({"do": "readable", "with": [folders]})

    await until(removed, "the end of the folders")
    assert "No such file" in (await neighbour.error({"do": "read", "with": ["out.txt"]}))["message"]
