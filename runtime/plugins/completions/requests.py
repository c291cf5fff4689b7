"""Defines the requests of OpenAI's API, and turns them into events for functions.

An unsupported field that would change the answer is refused, and the error names it. An unsupported field that cannot
change the answer is accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ....errors import BadInput
from ....handlers.language_model.contract import Effort, GenerationRequest, Tool, ToolName
from ....handlers.sampling.grammar import OutputFormat
from ....handlers.sampling.sampling import MOST_TOP, Sampling
from ...front.http.requests import dump_json, load_json, plain, validate
from .messages import plain_message

MOST_PROMPTS = 128
MOST_SHARED_BYTES = 16 << 20
"""The limit for (size of the fields that all prompts share) * (number of prompts). Each prompt's call has a copy of them."""
T = TypeVar("T")
Several = Annotated[list[T], Field(max_length=MOST_PROMPTS)]
MOST_TOKENS = 16
"""The limit for the tokens of a completion if the request sets no `max_tokens`."""
ANY_OBJECT = {"type": "object"}
"""The schema of the format json_object."""
REMEDY = "docs/language-models.md lists the fields."
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "functions": (), "function_call": ("none", "auto"), "guided_json": (), "guided_regex": (), "guided_choice": (), "guided_grammar": (),
    "audio": (), "modalities": (["text"],), "best_of": (1,), "prediction": (), "web_search_options": (), "suffix": (),
    "previous_response_id": (), "conversation": (), "max_tool_calls": (), "use_beam_search": (),
    "length_penalty": (1,), "skip_special_tokens": (True,), "spaces_between_special_tokens": (True,),
    "logprob_token_ids": (), "chat_template": (), "media_io_kwargs": (),
    "mm_processor_kwargs": (), "prompt_embeds": (), "priority": (0,), "return_tokens_as_token_ids": (), "return_token_ids": (),
    "return_token_offsets": (), "return_prompt_text": (), "routed_experts_prompt_start": (0,), "kv_transfer_params": (),
    "ec_transfer_params": (), "vllm_xargs": (), "repetition_detection": (), "thinking_token_budget": (-1,), "include_reasoning": (True,),
    "watermarking": (),
}  # fmt: skip
"""The unsupported fields of OpenAI's and vLLM's API that would change the answer. The values after a field ask for nothing,
so they are accepted. Empty values ask for nothing, too (`_asks`).
"""
WITHOUT_EFFECT = {
    "user", "store", "service_tier", "prompt_cache_key", "cache_salt", "prompt_cache_retention", "safety_identifier", "verbosity",
    "request_id", "session_id", "stream_interval", "return_mm_kwargs",
}  # fmt: skip
"""The fields that are accepted, and do not change the answer."""
OWN = frozenset(
    {
        "model",
        "metadata",
        "stream",
        "stream_options",
        "messages",
        "prompt",
        "structured_outputs",
        "response_format",
    }
)
"""The fields that `_event` does not copy into an event. The model does not need them, or the event has them in another form."""


class Options(BaseModel):
    """An object in a request. A member that is null asks for nothing."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        return (
            {name: value for name, value in given.items() if value is not None}
            if isinstance(given, dict)
            else given
        )


class StreamOptions(Options):
    """What a stream has besides the answers."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class NamedToolChoice(Options):
    """The tool that has to be called."""

    type: Literal["function"]
    function: ToolName


class AllowedTools(Options):
    """The tools of the request that may be called."""

    mode: Literal["auto", "required"]
    tools: list[NamedToolChoice] = Field(min_length=1)


