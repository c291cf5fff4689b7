"""Serves `POST /invoke/{function}`: turns requests into invocations, and their outputs into responses."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import hdrs, web

from ....errors import DeadlineExceeded, OutputInvalid, PilotflameError
from ....handlers.caller import NORMAL
from ....handlers.codec import JSON_TYPE
from ...calls.serving.invocation import Invocation, Output, Stream
from ...calls.serving.response_cache import CachedCall
from ...calls.serving.revision import Revision
from ...ground.access.keys import Caller, Scope
from ...jobs.stored.job import ENVELOPE
from ..http.event_stream import EVENTS, LAST_EVENT_S, EventStream
from ..http.guard import counted
from ..http.parsed_bodies import parsed
from ..http.requests import (
    CallHeaders,
    Headers,
    caller_of,
    content_type_of,
    id_of,
    load_json,
    media_type_of,
    parse_preferences,
    preferences_of,
    read_body,
    request_id_of,
)
from ..http.responses import Response, error_reply, invocation_headers, json_response
from ..http.routes import INVOKE_PATH, Parameter, Route, header
from .backend import ASYNC_BODY_BYTES, Accepted, Backend, job_path

MAX_COLLECTED_BYTES = 20 << 20
_SECONDS: dict[str, Any] = {"type": "number", "exclusiveMinimum": 0}
TIMEOUT_PARAMETER = header(
    "X-Request-Timeout",
    "Seconds until the response must be there, at most the function's timeout_s. The smallest of this, grpc-timeout,"
    " x-envoy-expected-rq-timeout-ms and x-stainless-read-timeout counts.",
    **_SECONDS,
)
_PRIORITIES = "1 is served first, 5 last. A key without the scope admin gets 3 at most."
PRIORITY_PARAMETER = header("X-Priority", _PRIORITIES, type="integer", minimum=1, maximum=5, default=3)
PARAMETERS: tuple[Parameter, ...] = (
    TIMEOUT_PARAMETER,
    PRIORITY_PARAMETER,
    header("X-Scale-Up-Timeout", "Seconds that it may wait for a worker.", **_SECONDS),
    header("X-Request-Id", "1 to 128 visible ASCII characters; otherwise one is made."),
    header("traceparent", "A W3C trace context, which the response returns."),
    header("Cache-Control", "For a function with a response cache: no-cache, no-store or max-age=SECONDS."),
    header("tracestate", "The rest of a W3C trace context."),
)
_HEADERS = {
    name: {"schema": {"type": "string"}, "required": True}
    for name in ("X-Request-Id", "X-Worker-Id", "Server-Timing")
} | {
    "X-Cold-Start": {"schema": {"type": "string", "enum": ["true", "false"]}, "required": True},
    "Cache-Status": {"schema": {"type": "string"}, "description": "Only with a response cache (RFC 9211)."},
    "X-Revision-Stale": {
        "schema": {"type": "string"},
        "description": "Only of a gateway that may not serve the newest revision.",
    },
}


async def collected(invocation: Invocation) -> Output:
    """Return the output of an invocation. Join the pieces of a stream into one JSON array. Raise the error of the
    invocation, and OutputInvalid if the array is larger than MAX_COLLECTED_BYTES.
    """
    if invocation.stream is None:
        return await invocation.wait()
    pieces, size = [], 0
    while some := await invocation.stream.take():
        invocation.stream.consumed(len(some))
        size += sum(map(len, some)) + len(some)
        if size > MAX_COLLECTED_BYTES:
            message = f"The output is larger than {MAX_COLLECTED_BYTES} bytes."
            raise OutputInvalid(message, remedy="Call /invoke, which streams it.")
        pieces += some
    await invocation.wait()
    return Output(b"[" + b",".join(pieces) + b"]", JSON_TYPE)


class Invoker:
    """The route `POST /invoke/{function}`. Plain calls use `begin`, `refused` and `answered`, too."""

    def __init__(self, backend: Backend) -> None:
        self.most = backend.body_limit
        self._backend = backend
        self._functions = backend.functions

    def routes(self) -> list[Route]:
        return [
            Route(
                "POST", INVOKE_PATH, self.invoke, Scope.INVOKE, "Call the function and wait for its output.",
                {JSON_TYPE: Any, **EVENTS}, errors=(400, 408, 413, 415, 422, 429, 500, 503, 504),
                parameters=PARAMETERS, body=Any, body_required=False, headers=_HEADERS,
            ),
        ]  # fmt: skip

    async def invoke(self, request: web.Request) -> web.StreamResponse:
        if "respond-async" in preferences_of(request):
            return await self._submit(request)
        received_s = time.monotonic()
        name = request.match_info["function"]
        request_id = request_id_of(request.headers)
        # An unknown name raises here, outside of `try`, so that `refused` does not count the error. Otherwise, invented
        # names would add metrics without limit.
        revision = self._functions.live(name)
        try:
            most = self.most(revision)
            remedy = self._backend.too_large_remedy(most, revision)
            body = await read_body(request, most, remedy=remedy)
            caller = caller_of(request)
            revision, invocation = self.begin(name, request.headers, request_id, body, received_s, caller)
        except PilotflameError as error:
            return self.refused(name, error, request_id, caller_of(request)).response()
        return await self.finish(request, name, revision, invocation)

    async def finish(
        self, request: web.Request, name: str, revision: Revision, invocation: Invocation
    ) -> web.StreamResponse:
        """Return the response to an invocation that `begin` returned. Cancel it if the caller disconnects."""
        try:
            if invocation.stream is not None:
                return await self._stream(request, name, invocation, invocation.stream)
            with contextlib.suppress(PilotflameError):
                await invocation.wait()
        # The caller has disconnected: the wait for the output was cancelled, or a write to it failed.
        except (asyncio.CancelledError, ConnectionError):
            revision.cancel(invocation)
            raise
        return self.answered(name, invocation, caller_of(request)).response()

    async def call(
        self,
        request: web.Request,
        name: str,
        body: bytes,
        number: int = 0,
        extra: Mapping[str, Any] | None = None,
        content_type: str = JSON_TYPE,
    ) -> Output:
        """Call a function with a body, by default JSON. Return its output, a stream as one JSON array. Raise its error.

        `number` distinguishes several calls of one request. If the caller disconnects, the call is cancelled. The handler
        reads `extra` as `context.extra`.
        """
        revision, invocation = self.started(request, name, body, number, extra, content_type)
        try:
            return await collected(invocation)
        finally:
            if not invocation.ended:
                revision.cancel(invocation)

    def started(
        self,
        request: web.Request,
        name: str,
        body: bytes,
        number: int,
        extra: Mapping[str, Any] | None = None,
        content_type: str = JSON_TYPE,
    ) -> tuple[Revision, Invocation]:
        """Submit an invocation, and return (revision, invocation). Count an error as a refused call, and raise it. The
        parameters are the same as with `call`.
        """
        request_id = id_of(request)
        try:
            return self.begin(
                name, request.headers, f"{request_id}-{number}" if number else request_id, body, time.monotonic(),
                caller_of(request), content_type=content_type, extra=extra, counted=counted(request),
            )  # fmt: skip
        except PilotflameError as error:
            self._functions.events.refused(name, error)
            raise

    def begin(
        self, name: str, headers: Headers, request_id: str, body: bytes, received_s: float, caller: Caller,
        on_end: Callable[[], None] | None = None, *, content_type: str | None = None,
        accept: str | None = None, extra: Mapping[str, Any] | None = None, max_batch: int = 0,
        counted: bool = False, asked: CallHeaders | None = None,
    ) -> tuple[Revision, Invocation]:  # fmt: skip
        """Submit an invocation. Return (revision, invocation). If this raises an error, the caller must pass the error
        to `refused`.

        `content_type` and `accept` replace the Content-Type and Accept of the headers. The handler reads `extra` as `context.extra`.
        `max_batch` is the size of the largest batch that the invocation may run in; 0 for no limit. `asked` is what
        `CallHeaders.read` returns for these headers.
        """
        # Look the revision up again, because another revision may have become live while the body arrived.
        revision = self._functions.live(name)
        settings = revision.policy.settings
        asked = asked or CallHeaders.read(headers)
        deadline_s, hold_until_s = asked.times_s(received_s, settings.timeout_s, settings.hold_s)
        invocation = Invocation(
            request_id, body, now_s=received_s, deadline_s=deadline_s, hold_until_s=hold_until_s,
            content_type=content_type_of(headers) if content_type is None else content_type, extra=extra,
            traceparent=asked.traceparent, tracestate=asked.tracestate, accept=asked.accept if accept is None else accept,
            streaming=revision.streaming, tenant=caller.owner, on_end=on_end,
            priority=asked.priority if caller.urgent else max(NORMAL, asked.priority), max_batch=max_batch, counted=counted,
        )  # fmt: skip
        # Do not use the cache for a function that is paused or has used its budget: `submit` raises its error.
        if settings.response_cache.ttl_s is None or self._functions.get(name).function.stopped:
            revision.submit(invocation)
        else:
            wanted = parse_preferences([headers.get(hdrs.CACHE_CONTROL, "")])
            CachedCall(self._backend.cache, revision, invocation, wanted).start()
        return revision, invocation

    def refused(self, name: str, error: PilotflameError, request_id: str, caller: Caller) -> Response:
        """Count the error that `begin` raised, and return the response to the request."""
        self._functions.events.refused(name, error)
        return error_reply(error, request_id, private=self._functions.owns(caller, name))

    def answered(self, name: str, invocation: Invocation, caller: Caller) -> Response:
        """Return the response to an invocation that has ended: its output or its error."""
        invocation.timeline.mark_responded(time.monotonic())
        error = invocation.output.exception()
        if isinstance(error, PilotflameError):
            headers, private = invocation_headers(invocation), self._functions.owns(caller, name)
            return error_reply(error, invocation.id, headers, private=private)
        answer = invocation.output.result()
        headers = {**invocation_headers(invocation), "Content-Type": answer.content_type}
        return Response(200, headers, answer.payload)

    async def _submit(self, request: web.Request) -> web.StreamResponse:
        """Submit the body as a job, because the request has `Prefer: respond-async`. Respond with 202 and the job's
        URL.
        """
        live, body = await self._backend.read_body(request, request.match_info["function"], ASYNC_BODY_BYTES)
        # A body without a Content-Type is not checked: only the handler knows its format.
        kind, content_type = media_type_of(request.headers), content_type_of(request.headers)
        if kind == JSON_TYPE or kind.endswith("+json"):
            await parsed(request, body, load_json)
        job, replayed = await self._backend.submit(
            request, live, body, content_type=content_type, extra=ENVELOPE
        )
        headers = replayed | {"X-Request-Id": job.id, "Preference-Applied": "respond-async"}
        headers["Location"] = job_path(job)
        return json_response(Accepted(id=job.id, status=job.state), status=202, headers=headers)

    async def _stream(
        self, request: web.Request, name: str, invocation: Invocation, stream: Stream
    ) -> web.StreamResponse:
        """Send all pieces. Close the connection if the stream still runs LAST_EVENT_S after the deadline."""
        private = self._functions.owns(caller_of(request), name)
        events = EventStream(request, invocation)
        left_s = max(0.0, invocation.deadline_s - time.monotonic())
        try:
            async with asyncio.timeout(left_s + LAST_EVENT_S):
                await events.send_pieces(stream)
                failure = invocation.output.exception()
                error = failure if isinstance(failure, PilotflameError) else None
                invocation.timeline.mark_responded(time.monotonic())
                if error is not None and events.response is None:
                    headers = invocation_headers(invocation)
                    return error_reply(error, invocation.id, headers, private=private).response()
                return await events.end(error, private=private)
        except TimeoutError:
            events.abort()
            return events.response or web.Response(status=DeadlineExceeded.status)
