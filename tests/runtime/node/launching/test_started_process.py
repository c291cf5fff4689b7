"""A process of the gateway: its start, its end, and its signals."""

import asyncio
import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from live import until
from pilotflame.runtime.node.launching.started_process import StartedProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def started(*command: str) -> StartedProcess:
    nothing = subprocess.DEVNULL
    return await StartedProcess.start(command, stdin=nothing, stdout=nothing, stderr=nothing, env={})


async def test_its_exit_code_comes_to_all_who_wait() -> None:
    process = await started("/bin/sh", "-c", "exit 3")
    async with asyncio.timeout(60):
        assert await asyncio.gather(process.wait(), process.wait()) == [3, 3]
    assert not process.alive
    assert await process.wait() == 3


async def test_a_caller_who_gives_up_waiting_does_not_end_the_wait_of_others() -> None:
    process = await started("/bin/sleep", "600")
    first, second = asyncio.create_task(process.wait()), asyncio.create_task(process.wait())
    await asyncio.sleep(0)
    first.cancel()
    assert process.alive
    process.terminate()
    async with asyncio.timeout(60):
        assert await second == -signal.SIGTERM
    # Send no signal to a process that has ended: its pid may belong to another process now.
    process.terminate()
    process.kill()


async def test_it_has_a_session_of_its_own_and_no_descriptor_of_the_gateway() -> None:
    ours, theirs = os.pipe()
    os.set_inheritable(theirs, True)
    try:
        process = await started("/bin/sleep", "600")
        assert os.getsid(process.pid) == process.pid
        assert not Path(f"/proc/{process.pid}/fd/{theirs}").exists()
        process.kill()
        async with asyncio.timeout(60):
            assert await process.wait() == -signal.SIGKILL
    finally:
        os.close(ours)
        os.close(theirs)


@pytest.mark.parametrize("turns", range(4))
async def test_a_cancelled_start_leaves_no_process(turns: int) -> None:
    before = psutil.Process().children()
    starting = asyncio.create_task(started("/bin/sleep", "600"))
    for _ in range(turns + 1):
        await asyncio.sleep(0)
    starting.cancel()
    await asyncio.wait([starting])
    assert starting.cancelled()

    async def ended() -> bool:
        return psutil.Process().children() == before

    await until(ended, "the end of the process")


async def test_a_program_that_is_missing_is_an_error() -> None:
    with pytest.raises(FileNotFoundError):
        await started("/no/such/program")
    starting = asyncio.create_task(started("/no/such/program"))
    await asyncio.sleep(0)
    starting.cancel()
    await asyncio.wait([starting])
    assert starting.cancelled()
