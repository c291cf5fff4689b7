"""RunPod's queue API over real HTTP: every accepted job can be looked up, however it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest
from live import LIMIT_S, Function, Gate, Gateway, failure, gateway_here, gone, until
from pilotflame.errors import JobStoreFailed
from pilotflame.runtime.front.api import job_events

pytestmark = pytest.mark.asyncio(loop_scope="module")

ECHO = "def handler(event):\n    return {'twice': event * 2}\n"
WAITS = "import gate\ndef handler(event):\n    gate.wait(str(event))\n    return event\n"
FAILS = "def handler(event):\n    print('the last words')\n    raise ValueError('no good')\n"
STREAMS = "def handler(event):\n    for n in range(event):\n        yield {'n': n}\n"


class Queue:
    """A function's queue, as a caller sees it."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.base = f"/v2/{function.name}"

    async def post(self, path: str, body: Any = None, **headers: str) -> httpx.Response:
        named = {key.replace("_", "-"): value for key, value in headers.items()}
        return await self.function.client.post(f"{self.base}/{path}", json=body, headers=named)

    async def get(self, path: str, **query: Any) -> Any:
        response = await self.function.client.get(f"{self.base}/{path}", params=query)
        assert response.status_code == 200, response.text
        return response.json()

    async def run(self, event: Any, **more: Any) -> str:
        response = await self.post("run", {"input": event, **more})
        assert response.status_code == 200, response.text
        assert response.json()["status"] in ("IN_QUEUE", "IN_PROGRESS", "COMPLETED")
        return str(response.json()["id"])

    async def ended(self, job: str, **states: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}

        async def so() -> bool:
            found.update(await self.get(f"status/{job}"))
            return found["status"] not in ("IN_QUEUE", "IN_PROGRESS")

        await until(so, f"the end of {job}")
        return found

    async def reached(self, job: str, state: str) -> None:
        async def so() -> bool:
            return bool((await self.get(f"status/{job}"))["status"] == state)

        await until(so, f"{job} {state}")


async def test_a_job_wakes_the_function_and_its_result_is_kept(deploy):
    queue = Queue(await deploy(ECHO))
    job = await queue.run(21)
    found = await queue.ended(job)
    assert found["status"] == "COMPLETED"
    assert found["output"] == {"twice": 42}
    assert found["workerId"]
    assert found["delayTime"] >= 0
    assert found["executionTime"] >= 0
    assert (await queue.get(f"status/{job}"))["output"] == {"twice": 42}


async def test_submit_and_wait(deploy):
    queue = Queue(await deploy(ECHO))
    found = (await queue.post("runsync", {"input": [1]})).json()
    assert (found["status"], found["output"]) == ("COMPLETED", {"twice": [1, 1]})


async def test_a_wait_that_ends_first_returns_the_job(deploy, gate: Gate):
    queue = Queue(await deploy(WAITS, gate=gate))
    found = (await queue.post("runsync?wait=1000", {"input": 7})).json()
    assert found["status"] in ("IN_QUEUE", "IN_PROGRESS")
    (await gate.next("7")).go()
    assert (await queue.ended(found["id"]))["output"] == 7


async def test_a_full_queue_refuses_with_retry_after(deploy, gate: Gate):
    queue = Queue(await deploy(WAITS, {"max_jobs": 1, "scale.max": 1}, gate=gate))
    running = await queue.run(1)
    await gate.next("1")
    await queue.reached(running, "IN_PROGRESS")
    second = await queue.post("run", {"input": 2}, Idempotency_Key="two")
    refused = await queue.post("run", {"input": 3})
    assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
    assert failure(refused)["type"] == "queue_full"
    again = await queue.post("run", {"input": 2}, Idempotency_Key="two")
    assert again.json()["id"] == second.json()["id"]
    gate.open()
    assert (await queue.ended(second.json()["id"]))["output"] == 2


