"""Defines what a plugin adds to the HTTP API of a gateway. It offers a subclass of `ApiPlugin` as an entry point."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from aiohttp import web

from ...errors import OutputInvalid
from ...handlers.codec import JSON_TYPE
from ..functions.live import FunctionStatus
from ..jobs.outbox import WebhookBodies
from .backend import Backend
from .invoke import Gateway
from .requests import dump_json, load_json
from .routes import Route

CALL_REMEDY = "Return values that JSON has, or call it at /invoke."


class ApiPlugin:
    """The routes of a plugin, and what else it adds. This class adds nothing."""

    webhook_bodies: ClassVar[WebhookBodies] = {}
    """The forms of webhooks that jobs of this plugin have."""
    root: ClassVar[Mapping[str, str]] = {}
    """What `GET /` returns beside the gateway's own fields."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def routes(self) -> Sequence[Route]:
        return ()

    async def read_json(self, request: web.Request) -> Any:
        """Return the body of a request for the function in the path. Raise UnknownFunction, or an error of the body."""
        _, body = await self.backend.read_body(request, request.match_info["function"])
        return load_json(body)

    async def call(self, request: web.Request, function: str, event: Any, number: int = 0) -> Any:
        """Call a function with a JSON value, and return its output, which must be JSON. Raise its error.

        `number` distinguishes several calls of one request. If the caller disconnects, the call is cancelled.
        """
        output = await Gateway(self.backend).call(request, function, dump_json(event), number)
        if output.content_type != JSON_TYPE:
            raise OutputInvalid(
                f"The output of {function} is {output.content_type}, not JSON.", remedy=CALL_REMEDY
            )
        return load_json(output.payload)

    async def sweep(self) -> None:
        """Do what is done from time to time, until it is cancelled. It is started again after an error."""

    def describe(
        self, document: dict[str, Any], functions: Sequence[FunctionStatus], *, named: bool
    ) -> dict[str, Any]:
        """Return /openapi.json for a caller who may see `functions`. `named` is true if the caller asked for that one function."""
        return document
