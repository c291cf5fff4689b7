"""Jobs with requests of OpenAI's API, as RunPod's worker-vllm takes them, beside the routes themselves. Gateway and client are real."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from live import LIMIT_S, Function, Gate, Gateway, failure, gateway_here, short_folder
from pilotflame.runtime.plugins.runpod import openai_jobs, routes
from receiver import receiving

from .test_routes import Queue

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
# Yields the words of the prompt, one at a time. The last delta of each answer has the usage.
ECHO = """
import gate
from pilotflame import Delta, GenerationRequest

async def handler(event: GenerationRequest, context):
    text = event.prompt or event.messages[-1]["content"]
    words = [f"{word} " for word in text.split()]
    for number, word in enumerate(words, 1):
        if word == "wait ":
            await gate.wait_async("half")
        if word == "fail ":
            raise ValueError("no good")
        for index in range(event.n):
            usage = {"prompt_tokens": 3, "completion_tokens": number * event.n}
            end = {"finish_reason": "stop", "usage": usage} if number == len(words) else {}
            yield Delta(index=index, text="" if word == "- " else word, tokens=[number], **end)
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[Gateway]:
    with short_folder() as folder:
        async with gateway_here(folder / "state", webhook_networks=("127.0.0.0/8",)) as found:
            yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def echo(gateway: Gateway) -> Function:
    return await gateway.deploy(ECHO)


def job(text: str, route: str = CHAT, **more: Any) -> dict[str, Any]:
    asked = {"prompt": text} if route == COMPLETION else {"messages": [{"role": "user", "content": text}]}
    return {"openai_route": route, "openai_input": asked | more}


def plain(text: str) -> str:
    """Return JSON without ids and times, which differ."""
    return re.sub(r'"created": ?\d+', '"created":0', re.sub(r'"(chatcmpl|cmpl)-[^"]*"', '"id"', text))


async def at_route(function: Function, given: dict[str, Any]) -> str:
    path = f"/v2/{function.name}/openai{given['openai_route']}"
    found = await function.client.post(path, json=given["openai_input"])
    assert found.status_code == 200, found.text
    return plain(found.text)


@pytest.mark.parametrize("route", [CHAT, COMPLETION])
@pytest.mark.parametrize("more", [{}, {"n": 2}])
async def test_the_output_is_a_list_with_the_answer(echo: Function, route: str, more: dict[str, Any]) -> None:
    given = job("one two", route, **more)
    found = (await Queue(echo).post("runsync", {"input": given})).json()
    assert found["status"] == "COMPLETED"
    (answer,) = found["output"]
    assert json.loads(plain(json.dumps(answer))) == json.loads(await at_route(echo, given))
    assert answer["id"].endswith(found["id"])
    polled = await Queue(echo).get(f"stream/{found['id']}")
    assert [piece["output"] for piece in polled["stream"]] == [answer]
    assert (await Queue(echo).get(f"stream/{found['id']}"))["stream"] == []


@pytest.mark.parametrize("route", [CHAT, COMPLETION])
async def test_a_stream_is_the_texts_of_its_events(echo: Function, route: str) -> None:
    given = job("one - two", route, stream=True, n=2, stream_options={"include_usage": True})
    queue = Queue(echo)
    id_ = await queue.run(given)
    output = (await queue.ended(id_))["output"]
    assert plain("".join(output)) == await at_route(echo, given)
    assert output[-1].endswith("data: [DONE]\n\n")
    polled = (await queue.get(f"stream/{id_}"))["stream"]
    assert [piece["output"] for piece in polled] == output
    sent = await echo.client.get(f"{queue.base}/stream/{id_}", headers={"Accept": "text/event-stream"})
    found = [(name, json.loads(data)) for name, data in re.findall(r"event: (\w+)\ndata: (.*)", sent.text)]
    assert [data for name, data in found if name == "output"] == output
    assert (found[-1][0], found[-1][1]["output"]) == ("completed", output)


async def test_a_poll_returns_the_texts_since_the_last_one(deploy, gate: Gate) -> None:
    function = await deploy(ECHO, gate=gate)
    queue = Queue(function)
    id_ = await queue.run(job("one wait two", stream=True))
    half = await gate.next("half")
    texts: list[str] = []
    while not texts:
        texts += [piece["output"] for piece in (await queue.get(f"stream/{id_}"))["stream"]]
    assert len(texts) == 1
    assert '"role":"assistant"' in texts[0]
    assert (await queue.get(f"stream/{id_}"))["stream"] == []
    half.go()
    output = (await queue.ended(id_))["output"]
    texts += [piece["output"] for piece in (await queue.get(f"stream/{id_}"))["stream"]]
    assert texts == output


