"""The routes of OpenAI's API: models, chats and completions.

`model` is the name of a function. Its handler takes a `GenerationRequest` and yields `Delta`s. This package knows nothing of how it makes
them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NotRequired

import orjson
from aiohttp import web
from typing_extensions import TypedDict

from ....errors import BadInput, DeadlineExceeded, PilotflameError, UnknownFunction
from ....handlers.language_model.contract import GenerationRequest
from ...access.keys import Scope
from ...api.invoke import Gateway
from ...api.plugin import ApiPlugin
from ...functions.live import Live
from ...http.event_stream import EVENTS, HEARTBEAT, HEARTBEAT_S, LAST_EVENT_S, STREAM_HEADERS
from ...http.requests import load_json, read_body, request_id_of, timeout_of, validate
from ...http.responses import json_response
from ...http.routes import Route
from .answers import CompletionAnswer
from .deltas import Deltas
from .errors import ERRORS, error_body
from .requests import REMEDY, ChatRequest, CompletionRequest, supported

DONE = b"data: [DONE]\n\n"
CONTRACT = GenerationRequest.__name__
_STATUSES = (400, 404, 408, 413, 422, 429, 500, 503, 504)


class OpenAiModel(TypedDict):
    """A function with a language model."""

    id: str
    object: str
    created: int
    owned_by: str


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


class OpenAiApi(ApiPlugin):
    """The routes below /openai/v1, and below /v1."""

    base = "/openai"
    always_bare = True

    def routes(self) -> Sequence[Route]:
        call = Scope.INVOKE
        shared: dict[str, Any] = {"errors": _STATUSES, **ERRORS}
        listed: dict[str, Any] = {"errors": (404, 503), **ERRORS}
        either: dict[str, Any] = {"application/json": Completion, **EVENTS}
        return [
            Route("GET", "/v1/models", self.models, call, "List the language models.", Models, **listed),
            Route("GET", "/v1/models/{model}", self.model, call, "Show a language model.", OpenAiModel, **listed),
            Route("POST", "/v1/chat/completions", self.chat, call, "Answer a chat.", either, body=ChatRequest, **shared),
            Route("POST", "/v1/completions", self.complete, call, "Continue a text.", either, body=CompletionRequest, **shared),
        ]  # fmt: skip

    async def models(self, request: web.Request) -> web.StreamResponse:
        names = self.backend.names(request)
        lives = [live for name in names if is_language_model(live := self.backend.functions.get(name))]
        return json_response({"object": "list", "data": [_model(live) for live in lives]})

    async def model(self, request: web.Request) -> web.StreamResponse:
        return json_response(_model(self._live(request, request.match_info["model"])))

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, ChatRequest)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, CompletionRequest)

    async def _answer(
        self, request: web.Request, kind: type[ChatRequest] | type[CompletionRequest]
    ) -> web.StreamResponse:
        body = await read_body(request, self.backend.max_body_bytes, self.backend.body_timeout_s)
        asked: ChatRequest | CompletionRequest = validate(kind, supported(load_json(body)), REMEDY)
        asked.check()
        live = self._live(request, asked.model)
        name, limit_s = live.record.function, timeout_of(request.headers, live.record.settings.timeout_s)
        prefix = "chatcmpl" if kind is ChatRequest else "cmpl"
        answer = CompletionAnswer(f"{prefix}-{request_id_of(request.headers)}", asked)
        events = asked.events()
        send = _sent if asked.stream else _whole
        # An error that leaves the group would be wrapped, so it is raised after the group.
        async with asyncio.TaskGroup() as tasks:
            deltas = Deltas(Gateway(self.backend), request, name, events, tasks)
            try:
                async with asyncio.timeout(limit_s + LAST_EVENT_S):
                    return await send(request, answer, deltas)
            except TimeoutError:
                # The caller does not read the answer.
                if request.transport is not None:
                    request.transport.abort()
                error: PilotflameError = DeadlineExceeded("The answer could not be sent in time.")
            except PilotflameError as failed:
                error = failed
            finally:
                deltas.close()
        raise error

    def _live(self, request: web.Request, name: str) -> Live:
        """Return a language model that the caller may see. Raise UnknownFunction or BadInput, which name the field."""
        if name not in (known := self.backend.names(request)):
            unknown = UnknownFunction.named(name, known)
            raise UnknownFunction(unknown.message, remedy=unknown.remedy, details={"field": "model"})
        live = self.backend.functions.get(name)
        if not is_language_model(live):
            message = f"{name} is no language model: its handler takes no {CONTRACT}."
            raise BadInput(message, remedy="Call it at /invoke.", details={"field": "model"})
        return live


async def _whole(request: web.Request, answer: CompletionAnswer, deltas: Deltas) -> web.StreamResponse:
    while (found := await deltas.next()) is not None:
        answer.add(*found)
    return json_response(answer.whole(), headers={"X-Request-Id": request_id_of(request.headers)})


async def _sent(request: web.Request, answer: CompletionAnswer, deltas: Deltas) -> web.StreamResponse:
    """Send the chunks as they come, and a comment while nothing comes.

    An error before the first chunk or comment is raised. A later one is the last event.
    """
    headers = STREAM_HEADERS | {"X-Request-Id": request_id_of(request.headers)}
    response = web.StreamResponse(headers=headers)
    try:
        while True:
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    found = await deltas.next()
            except TimeoutError:
                await _write(request, response, HEARTBEAT)
                continue
            if found is None:
                break
            if chunks := answer.chunks(*found):
                await _write(request, response, b"".join(map(_event, chunks)))
    except PilotflameError as error:
        if not response.prepared:
            raise
        await _write(request, response, _event(error_body(error)))
    else:
        last = [answer.last_chunk()] if answer.asked.stream_options.include_usage else []
        await _write(request, response, b"".join(map(_event, last)) + DONE)
    await response.write_eof()
    return response


async def _write(request: web.Request, response: web.StreamResponse, data: bytes) -> None:
    if not response.prepared:
        await response.prepare(request)
    await response.write(data)


def is_language_model(live: Live) -> bool:
    """Return True if the function's handler takes the events of language models."""
    schema = (live.record.handler or {}).get("input_schema") or {}
    return bool(schema.get("title") == CONTRACT)


def _model(live: Live) -> OpenAiModel:
    record = live.record
    return {
        "id": record.function,
        "object": "model",
        "created": int(record.created_at.timestamp()),
        "owned_by": "pilotflame",
    }


def _event(body: Any) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"
