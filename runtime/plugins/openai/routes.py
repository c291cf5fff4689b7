"""The routes of OpenAI's API: models, chats, completions, responses, embeddings; rerank and score, as Jina and vLLM have them.

`model` is the name of a function, unless the path has the name. The function's handler takes the events of
`handlers/language_model/contract.py`. This package does not know how the handler answers them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, NotRequired, TypeVar

import orjson
from aiohttp import web
from pydantic import BaseModel
from typing_extensions import TypedDict

from ...._version import __version__
from ....handlers.codec import JSON_TYPE
from ....handlers.encoders import EmbeddingOutput, EmbeddingRequest, RerankOutput, RerankRequest
from ....handlers.language_model.contract import GenerationRequest
from ...front.api.plugin import ApiPlugin
from ...front.generation.answering import respond
from ...front.generation.models import Generator, adapters, generator, model, models
from ...front.generation.targets import PARAMETERS as TARGETS
from ...front.http.event_stream import EVENTS
from ...front.http.parsed_bodies import parsed
from ...front.http.requests import BODY_BYTES, load_json, read_body, request_id_of, validate
from ...front.http.responses import json_response, outputs_response
from ...front.http.routes import Route
from ...ground.access.keys import Scope
from ...node.functions.live import Live
from ..completions.answers import CompletionAnswer
from ..completions.errors import ERRORS, unrouted_reply
from ..completions.requests import REMEDY, ChatRequest, CompletionRequest, supported
from .encodings import (
    EmbeddingsAnswer,
    EmbeddingsRequest,
    RankingAnswer,
    RankingRequest,
    ScoringAnswer,
    ScoringRequest,
    check_tokens,
    output_of,
)
from .response_answers import ResponseAnswer
from .response_requests import ResponseRequest
from .together import TogetherModel, is_together, together_model
from .tokens import DetokenizedText, DetokenizeRequest, TokenizeRequest, Tokens, prompt_answer

_STATUSES = (400, 404, 408, 413, 422, 429, 500, 503, 504)


CONTRACTS = (GenerationRequest, EmbeddingRequest, RerankRequest)
"""A function is a model if its handler takes an event of one of these types."""
T = TypeVar("T", bound=BaseModel)
R = TypeVar("R")


class OpenAiModel(TypedDict):
    """A function with a language model."""

    id: str
    object: str
    created: int
    owned_by: str
    parent: NotRequired[str]
    """The model to which the adapter belongs."""


class Models(TypedDict):
    """All models that the caller may use."""

    object: str
    data: list[OpenAiModel]


class Completion(TypedDict):
    """The answers to a request, in OpenAI's form."""

    id: str
    object: str
    created: int
    model: str
    choices: list[dict[str, Any]]
    usage: NotRequired[dict[str, Any]]


class ModelResponse(TypedDict):
    """The answer to a request, in the items of the Responses API."""

    id: str
    object: str
    created_at: int
    status: str
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None


