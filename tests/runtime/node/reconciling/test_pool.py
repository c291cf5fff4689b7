"""The pool: where its workers come from, and what is left at zero."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
from pathlib import Path

import pytest
from live import Gate, gone
from pilotflame.runtime.node.reconciling.pool import _unexpected
from serving_handlers import BREAKS_ITS_DEVICE, PID, THREADED, WAITS, device_weights, kill

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_the_standby_is_the_next_worker(deploy):
    function = await deploy(PID)
    await function.settled(standby=True)
    (standby,) = await function.pids("standby")
    response = await function.call()
    assert response.json()[0] == standby
    assert response.headers["x-cold-start"] == "true"
    # Another standby takes its place.
    await function.settled(ready=1, standby=True)


async def test_a_standby_killed_at_the_moment_it_is_needed(deploy):
    function = await deploy(PID)
    await function.settled(standby=True)
    (standby,) = await function.pids("standby")
    # The gateway has not noticed the death yet when it needs the standby.
    os.kill(standby, signal.SIGKILL)
    worker, _ = await function.answer()
    assert worker != standby


async def test_without_a_kept_zygote_no_process_is_left_at_zero(deploy):
    function = await deploy(PID, {"scale.rest": "local", "scale.idle_timeout_s": 0})
    for _ in range(2):
        worker, _ = await function.answer()
        await gone(worker)
        await function.settled(ready=0, standby=False, zygote=False)


async def test_a_killed_worker_that_was_spawned(deploy, gate: Gate):
    function = await deploy("import chatty\n" + WAITS, {"scale.max": 1}, files=THREADED, gate=gate)
    running = asyncio.create_task(function.error("runs"))
    await kill((await gate.next("runs")).pid)
    assert (await running)["type"] == "worker_died"
    gate.open()
    assert isinstance(await function.answer("next"), int)


async def test_handlers_that_fail_when_spawned_say_why(gateway):
    source = "import chatty, os\nif os.path.exists('/proc/self/fd/0'):\n    pass\ndef setup(context):\n    1 / 0\ndef handler(event):\n    pass"
    response = await gateway.send(source, files=THREADED)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (500, "handler_setup_failed")
    assert error["details"]["line"] == 5


@pytest.mark.parametrize("kind", ["def", "async def"])
async def test_a_worker_whose_device_has_failed_is_replaced(deploy, tmp_path: Path, kind: str):
    right = device_weights(tmp_path, 1)
    source = BREAKS_ITS_DEVICE.replace("def handler", f"{kind} handler")
    function = await deploy(source, {"snapshot": str(tmp_path), "scale.idle_timeout_s": 1000, "scale.max": 1})
    worker, found = await function.answer(1)
    assert found == right(1)
    # An error of the handler alone does not end the worker.
    assert (await function.error("raise"))["type"] == "handler_failed"
    assert await function.answer(2) == [worker, right(2)]
    assert "break" in (await function.error("break"))["message"]
    # The next call is sent to another worker.
    other, found = await function.answer(3)
    assert other != worker
    assert found == right(3)
    await gone(worker)
    await function.logged("a device of this worker has failed")


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "full", "/hidden/x"), ValueError("/hidden/x is odd")]
)
async def test_only_the_owner_reads_the_text_of_an_unexpected_error(error: Exception) -> None:
    found = _unexpected(error)
    assert "hidden" not in str(found) + json.dumps(found.to_wire())
    assert found.message.startswith("A worker could not be started: ")
    assert "/hidden/x" in found.whole.message
