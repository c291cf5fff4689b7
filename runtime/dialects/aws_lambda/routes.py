"""Serves AWS Lambda's invocation route: waits for the output, submits a job, or only checks the name."""

from __future__ import annotations

import base64
import re
import time
from typing import Any, Literal

import orjson
from aiohttp import web
from typing_extensions import TypedDict

from .... import errors
from ....errors import BadInput, OutputInvalid, PilotflameError, RevisionRetired, UnknownFunction
from ....handlers.codec import JSON_TYPE
from ...access.keys import Scope
from ...api.backend import ASYNC_BODY_BYTES, Backend
from ...api.invoke import PRIORITY_PARAMETER, TIMEOUT_PARAMETER
from ...api.requests import caller_of, load_json, priority_of, request_id_of, timeout_of, traceparent_of
from ...api.responses import ErrorBody, Response, retry_headers
from ...api.routes import Parameter, Route, header
from ...functions.live import Live
from ...serving.invocation import Invocation, Output
from ...telemetry.logs import Capture

VERSION = "$LATEST"
MAX_STREAMED_BYTES = 20 << 20
TAIL_BYTES = 4096
KINDS = ("RequestResponse", "Event", "DryRun")
_BEFORE_NAME = re.compile(r"^(arn(:[^:]*){4}:|\d+:(?=function:))?(function:)?")
NAME = Parameter("name", "A name or an ARN.", place="path")
QUALIFIER = Parameter("Qualifier")
INVOCATION_TYPE = header("X-Amz-Invocation-Type", type="string", enum=list(KINDS), default=KINDS[0])

# Errors of the function, sent with status 200 and the header X-Amz-Function-Error. All others, and
# RevisionRetired (see `_ended`), belong to the request or the gateway and keep their own status.
FUNCTION_ERRORS = (
    errors.HandlerError, errors.HandlerFailed, errors.OutputInvalid, errors.InputInvalid, errors.WorkerDied,
    errors.DeadlineExceeded, errors.ActivationFailed,
)  # fmt: skip
ERROR_TYPES = (
    (errors.DeadlineExceeded, "Sandbox.Timedout"),
    (errors.WorkerDied, "Runtime.ExitError"),
    (errors.ActivationFailed, "Runtime.InitError"),
    (errors.OutputInvalid, "Runtime.MarshalError"),
)
ERROR_NAMES = (
    (errors.UnknownFunction, "ResourceNotFoundException"),
    (errors.BadInput, "InvalidRequestContentException"),
    (errors.InputTooLarge, "RequestTooLargeException"),
    ((errors.QueueFull, errors.QuotaExceeded), "TooManyRequestsException"),
    (errors.Unauthorized, "UnrecognizedClientException"),
    (errors.Forbidden, "AccessDeniedException"),
)


class LambdaError(TypedDict):
    """The body of an error."""

    Type: Literal["User", "Service"]
    Message: str


def aws_error(error: PilotflameError, request_id: str) -> Response:
    """Return the response for an error that is none of the function."""
    ours = error.status >= 500
    name = next((name for cls, name in ERROR_NAMES if isinstance(error, cls)), "")
    name = name or ("ServiceException" if ours else "InvalidParameterValueException")
    headers = {"x-amzn-ErrorType": name, "x-amzn-RequestId": request_id, "Content-Type": JSON_TYPE}
    body = LambdaError(Type="Service" if ours else "User", Message=str(error))
    return Response(error.status, headers | retry_headers(error), orjson.dumps(body))


