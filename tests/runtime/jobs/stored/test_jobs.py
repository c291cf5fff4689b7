"""Jobs: a cancel or purge runs to its end even if the caller disconnects; errors reach the caller."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import tracemalloc
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from live import Function, Gate, Gateway, gateway_here, until
from pilotflame.errors import JobStoreFailed, UnknownJob
from pilotflame.runtime.jobs.stored.attempt import JobAttempt
from pilotflame.runtime.jobs.stored.job import JobState
from pilotflame.runtime.jobs.stored.jobs import Jobs

pytestmark = pytest.mark.asyncio(loop_scope="module")

SLEEPS = """
import asyncio, gate
async def handler(event):
    gate.say("at work")
    try:
        await asyncio.sleep(3600)
    finally:
        gate.say("stopped")
"""
EVENTS = {"Accept": "text/event-stream"}
WAITS = "import gate\ndef handler(event):\n    if event == 'fails':\n        raise ValueError(event)\n    gate.wait(str(event))\n    return event\n"
NEXT = "def handler(event):\n    return ['next', event]\n"


@pytest.fixture
def jobs(gateway: Gateway) -> Jobs:
    assert gateway.server is not None
    return gateway.server.jobs


async def run(function: Function, event: Any = None) -> str:
    response = await function.client.post(f"/v2/{function.name}/run", json={"input": event})
    return str(response.json()["id"])


class Held:
    """A call of the store that returns only after `go`."""

    def __init__(self, real: Callable[..., Awaitable[Any]]) -> None:
        self._real = real
        self.called = asyncio.Event()
        self.go = asyncio.Event()

    async def __call__(self, *args: Any, **more: Any) -> Any:
        self.called.set()
        found = await self._real(*args, **more)
        await self.go.wait()
        return found


async def leave(calling: asyncio.Task[Any]) -> None:
    calling.cancel()
    await asyncio.wait([calling])
    assert calling.cancelled()


async def test_a_job_is_stopped_though_the_canceller_disconnects(
    deploy, gate: Gate, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
):
    function = await deploy(SLEEPS, gate=gate)
    job = await run(function)
    await gate.next("at work")
    held = Held(jobs.store.cancel)
    monkeypatch.setattr(jobs.store, "cancel", held)
    calling = asyncio.create_task(jobs.store.cancel(function.name, job))
    await held.called.wait()
    await leave(calling)
    held.go.set()
    await gate.next("stopped")


async def test_a_purge_is_finished_though_its_caller_disconnects(
    deploy, gate: Gate, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("pilotflame.runtime.jobs.sql.transitions.PURGE_SLICE", 2)
    function = await deploy(WAITS, {"scale.max": 1}, gate=gate)
    first = await run(function, 0)
    await gate.next("0")
    waiting = [await run(function, number) for number in range(1, 7)]
    held = Held(jobs.store._database.read)
    with monkeypatch.context() as patched:
        patched.setattr(jobs.store._database, "read", held)
        calling = asyncio.create_task(jobs.purge(function.name))
        await held.called.wait()
        await leave(calling)
    held.go.set()

    async def all_cancelled() -> bool:
        found = [await jobs.store.get(function.name, job) for job in waiting]
        return all(job.state is JobState.CANCELLED for job in found)

    await until(all_cancelled, "the end of the purge")
    gate.open()
    assert (await jobs.wait(function.name, first, 20.0)).state is JobState.COMPLETED


async def test_an_error_reaches_the_caller_and_not_the_gateway(
    deploy, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
):
    function = await deploy("def handler(event):\n    return event\n")
    with pytest.raises(UnknownJob):
        await jobs.store.cancel(function.name, "job-unknown")

    async def broken(*_: object) -> int:
        raise error

    monkeypatch.setattr(jobs.store, "purge", broken)
    for error in (JobStoreFailed("The disk is full."), TypeError("internal")):
        with pytest.raises(type(error)):
            await jobs.purge(function.name)
    job = await run(function, 3)
    assert (await jobs.wait(function.name, job, 20.0)).output == b"3"


async def test_no_job_of_a_deleted_function_runs_on_the_next_function_of_its_name(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(_jobs: Jobs, _function: str) -> None:
        """Leave the jobs queued, as `Jobs._forget` does if the store fails."""

    async with gateway_here(state) as gateway, Gate(state.parent / "gate") as gate:
        function = await gateway.deploy(WAITS, {"scale.max": 1}, name="taken", gate=gate)
        failed = await run(function, "fails")
        assert (await status(function, failed, 60))["status"] == "FAILED"
        ids = [await run(function, number) for number in range(3)]
        await gate.next("0")
        with monkeypatch.context() as patched:
            patched.setattr(Jobs, "_forget", fails)
            await gateway.client.delete("/v1/functions/taken")
        await gateway.deploy(NEXT, name="taken")
        assert (await status(function, await run(function, 3), 60))["output"] == ["next", 3]
        # All jobs of the deleted function are cancelled. The handler of the first job still waits at the gate.
        for job in reversed(ids):
            found = await status(function, job, 20)
            assert (found["status"], found.get("output")) == ("CANCELLED", None)
        assert (await gateway.client.post(f"/v2/taken/retry/{failed}")).status_code == 409
        assert (await status(function, failed))["status"] == "FAILED"


async def test_a_job_that_is_stored_after_the_deletion_of_its_function_is_not_queued_again(
    state: Path,
) -> None:
    async with gateway_here(state) as gateway, Gate(state.parent / "gate") as gate:
        await gateway.deploy(WAITS, name="taken", gate=gate)
        # A job whose caller waits is stored later: when it ends, when its worker ends, or after UNSTORED_S.
        waiting = asyncio.create_task(gateway.client.post("/v2/taken/runsync", json={"input": 0}))
        worker = (await gate.next("0")).pid
        await gateway.client.delete("/v1/functions/taken")
        await gateway.deploy(NEXT, name="taken")
        os.kill(worker, signal.SIGKILL)
        found = (await waiting).json()
        assert (found["status"], found.get("output")) == ("CANCELLED", None)


async def status(function: Function, job: str, wait_s: int = 0) -> dict[str, Any]:
    response = await function.client.get(f"/v1/functions/{function.name}/jobs/{job}?wait_s={wait_s}")
    return dict(response.json())


async def test_the_job_of_a_caller_does_not_wait_behind_all_jobs_of_another(state: Path) -> None:
    """One caller has queued 300 jobs. The job of another caller runs after a few of them."""
    async with gateway_here(state) as gateway, gateway.at_home() as home:
        source = "def handler(event):\n    return event\n"
        await gateway.deploy(source, {"scale.max": 1}, name="shared")
        await gateway.client.post("/v1/functions/shared/pause")
        keys = [(await home.post("/v1/keys", json={"name": name})).json()["key"] for name in ("many", "one")]
        ids = list[list[str]]()
        for token, count in zip(keys, (300, 1), strict=True):
            function = Function("shared", gateway.client, {})
            gateway.client.headers["Authorization"] = f"Bearer {token}"
            ids.append([await run(function, number) for number in range(count)])
        await home.post("/v1/functions/shared/resume")
        ((lone,), many) = ids[1], ids[0]

        async def ended() -> bool:
            return (await gateway.client.get(f"/v2/shared/status/{lone}")).json()["status"] == "COMPLETED"

        await until(ended, "the lone job")
        jobs = gateway.server.jobs if gateway.server is not None else None
        assert jobs is not None
        started = {job_id: (await jobs.store.get("shared", job_id)).started_s for job_id in [lone, *many]}
        # `started_s` is 0 if the job has not started.
        assert sum(0 < started[job_id] < started[lone] for job_id in many) <= 20

        async def empty() -> bool:
            return not (await jobs.store.counts("shared")).in_queue

        await until(empty, "the start of all jobs")


@pytest.mark.parametrize("path", ["run", "runsync"])
async def test_a_job_is_freed_at_its_end_without_the_garbage_collector(gateway: Gateway, path: str) -> None:
    """Otherwise the inputs of many large jobs would be in memory at the same time."""
    function = await gateway.deploy("def handler(event):\n    return len(event)\n")
    await gateway.client.post(f"/v2/{function.name}/runsync?wait=20000", json={"input": "warm"})
    gc.collect()
    gc.disable()
    try:
        answer = await gateway.client.post(f"/v2/{function.name}/{path}", json={"input": "x" * 1000})
        ended = f"/v2/{function.name}/status/{answer.json()['id']}"

        async def done() -> bool:
            return bool((await gateway.client.get(ended)).json()["status"] == "COMPLETED")

        await until(done, "the job has ended")

        async def freed() -> bool:
            attempts = [one for one in gc.get_objects() if type(one) is JobAttempt]
            return not any(one.job.function == function.name for one in attempts)

        await until(freed, "the attempt is freed")
    finally:
        gc.enable()


INPUT_BYTES, CALLERS = 1 << 20, 12


async def test_callers_who_wait_for_a_job_keep_no_copies_of_its_input(
    deploy, gate: Gate, gateway: Gateway, jobs: Jobs
):
    source = "import gate\ndef handler(event):\n    gate.wait()\n"
    function = await deploy(source, {"scale.max": 1}, gate=gate)
    body = {"input": "x" * INPUT_BYTES}
    job = (await gateway.client.post(f"/v2/{function.name}/run", json=body)).json()["id"]
    begun = await gate.next()
    paths = {f"/v2/{function.name}/status-sync/{job}": {}, f"/v2/{function.name}/stream/{job}": EVENTS}
    tracemalloc.start()
    try:
        asked = [
            asyncio.create_task(gateway.client.get(path, headers=headers))
            for path, headers in paths.items()
            for _ in range(CALLERS)
        ]

        async def watched() -> bool:
            return len(jobs._watchers.get(job, ())) >= 2 * CALLERS

        await until(watched, "callers who wait")
        # Each caller has queued a read of the job. Wait for a read behind these reads.
        await jobs.store.pieces(job, 0)
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    begun.go()
    assert {response.status_code for response in await asyncio.gather(*asked)} == {200}
    assert kept < 4 * INPUT_BYTES
