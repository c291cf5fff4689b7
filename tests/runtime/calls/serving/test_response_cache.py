"""The response cache: hits, misses, keys, expiry, tenants and metrics over real HTTP, and a state machine of its store."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from live import Function, Gate, Gateway, gateway_here, until
from pilotflame.runtime.calls.serving import response_cache
from pilotflame.runtime.calls.serving.invocation import Output
from pilotflame.runtime.calls.serving.response_cache import OVERHEAD_BYTES, Key, ResponseCache

pytestmark = pytest.mark.asyncio(loop_scope="module")

COUNTS = """
import itertools
numbers = itertools.count()
def handler(event):
    if event == "fail":
        raise ValueError(next(numbers))
    return {"number": next(numbers), "text": "x" * event.get("size", 0)}
"""
"""The source of a handler whose answers tell how many times it ran."""
CACHED = {"response_cache.ttl_s": 600}


def status(response: httpx.Response) -> str:
    """Return the Cache-Status without the name of the cache and without the remaining time to live."""
    name, _, text = response.headers["Cache-Status"].partition("; ")
    assert name == "pilotflame"
    return str(text.partition("; ttl=")[0])


async def called(function: Function, event: object = {}, **headers: str) -> tuple[str, int]:
    """Return the Cache-Status and the number of a call that succeeds."""
    response = await function.call(event, **headers)
    assert response.status_code == 200, response.text
    return status(response), response.json()["number"]


async def metrics(gateway: Gateway, function: Function) -> dict[str, float]:
    """Return the values of a function's response cache metrics, by their names without the common prefix."""
    lines = (await gateway.client.get("/metrics")).text.splitlines()
    return {
        line.partition("{")[0].removeprefix("pilotflame_response_cache_"): float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith("pilotflame_response_cache_") and f'"{function.name}"' in line
    }


async def test_an_equal_call_is_answered_without_a_worker_and_costs_nothing(deploy, gateway: Gateway):
    function = await deploy(COUNTS, {**CACHED, "scale.idle_timeout_s": 0}, check=False)
    assert await called(function) == ("fwd=miss; stored", 0)
    await function.settled(ready=0)
    before = await function.status()
    response = await function.call({})
    assert (status(response), response.json()["number"]) == ("hit", 0)
    assert 590 < float(response.headers["Cache-Status"].rpartition("=")[2]) <= 600
    assert response.headers["X-Cold-Start"] == "false"
    after = await function.status()
    assert (after["activations"], after["invocations"]) == (before["activations"], before["invocations"])
    usage = (await gateway.client.get("/v1/usage", params={"function": function.name})).json()
    assert usage["total"]["invocations"] == 1
    found = await metrics(gateway, function)
    assert found.pop("bytes") > 0
    assert found == {"hits_total": 1, "misses_total": 1, "waits_total": 0, "evictions_total": 0}


async def test_a_function_without_the_setting_has_no_cache(deploy):
    function = await deploy(COUNTS)
    for number in range(2):
        response = await function.call({})
        assert (response.json()["number"], response.headers.get("Cache-Status")) == (number, None)


async def test_both_paths_of_the_gateway_and_dialects_share_the_answers(deploy, gateway: Gateway):
    function = await deploy(COUNTS, CACHED)
    assert await called(function) == ("fwd=miss; stored", 0)
    # Call by the gateway's other path: aiohttp reads requests with Prefer, and not the transport of plain calls.
    assert await called(function, Prefer="wait=9") == ("hit", 0)
    event = {"specversion": "1.0", "id": "1", "source": "here", "type": "t", "data": {}}
    headers = {"Content-Type": "application/cloudevents+json"}
    answers = [
        (await gateway.client.post(function.path, json=event, headers=headers)).json() for _ in range(2)
    ]
    # The handler can read the attributes of an event. So an event is not equal to a call without attributes.
    assert [answer["data"]["number"] if "data" in answer else answer["number"] for answer in answers] == [
        1,
        1,
    ]


async def test_whatever_changes_the_answer_is_part_of_the_key(deploy):
    function = await deploy(COUNTS, CACHED)
    bodies = (b'{"a":1,"b":2}', b'{"b":2,"a":1}', b'{"a":1, "b":2}')
    calls = [(body, {}) for body in bodies]
    calls += [
        (bodies[0], {"Content-Type": "application/json; charset=utf-8"}),
        (bodies[0], {"Accept": "application/x-npy"}),
    ]
    for expected in ("fwd=miss; stored", "hit"):
        for body, headers in calls:
            sent = {"Content-Type": "application/json"} | headers
            response = await function.client.post(function.path, content=body, headers=sent)
            assert response.status_code == 200, response.text
            assert status(response) == expected, (body, headers)


