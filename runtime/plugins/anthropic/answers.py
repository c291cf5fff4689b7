"""Turns the deltas of a language model into messages and events of Anthropic's API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from ....errors import BadInput, OutputInvalid, PilotflameError
from ....handlers.language_model.contract import Delta, TokenUsage, ToolCall
from ...front.http.requests import load_json
from ..completions.prompt_answer import PromptAnswer
from .errors import error_body
from .requests import CountRequest, MessagesRequest

_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class MessageBlocks:
    """The answer to one request, in blocks.

    `add` collects the blocks for `whole`. For a stream, `piece` returns events instead, and collects no blocks.
    """

    def __init__(self, request_id: str, asked: MessagesRequest) -> None:
        self._request_id, self._asked = request_id, asked
        self._blocks: list[tuple[str, list[Any]]] = []
        """The kind of each block, and its pieces. The pieces are texts, but the first piece of a tool_use block is its
        ToolCall. The further pieces of such a block continue the arguments of the call.
        """
        self._begun = self._called = False
        self._index, self._open, self._sent, self._blanks = -1, "", "", list[str]()
        self._made, self._usage = 0, TokenUsage(prompt_tokens=0)
        self._reason: str | None = None
        self._stopped_by: str | None = None

    def add(self, _prompt: int, delta: Delta) -> None:
        for kind, piece in self._pieces(delta):
            if kind == "tool_use" or (kind != "input" and (not self._blocks or self._blocks[-1][0] != kind)):
                self._blocks.append((kind, []))
            self._blocks[-1][1].append(piece)

    def whole(self) -> dict[str, Any]:
        """Return the response to a request without `stream`."""
        cut = self._reason == "length" or self._stopped_by is not None
        last = len(self._blocks) - 1
        blocks = [
            _block(kind, pieces, cut=cut and number == last)
            for number, (kind, pieces) in enumerate(self._blocks)
        ]
        return self._message(blocks, ended=True)

    def piece(self, _prompt: int, delta: Delta) -> bytes:
        """Return the events of a stream for a delta."""
        events = [event for kind, piece in self._pieces(delta) for event in self._events(kind, piece)]
        return b"".join([*self._beginning(), *events])

    def end(self) -> bytes:
        """Return the events that end the stream."""
        delta = {"stop_reason": self._stop_reason, "stop_sequence": self._stopped_by}
        last = [
            _event("message_delta", delta=delta, usage=self._counts()),
            _event("message_stop"),
        ]
        return b"".join([*self._beginning(), *self._closing(), *last])

    def failed(self, error: PilotflameError) -> bytes:
        body: dict[str, Any] = {**error_body(error, self._request_id)}
        return _event(body.pop("type"), **body)

    def _pieces(self, delta: Delta) -> Iterator[tuple[str, Any]]:
        """Count the tokens of a delta, and yield (kind, content) for each piece that the delta adds to the answer."""
        self._made += len(delta.tokens)
        if delta.usage is not None:
            self._usage = delta.usage
        if delta.finish_reason is not None:
            self._reason = delta.finish_reason
            self._stopped_by = delta.stop_reason if isinstance(delta.stop_reason, str) else None
        if delta.arguments:
            yield "input", delta.arguments
        if delta.reasoning and self._asked.shows_thinking:
            yield from self._said("thinking", delta.reasoning)
        if delta.text:
            yield from self._said("text", delta.text)
        for call in delta.tool_calls:
            self._called = True
            yield from self._said("tool_use", call)
        if delta.finish_reason is not None and self._blanks and not self._open:
            yield "text", "".join(self._blanks)

    def _said(self, kind: str, piece: Any) -> Iterator[tuple[str, Any]]:
        """Yield a piece. Keep blanks at the beginning of a text block until other text follows.

        Clients send the blocks of an answer back in their next request, and Anthropic's API refuses text blocks that have
        only blanks.
        """
        if kind == "text" and self._open != "text":
            self._blanks.append(piece)
            if not piece.strip():
                return
            piece, self._blanks = "".join(self._blanks), []
        self._open = kind
        yield kind, piece

    def _beginning(self) -> Iterator[bytes]:
        if not self._begun:
            self._begun = True
            yield _event("message_start", message=self._message([], ended=False))

    def _events(self, kind: str, piece: Any) -> Iterator[bytes]:
        if kind == "tool_use" or kind not in ("input", self._sent):
            yield from self._closing()
            self._index, self._sent = self._index + 1, kind
            empty = _call_block(piece, {}) if kind == "tool_use" else _block(kind, [])
            yield _event("content_block_start", index=self._index, content_block=empty)
        if kind in ("tool_use", "input"):
            text = piece if kind == "input" else piece.arguments
            delta = {"type": "input_json_delta", "partial_json": text}
        else:
            delta = {"type": f"{kind}_delta", kind: piece}
        yield _event("content_block_delta", index=self._index, delta=delta)

    def _closing(self) -> Iterator[bytes]:
        if self._sent:
            self._sent = ""
            yield _event("content_block_stop", index=self._index)

    def _message(self, content: list[dict[str, Any]], *, ended: bool) -> dict[str, Any]:
        return {
            "id": f"msg_{self._request_id}", "type": "message", "role": "assistant", "model": self._asked.model, "content": content,
            "stop_reason": self._stop_reason if ended else None, "stop_sequence": self._stopped_by if ended else None,
            "usage": self._counts(),
        }  # fmt: skip

    @property
    def _stop_reason(self) -> str:
        if self._reason == "stop":
            return "stop_sequence" if self._stopped_by else "tool_use" if self._called else "end_turn"
        return _REASONS.get(self._reason or "", "end_turn")

    def _counts(self) -> dict[str, int]:
        """Return the numbers of tokens in Anthropic's form. `input_tokens` does not count cached tokens."""
        usage = self._usage
        return {
            "input_tokens": max(0, usage.prompt_tokens - usage.cached_tokens), "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens, "output_tokens": max(self._made, usage.completion_tokens),
        }  # fmt: skip


def input_tokens(asked: CountRequest) -> PromptAnswer:
    """Return the PromptAnswer that responds with the number of tokens of a prompt."""

    def show(delta: Delta) -> dict[str, int] | None:
        if delta.prompt is not None:
            return {"input_tokens": len(delta.prompt.ids)}
        return None if delta.usage is None else {"input_tokens": delta.usage.prompt_tokens}

    return PromptAnswer(asked.model, show)


def _block(kind: str, pieces: list[Any], *, cut: bool = False) -> dict[str, Any]:
    """Return a block. `cut` is True if the answer has ended in the middle of the block."""
    if kind == "tool_use":
        call, *more = pieces
        return _call_block(call, _input(call.name, "".join([call.arguments, *more]), cut=cut))
    signature = {"signature": ""} if kind == "thinking" else {}
    return {"type": kind, kind: "".join(pieces), **signature}


def _call_block(call: ToolCall, given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": given}


def _input(name: str, arguments: str, *, cut: bool) -> orjson.Fragment:
    """Return the arguments of a call as the model wrote them, so that numbers keep all digits.

    If the answer was cut and the arguments are not complete, return an empty object. Raise OutputInvalid if the arguments
    are not a JSON object.
    """
    try:
        found = load_json(arguments or "{}")
    except BadInput:
        found = {} if cut else None
        arguments = ""
    if not isinstance(found, dict):
        message = f"The call of {name} has no JSON object as arguments."
        raise OutputInvalid(message, remedy="Let the handler yield it as text.")
    return orjson.Fragment(arguments or "{}")


def _event(kind: str, **members: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), orjson.dumps({"type": kind, **members}))
