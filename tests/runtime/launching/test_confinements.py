"""What holds the processes of a function at their limits: cgroups, folders of their own, and Landlock."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from live import Function, Gateway, failure, gateway_here, gateway_process, gone, until
from pilotflame.runtime.launching import cgroups
from pilotflame.runtime.worker.confinement import landlock_version

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]

HANDLER = """
import ctypes, os, pathlib, subprocess, tempfile, time
def handler(event):
    return globals()[event["do"]](*event.get("with", []))
def eat(mb):
    return len(bytearray(b"x") * (mb << 20))
def fork():
    children = 0
    try:
        while children < 1000:
            if os.fork() == 0:
                time.sleep(60)
                os._exit(0)
            children += 1
    except OSError as error:
        return [children, type(error).__name__]
def spin(seconds):
    began, used = time.monotonic(), time.process_time()
    while time.monotonic() < began + seconds:
        pass
    return (time.process_time() - used) / seconds
def write(path, count=1):
    pathlib.Path(path).write_bytes(b"x" * count)
def read(path):
    return pathlib.Path(path).read_bytes().decode(errors="replace")
def list(path):
    return os.listdir(path)
def tmp():
    return [tempfile.gettempdir(), tempfile.mkstemp()[1]]
def kill(pid):
    os.kill(pid, 0)
def child():
    return subprocess.run(["cat", __file__], capture_output=True, check=True).stdout.decode()
def pid():
    return os.getpid()
"""

with_cgroups = pytest.mark.skipif(
    {one.name for one in cgroups.find_controllers()} != set(cgroups.CONTROLLERS),
    reason="this user may make no cgroups here",
)
with_landlock = pytest.mark.skipif(not landlock_version(), reason="this kernel has no Landlock")


def groups_of(gateway: Gateway) -> list[Path]:
    folders = {one.folder for one in cgroups.find_controllers()}
    (prefix,) = {path.name for path in Path("/tmp").glob("pilotflame-*") if _is_of(path, gateway)}
    return [path for folder in folders for path in folder.glob(f"{prefix}*")]


async def raised(function: Function, do: str, *given: Any) -> str:
    error = await function.error({"do": do, "with": given})
    assert error["type"] == "handler_failed", error
    return str(error["message"])


@with_cgroups
async def test_a_handler_that_takes_too_much_is_stopped_and_its_neighbour_is_not(deploy) -> None:
    limits = {"resources.memory_mb": 200, "resources.pids": 40, "resources.cpus": 0.25}
    function = await deploy(HANDLER, {**limits, "scale.idle_timeout_s": 30})
    neighbour = await deploy(HANDLER)
    error, found = await asyncio.gather(
        function.error({"do": "eat", "with": [600]}), neighbour.answer({"do": "eat", "with": [220]})
    )
    assert found == 220 << 20
    assert (error["status"], error["type"]) == (500, "out_of_memory")
    assert "resources.memory_mb of the function is 200" in error["message"]
    assert "resources.memory_mb" in error["remedy"]
    assert error["details"]["memory_mb"] == 200
    (children, why), pid = await asyncio.gather(
        function.answer({"do": "fork"}), neighbour.answer({"do": "pid"})
    )
    assert (children < 40, why) == (True, "BlockingIOError")
    assert pid > 0
    assert await function.answer({"do": "spin", "with": [0.8]}) < 0.5
    # What the handler has forked ends with the function, and so does its cgroup.
    (worker,) = await function.pids("worker")
    (joined,) = {
        line.rpartition("/")[2]
        for line in Path(f"/proc/{worker}/cgroup").read_text().splitlines()
        if "pilotflame-" in line
    }
    left = psutil.Process(worker).children()
    await function.client.delete(f"/v1/functions/{function.name}")
    for process in left:
        await gone(process.pid)
    assert not [one for one in cgroups.find_controllers() if (one.folder / joined).exists()]
