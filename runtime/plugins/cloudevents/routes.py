"""Serves the routes of CloudEvents. A handler reads the attributes of an event in `context.extra`.

On `/v2/{function}/run`, each event becomes a job. On `/invoke/{function}`, the response to an event holds the
output. With OPTIONS, a sender of HTTP webhooks asks for permission before it sends events.
"""

from __future__ import annotations

import time
from typing import Any

from aiohttp import web

from ....errors import EventInvalid, OutputInvalid, PilotflameError, UnsupportedMedia
from ....handlers.codec import JSON_TYPE
from ...front.api.backend import ASYNC_BODY_BYTES, Accepted, Backend, Submitted
from ...front.api.invoke import Invoker
from ...front.api.plugin import ApiPlugin
from ...front.http.call_group import CallGroup
from ...front.http.guard import count_calls
from ...front.http.parsed_bodies import parsed
from ...front.http.requests import caller_of, preferences_of, request_id_of, traceparent_of
from ...front.http.responses import error_reply, json_response
from ...front.http.routes import INVOKE_PATH, Route, header
from ...ground.access.keys import Scope
from ...jobs.stored.job import JobState
from ...node.functions.live import Live
from .parsing import BATCHED, STRUCTURED, CloudEvent, ReceivedEvent, is_event, parse
from .reply import reply, wants_reply

ORIGIN, RATE = "WebHook-Request-Origin", "WebHook-Request-Rate"
MAX_ORIGIN_CHARS = 255
MAX_HEADER_IDS = 100
EVENTS_AT_ONCE = 64
"""The most events of a batch that are stored in one commit. Between two commits, jobs of other callers are stored."""
RUN = "/v2/{function}/run"