@pytest.mark.parametrize("route", [CHAT, COMPLETION])
async def test_a_stream_of_events_is_resumed_anywhere(
    echo: Function, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Queue(echo)
    id_ = await queue.run(job("one - two", route, stream=True, n=2))
    await queue.ended(id_)
    whole = await events(queue, id_)
    # Let a resumed stream read the earlier pieces in slices of two.
    monkeypatch.setattr(openai_jobs, "MOST_READ", 2)
    numbers = [int(number) for number in re.findall(r"id: (\d+)\n", whole)]
    assert len(numbers) > 2
    for number in numbers:
        rest = whole.partition(f"id: {number}\n")[2].partition("\n\n")[2]
        assert await events(queue, id_, str(number)) == rest


async def events(queue: Queue, id_: str, last: str = "") -> str:
    headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": last} if last else {})
    return (await queue.function.client.get(f"{queue.base}/stream/{id_}", headers=headers)).text


async def test_polls_encode_each_piece_once(deploy, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue(await deploy(ECHO))
    id_ = await queue.run(job("one two three four five", stream=True))
    output = (await queue.ended(id_))["output"]
    monkeypatch.setattr(routes, "PIECES_PER_POLL", 2)
    encoded: list[bytes] = []
    delta_of = openai_jobs.delta_of
    monkeypatch.setattr(openai_jobs, "delta_of", lambda *given: encoded.append(given[1]) or delta_of(*given))
    for _ in range(2):
        encoded.clear()
        texts: list[str] = []
        while found := (await queue.get(f"stream/{id_}"))["stream"]:
            texts += [piece["output"] for piece in found]
        assert texts == output
        assert len(encoded) == len(set(encoded)) == 5
    # With `after`, a poll neither uses nor changes what other polls have read.
    found = (await queue.get(f"stream/{id_}", after=3))["stream"]
    assert [piece["output"] for piece in found] == output[3:5]


async def test_the_last_event_does_not_block_the_event_loop(deploy, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue(await deploy(ECHO))
    threads: list[int] = []
    in_form = openai_jobs.in_form
    monkeypatch.setattr(
        openai_jobs, "in_form", lambda job: threads.append(threading.get_ident()) or in_form(job)
    )
    for more in ({}, {"stream": True}):
        id_ = await queue.run(job("one two", **more))
        assert "event: completed" in await events(queue, id_)
    assert len(threads) == 2
    assert threading.get_ident() not in threads


async def test_a_job_that_fails_has_the_error(echo: Function) -> None:
    queue = Queue(echo)
    for more in ({}, {"stream": True}):
        found = await queue.ended(await queue.run(job("one fail", **more)))
        assert found["status"] == "FAILED"
        assert "no good" in found["error"]
        assert "output" not in found


async def test_a_handler_that_yields_something_else(deploy) -> None:
    text = "from pilotflame import GenerationRequest\ndef handler(event: GenerationRequest):\n    yield {'a': 1}\n"
    queue = Queue(await deploy(text))
    found = (await queue.post("runsync", {"input": job("one", stream=True)})).json()
    assert (found["status"], found["output"]) == ("COMPLETED", [{"a": 1}])
    refused = failure(await queue.function.client.get(f"{queue.base}/stream/{found['id']}"))
    assert refused["type"] == "output_invalid"


@pytest.mark.parametrize(
    ("given", "field", "told"),
    [
        ({"openai_route": "/v1/models"}, "openai_route", f"{CHAT}, {COMPLETION}"),
        ({"openai_route": "/v1/embeddings", "openai_input": {}}, "openai_route", "/openai/v1"),
        ({"openai_route": CHAT}, "openai_input", "no object"),
        ({"openai_route": CHAT, "openai_input": {}}, "openai_input.messages", "Field required"),
        (job("a", best_of=2), "openai_input.best_of", "does not support it yet"),
        (job("a", nonsense=2), "openai_input.nonsense", "Extra inputs"),
        (job("a", stream_options={"include_usage": True}), "openai_input.stream_options", "only with stream"),
        ({"openai_route": COMPLETION, "openai_input": {"prompt": ["a", "b"]}}, "openai_input.prompt", "one prompt"),
    ],
)  # fmt: skip
async def test_what_a_job_cannot_have(echo: Function, given: dict[str, Any], field: str, told: str) -> None:
    refused = failure(await Queue(echo).post("run", {"input": given}))
    assert (refused["status"], refused["details"]["field"]) == (422, f"input.{field}")
    assert f"input.{field}: " in refused["message"]
    assert told in refused["message"] + refused["remedy"]


async def test_an_adapter_that_there_is_not(echo: Function) -> None:
    refused = failure(await Queue(echo).post("run", {"input": job("a", model=f"{echo.name}:formal")}))
    assert refused["details"]["field"] == "input.openai_input.model"
    assert "no adapter 'formal'" in refused["message"]


async def test_other_inputs_and_other_functions_are_as_before(echo: Function, deploy) -> None:
    found = await Queue(echo).post("runsync", {"input": {"prompt": "one"}})
    assert found.json()["output"][0]["text"] == "one "
    given = {"openai_route": CHAT, "openai_input": {"messages": []}}
    other = await deploy("def handler(event):\n    return event\n")
    assert (await Queue(other).post("runsync", {"input": given})).json()["output"] == given


async def test_a_webhook_has_the_job_as_it_is_shown(echo: Function) -> None:
    queue = Queue(echo)
    async with receiving() as receiver:
        id_ = await queue.run(job("one two"), webhook=receiver.url)
        (came,) = await receiver.received(1)
    body = json.loads(came.body)
    shown = await queue.get(f"status/{id_}")
    assert (body["id"], body["status"], body["output"]) == (id_, "COMPLETED", shown["output"])


async def test_runpods_client(gateway: Gateway, echo: Function, monkeypatch: pytest.MonkeyPatch) -> None:
    runpod = pytest.importorskip("runpod")
    monkeypatch.setattr(runpod, "endpoint_url_base", f"{gateway.url}/v2")
    monkeypatch.setattr(runpod, "api_key", "none")

    def talk() -> tuple[Any, list[str]]:
        endpoint = runpod.Endpoint(echo.name)
        streamed = list(endpoint.run({"input": job("one two", stream=True)}).stream())
        return endpoint.run_sync({"input": job("one two")}, timeout=int(LIMIT_S)), streamed

    output, streamed = await asyncio.to_thread(talk)
    assert output[0]["choices"][0]["message"]["content"] == "one two "
    assert "".join(streamed).endswith("data: [DONE]\n\n")
