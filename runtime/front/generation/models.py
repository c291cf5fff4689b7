"""Finds the functions that have a language model: their handlers take the events of `handlers/language_model`.

Callers write `function` or `function:adapter`.
"""

from __future__ import annotations

from typing import NamedTuple

from aiohttp import web
from pydantic import BaseModel

from ....errors import BadInput, UnknownFunction
from ....handlers.language_model.contract import GenerationRequest
from ...node.functions.live import Live
from ..api.backend import Backend


class Generator(NamedTuple):
    """A function that writes text, perhaps with one of its adapters."""

    live: Live
    adapter: str

    def event(self, given: GenerationRequest) -> GenerationRequest:
        """Return `given` as the event of this model: with its adapter, if it has one."""
        return given.model_copy(update={"adapter": self.adapter}) if self.adapter else given


def takes(live: Live, contract: type[BaseModel]) -> bool:
    """Return True if the function's handler takes events of this class."""
    schema = (live.record.handler or {}).get("input_schema") or {}
    return bool(schema.get("title") == contract.__name__)


def models(backend: Backend, request: web.Request, *contracts: type[BaseModel]) -> list[Live]:
    """Return the functions that the caller may see, and whose handlers take events of one of these classes."""
    lives = [backend.functions.get(name) for name in backend.names(request)]
    return [live for live in lives if any(takes(live, contract) for contract in contracts)]


def model(backend: Backend, request: web.Request, name: str, *contracts: type[BaseModel]) -> Live:
    """Return the function `name`. Raise UnknownFunction or BadInput, which name the field `model`."""
    if name not in (known := backend.names(request)):
        unknown = UnknownFunction.named(name, known)
        raise UnknownFunction(unknown.message, remedy=unknown.remedy, details={"field": "model"})
    live = backend.functions.get(name)
    if not any(takes(live, contract) for contract in contracts):
        message = f"{name} is no language model of this kind: its handler takes no {contracts[0].__name__}."
        raise BadInput(message, remedy="Call it at /invoke.", details={"field": "model"})
    return live


def generator(backend: Backend, request: web.Request, name: str) -> Generator:
    """Return the function and the adapter that `name` names. Raise UnknownFunction or BadInput, which name the field
    `model`.
    """
    function, _, adapter = name.partition(":")
    live = model(backend, request, function, GenerationRequest)
    if adapter and adapter not in (there := adapters(live)):
        fault = f"{function} has no adapter {adapter[:80]!r}."
        remedy = (
            f"Use one of: {', '.join(there)}." if there else "Name it in [adapters] of its pilotflame.toml."
        )
        raise UnknownFunction(fault, remedy=remedy, details={"field": "model"})
    return Generator(live, adapter)


def adapters(live: Live) -> list[str]:
    """Return the names of the adapters with which a function writes text."""
    return list(live.record.settings.adapters) if takes(live, GenerationRequest) else []
