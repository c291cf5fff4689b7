"""Answers in the form of OpenAI's API, made of deltas: whole answers and streams."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.errors import HandlerFailed, OutputInvalid
from pilotflame.handlers.language_model.contract import Delta, TokenLogprob, TokenUsage, ToolCall
from pilotflame.runtime.plugins.completions.answers import DONE, CompletionAnswer
from pilotflame.runtime.plugins.completions.requests import ChatRequest, CompletionRequest, StreamOptions


def test_a_streamed_answer_keeps_no_text() -> None:
    asked = ChatRequest.model_construct(model="m", n=1, stream_options=StreamOptions())
    streamed, whole = CompletionAnswer("id", asked), CompletionAnswer("id", asked)
    for _ in range(3):
        delta = Delta(text="needle", tokens=[1])
        assert b"needle" in streamed.piece(0, delta)
        whole.add(0, delta)
    assert "needle" not in repr(streamed)
    assert whole.whole()["choices"][0]["message"]["content"] == "needle" * 3


CALLS = [ToolCall(id="c1", name="weather", arguments="{}"), ToolCall(id="c2", name="time", arguments="{}")]
FIRST = TokenLogprob(token="a", id=1, logprob=-9.0, rank=3)
SECOND = TokenLogprob(token="bc", id=2, logprob=-0.5, rank=2, top=[("d", 4, -0.25), ("bc", 2, -0.5)])
END = Delta(
    text="!",
    tokens=[3],
    finish_reason="stop",
    stop_reason=7,
    usage=TokenUsage(prompt_tokens=5, cached_tokens=2),
)


def asked(chats: bool = True, **fields: Any) -> Any:
    kind = ChatRequest if chats else CompletionRequest
    given = {"model": "m", "n": 1, "stream_options": StreamOptions(), "prompt_logprobs": None, "echo": False}
    return kind.model_construct(**given | fields)


def chunks(told: bytes) -> list[dict[str, Any]]:
    return [
        orjson.loads(one.removeprefix(b"data: "))
        for one in told.split(b"\n\n")
        if one and one != DONE.strip()
    ]


def test_a_chat_is_its_pieces() -> None:
    answer = CompletionAnswer("id", asked(), created=9)
    for delta in (Delta(reasoning="hm", tokens=[1]), Delta(tool_calls=CALLS, tokens=[2]), END):
        answer.add(0, delta)
    found = answer.whole()
    assert (found["id"], found["object"], found["created"], found["model"]) == (
        "id",
        "chat.completion",
        9,
        "m",
    )
    (choice,) = found["choices"]
    assert choice["message"]["content"] == "!"
    assert choice["message"]["reasoning"] == choice["message"]["reasoning_content"] == "hm"
    assert [one["function"]["name"] for one in choice["message"]["tool_calls"]] == ["weather", "time"]
    assert (choice["index"], choice["finish_reason"], choice["stop_reason"]) == (0, "stop", 7)
    assert found["usage"] == {
        "prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8, "prompt_tokens_details": {"cached_tokens": 2},
    }  # fmt: skip
    assert "prompt_logprobs" not in found


def test_an_answer_without_text_is_null_beside_calls_and_else_empty() -> None:
    for calls, content in ((CALLS, None), ([], "")):
        answer = CompletionAnswer("id", asked())
        answer.add(0, Delta(tool_calls=calls))
        assert answer.whole()["choices"][0]["message"]["content"] == content


def test_a_stream_of_a_chat_begins_with_the_role_and_numbers_its_calls() -> None:
    answer = CompletionAnswer("id", asked(n=2))
    first = chunks(answer.piece(0, Delta(index=1, tool_calls=CALLS[:1], tokens=[1])))
    assert [one["choices"][0]["index"] for one in first] == [1, 1]
    assert first[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    (second,) = chunks(answer.piece(0, Delta(index=1, tool_calls=CALLS[1:])))
    calls = [one["choices"][0]["delta"]["tool_calls"][0] for one in (first[1], second)]
    assert [(one["index"], one["id"]) for one in calls] == [(0, "c1"), (1, "c2")]
    assert "content" not in second["choices"][0]["delta"]
    assert second["object"] == "chat.completion.chunk"
    assert "stop_reason" not in second["choices"][0]
    # A delta that has only tokens becomes no chunk, but its tokens count.
    assert answer.piece(0, Delta(index=1, tokens=[5])) == b""
    (last,) = chunks(answer.piece(0, Delta(index=1, finish_reason="length")))
    assert last["choices"][0] == {
        "index": 1, "delta": {"content": ""}, "logprobs": None, "finish_reason": "length", "stop_reason": None,
    }  # fmt: skip
    assert answer.usage.completion_tokens == 2
    assert [one["choices"][0]["index"] for one in chunks(answer.piece(1, Delta(text="x")))] == [2, 2]


def test_a_stream_has_its_usage_where_the_request_asks_for_it() -> None:
    for options, each, last in (({}, False, False), ({"include_usage": True}, False, True),
                                ({"include_usage": True, "continuous_usage_stats": True}, True, True)):  # fmt: skip
        answer = CompletionAnswer("id", asked(stream_options=StreamOptions(**options)))
        assert all(("usage" in one) == each for one in chunks(answer.piece(0, END)))
        told = answer.end()
        assert told.endswith(DONE)
        assert [one["usage"]["total_tokens"] for one in chunks(told)] == [6] * last
    assert chunks(answer.failed(HandlerFailed("no")))[0]["error"]["message"] == "no"


def test_logprobs_of_a_chat_have_the_bytes_of_each_token() -> None:
    answer = CompletionAnswer("id", asked(prompt_logprobs=1))
    answer.add(0, Delta(text="bc", logprobs=[SECOND], prompt_logprobs=[FIRST, SECOND]))
    answer.add(0, Delta(text="bc", logprobs=[SECOND]))
    found = answer.whole()
    content = found["choices"][0]["logprobs"]["content"]
    assert len(content) == 2
    assert (content[0]["token"], content[0]["logprob"], content[0]["bytes"]) == ("bc", -0.5, [98, 99])
    assert [one["token"] for one in content[0]["top_logprobs"]] == ["d", "bc"]
    # Each entry has the candidates by token id, the prompt's own token first. The first token has no entry, because no token
    # comes before it.
    assert found["prompt_logprobs"] == [
        None,
        {
            "2": {"logprob": -0.5, "rank": 2, "decoded_token": "bc"},
            "4": {"logprob": -0.25, "rank": 1, "decoded_token": "d"},
        },
    ]


def test_logprobs_of_a_completion_have_the_positions_of_its_tokens() -> None:
    for echo, tokens, values, offsets in (
        (False, ["bc", "bc"], [-0.5, -0.5], [0, 2]),
        (True, ["a", "bc", "bc", "bc"], [None, -0.5, -0.5, -0.5], [0, 1, 3, 5]),
    ):
        answer = CompletionAnswer("id", asked(chats=False, echo=echo, prompt_logprobs=1))
        answer.add(0, Delta(logprobs=[SECOND], prompt_logprobs=[FIRST, SECOND]))
        answer.add(0, Delta(text="bc", logprobs=[SECOND]))
        (choice,) = answer.whole()["choices"]
        found = choice["logprobs"]
        assert (found["tokens"], found["token_logprobs"], found["text_offset"]) == (tokens, values, offsets)
        assert found["top_logprobs"][-1] == {"d": -0.25, "bc": -0.5}
        assert len(choice["prompt_logprobs"]) == 2
    streamed = CompletionAnswer("id", asked(chats=False))
    (first,) = chunks(streamed.piece(0, Delta(text="abc", prompt_logprobs=[FIRST, SECOND], logprobs=[])))
    (second,) = chunks(streamed.piece(0, Delta(text="bc", logprobs=[SECOND])))
    shown = [one["choices"][0]["logprobs"] for one in (first, second)]
    assert [one["token_logprobs"] for one in shown] == [[None, -0.5], [-0.5]]
    assert [one["text_offset"] for one in shown] == [[0, 1], [3]]
    assert second["object"] == "text_completion"


def calls_in(pieces: list[str]) -> list[Delta]:
    """Return the deltas of an answer with two calls. The arguments of each call come in these pieces."""
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
                    # Only the first piece of a call has the id, the type and the name.
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


def test_arguments_without_a_call_are_no_answer() -> None:
    for keep in (CompletionAnswer("id", asked()).add, CompletionAnswer("id", asked()).piece):
        with pytest.raises(OutputInvalid, match="arguments without a call"):
            keep(0, Delta(arguments="{}"))
