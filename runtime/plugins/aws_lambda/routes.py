"""Serves AWS Lambda's invocation routes, which wait for the output, stream it, submit a job, or only check the name."""

from __future__ import annotations

import asyncio
import base64
import binascii
import time
from collections.abc import Mapping
from typing import Any, ClassVar

import orjson
from aiohttp import web

from ....errors import BadInput, CrashLoop, DeadlineExceeded, PilotflameError
from ....handlers.codec import JSON_TYPE
from ...calls.serving.invocation import Invocation, Output
from ...front.api.backend import ASYNC_BODY_BYTES, Backend
from ...front.api.invoke import PRIORITY_PARAMETER, TIMEOUT_PARAMETER, collected
from ...front.api.plugin import ApiPlugin
from ...front.http.event_stream import LAST_EVENT_S
from ...front.http.parsed_bodies import parsed
from ...front.http.requests import caller_of, load_json, priority_of, request_id_of, timeout_of, trace_of
from ...front.http.responses import ErrorBody
from ...front.http.routes import Route, header
from ...ground.access.keys import Scope
from ...ground.telemetry.logs import Capture
from ...node.functions.live import Live
from ..amazon.event_stream import EVENT_STREAM_TYPE
from .failures import LambdaError, ResponseStream, aws_error, function_error, is_of_function
from .functions import BASE, NAME, QUALIFIER, FunctionsApi, find_live, version_of

TAIL_BYTES = 4096
KINDS = ("RequestResponse", "Event", "DryRun")
INVOKE = f"{BASE}/invocations"
STREAM = "/2021-11-15/functions/{name}/response-streaming-invocations"
CLIENT_CONTEXT_HEADER = "X-Amz-Client-Context"
MAX_CONTEXT_CHARS = 3583
INVOCATION_TYPE = header("X-Amz-Invocation-Type", type="string", enum=list(KINDS), default=KINDS[0])
CLIENT_CONTEXT = header(CLIENT_CONTEXT_HEADER, "A JSON object in base64, as context.client_context.")
PARAMETERS = (NAME, QUALIFIER, INVOCATION_TYPE, CLIENT_CONTEXT, TIMEOUT_PARAMETER, PRIORITY_PARAMETER)


