"""Defines the requests of Anthropic's API, and turns each of them into the event for a function.

A member that is null counts as absent. An unsupported field that would change the answer is refused, and the error
names it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BeforeValidator, Field, model_validator

from ....errors import BadInput
from ....handlers.language_model.contract import GenerationRequest
from ...front.http.requests import validate
from ..completions.requests import Options, check_choice

REMEDY = "docs/language-models.md lists the fields."
WITHOUT_EFFECT = {"cache_control", "service_tier", "inference_geo", "speed", "diagnostics"}
"""The fields that are accepted, and do not change the answer."""
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "container": (), "mcp_servers": ([],), "output_format": (), "thread": (),
    "context_management": ({}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
}  # fmt: skip
"""The unsupported fields that would change the answer. The values after a field ask for nothing, so they are accepted."""
T = TypeVar("T")


def _as_blocks(given: Any) -> Any:
    return [{"type": "text", "text": given}] if isinstance(given, str) else given


OrText = Annotated[list[T], BeforeValidator(_as_blocks, json_schema_input_type=str | list[T])]
"""A list of blocks. A client may send a text in place of a list with one text block."""


class _Block(Options):
    cache_control: dict[str, Any] | None = Field(None, description="Without effect.")


class TextBlock(_Block):
    """A text."""

    type: Literal["text"]
    text: str
    citations: list[Any] = Field(default_factory=list, description="Without effect.")


class ThinkingBlock(_Block):
    """What the model thought before an earlier answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class ToolUseBlock(_Block):
    """A call that the model has asked for."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: dict[str, Any] | None = Field(None, description="Without effect.")

    @property
    def call(self) -> dict[str, Any]:
        """The call in OpenAI's form, but with the arguments as an object, because chat templates read an object."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.input}}


class ToolResultBlock(_Block):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: OrText[TextBlock] = Field(default_factory=list)
    is_error: bool = False

    @property
    def message(self) -> dict[str, Any]:
        """The message with the result. Chat templates have no field for a failed result, so its text begins with `Error:`."""
        text = _text_of(self.content)
        return {
            "role": "tool",
            "tool_call_id": self.tool_use_id,
            "content": f"Error: {text}" if self.is_error else text,
        }


Block = Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]
_ROLES: dict[str, tuple[type[_Block], ...]] = {
    "system": (TextBlock,), "user": (TextBlock, ToolResultBlock), "assistant": (TextBlock, ThinkingBlock, ToolUseBlock),
}  # fmt: skip
"""The types of the blocks that a turn of each role may have."""


class Turn(Options):
    """A message of the chat."""

    role: Literal["user", "assistant", "system"]
    content: OrText[Block]

    @model_validator(mode="after")
    def _blocks_fit(self) -> Self:
        kinds = _ROLES[self.role]
        wrong = [
            f"content.{n} is a {one.type}" for n, one in enumerate(self.content) if not isinstance(one, kinds)
        ]
        if wrong:
            raise ValueError(f"{wrong[0]}, which the role {self.role} does not have")
        return self

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield the messages for the chat template. Each result of a call is a message of its own."""
        results = [block.message for block in self.content if isinstance(block, ToolResultBlock)]
        yield from results
        said: dict[str, Any] = {"role": self.role, "content": _text_of(self.content)}
        if thought := "".join(block.thinking for block in self.content if isinstance(block, ThinkingBlock)):
            said["reasoning_content"] = thought
        if calls := [block.call for block in self.content if isinstance(block, ToolUseBlock)]:
            said["tool_calls"] = calls
        # Omit an empty turn of the assistant, because it only marks where the answer begins. Also omit a turn of the user that
        # had only results of calls.
        if said["content"] or calls or (self.role == "user" and not results):
            yield said


class CustomTool(_Block):
    """A tool that the caller runs."""

    type: Literal["custom"] = "custom"
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    eager_input_streaming: bool = Field(False, description="Without effect: a call arrives as a whole.")
    defer_loading: Literal[False] = False
    allowed_callers: list[Literal["direct"]] = Field(default_factory=list)

    @property
    def tool(self) -> dict[str, Any]:
        """The tool in OpenAI's form."""
        # Clients may send null for `properties` and `required`. JSON Schema does not allow null there.
        schema = {name: value for name, value in self.input_schema.items() if value is not None}
        function = {"name": self.name, "description": self.description, "parameters": schema}
        return {"function": {**function, "strict": self.strict}}


class ToolChoice(Options):
    """Whether the model has to call a tool, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _named(self) -> Self:
        if (self.type == "tool") is not (self.name is not None):
            raise ValueError("a name goes with the type tool, and with no other")
        return self

    @property
    def wanted(self) -> Any:
        """The choice in OpenAI's form."""
        return {"name": self.name} if self.type == "tool" else "required" if self.type == "any" else self.type