class OpenAiApi(ApiPlugin):
    """The routes below /openai/v1 and /v1; and for one function, at the paths that RunPod's and TGI's servers have."""

    base = "/openai"
    other_bases: ClassVar[tuple[str, ...]] = ("/v2/{function}/openai", "/tgi/{function}")
    always_bare = "/v1/"
    unrouted: ClassVar = {"/v1/": unrouted_reply, "/openai/": unrouted_reply}

    def routes(self) -> Sequence[Route]:
        call = Scope.INVOKE
        # Azure's clients send the key in this header.
        shared: dict[str, Any] = {"errors": _STATUSES, "key_header": "api-key", **ERRORS}
        listed: dict[str, Any] = {**shared, "errors": (400, 404, 503)}
        generates: dict[str, Any] = {**shared, "parameters": TARGETS}
        either: dict[str, Any] = {"application/json": Completion, **EVENTS}
        return [
            Route("GET", "/v1/models", self.models, call, "List the language models.", Models | list[TogetherModel], **listed),
            Route("GET", "/v1/models/{model}", self.model, call, "Show a language model.", OpenAiModel, **listed),
            Route("POST", "/v1/chat/completions", self.chat, call, "Answer a chat.", either, body=ChatRequest, **generates),
            Route("POST", "/v1/completions", self.complete, call, "Continue a text.", either, body=CompletionRequest, **generates),
            Route("POST", "/v1/responses", self.respond, call, "Answer, in items.", {"application/json": ModelResponse, **EVENTS}, body=ResponseRequest, **generates),
            Route("POST", "/v1/embeddings", self.embed, call, "Turn texts into vectors.", EmbeddingsAnswer, body=EmbeddingsRequest, **shared),
            Route("POST", "/v1/rerank", self.rerank, call, "Rank documents by a query.", RankingAnswer, body=RankingRequest, **shared),
            Route("POST", "/rerank", self.rerank, call, "Rank documents by a query.", RankingAnswer, body=RankingRequest, **shared),
            Route("POST", "/v1/score", self.score, call, "Score pairs of texts.", ScoringAnswer, body=ScoringRequest, **shared),
            Route("POST", "/score", self.score, call, "Score pairs of texts.", ScoringAnswer, body=ScoringRequest, **shared),
            Route("GET", "/health", self.health, None, "Does the server answer?", public=True),
            Route("GET", "/version", self.version, None, "Show pilotflame's version.", {"version": str}, public=True),
            Route("POST", "/tokenize", self.tokenize, call, "Turn a text or a chat into tokens.", Tokens, body=TokenizeRequest, **shared),
            Route("POST", "/detokenize", self.detokenize, call, "Turn tokens into a text.", DetokenizedText, body=DetokenizeRequest, **shared),
        ]  # fmt: skip

    async def health(self, _request: web.Request) -> web.StreamResponse:
        return web.Response()

    async def version(self, _request: web.Request) -> web.StreamResponse:
        return json_response({"version": __version__})

    async def tokenize(self, request: web.Request) -> web.StreamResponse:
        return await self._listed(request, TokenizeRequest)

    async def detokenize(self, request: web.Request) -> web.StreamResponse:
        return await self._listed(request, DetokenizeRequest)

    async def _listed(
        self, request: web.Request, kind: type[TokenizeRequest] | type[DetokenizeRequest]
    ) -> web.StreamResponse:
        def event_of(asked: TokenizeRequest | DetokenizeRequest) -> GenerationRequest:
            return asked.event()

        asked, event = await self._asked(request, kind, event_of)
        writes = self._writer(request, asked.model)
        return await respond(self.backend, request, writes.live, [event], prompt_answer(asked), stream=False)

    async def models(self, request: web.Request) -> web.StreamResponse:
        lives = self._models(request)
        # Together's client reads a list without the object around it.
        if is_together(request.headers):
            return json_response([together_model(live) for live in lives])
        found = [_model(live, adapter) for live in lives for adapter in ("", *adapters(live))]
        return json_response({"object": "list", "data": found})

    async def model(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["model"]
        if ":" in name:
            return json_response(_model(*self._writer(request, name)))
        return json_response(_model(self._named(request, name, *CONTRACTS)))

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, ChatRequest)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, CompletionRequest)

    async def _answer(
        self, request: web.Request, kind: type[ChatRequest] | type[CompletionRequest]
    ) -> web.StreamResponse:
        def events_of(asked: ChatRequest | CompletionRequest) -> list[GenerationRequest]:
            asked.check()
            return asked.events()

        asked, given = await self._asked(request, kind, events_of)
        writes = self._writer(request, asked.model)
        prefix = "chatcmpl" if kind is ChatRequest else "cmpl"
        answer = CompletionAnswer(f"{prefix}-{request_id_of(request.headers)}", asked)
        events = [writes.event(event) for event in given]
        return await respond(self.backend, request, writes.live, events, answer, stream=asked.stream)

    async def respond(self, request: web.Request) -> web.StreamResponse:
        asked, event = await self._asked(request, ResponseRequest, ResponseRequest.event)
        writes = self._writer(request, asked.model)
        answer = ResponseAnswer(f"resp_{request_id_of(request.headers)}", asked)
        events = [writes.event(event)]
        return await respond(self.backend, request, writes.live, events, answer, stream=asked.stream)

    async def embed(self, request: web.Request) -> web.StreamResponse:
        asked, event = await self._asked(request, EmbeddingsRequest, EmbeddingsRequest.event)
        live = self._named(request, asked.model, EmbeddingRequest)
        check_tokens(live, event)

        def read(output: bytes) -> bytes:
            return orjson.dumps(asked.answer(output_of(EmbeddingOutput, live, output)))

        body = await self.call(request, live.record.function, event, read=read)
        return web.Response(body=body, content_type=JSON_TYPE)

    async def rerank(self, request: web.Request) -> web.StreamResponse:
        asked, texts = await self._asked(request, RankingRequest, lambda asked: asked.texts)
        live = self._named(request, asked.model, RerankRequest)
        event, request_id = {"query": asked.query, "documents": texts}, request_id_of(request.headers)

        read = partial(output_of, RerankOutput, live)
        found = await self.call(request, live.record.function, event, read=read)
        # Count the size of the request, because the response may repeat the documents of the request.
        return await outputs_response(request, request[BODY_BYTES], lambda: asked.answer(found, request_id))

    async def score(self, request: web.Request) -> web.StreamResponse:
        asked, events = await self._asked(request, ScoringRequest, ScoringRequest.events)
        live = self._named(request, asked.model, RerankRequest)
        outputs = await self.call_each(request, live.record.function, events, "text_1")
        size, read = request[BODY_BYTES] + sum(map(len, outputs)), partial(output_of, RerankOutput, live)
        request_id = request_id_of(request.headers)
        return await outputs_response(request, size, lambda: asked.answer([*map(read, outputs)], request_id))

    async def _asked(self, request: web.Request, kind: type[T], then: Callable[[T], R]) -> tuple[T, R]:
        """Return the body of a request, and the result of `then` with it. Raise BadInput with the field's name if a field
        is invalid.
        """
        body = await read_body(request, self.backend.max_body_bytes)
        name = request.match_info.get("function", "")
        if not name and b'"model"' not in body:
            name = self._only_model(request)

        def read(body: bytes) -> tuple[T, R]:
            found = load_json(body)
            if isinstance(found, dict) and found.get("model") is None and name:
                found = {**found, "model": name}
            asked = validate(kind, supported(found), REMEDY)
            return asked, then(asked)

        return await parsed(request, body, read)

    def _only_model(self, request: web.Request) -> str:
        """Return the name of the caller's only model, which a request need not name; "" if there are several."""
        found = models(self.backend, request, *CONTRACTS)
        return found[0].record.function if len(found) == 1 else ""

    def _models(self, request: web.Request) -> list[Live]:
        """Return the models that the caller may use. If the path names a function, return only this function."""
        if (name := request.match_info.get("function")) is not None:
            return [model(self.backend, request, name, *CONTRACTS)]
        return models(self.backend, request, *CONTRACTS)

    def _named(self, request: web.Request, name: str, *contracts: type[BaseModel]) -> Live:
        """Return the function that the path names, even if `name` differs. If the path names no function, return the
        function `name`.
        """
        return model(self.backend, request, request.match_info.get("function", name), *contracts)

    def _writer(self, request: web.Request, name: str) -> Generator:
        """Return the function that the path names, with the adapter in `name` if `name` is function:adapter. If the path
        names no function, return the model `name`.
        """
        function = request.match_info.get("function", name)
        return generator(self.backend, request, name if name.startswith(f"{function}:") else function)


def _model(live: Live, adapter: str = "") -> OpenAiModel:
    record = live.record
    found: OpenAiModel = {
        "id": f"{record.function}:{adapter}" if adapter else record.function,
        "object": "model",
        "created": int(record.created_at.timestamp()),
        "owned_by": "pilotflame",
    }
    return found | {"parent": record.function} if adapter else found
