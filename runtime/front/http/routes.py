"""Defines `Route`, a row of the route table, and its parameters.

aiohttp's routes, the scopes that the guard requires and /openapi.json are all made from the table.
"""

from __future__ import annotations

import enum
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from typing import Any, Generic, TypeVar

from aiohttp import web

from ....errors import BadInput, PluginError, UnsupportedMedia
from ...ground.access.keys import Scope
from .requests import check_expectation
from .responses import ErrorBody, ErrorFormat, Handler

INVOKE_PATH = "/invoke/{function}"
MAX_DIGITS = 9
# The Unix times that a `datetime` can have: the years 1 to 9999.
FIRST_S, LAST_S = -62135596800.0, 253402300799.0
# The pattern of a variable, as in "/{path:.*}".
_PATTERN = re.compile(r":[^{}]*\}")
_FLAGS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False, "": False}

E = TypeVar("E", bound=enum.StrEnum)


class Parameter:
    """A parameter of a route."""

    def __init__(
        self, name: str, description: str = "", *, place: str = "query", required: bool = False, **schema: Any
    ) -> None:
        """`place` is "query", "header" or "path". `schema` is JSON Schema; the default is a string."""
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
        """Return True if the flag is on. Raise BadInput if its value is invalid."""
        text = request.query.get(self.name)
        if text is None:
            return self._default
        if (on := _FLAGS.get(text.lower())) is None:
            raise BadInput(f"{self.name} is {text[:40]!r}.", remedy="It must be 1 or 0.")
        return on


class Number(Parameter):
    """A query parameter that is a whole number. If the parameter has no default and is not sent, `read` returns 0."""

    def __init__(self, name: str, description: str, default: int | None = None, **limits: int) -> None:
        """`limits` are `minimum` (default: 0) and `maximum` (default: none), as in JSON Schema."""
        self._default, self._limits = default or 0, {"minimum": 0, **limits}
        schema: dict[str, Any] = self._limits if default is None else self._limits | {"default": default}
        super().__init__(name, description, type="integer", **schema)

    def read(self, request: web.Request, *, most: int | None = None) -> int:
        """Return the number that was sent, or the default. Raise BadInput if the number is invalid.

        `most` is the maximum if `limits` has none.
        """
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


class UnixTime(Parameter):
    """A query parameter that is a time."""

    def __init__(self, name: str, description: str, default: float = 0.0) -> None:
        super().__init__(name, description, type="number")
        self._default = default

    def read(self, request: web.Request, default: float | None = None) -> float:
        """Return the time that was sent, in Unix seconds, or the default. Raise BadInput if the value is not a time.

        `default` replaces the parameter's default, for example if it depends on the present time.
        """
        text = request.query.get(self.name)
        try:
            found = (self._default if default is None else default) if text is None else float(text)
        except ValueError:
            found = math.nan
        if math.isnan(found) or (text is not None and not FIRST_S <= found <= LAST_S):
            raise BadInput(
                f"{self.name} is {text!r:.40}, which is no time.", remedy="Send Unix time in seconds."
            )
        return found


class Choices(Parameter, Generic[E]):
    """A query parameter that may be sent several times, each time with one member of an enumeration."""

    def __init__(self, name: str, description: str, kind: type[E]) -> None:
        super().__init__(name, description, type="array", items={"type": "string", "enum": list(kind)})
        self._kind = kind

    def read(self, request: web.Request) -> list[E]:
        """Return the members that were sent, in any case of letters. Raise BadInput for any other value."""
        try:
            return [self._kind(text.upper()) for text in request.query.getall(self.name, [])]
        except ValueError as error:
            raise BadInput(f"{self.name}: {error}.", remedy=f"One of {', '.join(self._kind)}.") from None


@dataclass(frozen=True, slots=True)
class Route:
    """A row of the route table: one method of one path.

    The type of a body is a type for which pydantic makes a schema, or a dict that describes a JSON object: it
    maps the names of fields to their types, and a name that ends with "?" is optional. Bodies are JSON,
    unless the type is a dict whose keys are media types: it maps each media type to the type of such a body.
    """

    method: str
    path: str
    handler: Handler
    scope: Scope | None
    """The scope that an API key needs. None: any key may be used."""
    summary: str
    response: Any = None
    """The type of a successful response's body. None: there is no body."""
    status: int = 200
    other_responses: Mapping[int, Any] = field(default_factory=dict)
    errors: tuple[int, ...] = (400, 404, 503)
    """The statuses of the typed errors with which the route responds. The statuses of the guard's errors are added."""
    parameters: tuple[Parameter, ...] = ()
    """The parameters of the route. Parameters of the path may be left out if they are strings: their names are in `path`."""
    body: Any = None
    """The type of the request's body. None: there is no body."""
    body_required: bool = True
    headers: Mapping[str, Any] = field(default_factory=dict)
    """The headers of a successful response, described as in OpenAPI."""
    public: bool = False
    """True if no API key is needed."""
    reads: bool = False
    """True if the route changes nothing although its method is not GET. The audit log leaves such a route out."""
    aws_signed: bool = False
    """True if a caller may sign the request with an API key, as AWS's clients do, instead of sending the key."""
    key_header: str = ""
    """The header of the platform's clients that holds the API key if there is no Authorization header; "" for none."""
    accepts: Callable[[Mapping[str, str]], bool] | None = None
    """Chooses between rows with the same method and path. The first row whose `accepts` returns True for the request's
    headers serves the request. If there is no such row, the row without `accepts` serves it.
    """
    error_format: ErrorFormat | None = None
    """Makes the responses for errors on all paths that begin like `path`, up to the first variable of `path`, even if no
    route matches. If rows with another format have the same beginning, it makes the responses for `path` only. None if
    this row adds no format.
    """
    error_type: Any = ErrorBody

    @property
    def canonical(self) -> str:
        """The path as aiohttp names it: without the patterns of its variables."""
        return _PATTERN.sub("}", self.path)


