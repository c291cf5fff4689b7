"""The routes of SageMaker's endpoints, below /sagemaker, and those of its containers.

An endpoint is a function. A gateway with one function has the routes of a container, /ping and /invocations.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from aiohttp import hdrs, web
from multidict import CIMultiDict

from ....errors import BadInput, DeadlineExceeded, FunctionStopped, PilotflameError
from ....handlers.codec import JSON_TYPE
from ...calls.serving.invocation import Invocation
from ...calls.serving.revision import Revision
from ...front.api.backend import ASYNC_BODY_BYTES, Backend
from ...front.api.invoke import Invoker
from ...front.api.plugin import BARE, ApiPlugin
from ...front.http.event_stream import LAST_EVENT_S, EventStream
from ...front.http.parsed_bodies import parsed
from ...front.http.requests import caller_of, content_type_of, id_of, load_json
from ...front.http.responses import json_response
from ...front.http.routes import Route
from ...ground.access.keys import Scope
from ...node.functions.live import Live
from ..amazon.event_stream import EVENT_STREAM_TYPE, payload_of
from .async_answers import AsyncAnswers
from .failures import ERRORS, PayloadStream
from .objects import Objects
from .pending_answers import PendingAnswer
from .requests import (
    ASYNC_PARAMETERS,
    INFERENCE_ID,
    LOCATION,
    PARAMETERS,
    PREFIX,
    TARGET,
    VARIANT,
    check_target,
    facts_in,
    limits_in,
)

ENDPOINT = "/endpoints/{function}"


class SageMakerApi(ApiPlugin):
    """The routes of endpoints, and, if the gateway serves one function, of containers."""

    base: ClassVar = "/sagemaker"

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self._objects = Objects(backend.functions)
        self._answers = AsyncAnswers(backend, self._objects)

    def routes(self) -> Sequence[Route]:
        # boto3 repeats a call after a 429 (ThrottlingException), but not after a 424 (ModelError).
        shared: dict[str, Any] = {
            "body": Any, "body_required": False, "parameters": PARAMETERS, "errors": (400, 424, 429, 500, 503), "aws_signed": True,
            **ERRORS,
        }  # fmt: skip
        submits = {**shared, "parameters": ASYNC_PARAMETERS}
        call, streams = Scope.INVOKE, {EVENT_STREAM_TYPE: bytes}
        return [
            Route("POST", f"{ENDPOINT}/invocations", self.invoke, call, "Call a function as SageMaker's clients do.", {JSON_TYPE: Any, "*/*": Any}, **shared),
            Route("POST", f"{ENDPOINT}/invocations-response-stream", self.stream, call, "Call a function, and stream its output as SageMaker does.", streams, **shared),
            Route("POST", f"{ENDPOINT}/async-invocations", self.submit, call, "Submit a job whose answer is written to S3.", {"InferenceId": str}, status=202, **submits),
        ]  # fmt: skip

    def bare_routes(self) -> Sequence[Route]:
        body: dict[str, Any] = {"body": Any, "body_required": False, "parameters": PARAMETERS[:2]}
        return [
            # `accepts` lets this row precede the same path of TorchServe, whose response says less.
            Route("GET", "/ping", self.ping, None, "Show the health of the only function.", {"status": str}, errors=(404, 422, 503), accepts=_any),
            Route("POST", "/invocations", self.invoke_only, Scope.INVOKE, "Call the only function.", {JSON_TYPE: Any, "*/*": Any}, errors=(400, 404, 408, 413, 422, 429, 500, 503, 504), **body),
        ]  # fmt: skip

    async def ping(self, request: web.Request) -> web.StreamResponse:
        if why := self.backend.only(request).unavailable:
            raise FunctionStopped(why)
        # SageMaker reads only the status.
        return json_response({"status": "Healthy"})

    async def invoke(self, request: web.Request) -> web.StreamResponse:
        name, extra = request.match_info["function"], {**BARE, **facts_in(request.headers)}
        body, kind = await self._read(request, name)
        output = await Invoker(self.backend).call(request, name, body, extra=extra, content_type=kind)
        headers = _headers(request) | {hdrs.CONTENT_TYPE: output.content_type}
        return web.Response(body=output.payload, headers=headers)

    async def stream(self, request: web.Request) -> web.StreamResponse:
        revision, invocation = await self._begin(request, request.match_info["function"])
        events = PayloadStream(request, invocation, _headers(request))
        return await _streamed(revision, invocation, events)

    async def invoke_only(self, request: web.Request) -> web.StreamResponse:
        name = self.backend.only(request).record.function
        revision, invocation = await self._begin(request, name)
        if invocation.stream is not None:
            return await _streamed(
                revision, invocation, _Chunks(request, invocation, {"Cache-Control": "no-store"}, b"")
            )
        return await Invoker(self.backend).finish(request, name, revision, invocation)

    async def submit(self, request: web.Request) -> web.StreamResponse:
        """Submit the input as a job. Respond once the job, and the place of its answer, are stored."""
        name, fields = request.match_info["function"], limits_in(request.headers)
        fields["extra"] = {**BARE, **facts_in(request.headers)}
        live, body = await self.backend.read_body(request, name, ASYNC_BODY_BYTES)
        prefix = self._objects.output_prefix(live)
        body, kind = await self._input(request, live, body)
        job, replayed = await self.backend.submit(request, live, body, content_type=kind, **fields)
        output, failure = f"{prefix}/{job.id}.out", f"{prefix}/{job.id}-error.out"
        await self._answers.add(PendingAnswer(job=job.id, function=name, output=output, failure=failure))
        headers = {
            "x-amzn-RequestId": id_of(request), "X-Job-Id": job.id, f"{PREFIX}OutputLocation": output,
            f"{PREFIX}FailureLocation": failure,
        }  # fmt: skip
        inference = request.headers.get(INFERENCE_ID, job.id)
        return json_response({"InferenceId": inference}, status=202, headers=headers | replayed)

    async def _input(self, request: web.Request, live: Live, body: bytes) -> tuple[bytes, str]:
        """Return the input of a job, which is the body or an object, and its media type; "" for JSON."""
        kind, location = request.headers.get(f"{PREFIX}Content-Type", ""), request.headers.get(LOCATION, "")
        if bool(location) == bool(body):
            fault = "an InputLocation and a body" if body else "no InputLocation"
            raise BadInput(
                f"The request has {fault}.", remedy="Name an object of S3, or send the input as the body."
            )
        if location:
            most = min(ASYNC_BODY_BYTES, self.backend.body_limit(live.revision))
            found = await self._objects.read(live, location, most)
            body, kind = found.body, kind or found.content_type
        if kind in ("", JSON_TYPE):
            await parsed(request, body, load_json)
            return body, ""
        return body, kind

    async def sweep(self) -> None:
        await self._answers.run()

    async def _begin(self, request: web.Request, function: str) -> tuple[Revision, Invocation]:
        """Submit the invocation of a request whose output may be streamed."""
        received_s, extra = time.monotonic(), {**BARE, **facts_in(request.headers)}
        body, kind = await self._read(request, function)
        headers = CIMultiDict(request.headers)
        if accept := headers.get(f"{PREFIX}Accept"):
            headers[hdrs.ACCEPT] = accept
        try:
            return Invoker(self.backend).begin(
                function, headers, id_of(request), body, received_s, caller_of(request), content_type=kind, extra=extra
            )  # fmt: skip
        except PilotflameError as error:
            self.backend.functions.events.refused(function, error)
            raise

    async def _read(self, request: web.Request, function: str) -> tuple[bytes, str]:
        """Return the body and its media type; "" for JSON. Raise BadInput if the request names another variant."""
        live, body = await self.backend.read_body(request, function)
        check_target(request.headers, live)
        if not (kind := content_type_of(request.headers)):
            await parsed(request, body, load_json)
        return body, kind


class _Chunks(EventStream):
    """The streamed answer of a container: the bytes of the output. If the function fails, the connection is closed."""

    async def finish(self, error: PilotflameError | None) -> web.StreamResponse:
        response = await self._write(b"")
        if error is None:
            await response.write_eof()
        else:
            self.abort()
        return response

    async def send(self, payload: bytes) -> None:
        await self._write(payload)

    def _encode(self, pieces: list[bytes], first: int) -> bytes:
        return b"".join(map(payload_of, pieces))


async def _streamed(
    revision: Revision, invocation: Invocation, events: PayloadStream | _Chunks
) -> web.StreamResponse:
    """Send the output as it comes. Raise the function's error if nothing was sent before.

    If the output has not ended by the deadline, close the connection.
    """
    left_s = max(0.0, invocation.deadline_s - time.monotonic())
    failed: PilotflameError | None = None
    try:
        async with asyncio.timeout(left_s + LAST_EVENT_S):
            if invocation.stream is not None:
                await events.send_pieces(invocation.stream)
            try:
                output = await invocation.wait()
                if invocation.stream is None:
                    await events.send(output.payload)
            except PilotflameError as error:
                if events.response is None:
                    raise
                failed = error
            return await events.finish(failed)
    except TimeoutError:
        events.abort()
        return events.response or web.Response(status=DeadlineExceeded.status)
    finally:
        if not invocation.ended:
            revision.cancel(invocation)


def _any(_headers: Mapping[str, str]) -> bool:
    return True


def _headers(request: web.Request) -> dict[str, str]:
    variant = request.headers.get(TARGET, VARIANT)
    return {
        "x-amzn-RequestId": id_of(request), "X-Request-Id": id_of(request), "x-Amzn-Invoked-Production-Variant": variant,
    }  # fmt: skip