async def test_nothing_waits_for_a_cold_start(deploy, gate: Gate):
    source = "import gate\ndef setup():\n    gate.wait('setup')\ndef handler(event):\n    return event\n"
    queue = Queue(await deploy(source, gate=gate, check=False))
    job = await queue.run(1)
    arrival = await gate.next("setup")
    assert (await queue.get(f"status/{job}"))["status"] == "IN_QUEUE"
    health = await queue.get("health")
    assert health["jobs"]["inQueue"] == 1
    assert health["workers"]["initializing"] == 1
    other = await queue.run(2)
    assert (await queue.post(f"cancel/{other}")).json()["status"] == "CANCELLED"
    arrival.go()
    assert (await queue.ended(job))["output"] == 1
    assert (await queue.get(f"status/{other}"))["status"] == "CANCELLED"


async def test_workers_that_cannot_start_are_unhealthy_or_throttled(
    deploy, gateway: Gateway, state, gate: Gate
):
    """`unhealthy` counts failed starts. `throttled` counts workers that waiting jobs need, but that may not start."""
    queue = Queue(
        await deploy("def setup(context):\n    raise ValueError\ndef handler(event): ...\n", check=False)
    )
    health = await queue.get("health")
    assert (health["workers"]["unhealthy"], health["workers"]["throttled"]) == (0, 0)
    await queue.run(1)

    async def failed() -> bool:
        return bool((await queue.get("health"))["workers"]["unhealthy"] >= 1)

    await until(failed, "a failed start")
    async with gateway_here(state, max_workers=1, drain_s=1.0) as full:
        await Queue(await full.deploy(WAITS, name="first", gate=gate)).run(1)
        await gate.next("1")
        second = Queue(await full.deploy(WAITS, name="second", gate=gate, check=False))
        assert (await second.get("health"))["workers"]["throttled"] == 0
        await second.run(2)

        async def waits() -> bool:
            return bool((await second.get("health"))["workers"]["throttled"] == 1)

        await until(waits, "a worker that may not start")
        gate.open()


async def test_a_failure_is_data(deploy):
    queue = Queue(await deploy(FAILS))
    response = await queue.post("runsync", {"input": 1})
    assert response.status_code == 200
    found = response.json()
    assert found["status"] == "FAILED"
    assert "no good" in found["error"]
    assert found["errorDetails"]["type"] == "handler_failed"
    assert found["logs"] == "the last words"
    assert (found["attempts"], found["retries"]) == (1, 0)
    assert datetime.fromisoformat(found["createdAt"]) <= datetime.now(UTC)
    retried = (await queue.post(f"retry/{found['id']}")).json()
    assert retried["id"] == found["id"]
    found = await queue.ended(found["id"])
    assert (found["status"], found["attempts"], found["retries"]) == ("FAILED", 2, 1)
    assert (await queue.get("health"))["jobs"]["retried"] == 1


async def test_a_completed_job_is_not_retried(deploy):
    queue = Queue(await deploy(ECHO))
    job = (await queue.post("runsync", {"input": 1})).json()["id"]
    error = failure(await queue.post(f"retry/{job}"))
    assert (error["status"], error["type"]) == (409, "job_conflict")


async def test_a_running_job_is_cancelled(deploy, gate: Gate):
    queue = Queue(await deploy(WAITS, gate=gate))
    job = await queue.run(5)
    await gate.next("5")
    await queue.reached(job, "IN_PROGRESS")
    assert (await queue.post(f"cancel/{job}")).json()["status"] == "CANCELLED"
    gate.open()
    assert (await queue.ended(job))["status"] == "CANCELLED"


async def test_a_job_that_runs_too_long_times_out(deploy, gate: Gate):
    queue = Queue(await deploy(WAITS, gate=gate))
    job = await queue.run(5, policy={"executionTimeout": 200})
    found = await queue.ended(job)
    assert found["status"] == "TIMED_OUT"
    assert found["errorDetails"]["type"] == "deadline_exceeded"


async def test_a_job_that_waits_too_long_times_out(deploy, gate: Gate):
    queue = Queue(await deploy(WAITS, {"scale.max": "1"}, gate=gate))
    first = await queue.run(1)
    await gate.next("1")
    late = await queue.run(2, policy={"ttl": 200})
    assert (await queue.ended(late))["status"] == "TIMED_OUT"
    gate.open()
    assert (await queue.ended(first))["status"] == "COMPLETED"
    assert [arrival.word for arrival in gate.arrived] == ["1"]


