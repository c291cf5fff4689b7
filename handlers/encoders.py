"""The events of encoders and rerankers, and their outputs.

The handler of an encoder takes an `EmbeddingRequest` and returns an `EmbeddingOutput`. A reranker takes a `RerankRequest` and returns a
`RerankOutput`. The tokenizer is the handler's own.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from .language_model.contract import TokenCount

Text = Annotated[str, Field(max_length=100_000)]


class EmbeddingRequest(BaseModel):
    """Texts to turn into vectors."""

    model_config = ConfigDict(extra="forbid")

    text: Text | Annotated[list[Text], Field(min_length=1, max_length=1024)]


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