class AllowedToolsChoice(Options):
    """The choice of several tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class NamedSchema(Options):
    """A JSON schema of the whole answer. The name and the description are not shown to the model."""

    name: str = ""
    description: str | None = None
    json_schema: dict[str, Any] = Field(default=ANY_OBJECT, alias="schema")
    strict: bool | None = None


class GrammarType(BaseModel):
    """What the text of an answer must be, as TGI has it. `value` is a pattern, a JSON schema (also as a text), or an object with
    `schema`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: Literal["json", "json_object", "regex", "json_schema"]
    value: str | dict[str, Any]

    @model_validator(mode="after")
    def _value_fits(self) -> Self:
        if self.type == "regex" and not (isinstance(self.value, str) and self.value):
            raise ValueError("the value of a regex is a text")
        if self.type != "regex" and not isinstance(self._schema, dict):
            raise ValueError("the value has no JSON schema")
        return self

    @property
    def output(self) -> OutputFormat:
        return (
            OutputFormat(regex=self.value) if self.type == "regex" else OutputFormat(json_schema=self._schema)
        )

    @property
    def _schema(self) -> Any:
        if self.type == "json_schema":
            return self.value.get("schema") if isinstance(self.value, dict) else None
        return schema_of(self.value)


class ResponseFormat(Options):
    """What the text of an answer is: as OpenAI has it, with `schema` as llama.cpp, or with `value` as TGI."""

    type: Literal["text", "json_object", "json_schema", "json", "regex"]
    json_schema: NamedSchema | None = None
    plain_schema: dict[str, Any] | None = Field(None, alias="schema")
    value: str | dict[str, Any] | None = None

    @model_validator(mode="after")
    def _schema_where_one_belongs(self) -> Self:
        given = [one for one in (self.json_schema, self.plain_schema, self.value) if one is not None]
        least = 0 if self.type in ("text", "json_object") else 1
        if not least <= len(given) <= (self.type != "text"):
            raise ValueError("one of json_schema, schema and value goes with each type but text")
        try:
            _ = self.output
        except ValidationError:
            raise ValueError("the value is no pattern or schema of this type") from None
        return self

    @property
    def output(self) -> OutputFormat | None:
        if self.type == "text":
            return None
        if self.type in ("json", "regex") or self.value is not None:
            asked: dict[str, Any] = {"type": self.type, "value": self.value}
            return GrammarType(**asked).output
        schema = self.json_schema.json_schema if self.json_schema is not None else self.plain_schema
        return OutputFormat(json_schema=ANY_OBJECT if schema is None else schema)


class StructuredOutputs(Options):
    """What the text of an answer is, as vLLM has it."""

    json_schema: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool = False
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool = Field(False, description="Without effect: the spaces are always the same.")
    disable_additional_properties: Literal[False] = False

    @property
    def output(self) -> OutputFormat | None:
        schema = ANY_OBJECT if self.json_object else schema_of(self.json_schema)
        fields = {"json_schema": schema, "regex": self.regex, "choice": self.choice, "grammar": self.grammar}
        return (
            validate(OutputFormat, fields, REMEDY)
            if any(one is not None for one in fields.values())
            else None
        )


class _Request(Sampling):
    """The fields that chats and completions share."""

    own: ClassVar[frozenset[str]] = frozenset()
    """Further fields that `_event` does not copy, because the event has them in another form."""

    model: str = Field(min_length=1, max_length=200, description="The name of a function.")
    metadata: dict[str, Any] = Field(default_factory=dict, description="Without effect.")
    max_tokens: int | None = Field(None, ge=1)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: int = Field(1, ge=1, le=128)
    stop: str | list[str] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputs | None = None
    response_format: ResponseFormat | None = None
    add_special_tokens: bool | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MOST_TOP)
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    truncation_side: Literal["left", "right"] = "left"

    @property
    def output(self) -> OutputFormat | None:
        """The required format of an answer's text; None if the request sets none."""
        found = self.structured_outputs.output if self.structured_outputs is not None else None
        return found or (self.response_format.output if self.response_format is not None else None)

    def check(self) -> None:
        """Raise BadInput if fields contradict each other."""
        if "stream_options" in self.model_fields_set and not self.stream:
            message = "The body is invalid: stream_options: only with stream."
            raise BadInput(message, remedy="Set stream to true.", details={"field": "stream_options"})
        if self.prompt_logprobs is not None and self.stream:
            message = "The body is invalid: prompt_logprobs: not with stream, as in vLLM."
            raise BadInput(message, remedy="Set stream to false.", details={"field": "prompt_logprobs"})

    def _event(self, **fields: Any) -> GenerationRequest:
        """Return an event with the fields that the request sets. Values of `fields` that are not None replace them."""
        event = self.model_dump(exclude=set(OWN | self.own), exclude_unset=True)
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        fields["output"] = self.output
        event |= {name: value for name, value in fields.items() if value is not None}
        return validate(GenerationRequest, {**event, "stop": [stop for stop in stops if stop]}, REMEDY)


