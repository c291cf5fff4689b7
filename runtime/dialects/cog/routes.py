"""The predictions' routes, in Cog's spelling: jobs that the caller waits for, unless he prefers not to.

Where Cog refuses what exceeds its slots (409), here it waits in the queue. A failure is data: 200 with status `failed`;
only an input that does not fit the handler is an error (422) to who waits.
"""

from __future__ import annotations

import asyncio
import contextlib

import orjson
from aiohttp import web

from ...._version import __version__
from ....errors import GatewayError, InputInvalid, PilotflameError, UnknownFunction, UnknownJob
from ...access.caller import caller_of
from ...access.keys import Scope
from ...api.requests import Limits, idempotency_of, read_body, too_large, traceparent_of
from ...api.responses import EVENT_STREAM_TYPE, HEARTBEAT_S, event, typed
from ...functions.live import Live
from ...functions.registry import Functions
from ...jobs import queries
from ...jobs.identity import GENERATED
from ...jobs.job import Job, JobState, NewJob, Webhook
from ...jobs.jobs import Jobs
from ...jobs.order import order
from .prediction import ID, PredictionRequest, Preference, chosen_id, parse, shown, stored_id

FUNCTION = "X-Pilotflame-Function"
ASYNC_BODY_BYTES = 10 << 20
MAX_CHOICES = 50
PIECES_SHOWN = 1000
NOT_THE_HANDLERS_FAULT = frozenset({"bad_json", "input_invalid"})


class Predictions:
    """Routes of predictions."""

    def __init__(self, functions: Functions, jobs: Jobs, limits: Limits) -> None:
        self._functions = functions
        self._jobs = jobs
        self._limits = limits

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/predictions", typed(self.create)),
            web.put("/predictions/{id}", typed(self.create)),
            web.get("/predictions/{id}", typed(self.look)),
            web.post("/predictions/{id}/cancel", typed(self.cancel)),
            web.get("/health-check", typed(self.health)),
        ]

    async def create(self, request: web.Request) -> web.StreamResponse:
        """Without an id in the path, each request is a new prediction; with one (or with an Idempotency-Key) the same."""
        preference = Preference.of(request.headers.getall("Prefer", ()))
        most, timeout_s = self._limits
        most = most if preference.wait_s is None else min(most, ASYNC_BODY_BYTES)
        body = await read_body(request, most, timeout_s)
        order = parse(body)
        wanted = _wanted(order, request.match_info.get("id"))
        live = self._live(request, order.version)
        if len(body) > live.revision.policy.max_body_bytes:
            raise too_large(live.revision.policy.max_body_bytes)
        job, replayed = await self._jobs.submit(_new_job(request, live, order, wanted))
        if _wants_events(request):
            return await self._events(request, job)
        if preference.wait_s is None:
            job = await self._ended(job, live, replayed=replayed)
            _refuse_input(job)
        elif preference.wait_s:
            job = await self._jobs.wait(job.function, job.id, preference.wait_s)
        headers = {"Idempotent-Replayed": "true"} if replayed else {}
        waited = preference.wait_s != 0 and job.state.final
        return await self._shown(job, 200 if waited else 202, headers)

    async def look(self, request: web.Request) -> web.StreamResponse:
        job = await self._job(request)
        return await (self._events(request, job) if _wants_events(request) else self._shown(job))

    async def cancel(self, request: web.Request) -> web.StreamResponse:
        job = await self._job(request)
        return await self._shown(await self._jobs.cancel(job.function, job.id))

    async def health(self, request: web.Request) -> web.StreamResponse:
        """Of the function that is named, or of all. One with no worker is READY: a prediction starts it."""
        named = _named(request)
        found = {name: self._health(name) for name in ([named] if named else self._names(request))}
        if named:
            caller_of(request).check(named)
            self._known(named)
        order = ("READY", "BUSY", "STARTING", "SETUP_FAILED", "DEFUNCT")
        status = min(found.values(), key=order.index, default="READY")
        body = {"status": status, "version": {"pilotflame": __version__}, "functions": found}
        return web.Response(body=orjson.dumps(body), content_type="application/json")

    def _health(self, name: str) -> str:
        try:
            revision = self._functions.live(name)
        except (UnknownFunction, GatewayError):
            return "DEFUNCT"
        census, scale = revision.census(), revision.policy.scale
        if not census.ready and revision.failures:
            return "SETUP_FAILED"
        if not census.ready and census.starting:
            return "STARTING"
        return "BUSY" if census.in_flight >= scale.max * scale.concurrency else "READY"

    # -- a prediction's end

    async def _ended(self, job: Job, live: Live, *, replayed: bool) -> Job:
        """Whoever waits and goes away takes his prediction with him; not one that somebody else had asked for."""
        policy = live.revision.policy
        try:
            return await self._jobs.wait(job.function, job.id, policy.hold_s + policy.timeout_s)
        except (asyncio.CancelledError, ConnectionError):
            if not replayed:
                with contextlib.suppress(PilotflameError):  # there is nobody left to be told
                    await self._jobs.cancel(job.function, job.id)
            raise

    async def _events(self, request: web.Request, job: Job) -> web.StreamResponse:
        """Server-sent events: `start`, `output` for each piece, `log`, `completed`; `error` if they break off."""
        last = request.headers.get("Last-Event-ID", "0")
        sent = int(last) if last.isascii() and last.isdecimal() and len(last) < 10 else 0
        response = web.StreamResponse(
            headers={"Content-Type": EVENT_STREAM_TYPE, "Cache-Control": "no-store", "X-Job-Id": job.id}
        )
        await response.prepare(request)
        try:
            await self._tell(response, job, sent)
        except PilotflameError as error:  # the head is gone: it can only be told as an event
            await response.write(event("error", orjson.dumps(error.to_wire())))
        await response.write_eof()
        return response

    async def _tell(self, response: web.StreamResponse, job: Job, sent: int) -> None:
        started, pieces = False, 0
        async for job, news in self._jobs.follow(job.function, job.id, sent, every_s=HEARTBEAT_S):  # noqa: B020, PLR1704  as it is by now
            if not started and job.started_s:
                started = True
                await response.write(
                    event("start", orjson.dumps({"id": chosen_id(job), "status": "processing"}))
                )
            for number, piece in news:
                pieces = number
                chunk = {"chunk": orjson.Fragment(piece), "index": number - 1}
                await response.write(event("output", orjson.dumps(chunk), number))
            if not news and not job.state.final:
                await response.write(b": waiting\n\n")
        whole = shown(job)
        if job.state is JobState.COMPLETED and not pieces and not job.pieces:
            await response.write(event("output", orjson.dumps({"chunk": whole["output"], "index": 0})))
        if job.logs:
            await response.write(event("log", orjson.dumps({"source": "stdout", "data": job.logs})))
        await response.write(event("completed", orjson.dumps(whole)))

    async def _shown(
        self, job: Job, status: int = 200, headers: dict[str, str] | None = None
    ) -> web.Response:
        pieces: list[bytes] = []
        if job.pieces and not job.state.final:
            pieces = [piece for _, piece in await self._jobs.store.pieces(job.id, 0, PIECES_SHOWN)]
        return web.Response(
            body=orjson.dumps(shown(job, pieces)), status=status,
            headers={"X-Job-Id": job.id, **(headers or {})}, content_type="application/json",
        )  # fmt: skip

    # -- which function, which job

    def _names(self, request: web.Request) -> list[str]:
        caller = caller_of(request)
        names = (live.record.function for live in self._functions.all())
        return [name for name in names if caller.allows(name)]

    def _known(self, name: str) -> None:
        if all(live.record.function != name for live in self._functions.all()):
            raise UnknownFunction.named(name)

    def _live(self, request: web.Request, version: str | None) -> Live:
        """The function that is named in the header, the query or as `version`; else the only one."""
        if named := _named(request) or version:
            caller_of(request).check(named)
            return self._functions.get(named)
        names = self._names(request)
        if not names:
            raise UnknownFunction("There is no function to predict with.", remedy="Deploy one.")
        if len(names) > 1:
            raise InputInvalid(
                f"There are {len(names)} functions, and the prediction names none of them.",
                remedy=f'Say which: "version" in the body, ?function= or {FUNCTION}.',
                details={"functions": names[:MAX_CHOICES]},
            )
        return self._functions.get(names[0])

    async def _job(self, request: web.Request) -> Job:
        """Of a function that was deleted, too: what it did can be looked up."""
        caller, job_id = caller_of(request), request.match_info["id"]
        names = self._names(request)
        try:
            job = await self._jobs.find(stored_id(job_id, caller.owner), caller.allows, names)
        except UnknownJob:  # one whose id we made, or one of before there were keys
            job = await self._jobs.find(job_id, caller.allows, names)
        # An id that somebody chose can be guessed, so what it names is shown to whoever chose it.
        others = job.owner not in ("", caller.owner) and not job.id.startswith(GENERATED)
        if others and Scope.ADMIN not in caller.scopes:
            raise queries.unknown(job_id)
        return job


