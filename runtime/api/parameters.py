"""Parameters of routes: how the OpenAPI document describes them and how a handler reads them."""

from __future__ import annotations

import enum
from typing import Any, Generic, TypeVar

from aiohttp import web

from ...errors import BadInput

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
