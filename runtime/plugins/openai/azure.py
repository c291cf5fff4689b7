"""The routes of Azure OpenAI: chats, completions and embeddings of a deployment, which is a function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import orjson

from ....errors import PilotflameError, UnknownFunction
from ...front.http.responses import Response
from ...front.http.routes import Parameter, Route
from ..completions.errors import error_body, openai_error_reply
from .routes import OpenAiApi

_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
_VERSION = Parameter("api-version", "Accepted, without effect.")


def azure_error_reply(error: PilotflameError, request_id: str) -> Response:
    """Return the response for an error: OpenAI's form, with Azure's code for a deployment that is not there."""
    found = error_body(error)["error"]
    if isinstance(error, UnknownFunction):
        found["code"] = "DeploymentNotFound"
    return openai_error_reply(error, request_id)._replace(body=orjson.dumps({"error": found}))


class AzureApi(OpenAiApi):
    """The routes below /openai/deployments/{function}. They answer as those of OpenAI do."""

    base = "/openai/deployments/{function}"
    other_bases = ()
    always_bare = ""
    unrouted: ClassVar = {}

    def routes(self) -> Sequence[Route]:
        return [
            replace(
                route,
                path=route.path.removeprefix("/v1"),
                parameters=(_VERSION, *route.parameters),
                error_format=azure_error_reply,
            )
            for route in super().routes()
            if route.path in _PATHS
        ]

    def bare_routes(self) -> Sequence[Route]:
        return ()
