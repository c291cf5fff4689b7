"""The options of a request for the choice of its tokens."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

MOST_TOP = 20
Bias = Annotated[float, Field(ge=-100, le=100)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
BadWord = Annotated[str, Field(min_length=1, max_length=256)]
MOST_ALLOWED = 1 << 19


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
    allowed_token_ids: tuple[TokenId, ...] | None = Field(
        None, min_length=1, max_length=MOST_ALLOWED, description="Only these tokens; None: all."
    )
    bad_words: tuple[BadWord, ...] = Field((), max_length=1024, description="Texts that are not made.")

    @property
    def greedy(self) -> bool:
        """True if each token is the one with the largest logit: no field changes the logits or asks for logprobs."""
        plain = self.repetition_penalty == 1 and not self.logit_bias and self.top_logprobs is None
        return (
            plain
            and self.allowed_token_ids is None
            and not (self.temperature or self.presence_penalty or self.frequency_penalty or self.min_tokens)
        )
