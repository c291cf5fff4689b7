"""The client `anthropic` of PyPI against a gateway. The function streams the deltas that a request lists, or shows its event."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from live import Gateway, gateway_here, short_folder

anthropic = pytest.importorskip("anthropic")
pytestmark = pytest.mark.asyncio(loop_scope="module")
# If the last message is a JSON list, streams its items as deltas. Otherwise calls each tool if that message has the role user,
# or else streams the event as JSON.
MODEL = """
import json
from pilotflame import Delta, GenerationRequest

async def handler(event: GenerationRequest, context):
    usage = {"prompt_tokens": 10, "cached_tokens": 4}
    if event.prompt_only:
        yield Delta(prompt={"ids": list(range(len(event.messages))), "pieces": [], "text": "", "most": 99}, finish_reason="length")
        return
    yield Delta(usage=usage)
    said = event.messages[-1]["content"]
    if said.startswith("["):
        for delta in json.loads(said):
            yield delta
        return
    if event.tools and event.tool_choice != "none" and event.messages[-1]["role"] == "user":
        yield Delta(reasoning="Hm.", tokens=[7])
        yield Delta(text="\\n\\n", tokens=[8])
        yield Delta(text="I ask.", tokens=[9])
        for number, tool in enumerate(event.tools):
            yield Delta(text="\\n")
            yield Delta(tool_calls=[{"id": f"call_{number}", "name": tool.function.name, "arguments": '{"city": "Ulm", "n": 1.0}'}])
        yield Delta(finish_reason="tool_calls", usage={**usage, "completion_tokens": 30})
        return
    if "overflow" in said:
        raise OverflowError("too much")
    for letter in json.dumps(event.model_dump(exclude_unset=True)):
        yield Delta(text=letter, tokens=[1])
    yield Delta(finish_reason="stop", usage=usage)
