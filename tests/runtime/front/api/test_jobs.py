"""The gateway's own routes of jobs over real HTTP, in a gateway without the plugin `runpod`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest
import pytest_asyncio
from live import TRUSTED, Function, Gate, Gateway, failure, gateway_here, short_folder, until
from pilotflame.runtime.front.api.jobs import JobOrder

pytestmark = pytest.mark.asyncio(loop_scope="module")

ECHO = "def handler(event):\n    return {'twice': event * 2}\n"
WAITS = "import gate\ndef handler(event):\n    gate.wait(str(event))\n    return event\n"
FAILS = "def handler(event):\n    print('the last words')\n    raise ValueError('no good')\n"
STREAMS = "def handler(event):\n    for n in range(event):\n        yield {'n': n}\n"
FINAL = ("COMPLETED", "FAILED", "CANCELLED", "TIMED_OUT")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[Gateway]:
    with short_folder() as folder:
        async with gateway_here(folder / "state", drain_s=5.0, plugins=("cog",)) as found:
            yield found


class Jobs:
    """Calls the routes of a function's jobs."""

    def __init__(self, function: Function) -> None:
        self.client, self.base = function.client, f"/v1/functions/{function.name}/jobs"

    async def post(self, path: str = "", body: Any = None, **headers: str) -> httpx.Response:
        named = {key.replace("_", "-"): value for key, value in headers.items()}
        return await self.client.post(f"{self.base}{path}", json=body, headers=named)

    async def get(self, path: str = "", **query: Any) -> Any:
        response = await self.client.get(f"{self.base}{path}", params=query)
        assert response.status_code == 200, response.text
        return response.json()

    async def submit(self, event: Any, **more: Any) -> str:
        response = await self.post(body={"input": event, **more})
        assert response.status_code in (200, 202), response.text
        assert response.headers["Location"] == f"{self.base}/{response.json()['id']}"
        return str(response.json()["id"])

    async def ended(self, job: str) -> dict[str, Any]:
        found: dict[str, Any] = await self.get(f"/{job}", wait_s=60)
        assert found["status"] in FINAL
        return found

    async def reached(self, job: str, state: str) -> None:
        async def so() -> bool:
            return bool((await self.get(f"/{job}"))["status"] == state)

        await until(so, f"{job} {state}")

    async def events(self, job: str, **headers: str) -> list[tuple[str, str, Any]]:
        """Follow a job to its end. Return (event, id, data) of each server-sent event."""
        response = await self.client.get(f"{self.base}/{job}/events", headers=headers)
        assert response.headers["content-type"].startswith("text/event-stream")
        blocks = [block for block in response.text.strip().split("\n\n") if not block.startswith(":")]
        fields = [dict(line.split(": ", 1) for line in block.splitlines()) for block in blocks]
        return [(one["event"], one.get("id", ""), json.loads(one["data"])) for one in fields]


async def test_a_job_runs_and_its_result_is_kept(deploy):
    jobs = Jobs(await deploy(ECHO))
    submitted = await jobs.post(body={"input": 21})
    assert submitted.status_code == 202
    job = submitted.json()["id"]
    assert submitted.headers["X-Request-Id"] == job
    found = await jobs.ended(job)
    assert (found["status"], found["output"], found["attempts"]) == ("COMPLETED", {"twice": 42}, 1)
    assert found["worker"]
    assert (found["delay_ms"] >= 0, found["execution_ms"] >= 0) == (True, True)
    assert datetime.fromisoformat(found["created_at"]) <= datetime.now(UTC)
    assert await jobs.get(f"/{job}") == found


async def test_a_caller_may_wait_for_the_end(deploy, gate: Gate):
    jobs = Jobs(await deploy(ECHO))
    response = await jobs.post("?wait_s=60", {"input": [1]})
    assert (response.status_code, response.json()["output"]) == (200, {"twice": [1, 1]})
    slow = Jobs(await deploy(WAITS, gate=gate))
    response = await slow.post("?wait_s=1", {"input": 7})
    assert (response.status_code, response.json()["status"] in FINAL) == (202, False)
    (await gate.next("7")).go()
    assert (await slow.ended(response.json()["id"]))["output"] == 7
    error = failure(await jobs.post("?wait_s=301", {"input": 1}))
    assert (error["status"], error["type"]) == (400, "bad_json")


async def test_respond_async_names_the_job(deploy):
    function = await deploy(ECHO)
    response = await function.call(4, Prefer="respond-async", Idempotency_Key="later")
    assert response.status_code == 202
    place = response.headers["Location"]
    assert place == f"/v1/functions/{function.name}/jobs/{response.json()['id']}"
    found = (await function.client.get(f"{place}?wait_s=60")).json()
    assert (found["id"], found["output"]) == (response.json()["id"], {"twice": 8})


