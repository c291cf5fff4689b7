"""The events of encoders and rerankers, and their outputs.

The handler of an encoder takes an `EmbeddingRequest` and returns an `EmbeddingOutput`. A reranker takes a `RerankRequest` and returns a
`RerankOutput`. The tokenizer is the handler's own.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from .language_model.contract import TokenCount
from .sampling.sampling import TokenId

Text = Annotated[str, Field(max_length=100_000)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, max_length=100_000)]


class EmbeddingRequest(BaseModel):
    """Texts to turn into vectors."""

    model_config = ConfigDict(extra="forbid")

    text: Text | Annotated[list[Text], Field(min_length=1, max_length=1024)]


class TokenEmbeddingRequest(EmbeddingRequest):
    """Texts, or `tokens` that the model's own tokenizer has made. Its name in a schema is that of a request of texts."""

    model_config = ConfigDict(extra="forbid", title="EmbeddingRequest")

    text: Text | Annotated[list[Text], Field(max_length=1024)] = Field(default_factory=list[str])
    tokens: Annotated[list[TokenIds], Field(min_length=1, max_length=1024)] | None = None

    @model_validator(mode="after")
    def _one_input(self) -> Self:
        if (self.tokens is None) == (self.text == []):
            raise ValueError("give either text or tokens")
        return self


class EmbeddingOutput(BaseModel):
    """A vector for a text, and a list of vectors for a list of texts."""

    embedding: list[float] | list[list[float]]
    tokens: TokenCount = 0
    """The tokens of all texts."""


class RerankRequest(BaseModel):
    """Documents to rank by how well they answer the query."""

    model_config = ConfigDict(extra="forbid")

    query: Text
    documents: list[Text] = Field(min_length=1, max_length=1024)


class DocumentScore(BaseModel):
    """How well a document answers, from 0 to 1."""

    index: int = Field(ge=0, lt=1 << 31)
    score: float


class RerankOutput(BaseModel):
    """All documents, the best one first."""

    results: list[DocumentScore]
    tokens: TokenCount = 0
    """The tokens of the query with each document."""
