"""Defines the requests of OpenAI's Responses API, and turns each of them into the event for a function."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from ....errors import BadInput
from ....handlers.language_model.contract import Effort, GenerationRequest, Tool, ToolFunction, ToolName
from ....handlers.sampling.grammar import OutputFormat
from ....handlers.sampling.sampling import Sampling
from ...front.http.requests import validate
from ..completions.messages import plain_message, text_of
from ..completions.requests import ANY_OBJECT, REMEDY, Options, allowed, check_choice

SKIPPED = ("reasoning",)
"""The kinds of input items that a chat template does not need."""
LOGPROBS = "message.output_text.logprobs"


class ResponseTool(ToolFunction):
    """A tool. In this API, the function's fields are its own."""

    type: Literal["function"]


class ResponseToolChoice(ToolName):
    """The tool that has to be called."""

    type: Literal["function"]


class AllowedResponseTools(Options):
    """The tools of the request that may be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[ResponseToolChoice] = Field(min_length=1)


class TextFormat(Options):
    """What the text of an answer is."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = ""
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _schema_where_one_belongs(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("schema goes with the type json_schema")
        return self

    @property
    def output(self) -> OutputFormat | None:
        schema = ANY_OBJECT if self.json_schema is None else self.json_schema
        return None if self.type == "text" else OutputFormat(json_schema=schema)


class TextSettings(Options):
    """The settings of the text of an answer."""

    format: TextFormat = TextFormat()
    verbosity: Any = None


class Reasoning(Options):
    """How much the model reasons. Summaries are not made."""

    effort: Effort | None = None
    summary: Literal["auto"] | None = None


class ResponseStreamOptions(Options):
    """Accepted, and without effect."""

    include_obfuscation: bool = False


class ResponseRequest(Sampling):
    """The body of `POST /responses`."""

    model: str = Field(min_length=1, max_length=200, description="The name of a function.")
    input: str | list[dict[str, Any]] = Field(min_length=1)
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    text: TextSettings = TextSettings()
    reasoning: Reasoning = Reasoning()
    metadata: dict[str, Any] = Field(default_factory=dict, description="The response repeats it.")
    tools: list[ResponseTool] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | AllowedResponseTools = "auto"
    parallel_tool_calls: bool = True
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] = Field(
        default_factory=list
    )
    truncation: Literal["disabled"] = "disabled"
    background: Literal[False] = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @property
    def shows_logprobs(self) -> bool:
        return LOGPROBS in self.include or bool(self.top_logprobs)

    def event(self) -> GenerationRequest:
        """Return the event that the function gets."""
        check_choice(self.tool_choice, self.tools)
        fields = self.model_dump(include={*Sampling.model_fields, "chat_template_kwargs"}, exclude_unset=True)
        fields |= {
            "messages": self._messages(), "max_tokens": self.max_output_tokens, "output": self.text.format.output,
            "reasoning_effort": self.reasoning.effort,
            "top_logprobs": (self.top_logprobs or 0) if self.shows_logprobs else None,
        }  # fmt: skip
        if self.tools:
            tools = [
                Tool(function=ToolFunction(**tool.model_dump(exclude={"type"}, exclude_none=True)))
                for tool in self.tools
            ]
            choice: Any = self.tool_choice
            if isinstance(choice, AllowedResponseTools):
                tools, choice = allowed(tools, [one.name for one in choice.tools]), choice.mode
            elif isinstance(choice, ToolName):
                choice = {"name": choice.name}
            fields |= {"tools": tools, "tool_choice": choice, "parallel_tool_calls": self.parallel_tool_calls}
        given = {name: value for name, value in fields.items() if value is not None}
        return validate(GenerationRequest, given, REMEDY)

    def _messages(self) -> list[dict[str, Any]]:
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            return [*system, {"role": "user", "content": self.input}]
        messages: list[dict[str, Any]] = []
        for item in self.input:
            if (kind := item.get("type", "message")) == "function_call":
                _add_call(messages, item)
            elif kind == "function_call_output":
                messages.append(
                    {"role": "tool", "tool_call_id": item.get("call_id"), "content": _output_of(item)}
                )
            elif kind == "message" and "role" in item:
                messages.append({"role": item["role"], "content": item.get("content")})
            elif kind not in SKIPPED:
                message = f"The body is invalid: input: an item of the type {kind!r} is not supported."
                raise BadInput(message, remedy=REMEDY, details={"field": "input"})
        return system + [plain_message(message, "input") for message in messages]


def _add_call(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    """Add a call to the last message if this is a message of the assistant, else to a new message of the assistant."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    calls = messages[-1].setdefault("tool_calls", [])
    calls.append({"id": item.get("call_id"), "type": "function", "function": function})


def _output_of(item: dict[str, Any]) -> str:
    output = item.get("output")
    return text_of(output, "input") if isinstance(output, list) else str(output)