async def test_the_queue_is_purged(deploy, gate: Gate):
    queue = Queue(await deploy(WAITS, {"scale.max": "1"}, gate=gate))
    running = await queue.run(0)
    await gate.next("0")
    await queue.reached(running, "IN_PROGRESS")
    waiting = [await queue.run(number) for number in range(1, 8)]
    assert (await queue.post("purge-queue")).json() == {"removed": 7, "status": "completed"}
    gate.open()
    assert (await queue.ended(running))["status"] == "COMPLETED"
    assert {(await queue.ended(job))["status"] for job in waiting} == {"CANCELLED"}
    assert [arrival.word for arrival in gate.arrived] == ["0"]


async def test_low_priority_goes_last(deploy, gate: Gate):
    queue = Queue(await deploy(WAITS, {"scale.max": "1"}, gate=gate))
    await queue.run("first")
    first = await gate.next("first")
    # Queue more jobs than the dispatcher claims in advance: `soon` can only overtake jobs that are not claimed.
    for number in range(12):
        low = await queue.run(f"low{number}", policy={"lowPriority": True})
    last = await queue.run("soon")
    first.go()
    gate.open()
    await queue.ended(last)
    await queue.ended(low)
    words = [arrival.word for arrival in gate.arrived]
    assert words.index("soon") < words.index("low11")


# -- idempotency


async def test_the_same_key_gives_the_same_job(deploy):
    queue = Queue(await deploy(ECHO))
    answers = await asyncio.gather(
        *(queue.post("run", {"input": 3}, Idempotency_Key="once") for _ in range(20))
    )
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert sum("Idempotent-Replayed" not in answer.headers for answer in answers) == 1
    found = (await queue.post("runsync", {"input": 3}, Idempotency_Key="once")).json()
    assert (found["status"], found["output"]) == ("COMPLETED", {"twice": 6})
    error = failure(await queue.post("run", {"input": 4}, Idempotency_Key="once"))
    assert (error["status"], error["type"]) == (409, "idempotency_conflict")


async def test_respond_async_makes_a_job(deploy):
    queue = Queue(await deploy(ECHO))
    response = await queue.function.call(4, Prefer="respond-async", Idempotency_Key="later")
    assert response.status_code == 202
    assert response.headers["location"] == f"/v1/functions/{queue.function.name}/jobs/{response.json()['id']}"
    assert (await queue.ended(response.json()["id"]))["output"] == {"twice": 8}
    again = await queue.function.call(4, Prefer="respond-async", Idempotency_Key="later")
    assert again.json()["id"] == response.json()["id"]


async def test_respond_async_with_invalid_json_is_refused(deploy):
    function = await deploy(ECHO)
    for kind, body, status in [
        ("application/json", b"{", 400),
        ("application/vnd.x+json; charset=utf-8", b"{", 400),
        ("application/json", b"", 202),
        ("text/plain", b"{", 202),
    ]:
        headers = {"Prefer": "respond-async", "Content-Type": kind}
        response = await function.client.post(function.path, content=body, headers=headers)
        assert response.status_code == status, (kind, response.text)
        assert status == 202 or failure(response)["type"] == "bad_json"


ASKED = {
    "run": ("/v2/{name}/run", {}),
    "runsync": ("/v2/{name}/runsync", {}),
    "later": ("/invoke/{name}", {"Prefer": "respond-async"}),
    "lambda": ("/lambda/2015-03-31/functions/{name}/invocations", {"X-Amz-Invocation-Type": "Event"}),
    "predictions": ("/cog/predictions?function={name}", {}),
}


