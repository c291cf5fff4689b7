"""A body with many values is refused on every route, and a large one is parsed in a thread, in the turn of its owner."""

from __future__ import annotations

import asyncio
import threading

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from live import Gateway
from pilotflame.errors import CallEnded, Overloaded
from pilotflame.runtime.front.http.parsed_bodies import PARSED_BODIES, ParsedBodies, parsed
from pilotflame.runtime.front.http.responses import MAX_ON_LOOP_BYTES

pytestmark = pytest.mark.asyncio(loop_scope="module")

LISTS = b"[" + b"[]," * 700_000 + b"[]]"
JSON = {"Content-Type": "application/json"}
EVENT = {"Content-Type": "application/cloudevents+json"}
# Paths, with a body that contains too many values, and its headers.
PATHS: list[tuple[str, bytes, dict[str, str]]] = [
    ("/invoke/f", LISTS, JSON),
    ("/invoke/f", LISTS, JSON | {"Prefer": "respond-async"}),
    ("/invoke/f", b'{"data":' + LISTS + b"}", EVENT),
    ("/v2/f/run", b'{"input":' + LISTS + b"}", JSON),
    ("/v2/f/runsync", b'{"input":' + LISTS + b"}", JSON),
    ("/v2/f/run", b"[" + LISTS + b"]", {"Content-Type": "application/cloudevents-batch+json"}),
    ("/cog/predictions?function=f", b'{"input":' + LISTS + b"}", JSON),
    ("/replicate/v1/predictions", b'{"input":' + LISTS + b"}", JSON),
    ("/openai/v1/chat/completions", b'{"model":"f","messages":' + LISTS + b"}", JSON),
    ("/openai/v1/embeddings", b'{"model":"f","input":' + LISTS + b"}", JSON),
    ("/openai/v1/responses", b'{"model":"f","input":' + LISTS + b"}", JSON),
    ("/tgi/f/generate", b'{"inputs":' + LISTS + b"}", JSON),
    ("/tensorflow-serving/v1/models/f:predict", b'{"instances":' + LISTS + b"}", JSON),
    ("/lambda/2015-03-31/functions/f/invocations", LISTS, JSON | {"X-Amz-Invocation-Type": "Event"}),
    ("/lambda/2015-03-31/functions/f/invocations", LISTS, JSON),
    ("/sagemaker/endpoints/f/invocations", LISTS, JSON),
    ("/torchserve/predictions/f", LISTS, JSON),
    ("/v1/functions/f/lacking", b'{"files":' + LISTS + b"}", JSON),
    ("/v1/functions", b'{"path":"/","overrides":{"a":' + LISTS + b"}}", JSON),
]


async def test_no_route_parses_more_values_than_a_body_may_have(gateway: Gateway) -> None:
    await gateway.deploy("def handler(event):\n    return len(event)\n", name="f")
    for path, body, headers in PATHS:
        answer = await gateway.client.post(path, content=body, headers=headers)
        # SageMaker and TensorFlow Serving answer 400, because they have no 413.
        assert answer.status_code in (400, 413), (path, answer.status_code, answer.text[:300])
        assert "marks of values" in answer.text, (path, answer.text[:300])


async def test_a_large_body_is_parsed_in_a_thread() -> None:
    app = web.Application()
    app[PARSED_BODIES] = ParsedBodies()
    request = make_mocked_request("POST", "/", app=app)

    def where(_body: bytes) -> bool:
        return threading.current_thread() is threading.main_thread()

    assert await parsed(request, b"x" * MAX_ON_LOOP_BYTES, where)
    assert not await parsed(request, b"x" * (MAX_ON_LOOP_BYTES + 1), where)
    app[PARSED_BODIES].close()


async def test_an_output_without_room_invites_no_retry() -> None:
    app = web.Application()
    app[PARSED_BODIES] = ParsedBodies(1)
    request, large = make_mocked_request("POST", "/", app=app), b"x" * (MAX_ON_LOOP_BYTES + 1)
    with pytest.raises(Overloaded):
        await parsed(request, large, len)
    with pytest.raises(CallEnded) as ended:
        await parsed(request, large, len, called=True)
    assert (ended.value.status, ended.value.repeatable) == (500, False)
    app[PARSED_BODIES].close()


async def test_the_bodies_of_one_owner_leave_room_for_others() -> None:
    bodies, go, begun = ParsedBodies(100), threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def work(body: bytes) -> int:
        loop.call_soon_threadsafe(begun.set)
        assert go.wait(20)
        return len(body)

    running = asyncio.create_task(bodies.read("greedy", b"x" * 45, work))
    waiting = asyncio.create_task(bodies.read("greedy", b"x" * 44, work))
    await begun.wait()
    with pytest.raises(Overloaded):
        await bodies.read("greedy", b"x" * 10, work)
    other = asyncio.create_task(bodies.read("other", b"x" * 5, work))
    go.set()
    assert await asyncio.gather(running, waiting, other) == [45, 44, 5]
    # Bodies that were read are not counted any more, also after an error.
    with pytest.raises(ValueError, match="invalid literal"):
        await bodies.read("greedy", b"x", int)
    assert await bodies.read("greedy", b"x" * 89, len) == 89
    bodies.close()
