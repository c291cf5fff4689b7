"""The routes of Hugging Face's text-generation-inference, below /tgi/{function}.

The function's handler takes a `GenerationRequest`. This package does not know how the handler answers it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NotRequired

from aiohttp import web
from typing_extensions import TypedDict

from ...._version import __version__
from ....errors import InputInvalid, UnknownFunction
from ....handlers.language_model.contract import GenerationRequest
from ...front.api.plugin import ApiPlugin
from ...front.generation.answering import respond
from ...front.generation.models import model, models
from ...front.generation.targets import PARAMETERS as TARGETS
from ...front.http.event_stream import EVENTS
from ...front.http.parsed_bodies import parsed
from ...front.http.requests import load_json, read_body, validate
from ...front.http.responses import json_response
from ...front.http.routes import Route
from ...ground.access.keys import Scope
from ...node.functions.live import Live
from .answers import GeneratedText
from .errors import ERRORS
from .requests import MOST_STOPS, REMEDY, GenerateRequest, supported

_STATUSES = (404, 408, 413, 422, 424, 429, 500)


class Generated(TypedDict):
    """An answer. `details` is there if the request asks for it."""

    generated_text: str
    details: NotRequired[dict[str, Any]]


class Info(TypedDict):
    """A function with a language model, as TGI describes its model."""

    model_id: str
    model_sha: str | None
    model_pipeline_tag: str
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    router: str
    version: str


class TgiApi(ApiPlugin):
    """The routes below /tgi/{function}. A gateway with one function also has /generate, /generate_stream and /info."""

    base = "/tgi/{function}"

    def routes(self) -> Sequence[Route]:
        call = Scope.INVOKE
        shared: dict[str, Any] = {
            "body": GenerateRequest,
            "errors": _STATUSES,
            "parameters": TARGETS,
            **ERRORS,
        }
        either: dict[str, Any] = {"application/json": list[Generated], **EVENTS}
        return [
            Route("POST", "", self.compatible, call, "Continue a text, whole or as a stream.", either, **shared),
            Route("POST", "/generate", self.whole, call, "Continue a text.", Generated, **shared),
            Route("POST", "/generate_stream", self.stream, call, "Continue a text, as a stream.", EVENTS, **shared),
            Route("GET", "/info", self.info, call, "Describe a language model.", Info, errors=(404, 422, 429), **ERRORS),
        ]  # fmt: skip

    async def compatible(self, request: web.Request) -> web.StreamResponse:
        asked = await self._asked(request)
        return await self._answer(request, asked, stream=asked.stream, listed=True)

    async def whole(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, await self._asked(request), stream=False)

    async def stream(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, await self._asked(request), stream=True)

    async def info(self, request: web.Request) -> web.StreamResponse:
        live = self._live(request)
        scale = live.revision.policy.scale
        found: Info = {
            "model_id": live.record.function, "model_sha": None, "model_pipeline_tag": "text-generation",
            "max_concurrent_requests": scale.max * scale.concurrency, "max_best_of": 1,
            "max_stop_sequences": MOST_STOPS, "router": "pilotflame", "version": __version__,
        }  # fmt: skip
        return json_response(found)

    async def _answer(
        self, request: web.Request, asked: GenerateRequest, *, stream: bool, listed: bool = False
    ) -> web.StreamResponse:
        live, seed = self._live(request), asked.new_seed()
        answer = GeneratedText(asked, seed, listed)
        events = [asked.event(seed, stream=stream)]
        return await respond(self.backend, request, live, events, answer, stream=stream)

    async def _asked(self, request: web.Request) -> GenerateRequest:
        """Return the body of a request. Raise BadInput with the field's name if a field is invalid."""
        body = await read_body(request, self.backend.max_body_bytes)
        return await parsed(
            request, body, lambda body: validate(GenerateRequest, supported(load_json(body)), REMEDY)
        )

    def _live(self, request: web.Request) -> Live:
        """Return the function in the path, or else the only language model that the caller may see."""
        if (name := request.match_info.get("function")) is not None:
            return model(self.backend, request, name, GenerationRequest)
        found = models(self.backend, request, GenerationRequest)
        if not found:
            raise UnknownFunction("There is no language model.", remedy="Deploy one.")
        if len(found) > 1:
            message = "The request names no function, and there are several language models."
            raise InputInvalid(message, remedy="Put its name into the path: /tgi/NAME/generate.")
        return found[0]