@pytest.mark.parametrize(("path", "headers"), ASKED.values(), ids=ASKED)
async def test_a_function_deleted_while_the_body_arrives_is_404(
    deploy, gateway: Gateway, path: str, headers: dict[str, str]
):
    function = await deploy(ECHO)
    reader, writer = await asyncio.open_connection(*gateway.address)
    lines = [f"{name}: {value}" for name, value in headers.items()]
    head = [f"POST {path.format(name=function.name)} HTTP/1.1", "Host: localhost", *lines]
    writer.write("\r\n".join([*head, "Expect: 100-continue", "Content-Length: 12", "", ""]).encode())
    try:
        async with asyncio.timeout(LIMIT_S):
            # With 100, the gateway has found the function, and waits for the body.
            assert b"100" in await reader.readline()
            await reader.readline()
            writer.write(b'{"input"')
            await gateway.client.delete(f"/v1/functions/{function.name}")
            writer.write(b": 1}")
            assert b" 404 " in await reader.readline()
    finally:
        writer.close()
    assert gateway.server is not None
    assert not await gateway.server.jobs.store.newest(function.name)


# -- streams


@pytest.mark.parametrize("source", [STREAMS, STREAMS.replace("def", "async def")], ids=["plain", "async"])
async def test_a_stream_is_polled_piece_by_piece(deploy, source: str):
    queue = Queue(await deploy(source))
    job = await queue.run(3)
    await queue.ended(job)
    polled = await queue.get(f"stream/{job}")
    assert [piece["output"] for piece in polled["stream"]] == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert await queue.get(f"stream/{job}") == {"id": job, "status": "COMPLETED", "stream": []}
    assert (await queue.get(f"stream/{job}", after=1))["stream"][0] == {"output": {"n": 1}, "number": 2}
    assert (await queue.get(f"status/{job}"))["output"] == [{"n": 0}, {"n": 1}, {"n": 2}]


async def test_a_stream_of_events_is_replayed(deploy):
    queue = Queue(await deploy(STREAMS))
    job = await queue.run(3)
    # Ignore status events: the stream has only the changes after its beginning.
    told = [name for name, _, _ in await events(queue, job) if name != "status"]
    assert told == ["output", "output", "output", "completed"]
    assert [number for name, number, _ in await events(queue, job, "2") if name == "output"] == ["3"]


async def test_an_error_in_a_stream_is_the_error_of_the_job(deploy):
    queue = Queue(await deploy("def handler(event):\n    yield 1\n    raise ValueError('torn')\n"))
    job = await queue.run(3)
    found = await queue.ended(job)
    assert (found["status"], found["errorDetails"]["type"]) == ("FAILED", "handler_failed")
    name, _, told = (await events(queue, job))[-1]
    assert (name, told["status"]) == ("error", "FAILED")


async def test_a_stream_of_events_is_kept_alive(deploy, gate: Gate, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(job_events, "HEARTBEAT_S", 0.02)
    queue = Queue(await deploy(WAITS, gate=gate))
    job = await queue.run(1)
    await gate.next()
    async with streamed(queue, job) as lines:
        async for line in lines:
            if line == ": waiting":
                gate.open()
                break
        left = [line async for line in lines]
    assert "event: completed" in left


async def test_a_stream_that_breaks_off_ends_with_an_error_event(
    deploy, gateway: Gateway, gate: Gate, monkeypatch: pytest.MonkeyPatch
):
    queue = Queue(await deploy(WAITS, gate=gate))
    job = await queue.run(1)
    await gate.next()
    assert gateway.server is not None

    async def fails(*_: object) -> None:
        raise JobStoreFailed("The disk is full.")

    async with streamed(queue, job) as lines:
        monkeypatch.setattr(gateway.server.jobs.store, "pieces", fails)
        gate.open()
        left = [line async for line in lines if line]
    assert left[-2] == "event: error"
    assert json.loads(left[-1].removeprefix("data: "))["type"] == "job_store_failed"


@contextlib.asynccontextmanager
async def streamed(queue: Queue, job: str) -> AsyncIterator[AsyncIterator[str]]:
    """Yield the lines of a job's stream after its status."""
    client, headers = queue.function.client, {"Accept": "text/event-stream"}
    async with (
        asyncio.timeout(LIMIT_S),
        client.stream("GET", f"{queue.base}/stream/{job}", headers=headers) as answer,
    ):
        assert answer.status_code == 200
        lines = answer.aiter_lines()
        assert await anext(lines) == "event: status"
        yield lines


async def events(queue: Queue, job: str, last: str = "") -> list[tuple[str, str, Any]]:
    """Return (event, id, data) of a job's stream, to its end."""
    headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": last} if last else {})
    response = await queue.function.client.get(f"{queue.base}/stream/{job}", headers=headers)
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in response.text.strip().split("\n\n"):
        # Skip heartbeats.
        if block.startswith(":"):
            continue
        fields = dict(line.split(": ", 1) for line in block.splitlines())
        found.append((fields["event"], fields.get("id", ""), json.loads(fields["data"])))
    return found


async def test_progress_is_shown_while_a_job_runs(deploy, gate: Gate):
    source = "import gate\ndef handler(event, context):\n    context.progress({'step': 1})\n    gate.wait('on')\n    return 'done'\n"
    queue = Queue(await deploy(source, gate=gate))
    job = await queue.run(1)
    arrival = await gate.next("on")

    async def so() -> bool:
        return bool((await queue.get(f"status/{job}")).get("output") == {"step": 1})

    await until(so, "the progress")
    arrival.go()
    assert (await queue.ended(job))["output"] == "done"


# -- errors


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "bad_json"),
        (b"[]", 400, "bad_json"),
        (b'{"inputs": 1}', 400, "bad_json"),
        (b'{"input": 1, "policy": {"ttl": -1}}', 422, "input_invalid"),
        (b'{"input": 1, "webhook": "ftp://x"}', 422, "webhook_refused"),
        (b'{"input": 1, "webhook": "http://127.0.0.1/x"}', 422, "webhook_refused"),
        (b'{"input": "' + b"x" * (10 << 20) + b'"}', 413, "input_too_large"),
    ],
    ids=["broken", "a list", "no input", "policy", "scheme", "private", "large"],
)
async def test_invalid_submits_are_refused(deploy, body: bytes, status: int, code: str):
    function = await deploy(ECHO)
    error = failure(await function.client.post(f"/v2/{function.name}/run", content=body))
    assert (error["status"], error["type"]) == (status, code)


