"""The route table: one row for each method and path that the gateway answers.

aiohttp's routes, the scopes that the guard requires and /openapi.json are all derived from these rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from aiohttp import web

from ...errors import UnsupportedMedia
from ..access.keys import Scope
from .parameters import Parameter
from .responses import ErrorBody, ErrorFormat, Handler


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path.

    The type of a body is anything that pydantic makes a schema of, or a dict of an object's fields, in which a name that
    ends with "?" is optional. A dict with media types as keys gives one type for each; otherwise the body is JSON.
    """

    method: str
    path: str
    handler: Handler
    scope: Scope | None
    """The scope that an API key needs; None: any key."""
    summary: str
    response: Any = None
    """The type of the body of a successful response; None: no body."""
    status: int = 200
    other_responses: Mapping[int, Any] = field(default_factory=dict)
    errors: tuple[int, ...] = (400, 404, 503)
    """The statuses of typed errors, besides those of the guard."""
    parameters: tuple[Parameter, ...] = ()
    """Those of the path may be left out: they are taken from `path`."""
    body: Any = None
    """The type of the request's body; None: it has none."""
    body_required: bool = True
    headers: Mapping[str, Any] = field(default_factory=dict)
    """Headers of a successful response, as OpenAPI describes them."""
    public: bool = False
    """True if no key is needed."""
    accepts: Callable[[Mapping[str, str]], bool] | None = None
    """Rows that share a method and a path choose by the request's headers; the one without `accepts` takes the rest."""
    error_format: ErrorFormat | None = None
    """Makes the response of an error, also below the fixed part of `path` where no route matches."""
    error_type: Any = ErrorBody


def aiohttp_routes(routes: Sequence[Route]) -> list[web.RouteDef]:
    """Return the routes in the order of their paths, which puts a fixed path before one with a variable part."""
    return [
        web.route(method, path, _choose(tuple(rows)))
        for (path, method), rows in groupby(sorted(routes, key=_key), _key)
    ]


def scopes_by_path(routes: Sequence[Route]) -> dict[str, Scope | None]:
    """Return the scope that each path needs. Raises ValueError if two rows of a path differ."""
    scopes: dict[str, Scope | None] = {}
    for route in routes:
        if scopes.setdefault(route.path, route.scope) is not route.scope:
            raise ValueError(f"{route.path} has rows with different scopes")
    return scopes


def error_formats(routes: Sequence[Route]) -> dict[str, ErrorFormat]:
    """Return the format of errors for each beginning of a path that has its own."""
    return {route.path.partition("{")[0]: route.error_format for route in routes if route.error_format}


def _key(route: Route) -> tuple[str, str]:
    return route.path, route.method


def _choose(rows: tuple[Route, ...]) -> Handler:
    if len(rows) == 1 and rows[0].accepts is None:
        return rows[0].handler

    async def choose(request: web.Request) -> web.StreamResponse:
        for row in sorted(rows, key=lambda row: row.accepts is None):
            if row.accepts is None or row.accepts(request.headers):
                return await row.handler(request)
        raise UnsupportedMedia(f"{request.path[:128]!r} does not take this type of body.")

    return choose
