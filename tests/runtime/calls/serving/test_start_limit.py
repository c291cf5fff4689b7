"""The limit of a worker's start: without progress, and with it."""

import asyncio
import itertools
from typing import Any

import pytest
from live import failure
from pilotflame.runtime.calls.serving.start_limit import MOST_TIMES, StartLimit

pytestmark = pytest.mark.asyncio(loop_scope="module")
SILENT_S = 0.02


class Worker:
    def __init__(self) -> None:
        self.killed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def kill_stuck(self, reason: str) -> None:
        self.killed.set_result(reason)


async def test_a_start_without_progress_is_ended() -> None:
    worker: Any = Worker()
    StartLimit(worker, SILENT_S, lambda: "the same")
    async with asyncio.timeout(60):
        assert await worker.killed == "it was not ready after 0 s (start_timeout_s)"


async def test_a_start_with_progress_may_take_four_times_as_long() -> None:
    worker: Any = Worker()
    loop, numbers = asyncio.get_running_loop(), itertools.count()
    began_s = loop.time()
    StartLimit(worker, SILENT_S, lambda: next(numbers), later_s=SILENT_S)
    async with asyncio.timeout(60):
        await worker.killed
    assert loop.time() - began_s >= (MOST_TIMES + 1) * SILENT_S


async def test_the_limit_of_a_worker_that_is_ready_has_no_effect() -> None:
    worker: Any = Worker()
    limit = StartLimit(worker, SILENT_S, lambda: "the same")
    limit.end()
    await asyncio.sleep(3 * SILENT_S)
    assert not worker.killed.done()


async def test_a_silent_setup_fails_the_deploy_and_one_that_prints_does_not(gateway, deploy) -> None:
    limited = {"start_timeout_s": 0.5}
    source = "import time\ndef setup(context):\n    for number in range(6):\n        time.sleep(0.2)\n        print(number, flush=True)\n"
    function = await deploy(f"{source}def handler(event):\n    return 7", limited, name="prints")
    assert await function.answer() == 7
    source = "import time\ndef setup(context):\n    time.sleep(600)\ndef handler(event):\n    return 7"
    error = failure(await gateway.send(source, limited, name="silent"))
    assert "start_timeout_s" in error["message"]
