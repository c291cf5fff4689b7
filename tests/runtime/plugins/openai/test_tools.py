"""Tools, output formats and reasoning by the client `openai`. One model was trained to call a tool, and the other one knows nothing of tools."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel

from .conftest import MESSAGES, TOOL

openai = pytest.importorskip("openai")
pytest.importorskip("transformers")
pytestmark = pytest.mark.asyncio(loop_scope="module")
CALLS: dict[str, Any] = {"model": "caller", "temperature": 0.0, "messages": MESSAGES, "tools": [TOOL]}
KNOWS_NOTHING: dict[str, Any] = {"model": "llm", "seed": 1, "messages": MESSAGES}


def cities(calls: Any) -> list[str]:
    assert {call.function.name for call in calls} == {"weather"}
    assert len({call.id for call in calls}) == len(calls)
    return [json.loads(call.function.arguments)["city"] for call in calls]


async def read(stream: Any) -> None:
    async for _ in stream:
        pass


async def test_a_model_reasons_and_calls_a_tool(client: Any) -> None:
    answer = await client.chat.completions.create(**CALLS)
    (choice,) = answer.choices
    assert cities(choice.message.tool_calls) == ["Ulm", "Rom"]
    assert (choice.message.reasoning_content, choice.message.reasoning) == ("Hm.", "Hm.")
    assert (choice.message.content.strip(), choice.finish_reason) == ("I ask.", "tool_calls")


async def test_a_stream_of_calls(client: Any) -> None:
    said, thought, calls, reasons, pieces = "", "", [], [], []
    async for chunk in await client.chat.completions.create(**CALLS, stream=True):
        (choice,) = chunk.choices
        said += choice.delta.content or ""
        thought += getattr(choice.delta, "reasoning", "")
        for call in choice.delta.tool_calls or []:
            if call.id is not None:
                calls.append(call)
            else:
                pieces.append(call.function.arguments)
                calls[call.index].function.arguments += pieces[-1]
        reasons.append(choice.finish_reason)
    assert (said.strip(), thought) == ("I ask.", "Hm.")
    assert cities(calls) == ["Ulm", "Rom"]
    assert [call.index for call in calls] == [0, 1]
    assert reasons[-1] == "tool_calls"
    # Each token of the model is a byte, so the arguments come in many pieces.
    assert len(pieces) > 20
    (choice,) = (await client.chat.completions.create(**CALLS)).choices
    whole = choice.message
    assert (whole.content, whole.reasoning) == (said, thought)
    assert [call.function.arguments for call in whole.tool_calls] == [
        call.function.arguments for call in calls
    ]


async def test_calls_go_back_to_the_model(client: Any) -> None:
    answer = await client.chat.completions.create(**CALLS)
    (first, _) = answer.choices[0].message.tool_calls
    reply = {"role": "tool", "tool_call_id": first.id, "content": "It rains."}
    history = [*MESSAGES, answer.choices[0].message.model_dump(exclude_none=True), reply]
    again = await client.chat.completions.create(**CALLS | {"messages": history}, max_tokens=3)
    # The template shows the city, so it got the arguments as an object, not as text.
    assert again.usage.prompt_tokens == len(
        "weather:Rain?I ask.<tool_call>Ulm</tool_call><tool_call>Rom</tool_call>It rains.!<think>"
    )


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
async def test_a_model_that_knows_nothing_of_tools_makes_a_required_call(client: Any, choice: Any) -> None:
    strict = {
        **TOOL["function"],
        "strict": True,
        "parameters": {**TOOL["function"]["parameters"], "additionalProperties": False},
    }
    tools = [{"type": "function", "function": strict}]
    answer = await client.chat.completions.create(**KNOWS_NOTHING, tools=tools, tool_choice=choice)
    (found,) = answer.choices
    assert cities(found.message.tool_calls)[0] in ("Ulm", "Rom")
    assert (found.finish_reason, found.message.content) == ("tool_calls", None)


async def test_a_model_that_is_not_shown_the_tools_refuses_them(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="does not show tools"):
        await client.chat.completions.create(**KNOWS_NOTHING, tools=[TOOL])
    answer = await client.chat.completions.create(
        **KNOWS_NOTHING, tools=[TOOL], tool_choice="none", max_tokens=2
    )
    assert answer.choices[0].message.tool_calls is None


async def test_output_formats(client: Any) -> None:
    class Place(BaseModel):
        kind: bool
        names: tuple[bool, bool]

    parsed = await client.chat.completions.parse(**KNOWS_NOTHING, response_format=Place)
    assert isinstance(parsed.choices[0].message.parsed, Place)
    for fields, wanted in (
        ({"choice": ["yes", "no"]}, ("yes", "no")),
        ({"regex": "a{3}b"}, ("aaab",)),
        ({"grammar": 'start: "x" "y"'}, ("xy",)),
        ({"json": {"const": 7}}, ("7",)),
    ):
        extra = {"structured_outputs": fields}
        answer = await client.chat.completions.create(**KNOWS_NOTHING, extra_body=extra, n=2)
        assert {choice.message.content for choice in answer.choices} <= set(wanted)
        completed = await client.completions.create(model="llm", prompt="A", extra_body=extra)
        assert completed.choices[0].text in wanted


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_a_stop_string_cuts_out_of_its_format_is_an_error(
    client: Any, stream: bool
) -> None:
    schema = {"name": "a", "schema": {"const": {"a": 7}}}
    asked = KNOWS_NOTHING | {
        "response_format": {"type": "json_schema", "json_schema": schema},
        "stream": stream,
    }
    with pytest.raises(openai.APIError, match="format"):
        await read(await client.chat.completions.create(**asked, stop="7"))
    # An answer that `max_tokens` cuts is no error, although it does not match the format.
    cut = await client.chat.completions.create(**asked | {"stream": False}, max_tokens=3)
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ('{"a', "length")


async def test_a_schema_that_cannot_be_used(client: Any) -> None:
    schema = {"name": "odd", "schema": {"type": "nothing"}}
    with pytest.raises(openai.BadRequestError, match="cannot be used"):
        await client.chat.completions.create(
            **KNOWS_NOTHING, response_format={"type": "json_schema", "json_schema": schema}
        )


async def test_reasoning_effort_of_a_model_that_does_not_reason(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="reasoning_effort"):
        await client.chat.completions.create(**KNOWS_NOTHING, reasoning_effort="low")
    answer = await client.chat.completions.create(**KNOWS_NOTHING, reasoning_effort="none", max_tokens=1)
    assert answer.usage.completion_tokens == 1


async def test_a_response_with_reasoning_and_calls(client: Any) -> None:
    tool = {"type": "function", **TOOL["function"]}
    asked: dict[str, Any] = {"model": "caller", "temperature": 0.0, "input": "Rain?", "tools": [tool]}
    response = await client.responses.create(**asked)
    assert response.status == "completed"
    thought, message, *calls = response.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "Hm.")
    assert response.output_text.strip() == message.content[0].text.strip() == "I ask."
    assert [json.loads(call.arguments)["city"] for call in calls] == ["Ulm", "Rom"]
    assert response.usage.input_tokens == len("weather:Rain?!<think>")
    assert response.usage.output_tokens_details.reasoning_tokens > 0

    async with client.responses.stream(**asked) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
    assert final.output_text == response.output_text
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 4

    replies = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "It rains."} for call in calls
    ]
    history = [
        {"role": "user", "content": "Rain?"},
        *[item.model_dump() for item in response.output],
        *replies,
    ]
    again = await client.responses.create(**asked | {"input": history}, max_output_tokens=2)
    assert (again.status, again.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert again.usage.input_tokens == len(
        "weather:Rain?I ask.<tool_call>Ulm</tool_call><tool_call>Rom</tool_call>It rains.It rains.!<think>"
    )


async def test_a_response_in_a_format(client: Any) -> None:
    class Place(BaseModel):
        kind: bool

    response = await client.responses.parse(model="llm", instructions="Short.", input="A", text_format=Place)
    assert isinstance(response.output_parsed, Place)
    async with client.responses.stream(
        model="llm", input="A", max_output_tokens=3, include=["message.output_text.logprobs"], top_logprobs=2
    ) as stream:
        events = [event async for event in stream]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert events[-1].type == "response.incomplete"
    assert "".join(event.delta for event in deltas) == events[-1].response.output_text
    assert all(len(event.logprobs[0].top_logprobs) == 2 for event in deltas)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.name"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"truncation": "auto"}, "truncation"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
    ],
)
async def test_what_a_response_refuses(client: Any, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(**{"model": "llm", "input": "A", **fields})
    assert caught.value.param == param
