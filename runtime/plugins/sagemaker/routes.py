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
from ...access.keys import Scope
from ...api.backend import ASYNC_BODY_BYTES, Backend
from ...api.invoke import Gateway, collected
from ...api.plugin import BARE, ApiPlugin
from ...functions.live import Live
from ...http.event_stream import LAST_EVENT_S, EventStream
from ...http.requests import caller_of, content_type_of, id_of, load_json
from ...http.responses import json_response
from ...http.routes import Parameter, Route, header
from ...serving.invocation import Invocation
from ...serving.revision import Revision
from ..amazon.event_stream import EVENT_STREAM_TYPE, payload_of
from .async_answers import AsyncAnswers, PendingAnswer
from .failures import ERRORS, PayloadStream
from .objects import Objects

ENDPOINT = "/endpoints/{function}"
VARIANT = "AllTraffic"
"""The name that SageMaker gives the only variant of an endpoint."""
PREFIX = "X-Amzn-SageMaker-"
CUSTOM, INFERENCE_ID, TARGET = (
    f"{PREFIX}Custom-Attributes",
    f"{PREFIX}Inference-Id",
    f"{PREFIX}Target-Variant",
)
REFUSED = {
    "Target-Model": "TargetModel", "Target-Container-Hostname": "TargetContainerHostname", "Session-Id": "SessionId",
    "Enable-Explanations": "EnableExplanations", "Inference-Component": "InferenceComponentName", "Prefix-Aware-Id": "PrefixAwareId",
}  # fmt: skip
"""The headers of parameters that pilotflame does not have, and the names of these parameters."""
MAX_CHARS = 1024
PARAMETERS: tuple[Parameter, ...] = (
    header(CUSTOM, "The handler finds it in context.extra.", type="string", maxLength=MAX_CHARS),
    header(INFERENCE_ID, "The handler finds it in context.extra.", type="string"),
    header(
        TARGET, f"{VARIANT}, the number of the live revision, or a name in the function's setting `aliases`."
    ),
)

LOCATION = f"{PREFIX}InputLocation"
ASYNC_PARAMETERS = (
    *PARAMETERS[:2],
    header(LOCATION, "The input, as s3://bucket/key. The body may be the input instead."),
    header(f"{PREFIX}Content-Type", "The media type of the input, if it is not that of the object."),
    header(
        f"{PREFIX}RequestTTLSeconds", "How long the job may exist.", type="integer", minimum=1, maximum=21_600
    ),
    header(
        f"{PREFIX}InvocationTimeoutSeconds",
        "How long a call may take.",
        type="integer",
        minimum=1,
        maximum=3600,
    ),
)


class SageMakerApi(ApiPlugin):
    """The routes of endpoints, and, if the gateway serves one function, of containers."""

    base: ClassVar = "/sagemaker"

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self._objects = Objects(backend.functions)
        self._answers = AsyncAnswers(backend, self._objects)

    def routes(self) -> Sequence[Route]:
        # The bodies of 424 and 429 are errors too. boto3 retries none of them but ThrottlingException.
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
            # TorchServe has the same path, where it says less.
            Route("GET", "/ping", self.ping, None, "Show the health of the only function.", {"status": str}, errors=(404, 422, 503), accepts=_any),
            Route("POST", "/invocations", self.invoke_only, Scope.INVOKE, "Call the only function.", {JSON_TYPE: Any, "*/*": Any}, errors=(400, 404, 408, 413, 422, 429, 500, 503, 504), **body),
        ]  # fmt: skip

    async def ping(self, request: web.Request) -> web.StreamResponse:
        if why := self.backend.only(request).unavailable:
            raise FunctionStopped(why)
        # SageMaker reads only the status.
        return json_response({"status": "Healthy"})

    async def invoke(self, request: web.Request) -> web.StreamResponse:
        revision, invocation = await self._begin(request, request.match_info["function"])
        try:
            output = await collected(invocation)
        finally:
            if not invocation.ended:
                revision.cancel(invocation)
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
        return await Gateway(self.backend).finish(request, name, revision, invocation)

    async def submit(self, request: web.Request) -> web.StreamResponse:
        """Submit the input as a job. Respond once the job, and the place of its answer, are stored."""
        name, extra = request.match_info["function"], {**BARE, **_facts(request.headers)}
        limits = _limits(request.headers)
        live, body = await self.backend.read_body(request, name, ASYNC_BODY_BYTES)
        prefix = self._objects.output_prefix(live)
        kind = request.headers.get(f"{PREFIX}Content-Type", "")
        if location := request.headers.get(LOCATION):
            if body:
                raise BadInput("The request has an InputLocation and a body.", remedy="Send one of them.")
            found = await self._objects.read(
                live, location, min(ASYNC_BODY_BYTES, self.backend.body_limit(live.revision))
            )
            body, kind = found.body, kind or found.content_type
        elif not body:
            raise BadInput("The request has no InputLocation.", remedy="Name an object of S3.")
        kind = "" if kind == JSON_TYPE else kind
        if not kind:
            load_json(body)
        job, replayed = await self.backend.submit(
            request, live, body, content_type=kind, extra=extra, **limits
        )
        output, failure = f"{prefix}/{job.id}.out", f"{prefix}/{job.id}-error.out"
        await self._answers.add(PendingAnswer(job=job.id, function=name, output=output, failure=failure))
        headers = {
            "x-amzn-RequestId": id_of(request), "X-Job-Id": job.id, f"{PREFIX}OutputLocation": output,
            f"{PREFIX}FailureLocation": failure,
        }  # fmt: skip
        inference = request.headers.get(INFERENCE_ID, job.id)
        return json_response({"InferenceId": inference}, status=202, headers=headers | replayed)

    async def sweep(self) -> None:
        await self._answers.run()

    async def _begin(self, request: web.Request, function: str) -> tuple[Revision, Invocation]:
        """Submit the invocation of a request. Raise BadInput if the request names what the function does not have."""
        received_s = time.monotonic()
        extra = {**BARE, **_facts(request.headers)}
        live, body = await self.backend.read_body(request, function)
        _check_target(request.headers, live)
        kind = content_type_of(request.headers)
        if not kind:
            load_json(body)
        headers = CIMultiDict(request.headers)
        if accept := headers.get(f"{PREFIX}Accept"):
            headers[hdrs.ACCEPT] = accept
        try:
            return Gateway(self.backend).begin(
                function, headers, id_of(request), body, received_s, caller_of(request), content_type=kind, extra=extra
            )  # fmt: skip
        except PilotflameError as error:
            self.backend.functions.note_refused(function, error)
            raise


