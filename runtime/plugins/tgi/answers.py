"""Turns the deltas of a language model into TGI's answers and stream events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson

from ....errors import OutputInvalid, PilotflameError
from ....handlers.language_model.contract import Delta, TokenLogprob
from .errors import error_body
from .requests import GenerateRequest

NO_ID = 0
"""The id of a token if the function does not report ids."""


@dataclass
class GeneratedText:
    """The answer to one request, which grows with each delta."""

    asked: GenerateRequest
    seed: int | None
    listed: bool = False
    """True if the whole answer is in a list, as at TGI's root."""
    _texts: list[str] = field(default_factory=list)
    _tokens: list[_Token] = field(default_factory=list)
    _made: int = 0
    _prompt_tokens: int = 0
    _finish_reason: str = ""

    def add(self, _prompt: int, delta: Delta) -> None:
        """Add a piece of the answer."""
        self._note(delta)
        if self.asked.parameters.details and (delta.tokens or delta.text):
            self._tokens += _tokens_of(delta)

    def whole(self) -> Any:
        """Return the response to a request without a stream. Raise OutputInvalid if the answer has no end."""
        self._check_end()
        answer: dict[str, Any] = {"generated_text": self._full_text}
        if self.asked.parameters.details:
            tokens = [token.shown for token in self._tokens]
            answer["details"] = {**self._end(), "prefill": [], "tokens": tokens}
            if self.asked.parameters.top_n_tokens:
                answer["details"]["top_tokens"] = [token.top for token in self._tokens]
        return [answer] if self.listed else answer

    def piece(self, _prompt: int, delta: Delta) -> bytes:
        """Return an event for each token of a piece. The last event has the whole text."""
        before = self._made
        self._note(delta)
        events: list[dict[str, Any]] = [
            {"index": number, "token": token.shown, "generated_text": None, "details": None}
            | self._top(token)
            for number, token in enumerate(_tokens_of(delta), before + 1)
        ]
        if delta.finish_reason is not None:
            # Clear the text of the model's end token, because InferenceClient yields the text of each token.
            if events[-1]["token"]["special"]:
                events[-1]["token"] = {**events[-1]["token"], "text": ""}
            events[-1]["generated_text"] = self._full_text
            if self.asked.parameters.details:
                events[-1]["details"] = {**self._end(), "input_length": self._prompt_tokens}
        return b"".join(map(_event, events))

    def end(self) -> bytes:
        """Return an error event if the answer has no end, else b"", because TGI's streams end with their last token."""
        try:
            self._check_end()
        except OutputInvalid as error:
            return self.failed(error)
        return b""

    def failed(self, error: PilotflameError) -> bytes:
        return _event(error_body(error))

    def _note(self, delta: Delta) -> None:
        self._texts.append(delta.text)
        self._made += len(delta.tokens)
        if delta.usage is not None:
            self._prompt_tokens = delta.usage.prompt_tokens
        if delta.finish_reason is not None:
            self._finish_reason = _reason_of(delta)

    @property
    def _full_text(self) -> str:
        return "".join([self.asked.inputs * self.asked.parameters.return_full_text, *self._texts])

    def _end(self) -> dict[str, Any]:
        return {"finish_reason": self._finish_reason, "generated_tokens": self._made, "seed": self.seed}

    def _top(self, token: _Token) -> dict[str, Any]:
        return {"top_tokens": token.top} if self.asked.parameters.top_n_tokens else {}

    def _check_end(self) -> None:
        if not self._finish_reason:
            message = "The answer is incomplete: the function ended without a finish_reason."
            raise OutputInvalid(message, remedy="Set finish_reason in the last Delta.")


@dataclass(frozen=True)
class _Token:
    """A token of an answer in TGI's form, and the likeliest tokens in its place."""

    shown: dict[str, Any]
    top: list[dict[str, Any]]


def _tokens_of(delta: Delta) -> list[_Token]:
    """Return the tokens of a delta. For a text or an end without tokens, return one token with NO_ID.

    Take the texts of the tokens from the logprobs if these texts together are the text of the delta. Otherwise the last
    token gets the whole text. The model's end token is special.
    """
    if not (delta.tokens or delta.text or delta.finish_reason):
        return []
    ids, found = delta.tokens or [NO_ID], delta.logprobs or []
    tokens = [_token(one, found[number] if number < len(found) else None) for number, one in enumerate(ids)]
    last = tokens[-1].shown
    if not delta.text and delta.finish_reason is not None and _reason_of(delta) == "eos_token":
        last["special"], last["text"] = True, found[-1].token if found else ""
    elif "".join(one.token for one in found) == delta.text and len(found) == len(tokens):
        for token, one in zip(tokens, found, strict=True):
            token.shown["text"] = one.token
    else:
        last["text"] = delta.text
    return tokens


def _token(token_id: int, found: TokenLogprob | None) -> _Token:
    top = [_shown(other, text, value) for text, other, value in found.top] if found is not None else []
    return _Token(_shown(token_id, "", found.logprob if found is not None else None), top)


def _shown(token_id: int, text: str, logprob: float | None) -> dict[str, Any]:
    return {"id": token_id, "text": text, "logprob": logprob, "special": False}


def _reason_of(delta: Delta) -> str:
    if delta.finish_reason == "length":
        return "length"
    return "stop_sequence" if isinstance(delta.stop_reason, str) else "eos_token"


def _event(body: Any) -> bytes:
    return b"data:" + orjson.dumps(body) + b"\n\n"
