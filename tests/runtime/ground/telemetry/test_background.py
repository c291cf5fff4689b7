"""Background tasks: a task that fails is logged and counted, and everything else goes on."""

from __future__ import annotations

import asyncio
import gc
import logging
import warnings

import pytest
from live import LIMIT_S
from pilotflame.runtime.ground.telemetry import background
from pilotflame.runtime.ground.telemetry.background import BackgroundTasks

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def fails() -> None:
    raise ZeroDivisionError("of the test")


async def test_a_failed_task_does_not_end_the_gateway(gateway, deploy, caplog):
    function = await deploy("def handler(event):\n    return event")
    assert gateway.server is not None
    with caplog.at_level(logging.ERROR):
        await asyncio.wait([gateway.server.tasks.create_task(fails())])
    assert await function.answer(1) == 1
    assert (
        'pilotflame_background_failures_total{task="fails"} 1.0'
        in (await gateway.client.get("/metrics")).text
    )
    (record,) = [record for record in caplog.records if record.name.endswith("background")]
    assert record.getMessage() == "background task fails failed: ZeroDivisionError: of the test"
    assert record.exc_info is not None


async def test_other_tasks_go_on_and_the_label_is_the_first_word_of_the_name():
    async with asyncio.timeout(LIMIT_S), BackgroundTasks() as tasks:
        others = [tasks.create_task(asyncio.sleep(0.01, result=n)) for n in range(3)]
        assert await tasks.create_task(fails(), name="webhook 1") is None
        assert await tasks.create_task(fails(), name="webhook 2") is None
        assert await asyncio.gather(*others) == [0, 1, 2]
    assert tasks.failures == {"webhook": 2}


async def test_a_task_that_does_not_end_is_cancelled_at_the_end(monkeypatch, caplog):
    monkeypatch.setattr(background, "END_S", 0.05)
    async with asyncio.timeout(LIMIT_S), BackgroundTasks() as tasks:
        waits = tasks.create_task(asyncio.Event().wait(), name="reap 7")
        ends = tasks.create_task(asyncio.sleep(0.01))
    assert (waits.cancelled(), ends.cancelled()) == (True, False)
    (record,) = [record for record in caplog.records if record.name.endswith("background")]
    assert record.getMessage() == "background task reap 7 is cancelled: it had not ended after 0 s"


async def test_a_change_is_completed_although_its_caller_is_cancelled():
    begun, may_end, ended = asyncio.Event(), asyncio.Event(), list[str]()

    async def change() -> None:
        begun.set()
        await may_end.wait()
        ended.append("change")

    async with asyncio.timeout(LIMIT_S), BackgroundTasks() as tasks:
        with pytest.raises(ZeroDivisionError, match="of the test"):
            await tasks.complete(fails())
        caller = tasks.create_task(tasks.complete(change()))
        await begun.wait()
        caller.cancel()
        await asyncio.wait([caller])
        may_end.set()
    assert (caller.cancelled(), ended) == (True, ["change"])
    # The caller has got the error, so it does not count as the failure of a task.
    assert not tasks.failures


async def test_a_group_that_is_cancelled_cancels_its_tasks():
    async def group() -> None:
        async with BackgroundTasks() as tasks:
            waiting.append(tasks.create_task(asyncio.Event().wait()))

    waiting: list[asyncio.Task[bool]] = []
    run = asyncio.create_task(group())
    while not waiting:
        await asyncio.sleep(0)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert waiting[0].cancelled()


async def test_a_kept_task_is_started_again_until_it_returns(monkeypatch):
    monkeypatch.setattr(background, "FIRST_RESTART_S", 0.001)
    runs = 0

    async def third_time_lucky() -> None:
        nonlocal runs
        runs += 1
        if runs < 3:
            raise OSError("no space")

    async with asyncio.timeout(LIMIT_S), BackgroundTasks() as tasks:
        await tasks.keep(third_time_lucky, name="writer")
    assert runs == 3
    assert tasks.failures == {"writer": 2}


async def test_a_task_that_is_cancelled_is_no_failure_and_leaves_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        async with asyncio.timeout(LIMIT_S), BackgroundTasks() as tasks:
            tasks.create_task(fails()).cancel()
            started = tasks.keep(asyncio.Event().wait, name="waits")
            await asyncio.sleep(0)
            started.cancel()
        gc.collect()
    assert not tasks.failures
