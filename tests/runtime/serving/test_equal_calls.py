"""Equal calls of a function with a response cache, while the first of them runs."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import httpx
import pytest
from live import Function, Gate, Gateway, gateway_here, until
from pilotflame.errors import DeadlineExceeded, HandlerFailed
from pilotflame.runtime.serving import equal_calls
from pilotflame.runtime.serving.equal_calls import EqualCalls
from pilotflame.runtime.serving.invocation import Invocation, Output

pytestmark = pytest.mark.asyncio(loop_scope="module")

# The first two calls wait at the gate, and a call that is asked to fails.
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
SETTINGS = {"response_cache.ttl_s": 600, "response_cache.max_answer_bytes": 1000, "concurrency": 8}
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
async def test_one_runs_and_the_others_get_its_output(deploy, gateway: Gateway, gate: Gate, size: int):
    function = await deploy(WAITS, SETTINGS, gate=gate)
    running = asyncio.gather(*(function.call({"size": size}) for _ in range(5)))
    # aiohttp handles requests with Prefer, and not the fast path.
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


async def test_if_the_caller_of_the_first_goes_the_next_runs_and_a_deadline_holds(
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


def invocation(**more: Any) -> Invocation:
    now_s = time.monotonic()
    fields: dict[str, Any] = {"now_s": now_s, "deadline_s": now_s + 9.0, "hold_until_s": now_s + 9.0}
    return Invocation("1", b"{}", **(fields | more))


async def test_a_call_waits_for_no_less_urgent_call_in_the_queue(monkeypatch: pytest.MonkeyPatch):
    equal, first, urgent, ran = EqualCalls(), invocation(priority=3), invocation(priority=1), list[str]()
    assert not equal.start("key", first, lambda: ran.append("first"))
    assert not equal.start("key", urgent, lambda: ran.append("urgent"))
    assert ran == ["first", "urgent"]
    first.worker = "w1"
    assert equal.start("key", invocation(priority=1), lambda: ran.append("no"))
    monkeypatch.setattr(equal_calls, "MOST_WAITING", 1)
    assert not equal.start("key", invocation(), lambda: ran.append("too many"))
    assert ran == ["first", "urgent", "too many"]
    first.end(Output(b"", ""))


async def test_a_call_runs_itself_when_its_hold_time_is_over_before_the_first_is_sent():
    equal, first, ran = EqualCalls(), invocation(), asyncio.Event()
    equal.start("key", first, lambda: None)
    one = invocation(hold_until_s=time.monotonic() + 0.05)
    assert equal.start("key", one, ran.set)
    async with asyncio.timeout(5):
        await ran.wait()
    first.end(Output(b"", ""))
    await asyncio.sleep(0)
    assert not one.ended


async def test_an_error_of_a_later_submission_ends_the_call():
    equal, first, one = EqualCalls(), invocation(), invocation()
    equal.start("key", first, lambda: None)

    def refused() -> None:
        raise DeadlineExceeded("refused")

    assert equal.start("key", one, refused)
    first.end(HandlerFailed("no"))
    with pytest.raises(DeadlineExceeded, match="refused"):
        await one.output