async def test_a_failure_is_data_and_can_be_retried(deploy):
    jobs = Jobs(await deploy(FAILS))
    response = await jobs.post("?wait_s=60", {"input": 1})
    assert response.status_code == 200
    found = response.json()
    assert (found["status"], found["error"]["type"]) == ("FAILED", "handler_failed")
    assert "no good" in found["error"]["message"]
    assert (found["logs"], found["retries"]) == ("the last words", 0)
    again = (await jobs.post(f"/{found['id']}/retry")).json()
    assert again["id"] == found["id"]
    found = await jobs.ended(found["id"])
    assert (found["status"], found["attempts"], found["retries"]) == ("FAILED", 2, 1)


async def test_jobs_are_cancelled_purged_listed_and_counted(deploy, gate: Gate):
    jobs = Jobs(await deploy(WAITS, {"scale.max": 1}, gate=gate))
    running = await jobs.submit(0)
    await gate.next("0")
    await jobs.reached(running, "IN_PROGRESS")
    waiting = [await jobs.submit(number) for number in range(1, 6)]
    assert (await jobs.post(f"/{waiting[0]}/cancel")).json()["status"] == "CANCELLED"
    listed = await jobs.get()
    assert [job["id"] for job in listed["jobs"]] == [*reversed(waiting), running]
    counts = {"in_queue": 4, "in_progress": 1, "cancelled": 1, "completed": 0, "failed": 0, "retried": 0}
    assert listed["counts"].items() >= counts.items()
    assert (await jobs.post("/purge")).json() == {"cancelled": 4}
    gate.open()
    assert (await jobs.ended(running))["status"] == "COMPLETED"
    assert [job["id"] for job in (await jobs.get(status="completed"))["jobs"]] == [running]
    older = await jobs.get(before=waiting[1], limit=1)
    assert [job["id"] for job in older["jobs"]] == [waiting[0]]
    error = failure(await jobs.post(f"/{running}/retry"))
    assert (error["status"], error["type"]) == (409, "job_conflict")


async def test_a_job_is_followed(deploy):
    jobs = Jobs(await deploy(STREAMS))
    job = await jobs.submit(3)
    told = [event for event in await jobs.events(job) if event[0] != "status"]
    assert [name for name, _, _ in told] == ["output"] * 3 + ["completed"]
    assert told[-1][2]["output"] == [{"n": 0}, {"n": 1}, {"n": 2}]
    resumed = await jobs.events(job, **{"Last-Event-ID": "2"})
    assert [number for name, number, _ in resumed if name == "output"] == ["3"]
    broken = Jobs(await deploy("def handler(event):\n    yield 1\n    raise ValueError('torn')\n"))
    name, _, ended = (await broken.events(await broken.submit(1)))[-1]
    assert (name, ended["error"]["type"]) == ("error", "handler_failed")


async def test_a_job_has_limits_and_a_priority(deploy, gate: Gate):
    jobs = Jobs(await deploy(WAITS, {"scale.max": 1}, gate=gate))
    slow = await jobs.submit(1, execution_timeout_s=0.2)
    assert (await jobs.ended(slow))["status"] == "TIMED_OUT"
    await jobs.submit("first")
    # The call of the job that timed out is also at the gate. Let it pass.
    while (arrived := await gate.next()).word != "first":
        arrived.go()
    late = await jobs.submit("late", ttl_s=0.2)
    assert (await jobs.ended(late))["status"] == "TIMED_OUT"
    for number in range(12):
        low = await jobs.submit(f"low{number}", priority="low")
    soon = await jobs.submit("soon")
    arrived.go()
    gate.open()
    await jobs.ended(soon)
    await jobs.ended(low)
    words = [arrival.word for arrival in gate.arrived]
    assert words.index("soon") < words.index("low11")


