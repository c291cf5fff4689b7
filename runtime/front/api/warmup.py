"""Serves the route that starts workers before they are needed, for callers that expect load and for hooks."""

from __future__ import annotations

import re
from typing import Any

from aiohttp import web
from pydantic import BaseModel, Field

from ....errors import BadInput
from ....handlers.codec import JSON_TYPE
from ...ground.access.keys import Scope
from ...node.functions.registry import Functions
from ...node.functions.status import Workers
from ...node.reconciling.prewarms import WARM_S
from ..http.requests import caller_of, load_json, media_type_of, read_body, validate
from ..http.responses import json_response
from ..http.routes import Number, Parameter, Route

MAX_WARM_S = 86_400
MAX_WAIT_S = 300
MAX_BODY_BYTES = 64 << 10
BODY_TIMEOUT_S = 10.0
CLOUD_EVENT_TYPE = "ce-type"
STRUCTURED_EVENT = "application/cloudevents+json"
CAUSE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,63}")
CAUSE_REMEDY = "It must be 1 to 64 letters, digits and . _ : / -, as keda or deploy-42."
BODY_REMEDY = 'Send {"workers": 2, "for_s": 600, "wait_s": 30, "cause": "rollout"}; each key may be left out.'

WORKERS = Number(
    "workers", "The number of workers, scale.max at most. 0 ends all warm-ups, with the scope deploy.", 1
)
FOR_S = Number(
    "for_s",
    "Seconds for which they are kept even without calls. More than the default needs the scope deploy.",
    int(WARM_S),
    minimum=1,
    maximum=MAX_WARM_S,
)
WAIT_S = Number(
    "wait_s", "Seconds to wait until they are ready; 503 if they are not then.", 0, maximum=MAX_WAIT_S
)
CAUSE_QUERY = Parameter("cause", "What asks for them, for the function's decisions.", pattern=CAUSE.pattern)


class WarmupRequest(BaseModel, frozen=True, strict=True):
    """The body of a warm-up. Other fields are ignored: a platform's hook sends its own."""

    workers: int | None = Field(None, ge=0, le=1024)
    for_s: int | None = Field(None, ge=1, le=MAX_WARM_S)
    wait_s: int | None = Field(None, ge=0, le=MAX_WAIT_S)
    cause: str | None = None


class WarmupApi:
    """The route of warm-ups. A value in the query takes precedence over the body."""

    def __init__(self, functions: Functions) -> None:
        self._functions = functions

    def routes(self) -> list[Route]:
        return [
            Route(
                "POST", "/v2/{function}/warmup", self.warmup, Scope.INVOKE, "Start workers ahead of calls.",
                {"workers": Workers}, parameters=(WORKERS, FOR_S, WAIT_S, CAUSE_QUERY), body=WarmupRequest,
                body_required=False, errors=(400, 404, 408, 413, 422, 429, 500, 503),
            ),
        ]  # fmt: skip

    async def warmup(self, request: web.Request) -> web.StreamResponse:
        live = self._functions.get(request.match_info["function"])
        sent = await _body_of(request)
        body = validate(WarmupRequest, sent, BODY_REMEDY)
        most = live.record.settings.scale.max
        workers = _number(request, WORKERS, body.workers, most)
        for_s, wait_s = _number(request, FOR_S, body.for_s), _number(request, WAIT_S, body.wait_s)
        cause = _cause_of(request, sent, body)
        if (error := live.function.refusal()) is not None:
            raise error
        if not workers or for_s > WARM_S:
            # Only a caller who may deploy the function may end its warm-ups, or keep workers for longer than WARM_S.
            # The function's owner pays for the workers.
            self._functions.check_owner(caller_of(request), live.record.function)
        if workers:
            live.workers.warm(workers, cause, for_s)
        else:
            live.workers.end_warm_ups()
        if wait_s:
            await live.workers.wait_ready(workers, wait_s)
        return json_response({"workers": live.status().workers.model_dump()})


def _number(request: web.Request, parameter: Number, sent: int | None, most: int | None = None) -> int:
    """Return the parameter's value in the query, else in the body (`sent`), else its default. Raise BadInput if it is
    above `most`.
    """
    if sent is None or parameter.name in request.query:
        return parameter.read(request, most=most)
    if most is not None and sent > most:
        remedy = f"It must be a whole number from 0 to {most}."
        raise BadInput(f"{parameter.name} is {sent}.", remedy=remedy)
    return sent


async def _body_of(request: web.Request) -> dict[str, Any]:
    """Return the body if it is a JSON object. Otherwise return {}, because a hook may send any body. Raise BadInput,
    InputTooLarge.
    """
    kind = media_type_of(request.headers)
    if kind != JSON_TYPE and not kind.endswith("+json"):
        return {}
    found = load_json(await read_body(request, MAX_BODY_BYTES, BODY_TIMEOUT_S, remedy=BODY_REMEDY))
    return found if isinstance(found, dict) else {}


def _cause_of(request: web.Request, event: dict[str, Any], body: WarmupRequest) -> str:
    """Return the cause that the caller names, or the type of the event that a platform sent."""
    sent = request.query.get("cause", body.cause)
    if sent is not None:
        if CAUSE.fullmatch(sent) is None:
            raise BadInput(f"cause is {sent[:80]!r}.", remedy=CAUSE_REMEDY)
        return f"hook {sent}"
    structured = event.get("type") if media_type_of(request.headers) == STRUCTURED_EVENT else None
    kind = request.headers.get(CLOUD_EVENT_TYPE, structured)
    return f"hook {kind}" if isinstance(kind, str) and CAUSE.fullmatch(kind) else "warmup"
