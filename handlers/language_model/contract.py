"""The events of language models, and their answers. HTTP dialects make these events, and turn the answers into their own form.

The handler of a model that writes is a generator, which takes a `GenerationRequest` and yields `Delta`s. The tokenizer and the chat
template are the handler's own.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from ..caller import PRIORITIES
from ..sampling.grammar import OutputFormat
from ..sampling.sampling import MOST_TOP, Sampling, TokenId

FinishReason = Literal["stop", "length", "tool_calls"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
MOST_ANSWERS = 128
TokenCount = Annotated[int, Field(ge=0, lt=1 << 53)]
RESERVED = {
    "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize",
    "sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs",
}  # fmt: skip
"""The arguments of `apply_chat_template` that a request may not set in `chat_template_kwargs`. A `chat_template` is a program."""


class ToolFunction(BaseModel):
    """A function that the model may call, as OpenAI has it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema of the arguments.")
    strict: bool | None = Field(None, description="Calls always have arguments that fit the schema.")

    @property
    def arguments(self) -> dict[str, Any]:
        """The schema of the arguments. They are an object, which is empty if the tool has no parameters."""
        return {"type": "object", **({"properties": {}} if not self.parameters else self.parameters)}


class Tool(BaseModel):
    """Something that the model may ask its caller to do."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: Literal["function"] = "function"
    function: ToolFunction


class ToolName(BaseModel):
    """The tool that the model has to call."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str


class GenerationRequest(Sampling):
    """A request for text. It has either `messages`, which the model's chat template turns into a prompt, or `prompt`.

    The names are the same as in OpenAI's and vLLM's APIs.
    """

    messages: list[dict[str, Any]] | None = Field(None, min_length=1, description="A chat, as OpenAI has it.")
    prompt: str | list[int] | None = Field(None, min_length=1, description="A text, or its tokens.")
    max_tokens: int | None = Field(
        None, ge=1, description="Tokens to make; None: as many as there is room for."
    )
    n: int = Field(1, ge=1, le=MOST_ANSWERS, description="How many answers.")
    stop: list[str] = Field(default_factory=list, max_length=16, description="Texts at which an answer ends.")
    include_stop_str_in_output: bool = False
    echo: bool = Field(False, description="Begin each answer with the prompt.")
    prompt_logprobs: int | None = Field(
        None,
        ge=0,
        le=MOST_TOP,
        description="Report the likeliest tokens at each place of the prompt; None: no logprobs.",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Variables of the chat template."
    )
    continue_final_message: bool = Field(
        False, description="The last message is the beginning of the answer."
    )
    priority: int = Field(
        0, ge=0, lt=PRIORITIES, description="0 is served first, among calls of one priority."
    )
    adapter: str | None = Field(
        None, min_length=1, max_length=63, description="The adapter (LoRA) that answers, by its name."
    )
    first_token_by: float | None = Field(
        None,
        description="Refuse the request if its first token would come later than this Unix time, in seconds.",
    )
    token_ms: float | None = Field(
        None, gt=0, description="Refuse the request if its later tokens would take longer, in the mean."
    )
    reasoning_effort: Effort | None = Field(None, description="How much the model reasons before it answers.")
    tools: list[Tool] = Field(default_factory=list, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | ToolName = Field(
        "auto", description="Whether the model has to call a tool, and which."
    )
    parallel_tool_calls: bool = Field(True, description="An answer may have several calls.")
    output: OutputFormat | None = Field(None, description="What the text of an answer must be.")
    add_special_tokens: bool | None = Field(
        None, description="Begin the prompt with the model's special tokens; None: a text, and no chat."
    )
    add_generation_prompt: bool = Field(True, description="End a chat with the beginning of an answer.")
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, description="Keep only this many tokens of the prompt; -1: as many as there is room for."
    )
    truncation_side: Literal["left", "right"] = Field("left", description="Where the other tokens were.")
    prompt_only: bool = Field(
        False, description="Make no answer, and yield the tokens of the prompt as `Delta.prompt`."
    )

    @property
    def sampling(self) -> Sampling:
        """How tokens are chosen, with the fields that the request sets."""
        asked = self.model_dump(include=set(Sampling.model_fields), exclude_unset=True)
        return Sampling(**asked)

    @property
    def callable_tools(self) -> list[ToolFunction]:
        """The tools that this request lets the model call."""
        functions = [tool.function for tool in self.tools]
        if isinstance(self.tool_choice, ToolName):
            return [function for function in functions if function.name == self.tool_choice.name]
        return [] if self.tool_choice == "none" else functions

    @property
    def must_call(self) -> bool:
        """True if each answer has to be a call of a tool."""
        return self.tool_choice not in ("none", "auto")

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if (self.messages is None) == (self.prompt is None):
            raise ValueError("give either messages or a prompt")
        if self.tools and self.messages is None:
            raise ValueError("tools go with messages only")
        if len({tool.function.name for tool in self.tools}) < len(self.tools):
            raise ValueError("two tools have the same name")
        if self.must_call and not self.callable_tools:
            raise ValueError("tool_choice asks for a tool that is not among the tools")
        if self.must_call and self.output is not None:
            raise ValueError("an answer that has to be a call of a tool has no other form")
        if reserved := RESERVED & self.chat_template_kwargs.keys():
            raise ValueError(f"chat_template_kwargs may not have {min(reserved)}")
        return self


