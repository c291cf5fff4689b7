"""CloudEvents at a function's door: each event is a job, its attributes are in `context.extra["event"]`.

They come to `POST /v2/{function}/run`, beside orders in RunPod's spelling; the handshake of webhooks is OPTIONS there.
"""

from __future__ import annotations

import asyncio

import orjson
from aiohttp import web

from ....errors import EventInvalid, PilotflameError
from ...api.requests import request_id_of, traceparent_of
from ...api.responses import error_response
from ...functions.live import Live
from ...functions.registry import Functions
from ...jobs.job import Job, NewJob
from ...jobs.jobs import Jobs
from ...jobs.order import order
from .parsing import ReceivedEvent

ORIGIN, RATE = "WebHook-Request-Origin", "WebHook-Request-Rate"
MAX_ORIGIN_CHARS = 255
MAX_IDS_TOLD = 100


class EventsApi:
    """Routes of CloudEvents beside `run`."""

    def __init__(self, functions: Functions) -> None:
        self._functions = functions

    def routes(self) -> list[web.RouteDef]:
        return [web.options("/v2/{function}/run", self.handshake)]

    async def handshake(self, request: web.Request) -> web.StreamResponse:
        """Whoever wants to send events asks first. Quotas are the API keys', so every rate is allowed here."""
        try:
            self._functions.live(request.match_info["function"])
            headers = _allowed(request.headers.get(ORIGIN, ""), request.headers.get(RATE))
        except PilotflameError as error:
            return error_response(error, request_id_of(request.headers))
        return web.Response(headers={"Allow": "POST, OPTIONS", **headers})


def _allowed(origin: str, rate: str | None) -> dict[str, str]:
    if not origin or len(origin) > MAX_ORIGIN_CHARS or not origin.isprintable() or not origin.isascii():
        raise EventInvalid(
            f"The header {ORIGIN} names nobody.", remedy="Send the name of the system that will send events."
        )
    if rate is not None and (not rate.isascii() or not rate.isdecimal() or int(rate[:20]) < 1):
        raise EventInvalid(
            f"The header {RATE} is {rate[:40]!r}.", remedy="It must be a whole number of requests a minute."
        )
    return {"WebHook-Allowed-Origin": origin, "WebHook-Allowed-Rate": "*"}


async def submit(
    jobs: Jobs, live: Live, events: list[ReceivedEvent], *, owner: str
) -> list[tuple[Job, bool]]:
    """A job for each event, and whether it was there before; all are on the disk on return.

    If one is refused that is raised, though others may have been accepted: whoever sends all of them again gets the
    same jobs.
    """
    new = [new_job(live, event, owner=owner) for event in events]
    try:
        async with asyncio.TaskGroup() as tasks:
            pending = [tasks.create_task(jobs.submit(one)) for one in new]
    except* PilotflameError as refused:
        raise _first(refused) from None
    return [one.result() for one in pending]


def new_job(live: Live, event: ReceivedEvent, *, owner: str) -> NewJob:
    """A job for a live function, whose input is the event's data."""
    attributes = event.attributes
    return order(
        live.record.settings,
        event.data,
        content_type=event.content_type,
        owner=owner,
        idempotency=event.idempotency,
        traceparent=traceparent_of({"traceparent": str(attributes.get("traceparent", ""))}),
        extra={"event": dict(attributes)},
    )


def accepted(request: web.Request, found: list[tuple[Job, bool]]) -> web.Response:
    """202 with the ids. Nothing but headers for who takes a body for an event in reply, as Knative's broker does."""
    ids = [job.id for job, _ in found]
    headers = {"X-Job-Id": ",".join(ids[:MAX_IDS_TOLD])} if ids else {}
    if found and all(replayed for _, replayed in found):
        headers["Idempotent-Replayed"] = "true"
    if "reply" in (part.strip().lower() for part in request.headers.get("Prefer", "").split(",")):
        return web.Response(status=202, headers=headers)
    told = [{"id": job.id, "status": str(job.state)} for job, _ in found]
    body = {"jobs": told, **(told[0] if len(told) == 1 else {})}
    return web.Response(body=orjson.dumps(body), status=202, headers=headers, content_type="application/json")


def _first(group: BaseExceptionGroup[PilotflameError]) -> PilotflameError:
    found = group.exceptions[0]
    return _first(found) if isinstance(found, BaseExceptionGroup) else found