def based(
    base: str, routes: Sequence[Route], others: Iterable[str] = (), *, bare: Sequence[Route] = ()
) -> list[Route]:
    """Return the rows with the prefix `base` and with each prefix of `others`.

    Also return the rows `bare` without a prefix, except rows whose own path is empty.
    """
    found = [replace(row, path=prefix + row.path) for prefix in (base, *others) for row in routes]
    return found + [row for row in bare if base and row.path]


def joined(owned: Mapping[str, Iterable[Route]]) -> list[Route]:
    """Return the rows of all owners. `owned` maps the name of each owner to its rows.

    Raise PluginError if two owners have rows of the same method and path, and neither chooses by headers.
    """
    owners, rows = dict[tuple[str, str], str](), list[Route]()
    for owner, found in owned.items():
        for route in found:
            rows.append(route)
            # Do not refuse several rows of one owner here. If their scopes differ, `scopes_by_route` refuses them.
            before = owners.get((route.method, route.path)) if route.accepts is None else None
            if before not in (None, owner):
                message = f"{route.method} {route.path} is a route of {before} and of {owner}."
                raise PluginError(message, remedy="Leave one of them out of `plugins`.")
            if route.accepts is None:
                owners[route.method, route.path] = owner
    return rows


def aiohttp_routes(routes: Sequence[Route]) -> list[web.RouteDef]:
    """Return aiohttp's routes, sorted so that a fixed path comes before a path with a variable in the same place.

    aiohttp uses the first route that matches. Letters sort before "{". Short paths come first, because most requests have a short
    path. Paths with a pattern come last, because a pattern may match several segments.
    """
    key = attrgetter("path", "method")

    def place(route: Route) -> tuple[bool, int, str, str]:
        return bool(_PATTERN.search(route.path)), route.path.count("/"), route.path, route.method

    grouped = groupby(sorted(routes, key=place), key)
    found = {(method, path): _choose(tuple(rows)) for (path, method), rows in grouped}
    # Serve HEAD on public routes, because health checkers often send it.
    public = {
        ("HEAD", route.path): route.handler for route in routes if route.public and route.method == "GET"
    }
    return [
        web.route(method, path, handler, expect_handler=check_expectation)
        for (method, path), handler in (public | found).items()
    ]


def scopes_by_route(routes: Sequence[Route]) -> dict[tuple[str, str], Scope | None]:
    """Return the scope that each (method, path) requires. Raise ValueError if rows with the same method and path
    differ in their scopes.
    """
    scopes: dict[tuple[str, str], Scope | None] = {}
    for route in routes:
        if scopes.setdefault((route.method, route.canonical), route.scope) is not route.scope:
            raise ValueError(f"{route.method} {route.path} has rows with different scopes")
    return scopes


def error_formats(routes: Sequence[Route]) -> dict[str, ErrorFormat]:
    """Return the error formats by the beginning of the path, which is the part before the path's first variable.

    If rows with several formats share a beginning, return the format of each row by the row's whole path.
    """
    sharing = defaultdict[str, set[ErrorFormat | None]](set)
    for route in routes:
        sharing[_beginning(route)].add(route.error_format)
    return {
        route.canonical if len(sharing[_beginning(route)]) > 1 else _beginning(route): route.error_format
        for route in routes
        if route.error_format
    }


def _beginning(route: Route) -> str:
    return route.path.partition("{")[0]


def _choose(rows: tuple[Route, ...]) -> Handler:
    if len(rows) == 1 and rows[0].accepts is None:
        return rows[0].handler

    async def choose(request: web.Request) -> web.StreamResponse:
        for row in sorted(rows, key=lambda row: row.accepts is None):
            if row.accepts is None or row.accepts(request.headers):
                return await row.handler(request)
        raise UnsupportedMedia(f"{request.path[:128]!r} does not take this type of body.")

    return choose