class ChatRequest(_Request):
    """The body of `POST /chat/completions`."""

    own = frozenset({"max_completion_tokens", "logprobs", "top_logprobs", "tools", "tool_choice"})

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    continue_final_message: bool = False
    tools: list[Tool] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolsChoice = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: Effort | None = None
    add_generation_prompt: bool = True
    echo: Literal[False] = False

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
        tools, choice = self.tools, self.tool_choice
        if isinstance(choice, AllowedToolsChoice):
            names = [one.function.name for one in choice.allowed_tools.tools]
            tools, choice = allowed(tools, names), choice.allowed_tools.mode
        wanted = choice.function if isinstance(choice, NamedToolChoice) else choice
        return [
            self._event(
                messages=messages, max_tokens=most, top_logprobs=top, tools=tools or None, tool_choice=wanted if tools else None
            )
        ]  # fmt: skip


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

    def events(self) -> list[GenerationRequest]:
        """Return the event of each prompt."""
        several = isinstance(self.prompt, list) and not all(isinstance(one, int) for one in self.prompt)
        prompts: list[Any] = list(self.prompt) if several else [self.prompt]
        # Each prompt is a call, which gets a copy of all other fields.
        if several and len(dump_json(plain(self, exclude={"prompt"}))) * len(prompts) > MOST_SHARED_BYTES:
            message = "The body is invalid: prompt: the other fields are too long for that many prompts."
            raise BadInput(message, remedy="Send fewer prompts in one request.", details={"field": "prompt"})
        most = self.max_tokens or MOST_TOKENS
        shown = self.logprobs if self.echo and self.prompt_logprobs is None else self.prompt_logprobs
        fields: dict[str, Any] = {"max_tokens": most, "top_logprobs": self.logprobs, "prompt_logprobs": shown}
        return [self._event(prompt=prompt, **fields) for prompt in prompts]


def check_choice(choice: object, tools: Sequence[object]) -> None:
    """Raise BadInput if a call is required, and there are no tools."""
    if choice not in ("none", "auto") and not tools:
        message = "The body is invalid: tool_choice: a tool is required, and there are none."
        raise BadInput(message, remedy="Send tools.", details={"field": "tool_choice"})


def allowed(tools: Sequence[Tool], names: Sequence[str]) -> list[Tool]:
    """Return the tools with these names. Raise BadInput if a name is not among `tools`."""
    if unknown := {*names} - {tool.function.name for tool in tools}:
        message = f"The body is invalid: tool_choice: {min(unknown)[:64]!r} is not among the tools."
        raise BadInput(message, remedy="Send it in tools.", details={"field": "tool_choice"})
    return [tool for tool in tools if tool.function.name in names]


def schema_of(given: Any) -> Any:
    """Return a JSON schema. Parse it if the client has sent it as a text; return None if the text is not JSON."""
    try:
        return load_json(given) if isinstance(given, str) else given
    except BadInput:
        return None


def _asks(name: str, value: Any) -> bool:
    """Return True if the value of an unsupported field asks for something."""
    nothing = UNSUPPORTED[name]
    if value is False and True not in nothing:
        return False
    # An empty object as `web_search_options` asks for a search.
    return value not in (None, "", [], *nothing) and (value != {} or name == "web_search_options")


def supported(body: Any) -> Any:
    """Return a request without the fields that have no effect, are null or empty. Raise BadInput if an unsupported field asks for
    something.
    """
    if not isinstance(body, dict):
        return body
    for name in sorted(UNSUPPORTED.keys() & body.keys()):
        if _asks(name, body[name]):
            message = f"The body is invalid: {name}: pilotflame does not support it yet."
            raise BadInput(message, remedy=REMEDY, details={"field": name})
    left = UNSUPPORTED.keys() | WITHOUT_EFFECT
    empty: tuple[Any, ...] = (None, [], {})
    return {name: value for name, value in body.items() if name not in left and value not in empty}
