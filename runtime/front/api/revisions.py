"""Serves the routes of a function's revisions: list them, restart the live revision, roll back to an older revision."""

from __future__ import annotations

from aiohttp import web
from pydantic import BaseModel, Field

from ...ground.access.keys import Scope
from ...node.functions.rollouts import Rollouts
from ...node.functions.status import FunctionStatus, RevisionFacts
from ..http.requests import load_json, read_body, validate
from ..http.responses import json_response
from ..http.routes import Route

MAX_ORDER_BYTES = 4096
ORDER_TIMEOUT_S = 10.0
ORDER_REMEDY = 'Send {"revision": "r3"}, or nothing for the one before the live one.'
# Restart and rollback start new workers, so they fail with the errors of a deploy.
ERRORS = (400, 404, 408, 413, 422, 500, 502, 503, 507)


class Rollback(BaseModel, frozen=True, extra="forbid"):
    """The revision to make live again."""

    revision: str | None = Field(
        None, max_length=40, description="Its id or number, as r3. Without it: the one before the live one."
    )


class RevisionsApi:
    """The routes of the revisions of all functions."""

    def __init__(self, rollouts: Rollouts) -> None:
        self._rollouts = rollouts

    def routes(self) -> list[Route]:
        function, deploy = "/v1/functions/{function}", Scope.DEPLOY
        return [
            Route(
                "GET", f"{function}/revisions", self.list, deploy, "List a function's stored revisions.",
                {"revisions": list[RevisionFacts]},
            ),
            Route(
                "POST", f"{function}/restart", self.restart, deploy,
                "Replace a function's processes, once as many new workers are ready.", FunctionStatus,
                errors=ERRORS,
            ),
            Route(
                "POST", f"{function}/reset", self.reset, deploy,
                "Try to start workers again, although the last starts failed.", FunctionStatus,
            ),
            Route(
                "POST", f"{function}/pause", self.pause, deploy,
                "Refuse calls and end all processes, until the function is resumed.", FunctionStatus,
            ),
            Route(
                "POST", f"{function}/resume", self.resume, deploy, "Let a paused function run again.", FunctionStatus,
            ),
            Route(
                "POST", f"{function}/rollback", self.rollback, deploy, "Make an older revision live.",
                FunctionStatus, body=Rollback, body_required=False, errors=ERRORS,
            ),
        ]  # fmt: skip

    async def list(self, request: web.Request) -> web.StreamResponse:
        found = await self._rollouts.stored(request.match_info["function"])
        return json_response({"revisions": [one.model_dump(mode="json") for one in found]})

    async def restart(self, request: web.Request) -> web.StreamResponse:
        live = await self._rollouts.restart(request.match_info["function"])
        return json_response(live.status().model_dump(mode="json"))

    async def reset(self, request: web.Request) -> web.StreamResponse:
        live = self._rollouts.functions.reset(request.match_info["function"])
        return json_response(live.status().model_dump(mode="json"))

    async def pause(self, request: web.Request) -> web.StreamResponse:
        live = await self._rollouts.functions.pause(request.match_info["function"], paused=True)
        return json_response(live.status().model_dump(mode="json"))

    async def resume(self, request: web.Request) -> web.StreamResponse:
        live = await self._rollouts.functions.pause(request.match_info["function"], paused=False)
        return json_response(live.status().model_dump(mode="json"))

    async def rollback(self, request: web.Request) -> web.StreamResponse:
        body = await read_body(request, MAX_ORDER_BYTES, ORDER_TIMEOUT_S)
        order = validate(Rollback, load_json(body) or {}, ORDER_REMEDY)
        live = await self._rollouts.rollback(request.match_info["function"], order.revision)
        return json_response(live.status().model_dump(mode="json"))
