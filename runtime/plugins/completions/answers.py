"""Turns the deltas of a language model into answers and stream chunks of OpenAI's API, in the form of vLLM."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import orjson

from ....errors import OutputInvalid, PilotflameError
from ....handlers.language_model.contract import Delta, TokenLogprob, TokenUsage, ToolCall
from .errors import error_body
from .requests import ChatRequest, CompletionRequest

DONE = b"data: [DONE]\n\n"


def usage_of(usage: TokenUsage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


@dataclass
class CompletionAnswer:
    """The answer to one request.

    `add` collects the deltas for `whole`. For a stream, `piece` returns chunks instead, and collects only counts.
    """

    id: str
    asked: ChatRequest | CompletionRequest
    created: int = field(default_factory=lambda: int(time.time()))
    _choices: dict[int, _Choice] = field(default_factory=dict)
    _usages: dict[int, TokenUsage] = field(default_factory=dict)
    """The latest usage of each prompt, by the number of the prompt."""

    @property
    def chats(self) -> bool:
        return isinstance(self.asked, ChatRequest)

    @property
    def usage(self) -> TokenUsage:
        found = self._usages.values()
        return TokenUsage(
            prompt_tokens=sum(one.prompt_tokens for one in found),
            cached_tokens=sum(one.cached_tokens for one in found),
            completion_tokens=sum(choice.tokens for choice in self._choices.values()),
        )

    def add(self, prompt: int, delta: Delta) -> None:
        """Add a piece of an answer to prompt number `prompt`."""
        self._count(prompt, delta).keep(delta)

    def _count(self, prompt: int, delta: Delta) -> _Choice:
        choice = self._choices.setdefault(self._index(prompt, delta), _Choice())
        choice.count(delta)
        if delta.usage is not None:
            self._usages[prompt] = delta.usage
        return choice

    def whole(self) -> dict[str, Any]:
        """Return the response to a request without `stream`."""
        choices = [self._whole_choice(index, choice) for index, choice in sorted(self._choices.items())]
        kind = "chat.completion" if self.chats else "text_completion"
        found = {**self._head(kind), "choices": choices, "usage": usage_of(self.usage)}
        if self.chats and self.asked.prompt_logprobs is not None:
            found["prompt_logprobs"] = _prompt_logprobs(self._choices[0].prompt)
        return found

    def piece(self, prompt: int, delta: Delta) -> bytes:
        """Return the chunks of a stream for a delta. Each choice of a chat begins with its role."""
        index = self._index(prompt, delta)
        begins = index not in self._choices
        offset = 0 if begins else self._choices[index].chars
        self._count(prompt, delta)
        chunks: list[dict[str, Any]] = []
        if begins and self.chats:
            chunks.append(self._chunk(index, {"delta": {"role": "assistant", "content": ""}}, None))
        if _says_something(delta):
            chunks.append(self._chunk(index, self._piece(index, delta, offset), delta))
        return b"".join(map(_event, chunks))

    def end(self) -> bytes:
        """Return the chunk that has only the usage, if the request asks for it, and the end of the stream."""
        usage = {**self._chunk_head(), "choices": [], "usage": usage_of(self.usage)}
        return (_event(usage) if self.asked.stream_options.include_usage else b"") + DONE

    def failed(self, error: PilotflameError) -> bytes:
        return _event(error_body(error))

    def _index(self, prompt: int, delta: Delta) -> int:
        return prompt * self.asked.n + delta.index

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.asked.model}

    def _chunk_head(self) -> dict[str, Any]:
        return self._head("chat.completion.chunk" if self.chats else "text_completion")

    def _chunk(self, index: int, piece: dict[str, Any], delta: Delta | None) -> dict[str, Any]:
        reason = delta.finish_reason if delta is not None else None
        choice = {"index": index, **piece, "logprobs": piece.get("logprobs"), "finish_reason": reason}
        if delta is not None and delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        chunk = {**self._chunk_head(), "choices": [choice]}
        options = self.asked.stream_options
        if options.include_usage and options.continuous_usage_stats:
            chunk["usage"] = usage_of(self.usage)
        return chunk

    def _piece(self, index: int, delta: Delta, offset: int) -> dict[str, Any]:
        if self.chats:
            said = _reasoning(delta.reasoning)
            before = self._choices[index].called - len(delta.tool_calls)
            calls: list[dict[str, Any]] = []
            if delta.arguments:
                calls.append({"index": before - 1, "function": {"arguments": delta.arguments}})
            calls += [
                {"index": number, **_call(call, call.arguments)}
                for number, call in enumerate(delta.tool_calls, before)
            ]
            if calls:
                said["tool_calls"] = calls
            if delta.text or not said:
                said["content"] = delta.text
            return {"delta": said, "logprobs": chat_logprobs(delta.logprobs)}
        shown, first = (
            (delta.logprobs, False) if delta.prompt_logprobs is None else (delta.prompt_logprobs, True)
        )
        return {"text": delta.text, "logprobs": _completion_logprobs(shown, offset, first=first)}

    def _whole_choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        end = {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        if self.chats:
            called = [_call(call, "".join(pieces)) for call, pieces in choice.calls]
            calls = {"tool_calls": called} if called else {}
            content = "".join(choice.texts) or (None if calls else "")
            message = {
                "role": "assistant",
                "content": content,
                "refusal": None,
                **_reasoning("".join(choice.reasonings)),
                **calls,
            }
            return {"index": index, "message": message, "logprobs": chat_logprobs(choice.logprobs), **end}
        echoed = choice.prompt if isinstance(self.asked, CompletionRequest) and self.asked.echo else None
        logprobs = choice.logprobs
        if logprobs is not None and echoed is not None:
            logprobs = echoed + logprobs
        found: dict[str, Any] = {
            "index": index,
            "text": "".join(choice.texts),
            "logprobs": _completion_logprobs(logprobs, 0, first=echoed is not None),
            **end,
        }
        if self.asked.prompt_logprobs is not None:
            found["prompt_logprobs"] = _prompt_logprobs(choice.prompt)
        return found


@dataclass
class _Choice:
    """One answer so far. For a stream, `count` is called with each delta, but `keep` is not."""

    chars: int = 0
    called: int = 0
    tokens: int = 0
    # Lists of pieces, because appending a piece to a text would copy the text.
    texts: list[str] = field(default_factory=list)
    reasonings: list[str] = field(default_factory=list)
    calls: list[tuple[ToolCall, list[str]]] = field(default_factory=list)
    """Each call with the pieces of its arguments."""
    logprobs: list[TokenLogprob] | None = None
    prompt: list[TokenLogprob] | None = None
    """The tokens of the prompt with their logprobs, if the request asks for them."""
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def keep(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        self.reasonings.append(delta.reasoning)
        if delta.arguments:
            self.calls[-1][1].append(delta.arguments)
        self.calls += [(call, [call.arguments]) for call in delta.tool_calls]
        if delta.prompt_logprobs is not None:
            self.prompt = delta.prompt_logprobs
        if delta.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += delta.logprobs

    def count(self, delta: Delta) -> None:
        """Count a delta. Raise OutputInvalid if it has arguments without a call.

        This is checked here, because the pieces of a stored job were not checked before.
        """
        if delta.arguments and not self.called:
            raise OutputInvalid(
                "The function yields arguments without a call.",
                remedy="Begin the call with tool_calls of an earlier Delta.",
            )
        self.chars += len(delta.text)
        self.called += len(delta.tool_calls)
        self.tokens += len(delta.tokens)
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


def _event(body: Any) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


def _says_something(delta: Delta) -> bool:
    """Return True if the caller gets a chunk for a delta."""
    said = delta.text or delta.reasoning or delta.arguments or delta.tool_calls or delta.logprobs is not None
    return bool(said) or delta.finish_reason is not None


def _call(call: ToolCall, arguments: str) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _reasoning(text: str) -> dict[str, Any]:
    """Return reasoning by both names that clients know: vLLM's, and DeepSeek's."""
    return {"reasoning": text, "reasoning_content": text} if text else {}


def chat_logprobs(found: list[TokenLogprob] | None) -> dict[str, Any] | None:
    """Return logprobs in the form of chats."""
    if found is None:
        return None
    return {
        "content": [
            {
                **_logprob(one.token, one.logprob),
                "top_logprobs": [_logprob(token, value) for token, _, value in one.top],
            }
            for one in found
        ]
    }


def _logprob(token: str, value: float) -> dict[str, Any]:
    return {"token": token, "logprob": value, "bytes": list(token.encode(errors="replace"))}


def _completion_logprobs(
    found: list[TokenLogprob] | None, offset: int, *, first: bool = False
) -> dict[str, Any] | None:
    """Return logprobs in the form of completions. `offset` is the position of the first token in the text. With `first`, the
    first token begins the prompt, so it has no logprobs.
    """
    if found is None:
        return None
    offsets = []
    for one in found:
        offsets.append(offset)
        offset += len(one.token)
    values: list[float | None] = [one.logprob for one in found]
    top: list[dict[str, float] | None] = [{token: value for token, _, value in one.top} for one in found]
    if first:
        values[:1], top[:1] = [None], [None]
    return {
        "tokens": [one.token for one in found],
        "token_logprobs": values,
        "top_logprobs": top,
        "text_offset": offsets,
    }


def _prompt_logprobs(found: list[TokenLogprob] | None) -> list[dict[str, Any] | None] | None:
    """Return the logprobs of a prompt in the form of vLLM: an object for each token, but None for the first token.

    Return None if the function returns no logprobs of prompts.
    """
    if found is None:
        return None
    shown: list[dict[str, Any] | None] = [None]
    for one in found[1:]:
        tokens = {str(one.id): {"logprob": one.logprob, "rank": one.rank, "decoded_token": one.token}}
        for rank, (text, token, value) in enumerate(one.top, 1):
            tokens.setdefault(str(token), {"logprob": value, "rank": rank, "decoded_token": text})
        shown.append(tokens)
    return shown
