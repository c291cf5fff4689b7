"""Equal calls of a function with a response cache, while the first of them runs."""

from __future__ import annotations

import asyncio
from collections import Counter

import httpx
import pytest
from live import Function, Gate, Gateway, failure, gateway_here, until
from pilotflame.runtime.calls.serving import equal_calls, response_cache

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Each handler call waits at the gate. The event "fail" then makes it fail.
WAITS = """
import itertools
import gate
numbers = itertools.count()
async def handler(event):
    number = next(numbers)
    await gate.wait_async("begun")
    if event == "fail":
        raise ValueError(number)
    return {"number": number, "text": "x" * event.get("size", 0)}
"""
SETTINGS = {"response_cache.ttl_s": 600, "concurrency": 8}
MISS, WAITED = "pilotflame; fwd=miss; stored", "pilotflame; fwd=miss; collapsed"


async def waits(gateway: Gateway, function: Function, count: int) -> None:
    """Wait until `count` calls of a function have begun to wait for an equal call."""
    line = f'pilotflame_response_cache_waits_total{{function="{function.name}"}} {count}.0'

    async def so() -> bool:
        return line in (await gateway.client.get("/metrics")).text

    await until(so, f"{count} waiting calls")


def statuses(answers: list[httpx.Response]) -> Counter[str]:
    return Counter(answer.headers["Cache-Status"] for answer in answers)


