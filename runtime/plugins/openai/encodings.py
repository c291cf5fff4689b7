"""The requests and answers of the routes for encoders: embeddings as OpenAI has them, rerank as Jina has it, and score as vLLM has it."""

from __future__ import annotations

import base64
import struct
import time
from collections import Counter
from typing import Annotated, Any, Literal, NotRequired, TypeVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field
from typing_extensions import TypedDict

from ....errors import BadInput, OutputInvalid
from ....handlers.encoders import EmbeddingOutput, RerankOutput, Text, TokenIds
from ...front.http.requests import validate_output
from ...node.functions.live import Live

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
    input: Text | Texts | TokenIds | Annotated[list[TokenIds], Field(min_length=1, max_length=MOST_TEXTS)]
    encoding_format: Literal["float", "base64"] = "float"

    def event(self) -> dict[str, Any]:
        """Return the event. Raise BadInput if a text is empty."""
        given = [self.input] if isinstance(self.input, str) or isinstance(self.input[0], int) else self.input
        if not isinstance(given[0], str):
            return {"tokens": given}
        if not all(given):
            message = "The body is invalid: input: a text is empty."
            raise BadInput(message, remedy="Leave it out.", details={"field": "input"})
        return {"text": given}

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
    top_n: int | None = Field(None, ge=0, description="0 as in vLLM: all.")
    return_documents: bool = True

    @property
    def texts(self) -> list[str]:
        return [one if isinstance(one, str) else one.text for one in self.documents]

    def answer(self, found: RerankOutput, request_id: str) -> RankingAnswer:
        """Return the response."""
        texts = self.texts
        results: list[dict[str, Any]] = []
        for one in found.results[: self.top_n or None]:
            if one.index >= len(texts):
                message = f"{self.model} returns document {one.index}, and there are {len(texts)}."
                raise OutputInvalid(message, remedy="Return the indexes of the request's documents.")
            shown = {"document": {"text": texts[one.index]}} if self.return_documents else {}
            results.append({"index": one.index, "relevance_score": one.score, **shown})
        usage = {"prompt_tokens": found.tokens, "completion_tokens": 0, "total_tokens": found.tokens}
        return {"id": f"rerank-{request_id}", "model": self.model, "results": results, "usage": usage}


class ScoringAnswer(TypedDict):
    """How well the texts of each pair fit, in the order of the request."""

    id: str
    object: str
    created: int
    model: str
    data: list[dict[str, Any]]
    usage: dict[str, Any]


class ScoringRequest(BaseModel):
    """The body of `POST /score`: a text and other texts, or two lists of the same length. vLLM has several names for the two sides."""

    model_config = ConfigDict(extra="forbid")

    model: str = Field(min_length=1, max_length=200, description="The name of a function.")
    left: Text | Texts = Field(validation_alias=AliasChoices("text_1", "queries", "data_1"))
    right: Text | Texts = Field(validation_alias=AliasChoices("text_2", "documents", "items", "data_2"))

    def events(self) -> list[dict[str, Any]]:
        """Group the pairs by their first text, and return an event for each group. Raise BadInput if there are no pairs."""
        events: dict[str, list[str]] = {}
        for one, other in self._pairs():
            events.setdefault(one, []).append(other)
        return [{"query": query, "documents": documents} for query, documents in events.items()]

    def _pairs(self) -> list[tuple[str, str]]:
        left, right = ([one] if isinstance(one, str) else one for one in (self.left, self.right))
        if len(left) == 1:
            left = left * len(right)
        if len(left) != len(right):
            message = f"The body is invalid: text_1: it has {len(left)} texts, and text_2 has {len(right)}."
            raise BadInput(
                message, remedy="Send one text, or a text for each of text_2.", details={"field": "text_1"}
            )
        return list(zip(left, right, strict=True))

    def answer(self, found: list[RerankOutput], request_id: str) -> ScoringAnswer:
        """Return the response to the outputs of all events. Raise OutputInvalid if an output has no score for a text."""
        queries = [event["query"] for event in self.events()]
        scores = {
            query: {one.index: one.score for one in output.results}
            for query, output in zip(queries, found, strict=True)
        }
        data: list[dict[str, Any]] = []
        next_document = Counter[str]()
        for number, (query, _) in enumerate(self._pairs()):
            if (score := scores[query].get(next_document[query])) is None:
                message = f"{self.model} returns no score for document {next_document[query]}."
                raise OutputInvalid(message, remedy="Return a score for each of the request's documents.")
            next_document[query] += 1
            data.append({"index": number, "object": "score", "score": score})
        tokens = sum(output.tokens for output in found)
        usage = {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens}
        return {
            "id": f"score-{request_id}", "object": "list", "created": int(time.time()), "model": self.model, "data": data, "usage": usage
        }  # fmt: skip


def check_tokens(live: Live, event: dict[str, Any]) -> None:
    """Raise BadInput if the event has tokens, and the function takes texts only."""
    schema = (live.record.handler or {}).get("input_schema") or {}
    if "tokens" in event and "tokens" not in schema.get("properties", {}):
        message = f"The body is invalid: input: {live.record.function} takes texts, not tokens."
        remedy = "Send texts, as OpenAIEmbeddings of langchain does with check_embedding_ctx_length=False."
        raise BadInput(message, remedy=remedy, details={"field": "input"})


def output_of(kind: type[T], live: Live, output: bytes) -> T:
    """Return a function's output as a `kind`. Raise OutputInvalid if it is something else."""
    wrong = f"{live.record.function} is no model of this kind: its handler returns something else than {kind.__name__}."
    return validate_output(
        kind, output, wrong, f"Return pilotflame's {kind.__name__}, or call it at /invoke."
    )
