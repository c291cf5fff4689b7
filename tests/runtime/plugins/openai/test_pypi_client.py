"""The client `openai` of PyPI against a gateway: chats, completions, streams, models, errors. The model is tiny, and runs in a worker."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from live import Gateway
from trained_model import ENGINE

openai = pytest.importorskip("openai")
pytest.importorskip("transformers")
pytestmark = pytest.mark.asyncio(loop_scope="module")
# What the template's model knows by heart.
KNOWN = " lets the burner start at once. Ein Flämmchen genügt: 火 🔥"
START = "A pilot flame lets the burner start at once. Ein"
ASKED: dict[str, Any] = {"model": "llm", "temperature": 0.0}
CHAT: dict[str, Any] = {**ASKED, "messages": [{"role": "user", "content": "A pilot flame"}]}


async def test_a_chat(client: Any) -> None:
    answer = await client.chat.completions.create(**CHAT)
    (choice,) = answer.choices
    assert (choice.message.content, choice.message.role, choice.finish_reason) == (KNOWN, "assistant", "stop")
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "llm"
    assert answer.usage.prompt_tokens == len("A pilot flame")
    assert answer.usage.completion_tokens == len(KNOWN.encode()) + 1
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


async def test_a_streamed_chat_has_the_chunks_of_vllm(served: Gateway) -> None:
    body = {**CHAT, "max_tokens": 5, "stream": True, "stream_options": {"include_usage": True}}
    response = await served.client.post("/openai/v1/chat/completions", json=body)
    *events, done = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert done == "[DONE]"
    chunks = [json.loads(event) for event in events]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    first, *pieces, usage = chunks
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    # vLLM joins the tokens made while the reader was busy into one chunk, so the chunks are not compared one by one.
    contents = [chunk["choices"][0]["delta"]["content"] for chunk in pieces]
    assert contents == list(" lets") if ENGINE == "own" else "".join(contents) == " lets"
    assert [chunk["choices"][0]["finish_reason"] for chunk in pieces] == [None] * (len(pieces) - 1) + [
        "length"
    ]
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 5)
    assert response.headers["content-type"] == "text/event-stream"


async def test_a_stream_of_several_answers(client: Any) -> None:
    stream = await client.chat.completions.create(**CHAT, n=3, stream=True)
    texts, reasons = ["", "", ""], [None, None, None]
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [KNOWN] * 3
    assert reasons == ["stop"] * 3


async def test_completions_of_several_prompts_with_logprobs(client: Any) -> None:
    answer = await client.completions.create(
        **ASKED, prompt=["A pilot flame", START], max_tokens=4, logprobs=2, n=2, stop="\n"
    )
    texts = [(choice.index, choice.text) for choice in answer.choices]
    # The fourth token after START is the first byte of "ä". The text leaves out incomplete characters.
    assert texts == [(0, " let"), (1, " let"), (2, " Fl"), (3, " Fl")]
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == list(" let")
    assert all(-0.5 < value <= 0 for value in logprobs.token_logprobs)
    assert [len(top) for top in logprobs.top_logprobs] == [2] * 4
    assert answer.usage.prompt_tokens == len("A pilot flame") + len(START)


async def test_chat_logprobs_and_stop(client: Any) -> None:
    answer = await client.chat.completions.create(**CHAT, stop=["burner"], logprobs=True, top_logprobs=3)
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason, choice.stop_reason) == (
        " lets the ",
        "stop",
        "burner",
    )
    assert [len(one.top_logprobs) for one in choice.logprobs.content] == [3] * len(" lets the burner")


async def test_a_seed_repeats_an_answer(client: Any) -> None:
    drawn = CHAT | {"temperature": 2.0, "max_tokens": 20}
    texts = [
        (await client.chat.completions.create(**drawn, seed=seed)).choices[0].message.content
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


async def test_many_callers_share_one_worker(client: Any, served: Gateway) -> None:
    answers = await asyncio.gather(*(client.chat.completions.create(**CHAT) for _ in range(12)))
    assert {answer.choices[0].message.content for answer in answers} == {KNOWN}
    assert sum((await served.function("llm").status())["workers"].values()) == 1


async def test_models(client: Any, served: Gateway) -> None:
    await served.deploy("def handler(event):\n    return event\n", name="plain")
    assert [model.id async for model in client.models.list()] == ["caller", "llm"]
    assert (await client.models.retrieve("llm")).owned_by == "pilotflame"
    with pytest.raises(openai.NotFoundError) as caught:
        await client.chat.completions.create(**CHAT | {"model": "llmm"})
    assert caught.value.param == "model"
    assert "'llm'" in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"extra_body": {"invented": 1}}, "invented"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools.0.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"prediction": {"type": "content", "content": "a"}}, "prediction"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [1]}]}, "messages"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x.[key]"),
        ({"extra_body": {"stop_token_ids": [-1]}}, "stop_token_ids.0"),
        ({"extra_body": {"chat_template_kwargs": {"chat_template": "x"}}}, "the body"),
    ],
)
async def test_fields_that_are_refused_are_named(client: Any, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(**CHAT | fields)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


async def test_fields_without_effect_are_accepted(client: Any) -> None:
    answer = await client.chat.completions.create(
        **CHAT, user="me", metadata={"a": "b"}, store=False, service_tier="auto", prompt_cache_key="k", tools=[], max_tokens=2,
        response_format={"type": "text"}, parallel_tool_calls=True,
    )  # fmt: skip
    assert answer.choices[0].message.content == " l"


async def test_a_prompt_that_is_too_long(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is 512 tokens"):
        await client.chat.completions.create(**CHAT, max_tokens=600)
    stream = CHAT | {"max_tokens": 600, "stream": True}
    with pytest.raises(openai.BadRequestError):
        await client.chat.completions.create(**stream)


async def test_a_caller_who_leaves_frees_the_worker(client: Any, served: Gateway) -> None:
    stream = await client.chat.completions.create(
        **CHAT | {"max_tokens": 400}, stream=True, extra_body={"ignore_eos": True}
    )
    await anext(stream)
    await stream.close()
    await served.function("llm").settled(ready=1, in_flight=0)


async def test_a_function_that_is_no_language_model(client: Any, served: Gateway) -> None:
    await served.deploy("def handler(event):\n    return event\n", name="plain")
    with pytest.raises(openai.BadRequestError, match="no language model"):
        await client.chat.completions.create(**CHAT | {"model": "plain"})


async def test_a_handler_of_ones_own(client: Any, served: Gateway) -> None:
    await served.deploy(
        "from pilotflame import Delta, GenerationRequest\n"
        "def handler(event: GenerationRequest):\n"
        "    for word in event.messages[-1]['content'].split():\n"
        "        yield Delta(text=word + ' ', tokens=[1])\n"
        "    yield Delta(finish_reason='stop', usage={'prompt_tokens': 3, 'completion_tokens': 3})\n",
        name="own",
    )
    answer = await client.chat.completions.create(**CHAT | {"model": "own"})
    assert answer.choices[0].message.content == "A pilot flame "
    assert answer.usage.total_tokens == 6


@pytest.mark.parametrize(
    "fields", ["usage={'prompt_tokens': 1 << 70}", "index=200", "stop_reason=1 << 70", "index=-1"]
)
async def test_a_handler_that_yields_impossible_numbers(client: Any, served: Gateway, fields: str) -> None:
    await served.deploy(
        "from pilotflame import Delta, GenerationRequest\ndef handler(event: GenerationRequest):\n"
        f"    yield Delta.model_construct({fields}, finish_reason='stop').model_dump()\n",
        name="odd",
    )
    with pytest.raises(openai.InternalServerError) as caught:
        await client.chat.completions.create(**CHAT | {"model": "odd"})
    assert caught.value.code == "output_invalid"


async def test_a_handler_that_yields_something_else(client: Any, served: Gateway) -> None:
    await served.deploy(
        "from pilotflame import GenerationRequest\ndef handler(event: GenerationRequest):\n    yield {'word': 1}\n",
        name="odd",
    )
    with pytest.raises(openai.InternalServerError, match="yields something else"):
        await client.chat.completions.create(**CHAT | {"model": "odd"})


async def test_echo_and_the_limits_of_completions(client: Any) -> None:
    echoed = await client.completions.create(
        **ASKED, prompt="A pilot flame", max_tokens=4, echo=True, best_of=1
    )
    assert echoed.choices[0].text == "A pilot flame let"
    refused: list[dict[str, Any]] = [
        {"prompt": ["a"] * 129}, {"best_of": 2}, {"extra_body": {"top_logprobs": 2}}
    ]  # fmt: skip
    for fields in refused:
        with pytest.raises(openai.BadRequestError):
            await client.completions.create(**{**ASKED, "prompt": "A", **fields})


async def test_logprobs_of_prompts(client: Any) -> None:
    prompt = "A pilot flame"
    fields: dict[str, Any] = {**ASKED, "prompt": prompt, "max_tokens": 4, "echo": True, "logprobs": 2}
    (whole,) = (await client.completions.create(**fields)).choices
    found, count = whole.logprobs, len(prompt) + 4
    assert "".join(found.tokens) == whole.text == "A pilot flame let"
    assert [len(one) for one in (found.tokens, found.token_logprobs, found.top_logprobs)] == [count] * 3
    assert (found.token_logprobs[0], found.top_logprobs[0]) == (None, None)
    # As lm-evaluation-harness reads them: is each token the likeliest one?
    for token, value, top in list(zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True))[
        1:
    ]:
        assert (value, top[token]) == (max(top.values()), value)
    assert found.text_offset == [*range(count)]
    stream = await client.completions.create(**fields, stream=True)
    pieces = [choice async for chunk in stream for choice in chunk.choices]
    assert [
        value for one in pieces if one.logprobs for value in one.logprobs.token_logprobs
    ] == pytest.approx(found.token_logprobs, abs=1e-4)
    assert [at for one in pieces if one.logprobs for at in one.logprobs.text_offset] == found.text_offset
    assert "".join(one.text for one in pieces) == whole.text


async def test_logprobs_of_prompts_as_vllm_has_them(client: Any) -> None:
    more = {"extra_body": {"prompt_logprobs": 1}}
    answer = await client.chat.completions.create(**CHAT, max_tokens=2, **more)
    shown = answer.prompt_logprobs
    assert (shown[0], len(shown)) == (None, answer.usage.prompt_tokens)
    (text,) = (
        await client.completions.create(**ASKED, prompt=["A pilot flame"], max_tokens=2, **more)
    ).choices
    for place in text.prompt_logprobs[1:]:
        assert all(one.keys() == {"logprob", "rank", "decoded_token"} for one in place.values())
        assert min(one["rank"] for one in place.values()) == 1
    assert (
        "".join(next(iter(place.values()))["decoded_token"] for place in text.prompt_logprobs[1:])
        == " pilot flame"
    )
    assert text.logprobs is None


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"top_logprobs": 2}, "top_logprobs"), ({"logit_bias": {"1000000": 1}}, "logit_bias"),
        ({"messages": [{"role": "user", "content": "x" * 1_000_000}]}, "the prompt is too long"),
    ],
)  # fmt: skip
async def test_requests_that_vllm_refuses_too(client: Any, fields: dict[str, Any], word: str) -> None:
    with pytest.raises(openai.BadRequestError, match=word):
        await client.chat.completions.create(**CHAT | fields)
    # Both engines accept `top_logprobs=0`. Our engine ignores stop tokens outside the vocabulary, and vLLM 0.32 refuses them.
    ignored = {"stop_token_ids": [1_000_000]} if ENGINE == "own" else {}
    assert (await client.chat.completions.create(**CHAT, top_logprobs=0, extra_body=ignored)).choices


async def test_the_largest_seed_and_usage_from_the_first_chunk(client: Any) -> None:
    stream = await client.chat.completions.create(
        **CHAT, n=2, seed=(1 << 63) - 1, max_tokens=3, stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )  # fmt: skip
    usages = [chunk.usage.prompt_tokens async for chunk in stream]
    assert set(usages) == {len("A pilot flame")}


@pytest.mark.skipif(ENGINE == "vllm", reason="vLLM does not predict the times of tokens")
async def test_how_soon_the_tokens_are_needed(client: Any) -> None:
    soon = {"x-slo-ttft-ms": "60000", "x-slo-tpot-ms": "60000"}
    answer = await client.chat.completions.create(**CHAT, extra_headers=soon)
    assert answer.choices[0].message.content == KNOWN
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(
                **CHAT, extra_headers={"x-slo-ttft-ms": "0.001"}, stream=stream
            )
        assert (caught.value.status_code, caught.value.code) == (503, "overloaded")
        assert int(caught.value.response.headers["retry-after"]) >= 1
    with pytest.raises(openai.InternalServerError, match="A token would take"):
        await client.chat.completions.create(**CHAT, extra_headers={"x-slo-tpot-ms": "0.0001"})
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(**CHAT, extra_headers={"x-slo-ttft-ms": "soon"})
    assert refused.value.param == "x-slo-ttft-ms"


async def test_tokens_are_in_the_usage_and_the_metrics(client: Any, served: Gateway) -> None:
    async def used() -> tuple[float, float]:
        rows = (await served.client.get("/v1/usage", params={"by": "function"})).json()["rows"]
        found = next(row["usage"] for row in rows if row["key"] == "llm")
        return found["prompt_tokens"], found["generated_tokens"]

    before = await used()
    answer = await client.chat.completions.create(**CHAT, n=2)
    usage = answer.usage
    stream = await client.chat.completions.create(
        **CHAT | {"max_tokens": 400}, stream=True, extra_body={"ignore_eos": True}
    )
    await anext(stream)
    await stream.close()
    await served.function("llm").settled(ready=1, in_flight=0)
    after = await used()
    assert after[0] - before[0] == 2 * usage.prompt_tokens
    # The tokens of the answer whose caller left count too.
    assert usage.completion_tokens < after[1] - before[1] < usage.completion_tokens + 400
    metrics = (await served.client.get("/metrics")).text
    assert f'pilotflame_tokens_total{{function="llm",kind="generated"}} {after[1]}' in metrics


async def test_a_response_names_its_worker_and_shows_its_times(served: Gateway) -> None:
    for stream in (False, True):
        body = {**CHAT, "max_tokens": 2, "stream": stream}
        headers = (
            await served.client.post("/v1/chat/completions", json=body, headers={"X-Request-Id": "mine"})
        ).headers
        assert (headers["x-request-id"], headers["x-cold-start"]) == ("mine", "false")
        assert headers["x-worker-id"]
        assert "exec;dur=" in headers["server-timing"]
