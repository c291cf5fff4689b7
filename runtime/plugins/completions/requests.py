"""The requests of OpenAI's API, and the events that they become.

A field that would change the answer and is not supported is refused by name. A field that cannot change it is accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ....errors import BadInput
from ....handlers.language_model.contract import (
    MOST_TOP,
    Effort,
    GenerationRequest,
    OutputFormat,
    Sampling,
    Tool,
    ToolName,
)
from ...front.http.requests import validate
from .messages import plain_message

MOST_PROMPTS = 128
T = TypeVar("T")
Several = Annotated[list[T], Field(max_length=MOST_PROMPTS)]
MOST_TOKENS = 16
"""How many tokens a completion has if the request does not say it."""
ANY_OBJECT = {"type": "object"}
"""The schema of the format json_object."""
REMEDY = "docs/language-models.md lists the fields."
UNSUPPORTED = {
    "functions", "function_call", "guided_json", "audio", "modalities", "best_of", "prediction", "web_search_options", "suffix",
    "prompt_logprobs", "previous_response_id", "conversation", "max_tool_calls",
}  # fmt: skip
"""The fields of OpenAI's and vLLM's API that would change the answer, and are not supported."""
WITHOUT_EFFECT = {
    "user", "store", "service_tier", "prompt_cache_key", "cache_salt", "prompt_cache_retention", "safety_identifier", "verbosity",
}  # fmt: skip
"""The fields that are accepted, and do not change the answer."""
OWN = frozenset({"model", "metadata", "stream", "stream_options", "messages", "prompt", "structured_outputs"})
"""The fields that are not for the model, or are added for each event."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "functions": ([],), "function_call": ("none", "auto"), "modalities": (["text"],), "suffix": ("",), "best_of": (1,),
}  # fmt: skip
"""Values of unsupported fields that ask for nothing."""


class StreamOptions(BaseModel):
    """What a stream has besides the answers."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class NamedToolChoice(BaseModel):
    """The tool that has to be called."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["function"]
    function: ToolName


class NamedSchema(BaseModel):
    """A JSON schema of the whole answer. The name and the description are not shown to the model."""

    model_config = ConfigDict(extra="forbid")

    name: str = ""
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """What the text of an answer is."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _schema_where_one_belongs(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with the type json_schema")
        return self

    @property
    def output(self) -> OutputFormat | None:
        if self.type == "text":
            return None
        return OutputFormat(json_schema=self.json_schema.json_schema if self.json_schema else ANY_OBJECT)


class StructuredOutputs(BaseModel):
    """What the text of an answer is, as vLLM has it."""

    model_config = ConfigDict(extra="forbid")

    json_schema: dict[str, Any] | None = Field(None, alias="json")
    json_object: Literal[True] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    @property
    def output(self) -> OutputFormat:
        schema = ANY_OBJECT if self.json_object else self.json_schema
        fields = {"json_schema": schema, "regex": self.regex, "choice": self.choice, "grammar": self.grammar}
        return validate(OutputFormat, fields, REMEDY)


class _Request(Sampling):
    """The fields that chats and completions share."""

    own: ClassVar[frozenset[str]] = frozenset()
    """The fields that the event does not have."""

    model: str = Field(min_length=1, max_length=200, description="The name of a function.")
    metadata: dict[str, Any] = Field(default_factory=dict, description="Without effect.")
    max_tokens: int | None = Field(None, ge=1)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: int = Field(1, ge=1, le=128)
    stop: str | list[str] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputs | None = None

    @property
    def output(self) -> OutputFormat | None:
        """What the text of an answer has to be."""
        return self.structured_outputs.output if self.structured_outputs is not None else None

    def check(self) -> None:
        """Raise BadInput if fields contradict each other."""
        if "stream_options" in self.model_fields_set and not self.stream:
            message = "The body is invalid: stream_options: only with stream."
            raise BadInput(message, remedy="Set stream to true.", details={"field": "stream_options"})

    def _event(self, **fields: Any) -> GenerationRequest:
        """Return an event with the fields that the request sets, and then `fields` that are not None."""
        event = self.model_dump(exclude=set(OWN | self.own), exclude_unset=True)
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        fields["output"] = self.output
        event |= {name: value for name, value in fields.items() if value is not None}
        return validate(GenerationRequest, {**event, "stop": [stop for stop in stops if stop]}, REMEDY)


class ChatRequest(_Request):
    """The body of `POST /chat/completions`."""

    own = frozenset({"max_completion_tokens", "logprobs", "top_logprobs", "tool_choice", "response_format"})

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    continue_final_message: bool = False
    tools: list[Tool] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice = "auto"
    parallel_tool_calls: bool = True
    response_format: ResponseFormat | None = None
    reasoning_effort: Effort | None = None

    @property
    def output(self) -> OutputFormat | None:
        asked = self.response_format.output if self.response_format is not None else None
        return super().output or asked

    def check(self) -> None:
        super().check()
        check_choice(self.tool_choice, self.tools)
        if self.top_logprobs and not self.logprobs:
            message = "The body is invalid: top_logprobs: only with logprobs."
            raise BadInput(message, remedy="Set logprobs to true.", details={"field": "top_logprobs"})

    def events(self) -> list[GenerationRequest]:
        """Return the event that the function gets."""
        top = (self.top_logprobs or 0) if self.logprobs else None
        messages = [plain_message(one, "messages") for one in self.messages]
        most = self.max_completion_tokens or self.max_tokens
        choice = (
            self.tool_choice.function if isinstance(self.tool_choice, NamedToolChoice) else self.tool_choice
        )
        wanted = choice if self.tools else None
        return [self._event(messages=messages, max_tokens=most, top_logprobs=top, tool_choice=wanted)]


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


def check_choice(choice: object, tools: Sequence[object]) -> None:
    """Raise BadInput if a call is required, and there are no tools."""
    if choice not in ("none", "auto") and not tools:
        message = "The body is invalid: tool_choice: a tool is required, and there are none."
        raise BadInput(message, remedy="Send tools.", details={"field": "tool_choice"})


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
