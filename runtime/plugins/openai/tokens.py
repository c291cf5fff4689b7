"""The requests and answers of `/tokenize` and `/detokenize`, as vLLM has them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict

from ....handlers.language_model.contract import Delta, GenerationRequest, PromptTokens, Tool
from ...front.http.requests import validate
from ..completions.messages import plain_message
from ..completions.prompt_answer import PromptAnswer
from ..completions.requests import REMEDY


class Tokens(TypedDict):
    """The tokens of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizedText(TypedDict):
    """The text of tokens."""

    prompt: str


class _TokenRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    model: str = Field(min_length=1, max_length=200, description="The name of a function.")


class TokenizeRequest(_TokenRequest):
    """The body of `POST /tokenize`: a prompt, or messages."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool = False
    tools: list[Tool] = Field(default_factory=list)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    def event(self) -> GenerationRequest:
        """Return the event that the function gets."""
        fields = self.model_dump(exclude={"model", "return_token_strs"}, exclude_unset=True)
        if self.messages is not None:
            fields["messages"] = [plain_message(one, "messages") for one in self.messages]
        return _event(fields)

    def answer(self, found: PromptTokens) -> Tokens:
        """Return the response."""
        texts = found.pieces if self.return_token_strs else None
        return {
            "count": len(found.ids),
            "max_model_len": found.most,
            "tokens": found.ids,
            "token_strs": texts,
        }


class DetokenizeRequest(_TokenRequest):
    """The body of `POST /detokenize`."""

    tokens: list[Annotated[int, Field(ge=0)]] = Field(min_length=1)

    def event(self) -> GenerationRequest:
        """Return the event that the function gets."""
        return _event({"prompt": self.tokens})

    def answer(self, found: PromptTokens) -> DetokenizedText:
        """Return the response."""
        return {"prompt": found.text}


def _event(fields: dict[str, Any]) -> GenerationRequest:
    # Limit the answer to a token, in case a handler does not know `prompt_only`.
    return validate(GenerationRequest, {**fields, "prompt_only": True, "max_tokens": 1}, REMEDY)


def prompt_answer(asked: TokenizeRequest | DetokenizeRequest) -> PromptAnswer:
    def show(delta: Delta) -> Tokens | DetokenizedText | None:
        return None if delta.prompt is None else asked.answer(delta.prompt)

    return PromptAnswer(asked.model, show)
