"""Defines the requests for predictions that callers of Cog and Replicate send, and the responses to them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NotRequired

import orjson
from aiohttp import web
from pydantic import BaseModel, Field, NonNegativeFloat, StringConstraints
from typing_extensions import TypedDict

from ....errors import InputInvalid, PilotflameError, UnknownJob
from ...front.api.backend import Backend
from ...front.http.parsed_bodies import parsed
from ...front.http.requests import Headers, caller_of, load_json, owner_of, read_body, too_large, validate
from ...front.http.responses import ErrorFields, Response, Timestamp, error_reply, outputs_response
from ...jobs.stored.job import EVENTS, Job, Webhook
from ...jobs.stored.jobs import Jobs
from ...node.functions.live import Live
from .prediction import FORM, MAX_SHOWN_PIECES, PredictionState, prediction_of, stored_id

MAX_DIGITS = 10
# The ids that a caller may choose. They must not begin like generated ids.
ID = re.compile(r"(?!job-)[A-Za-z0-9._~-]{1,128}")
WebhookEvent = Literal["start", "output", "logs", "completed"]
TRACE_HEADERS = ("traceparent", "tracestate")
MAX_TRACE_CHARS = 512
ContextText = Annotated[str, StringConstraints(max_length=4096)]
_STEP = re.compile(r"[^.\[\]]+")


class PredictionRequest(BaseModel, frozen=True, extra="ignore", strict=True):
    """A new prediction. Unknown keys are ignored, as in Cog."""

    input: Any = Field(default_factory=dict)
    id: str | None = Field(None, max_length=1024)
    version: str | None = Field(None, max_length=256)
    context: dict[ContextText, ContextText] | None = Field(None, max_length=100)
    output_file_prefix: str | None = Field(None, max_length=2048, pattern="^https?://")
    webhook: str | None = Field(None, max_length=2048)
    webhook_events_filter: list[WebhookEvent] | None = Field(None, max_length=100)

    def fields(
        self, path_id: str | None, owner: str, headers: Headers, *, waits: bool = True
    ) -> dict[str, Any]:
        """Return the fields of NewJob that this request sets with its body, its headers and the id in its path.

        If the caller does not wait for the end (`waits` is False), the function may upload its output files. Raise
        InputInvalid if the id is malformed, or if path and body have different ids.
        """
        if path_id is not None and self.id not in (None, path_id):
            raise InputInvalid("The id in the body is not the one in the path.", remedy="Send one of them.")
        wanted = path_id or self.id or ""
        if wanted and not ID.fullmatch(wanted):
            remedy = "Use 1 to 128 of A-Z a-z 0-9 . _ ~ and -, and do not begin with job-."
            raise InputInvalid(f"{wanted[:128]!r} cannot be a prediction's id.", remedy=remedy)
        about: dict[str, Any] = {
            "context": self.context,
            "output_file_prefix": self.output_file_prefix,
            "id": wanted,
            "trace": trace_of(headers),
        }
        about |= {"asynchronous": not waits}
        told = {name: value for name, value in about.items() if value}
        fields: dict[str, Any] = {"wanted_id": stored_id(wanted, owner)}
        if told:
            fields["extra"] = {FORM: told}
        if wanted:
            fields["idempotency"] = f"prediction:{wanted}"
        if self.webhook:
            events = tuple(self.webhook_events_filter or EVENTS)
            fields["webhook"] = Webhook(self.webhook, events, FORM)
        return fields


class PredictionMetrics(TypedDict):
    """Durations in seconds, and the metrics that the predictor has recorded."""

    predict_time: NotRequired[NonNegativeFloat]
    total_time: NotRequired[NonNegativeFloat]


class Prediction(TypedDict):
    """A prediction as these routes show it."""

    id: str
    version: str
    status: PredictionState
    input: Any
    output: Any
    error: str | None
    logs: str
    metrics: PredictionMetrics
    created_at: Timestamp | None
    started_at: Timestamp | None
    completed_at: Timestamp | None
    webhook: str | None


class PredictionError(TypedDict):
    """The body of an error: `detail` as in Cog and Replicate, and the gateway's own fields."""

    detail: str | list[dict[str, Any]]
    error: ErrorFields