async def test_an_answer_expires(deploy):
    function = await deploy(COUNTS, {"response_cache.ttl_s": 0.2})
    assert await called(function) == ("fwd=miss; stored", 0)

    async def expired() -> bool:
        return await called(function) == ("fwd=miss; stored", 1)

    await until(expired, "a second call of the handler")


async def test_the_caller_may_refuse_a_stored_answer(deploy):
    function = await deploy(COUNTS, CACHED)
    assert await called(function, Cache_Control="no-store") == ("fwd=request", 0)
    assert await called(function) == ("fwd=miss; stored", 1)
    assert await called(function, Cache_Control="no-cache") == ("fwd=request; stored", 2)
    assert await called(function, Cache_Control="no-transform, max-age=60") == ("hit", 2)
    assert await called(function, Cache_Control="max-age=0") == ("fwd=miss; stored", 3)


async def test_errors_and_large_answers_and_bodies_are_not_stored(deploy, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(response_cache, "MAX_ANSWER_BYTES", 1000)
    function = await deploy(COUNTS, CACHED)
    for _ in range(2):
        response = await function.call("fail")
        assert (response.status_code, status(response)) == (500, "fwd=miss")
    assert await called(function, {"size": 2000}) == ("fwd=miss", 2)
    assert await called(function, {"size": 2000}) == ("fwd=miss", 3)
    assert await called(function, {"large": "x" * (1 << 20)}) == ("fwd=bypass", 4)
    assert await called(function, {"size": 900}) == ("fwd=miss; stored", 5)


async def test_a_new_revision_and_new_processes_give_no_old_answer(deploy, gate: Gate):
    source = COUNTS.replace("def handler(event):", "import gate\ndef handler(event):\n    gate.wait()")
    function = await deploy(source, CACHED, gate=gate)
    slow = asyncio.create_task(called(function, {"slow": 1}))
    waiting = await gate.next()
    restarted = asyncio.create_task(function.client.post(f"/v1/functions/{function.name}/restart"))
    assert (await restarted).status_code == 200
    gate.open()
    waiting.go()
    # The worker of the old processes answers after the new processes are live.
    assert await slow == ("fwd=miss", 0)
    assert await called(function, {"slow": 1}) == ("fwd=miss; stored", 0)
    assert (await called(function, {"slow": 1}))[0] == "hit"
    await deploy(source.replace("next(numbers)", "100"), CACHED, gate=gate, name=function.name)
    assert await called(function, {"slow": 1}) == ("fwd=miss; stored", 100)


async def test_a_paused_function_answers_nothing(deploy, gateway: Gateway):
    function = await deploy(COUNTS, CACHED)
    await called(function)
    assert (await gateway.client.post(f"/v1/functions/{function.name}/pause")).status_code == 200
    assert (await function.error({}))["type"] == "function_paused"


async def test_a_function_that_streams_is_not_stored_and_says_so(deploy):
    function = await deploy("def handler(event):\n    yield 1\n", CACHED)
    assert any("response_cache has no effect" in warning for warning in function.described["warnings"])
    for _ in range(2):
        assert (await function.call()).status_code == 200


async def test_no_key_gets_the_answer_of_another_key(state):
    async with gateway_here(state, response_cache_mb=1) as gateway:
        function = await gateway.deploy(COUNTS, CACHED)
        async with gateway.at_home() as home:
            made = [
                (await home.post("/v1/keys", json={"name": name, "scopes": ["invoke"]})).json()["key"]
                for name in "ab"
            ]
        first, second = ({"Authorization": f"Bearer {key}"} for key in made)
        assert await called(function, **first) == ("fwd=miss; stored", 0)
        assert await called(function, **second) == ("fwd=miss; stored", 1)
        assert await called(function, **first) == ("hit", 0)
        # A key that stores too many bytes drops only its own answers.
        for number in range(20):
            await called(function, {"size": 100_000, "number": number}, **second)
        assert await called(function, **first) == ("hit", 0)
        assert (await called(function, **second))[0] == "fwd=miss; stored"


# -- the store

ROOM = 10 * (OVERHEAD_BYTES + 100)
TTLS_S = {"f": 3.0, "g": 50.0}


@dataclass
class Stored:
    text: bytes
    until_s: float


class Store(RuleBasedStateMachine):
    """The store uses at most ROOM bytes, and returns an answer only to the tenant and the revision that stored it."""

    def __init__(self) -> None:
        super().__init__()
        self.cache, self.now_s, self.number = ResponseCache(ROOM), 0.0, 0
        self.stored: dict[Key, Stored] = {}
        self.old: list[Key] = []

    @rule(
        function=st.sampled_from("fg"),
        tenant=st.sampled_from(["", "a", "b"]),
        digest=st.binary(max_size=1),
        size=st.integers(0, 3000),
    )
    def put(self, function: str, tenant: str, digest: bytes, size: int) -> None:
        key = self.cache.key(function, tenant, digest)
        self.number += 1
        text = b"%s %s %d " % (function.encode(), tenant.encode(), self.number) + b"x" * size
        if self.cache.put(key, Output(text, "text/plain"), self.now_s, TTLS_S[function]):
            self.stored[key] = Stored(text, self.now_s + TTLS_S[function])
        elif key in self.stored:
            del self.stored[key]

    @rule(
        function=st.sampled_from("fg"),
        tenant=st.sampled_from(["", "a", "b", "c"]),
        digest=st.binary(max_size=1),
    )
    def get(self, function: str, tenant: str, digest: bytes) -> None:
        key = self.cache.key(function, tenant, digest)
        if (found := self.cache.get(key, self.now_s)) is not None:
            assert found.output.payload == self.stored[key].text
            assert self.now_s < self.stored[key].until_s

    @rule(seconds=st.floats(0, 5))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(function=st.sampled_from("fg"), removed=st.booleans())
    def go_live(self, function: str, removed: bool) -> None:
        self.old += [key for key in self.stored if key.function == function]
        (self.cache.remove if removed else self.cache.forget)(function)
        self.stored = {key: one for key, one in self.stored.items() if key.function != function}

    @precondition(lambda self: self.old)
    @rule()
    def store_late(self) -> None:
        assert not self.cache.put(self.old[-1], Output(b"late", ""), self.now_s, 50.0)

    @invariant()
    def within_its_room(self) -> None:
        held = list(self.entries())
        assert sum(size for _, size in held) <= ROOM
        for tenant in ("", "a", "b"):
            assert sum(size for key, size in held if key.tenant == tenant) <= 0.9 * ROOM
        assert {key for key, _ in held} <= self.stored.keys()

    def entries(self) -> Iterator[tuple[Key, int]]:
        for answers in self.cache._functions.values():
            assert answers.size == sum(answer.size for answer in answers.entries.values())
            for key, answer in answers.entries.items():
                yield key, answer.size


TestStore = Store.TestCase
TestStore.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


async def test_the_answer_that_was_unused_for_longest_is_dropped_first():
    cache, size = ResponseCache(1000 * OVERHEAD_BYTES), 200 * OVERHEAD_BYTES
    keys = [cache.key("f", "a", bytes([number])) for number in range(5)]
    for key in keys[:4]:
        assert cache.put(key, Output(b"x" * size, ""), 0.0, 10.0)
    assert cache.get(keys[0], 1.0) is not None
    assert cache.put(keys[4], Output(b"x" * size, ""), 1.0, 10.0)
    assert [cache.get(key, 2.0) is not None for key in keys] == [True, False, True, True, True]
    # Tenant b can store an answer only when answers of tenant a have expired and freed their bytes.
    other = cache.key("f", "b", b"")
    assert not cache.put(other, Output(b"x" * size, ""), 5.0, 10.0)
    assert cache.put(other, Output(b"x" * size, ""), 10.5, 10.0)
    assert json.dumps([cache.get(keys[0], 10.5), cache.get(keys[4], 10.5) is not None]) == "[null, true]"


async def test_a_call_waits_for_an_equal_call_unless_it_wants_no_cache(deploy, gateway: Gateway, gate: Gate):
    source = COUNTS.replace("def handler(event):", "import gate\ndef handler(event):\n    gate.wait()")
    function = await deploy(source, {**CACHED, "concurrency": 2, "scale.max": 1}, gate=gate)
    first = asyncio.create_task(called(function))
    running = await gate.next()
    second = asyncio.create_task(called(function))

    async def waits() -> bool:
        return (await metrics(gateway, function))["waits_total"] == 1

    await until(waits, "a call that waits for an equal call")
    alone = asyncio.create_task(called(function, Cache_Control="no-cache"))
    (await gate.next()).go()
    assert await alone == ("fwd=request; stored", 0)
    running.go()
    assert [await first, await second] == [("fwd=miss; stored", 1), ("fwd=miss; collapsed", 1)]