"""
TOOLS = [{"name": "weather", "description": "Rain?", "input_schema": {"type": "object"}}]
ASKED: dict[str, Any] = {
    "model": "llm",
    "max_tokens": 300,
    "messages": [{"role": "user", "content": "Rain?"}],
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Gateway]:
    with short_folder() as folder:
        async with gateway_here(folder / "state") as gateway:
            await gateway.deploy(MODEL, name="llm")
            yield gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def key(served: Gateway) -> str:
    wanted = {"name": "claude", "scopes": ["invoke"], "functions": ["llm"]}
    async with served.at_home() as home:
        made = await home.post("/v1/keys", json=wanted)
    assert made.status_code == 201, made.text
    return str(made.json()["key"])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(served: Gateway, key: str) -> AsyncIterator[Any]:
    url = str(served.client.base_url).rstrip("/")
    async with anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as found:
        yield found


async def event_of(client: Any, **fields: Any) -> Any:
    """Return the event that the function got for a request. The function streams it as JSON."""
    answer = await client.messages.create(**{**ASKED, **fields})
    return json.loads(answer.content[0].text)


def scripted(*deltas: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": json.dumps(deltas)}]}


async def test_a_message(client: Any) -> None:
    answer = await client.messages.create(
        **ASKED, system="Be brief.", extra_body={"temperature": 0.5, "top_k": 3}
    )
    (block,) = answer.content
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Rain?"}]
    assert json.loads(block.text) == {
        "messages": messages, "max_tokens": 300, "stop": [], "temperature": 0.5, "top_k": 3,
    }  # fmt: skip
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "llm")
    assert answer.id.startswith("msg_")
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    usage = answer.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (6, 4, len(block.text))


async def test_a_stream_of_a_text_and_calls(client: Any) -> None:
    tools = [*TOOLS, {**TOOLS[0], "name": "time", "type": "custom", "cache_control": {"type": "ephemeral"}}]
    async with client.messages.stream(**ASKED, tools=tools, thinking={"type": "adaptive"}) as stream:
        kinds = [event.type async for event in stream]
        answer = await stream.get_final_message()
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    derived = ("thinking", "signature", "text", "input_json")
    assert [kind for kind in kinds if kind not in derived] == [
        "message_start", *block, *block[:2], *block[1:], *block * 2, "message_delta", "message_stop",
    ]  # fmt: skip
    thought, text, *calls = answer.content
    assert (thought.thinking, text.text) == ("Hm.", "\n\nI ask.\n")
    assert [(call.id, call.name, call.input) for call in calls] == [
        ("call_0", "weather", {"city": "Ulm", "n": 1.0}), ("call_1", "time", {"city": "Ulm", "n": 1.0}),
    ]  # fmt: skip
    assert (answer.stop_reason, answer.usage.input_tokens, answer.usage.output_tokens) == ("tool_use", 6, 30)


async def test_the_arguments_of_a_call_come_in_pieces(client: Any) -> None:
    call = {"id": "call_0", "name": "weather", "arguments": ""}
    pieces = [{"tool_calls": [call]}, *({"arguments": one} for one in '{"city": "Köln", "n": 1.0}')]
    more = {"arguments": " ", "tool_calls": [{**call, "id": "call_1", "arguments": '{"n"'}]}
    whole = [*pieces, more, {"arguments": ": 2}"}, {"finish_reason": "tool_calls"}]
    cut = [*pieces, more, {"finish_reason": "length"}]
    for deltas, last, reason in ((whole, {"n": 2}, "tool_use"), (cut, {}, "max_tokens")):
        async with client.messages.stream(**ASKED | scripted(*deltas)) as stream:
            sent = [event.partial_json async for event in stream if event.type == "input_json"]
            streamed = await stream.get_final_message()
        answer = await client.messages.create(**ASKED | scripted(*deltas))
        assert [(one.id, one.input) for one in answer.content] == [
            ("call_0", {"city": "Köln", "n": 1.0}), ("call_1", last),
        ]  # fmt: skip
        assert [one.to_dict() for one in streamed.content] == [one.to_dict() for one in answer.content]
        assert streamed.stop_reason == answer.stop_reason == reason
        assert len(sent) > len(pieces)


async def test_a_call_that_a_stop_sequence_cuts_is_not_asked_for(client: Any) -> None:
    call = {"id": "call_0", "name": "weather", "arguments": '{"ci'}
    cut = scripted({"tool_calls": [call]}, {"finish_reason": "stop", "stop_reason": "END"})
    answer = await client.messages.create(**ASKED | cut)
    assert (answer.content[0].input, answer.stop_reason) == ({}, "stop_sequence")


@pytest.mark.parametrize(
    "deltas", [[{"arguments": "{"}], [{"tool_calls": [{"id": "a", "name": "f", "arguments": ""}]}, {"text": "So."}, {"arguments": "{"}]]
)  # fmt: skip
async def test_arguments_without_a_call_are_an_error(client: Any, deltas: list[dict[str, Any]]) -> None:
    with pytest.raises(anthropic.InternalServerError, match="arguments without a call"):
        await client.messages.create(**ASKED | scripted(*deltas, {"finish_reason": "stop"}))


async def test_the_result_of_a_call_goes_back(client: Any) -> None:
    asked = {**ASKED, "tools": TOOLS, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    answer = await client.messages.create(**asked)
    assert [block.type for block in answer.content] == ["text", "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": "call_0", "content": [{"type": "text", "text": "It rains."}]},
        {"type": "tool_result", "tool_use_id": "call_1", "content": "No clock.", "is_error": True},
    ]
    turns = [*ASKED["messages"], answer.to_param(), {"role": "user", "content": results}]
    got = await event_of(client, tools=TOOLS, messages=turns)
    function = {"name": "weather", "arguments": {"city": "Ulm", "n": 1.0}}
    assert got["messages"] == [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": "\n\nI ask.\n", "tool_calls": [{"id": "call_0", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "call_0", "content": "It rains."},
        {"role": "tool", "tool_call_id": "call_1", "content": "Error: No clock."},
    ]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
async def test_why_an_answer_has_ended(client: Any, stream: bool) -> None:
    cut: dict[str, Any] = {"text": "Ra", "tokens": [1, 2], "finish_reason": "length"}
    found = []
    for last in (
        cut, cut | {"finish_reason": "stop"}, cut | {"finish_reason": "stop", "stop_reason": "END"}, cut | {"text": "\n", "stop_reason": 7},
    ):  # fmt: skip
        async with client.messages.stream(**ASKED | scripted(last)) as sent:
            answer = await sent.get_final_message()
        if not stream:
            answer = await client.messages.create(**ASKED | scripted(last), stop_sequences=["END"])
        found.append((answer.content[0].text, answer.stop_reason, answer.stop_sequence))
        assert answer.usage.output_tokens == 2
    assert found == [
        ("Ra", "max_tokens", None), ("Ra", "end_turn", None), ("Ra", "stop_sequence", "END"), ("\n", "max_tokens", None),
    ]  # fmt: skip


async def test_the_number_of_tokens(client: Any) -> None:
    asked = {"model": "llm", "messages": ASKED["messages"], "system": [{"type": "text", "text": "Be brief."}]}
    assert (await client.messages.count_tokens(**asked, tools=TOOLS)).input_tokens == 2


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"extra_body": {"temperature": 1.5}}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"extra_body": {"invented": 1}}, "invented"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"extra_body": {"mcp_servers": [{"type": "url"}]}}, "mcp_servers"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, r"messages\.0\.content\.0.*'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]}, "tool_use"),
        ({"messages": []}, "messages"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, r"tools\.0"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice"),
    ],
)  # fmt: skip
async def test_what_is_refused_is_named(client: Any, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match=words) as caught:
        await client.messages.create(**ASKED | fields)
    body = caught.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert body["error"]["remedy"]
    assert body["request_id"] == caught.value.request_id


@pytest.mark.parametrize("asked", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
async def test_a_thread_is_refused_so_that_the_client_sends_all_turns(
    client: Any, asked: dict[str, Any]
) -> None:
    with pytest.raises(anthropic.BadRequestError, match="thread") as caught:
        await client.messages.create(**ASKED | {"extra_body": {"thread": asked}})
    # The tool runner of the client reads these details, and goes on without a thread.
    details = caught.value.body["error"]["details"]
    assert (details["error_code"], details["unsupported"]) == ("thread_unsupported_request", ["thread"])


async def test_nulls_and_fields_without_effect_are_as_absent(client: Any) -> None:
    nothing = dict.fromkeys(
        ("system", "tools", "tool_choice", "stop_sequences", "top_p", "thinking", "container")
    )
    turn = {
        "role": "user",
        "content": [{"type": "text", "text": "Rain?", "citations": None, "cache_control": None}],
    }
    got = await event_of(
        client, messages=[turn], metadata={"user_id": "me"}, service_tier="auto", extra_headers={"anthropic-beta": "x"}, extra_body=nothing
    )  # fmt: skip
    assert got == {"messages": ASKED["messages"], "max_tokens": 300, "stop": []}


async def test_turns_of_one_role_are_one_and_an_assistants_last_turn_is_continued(client: Any) -> None:
    turns = [{"role": "user", "content": text} for text in ("A", "B")]
    got = await event_of(client, messages=[*turns, {"role": "assistant", "content": "It"}])
    assert got["messages"] == [{"role": "user", "content": "A\nB"}, {"role": "assistant", "content": "It"}]
    assert got["continue_final_message"] is True
    got = await event_of(client, messages=[*turns, {"role": "assistant", "content": ""}])
    assert "continue_final_message" not in got


async def test_formats_and_effort(client: Any) -> None:
    schema = {"type": "object"}
    config = {"effort": "max", "format": {"type": "json_schema", "schema": schema}}
    got = await event_of(client, output_config=config, thinking=None)
    assert (got["output"], got["reasoning_effort"]) == ({"json_schema": schema}, "xhigh")
    assert (await event_of(client, thinking={"type": "disabled"}))["reasoning_effort"] == "none"


async def test_tools_arrive_in_openais_form(client: Any) -> None:
    tools = [{**TOOLS[0], "input_schema": {"type": "object", "properties": None}, "strict": True}]
    got = await event_of(client, tools=tools, tool_choice={"type": "none"})
    function = {"name": "weather", "description": "Rain?", "parameters": {"type": "object"}, "strict": True}
    assert [tool["function"] for tool in got["tools"]] == [function]
    assert (got["tool_choice"], got["parallel_tool_calls"]) == ("none", True)


async def test_errors(client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError, match="gone") as missing:
        await client.messages.create(**ASKED | {"model": "gone"})
    assert missing.value.type == "not_found_error"
    with pytest.raises(anthropic.InternalServerError, match="too much") as failed:
        await client.messages.create(**ASKED | {"messages": [{"role": "user", "content": "overflow"}]})
    assert failed.value.type == "api_error"
    call = {"id": "a", "name": "f", "arguments": "[1"}
    wrong = scripted({"tool_calls": [call], "finish_reason": "tool_calls"})
    with pytest.raises(anthropic.InternalServerError, match="no JSON object"):
        await client.messages.create(**ASKED | wrong)
    with pytest.raises(anthropic.NotFoundError) as unrouted:
        await client.messages.batches.list()
    assert unrouted.value.type == "not_found_error"


async def test_an_error_after_the_first_event_is_the_last_one(client: Any) -> None:
    with pytest.raises(anthropic.APIStatusError, match="something else than Delta") as caught:
        async with client.messages.stream(**ASKED | scripted({"text": "Ra"}, {"index": 1000})) as stream:
            await stream.get_final_message()
    assert caught.value.body["error"]["type"] == "api_error"


async def test_the_key_is_in_either_header(client: Any, served: Gateway, key: str) -> None:
    async with httpx.AsyncClient(base_url=served.client.base_url) as plain:
        for path in ("/v1/messages", "/anthropic/v1/messages"):
            given = await plain.post(
                path, json=ASKED, headers={"x-api-key": key, "anthropic-version": "2023-06-01"}
            )
            assert given.status_code == 200, given.text
        refused = await plain.post("/v1/messages", json=ASKED, headers={"x-api-key": key + "0"})
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
        # The gateway reads the key in `x-api-key` only on Anthropic's routes.
        elsewhere = await plain.post("/invoke/llm", json={"prompt": "A"}, headers={"x-api-key": key})
        assert elsewhere.status_code == 401
