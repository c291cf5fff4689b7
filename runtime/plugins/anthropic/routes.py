"""The routes of Anthropic's API: messages, and the number of their tokens.

The field `model` names a function, whose handler takes a `GenerationRequest`. This package must not depend on how the
handler makes its answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

from aiohttp import web
from typing_extensions import TypedDict

from ....handlers.language_model.contract import GenerationRequest
from ...front.api.plugin import ApiPlugin
from ...front.generation.answering import respond
from ...front.generation.models import generator
from ...front.generation.targets import PARAMETERS as TARGETS
from ...front.http.event_stream import EVENTS
from ...front.http.parsed_bodies import parsed
from ...front.http.requests import id_of, load_json, read_body, validate
from ...front.http.routes import Route, header
from ...ground.access.keys import Scope
from ..completions.prompt_answer import PromptAnswer
from .answers import MessageBlocks, input_tokens
from .errors import ERRORS, anthropic_error_reply
from .requests import REMEDY, CountRequest, MessagesRequest, supported

_VERSION = header("anthropic-version", "Accepted, without effect.")
T = TypeVar("T", bound=CountRequest)


class MessageAnswer(TypedDict):
    """The answer to a request, in blocks."""

    id: str
    type: str
    role: str
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: dict[str, int]


class AnthropicApi(ApiPlugin):
    """The routes below /anthropic/v1 and /v1."""

    base = "/anthropic"
    always_bare = "/v1/"
    unrouted: ClassVar = {"/anthropic/": anthropic_error_reply}

    def routes(self) -> Sequence[Route]:
        call = Scope.INVOKE
        shared: dict[str, Any] = {
            "errors": (400, 404, 408, 413, 429, 500, 504, 529), "parameters": (_VERSION, *TARGETS), "key_header": "x-api-key", **ERRORS
        }  # fmt: skip
        either: dict[str, Any] = {"application/json": MessageAnswer, **EVENTS}
        counted = {"input_tokens": int}
        return [
            Route("POST", "/v1/messages", self.answer, call, "Answer a chat.", either, body=MessagesRequest, **shared),
            Route("POST", "/v1/messages/count_tokens", self.count, call, "Count the tokens of a chat.", counted, body=CountRequest, **shared),
        ]  # fmt: skip

    async def answer(self, request: web.Request) -> web.StreamResponse:
        asked, event = await self._asked(request, MessagesRequest)
        answer = MessageBlocks(id_of(request), asked)
        return await self._respond(request, asked, event, answer, stream=asked.stream)

    async def count(self, request: web.Request) -> web.StreamResponse:
        asked, event = await self._asked(request, CountRequest)
        return await self._respond(request, asked, event, input_tokens(asked))

    async def _asked(self, request: web.Request, kind: type[T]) -> tuple[T, GenerationRequest]:
        """Return (body, event) of a request. Raise BadInput with the field's name if a field is invalid."""

        def read(body: bytes) -> tuple[T, GenerationRequest]:
            asked = validate(kind, supported(load_json(body)), REMEDY)
            return asked, asked.event()

        body = await read_body(request, self.backend.max_body_bytes)
        return await parsed(request, body, read)

    async def _respond(
        self,
        request: web.Request,
        asked: CountRequest,
        event: GenerationRequest,
        answer: MessageBlocks | PromptAnswer,
        *,
        stream: bool = False,
    ) -> web.StreamResponse:
        writes = generator(self.backend, request, asked.model)
        return await respond(self.backend, request, writes.live, [writes.event(event)], answer, stream=stream)
