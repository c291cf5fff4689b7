"""The events of a streamed response have what the response without a stream has, however the answer is cut into pieces."""

from __future__ import annotations

from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.handlers.language_model.contract import Delta, ToolCall
from pilotflame.runtime.plugins.openai.response_answers import ResponseAnswer
from pilotflame.runtime.plugins.openai.response_requests import ResponseRequest

WORDS = st.lists(st.text('{"a1} ü', min_size=1), max_size=5)


def events_of(answer: ResponseAnswer, deltas: list[Delta]) -> list[dict[str, Any]]:
    sent = b"".join([*(answer.piece(0, delta) for delta in deltas), answer.end()])
    lines = [line for line in sent.split(b"\n") if line.startswith(b"data: ")]
    return [orjson.loads(line.removeprefix(b"data: ")) for line in lines]


@given(text=WORDS, arguments=st.lists(WORDS, max_size=3), begun=st.booleans(), cut=st.booleans())
def test_the_events_are_the_whole_response(
    text: list[str], arguments: list[list[str]], begun: bool, cut: bool
) -> None:
    deltas = [Delta(text=one) for one in text]
    for number, pieces in enumerate(arguments):
        first, later = (pieces[0], pieces[1:]) if begun and pieces else ("", pieces)
        deltas.append(Delta(tool_calls=[ToolCall(id=f"call_{number}", name="f", arguments=first)]))
        deltas += [Delta(arguments=one) for one in later]
    deltas.append(Delta(finish_reason="length" if cut else "stop"))
    asked = ResponseRequest(model="m", input="a")
    whole, streamed = ResponseAnswer("resp_1", asked), ResponseAnswer("resp_1", asked)
    for delta in deltas:
        whole.add(0, delta)
    events = events_of(streamed, deltas)
    kept = {"created_at": 0}
    assert events[-1]["response"] | kept == whole.whole() | kept

    items = whole.whole()["output"]
    assert [one["item"] for one in events if one["type"] == "response.output_item.done"] == items
    calls = [item for item in items if item["type"] == "function_call"]
    assert [call["arguments"] for call in calls] == ["".join(pieces) for pieces in arguments]
    for number, item in enumerate(items):
        own = [one for one in events if one.get("output_index") == number]
        said = "".join(one["delta"] for one in own if one["type"].endswith(".delta"))
        assert said == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
        added = [one["item"] for one in own if one["type"] == "response.output_item.added"]
        assert [one["status"] for one in added] == ["in_progress"]
    assert [item["status"] for item in items] == ["completed"] * len(items[:-1]) + [
        "incomplete" if cut else "completed" for _ in items[-1:]
    ]
