"""The invocations' route, in AWS Lambda's spelling: wait for the answer, leave a job, or only ask whether one could."""

from __future__ import annotations

import base64
import time

import orjson
from aiohttp import web

from ....errors import (
    ActivationFailed,
    BadInput,
    DeadlineExceeded,
    HandlerError,
    HandlerFailed,
    InputInvalid,
    OutputInvalid,
    PilotflameError,
    RevisionRetired,
    UnknownFunction,
    WorkerDied,
)
from ....handlers.codec import JSON_TYPE
from ...access.caller import caller_of
from ...api.deadline import priority_of, timeout_of
from ...api.requests import Limits, idempotency_of, read_body, request_id_of, traceparent_of
from ...functions.registry import Functions, Live
from ...jobs.jobs import Jobs
from ...jobs.order import order
from ...serving.invocation import Invocation, Output
from ...telemetry.metrics import Metrics
from .errors import PATHS, aws_error

VERSION = "$LATEST"
ASYNC_BODY_BYTES = 10 << 20
MAX_STREAMED_BYTES = 20 << 20
TAIL_BYTES = 4096
TAIL_LINES = 200

# Of errors that are the function's: 200, and this header. The others are the request's, or ours.
OF_THE_FUNCTION = (HandlerError, HandlerFailed, OutputInvalid, InputInvalid, WorkerDied, DeadlineExceeded, ActivationFailed)  # fmt: skip
ERROR_TYPES = (
    (DeadlineExceeded, "Sandbox.Timedout"),
    (WorkerDied, "Runtime.ExitError"),
    (ActivationFailed, "Runtime.InitError"),
    (OutputInvalid, "Runtime.MarshalError"),
)


class LambdaApi:
    """The route of invocations below /2015-03-31."""

    def __init__(self, functions: Functions, jobs: Jobs, metrics: Metrics, limits: Limits) -> None:
        self._functions = functions
        self._jobs = jobs
        self._metrics = metrics
        self._limits = limits

    def routes(self) -> list[web.RouteDef]:
        # Not {function}: a name may come as an ARN, and with a version. What the key covers is checked here.
        return [web.post(f"{PATHS}functions/{{name}}/invocations", self.invoke)]

    async def invoke(self, request: web.Request) -> web.StreamResponse:
        """`X-Amz-Invocation-Type`: RequestResponse (the default), Event or DryRun."""
        request_id = request_id_of(request.headers)
        try:
            live = self._live(request)
            kind = request.headers.get("X-Amz-Invocation-Type", "RequestResponse")
            if kind == "DryRun":
                return web.Response(status=204, headers=_headers(request_id))
            if kind == "Event":
                return await self._leave(request, live)
            if kind == "RequestResponse":
                return await self._wait(request, live, request_id)
            raise BadInput(
                f"X-Amz-Invocation-Type is {kind[:40]!r}.", remedy="RequestResponse, Event or DryRun."
            )
        except PilotflameError as error:
            return aws_error(error, request_id)

    async def _leave(self, request: web.Request, live: Live) -> web.Response:
        """A job, on the disk when this answers."""
        body = await self._body(request, live, ASYNC_BODY_BYTES)
        live = self._live(request)  # while the body came it may have been deployed anew, or deleted
        try:
            if body:
                orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise BadInput(f"The payload is not JSON: {error}.", remedy="Send JSON.") from None
        new = order(
            live.record.settings,
            body,
            owner=caller_of(request).owner,
            idempotency=idempotency_of(request.headers),
            traceparent=traceparent_of(request.headers),
        )
        job, replayed = await self._jobs.submit(new)
        headers = _headers(job.id) | {"X-Job-Id": job.id}
        if replayed:
            headers["Idempotent-Replayed"] = "true"
        return web.Response(status=202, headers=headers)

    async def _wait(self, request: web.Request, live: Live, request_id: str) -> web.Response:
        received_s, name = time.monotonic(), live.record.function
        body = await self._body(request, live, self._limits.max_body_bytes)
        live = self._functions.get(name)  # another revision may have become live while the body came
        policy, revision = live.revision.policy, live.revision
        headers, timeout_s = request.headers, timeout_of(request.headers, policy.timeout_s)
        invocation = Invocation(
            request_id, body,
            now_s=received_s, deadline_s=received_s + timeout_s, hold_until_s=received_s + policy.hold_s,
            traceparent=traceparent_of(headers), streaming=revision.streaming,
            extra={"bare": True},  # the payload is the event, as it is where a job is left
            tenant=caller_of(request).owner, priority=priority_of(headers, urgent=caller_of(request).urgent),
        )  # fmt: skip
        try:
            revision.submit(invocation)
        except PilotflameError as error:
            self._metrics.refused(name, error)
            raise
        answer = await self._ended(name, live, invocation)
        told = _headers(request_id) | self._tail(request, live, invocation)
        if isinstance(answer, PilotflameError):
            told["X-Amz-Function-Error"] = "Unhandled"
            answer = Output(orjson.dumps(function_error(answer, request_id)), JSON_TYPE)
        return web.Response(body=answer.payload, headers=told | {"Content-Type": answer.content_type})

    async def _ended(self, name: str, live: Live, invocation: Invocation) -> Output | PilotflameError:
        """The answer, or how the function failed. Raises what is not the function's failure."""
        try:
            answer = await _answer(invocation)
        except PilotflameError as error:
            self._note(name, error.status, invocation, error)
            if isinstance(error, RevisionRetired) or not isinstance(error, OF_THE_FUNCTION):
                raise
            return error
        finally:
            if not invocation.ended:  # the caller has gone, or the answer is too large to go on with
                live.revision.cancel(invocation)
        self._note(name, 200, invocation)
        return answer

    def _note(
        self, name: str, status: int, invocation: Invocation, error: PilotflameError | None = None
    ) -> None:
        invocation.timeline.mark_responded(time.monotonic())
        self._metrics.responded(name, status, invocation.timeline, error)
        if invocation.timeline.cold:
            self._functions.note_cold(name, invocation.timeline)

    def _tail(self, request: web.Request, live: Live, invocation: Invocation) -> dict[str, str]:
        """The end of what the worker printed, if it is asked for and the worker had nobody else's work."""
        if request.headers.get("X-Amz-Log-Type", "None") != "Tail":
            return {}
        begun_s = time.time() - (time.monotonic() - (invocation.timeline.sent_s or time.monotonic()))
        lines: list[str] = []
        if live.revision.policy.scale.concurrency == 1:
            found = (one for one in live.logs.tail(TAIL_LINES) if one.source == invocation.worker)
            lines = [one.text for one in found if one.at >= begun_s]
        took_ms = invocation.timeline.exec_s * 1000
        lines.append(f"REPORT RequestId: {invocation.id}\tDuration: {took_ms:.2f} ms")
        tail = "\n".join(lines).encode()[-TAIL_BYTES:]
        return {"X-Amz-Log-Result": base64.b64encode(tail).decode()}

    async def _body(self, request: web.Request, live: Live, limit: int) -> bytes:
        most = min(limit, self._limits.max_body_bytes, live.revision.policy.max_body_bytes)
        return await read_body(request, most, self._limits.body_timeout_s)

    def _live(self, request: web.Request) -> Live:
        name, qualifier = parse_name(request.match_info["name"])
        caller_of(request).check(name)
        live = self._functions.get(name)
        asked = request.query.get("Qualifier", "") or qualifier
        if asked not in ("", VERSION, live.record.revision):
            raise UnknownFunction(
                f"Function {name!r} has no version {asked[:64]!r}.", remedy=f"Leave it out, or say {VERSION}."
            )
        return live


