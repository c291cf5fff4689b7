"""The gateway: `POST /invoke/{function}`. Translates HTTP to invocations and back; owns nothing."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping

import orjson
from aiohttp import web

from ...errors import PilotlightError
from ..access.caller import caller_of
from ..functions import Functions
from ..invocation import Invocation
from ..metrics import Metrics
from ..revision import Revision
from .answer import EVENT_STREAM_TYPE, HEARTBEAT_S, Reply, error_reply, error_response, event
from .deadline import priority_of, timeout_of
from .intake import accept_of, content_type_of, read_body, request_id_of, seconds, traceparent_of

MAX_HOLD_S = 3600.0


class Gateway:
    """Routes of invocations."""

    def __init__(
        self,
        functions: Functions,
        metrics: Metrics,
        later: Callable[[web.Request], Awaitable[web.StreamResponse]],
        *,
        max_body_bytes: int,
        body_timeout_s: float,
    ) -> None:
        """`later` answers a caller who prefers not to wait."""
        self._later = later
        self._functions = functions
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes
        self._body_timeout_s = body_timeout_s

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/invoke/{function}", self.invoke)]

    async def invoke(self, request: web.Request) -> web.StreamResponse:
        """Body in, body out."""
        if "respond-async" in request.headers.get("Prefer", ""):
            return await self._later(request)
        received_s = time.monotonic()
        name = request.match_info["function"]
        request_id = request_id_of(request.headers)
        try:
            revision = self._functions.live(name)
        except PilotlightError as error:  # not counted by name: anybody can make names up
            return error_response(error, request_id)
        try:
            body = await read_body(request, self.most(revision), self._body_timeout_s)
            tenant = caller_of(request).owner
            revision, invocation = self.begin(name, request.headers, request_id, body, received_s, tenant)
        except PilotlightError as error:
            return self.refused(name, error, request_id).response()
        try:
            if invocation.stream is not None:
                return await self._stream(request, name, invocation)
            with contextlib.suppress(PilotlightError):
                await invocation.answer
        except (
            asyncio.CancelledError,
            ConnectionError,
        ):  # the caller has gone, noticed by reading or by writing
            revision.cancel(invocation)
            raise
        return self.answered(name, invocation).response()

    def most(self, revision: Revision) -> int:
        """How many bytes a body for it may have."""
        return min(self._max_body_bytes, revision.policy.max_body_bytes)

    def begin(
        self,
        name: str,
        headers: Mapping[str, str],
        request_id: str,
        body: bytes,
        received_s: float,
        tenant: str,
    ) -> tuple[Revision, Invocation]:
        """Makes an invocation of a request, and hands it on. Raises what `refused` then tells the caller."""
        revision = self._functions.live(name)  # another one may have become live while the body came
        invocation = _invocation(headers, revision, request_id, body, received_s, tenant)
        revision.submit(invocation)
        return revision, invocation

    def refused(self, name: str, error: PilotlightError, request_id: str) -> Reply:
        """What its caller is told of a request that `begin` did not take."""
        self._metrics.refused(name, error.status)
        return error_reply(error, request_id)

    def answered(self, name: str, invocation: Invocation) -> Reply:
        """What its caller is told of an invocation that has ended."""
        error = invocation.answer.exception()
        invocation.timeline.responded_s = time.monotonic()
        if isinstance(error, PilotlightError):
            self._note(name, error.status, invocation)
            return error_reply(error, invocation.id, _headers(invocation))
        self._note(name, 200, invocation)
        answer = invocation.answer.result()
        return Reply(200, {**_headers(invocation), "Content-Type": answer.content_type}, answer.payload)

    async def _stream(self, request: web.Request, name: str, invocation: Invocation) -> web.StreamResponse:
        """Server-sent events: `output` for each piece, then `completed` or `error`."""
        response: web.StreamResponse | None = None
        stream, number = invocation.stream, 0
        if stream is None:
            raise TypeError("not a streamed invocation")
        while True:
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    piece = await stream.get()
            except TimeoutError:
                response = response or await _open_stream(request, invocation)
                await response.write(b": waiting\n\n")
                continue
            if piece is None:
                break
            response = response or await _open_stream(request, invocation)
            number += 1
            await response.write(event("output", piece, number))
        error = invocation.answer.exception()
        invocation.timeline.responded_s = time.monotonic()
        status = error.status if isinstance(error, PilotlightError) else 200
        self._note(name, status, invocation)
        if isinstance(error, PilotlightError) and response is None:
            return error_response(error, invocation.id, _headers(invocation))
        response = response or await _open_stream(request, invocation)
        await response.write(_last_event(error, number + 1))
        await response.write_eof()
        return response

    def _note(self, name: str, status: int, invocation: Invocation) -> None:
        self._metrics.answered(name, status, invocation.timeline)
        if invocation.timeline.cold:
            self._functions.note_cold(name, invocation.timeline)


def _invocation(
    headers: Mapping[str, str],
    revision: Revision,
    request_id: str,
    body: bytes,
    received_s: float,
    tenant: str,
) -> Invocation:
    policy = revision.policy
    timeout_s = timeout_of(headers, policy.timeout_s)
    hold_s = seconds(headers, "X-Scale-Up-Timeout", policy.hold_s, MAX_HOLD_S)
    return Invocation(
        request_id,
        body,
        now_s=received_s,
        deadline_s=received_s + timeout_s,
        hold_until_s=received_s + hold_s,
        content_type=content_type_of(headers),
        traceparent=traceparent_of(headers),
        streaming=revision.streaming,
        tenant=tenant,
        priority=priority_of(headers),
        accept=accept_of(headers),
    )


def _headers(invocation: Invocation) -> dict[str, str]:
    headers = {
        "X-Request-Id": invocation.id,
        "X-Worker-Id": invocation.worker,
        "X-Cold-Start": "true" if invocation.timeline.cold else "false",
        "Server-Timing": invocation.timeline.server_timing(),
    }
    if invocation.traceparent:
        headers["traceparent"] = invocation.traceparent
    return headers


async def _open_stream(request: web.Request, invocation: Invocation) -> web.StreamResponse:
    """Sends the head of an event stream. Its Server-Timing ends where the first piece left."""
    headers = _headers(invocation) | {"Content-Type": EVENT_STREAM_TYPE, "Cache-Control": "no-store"}
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    return response


def _last_event(error: BaseException | None, number: int) -> bytes:
    if isinstance(error, PilotlightError):
        return event("error", orjson.dumps(error.to_wire()), number)
    return event("completed", b"{}", number)