class EventsApi(ApiPlugin):
    """The routes of CloudEvents."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self._backend = backend
        self._invoker = Invoker(backend)

    def routes(self) -> list[Route]:
        return [
            Route(
                "POST", RUN, self.submit, Scope.INVOKE, "Submit a job for each CloudEvent.",
                {"jobs": list[Accepted], "id?": str, "status?": JobState}, 202, accepts=is_event,
                body={STRUCTURED: CloudEvent, BATCHED: list[CloudEvent]},
                errors=(400, 404, 408, 409, 413, 415, 422, 503),
            ),
            Route(
                "POST", INVOKE_PATH, self.invoke, Scope.INVOKE, "Call the function with a CloudEvent.",
                {JSON_TYPE: Any, STRUCTURED: CloudEvent}, accepts=is_event, body={STRUCTURED: CloudEvent},
                other_responses={204: None}, body_required=False,
                errors=(400, 408, 413, 415, 422, 429, 500, 503, 504),
            ),
            *(
                Route(
                    "OPTIONS", path, self.handshake, Scope.INVOKE, "Ask whether events may be sent.",
                    parameters=(header(ORIGIN, required=True),),
                )
                for path in (RUN, INVOKE_PATH)
            ),
        ]  # fmt: skip

    async def handshake(self, request: web.Request) -> web.StreamResponse:
        """Allow the sender to send events at any rate, because only the quotas of API keys limit rates."""
        self._backend.functions.live(request.match_info["function"])
        origin, rate = request.headers.get(ORIGIN, ""), request.headers.get(RATE)
        if not origin or len(origin) > MAX_ORIGIN_CHARS or not origin.isprintable() or not origin.isascii():
            remedy = "Send the name of the system that will send events."
            raise EventInvalid(f"The header {ORIGIN} is missing or invalid.", remedy=remedy)
        if rate is not None and (not rate.isascii() or not rate.isdecimal() or int(rate[:20]) < 1):
            remedy = "It must be a whole number of requests a minute."
            raise EventInvalid(f"The header {RATE} is {rate[:40]!r}.", remedy=remedy)
        allowed = {"WebHook-Allowed-Origin": origin, "WebHook-Allowed-Rate": "*"}
        return web.Response(headers={"Allow": "POST, OPTIONS", **allowed})

    async def invoke(self, request: web.Request) -> web.StreamResponse:
        """Call the function with one event. Respond with the output, as an event if the caller asks for an event."""
        if "respond-async" in preferences_of(request):
            return await self.submit(request)
        received_s, name, invoker = time.monotonic(), request.match_info["function"], self._invoker
        request_id = request_id_of(request.headers)
        # Raise UnknownFunction here, before `refused` counts errors by function: invented names would add metrics
        # without limit.
        self._backend.functions.live(name)
        try:
            _, body = await self._backend.read_body(request, name)
            event = _single(await self._events(request, body))
            revision, invocation = invoker.begin(
                name, request.headers, request_id, event.data, received_s, caller_of(request),
                content_type=event.content_type, extra={"bare": True, "event": dict(event.attributes)},
            )  # fmt: skip
        except PilotflameError as error:
            return invoker.refused(name, error, request_id, caller_of(request)).response()
        response = await invoker.finish(request, name, revision, invocation)
        if response.status != 200 or not isinstance(response, web.Response) or not wants_reply(request):
            return response
        try:
            return await reply(request, event, response)
        except OutputInvalid as error:
            return error_reply(error, request_id).response()

    async def submit(self, request: web.Request) -> web.StreamResponse:
        """Submit a job for each event, and respond once all jobs are stored.

        If a job is refused, respond with its error. Then the sender can repeat the request: events that already have a
        stored job get no new job.
        """
        name = request.match_info["function"]
        live, body = await self._backend.read_body(request, name, ASYNC_BODY_BYTES)
        events = await self._events(request, body)
        count_calls(request, len(events))
        found = list[Submitted]()
        for first in range(0, len(events), EVENTS_AT_ONCE):
            found += await self._submit_events(request, live, events[first : first + EVENTS_AT_ONCE])
        return _accepted(request, found)

    async def _events(self, request: web.Request, body: bytes) -> list[ReceivedEvent]:
        return await parsed(request, body, lambda body: parse(request.headers, body))

    async def _submit_events(
        self, request: web.Request, live: Live, events: list[ReceivedEvent]
    ) -> list[Submitted]:
        async with CallGroup() as tasks:
            pending = [tasks.create_task(self._submit_event(request, live, event)) for event in events]
        return [one.result() for one in pending]

    async def _submit_event(self, request: web.Request, live: Live, event: ReceivedEvent) -> Submitted:
        traceparent = traceparent_of({"traceparent": str(event.attributes.get("traceparent", ""))})
        return await self._backend.submit(
            request, live, event.data, content_type=event.content_type, idempotency=event.idempotency,
            traceparent=traceparent, extra={"event": dict(event.attributes)},
        )  # fmt: skip


def _single(events: list[ReceivedEvent]) -> ReceivedEvent:
    if len(events) == 1:
        return events[0]
    message = f"One request to /invoke takes one event, not {len(events)}."
    raise UnsupportedMedia(
        message, remedy="Send batches to /v2/{function}/run, which makes each event a job."
    )


def _accepted(request: web.Request, found: list[Submitted]) -> web.Response:
    """Return the response, with the ids of the jobs in its body and in the header X-Job-Id.

    With `Prefer: reply`, the body is empty, because a sender such as Knative's broker would take a body for an event.
    """
    ids = [job.id for job, _ in found]
    headers = {"X-Job-Id": ",".join(ids[:MAX_HEADER_IDS])} if ids else {}
    if found and all(replayed for _, replayed in found):
        headers |= found[0][1]
    if "reply" in preferences_of(request):
        return web.Response(status=202, headers=headers)
    jobs = [Accepted(id=job.id, status=job.state) for job, _ in found]
    single = dict(jobs[0]) if len(jobs) == 1 else {}
    return json_response({"jobs": jobs, **single}, status=202, headers=headers)
