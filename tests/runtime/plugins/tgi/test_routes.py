"""TGI's routes: paths, answers of handlers of one's own, errors."""

from __future__ import annotations

import json
from typing import Any

import pytest
from live import Gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")
PLAIN = [{"text": "Hel"}, {"text": "lo", "finish_reason": "stop"}]
LONG = [
    {"text": "ab", "tokens": [3, 4]},
    {"tokens": [9], "finish_reason": "length", "usage": {"prompt_tokens": 7}},
]
ENDING = [
    {"text": "a", "tokens": [5], "logprobs": [{"token": "a", "id": 5, "logprob": -0.5, "top": [["a", 5, -0.5], ["b", 6, -2.0]]}]},
    {"tokens": [9], "logprobs": [{"token": "<end>", "id": 9, "logprob": -0.25}], "finish_reason": "stop"},
]  # fmt: skip
FAILING = [{"text": "a"}, {"wrong": 1}]


def body(deltas: list[Any], **parameters: Any) -> dict[str, Any]:
    return {"inputs": json.dumps(deltas), "parameters": parameters}


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data:")) for line in text.split("\n\n") if line]


@pytest.mark.parametrize("path", ["/tgi/scripted/generate", "/generate"])
async def test_a_whole_answer(scripted: Gateway, path: str) -> None:
    answer = await scripted.client.post(path, json=body(PLAIN))
    assert answer.json() == {"generated_text": "Hello"}
    assert answer.headers["x-cold-start"] in ("true", "false")


@pytest.mark.parametrize("path", ["/tgi/scripted/generate_stream", "/generate_stream"])
async def test_a_stream(scripted: Gateway, path: str) -> None:
    answer = await scripted.client.post(path, json=body(LONG, details=True))
    assert answer.headers["content-type"] == "text/event-stream"
    token = {"logprob": None, "special": False}
    end = {"finish_reason": "length", "generated_tokens": 3, "seed": None, "input_length": 7}
    assert events(answer.text) == [
        {"index": 1, "token": {"id": 3, "text": "", **token}, "generated_text": None, "details": None},
        {"index": 2, "token": {"id": 4, "text": "ab", **token}, "generated_text": None, "details": None},
        {"index": 3, "token": {"id": 9, "text": "", **token}, "generated_text": "ab", "details": end},
    ]


async def test_details_have_the_tokens_and_the_end_is_special(scripted: Gateway) -> None:
    answer = await scripted.client.post("/generate", json=body(ENDING, details=True, top_n_tokens=2))
    first = {"id": 5, "text": "a", "logprob": -0.5, "special": False}
    other = {"id": 6, "text": "b", "logprob": -2.0, "special": False}
    assert answer.json()["details"] == {
        "finish_reason": "eos_token", "generated_tokens": 2, "seed": None, "prefill": [],
        "tokens": [first, {"id": 9, "text": "<end>", "logprob": -0.25, "special": True}], "top_tokens": [[first, other], []],
    }  # fmt: skip


async def test_the_root_answers_with_a_list_or_a_stream(scripted: Gateway) -> None:
    whole = await scripted.client.post("/tgi/scripted", json=body(PLAIN))
    assert whole.json() == [{"generated_text": "Hello"}]
    streamed = await scripted.client.post("/tgi/scripted", json={**body(PLAIN), "stream": True})
    assert [event["token"]["text"] for event in events(streamed.text)] == ["Hel", "lo"]
    assert events(streamed.text)[-1]["generated_text"] == "Hello"


async def test_parameters_that_ask_for_nothing(scripted: Gateway) -> None:
    nothing = {
        "best_of": 1,
        "typical_p": None,
        "watermark": False,
        "truncate": None,
        "decoder_input_details": False,
    }
    answer = await scripted.client.post("/generate", json=body(PLAIN, **nothing, adapter_id=None, seed=None))
    assert answer.status_code == 200, answer.text
    without = await scripted.client.post("/generate", json={"inputs": json.dumps(PLAIN), "parameters": None})
    assert without.json() == {"generated_text": "Hello"}


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"typical_p": 0.5}, "parameters.typical_p"),
        ({"best_of": 2}, "parameters.best_of"),
        ({"watermark": True}, "parameters.watermark"),
        ({"truncate": 0}, "parameters.truncate"),
        ({"decoder_input_details": True}, "parameters.decoder_input_details"),
        ({"temperature": 0}, "parameters.temperature"),
        ({"invented": 1}, "parameters.invented"),
        ({"grammar": {"type": "json", "value": "{"}}, "parameters.grammar"),
        ({"grammar": {"type": "regex", "value": {}}}, "parameters.grammar"),
        ({"grammar": {"type": "json_schema", "value": {"name": "a"}}}, "parameters.grammar"),
    ],
)
async def test_an_invalid_parameter_is_named(
    scripted: Gateway, parameters: dict[str, Any], field: str
) -> None:
    answer = await scripted.client.post("/generate", json=body(PLAIN, **parameters))
    assert (answer.status_code, answer.json()["error_type"]) == (422, "validation")
    assert f" {field}: " in answer.json()["error"]


async def test_errors(scripted: Gateway) -> None:
    await scripted.deploy("def handler(event):\n    return event\n", name="plain")
    for function, status in (("gone", 404), ("plain", 422)):
        for path in (f"/tgi/{function}", f"/tgi/{function}/generate_stream"):
            answer = await scripted.client.post(path, json=body(PLAIN))
            assert (answer.status_code, answer.json()["error_type"]) == (status, "validation")
    failed = await scripted.client.post("/generate", json={"inputs": "no JSON"})
    assert (failed.status_code, failed.json()["error_type"]) == (424, "generation")


async def test_an_answer_without_an_end_is_incomplete(scripted: Gateway) -> None:
    whole = await scripted.client.post("/generate", json=body(PLAIN[:1]))
    assert (whole.status_code, whole.json()["error_type"]) == (500, "incomplete_generation")
    streamed = await scripted.client.post("/generate_stream", json=body(PLAIN[:1]))
    assert events(streamed.text)[-1]["error_type"] == "incomplete_generation"


async def test_an_error_in_a_stream_is_its_last_event(scripted: Gateway) -> None:
    streamed = await scripted.client.post("/generate_stream", json=body(FAILING))
    first, last = events(streamed.text)
    assert first["token"]["text"] == "a"
    assert last["error_type"] == "generation"


async def test_a_paused_function_is_overloaded(scripted: Gateway) -> None:
    await scripted.client.post("/v1/functions/scripted/pause")
    try:
        answer = await scripted.client.post("/tgi/scripted/generate", json=body(PLAIN))
    finally:
        await scripted.client.post("/v1/functions/scripted/resume")
    assert (answer.status_code, answer.json()["error_type"]) == (429, "overloaded")
    assert int(answer.headers["retry-after"]) > 0


async def test_info(scripted: Gateway) -> None:
    for path in ("/tgi/scripted/info", "/info"):
        assert (await scripted.client.get(path)).json()["model_id"] == "scripted"


async def test_without_a_name_there_must_be_one_model(scripted: Gateway) -> None:
    source = (
        "from pilotflame import GenerationRequest\n\ndef handler(event: GenerationRequest):\n    yield {}\n"
    )
    other = await scripted.deploy(source)
    try:
        answer = await scripted.client.post("/generate", json=body(PLAIN))
    finally:
        await scripted.client.delete(f"/v1/functions/{other.name}")
    assert answer.status_code == 422
    assert "/tgi/NAME/generate" in answer.json()["error"]