class LambdaApi(ApiPlugin):
    """The routes of AWS Lambda's invoke API."""

    base: ClassVar = "/lambda"

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self._backend, self._described = backend, FunctionsApi(backend)

    def routes(self) -> list[Route]:
        # The path's variable is {name}, because it may hold an ARN. The guard would check a variable {function} as a
        # function's name. `_live` checks {name}.
        shared: dict[str, Any] = {
            "body": Any, "body_required": False, "parameters": PARAMETERS, "errors": (400, 408, 413, 500, 503),
            "aws_signed": True, "error_format": aws_error, "error_type": LambdaError | ErrorBody,
        }  # fmt: skip
        return [
            Route(
                "POST", INVOKE, self.invoke, Scope.INVOKE, "Call a function as AWS Lambda is called.",
                {JSON_TYPE: Any, "*/*": Any}, other_responses={202: None, 204: None}, **shared,
            ),
            Route(
                "POST", STREAM, self.stream, Scope.INVOKE, "Call a function, and stream its output as AWS does.",
                {EVENT_STREAM_TYPE: bytes}, other_responses={204: None}, **shared,
            ),
            *self._described.routes(),
        ]  # fmt: skip

    async def invoke(self, request: web.Request) -> web.StreamResponse:
        return await self._respond(request, {"RequestResponse": self._wait, "Event": self._submit})

    async def stream(self, request: web.Request) -> web.StreamResponse:
        return await self._respond(request, {"RequestResponse": self._stream})

    async def _respond(self, request: web.Request, kinds: Mapping[str, Any]) -> web.StreamResponse:
        """Respond to a DryRun here, and to any other invocation type with its method in `kinds`."""
        request_id = request_id_of(request.headers)
        try:
            live, qualifier = self._live(request)
            kind = request.headers.get("X-Amz-Invocation-Type", KINDS[0])
            if kind == "DryRun":
                return web.Response(status=204, headers=_headers(request_id, live, qualifier))
            if kind not in kinds:
                remedy = f"One of {', '.join((*kinds, 'DryRun'))}."
                raise BadInput(f"X-Amz-Invocation-Type is {kind[:40]!r}.", remedy=remedy)
            response: web.StreamResponse = await kinds[kind](request, request_id)
        # The middleware would also answer this error, but with a new request id.
        except PilotflameError as error:
            return aws_error(error, request_id).response()
        return response

    async def _submit(self, request: web.Request, _request_id: str) -> web.Response:
        """Submit the body as a job. Respond with 202 once the job is stored."""
        extra = _extra(request.headers)
        function = self._live(request)[0].record.function
        _, body = await self._backend.read_body(request, function, ASYNC_BODY_BYTES)
        # The qualifier may no longer match if the function was deployed anew while the body arrived.
        live, qualifier = self._live(request)
        await parsed(request, body, load_json)
        extra |= {"qualifier": qualifier} if qualifier else {}
        job, replayed = await self._backend.submit(request, live, body, extra=extra)
        headers = _headers(job.id, live, qualifier)
        return web.Response(status=202, headers=headers | {"X-Job-Id": job.id} | replayed)

    async def _wait(self, request: web.Request, request_id: str) -> web.Response:
        answer: Output | PilotflameError
        try:
            live, qualifier, invocation = await self._begin(request, request_id)
            answer = await self._ended(live, invocation)
            tail = _log_tail(invocation)
        except CrashLoop as error:
            # AWS reports a failed initialisation as a failure of the function, so this gateway does, too.
            (live, qualifier), answer, tail = self._live(request), error, ""
        sent = _headers(request_id, live, qualifier)
        if tail:
            sent["X-Amz-Log-Result"] = tail
        if isinstance(answer, PilotflameError):
            sent["X-Amz-Function-Error"] = "Unhandled"
            private = self._backend.functions.owns(caller_of(request), live.record.function)
            answer = Output(orjson.dumps(function_error(answer, request_id, private=private)), JSON_TYPE)
        return web.Response(body=answer.payload, headers=sent | {"Content-Type": answer.content_type})

    async def _stream(self, request: web.Request, request_id: str) -> web.StreamResponse:
        """Send the output as an event stream. Close the connection if the output has not ended by the deadline."""
        live, qualifier, invocation = await self._begin(request, request_id)
        events = ResponseStream(request, invocation, _headers(request_id, live, qualifier))
        left_s = max(0.0, invocation.deadline_s - time.monotonic())
        try:
            async with asyncio.timeout(left_s + LAST_EVENT_S):
                if invocation.stream is not None:
                    await events.send_pieces(invocation.stream)
                answer = await self._streamed(live, invocation, events)
                error = answer if isinstance(answer, PilotflameError) else None
                private = self._backend.functions.owns(caller_of(request), live.record.function)
                return await events.complete(error, _log_tail(invocation), private=private)
        except TimeoutError:
            events.abort()
            return events.response or web.Response(status=DeadlineExceeded.status)
        finally:
            if not invocation.ended:
                live.revision.cancel(invocation)

    async def _streamed(
        self, live: Live, invocation: Invocation, events: ResponseStream
    ) -> Output | PilotflameError:
        """Wait for the invocation's end, and send an output that was not streamed.

        Return the output or an error of the function. Raise any other error, but only if the response has not begun.
        Afterwards its status cannot change, so return every error.
        """
        try:
            answer = await self._ended(live, invocation)
        except PilotflameError as error:
            if events.response is None:
                raise
            return error
        if isinstance(answer, Output) and invocation.stream is None:
            await events.send(answer.payload)
        return answer

    async def _begin(self, request: web.Request, request_id: str) -> tuple[Live, str, Invocation]:
        """Submit the invocation. Return (function, qualifier, invocation)."""
        received_s, headers, caller = time.monotonic(), request.headers, caller_of(request)
        extra, name = _extra(headers), self._live(request)[0].record.function
        _, body = await self._backend.read_body(request, name)
        live, qualifier = self._live(request)
        limits = live.record.settings
        # `bare` tells the worker that the body is the input itself, not {"input": …}. Jobs set it, too.
        extra |= {"bare": True} | ({"qualifier": qualifier} if qualifier else {})
        traceparent, tracestate = trace_of(headers)
        invocation = Invocation(
            request_id, body, now_s=received_s, deadline_s=received_s + timeout_of(headers, limits.timeout_s),
            hold_until_s=received_s + limits.hold_s, traceparent=traceparent, tracestate=tracestate, extra=extra,
            streaming=live.revision.streaming, tenant=caller.owner,
            priority=priority_of(headers, urgent=caller.urgent),
            capture=Capture(TAIL_BYTES) if headers.get("X-Amz-Log-Type") == "Tail" else None,
        )  # fmt: skip
        try:
            live.revision.submit(invocation)
        except PilotflameError as error:
            self._backend.functions.events.refused(name, error)
            raise
        return live, qualifier, invocation

    async def _ended(self, live: Live, invocation: Invocation) -> Output | PilotflameError:
        """Wait for the invocation's end. Return the output or an error of the function; raise all other errors."""
        try:
            answer = await collected(invocation)
        except PilotflameError as error:
            if not invocation.ended:
                # `collected` has raised OutputInvalid, because the output is too large.
                live.revision.cancel(invocation, error)
            if not is_of_function(error):
                raise
            return error
        finally:
            # The invocation still runs if the caller has disconnected.
            if not invocation.ended:
                live.revision.cancel(invocation)
        return answer

    def _live(self, request: web.Request) -> tuple[Live, str]:
        return find_live(request, self._backend)


def _extra(headers: Mapping[str, str]) -> dict[str, Any]:
    """Return the header X-Amz-Client-Context as fields for `context.extra`. Raise BadInput if it is invalid."""
    sent = headers.get(CLIENT_CONTEXT_HEADER)
    if not sent:
        return {}
    try:
        found = (
            orjson.loads(base64.b64decode(sent, validate=True)) if len(sent) <= MAX_CONTEXT_CHARS else None
        )
    except (binascii.Error, orjson.JSONDecodeError):
        found = None
    if not isinstance(found, dict):
        remedy = f"Send a JSON object in base64, at most {MAX_CONTEXT_CHARS} characters."
        raise BadInput(f"{CLIENT_CONTEXT_HEADER} is no client context.", remedy=remedy)
    return {"client_context": found}


def _log_tail(invocation: Invocation) -> str:
    """Return the end of the invocation's log in base64, or "" if the caller has not asked for the log."""
    if invocation.capture is None:
        return ""
    printed, took_ms = invocation.capture.text(), invocation.timeline.exec_s * 1000
    lines = [printed] if printed else []
    lines.append(f"REPORT RequestId: {invocation.id}\tDuration: {took_ms:.2f} ms")
    return base64.b64encode("\n".join(lines).encode(errors="replace")[-TAIL_BYTES:]).decode()


def _headers(request_id: str, live: Live, qualifier: str) -> dict[str, str]:
    return {"x-amzn-RequestId": request_id, "X-Amz-Executed-Version": version_of(live, qualifier)}