@pytest.mark.parametrize("path", ["stream/{job}?after=x", "status-sync/{job}?wait=x", "requests?limit=x"])
async def test_a_malformed_parameter_is_refused_as_described(deploy, gateway: Gateway, path: str):
    queue = Queue(await deploy(ECHO))
    asked = path.format(job=await queue.run(1))
    error = failure(await queue.function.client.get(f"{queue.base}/{asked}"))
    assert (error["status"], error["type"]) == (400, "bad_json")
    paths = (await gateway.client.get("/openapi.json")).json()["paths"]
    assert "400" in paths[f"/v2/{{function}}/{path.partition('?')[0]}"]["get"]["responses"]


async def test_unknown_functions_and_jobs_are_404(deploy, gateway: Gateway):
    queue = Queue(await deploy(ECHO))
    assert failure(await queue.function.client.get(f"{queue.base}/status/job-x"))["type"] == "unknown_job"
    error = failure(await gateway.client.post("/v2/nobody/run", json={"input": 1}))
    assert (error["status"], error["type"]) == (404, "unknown_function")
    job = await queue.run(1)
    other = Queue(await deploy(ECHO))
    assert failure(await other.function.client.get(f"{other.base}/status/{job}"))["type"] == "unknown_job"


async def test_the_newest_requests_are_listed(deploy):
    queue = Queue(await deploy(ECHO))
    jobs = [(await queue.post("runsync", {"input": number})).json()["id"] for number in range(3)]
    found = await queue.get("requests", limit=2)
    assert [row["id"] for row in found["requests"]] == jobs[:0:-1]
    assert [row["id"] for row in (await queue.get("requests", before=jobs[1]))["requests"]] == [jobs[0]]
    assert (await queue.get("requests", status="FAILED"))["requests"] == []


# -- deaths of workers and gateways


async def test_a_job_whose_worker_died_is_run_again(deploy, gate: Gate):
    queue = Queue(await deploy(WAITS, gate=gate))
    job = await queue.run(9)
    os.kill((await gate.next("9")).pid, signal.SIGKILL)
    (await gate.next("9")).go()
    found = await queue.ended(job)
    assert (found["status"], found["output"]) == ("COMPLETED", 9)


