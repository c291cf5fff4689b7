"""The requests and answers of the routes for encoders: embeddings as OpenAI has them, and rerank as Jina has it."""

from __future__ import annotations

import base64
import struct
from typing import Annotated, Any, Literal, NotRequired, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict

from ....errors import BadInput, OutputInvalid
from ....handlers.language_model.contract import EmbeddingOutput, RerankOutput, Text
from ...front.http.requests import validate_output
from ...node.functions.live import Live
from ..completions.requests import REMEDY

MOST_TEXTS = 1024
Texts = Annotated[list[Text], Field(min_length=1, max_length=MOST_TEXTS)]
T = TypeVar("T", bound=BaseModel)


class EmbeddingsAnswer(TypedDict):
    """A vector for each text."""

    object: str
    data: list[dict[str, Any]]
    model: str
    usage: dict[str, Any]


class RankingAnswer(TypedDict):
    """The documents, the best one first."""

    id: str
    model: str
    results: list[dict[str, Any]]
    usage: dict[str, Any]
    object: NotRequired[str]


class EmbeddingsRequest(BaseModel):
    """The body of `POST /embeddings`."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field(min_length=1, max_length=200, description="The name of a function.")
    input: Text | Texts | list[int] | list[list[int]]
    encoding_format: Literal["float", "base64"] = "float"

    @property
    def texts(self) -> list[str]:
        """The texts. Raise BadInput if the request has tokens: a caller does not know the tokens of the model."""
        given = [self.input] if isinstance(self.input, str) else self.input
        texts = [text for text in given if isinstance(text, str)]
        if len(texts) < len(given) or not texts:
            message = "The body is invalid: input: pilotflame takes texts, not tokens."
            raise BadInput(message, remedy=REMEDY, details={"field": "input"})
        if not all(texts):
            message = "The body is invalid: input: a text is empty."
            raise BadInput(message, remedy="Leave it out.", details={"field": "input"})
        return texts

    def answer(self, found: EmbeddingOutput) -> EmbeddingsAnswer:
        """Return the response."""
        data = [
            {"object": "embedding", "index": index, "embedding": self._encoded(vector)}
            for index, vector in enumerate(found.embedding)
        ]
        usage = {"prompt_tokens": found.tokens, "total_tokens": found.tokens}
        return {"object": "list", "data": data, "model": self.model, "usage": usage}

    def _encoded(self, vector: Any) -> Any:
        if self.encoding_format == "float":
            return vector
        return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


class Document(BaseModel):
    """A text to rank."""

    text: Text


class RankingRequest(BaseModel):
    """The body of `POST /rerank`."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field(min_length=1, max_length=200, description="The name of a function.")
    query: Text
    documents: list[Text | Document] = Field(min_length=1, max_length=MOST_TEXTS)
    top_n: int | None = Field(None, ge=1)
    return_documents: bool = True

    @property
    def texts(self) -> list[str]:
        return [one if isinstance(one, str) else one.text for one in self.documents]

    def answer(self, found: RerankOutput, request_id: str) -> RankingAnswer:
        """Return the response."""
        texts = self.texts
        results: list[dict[str, Any]] = []
        for one in found.results[: self.top_n]:
            if one.index >= len(texts):
                message = f"{self.model} returns document {one.index}, and there are {len(texts)}."
                raise OutputInvalid(message, remedy="Return the indexes of the request's documents.")
            shown = {"document": {"text": texts[one.index]}} if self.return_documents else {}
            results.append({"index": one.index, "relevance_score": one.score, **shown})
        usage = {"prompt_tokens": found.tokens, "completion_tokens": 0, "total_tokens": found.tokens}
        return {"id": f"rerank-{request_id}", "model": self.model, "results": results, "usage": usage}


def output_of(kind: type[T], live: Live, output: bytes) -> T:
    """Return a function's output. Raise OutputInvalid if it is something else."""
    wrong = f"{live.record.function} is no model of this kind: its handler returns something else than {kind.__name__}."
    return validate_output(
        kind, output, wrong, f"Return pilotflame's {kind.__name__}, or call it at /invoke."
    )
