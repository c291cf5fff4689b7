"""Jobs whose callers wait for the end: stored in one commit, and lost only before a caller has an answer."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from live import LIMIT_S, Function, Gate, Gateway, failure, gateway_process, gone, until
from pilotflame.errors import JobStoreFailed
from pilotflame.runtime.jobs.sqlite.store import DATABASE_FILE
from pilotflame.runtime.jobs.stored.jobs import Jobs

pytestmark = pytest.mark.asyncio(loop_scope="module")

ECHO = "def handler(event):\n    return event\n"
WAITS = "import gate\ndef handler(event):\n    gate.wait(str(event))\n    return event\n"
DIES = "import gate, os\ndef handler(event):\n    gate.say('at work')\n    os._exit(3)\n"


@pytest.fixture
def jobs(gateway: Gateway) -> Jobs:
    assert gateway.server is not None
    return gateway.server.jobs


async def runsync(function: Function, event: Any = None, **query: Any) -> dict[str, Any]:
    path, order = f"/v2/{function.name}/runsync", {"input": event}
    response = await function.client.post(path, json=order, params=query)
    assert response.status_code == 200, response.text
    return dict(response.json())


async def listed(function: Function, **query: Any) -> list[dict[str, Any]]:
    response = await function.client.get(f"/v2/{function.name}/requests", params=query)
    return list(response.json()["requests"])


async def status(function: Function, job: str) -> dict[str, Any]:
    return dict((await function.client.get(f"/v2/{function.name}/status/{job}")).json())


async def counts(function: Function) -> dict[str, int]:
    found = (await function.client.get(f"/v2/{function.name}/health")).json()["jobs"]
    return {name: count for name, count in found.items() if count}


async def test_a_short_job_costs_one_commit(deploy, jobs: Jobs):
    function = await deploy(ECHO)
    # Start a worker first. A job that waited for its start could be stored before its end, with a second commit.
    await function.answer(1)
    said: list[str] = []
    await jobs.store._database.write(lambda connection: connection.set_trace_callback(said.append))
    shown = await runsync(function, {"n": 5})
    await jobs.store._database.write(lambda connection: connection.set_trace_callback(None))
    # The first COMMIT belongs to the write that sets the callback.
    commits = [index for index, statement in enumerate(said) if statement == "COMMIT"]
    assert len(commits) == 2
    assert shown.pop("executionTime") >= 0
    found = await status(function, shown["id"])
    assert found.pop("executionTime") >= 0
    assert found == shown
    assert (found["status"], found["output"], found["attempts"]) == ("COMPLETED", {"n": 5}, 1)
    assert found["workerId"]
    assert [job["id"] for job in await listed(function)] == [shown["id"]]
    assert await counts(function) == {"completed": 1}


async def test_a_job_that_fails_is_stored_and_can_be_retried(deploy):
    function = await deploy("def handler(event):\n    raise ValueError('no good')\n")
    shown = await runsync(function, 5)
    assert shown["status"] == "FAILED"
    assert "no good" in shown["error"]
    response = await function.client.post(f"/v2/{function.name}/retry/{shown['id']}")
    assert response.status_code == 200, response.text

    async def ended() -> bool:
        found = await status(function, shown["id"])
        return (found["status"], found["attempts"], found["retries"]) == ("FAILED", 2, 1)

    await until(ended, "the end of the retry")


async def test_a_longer_job_is_listed_and_can_be_cancelled(deploy, gate: Gate):
    function = await deploy(WAITS, {"scale.max": 1}, gate=gate)
    running = asyncio.ensure_future(runsync(function, "a"))
    await gate.next("a")
    queued = asyncio.ensure_future(runsync(function, "b"))

    async def both() -> bool:
        return [job["status"] for job in await listed(function)] == ["IN_QUEUE", "IN_PROGRESS"]

    await until(both, "both jobs")
    assert await counts(function) == {"inQueue": 1, "inProgress": 1}
    second, first = [job["id"] for job in await listed(function)]
    for job, calling in ((second, queued), (first, running)):
        assert (await function.client.post(f"/v2/{function.name}/cancel/{job}")).status_code == 200
        assert (await calling)["status"] == "CANCELLED"
        assert (await calling)["id"] == job


async def test_a_caller_whose_time_is_over_gets_the_id(deploy, gate: Gate):
    function = await deploy(WAITS, gate=gate)
    shown = await runsync(function, "a", wait=1000)
    assert shown["status"] == "IN_PROGRESS"
    gate.open()
    response = await function.client.get(f"/v2/{function.name}/status-sync/{shown['id']}?wait=20000")
    assert (response.json()["status"], response.json()["output"]) == ("COMPLETED", "a")


async def test_a_job_is_stored_though_its_caller_disconnects(deploy, gate: Gate):
    function = await deploy(WAITS, gate=gate)
    calling = asyncio.ensure_future(runsync(function, "a"))
    arrival = await gate.next("a")
    calling.cancel()
    await asyncio.wait([calling])
    arrival.go()

    async def completed() -> bool:
        return [job["status"] for job in await listed(function)] == ["COMPLETED"]

    await until(completed, "the end of the job")


async def test_a_job_that_cannot_be_stored_is_an_error(deploy, jobs: Jobs, monkeypatch: pytest.MonkeyPatch):
    function = await deploy(ECHO)
    await function.answer(1)

    async def broken(*_: object) -> None:
        raise JobStoreFailed("The disk is full.")

    with monkeypatch.context() as patched:
        patched.setattr(jobs.store, "record", broken)
        response = await function.client.post(f"/v2/{function.name}/runsync", json={"input": 1})
        assert (failure(response)["status"], failure(response)["type"]) == (503, "job_store_failed")
    assert await listed(function) == []
    assert (await runsync(function, 2))["output"] == 2


@pytest.mark.parametrize("attempts", [1, 2])
async def test_a_dead_worker_counts_as_an_attempt(deploy, gate: Gate, attempts: int):
    function = await deploy(DIES, {"attempts": attempts}, gate=gate)
    shown = await runsync(function, 1)
    assert (shown["status"], shown["attempts"]) == ("FAILED", attempts)
    assert len(gate.arrived) == attempts


async def test_waiting_callers_and_stored_jobs_run_in_the_order_of_arrival(deploy, gate: Gate):
    function = await deploy(WAITS, {"scale.max": 1}, gate=gate)
    path = f"/v2/{function.name}/run"
    # Submit only as many jobs as fit into the queue of the revision. Further jobs may run after the job of a waiting caller.
    for number in range(8):
        await function.client.post(path, json={"input": number})
    await gate.next("0")

    async def queued() -> bool:
        return (await function.status())["queued"] == 7

    await until(queued, "seven jobs in the queue")
    calling = asyncio.ensure_future(runsync(function, "sync"))

    async def stored() -> bool:
        return len(await listed(function)) == 9

    await until(stored, "the job whose caller waits")
    for number in range(8, 12):
        await function.client.post(path, json={"input": number})
    gate.open()
    assert (await calling)["status"] == "COMPLETED"

    async def all_ran() -> bool:
        return (await counts(function)) == {"completed": 13}

    await until(all_ran, "the end of all jobs")
    assert [arrival.word for arrival in gate.arrived] == [
        *map(str, range(8)),
        "sync",
        *map(str, range(8, 12)),
    ]


async def test_the_limit_of_the_queue_holds(deploy, gate: Gate):
    function = await deploy(WAITS, {"scale.max": 1, "max_jobs": 2}, gate=gate)
    first = asyncio.ensure_future(runsync(function, "a"))
    await gate.next("a")
    path = f"/v2/{function.name}/runsync"
    calls = [
        asyncio.ensure_future(function.client.post(path, json={"input": n}, params={"wait": 1000}))
        for n in range(5)
    ]
    responses = await asyncio.gather(*calls)
    assert sorted(response.status_code for response in responses) == [200, 200, 429, 429, 429]
    gate.open()
    assert (await first)["status"] == "COMPLETED"


async def test_what_was_answered_survives_a_kill(state: Path):
    """A killed gateway also leaves no job half stored: the counters equal the number of jobs."""
    answered: dict[str, Any] = {}
    async with gateway_process(state) as gateway:
        function = await gateway.deploy(ECHO, {"scale.max": 1})
        await function.answer(1)

        async def call(caller: int) -> None:
            number = 0
            while True:
                number += 1
                try:
                    shown = await runsync(function, [caller, number])
                except httpx.TransportError:
                    return
                answered[shown["id"]] = [caller, number]

        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as calls:
            for caller in range(8):
                calls.create_task(call(caller))

            async def enough() -> bool:
                return len(answered) > 60

            await until(enough, "answers")
            assert gateway.process is not None
            gateway.process.kill()
        await gone(gateway.process.pid)
    with closing(sqlite3.connect(state / DATABASE_FILE)) as file:
        stored = file.execute("SELECT state, attempts, count(*) FROM jobs GROUP BY 1, 2").fetchall()
        counted = file.execute("SELECT completed, in_queue, in_progress FROM counters").fetchall()
    total = sum(count for *_, count in stored)
    assert sum(sum(row) for row in counted) == total >= len(answered)
    async with gateway_process(state) as gateway:
        function = gateway.function(function.name)
        for job, event in answered.items():
            found = await status(function, job)
            assert (found["status"], found["output"]) == ("COMPLETED", event)
