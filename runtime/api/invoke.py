"""The gateway: `POST /invoke/{function}`. Translates HTTP to invocations and back; owns nothing."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web
from multidict import istr

from ...errors import DeadlineExceeded, PilotflameError
from ..access.caller import Caller, caller_of
from ..functions.registry import Functions
from ..serving.invocation import Invocation, Stream
from ..serving.revision import Revision
from ..telemetry.metrics import Metrics
from .deadline import priority_of, timeout_of
from .event_stream import LAST_WORD_S, EventStream
from .requests import accept_of, content_type_of, read_body, request_id_of, seconds, traceparent_of
from .responses import Response, error_reply, error_response

HOLD = istr("X-Scale-Up-Timeout")
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
        except PilotflameError as error:  # not counted by name: anybody can make names up
            return error_response(error, request_id)
        try:
            body = await read_body(request, self.most(revision), self._body_timeout_s)
            caller = caller_of(request)
            revision, invocation = self.begin(name, request.headers, request_id, body, received_s, caller)
        except PilotflameError as error:
            return self.refused(name, error, request_id).response()
        try:
            if invocation.stream is not None:
                return await self._stream(request, name, invocation, invocation.stream)
            with contextlib.suppress(PilotflameError):
                await invocation.output
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
        caller: Caller,
        on_end: Callable[[], None] | None = None,
    ) -> tuple[Revision, Invocation]:
        """Makes an invocation of a request, and hands it on. Raises what `refused` then tells the caller."""
        revision = self._functions.live(name)  # another one may have become live while the body came
        invocation = _invocation(headers, revision, request_id, body, received_s, caller, on_end)
        revision.submit(invocation)
        return revision, invocation

    def refused(self, name: str, error: PilotflameError, request_id: str) -> Response:
        """What its caller is told of a request that `begin` did not take."""
        self._metrics.refused(name, error)
        return error_reply(error, request_id)

    def answered(self, name: str, invocation: Invocation) -> Response:
        """What its caller is told of an invocation that has ended."""
        error = invocation.output.exception()
        invocation.timeline.mark_responded(time.monotonic())
        if isinstance(error, PilotflameError):
            self._note(name, error.status, invocation, error)
            return error_reply(error, invocation.id, _headers(invocation))
        self._note(name, 200, invocation)
        answer = invocation.output.result()
        return Response(200, {**_headers(invocation), "Content-Type": answer.content_type}, answer.payload)

    async def _stream(
        self, request: web.Request, name: str, invocation: Invocation, stream: Stream
    ) -> web.StreamResponse:
        """The deadline ends it, even if the reader does not read: then the connection is closed, whatever it holds."""
        events = EventStream(request, invocation, _headers)
        left_s = max(0.0, invocation.deadline_s - time.monotonic())
        try:
            async with asyncio.timeout(left_s + LAST_WORD_S):
                await events.send_pieces(stream)
                error = _error_of(invocation)
                invocation.timeline.mark_responded(time.monotonic())
                self._note(name, error.status if error is not None else 200, invocation, error)
                if error is not None and events.response is None:
                    return error_response(error, invocation.id, _headers(invocation))
                return await events.end(error)
        except TimeoutError:
            events.hang_up()
            if not invocation.timeline.responded_s:
                invocation.timeline.mark_responded(time.monotonic())
                self._note(name, DeadlineExceeded.status, invocation)
            return events.response or web.Response(status=DeadlineExceeded.status)

    def _note(
        self, name: str, status: int, invocation: Invocation, error: PilotflameError | None = None
    ) -> None:
        self._metrics.responded(name, status, invocation.timeline, error)
        if invocation.timeline.cold:
            self._functions.note_cold(name, invocation.timeline)


def _invocation(
    headers: Mapping[str, str],
    revision: Revision,
    request_id: str,
    body: bytes,
    received_s: float,
    caller: Caller,
    on_end: Callable[[], None] | None,
) -> Invocation:
    policy = revision.policy
    timeout_s = timeout_of(headers, policy.timeout_s)
    hold_s = seconds(headers, HOLD, policy.hold_s, MAX_HOLD_S)
    return Invocation(
        request_id,
        body,
        now_s=received_s,
        deadline_s=received_s + timeout_s,
        hold_until_s=received_s + hold_s,
        content_type=content_type_of(headers),
        traceparent=traceparent_of(headers),
        streaming=revision.streaming,
        tenant=caller.owner,
        priority=priority_of(headers, urgent=caller.urgent),
        accept=accept_of(headers),
        on_end=on_end,
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


def _error_of(invocation: Invocation) -> PilotflameError | None:
    """How a stream that has ended failed, if it did."""
    error = invocation.output.exception()
    return error if isinstance(error, PilotflameError) else None
