"""The requests of OpenAI's API, and the events that they become.

A field that would change the answer and is not supported is refused by name. A field that cannot change it is accepted.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from ....errors import BadInput
from ....handlers.language_model.contract import MOST_TOP, GenerationRequest, Sampling
from ...http.requests import validate

MOST_PROMPTS = 128
T = TypeVar("T")
Several = Annotated[list[T], Field(max_length=MOST_PROMPTS)]
MOST_TOKENS = 16
"""How many tokens a completion has if the request does not say it."""
REMEDY = "docs/language-models.md lists the fields."
UNSUPPORTED = {
    "tools", "tool_choice", "functions", "function_call", "response_format", "structured_outputs", "guided_json", "audio",
    "modalities", "best_of", "prediction", "web_search_options", "reasoning_effort", "suffix", "prompt_logprobs",
}  # fmt: skip
"""The fields of OpenAI's and vLLM's API that would change the answer, and are not supported."""
WITHOUT_EFFECT = {
    "user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "parallel_tool_calls",
    "verbosity",
}  # fmt: skip
"""The fields that are accepted, and do not change the answer."""
OWN = frozenset({"model", "stream", "stream_options", "messages", "prompt"})
"""The fields that are not for the model, or are added for each event."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": ([],), "functions": ([],), "tool_choice": ("none", "auto"), "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},), "modalities": (["text"],), "suffix": ("",), "best_of": (1,),
}  # fmt: skip
"""Values of unsupported fields that ask for nothing."""


class StreamOptions(BaseModel):
    """What a stream has besides the answers."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class _Request(Sampling):
    """The fields that chats and completions share."""

    own: ClassVar[frozenset[str]] = frozenset()
    """The fields that the event does not have."""

    model: str = Field(min_length=1, max_length=200, description="The name of a function.")
    max_tokens: int | None = Field(None, ge=1)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: int = Field(1, ge=1, le=128)
    stop: str | list[str] = Field(default_factory=list)
    include_stop_str_in_output: bool = False

    def check(self) -> None:
        """Raise BadInput if fields contradict each other."""
        if "stream_options" in self.model_fields_set and not self.stream:
            message = "The body is invalid: stream_options: only with stream."
            raise BadInput(message, remedy="Set stream to true.", details={"field": "stream_options"})

    def _event(self, **fields: Any) -> GenerationRequest:
        """Return an event with the fields that the request sets, and then `fields` that are not None."""
        event = self.model_dump(exclude=set(OWN | self.own), exclude_unset=True)
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        event |= {name: value for name, value in fields.items() if value is not None}
        return validate(GenerationRequest, {**event, "stop": [stop for stop in stops if stop]}, REMEDY)


class ChatRequest(_Request):
    """The body of `POST /chat/completions`."""

    own = frozenset({"max_completion_tokens", "logprobs", "top_logprobs"})

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    continue_final_message: bool = False

    def events(self) -> list[GenerationRequest]:
        """Return the event that the function gets."""
        top = (self.top_logprobs or 0) if self.logprobs else None
        messages = [_plain(one) for one in self.messages]
        most = self.max_completion_tokens or self.max_tokens
        return [self._event(messages=messages, max_tokens=most, top_logprobs=top)]


class CompletionRequest(_Request):
    """The body of `POST /completions`."""

    own = frozenset({"logprobs"})

    prompt: str | Several[str] | list[int] | Several[list[int]]
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MOST_TOP)

    def check(self) -> None:
        super().check()
        if "top_logprobs" in self.model_fields_set:
            message = "The body is invalid: top_logprobs: a completion has logprobs only."
            raise BadInput(message, remedy="Set logprobs to a number.", details={"field": "top_logprobs"})
        if self.echo and self.logprobs is not None:
            message = "The body is invalid: logprobs: not with echo, because a prompt has none here."
            raise BadInput(message, remedy="Leave one of them out.", details={"field": "logprobs"})

    def events(self) -> list[GenerationRequest]:
        """Return the event of each prompt."""
        several = isinstance(self.prompt, list) and not all(isinstance(one, int) for one in self.prompt)
        prompts: list[Any] = list(self.prompt) if several else [self.prompt]
        most = self.max_tokens or MOST_TOKENS
        return [self._event(prompt=prompt, max_tokens=most, top_logprobs=self.logprobs) for prompt in prompts]


def supported(body: Any) -> Any:
    """Return a request without the fields that have no effect or are null. Raise BadInput if an unsupported field asks for
    something.
    """
    if not isinstance(body, dict):
        return body
    for name in sorted(UNSUPPORTED & body.keys()):
        if body[name] is not None and body[name] not in _NEUTRAL.get(name, ()):
            message = f"The body is invalid: {name}: pilotflame does not support it yet."
            raise BadInput(message, remedy=REMEDY, details={"field": name})
    left = UNSUPPORTED | WITHOUT_EFFECT
    return {name: value for name, value in body.items() if name not in left and value is not None}


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message for a chat template, whose content is a text. OpenAI's may be a list of texts."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = [part if isinstance(part, str) else _text_of(part) for part in content]
    return {**message, "content": "".join(texts)}


def _text_of(part: Any) -> str:
    """Return the text of a part of a message's content. Raise BadInput if it is something else."""
    if (
        isinstance(part, dict)
        and part.get("type") in ("text", "input_text")
        and isinstance(part.get("text"), str)
    ):
        return str(part["text"])
    message = "The body is invalid: messages: content has a part that is no text, which pilotflame does not support yet."
    raise BadInput(message, remedy="Send texts.", details={"field": "messages"})
