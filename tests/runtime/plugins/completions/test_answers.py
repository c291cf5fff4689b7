"""Answers in the form of OpenAI's API: what they keep of the pieces."""

from __future__ import annotations

from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.handlers.language_model.contract import Delta, ToolCall
from pilotflame.runtime.plugins.completions.answers import CompletionAnswer
from pilotflame.runtime.plugins.completions.requests import ChatRequest, StreamOptions


def test_a_streamed_answer_keeps_no_text() -> None:
    asked = ChatRequest.model_construct(model="m", n=1, stream_options=StreamOptions())
    streamed, whole = CompletionAnswer("id", asked), CompletionAnswer("id", asked)
    for _ in range(3):
        delta = Delta(text="needle", tokens=[1])
        assert b"needle" in streamed.piece(0, delta)
        whole.add(0, delta)
    assert "needle" not in repr(streamed)
    assert whole.whole()["choices"][0]["message"]["content"] == "needle" * 3


def calls_in(pieces: list[str]) -> list[Delta]:
    """Return two calls of an answer whose arguments come in these pieces."""
    deltas: list[Delta] = []
    for number in range(2):
        deltas.append(
            Delta(
                tool_calls=[ToolCall(id=f"call_{number}", name="f", arguments="")],
                text="I ask." if not number else "",
            )
        )
        deltas += [Delta(arguments=piece) for piece in pieces]
    return [*deltas, Delta(finish_reason="tool_calls")]


@given(pieces=st.lists(st.text('{"a1} ü', min_size=1), max_size=6))
def test_the_chunks_of_a_stream_are_the_whole_answer(pieces: list[str]) -> None:
    asked = ChatRequest.model_construct(model="m", n=1, stream_options=StreamOptions())
    streamed, whole = CompletionAnswer("id", asked), CompletionAnswer("id", asked)
    found: list[dict[str, Any]] = []
    for delta in calls_in(pieces):
        whole.add(0, delta)
        for line in streamed.piece(0, delta).decode().splitlines():
            if line:
                (choice,) = orjson.loads(line.removeprefix("data: "))["choices"]
                for call in choice["delta"].get("tool_calls", []):
                    # The first piece of a call has its id, its type and its name, and the others have neither.
                    if "id" in call:
                        assert call["index"] == len(found)
                        found.append({name: value for name, value in call.items() if name != "index"})
                    else:
                        assert call.keys() == {"index", "function"}
                        assert call["function"].keys() == {"arguments"}
                        found[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    message = whole.whole()["choices"][0]["message"]
    assert message["tool_calls"] == found
    assert [call["function"]["arguments"] for call in found] == ["".join(pieces)] * 2
