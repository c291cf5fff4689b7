"""Turns the deltas of a language model into a response of OpenAI's Responses API, and into the events of its stream.

A response has items: the reasoning, the message, and the calls of tools. Each begins when the one before it has ended.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import orjson

from ....errors import PilotflameError
from ....handlers.language_model.contract import Delta, TokenUsage, ToolCall
from ..completions.answers import chat_logprobs
from ..completions.errors import error_body
from .response_requests import ResponseRequest

ResponseEvent = dict[str, Any]
_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}
"""The kinds of items that have a text, and the kinds of their parts."""


@dataclass
class ResponseAnswer:
    """The answer to one request."""

    id: str
    asked: ResponseRequest
    created: int = field(default_factory=lambda: int(time.time()))
    _items: list[dict[str, Any]] = field(default_factory=list)
    _texts: list[str] = field(default_factory=list)
    """The pieces of the text or the arguments of the last item, until it ends."""
    _status: str = "in_progress"
    _usage: TokenUsage | None = None
    _tokens: int = 0
    _reasoned: int = 0
    """The number of tokens in the reasoning."""
    _sent: int = 0
    """The number of the next event."""

    def add(self, prompt: int, delta: Delta) -> None:
        self._grow(delta)

    def whole(self) -> dict[str, Any]:
        return self._response()

    def piece(self, prompt: int, delta: Delta) -> bytes:
        begin: list[ResponseEvent] = []
        if not self._sent:
            begin = [
                {"type": f"response.{kind}", "response": self._response()}
                for kind in ("created", "in_progress")
            ]
        return self._encoded([*begin, *self._grow(delta)])

    def end(self) -> bytes:
        return self._encoded([{"type": f"response.{self._status}", "response": self._response()}])

    def failed(self, error: PilotflameError) -> bytes:
        found = error_body(error)["error"]
        return self._encoded(
            [{"type": "error", "code": found["code"], "message": found["message"], "param": found["param"]}]
        )

    def _grow(self, delta: Delta) -> list[ResponseEvent]:
        """Add a delta, and return its events."""
        events: list[ResponseEvent] = []
        self._tokens += len(delta.tokens)
        if delta.arguments:
            events.append(self._arguments(delta.arguments))
        if delta.reasoning:
            self._reasoned += len(delta.tokens)
            events += self._text("reasoning", delta.reasoning, [])
        if delta.text:
            events += self._text("message", delta.text, _logprobs(delta))
        for call in delta.tool_calls:
            events += self._call(call)
        if delta.usage is not None:
            self._usage = delta.usage
        if delta.finish_reason is not None:
            self._status = "incomplete" if delta.finish_reason == "length" else "completed"
            events += self._finish_item()
        return events

    def _text(self, kind: str, text: str, logprobs: list[Any]) -> list[ResponseEvent]:
        """Add text to the last item. If this item is of another kind, end it first and begin an item of `kind`. Return the events."""
        events: list[ResponseEvent] = []
        if not self._items or self._items[-1]["type"] != kind:
            events = [*self._finish_item(), *self._begin_item(kind)]
        part = self._items[-1]["content"][0]
        self._texts.append(text)
        shown = {"logprobs": logprobs} if kind == "message" else {}
        if logprobs:
            part["logprobs"] += logprobs
        return [*events, self._event(f"response.{_PARTS[kind]}.delta", delta=text, **shown, content_index=0)]

    def _begin_item(self, kind: str) -> list[ResponseEvent]:
        item: dict[str, Any] = {
            "type": kind,
            "id": self._item_id(kind),
            "status": "in_progress",
            "content": [],
        }
        more: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
        item |= more
        self._items.append(item)
        added = self._event("response.output_item.added", item={**item})
        part: dict[str, Any] = {"type": _PARTS[kind], "text": ""}
        part |= {"annotations": [], "logprobs": []} if kind == "message" else {}
        item["content"].append(part)
        return [added, self._event("response.content_part.added", part={**part}, content_index=0)]

    def _finish_item(self) -> list[ResponseEvent]:
        """End the item that is being written."""
        if not self._items or self._items[-1]["status"] != "in_progress":
            return []
        item = self._items[-1]
        item["status"] = "incomplete" if self._status == "incomplete" else "completed"
        if item["type"] == "function_call":
            self._keep()
            done = {"arguments": item["arguments"], "name": item["name"]}
            return [
                self._event("response.function_call_arguments.done", **done),
                self._event("response.output_item.done", item=item),
            ]
        part = self._keep()
        shown = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
        return [
            self._event(f"response.{part['type']}.done", text=part["text"], **shown, content_index=0),
            self._event("response.content_part.done", part=part, content_index=0),
            self._event("response.output_item.done", item=item),
        ]

    def _keep(self) -> dict[str, Any]:
        """Put the pieces of text into the last item. Return the part with its text or, for a call, the item itself."""
        item = self._items[-1]
        calls = item["type"] == "function_call"
        part: dict[str, Any] = item if calls else item["content"][0]
        name = "arguments" if calls else "text"
        part[name], self._texts = "".join([part[name], *self._texts]), []
        return part

    def _call(self, call: ToolCall) -> list[ResponseEvent]:
        """Begin a call with its arguments so far."""
        events = self._finish_item()
        item = {
            "type": "function_call", "id": self._item_id("function_call"), "call_id": call.id, "name": call.name,
            "arguments": "", "status": "in_progress",
        }  # fmt: skip
        self._items.append(item)
        events.append(self._event("response.output_item.added", item={**item}))
        return [*events, self._arguments(call.arguments)] if call.arguments else events

    def _arguments(self, text: str) -> ResponseEvent:
        """Add arguments to the last call."""
        self._texts.append(text)
        return self._event("response.function_call_arguments.delta", delta=text)

    def _item_id(self, kind: str) -> str:
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        return f"{prefix}_{self.id.removeprefix('resp_')}_{len(self._items)}"

    def _event(self, kind: str, **fields: Any) -> ResponseEvent:
        """Return an event of the last item."""
        at: dict[str, Any] = {"output_index": len(self._items) - 1}
        if "item" not in fields:
            at["item_id"] = self._items[-1]["id"]
        return {"type": kind, **at, **fields}

    def _encoded(self, events: list[ResponseEvent]) -> bytes:
        lines = []
        for event in events:
            body = orjson.dumps(event | {"sequence_number": self._sent})
            lines.append(b"event: %s\ndata: %s\n\n" % (event["type"].encode(), body))
            self._sent += 1
        return b"".join(lines)

    def _response(self) -> dict[str, Any]:
        asked = self.asked
        plain = asked.model_dump(mode="json", by_alias=True, exclude_none=True)
        if self._texts:
            self._keep()
        return {
            "id": self.id, "object": "response", "created_at": self.created, "status": self._status, "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            "instructions": asked.instructions, "max_output_tokens": asked.max_output_tokens, "model": asked.model,
            "output": [{**item} for item in self._items], "parallel_tool_calls": asked.parallel_tool_calls,
            "previous_response_id": None, "store": False, "temperature": asked.temperature, "top_p": asked.top_p,
            "reasoning": {"effort": asked.reasoning.effort, "summary": None}, "text": plain["text"],
            "tool_choice": plain["tool_choice"], "tools": plain["tools"], "truncation": asked.truncation, "metadata": asked.metadata,
            "background": False, "usage": self._usage_fields(),
        }  # fmt: skip

    def _usage_fields(self) -> dict[str, Any] | None:
        if self._status == "in_progress" or self._usage is None:
            return None
        return {
            "input_tokens": self._usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": self._usage.cached_tokens},
            "output_tokens": self._tokens,
            "output_tokens_details": {"reasoning_tokens": self._reasoned},
            "total_tokens": self._usage.prompt_tokens + self._tokens,
        }


def _logprobs(delta: Delta) -> list[Any]:
    found = chat_logprobs(delta.logprobs)
    return found["content"] if found is not None else []
