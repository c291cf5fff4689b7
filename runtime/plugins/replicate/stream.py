"""Streams the output of a prediction to any client that has the signed URL of the stream, as Replicate does.

Replicate's clients for browsers and Node open the URL of a stream without an API key. So the URL must prove the
permission: it holds a signature of the prediction's id, which only the gateway can make. A receiver of webhooks knows
the function's webhook secret, but cannot make this signature with it. The stream consists of server-sent events.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterator, Sequence

import orjson
from aiohttp import web

from ...front.api.job_events import JobEncoder, send_job
from ...front.http.event_stream import EVENTS
from ...front.http.routes import Parameter, Route
from ...jobs.stored.job import Job, JobState
from ...jobs.stored.job_store import unknown_job
from ...jobs.stored.jobs import Jobs
from ..predictions.prediction import prediction_of
from .problem import ERRORS

SIGNATURE = Parameter("signature", "As in `urls.stream` of the prediction.", required=True)
PATH = "/v1/streams/{id}"
_REASONS = {JobState.CANCELLED: "canceled", JobState.FAILED: "error", JobState.TIMED_OUT: "error"}
# A text is encoded in parts of this size, because a list of all its lines could take fifty times the memory of the
# text, if its lines are empty.
_PART_CHARS = 64 << 10
_LINE_END = re.compile(r"\r\n|\r|\n")


class StreamApi:
    """The route of streams."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs

    def routes(self) -> list[Route]:
        stream = "Stream the output of a prediction."
        return [
            Route(
                "GET", PATH, self.stream, None, stream, EVENTS, errors=(404, 410, 503), parameters=(SIGNATURE,),
                public=True, **ERRORS,
            )
        ]  # fmt: skip

    def path(self, job: Job) -> str:
        """Return the path and the query of a job's stream."""
        return f"{PATH.format(id=job.id)}?{SIGNATURE.name}={self._signature(job)}"

    async def stream(self, request: web.Request) -> web.StreamResponse:
        job_id = request.match_info["id"]
        # The signature replaces the check of the owner. So search the jobs of all owners.
        job = await self._jobs.store.glance_any(job_id)
        sent = request.query.get(SIGNATURE.name, "")
        if not hmac.compare_digest(sent.encode(errors="replace"), self._signature(job).encode()):
            raise unknown_job(job_id)
        return await send_job(request, self._jobs, job, _encoder())

    def _signature(self, job: Job) -> str:
        return self._jobs.key.seal("stream", f"{job.function}:{job.id}")


def _encoder() -> JobEncoder:
    last = 0

    def encode(job: Job, pieces: Sequence[tuple[int, bytes]]) -> Iterator[bytes]:
        nonlocal last
        for number, piece in pieces:
            last = number
            yield from _event("output", _text(piece), number)
        if not job.state.final or pieces:
            return
        if job.state is JobState.COMPLETED and not job.pieces and job.output:
            last += 1
            text = str(prediction_of(job)["output"]) if job.output_type else _text(job.output)
            yield from _event("output", text, last)
        if job.error is not None:
            last += 1
            yield from _event("error", str(job.error.get("message", "")), last)
        reason = {"reason": _REASONS[job.state]} if job.state in _REASONS else {}
        yield from _event("done", orjson.dumps(reason).decode(), last + 1)

    return encode


def _event(name: str, text: str, number: int) -> Iterator[bytes]:
    """Yield the parts of an event. Each line of `text` becomes a `data:` line, and clients join these lines again."""
    yield f"event: {name}\nid: {number}\ndata: ".encode()
    start = 0
    while start < len(text):
        end = start + _PART_CHARS
        # Keep the two characters of an end of a line in one part.
        end += text[end - 1 : end + 1] == "\r\n"
        yield _LINE_END.sub("\ndata: ", text[start:end]).encode()
        start = end
    yield b"\n\n"


def _text(piece: bytes) -> str:
    """Return a piece of an output as text: a string without its JSON quotes, any other value as JSON."""
    return str(orjson.loads(piece)) if piece.startswith(b'"') else piece.decode()