def parse_name(text: str) -> tuple[str, str]:
    """(name, qualifier) of `name`, `name:qualifier`, `account:function:name…`, or an ARN with any of these."""
    parts = text.split(":")
    if parts[0] == "arn":
        parts = parts[5:]
    elif parts[0].isdecimal() and parts[1:2] == ["function"]:
        parts = parts[1:]
    if parts[:1] == ["function"] and len(parts) > 1:
        parts = parts[1:]
    return (parts[0] if parts else "", ":".join(parts[1:]))


def function_error(error: PilotflameError, request_id: str) -> dict[str, object]:
    """What Lambda says of a function that failed. A handler written for Lambda has told it in these words itself."""
    told = error.details
    kind = told.get("errorType") or told.get("exception")
    kind = kind or next((name for cls, name in ERROR_TYPES if isinstance(error, cls)), error.code)
    trace = told.get("stackTrace") or str(told.get("traceback", "")).splitlines(keepends=True)
    return {
        "errorMessage": told.get("errorMessage", error.message),
        "errorType": kind,
        "requestId": request_id,
        **({"stackTrace": trace} if trace else {}),
    }


async def _answer(invocation: Invocation) -> Output:
    """The handler's answer; of one that streams, the list of its pieces."""
    if invocation.stream is None:
        return await invocation.output
    pieces, size = [], 0
    while some := await invocation.stream.take():
        invocation.stream.consumed(len(some))
        size += sum(map(len, some)) + len(some)
        if size > MAX_STREAMED_BYTES:
            raise OutputInvalid(
                f"The answer is larger than {MAX_STREAMED_BYTES} bytes.",
                remedy="Call /invoke, which streams it.",
            )
        pieces += some
    await invocation.output
    return Output(b"[" + b",".join(pieces) + b"]", JSON_TYPE)


def _headers(request_id: str) -> dict[str, str]:
    return {"x-amzn-RequestId": request_id, "X-Amz-Executed-Version": VERSION}