class Thinking(Options):
    """Whether the answer has what the model thinks."""

    type: Literal["adaptive", "disabled", "enabled", "between_tools"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] = "summarized"


class SchemaFormat(Options):
    """A JSON schema of the whole answer."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Options):
    """How much the model thinks, and what the text of its answer is."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: SchemaFormat | None = None


class CountRequest(Options):
    """The body of `POST /v1/messages/count_tokens`."""

    model: str = Field(min_length=1, max_length=200, description="The name of a function.")
    messages: list[Turn] = Field(min_length=1)
    system: OrText[TextBlock] = Field(default_factory=list)
    tools: list[CustomTool] = Field(default_factory=list)
    tool_choice: ToolChoice = ToolChoice(type="auto")
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()

    def event(self) -> GenerationRequest:
        """Return the event for the function. Raise BadInput with the field's name if a field is invalid."""
        # A handler that ignores `prompt_only` generates only one token.
        return self._event(prompt_only=True, max_tokens=1)

    def _event(self, **more: Any) -> GenerationRequest:
        check_choice(self.tool_choice.wanted, self.tools)
        fields: dict[str, Any] = {"messages": self._chat(), **more}
        if self.tools:
            several = not self.tool_choice.disable_parallel_tool_use
            tools = [tool.tool for tool in self.tools]
            fields |= {"tools": tools, "tool_choice": self.tool_choice.wanted, "parallel_tool_calls": several}
        last = self.messages[-1]
        if (
            last.role == "assistant"
            and _text_of(last.content)
            and fields["messages"][-1].keys() == {"role", "content"}
        ):
            fields["continue_final_message"] = True
        if (effort := self._effort()) is not None:
            fields["reasoning_effort"] = effort
        if self.output_config.format is not None:
            fields["output"] = {"json_schema": self.output_config.format.json_schema}
        return validate(GenerationRequest, fields, REMEDY)

    def _chat(self) -> list[dict[str, Any]]:
        """Return the messages for the chat template. As in Anthropic's API, join neighbouring messages of the same role,
        because many templates refuse such neighbours. Do not join results of calls, and append nothing to a message that
        has calls or reasoning.
        """
        found = [{"role": "system", "content": _text_of(self.system)}] if self.system else []
        for message in (message for turn in self.messages for message in turn.messages()):
            before = found[-1] if found else {}
            if message["role"] == before.get("role") != "tool" and not before.keys() - {"role", "content"}:
                text = "\n".join(filter(None, (before["content"], message["content"])))
                found[-1] = {**message, "content": text}
            else:
                found.append(message)
        return found

    def _effort(self) -> str | None:
        """Return the reasoning effort; None if the request does not set it. Raise BadInput for an unsupported type of thinking."""
        kind = self.thinking.type if self.thinking is not None else ""
        if kind in ("enabled", "between_tools"):
            message = f"The body is invalid: thinking: pilotflame does not support the type {kind} yet."
            remedy = "Send the type adaptive, without budget_tokens, or disabled."
            raise BadInput(message, remedy=remedy, details={"field": "thinking"})
        if kind == "disabled":
            return "none"
        return "xhigh" if self.output_config.effort == "max" else self.output_config.effort


class MessagesRequest(CountRequest):
    """The body of `POST /v1/messages`."""

    max_tokens: int = Field(ge=1)
    stream: bool = False
    stop_sequences: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list, max_length=16)
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    metadata: dict[str, Any] = Field(default_factory=dict, description="Without effect.")

    @property
    def shows_thinking(self) -> bool:
        """True if the answer includes the model's reasoning."""
        thinking = self.thinking
        return thinking is not None and thinking.type == "adaptive" and thinking.display == "summarized"

    def event(self) -> GenerationRequest:
        given = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        asked = {name: value for name, value in given.items() if value is not None}
        return self._event(max_tokens=self.max_tokens, stop=self.stop_sequences, **asked)


def supported(body: Any) -> Any:
    """Return a request without the fields that have no effect. Raise BadInput if an unsupported field asks for something."""
    if not isinstance(body, dict):
        return body
    for name in sorted(UNSUPPORTED.keys() & body.keys()):
        if body[name] is not None and body[name] not in UNSUPPORTED[name]:
            message = f"The body is invalid: {name}: pilotflame does not support it yet."
            # These details make the tool runner of Anthropic's client send all turns itself.
            more = (
                {"error_code": "thread_unsupported_request", "unsupported": [name]}
                if name == "thread"
                else {}
            )
            raise BadInput(message, remedy=REMEDY, details={"field": name, **more})
    left = UNSUPPORTED.keys() | WITHOUT_EFFECT
    return {name: value for name, value in body.items() if name not in left}


def _text_of(blocks: list[Any]) -> str:
    return "".join(block.text for block in blocks if isinstance(block, TextBlock))