def _limits(headers: Mapping[str, str]) -> dict[str, float]:
    """Return the limits of a job that the request names. Raise BadInput for a parameter that pilotflame does not have."""
    for parameter in ("S3OutputPathExtension", "Filename"):
        if f"{PREFIX}{parameter}" in headers:
            raise BadInput(
                f"pilotflame does not support {parameter}.", remedy="Omit it.", details={"field": parameter}
            )
    if headers.get(f"{PREFIX}Accept", JSON_TYPE) not in (JSON_TYPE, "*/*"):
        raise BadInput(
            "pilotflame does not support Accept here.", remedy="Omit it: the handler chooses the type."
        )
    names = (
        ("RequestTTLSeconds", "ttl_s", 21_600),
        ("InvocationTimeoutSeconds", "execution_timeout_s", 3600),
    )
    found = {}
    for parameter, name, most in names:
        text = headers.get(f"{PREFIX}{parameter}")
        if text is None:
            continue
        if not (text.isascii() and text.isdecimal() and len(text) < 6 and 1 <= int(text) <= most):
            fault = f"{parameter} is {text[:40]!r}."
            raise BadInput(
                fault, remedy=f"It must be a whole number from 1 to {most}.", details={"field": parameter}
            )
        found[name] = float(text)
    return found


class _Chunks(EventStream):
    """The streamed answer of a container: the bytes of the output. The connection breaks if the function fails."""

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
                output = await invocation.output
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


def _facts(headers: Mapping[str, str]) -> dict[str, str]:
    """Return what the handler finds in `context.extra`. Raise BadInput for a parameter that pilotflame does not have."""
    for name, parameter in REFUSED.items():
        if f"{PREFIX}{name}" in headers:
            fault = f"pilotflame does not support {parameter}."
            raise BadInput(fault, remedy="Omit it.", details={"field": parameter})
    facts = {"custom_attributes": headers.get(CUSTOM, ""), "inference_id": headers.get(INFERENCE_ID, "")}
    if len(facts["custom_attributes"]) > MAX_CHARS:
        raise BadInput("CustomAttributes is too long.", remedy=f"Send at most {MAX_CHARS} characters.")
    return {name: value for name, value in facts.items() if value}


def _check_target(headers: Mapping[str, str], live: Live) -> None:
    """Raise BadInput if the request names another variant than the live revision."""
    variant, record = headers.get(TARGET, VARIANT), live.record
    if variant not in (VARIANT, str(record.number), *record.settings.aliases):
        fault = f"Variant {variant[:64]} of endpoint {record.function} not found."
        raise BadInput(fault, remedy=f"Omit TargetVariant, or send {VARIANT}.")


def _headers(request: web.Request) -> dict[str, str]:
    variant = request.headers.get(TARGET, VARIANT)
    return {
        "x-amzn-RequestId": id_of(request), "X-Request-Id": id_of(request), "x-Amzn-Invoked-Production-Variant": variant,
    }  # fmt: skip
