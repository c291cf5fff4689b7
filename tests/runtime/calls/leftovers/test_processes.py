"""Processes that a handler starts end with their worker or zygote: at zero, at delete, and with a killed gateway."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from live import gateway_process, gone

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Each start of a helper is a line of the file: the pid.
STARTS = """
import os, subprocess, sys, time
def start(**how):
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], **how)
    with open(os.environ["STARTED"], "a") as file:
        file.write(f"{helper.pid}\\n")
    return helper
"""
AT_IMPORT = "HELPER, OTHER = start(), start(start_new_session=True)\n"
IN_SETUP = "def setup(context):\n    start(), start(start_new_session=True)\n"
DAEMON = """
def setup(context):
    if (child := os.fork()) == 0:
        os.setsid()
        start(start_new_session=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
# The helper leaves the worker's session, and its environment does not name the process that has started it.
ANONYMOUS = "def setup(context):\n    start(start_new_session=True, env={})\n"
FORKED = """
def setup(context):
    if (child := os.fork()) == 0:
        os.setsid()
        with open(os.environ["STARTED"], "a") as file:
            file.write(f"{os.getpid()}\\n")
        time.sleep(3600)
    while not os.path.exists(os.environ["STARTED"]) or str(child) not in open(os.environ["STARTED"]).read():
        time.sleep(0.01)
"""
HANDLER = "def handler(event):\n    time.sleep(event or 0)\n    return os.getpid()\n"


def started(file: Path) -> list[int]:
    return [int(line) for line in file.read_text().split()]


def running(file: Path) -> list[int]:
    return [pid for pid in started(file) if Path(f"/proc/{pid}").exists()]


# At the rung `zygote`, a standby would import the handler, too, and keep its helpers. So the case "import" rests at `local`.
@pytest.mark.parametrize(
    ("where", "rest"),
    [(AT_IMPORT, "local"), (IN_SETUP, "zygote"), (DAEMON, "zygote")],
    ids=["import", "setup", "daemon"],
)
async def test_helpers_end_at_zero_and_at_delete(gateway, where: str, rest: str, tmp_path: Path):
    file = tmp_path / "started"
    settings = {"scale.idle_timeout_s": 0, "scale.rest": rest, "env.STARTED": str(file)}
    function = await gateway.deploy(STARTS + where + HANDLER, settings, check=False)
    worker = await function.answer()
    await gone(worker)
    for pid in started(file):
        await gone(pid)
    count = len(started(file))
    await function.answer()
    assert len(started(file)) > count
    await gateway.client.delete(f"/v1/functions/{function.name}")
    for pid in started(file):
        await gone(pid)


async def test_a_helper_of_a_worker_that_lives_stays_when_another_worker_ends(gateway, tmp_path: Path):
    file = tmp_path / "started"
    settings = {"scale.min": 2, "scale.max": 2, "env.STARTED": str(file)}
    function = await gateway.deploy(STARTS + DAEMON + HANDLER, settings, check=False)
    await function.client.post(f"/v2/{function.name}/warmup")
    await function.settled(ready=2)
    first, second = await function.pids("worker")
    helpers = {int(_owner(pid)): pid for pid in running(file)}
    os.kill(first, 9)
    await gone(first)
    await gone(helpers[first])
    assert Path(f"/proc/{helpers[second]}").exists()


def _owner(pid: int) -> str:
    variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return next(one.partition("=")[2] for one in variables if one.startswith("PILOTFLAME_PROCESS="))


@pytest.mark.parametrize("where", [ANONYMOUS, FORKED], ids=["anonymous", "forked"])
async def test_helpers_without_an_owner_end_at_delete(gateway, where: str, tmp_path: Path):
    file = tmp_path / "started"
    function = await gateway.deploy(STARTS + where + HANDLER, {"env.STARTED": str(file)}, check=False)
    await function.answer()
    assert running(file)
    await gateway.client.delete(f"/v1/functions/{function.name}")
    for pid in started(file):
        await gone(pid)


@pytest.mark.parametrize("where", [AT_IMPORT, IN_SETUP], ids=["import", "setup"])
async def test_helpers_end_with_a_killed_gateway(state: Path, where: str, tmp_path: Path):
    file = tmp_path / "started"
    async with gateway_process(state) as gateway:
        function = await gateway.deploy(STARTS + where + HANDLER, {"scale.min": 1, "env.STARTED": str(file)})
        await function.settled(ready=1)
        assert running(file)
        assert gateway.process is not None
        gateway.process.kill()
        for pid in started(file):
            await gone(pid)