def _named(request: web.Request) -> str:
    return request.headers.get(FUNCTION, "") or request.query.get("function", "")


def _wanted(order: PredictionRequest, path_id: str | None) -> str:
    """The id that the caller chose; "" if he did not."""
    if path_id is not None and order.id not in (None, path_id):
        raise InputInvalid(
            "The id in the body is not the one in the path.", remedy="Leave it out of the body."
        )
    wanted = path_id or order.id or ""
    if wanted and not ID.fullmatch(wanted):
        raise InputInvalid(
            f"{wanted[:128]!r} cannot be a prediction's id.",
            remedy="Use 1 to 128 of A-Z a-z 0-9 . _ ~ and -, not job- at first.",
        )
    return wanted


def _new_job(request: web.Request, live: Live, given: PredictionRequest, wanted: str) -> NewJob:
    owner = caller_of(request).owner
    return order(
        live.record.settings,
        given.input_json(),
        owner=owner,
        webhook=Webhook(given.webhook, given.events) if given.webhook else None,
        idempotency=f"prediction:{wanted}" if wanted else idempotency_of(request.headers),
        wanted_id=stored_id(wanted, owner),
        traceparent=traceparent_of(request.headers),
    )


def _refuse_input(job: Job) -> None:
    """Raises what the handler said of an input that does not fit it."""
    if (
        job.state is JobState.FAILED
        and job.error is not None
        and job.error.get("type") in NOT_THE_HANDLERS_FAULT
    ):
        raise PilotflameError.from_wire(dict(job.error))


def _wants_events(request: web.Request) -> bool:
    return EVENT_STREAM_TYPE in request.headers.get("Accept", "")