@pytest.mark.parametrize("size", [0, 2000], ids=["stored", "too large"])
async def test_one_runs_and_the_others_get_its_output(
    deploy, gateway: Gateway, gate: Gate, size: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(response_cache, "MAX_ANSWER_BYTES", 1000)
    function = await deploy(WAITS, SETTINGS, gate=gate)
    running = asyncio.gather(*(function.call({"size": size}) for _ in range(5)))
    # Call by the gateway's other path: aiohttp reads requests with Prefer, and not the transport of plain calls.
    other = asyncio.create_task(function.call({"size": size}, Prefer="wait=9"))
    first = await gate.next("begun")
    await waits(gateway, function, 5)
    first.go()
    answers = [*await running, await other]
    assert {answer.json()["number"] for answer in answers} == {0}
    stored = MISS if not size else "pilotflame; fwd=miss"
    assert statuses(answers) == {stored: 1, WAITED: 5}
    assert (await function.status())["invocations"] == {"http": {"200": 1}}
    assert len({answer.headers["X-Request-Id"] for answer in answers}) == 6


async def test_after_an_error_each_runs(deploy, gateway: Gateway, gate: Gate):
    function = await deploy(WAITS, SETTINGS, gate=gate)
    running = asyncio.gather(*(function.call("fail") for _ in range(3)))
    first = await gate.next("begun")
    await waits(gateway, function, 2)
    gate.open()
    first.go()
    answers = await running
    assert [answer.status_code for answer in answers] == [500] * 3
    assert statuses(answers) == {"pilotflame; fwd=miss": 3}
    assert {answer.json()["error"]["message"].rpartition(" ")[2] for answer in answers} == {"0", "1", "2"}


async def test_if_the_caller_of_the_first_goes_the_next_runs_and_a_deadline_holds_and_counts(
    deploy, gateway: Gateway, gate: Gate
):
    function = await deploy(WAITS, SETTINGS, gate=gate)
    async with httpx.AsyncClient(base_url=str(gateway.client.base_url)) as leaving:
        call = asyncio.create_task(leaving.post(function.path, json={}))
        await gate.next("begun")
        running = asyncio.gather(*(function.call({}) for _ in range(3)))
        await waits(gateway, function, 3)
        late = await function.call({}, X_Request_Timeout="0.2")
        assert late.status_code == 504, late.text
        assert "caller's own time limit" in late.json()["error"]["message"]
        call.cancel()
        second = await gate.next("begun")
        second.go()
    answers = await running
    assert {answer.json()["number"] for answer in answers} == {1}
    assert statuses(answers) == {MISS: 1, WAITED: 2}
    assert (await function.status())["invocations"] == {"http": {"504": 1, "200": 1}}


async def test_if_the_time_of_the_first_is_over_the_next_runs(deploy, gateway: Gateway, gate: Gate):
    function = await deploy(WAITS, SETTINGS, gate=gate)
    call = asyncio.create_task(function.call({}, X_Request_Timeout="1"))
    await gate.next("begun")
    running = asyncio.gather(*(function.call({}) for _ in range(3)))
    await waits(gateway, function, 3)
    assert (await call).status_code == 504
    second = await gate.next("begun")
    second.go()
    answers = await running
    assert {answer.json()["number"] for answer in answers} == {1}
    assert statuses(answers) == {MISS: 1, WAITED: 2}


@pytest.mark.parametrize("change", ["deploy", "delete"])
@pytest.mark.parametrize("end", ["leaves", "fails", "succeeds"])
async def test_calls_that_wait_at_a_deploy_or_a_delete_still_end(
    deploy, gateway: Gateway, gate: Gate, end: str, change: str
):
    function = await deploy(WAITS, SETTINGS, gate=gate)
    event = "fail" if end == "fails" else {}
    call = asyncio.create_task(function.call(event))
    first = await gate.next("begun")
    running = asyncio.gather(*(function.call(event) for _ in range(3)))
    await waits(gateway, function, 3)
    if change == "deploy":
        await gateway.deploy(WAITS, SETTINGS, gate=gate, name=function.name)
    else:
        deleting = asyncio.create_task(gateway.client.delete(f"/v1/functions/{function.name}"))

        async def deleted() -> bool:
            return (await gateway.client.get(f"/v1/functions/{function.name}")).status_code == 404

        await until(deleted, "the deletion")
    if end == "leaves":
        call.cancel()
        await gate.next("begun")
    gate.open()
    first.go()
    answers = await running
    assert {answer.status_code for answer in answers} == {500 if end == "fails" else 200}
    assert statuses(answers)[WAITED] == {"leaves": 2, "fails": 0, "succeeds": 3}[end]
    await asyncio.wait([call])
    if change == "delete":
        assert (await deleting).status_code < 300


async def test_a_pause_fails_calls_that_wait(deploy, gateway: Gateway, gate: Gate):
    function = await deploy(WAITS, SETTINGS, gate=gate)
    call = asyncio.create_task(function.call({}))
    first = await gate.next("begun")
    running = asyncio.gather(*(function.call({}) for _ in range(2)))
    await waits(gateway, function, 2)
    await gateway.client.post(f"/v1/functions/{function.name}/pause")
    assert {failure(answer)["type"] for answer in await running} == {"function_paused"}
    first.go()
    assert (await call).status_code == 200


async def test_no_key_waits_for_the_call_of_another_key(state, gate: Gate):
    async with gateway_here(state) as gateway:
        function = await gateway.deploy(WAITS, SETTINGS, gate=gate)
        async with gateway.at_home() as home:
            made = [
                (await home.post("/v1/keys", json={"name": name, "scopes": ["invoke"]})).json()["key"]
                for name in "ab"
            ]
        running = asyncio.gather(*(function.call({}, Authorization=f"Bearer {key}") for key in made))
        for _ in made:
            await gate.next("begun")
        gate.open()
        answers = await running
        assert {answer.json()["number"] for answer in answers} == {0, 1}
        assert statuses(answers) == {MISS: 2}


async def test_a_call_waits_for_no_less_urgent_call_in_the_queue(
    deploy, gateway: Gateway, gate: Gate, monkeypatch: pytest.MonkeyPatch
):
    function = await deploy(WAITS, SETTINGS | {"concurrency": 1, "scale.max": 1}, gate=gate)
    before = asyncio.create_task(function.call({"size": 1}))
    sent = await gate.next("begun")
    calls = [asyncio.create_task(function.call({}, X_Request_Timeout="50"))]
    await function.settled(ready=1, in_flight=1, queued=1)
    calls.append(asyncio.create_task(function.call({}, X_Request_Timeout="40")))
    await function.settled(ready=1, in_flight=1, queued=2)
    calls.append(asyncio.create_task(function.call({}, X_Request_Timeout="55", X_Priority="1")))
    await function.settled(ready=1, in_flight=1, queued=3)
    calls.append(asyncio.create_task(function.call({}, X_Request_Timeout="55")))
    await waits(gateway, function, 1)
    monkeypatch.setattr(equal_calls, "MOST_WAITING", 1)
    calls.append(asyncio.create_task(function.call({}, X_Request_Timeout="55")))
    await function.settled(ready=1, in_flight=1, queued=4)
    gate.open()
    sent.go()
    assert (await before).status_code == 200
    assert statuses(list(await asyncio.gather(*calls))) == {MISS: 4, WAITED: 1}
