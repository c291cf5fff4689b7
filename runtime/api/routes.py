"""The route table: one row for each method and path that the gateway answers, with its parameters.

aiohttp's routes, the scopes that the guard requires and /openapi.json are all derived from these rows.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Any, Generic, TypeVar

from aiohttp import web

from ...errors import BadInput, UnsupportedMedia
from ..access.keys import Scope
from .responses import ErrorBody, ErrorFormat, Handler

MAX_DIGITS = 9
_FLAGS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False, "": False}

E = TypeVar("E", bound=enum.StrEnum)


class Parameter:
    """A parameter in the query, in a header or in the path. `schema` is JSON Schema; without it the value is text."""

    def __init__(
        self, name: str, description: str = "", *, place: str = "query", required: bool = False, **schema: Any
    ) -> None:
        self.name = name
        self.spec: dict[str, Any] = {"name": name, "in": place, "schema": schema or {"type": "string"}}
        if description:
            self.spec["description"] = description
        if required or place == "path":
            self.spec["required"] = True


def header(name: str, description: str = "", *, required: bool = False, **schema: Any) -> Parameter:
    return Parameter(name, description, place="header", required=required, **schema)


class Flag(Parameter):
    """A query parameter that is on or off."""

    def __init__(self, name: str, description: str, *, default: bool = False) -> None:
        super().__init__(name, description, type="string", enum=["0", "1"])
        self._default = default

    def read(self, request: web.Request) -> bool:
        """Raises BadInput."""
        text = request.query.get(self.name)
        if text is None:
            return self._default
        if (on := _FLAGS.get(text.lower())) is None:
            raise BadInput(f"{self.name} is {text[:40]!r}.", remedy="It must be 1 or 0.")
        return on


class Number(Parameter):
    """A query parameter that is a whole number, from `least` to `most` if there is a `most`; 0 without a default."""

    def __init__(self, name: str, description: str, default: int | None = None, **limits: int) -> None:
        """`limits` are JSON Schema's `minimum`, which is 0 if it is missing, and `maximum`."""
        self._default, self._limits = default or 0, {"minimum": 0, **limits}
        schema: dict[str, Any] = self._limits if default is None else self._limits | {"default": default}
        super().__init__(name, description, type="integer", **schema)

    def read(self, request: web.Request, *, most: int | None = None) -> int:
        """Raises BadInput. `most` is a limit that the route table does not know."""
        least, most = self._limits["minimum"], self._limits.get("maximum", most)
        text = request.query.get(self.name)
        if text is None:
            return self._default
        if text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS:
            number = int(text)
            if least <= number and (most is None or number <= most):
                return number
        limits = f"from {least}" if most is None else f"from {least} to {most}"
        raise BadInput(f"{self.name} is {text[:40]!r}.", remedy=f"It must be a whole number {limits}.")


class Choices(Parameter, Generic[E]):
    """A query parameter that may be sent several times, each time with a member of an enumeration."""

    def __init__(self, name: str, description: str, kind: type[E]) -> None:
        super().__init__(name, description, type="array", items={"type": "string", "enum": list(kind)})
        self._kind = kind

    def read(self, request: web.Request) -> list[E]:
        """Raises BadInput."""
        try:
            return [self._kind(text.upper()) for text in request.query.getall(self.name, [])]
        except ValueError as error:
            raise BadInput(f"{self.name}: {error}.", remedy=f"One of {', '.join(self._kind)}.") from None


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
    key = attrgetter("path", "method")
    grouped = groupby(sorted(routes, key=key), key)
    return [web.route(method, path, _choose(tuple(rows))) for (path, method), rows in grouped]


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


def _choose(rows: tuple[Route, ...]) -> Handler:
    if len(rows) == 1 and rows[0].accepts is None:
        return rows[0].handler

    async def choose(request: web.Request) -> web.StreamResponse:
        for row in sorted(rows, key=lambda row: row.accepts is None):
            if row.accepts is None or row.accepts(request.headers):
                return await row.handler(request)
        raise UnsupportedMedia(f"{request.path[:128]!r} does not take this type of body.")

    return choose
