"""Attempts under faults: a full disk, a job that was lost to another attempt, a worker that cannot start, a shutdown."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from live import LIMIT_S, Function, Gate, Gateway, gateway_here, until
from pilotflame.errors import JobStoreFailed, RevisionRetired
from pilotflame.runtime.calls.serving.invocation import Invocation
from pilotflame.runtime.jobs.stored import attempt
from pilotflame.runtime.jobs.stored.job import JobOutcome, JobState
from pilotflame.runtime.jobs.stored.job_store import JobStore

pytestmark = pytest.mark.asyncio(loop_scope="module")

WAITS = "import gate\ndef handler(event):\n    gate.wait('at work')\n    return event\n"
STREAMS = """
import gate, time
def handler(event):
    gate.say("at work")
    try:
        while True:
            yield 1
            time.sleep(0.001)
    finally:
        gate.say("stopped")
"""
SETS_UP = """
import pathlib
def setup():
    file = pathlib.Path(__file__).with_name("starts")
    starts = len(file.read_text()) if file.exists() else 0
    file.write_text("x" * (starts + 1))
    if starts < %d:
        raise RuntimeError("not yet")
def handler(event):
    return event
"""


@pytest.fixture
def store(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> JobStore:
    """Return the gateway's store. Set short delays between repeated calls."""
    monkeypatch.setattr(attempt, "STORE_RETRY_S", 0.001)
    monkeypatch.setattr(attempt, "BACKOFF_S", 0.001)
    assert gateway.server is not None
    return gateway.server.jobs.store


async def run(function: Function, event: Any = None, **more: Any) -> str:
    response = await function.client.post(f"/v2/{function.name}/run", json={"input": event, **more})
    assert response.status_code == 200, response.text
    return str(response.json()["id"])


async def ended(function: Function, job: str) -> dict[str, Any]:
    return await seen(function, job, lambda found: found["status"] not in ("IN_QUEUE", "IN_PROGRESS"))


