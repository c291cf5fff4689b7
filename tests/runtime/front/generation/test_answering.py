"""Answers of language models, with a real gateway and worker:
the number of earlier calls while a call waits, large pieces, and failed requests.
"""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from typing import Any

import pytest
from live import Gate, Gateway, failure, until
from pilotflame.handlers.language_model.contract import Delta
from pilotflame.runtime.calls.serving.invocation import Invocation
from pilotflame.runtime.front.generation import answering, deltas
from pilotflame.runtime.plugins.completions.answers import CompletionAnswer

pytestmark = pytest.mark.asyncio(loop_scope="module")

WRITES = """
import gate
from pilotflame import Delta, GenerationRequest

def handler(event: GenerationRequest):
    if event.prompt != "now":
        gate.wait(event.prompt)
    usage = {"prompt_tokens": 1, "completion_tokens": 1}
    yield Delta(text=event.prompt, tokens=[1], finish_reason="stop", usage=usage)
"""


async def test_a_stream_says_how_many_of_the_callers_calls_come_first(
    gateway: Gateway, gate: Gate, deploy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answering, "HEARTBEAT_S", 0.02)
    function = await deploy(WRITES, {"scale.max": 1}, gate=gate)

    async def ask(prompt: str, told: asyncio.Event | None = None) -> tuple[str | None, str]:
        body = {"model": function.name, "prompt": prompt, "stream": True}
        async with gateway.client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            text = ""
            async for piece in response.aiter_text():
                text += piece
                if told is not None and "waiting" in piece:
                    told.set()
            return response.headers.get("X-Queue-Ahead"), text

    # Start the worker with a call that waits for it. The next call does not wait, so its answer has no X-Queue-Ahead.
    await ask("now")
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(ask("run"))
        begun = await gate.next("run")
        events = [asyncio.Event() for _ in range(2)]
        waiting = []
        for told in events:
            waiting.append(tasks.create_task(ask("now", told)))
            await told.wait()
        begun.go()
    assert (await running)[0] is None
    for number, one in enumerate(waiting):
        ahead, text = await one
        assert ahead == str(number)
        assert f": waiting for a worker, {number} ahead\n\n" in text
        # The head was sent before the worker was known, so the headers of the worker are comments in the stream.
        assert text.count(": X-Worker-Id: ") == text.count(": Server-Timing: queue;dur=") == 1
        assert ": X-Cold-Start: false\n" in text.partition("data:")[0]
        assert text.endswith("data: [DONE]\n\n")


ENDLESS = """
from pilotflame import Delta, GenerationRequest

def handler(event: GenerationRequest):
    while True:
        yield Delta(text="word ", tokens=[1])
"""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/tgi/{name}/generate"])
async def test_an_answer_has_a_limit_of_bytes(
    gateway: Gateway, deploy: Any, monkeypatch: pytest.MonkeyPatch, path: str, *, stream: bool
) -> None:
    monkeypatch.setattr(deltas, "MOST_BYTES", 100_000)
    function = await deploy(ENDLESS)
    body = {"model": function.name, "prompt": "a", "stream": stream}
    if "responses" in path:
        body = {"model": function.name, "input": "a", "stream": stream}
    elif "tgi" in path:
        body, path = {"inputs": "a"}, path.format(name=function.name) + "_stream" * stream
    found = await gateway.client.post(path, json=body)
    assert "are larger than 100000 bytes" in found.text
    assert found.status_code == (200 if stream else 500)


BREAKS = """
from pilotflame import Delta, GenerationRequest

def handler(event: GenerationRequest):
    yield Delta(text="word ", tokens=[1])
    raise ValueError("no")
"""


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failed_request_keeps_nothing(gateway: Gateway, deploy: Any, *, stream: bool) -> None:
    """The end of a request frees its prompts at once: no cycle of references keeps them until the garbage collector runs."""
    function = await deploy(BREAKS)
    gc.collect()
    # Hide the objects of earlier tests from `gc.get_objects`, because a search in millions of objects takes seconds.
    gc.freeze()
    gc.disable()
    try:
        body = {"model": function.name, "prompt": ["a", "b"], "stream": stream}
        assert "ValueError" in (await gateway.client.post("/v1/completions", json=body)).text

        async def freed() -> bool:
            return not [found for found in gc.get_objects() if type(found) in (deltas.Deltas, Invocation)]

        await until(freed, "the end of all references to the request")
    finally:
        gc.enable()
        gc.unfreeze()