class LambdaApi:
    """The route of AWS Lambda's invoke API."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def routes(self) -> list[Route]:
        # Not {function}, which the guard would check: the variable may hold an ARN. `_live` checks it.
        return [
            Route(
                "POST", "/2015-03-31/functions/{name}/invocations", self.invoke, Scope.INVOKE,
                "Call a function as AWS Lambda is called.", {JSON_TYPE: Any, "*/*": Any},
                other_responses={202: None, 204: None}, body=Any, body_required=False,
                parameters=(NAME, QUALIFIER, INVOCATION_TYPE, TIMEOUT_PARAMETER, PRIORITY_PARAMETER),
                errors=(400, 408, 413, 500, 503), error_format=aws_error, error_type=LambdaError | ErrorBody,
            ),
        ]  # fmt: skip

    async def invoke(self, request: web.Request) -> web.StreamResponse:
        request_id = request_id_of(request.headers)
        try:
            live = self._live(request)
            kind = request.headers.get("X-Amz-Invocation-Type", "RequestResponse")
            if kind == "DryRun":
                return web.Response(status=204, headers=_headers(request_id))
            if kind == "Event":
                return await self._submit(request, live)
            if kind == "RequestResponse":
                return await self._wait(request, live, request_id)
            remedy = f"One of {', '.join(KINDS)}."
            raise BadInput(f"X-Amz-Invocation-Type is {kind[:40]!r}.", remedy=remedy)
        # Not left to the middleware, which would make a new request id.
        except PilotflameError as error:
            return aws_error(error, request_id).response()

    async def _submit(self, request: web.Request, live: Live) -> web.Response:
        """Submit the body as a job. Respond with 202 once the job is stored."""
        _, body = await self._backend.read_body(request, live.record.function, ASYNC_BODY_BYTES)
        # The qualifier may no longer match if the function was deployed anew while the body arrived.
        live = self._live(request)
        load_json(body)
        job, replayed = await self._backend.submit(request, live, body)
        return web.Response(status=202, headers=_headers(job.id) | {"X-Job-Id": job.id} | replayed)

    async def _wait(self, request: web.Request, live: Live, request_id: str) -> web.Response:
        received_s, name = time.monotonic(), live.record.function
        live, body = await self._backend.read_body(request, name)
        revision, policy = live.revision, live.revision.policy
        headers, caller = request.headers, caller_of(request)
        # `bare`, as in a job, tells the worker that the body is the input itself, not {"input": …}.
        invocation = Invocation(
            request_id, body, now_s=received_s, deadline_s=received_s + timeout_of(headers, policy.timeout_s),
            hold_until_s=received_s + policy.hold_s, traceparent=traceparent_of(headers), extra={"bare": True},
            streaming=revision.streaming, tenant=caller.owner, priority=priority_of(headers, urgent=caller.urgent),
            capture=Capture(TAIL_BYTES) if headers.get("X-Amz-Log-Type") == "Tail" else None,
        )  # fmt: skip
        try:
            revision.submit(invocation)
        except PilotflameError as error:
            self._backend.metrics.refused(name, error)
            raise
        answer = await self._ended(name, live, invocation)
        sent = _headers(request_id) | _log_tail(invocation)
        if isinstance(answer, PilotflameError):
            sent["X-Amz-Function-Error"] = "Unhandled"
            private = caller.sees_code(name)
            answer = Output(orjson.dumps(function_error(answer, request_id, private=private)), JSON_TYPE)
        return web.Response(body=answer.payload, headers=sent | {"Content-Type": answer.content_type})

    async def _ended(self, name: str, live: Live, invocation: Invocation) -> Output | PilotflameError:
        """Wait for the end. Return the output or one of FUNCTION_ERRORS; raise all other errors.

        RevisionRetired is raised, too: the revision was replaced, which is no failure of the function.
        """
        try:
            answer = await _collect(invocation)
        except PilotflameError as error:
            self._backend.record(name, error.status, invocation, error)
            if isinstance(error, RevisionRetired) or not isinstance(error, FUNCTION_ERRORS):
                raise
            return error
        finally:
            # It has not ended if the caller has disconnected, or if the output is too large.
            if not invocation.ended:
                live.revision.cancel(invocation)
        self._backend.record(name, 200, invocation)
        return answer

    def _live(self, request: web.Request) -> Live:
        # The text is `name`, `account:function:name` or an ARN, and each may end with `:qualifier`.
        name, _, qualifier = _BEFORE_NAME.sub("", request.match_info["name"]).partition(":")
        caller_of(request).check(name)
        live = self._backend.functions.get(name)
        wanted = request.query.get("Qualifier", "") or qualifier
        if wanted not in ("", VERSION, live.record.revision):
            remedy = f"Omit it, or send {VERSION}."
            raise UnknownFunction(f"Function {name!r} has no version {wanted[:64]!r}.", remedy=remedy)
        return live


def function_error(error: PilotflameError, request_id: str, *, private: bool = False) -> dict[str, object]:
    """Return the body for a function's error. If a Lambda handler raised it, its details hold the fields.

    With `private`, it includes the stack.
    """
    details = error.details
    usual = next((name for cls, name in ERROR_TYPES if isinstance(error, cls)), error.code)
    trace = error.private.get("stackTrace") or error.trace.splitlines(keepends=True)
    return {
        "errorMessage": details.get("errorMessage", error.message),
        "errorType": details.get("errorType") or details.get("exception") or usual,
        "requestId": request_id,
        **({"stackTrace": trace} if trace and private else {}),
    }


async def _collect(invocation: Invocation) -> Output:
    """Return the output, of a stream as a JSON array. Raises OutputInvalid if that is too large."""
    if invocation.stream is None:
        return await invocation.output
    pieces, size = [], 0
    while some := await invocation.stream.take():
        invocation.stream.consumed(len(some))
        size += sum(map(len, some)) + len(some)
        if size > MAX_STREAMED_BYTES:
            message = f"The output is larger than {MAX_STREAMED_BYTES} bytes."
            raise OutputInvalid(message, remedy="Call /invoke, which streams it.")
        pieces += some
    await invocation.output
    return Output(b"[" + b",".join(pieces) + b"]", JSON_TYPE)


def _log_tail(invocation: Invocation) -> dict[str, str]:
    """Return the header with the end of what the invocation printed, if its caller has asked for that."""
    if invocation.capture is None:
        return {}
    printed, took_ms = invocation.capture.text(), invocation.timeline.exec_s * 1000
    lines = [printed] if printed else []
    lines.append(f"REPORT RequestId: {invocation.id}\tDuration: {took_ms:.2f} ms")
    tail = "\n".join(lines).encode(errors="replace")[-TAIL_BYTES:]
    return {"X-Amz-Log-Result": base64.b64encode(tail).decode()}


def _headers(request_id: str) -> dict[str, str]:
    return {"x-amzn-RequestId": request_id, "X-Amz-Executed-Version": VERSION}
