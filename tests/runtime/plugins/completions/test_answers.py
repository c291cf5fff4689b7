"""Answers in the form of OpenAI's API: what they keep of the pieces."""

from __future__ import annotations

from pilotflame.handlers.language_model.contract import Delta
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