LARGE = """
from pilotflame import Delta, GenerationRequest

def handler(event: GenerationRequest):
    yield Delta(text="x" * 2_000_000)
    yield Delta(text="y", finish_reason="stop")
"""


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_large_piece_is_answered_like_a_small_one(
    gateway: Gateway, deploy: Any, *, stream: bool
) -> None:
    """The gateway validates and encodes such a piece in threads."""
    function = await deploy(LARGE)
    body = {"model": function.name, "prompt": "a", "stream": stream}
    answer = await gateway.client.post("/openai/v1/completions", json=body)
    assert answer.status_code == 200, failure(answer)
    assert answer.text.count("x" * 2_000_000) == 1


async def test_a_large_piece_that_is_no_delta_fails_the_call(gateway: Gateway, deploy: Any) -> None:
    function = await deploy(
        LARGE.replace('yield Delta(text="x" * 2_000_000)', 'yield {"tokens": ["x"] * 200_000}')
    )
    answer = await gateway.client.post("/openai/v1/completions", json={"model": function.name, "prompt": "a"})
    assert answer.status_code == 500
    assert "no language model" in answer.text


SCORES = """
from pilotflame import Delta, GenerationRequest

def handler(event: GenerationRequest):
    scored = {"token": "a", "id": 1, "logprob": -1.0, "top": [("a", 1, -1.0)]}
    yield Delta(text="a" * 300, prompt_logprobs=[scored] * 300)
    yield Delta(text="b", tokens=[1], logprobs=[scored], finish_reason="stop")
"""


async def test_the_event_of_a_long_prompt_is_made_in_a_thread(
    gateway: Gateway, deploy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = await deploy(SCORES)
    on_loop: list[bool] = []
    piece = CompletionAnswer.piece

    def noted(self: CompletionAnswer, prompt: int, delta: Delta) -> bytes:
        on_loop.append(threading.current_thread() is threading.main_thread())
        return piece(self, prompt, delta)

    monkeypatch.setattr(CompletionAnswer, "piece", noted)
    body = {"model": function.name, "prompt": "a", "stream": True, "echo": True, "logprobs": 1}
    response = await gateway.client.post("/v1/completions", json=body)
    first, second, done, _ = response.text.split("\n\n")
    assert len(json.loads(first.removeprefix("data: "))["choices"][0]["logprobs"]["tokens"]) == 300
    assert json.loads(second.removeprefix("data: "))["choices"][0]["text"] == "b"
    assert done == "data: [DONE]"
    # The last piece is small, but counts as large as all pieces, because its event repeats the whole answer in some protocols.
    assert on_loop == [False, False]


@pytest.mark.parametrize("path", ["/openai/v1/completions", "/v2/{}/runsync"])
async def test_a_grammar_that_is_nested_too_deeply_is_refused(
    gateway: Gateway, deploy: Any, path: str
) -> None:
    function = await deploy(SCORES)
    deep = '{"not": ' * 300 + "{}" + "}" * 300
    text = f'{{"model": "{function.name}", "prompt": "a", "structured_outputs": {{"json": {deep}}}}}'
    if "run" in path:
        text = f'{{"input": {{"openai_route": "/v1/completions", "openai_input": {text}}}}}'
    json_type = {"Content-Type": "application/json"}
    answer = await gateway.client.post(path.format(function.name), content=text, headers=json_type)
    assert (answer.status_code in (400, 422), "depth" in answer.text) == (True, True), answer.text[:300]
