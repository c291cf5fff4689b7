"""Reads how soon a caller needs the tokens of an answer, from the headers `x-slo-ttft-ms` and `x-slo-tpot-ms` of llm-d."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from ....handlers.language_model.contract import GenerationRequest
from ..http.requests import positive
from ..http.routes import Parameter, header

FIRST, LATER = "x-slo-ttft-ms", "x-slo-tpot-ms"
_MS: dict[str, Any] = {"type": "number", "exclusiveMinimum": 0}
PARAMETERS: tuple[Parameter, ...] = (
    header(
        FIRST, "Milliseconds to the first token. A request that would take longer is refused at once.", **_MS
    ),
    header(
        LATER,
        "The longest mean time of a later token, in milliseconds. A request is refused if tokens take longer at present.",
        **_MS,
    ),
)


def with_targets(request: web.Request, events: Sequence[GenerationRequest]) -> list[GenerationRequest]:
    """Return the events with the targets of the request's headers. Raise BadInput if the value of a header is not a
    positive number.
    """
    first_ms, later_ms = (positive(request.headers, name, "milliseconds") for name in (FIRST, LATER))
    found = {
        "first_token_by": time.time() + first_ms / 1000 if first_ms is not None else None,
        "token_ms": later_ms,
    }
    given = {name: value for name, value in found.items() if value is not None}
    return [event.model_copy(update=given) for event in events] if given else [*events]