async def prediction_response(
    request: web.Request, jobs: Jobs, job: Job, complete: Callable[[dict[str, Any]], dict[str, Any]],
    *, status: int = 200, headers: Headers | None = None,
) -> web.Response:  # fmt: skip
    """Return a response with what `complete` returns for the prediction. While the job streams, its output is the pieces so far."""
    pieces: list[bytes] = []
    if job.pieces and not job.state.final:
        pieces = [piece for _, piece in await jobs.store.pieces(job.id, 0, MAX_SHOWN_PIECES)]
    size = len(job.input) + len(job.output or b"") + sum(map(len, pieces))
    return await outputs_response(
        request, size, lambda: complete(prediction_of(job, pieces)), status=status, headers=headers
    )


async def read_prediction(
    request: web.Request, backend: Backend, most: int, remedy: str
) -> tuple[PredictionRequest, bytes]:
    """Return the request for a prediction, and its body, which may have at most `most` bytes.

    Raise InputInvalid, with `remedy`, if the body is no PredictionRequest. Raise the errors of `requests.read_body`.
    """
    body = await read_body(request, most, remedy=backend.too_large_remedy(most))
    wanted = await parsed(
        request,
        body or b"{}",
        lambda body: validate(PredictionRequest, load_json(body), remedy, InputInvalid),
    )
    return wanted, body


def trace_of(headers: Headers) -> dict[str, str]:
    """Return the headers of the caller's trace. As in Cog, webhooks and uploads are sent with the same headers."""
    sent = {name: headers.get(name, "") for name in TRACE_HEADERS}
    return {
        name: value
        for name, value in sent.items()
        if value and len(value) <= MAX_TRACE_CHARS and value.isascii() and value.isprintable()
    }


def check_size(live: Live, body: bytes) -> None:
    """Raise InputTooLarge if the body of a prediction is larger than its function allows."""
    if len(body) > (most := live.record.settings.max_body_bytes):
        raise too_large(most)


async def find_prediction(request: web.Request, backend: Backend) -> Job:
    """Return the job whose id is in the path, even if its function was deleted. Raise UnknownJob or JobExpired."""
    caller, job_id, owner = caller_of(request), request.match_info["id"], owner_of(request)
    names, find = backend.names(request), backend.jobs.store.find
    if caller.owner and ID.fullmatch(job_id):
        with contextlib.suppress(UnknownJob):
            return await find(stored_id(job_id, caller.owner), caller.allows, names, owner)
    # A stored id has no owner appended if the gateway generated it, or if a caller without an API key chose it.
    return await find(job_id, caller.allows, names, owner)


def wait_in(preferences: Mapping[str, str], most: float) -> float | None:
    """Return the seconds of `wait=seconds` in the header Prefer, at most `most`, or None if the header has no wait."""
    text = preferences.get("wait", "")
    return min(float(text), most) if text.isascii() and text.isdecimal() and len(text) < MAX_DIGITS else None


def detailed_error(error: PilotflameError, request_id: str) -> Response:
    """Return the response for an error. For status 422, `detail` lists the wrong fields, as FastAPI does."""
    reply = error_reply(error, request_id)
    detail = details_of(error) if error.status == InputInvalid.status else str(error)
    return reply._replace(body=orjson.dumps({"detail": detail} | orjson.loads(reply.body)))


def details_of(error: PilotflameError) -> list[dict[str, Any]]:
    """Return the wrong fields of a request as FastAPI lists them."""
    problems = error.details.get("problems") or [{"problem": str(error), "type": error.code}]
    return [
        {
            "loc": ["body", *_steps(problem.get("path") or problem.get("field") or "")],
            "msg": problem["problem"],
            "type": problem.get("type", "value_error"),
        }
        for problem in problems
    ]


def _steps(path: str) -> list[str | int]:
    """Return the names and positions in a path such as "input.tags[0]"."""
    steps = _STEP.findall(path) if path != "the body" else []
    return [int(step) if step.isdecimal() else step for step in steps]