async def seen(function: Function, job: str, holds: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    found: dict[str, Any] = {}

    async def so() -> bool:
        found.clear()
        found.update((await function.client.get(f"/v2/{function.name}/status/{job}")).json())
        return bool(holds(found))

    await until(so, f"{job} as wanted: {found}")
    return found


def refusing(
    real: Callable[..., Awaitable[Any]], error: Exception, times: int
) -> Callable[..., Awaitable[Any]]:
    left = [error] * times

    async def asked(*args: Any, **more: Any) -> Any:
        if left:
            raise left.pop()
        return await real(*args, **more)

    return asked


@pytest.mark.parametrize("what", ["take", "finish"])
async def test_a_write_that_the_disk_refuses_is_repeated_and_nothing_runs_twice(
    deploy, gate: Gate, store: JobStore, monkeypatch: pytest.MonkeyPatch, what: str
):
    function = await deploy(WAITS, gate=gate)
    gate.open()
    monkeypatch.setattr(store, what, refusing(getattr(store, what), JobStoreFailed("The disk is full."), 3))
    job = await run(function, 7)
    assert (await ended(function, job))["output"] == 7
    assert len(gate.arrived) == 1


async def test_an_internal_error_ends_the_job_and_not_the_gateway(
    deploy, store: JobStore, monkeypatch: pytest.MonkeyPatch
):
    function = await deploy("def handler(event):\n    return event\n")
    monkeypatch.setattr(store, "finish", refusing(store.finish, TypeError("no text"), 1))
    found = await ended(function, await run(function, 1))
    assert (found["status"], found["errorDetails"]["type"]) == ("FAILED", "gateway_error")
    assert (await ended(function, await run(function, 2)))["output"] == 2


async def test_a_job_that_cannot_be_given_up_is_logged_and_ends_nothing_else(
    deploy, gateway: Gateway, store: JobStore, monkeypatch: pytest.MonkeyPatch
):
    source = "def handler(event, context):\n    context.progress(event)\n    return event\n"
    function = await deploy(source)
    assert gateway.server is not None
    logs = gateway.server.functions.get(function.name).logs
    monkeypatch.setattr(store, "set_progress", refusing(store.set_progress, TypeError("no text"), 1))
    with monkeypatch.context() as patched:
        patched.setattr(store, "finish", refusing(store.finish, TypeError("no text"), 2))
        job = await run(function, 1)

        async def logged() -> bool:
            return any(f"job {job} could not be given up" in line.text for line in logs.tail(100))

        await until(logged, "the log line of the job that could not be given up")
    assert (await ended(function, await run(function, 2)))["output"] == 2
    assert (await store.get(function.name, job)).state is JobState.IN_PROGRESS


async def test_a_failure_with_surrogates_in_its_text_is_stored(deploy):
    function = await deploy("def handler(event):\n    print('\\udcff')\n    raise ValueError('\\udcff')\n")
    hook = {"webhook": "https://example.invalid/", "webhook_events": ["completed"]}
    found = await ended(function, await run(function, 1, **hook))
    assert found["status"] == "FAILED"
    assert found["errorDetails"]["type"] == "handler_failed"


async def test_a_stream_that_is_too_large_fails_and_is_stopped(
    deploy, gate: Gate, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(attempt, "MAX_STREAM_BYTES", 1 << 20)
    function = await deploy(STREAMS.replace("yield 1", "yield 'x' * 100_000"), gate=gate)
    found = await ended(function, await run(function))
    assert (found["status"], found["errorDetails"]["type"]) == ("FAILED", "output_invalid")
    assert "1 MiB" in found["error"]
    assert "elsewhere" in found["errorDetails"]["remedy"]
    await gate.next("stopped")


async def test_a_stream_that_is_too_large_for_a_list_is_not_read(
    deploy, store: JobStore, monkeypatch: pytest.MonkeyPatch
):
    function = await deploy("def handler(event):\n    for number in range(event):\n        yield number\n")
    monkeypatch.setattr(attempt, "MAX_AGGREGATE_BYTES", 5 * (1 + attempt.ROW_BYTES))
    assert (await ended(function, await run(function, 5)))["output"] == [0, 1, 2, 3, 4]
    monkeypatch.setattr(store, "pieces", refusing(store.pieces, AssertionError("read"), 9))
    found = await ended(function, await run(function, 6))
    assert (found["status"], found["output"], found["pieces"]) == ("COMPLETED", [], 6)


async def test_the_stream_of_a_lost_job_is_stopped(deploy, gate: Gate, store: JobStore):
    function = await deploy(STREAMS, gate=gate)
    job = await run(function)
    await gate.next("at work")
    await seen(function, job, lambda found: found.get("pieces"))
    # End the job in the store alone, so that the dispatcher does not notice.
    assert await store.finish(job, 1, JobOutcome(JobState.CANCELLED))
    await gate.next("stopped")
    assert (await ended(function, job))["status"] == "CANCELLED"


async def test_progress_from_before_the_job_is_taken_is_shown(
    deploy, gate: Gate, store: JobStore, monkeypatch: pytest.MonkeyPatch
):
    source = "import gate\ndef handler(event, context):\n    context.progress(5)\n    gate.wait('at work')\n"
    function = await deploy(source, gate=gate)
    real, reported = store.take, asyncio.Event()

    async def late(*args: Any) -> Any:
        await reported.wait()
        return await real(*args)

    monkeypatch.setattr(store, "take", late)
    job = await run(function)
    await gate.next("at work")
    reported.set()
    await seen(function, job, lambda found: found.get("output") == 5)
    gate.open()
    await ended(function, job)


@pytest.mark.parametrize(("failures", "status"), [(1, "COMPLETED"), (9, "FAILED")])
async def test_a_worker_that_cannot_start_costs_an_attempt(
    deploy, store: JobStore, failures: int, status: str
):
    function = await deploy(SETS_UP % failures, {"attempts": 2}, check=False)
    job = await run(function, 3)
    found = await ended(function, job)
    assert found["status"] == status
    assert (await store.get(function.name, job)).attempts == 2
    if status == "FAILED":
        assert found["errorDetails"]["type"] == "handler_setup_failed"


async def test_a_caller_that_waits_for_a_job_is_notified_of_a_purge(deploy, gate: Gate):
    function = await deploy(WAITS, {"scale.max": 1}, gate=gate)
    await run(function)
    await gate.next("at work")
    waiting = [
        asyncio.create_task(
            function.client.post(f"/v2/{function.name}/runsync?wait=300000", json={"input": n})
        )
        for n in range(14)
    ]
    async with asyncio.timeout(LIMIT_S):
        while (await function.client.get(f"/v2/{function.name}/health")).json()["jobs"]["inQueue"] < 14:
            await asyncio.sleep(0.005)
        await function.client.post(f"/v2/{function.name}/purge-queue")
        responses = await asyncio.gather(*waiting)
    assert {response.json()["status"] for response in responses} == {"CANCELLED"}


async def test_a_retired_revision_refuses_and_fails_what_it_gets(deploy, gateway: Gateway):
    function = await deploy("def handler(event):\n    return event\n")
    assert gateway.server is not None
    workers = gateway.server.functions.get(function.name).workers
    revision = workers.revision
    await workers.retire(0.0)
    moment_s = time.monotonic()
    late = Invocation("late", b"1", now_s=moment_s, deadline_s=moment_s + 60, hold_until_s=moment_s + 60)
    with pytest.raises(RevisionRetired):
        revision.submit(late)
    # Return the invocation, as a worker that has ended does.
    revision.on_returned(late)
    with pytest.raises(RevisionRetired):
        await late.output


async def test_an_invocation_that_returns_from_a_worker_waits_until_hold_until(deploy, gateway: Gateway):
    function = await deploy("def handler(event):\n    return event\n")
    assert gateway.server is not None
    moment_s = time.monotonic()
    back = Invocation(
        "back", b"1", now_s=moment_s, deadline_s=moment_s, hold_until_s=moment_s + 60, execution_s=30.0
    )
    gateway.server.functions.live(function.name).on_returned(back)
    # No worker is ready yet, so the invocation may wait until `hold_until_s`.
    assert back.deadline_s == back.hold_until_s
    assert (await back.output).payload == b"1"


async def test_a_shutdown_during_a_job_of_an_idempotent_function_costs_no_attempt(state, gate: Gate):
    async with gateway_here(state, drain_s=0.0) as gateway:
        function = await gateway.deploy(WAITS, {"attempts": 1, "idempotent": True}, gate=gate)
        job = await run(function, 4)
        await gate.next("at work")
        await seen(function, job, lambda found: found["status"] == "IN_PROGRESS")
    gate.open()
    async with gateway_here(state) as gateway:
        assert (await ended(gateway.function(function.name), job))["output"] == 4


async def test_a_shutdown_during_the_last_attempt_of_a_job_fails_it_by_name(state, gate: Gate):
    async with gateway_here(state, drain_s=0.0) as gateway:
        function = await gateway.deploy(WAITS, {"attempts": 1}, gate=gate)
        job = await run(function, 4)
        await gate.next("at work")
        await seen(function, job, lambda found: found["status"] == "IN_PROGRESS")
    async with gateway_here(state) as gateway:
        found = await ended(gateway.function(function.name), job)
        assert (found["status"], found["errorDetails"]["type"]) == ("FAILED", "shutting_down")
