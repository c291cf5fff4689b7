"""The unrouted: requests that no route takes, by path or by method, answered with typed errors as all others are."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import hdrs, web

from ...errors import MethodNotAllowed, PilotflameError, UnknownRoute
from ..dialects.aws_lambda.errors import PATHS, aws_error
from .requests import request_id_of
from .responses import error_response

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def unrouted(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Around all routes; what they answer passes as it is."""
    try:
        return await handler(request)
    except web.HTTPMethodNotAllowed as refused:
        allowed = refused.headers[hdrs.ALLOW]
        error = MethodNotAllowed(
            f"{request.path[:128]!r} does not take {request.method[:32]!r}.", remedy=f"It takes {allowed}."
        )
        response = _refusal(request, error)
        response.headers[hdrs.ALLOW] = allowed
        return response
    except web.HTTPNotFound:
        return _refusal(
            request,
            UnknownRoute(
                f"There is nothing at {request.path[:128]!r}.", remedy="See /openapi.json for what is."
            ),
        )


def _refusal(request: web.Request, error: PilotflameError) -> web.Response:
    request_id = request_id_of(request.headers)
    if request.path.startswith(PATHS):
        return aws_error(error, request_id)
    return error_response(error, request_id)
