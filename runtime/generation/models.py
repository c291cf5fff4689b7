"""Finds the functions that have a language model: their handlers take the events of `handlers/language_model`."""

from __future__ import annotations

from aiohttp import web
from pydantic import BaseModel

from ...errors import BadInput, UnknownFunction
from ..api.backend import Backend
from ..functions.live import Live


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
