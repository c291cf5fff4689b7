"""The routes of a function's webhooks: what became of each delivery, sending one again, and how they are signed."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

import orjson
from aiohttp import web

from ...errors import BadInput
from ..functions.registry import Functions
from ..jobs.jobs import Jobs
from ..jobs.webhook_delivery import Delivery, DeliveryState
from .responses import typed

DEFAULT_LISTED, MAX_LISTED = 100, 1000


class WebhooksApi:
    """Routes of deliveries below /v1/functions/{function}/webhooks."""

    def __init__(self, functions: Functions, jobs: Jobs) -> None:
        self._functions = functions
        self._jobs = jobs

    def routes(self) -> list[web.RouteDef]:
        base = "/v1/functions/{function}/webhooks"
        return [
            web.get(base, typed(self.list)),
            web.get(f"{base}/secret", typed(self.secret)),
            web.post(f"{base}/{{delivery}}/redeliver", typed(self.redeliver)),
        ]

    async def list(self, request: web.Request) -> web.StreamResponse:
        """The newest first; `?job=` an id, `?state=`, as often as one likes, `?limit=`."""
        function, query = request.match_info["function"], request.query
        found = await self._jobs.deliveries(
            function, job_id=query.get("job", ""), states=_states(request), limit=_limit(request)
        )
        if not found:  # of a function that was deleted, those that are left can be looked up
            self._functions.get(function)
        return _json({"deliveries": [shown(delivery) for delivery in found]})

    async def secret(self, request: web.Request) -> web.StreamResponse:
        """What the function's receivers verify signatures with, after Standard Webhooks."""
        function = request.match_info["function"]
        self._functions.get(function)
        response = _json({"function": function, "secret": self._jobs.webhook_secret(function)})
        response.headers["Cache-Control"] = "no-store"
        return response

    async def redeliver(self, request: web.Request) -> web.StreamResponse:
        """Also of a function that was deleted: who was to be told may still want to know."""
        function, delivery_id = request.match_info["function"], request.match_info["delivery"]
        return _json(shown(await self._jobs.redeliver(function, delivery_id)))


def shown(delivery: Delivery) -> dict[str, Any]:
    """A delivery as it may be shown: of its URL only what is no secret."""
    pending = delivery.state is DeliveryState.PENDING
    return {
        "id": delivery.id,
        "job_id": delivery.job_id,
        "event": delivery.event,
        "url": bare(delivery.url),
        "state": str(delivery.state),
        "attempts": delivery.attempts,
        "next_at": _moment(delivery.next_s) if pending else None,
        "created_at": _moment(delivery.created_s),
        "last_status": delivery.last_status or None,
        "last_error": delivery.last_error,
        "log": [
            {"at": _moment(tried.at_s), "status": tried.status or None, "error": tried.error, "ms": tried.ms}
            for tried in delivery.log
        ],
    }


def bare(url: str) -> str:
    """A URL without user, password, query and fragment: receivers are given their secrets there."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _states(request: web.Request) -> list[DeliveryState]:
    try:
        return [DeliveryState(text.upper()) for text in request.query.getall("state", [])]
    except ValueError as error:
        raise BadInput(f"{error}.", remedy=f"One of {', '.join(DeliveryState)}.") from None


def _limit(request: web.Request) -> int:
    text = request.query.get("limit", str(DEFAULT_LISTED))
    if not (text.isascii() and text.isdecimal()) or len(text) > 9 or int(text) < 1:
        raise BadInput(f"limit is {text[:40]!r}.", remedy="It must be a whole number, at least 1.")
    return min(int(text), MAX_LISTED)


def _moment(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _json(body: dict[str, Any]) -> web.Response:
    return web.Response(body=orjson.dumps(body), content_type="application/json")
