"""Serves the routes of webhooks: list deliveries, send one again, return the secret that signs them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlsplit

from aiohttp import web
from pydantic import StringConstraints, with_config
from typing_extensions import TypedDict

from ...ground.access.keys import Scope
from ...jobs.stored.jobs import Jobs
from ...jobs.webhooks.delivery import JOB as JOB_SUBJECT
from ...jobs.webhooks.delivery import Delivery, DeliveryState
from ...node.functions.registry import Functions
from ..http.requests import owner_of
from ..http.responses import Timestamp, json_response, timestamp
from ..http.routes import Choices, Number, Parameter, Route

MAX_LISTED = 1000
JOB = Parameter("job", "Only deliveries of this job.")
STATE = Choices("state", "Only deliveries in these states.", DeliveryState)
LIMIT = Number("limit", f"The largest number of deliveries, {MAX_LISTED} at most.", 100, minimum=1)
SigningSecret = Annotated[str, StringConstraints(pattern="^whsec_")]


class ShownAttempt(TypedDict):
    """One request to the receiver."""

    at: Timestamp
    status: int | None
    error: str
    ms: int


@with_config(title="Delivery")
class ShownDelivery(TypedDict):
    """A delivery in the list. Its URL is shown without the parts that may be secret."""

    id: str
    subject: str
    """`job:ID`, or `alert:FUNCTION:CONDITION`."""
    job_id: str
    """"" for an alert."""
    event: str
    url: str
    state: DeliveryState
    attempts: int
    next_at: Timestamp | None
    created_at: Timestamp
    last_status: int | None
    last_error: str
    log: list[ShownAttempt]


@dataclass(frozen=True, slots=True)
class WebhooksApi:
    """The routes below /v1/functions/{function}/webhooks."""

    functions: Functions
    jobs: Jobs

    def routes(self) -> list[Route]:
        base, deploy = "/v1/functions/{function}/webhooks", Scope.DEPLOY
        again, secret = f"{base}/{{delivery}}/redeliver", f"{base}/secret"
        listing, signing = {"deliveries": list[ShownDelivery]}, {"function": str, "secret": SigningSecret}
        summary, of = "List deliveries, newest first.", (JOB, STATE, LIMIT)
        return [
            Route("GET", base, self.list, deploy, summary, listing, parameters=of),
            Route("GET", secret, self.secret, deploy, "Return the secret that signs the webhooks.", signing),
            Route("POST", again, self.redeliver, deploy, "Send a delivery again.", ShownDelivery),
        ]

    async def list(self, request: web.Request) -> web.StreamResponse:
        function, job_id = request.match_info["function"], request.query.get("job", "")
        limit = min(LIMIT.read(request), MAX_LISTED)
        states, owner = STATE.read(request), owner_of(request)
        found = await self.jobs.store.deliveries(
            function, states, JOB_SUBJECT + job_id if job_id else "", limit, owner
        )
        # Raise UnknownFunction only if nothing is found, because the deliveries of a deleted function can still be
        # listed.
        if not found:
            self.functions.get(function)
        return json_response({"deliveries": [shown(delivery) for delivery in found]})

    async def secret(self, request: web.Request) -> web.StreamResponse:
        function = request.match_info["function"]
        self.functions.get(function)
        signing = {"function": function, "secret": self.jobs.key.of(function).secret}
        return json_response(signing, no_store=True)

    async def redeliver(self, request: web.Request) -> web.StreamResponse:
        function, delivery_id = request.match_info["function"], request.match_info["delivery"]
        delivery = await self.jobs.store.redeliver(function, delivery_id, owner_of(request))
        return json_response(shown(delivery))


def shown(delivery: Delivery) -> ShownDelivery:
    return {
        "id": delivery.id,
        "subject": delivery.subject,
        "job_id": delivery.job_id,
        "event": delivery.event,
        "url": public_url(delivery.url),
        "state": delivery.state,
        "attempts": delivery.attempts,
        "next_at": timestamp(delivery.next_s) if delivery.state is DeliveryState.PENDING else None,
        "created_at": timestamp(delivery.created_s),
        "last_status": delivery.last_status or None,
        "last_error": delivery.last_error,
        "log": [
            {"at": timestamp(one.at_s), "status": one.status or None, "error": one.error, "ms": one.ms}
            for one in delivery.log
        ],
    }


def public_url(url: str) -> str:
    """Return the URL without user, password, query and fragment, which may hold the receiver's secrets."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
