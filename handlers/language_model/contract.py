"""What a language-model handler takes and yields. HTTP dialects make these events, and turn these deltas into their own form.

A handler is an async generator, or any other generator, which takes a `GenerationRequest` and yields `Delta`s. The tokenizer and the chat template
are the handler's own.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

FinishReason = Literal["stop", "length", "tool_calls"]
MOST_TOP = 20
Bias = Annotated[float, Field(ge=-100, le=100)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
RESERVED = {
    "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize",
    "sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs",
}  # fmt: skip
"""The arguments of a tokenizer's chat template, which a request may not set. A template is a program."""


class Sampling(BaseModel):
    """How tokens are chosen. The names and the order of the steps are the same as in vLLM."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    temperature: float = Field(1.0, ge=0, le=2, description="0 takes the likeliest token.")
    top_p: float = Field(
        1.0, gt=0, le=1, description="Only the likeliest tokens with this sum of probabilities."
    )
    top_k: int = Field(0, ge=-1, description="Only this many of the likeliest tokens; 0 or -1: all.")
    min_p: float = Field(
        0.0, ge=0, le=1, description="Only tokens with this share of the likeliest one's probability."
    )
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    logit_bias: dict[int, Bias] = Field(default_factory=dict, max_length=1024)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    top_logprobs: int | None = Field(
        None, ge=0, le=MOST_TOP, description="Report the likeliest tokens; None: no logprobs."
    )
    min_tokens: int = Field(0, ge=0)
    ignore_eos: bool = False
    stop_token_ids: tuple[TokenId, ...] = Field((), max_length=1024)

    @property
    def greedy(self) -> bool:
        """True if the next token is the largest logit, and no field needs more."""
        plain = self.repetition_penalty == 1 and not self.logit_bias and self.top_logprobs is None
        return plain and not (
            self.temperature or self.presence_penalty or self.frequency_penalty or self.min_tokens
        )


class GenerationRequest(Sampling):
    """A request for text. It has either `messages`, which the model's chat template turns into a prompt, or `prompt`.

    The names are the same as in OpenAI's and vLLM's APIs.
    """

    messages: list[dict[str, Any]] | None = Field(None, min_length=1, description="A chat, as OpenAI has it.")
    prompt: str | list[int] | None = Field(None, min_length=1, description="A text, or its tokens.")
    max_tokens: int | None = Field(
        None, ge=1, description="Tokens to make; None: as many as there is room for."
    )
    n: int = Field(1, ge=1, le=128, description="How many answers.")
    stop: list[str] = Field(default_factory=list, max_length=16, description="Texts at which an answer ends.")
    include_stop_str_in_output: bool = False
    echo: bool = Field(False, description="Begin each answer with the prompt.")
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Variables of the chat template."
    )
    continue_final_message: bool = Field(
        False, description="The last message is the beginning of the answer."
    )
    priority: int = Field(0, ge=0, le=4, description="0 is served first.")

    @property
    def sampling(self) -> Sampling:
        """How tokens are chosen, with the fields that the request sets."""
        asked = self.model_dump(include=set(Sampling.model_fields), exclude_unset=True)
        return Sampling(**asked)

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if (self.messages is None) == (self.prompt is None):
            raise ValueError("give either messages or a prompt")
        if reserved := RESERVED & self.chat_template_kwargs.keys():
            raise ValueError(f"chat_template_kwargs may not have {min(reserved)}")
        return self


class TokenLogprob(BaseModel):
    """The natural logarithm of a token's probability, and of the likeliest tokens in its place."""

    token: str
    id: int
    logprob: float
    top: list[tuple[str, int, float]] = Field(default_factory=list)


class TokenUsage(BaseModel):
    """Numbers of tokens so far."""

    prompt_tokens: int
    cached_tokens: int = 0
    """The tokens of the prompt whose keys and values were there already."""
    completion_tokens: int = 0


class Delta(BaseModel):
    """A piece of one of the answers."""

    model_config = ConfigDict(extra="forbid")

    index: int = 0
    """The number of the answer."""
    text: str = ""
    tokens: list[int] = Field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    """Why the answer has ended; None until it has."""
    stop_reason: str | int | None = None
    """The stop string or token that has ended the answer, except the model's own end."""
    usage: TokenUsage | None = None
    """The tokens of all answers so far. The first and the last delta of an answer have it."""