class ToolCall(BaseModel):
    """A call that the model asks for."""

    id: str
    name: str
    arguments: str
    """A JSON object, or its beginning."""


LEAST_LOGPROB = -9999.0


def _finite(value: Any) -> Any:
    """Return LEAST_LOGPROB for a token that cannot follow, as vLLM's server does. JSON has no -inf, so it may arrive as null."""
    return LEAST_LOGPROB if value is None or value == -math.inf else value


LogProbability = Annotated[float, BeforeValidator(_finite)]
"""The natural logarithm of a probability."""


class TokenLogprob(BaseModel):
    """The natural logarithm of a token's probability, and of the likeliest tokens in its place."""

    token: str
    id: int
    logprob: LogProbability
    top: list[tuple[str, int, LogProbability]] = Field(default_factory=list)
    rank: int | None = None
    """1 if it was the likeliest token; None if this was not counted. pilotflame's own engine counts it only for tokens of prompts."""


class TokenUsage(BaseModel):
    """Numbers of tokens so far."""

    prompt_tokens: TokenCount
    cached_tokens: TokenCount = 0
    """The tokens of the prompt whose keys and values were there already."""
    completion_tokens: TokenCount = 0


class PromptTokens(BaseModel):
    """The tokens of a prompt."""

    ids: list[int]
    pieces: list[str]
    """The tokens as the tokenizer writes them."""
    text: str
    most: int
    """The most tokens of a prompt with its answer."""


class Delta(BaseModel):
    """A piece of one of the answers."""

    model_config = ConfigDict(extra="forbid")

    index: int = Field(0, ge=0, lt=MOST_ANSWERS)
    """The number of the answer."""
    text: str = ""
    reasoning: str = ""
    """Text that the model writes before its answer, if its chat template marks such text."""
    arguments: str = ""
    """More of the arguments of the answer's last call, which an earlier delta has begun. They come before the other parts of this delta."""
    tool_calls: list[ToolCall] = Field(default_factory=list)
    """Calls, or the beginning of one. Their arguments may go on in the next deltas."""
    tokens: list[int] = Field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    """The tokens of the prompt, if the request asks for `prompt_logprobs`. One delta of each answer has them, at the latest the delta of the
    answer's first token. The first token of the prompt follows nothing, so its logprob has no meaning.
    """
    finish_reason: FinishReason | None = None
    """Why the answer has ended; None until it has."""
    stop_reason: str | TokenId | None = None
    """The stop string or token that has ended the answer, except the model's own end."""
    usage: TokenUsage | None = None
    """The tokens of all answers so far. The first and the last delta of an answer have it."""
    prompt: PromptTokens | None = None
    """The tokens of the prompt, if the request asks for nothing else."""