async def test_a_job_that_kills_workers_fails(deploy):
    queue = Queue(
        await deploy("import os\ndef handler(event):\n    print('boom', flush=True)\n    os.abort()\n")
    )
    found = await queue.ended(await queue.run(1))
    assert (found["status"], found["errorDetails"]["type"]) == ("FAILED", "worker_died")


async def test_a_deleted_functions_jobs_can_be_looked_up(deploy):
    queue = Queue(await deploy(ECHO))
    job = (await queue.post("runsync", {"input": 2})).json()["id"]
    await queue.function.client.delete(f"/v1/functions/{queue.function.name}")
    assert (await queue.get(f"status/{job}"))["output"] == {"twice": 4}


async def test_jobs_outlive_the_gateway(state, gate: Gate):
    async with gateway_here(state) as gateway:
        queue = Queue(await gateway.deploy(ECHO, name="lasting"))
        done = (await queue.post("runsync", {"input": 2})).json()["id"]
    async with gateway_here(state) as gateway:
        queue = Queue(gateway.function("lasting"))
        assert (await queue.get(f"status/{done}"))["output"] == {"twice": 4}
        assert (await queue.get("health"))["jobs"]["completed"] == 1


async def test_a_drained_gateway_leaves_jobs_to_the_next(state, gate: Gate):
    settings: Mapping[str, Any] = {"scale.max": "1"}
    async with gateway_here(state, drain_s=0.2) as gateway:
        queue = Queue(await gateway.deploy(WAITS, settings, name="lasting", gate=gate))
        jobs = [await queue.run(number) for number in range(5)]
        running = await gate.next("0")
    await gone(running.pid)
    gate.open()
    async with gateway_here(state) as gateway:
        queue = Queue(gateway.function("lasting"))
        assert [(await queue.ended(job))["output"] for job in jobs] == list(range(5))


# -- RunPod's SDK


async def test_the_runpod_sdk_works_unmodified(deploy, gateway: Gateway, monkeypatch: pytest.MonkeyPatch):
    runpod = pytest.importorskip("runpod")
    plain, streams = await deploy(ECHO), await deploy(STREAMS)

    def talk() -> dict[str, Any]:
        monkeypatch.setattr(runpod, "endpoint_url_base", f"{gateway.url}/v2")
        monkeypatch.setattr(runpod, "api_key", "anything")
        endpoint = runpod.Endpoint(plain.name)
        job = endpoint.run({"input": 4})
        return {
            "output": job.output(timeout=int(LIMIT_S)),
            "status": job.status(),
            "sync": endpoint.run_sync({"input": 5}),
            "stream": list(runpod.Endpoint(streams.name).run({"input": 2}).stream()),
            "cancel": endpoint.run({"input": 6}).cancel()["status"],
            "health": sorted(endpoint.health()),
            "purge": endpoint.purge_queue()["status"],
        }

    found = await asyncio.to_thread(talk)
    assert found["cancel"] in ("CANCELLED", "COMPLETED")
    del found["cancel"]
    assert found == {
        "output": {"twice": 8},
        "status": "COMPLETED",
        "sync": {"twice": 10},
        "stream": [{"n": 0}, {"n": 1}],
        "health": ["jobs", "workers"],
        "purge": "completed",
    }


ECHOES = "import runpod\nif __name__ == '__main__':\n    runpod.serverless.start({'handler': lambda job: job['input']})\n"


async def test_each_way_in_takes_the_event_of_a_test_input(deploy):
    function = await deploy(ECHOES)
    client, name, event = function.client, function.name, {"input": {"x": 1}}

    async def done(path: str, body: Any, **headers: str) -> Any:
        answer = (await client.post(path, json=body, headers=headers)).json()
        job = await Queue(function).ended(answer["id"])
        return job["output"]

    for sent, given in ((event, {"x": 1}), ({"input": event}, event), ({"x": 1}, {"x": 1})):
        assert await function.answer(sent) == given
        assert await done(f"/invoke/{name}", sent, Prefer="respond-async") == given
        assert await done(f"/v1/functions/{name}/jobs", {"input": sent}) == given
    assert await done(f"/v2/{name}/run", event) == {"x": 1}
    assert await done(f"/v2/{name}/run", {"input": event}) == event