async def test_the_same_key_is_the_same_job(deploy):
    jobs = Jobs(await deploy(ECHO))
    first = await jobs.post(body={"input": 3}, Idempotency_Key="once")
    again = await jobs.post(body={"input": 3}, Idempotency_Key="once")
    assert again.json()["id"] == first.json()["id"]
    assert ("Idempotent-Replayed" in first.headers, again.headers["Idempotent-Replayed"]) == (False, "true")
    error = failure(await jobs.post(body={"input": 4}, Idempotency_Key="once"))
    assert (error["status"], error["type"]) == (409, "idempotency_conflict")


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "bad_json"),
        (b"[]", 422, "input_invalid"),
        (b'{"event": 1}', 422, "input_invalid"),
        (b'{"input": 1, "ttl": 1}', 422, "input_invalid"),
        (b'{"input": 1, "ttl_s": 0}', 422, "input_invalid"),
        (b'{"input": 1, "webhook": "http://127.0.0.1/x"}', 422, "webhook_refused"),
        (b'{"input": "' + b"x" * (10 << 20) + b'"}', 413, "input_too_large"),
    ],
    ids=["broken", "a list", "no input", "unknown field", "ttl", "private", "large"],
)
async def test_invalid_submits_are_refused(deploy, body: bytes, status: int, code: str):
    jobs = Jobs(await deploy(ECHO))
    error = failure(await jobs.client.post(jobs.base, content=body))
    assert (error["status"], error["type"]) == (status, code)


async def test_unknown_functions_and_jobs_are_404(deploy, gateway: Gateway):
    function = await deploy(ECHO)
    jobs = Jobs(function)
    for method, path in (("GET", ""), ("GET", "/events"), ("POST", "/cancel"), ("POST", "/retry")):
        error = failure(await jobs.client.request(method, f"{jobs.base}/job-x{path}"))
        assert (error["status"], error["type"]) == (404, "unknown_job"), path
    job = (await jobs.post("?wait_s=60", {"input": 1})).json()["id"]
    await gateway.client.delete(f"/v1/functions/{function.name}")
    # The result can be read after the deletion of the function.
    assert (await jobs.get(f"/{job}"))["output"] == {"twice": 2}
    for method, path in (("GET", ""), ("POST", ""), ("POST", "/purge"), ("POST", f"/{job}/retry")):
        error = failure(await jobs.client.request(method, f"{jobs.base}{path}", json={"input": 1}))
        assert (error["status"], error["type"]) == (404, "unknown_function"), path


async def test_jobs_belong_to_the_key_that_has_submitted_them(state: Any):
    async with gateway_here(state, auth="always", plugins=("cog",)) as gateway, gateway.at_home() as admin:

        async def key(**fields: Any) -> dict[str, str]:
            made = (await admin.post("/v1/keys", json={"name": "one", **fields})).json()
            return {"Authorization": f"Bearer {made['key']}"}

        gateway.client.headers.update(await key(scopes=["deploy"], policy=TRUSTED))
        function = await gateway.deploy(ECHO)
        base = f"/v1/functions/{function.name}/jobs"
        own, other, reads = [await key(scopes=[scope]) for scope in ("invoke", "invoke", "read")]
        made = await admin.post(f"{base}?wait_s=60", json={"input": 1}, headers=own)
        place = made.headers["Location"]
        assert (await admin.get(place, headers=own)).json()["output"] == {"twice": 2}
        assert (await admin.get(place)).json()["output"] == {"twice": 2}
        for method, path in (
            ("GET", ""),
            ("GET", "?wait_s=1"),
            ("GET", "/events"),
            ("POST", "/cancel"),
            ("POST", "/retry"),
        ):
            refused = await admin.request(method, f"{place}{path}", headers=other)
            assert failure(refused)["type"] == "unknown_job", path
            assert (
                failure(await admin.request(method, f"{place}{path}", headers=reads))["type"] == "forbidden"
            )
        assert (await admin.get(base, headers=other)).json()["jobs"] == []
        assert (await admin.get(base, headers=other)).json()["counts"]["completed"] == 0
        assert (await admin.get(base, headers=own)).json()["counts"]["completed"] == 1
        assert (await admin.post(f"{base}/purge", headers=other)).json() == {"cancelled": 0}


@pytest.mark.parametrize(("priority", "source"), [("normal", "job"), ("low", "job"), ("batch", "batch")])
async def test_a_job_of_a_batch_is_counted_apart(priority: Any, source: str) -> None:
    order = JobOrder(input=1, webhook="http://x")
    fields = order.new_fields(priority, 5.0, None)
    assert (fields["source"], fields["execution_timeout_s"], "ttl_s" in fields) == (source, 5.0, False)
    assert fields["webhook"].url == "http://x"
    later = [JobOrder(input=1).new_fields(one, None, None)["priority"] for one in ("normal", "low", "batch")]  # type: ignore[arg-type]
    assert later == sorted(set(later))


async def test_a_job_has_its_name_in_the_description(gateway: Gateway) -> None:
    schemas = (await gateway.client.get("/openapi.json")).json()["components"]["schemas"]
    assert {"attempts", "retries", "created_at"} <= schemas["Job"]["properties"].keys()
