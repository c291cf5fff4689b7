"""Sends what happens to a job as server-sent events: its states, the pieces of its output, and its end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import orjson
from aiohttp import web

from ....errors import PilotflameError
from ...jobs.stored.job import Job, JobState
from ...jobs.stored.jobs import Jobs
from ..http.event_stream import HEARTBEAT, HEARTBEAT_S, STREAM_HEADERS, event, last_event_id
from ..http.large_answers import ANSWERS
from ..http.responses import made

JobEncoder: TypeAlias = Callable[[Job, Sequence[tuple[int, bytes]]], Iterable[bytes]]
"""Returns the events for a job's present state and for the new pieces (number, JSON) of its output."""


async def send_job(
    request: web.Request, jobs: Jobs, job: Job, encode: JobEncoder, ended: Callable[[Job], Awaitable[Job]] | None = None
) -> web.StreamResponse:  # fmt: skip
    """Send the events that `encode` returns at each change of the job, until the job has ended.

    If the job can no longer be read, the last event is `error`. When the job has ended, call `encode` with the job that
    `ended` returns.
    """
    response = web.StreamResponse(headers=STREAM_HEADERS | {"X-Job-Id": job.id})
    await response.prepare(request)
    last, send = last_event_id(request), partial(request.app[ANSWERS].send, request, response)
    try:
        async for changed, pieces in jobs.follow(job.function, job.id, last, every_s=HEARTBEAT_S):
            final = changed.state.final and not pieces
            shown = await ended(changed) if final and ended is not None else changed
            size = len(shown.output or b"") + sum(len(piece) for _, piece in pieces)
            await send(await made(request, size, partial(_joined, encode, shown, pieces)) or HEARTBEAT)
    except PilotflameError as error:
        await send(event("error", orjson.dumps(error.to_wire())))
    await response.write_eof()
    return response


def _joined(encode: JobEncoder, job: Job, pieces: Sequence[tuple[int, bytes]]) -> bytes:
    return b"".join(encode(job, pieces))


def job_encoder(
    show: Callable[[Job], Mapping[str, Any]],
    numbered: Callable[[Iterable[tuple[int, bytes]]], Iterable[tuple[int, bytes]]] = iter,
) -> JobEncoder:
    """Return an encoder of the events `status`, `output`, and at the end `completed` or `error`, with the result of `show`.

    `numbered` gets the new pieces with their numbers, and returns the numbers and texts of the events `output`.
    """
    state: JobState | None = None

    def encode(job: Job, pieces: Sequence[tuple[int, bytes]]) -> Iterator[bytes]:
        nonlocal state
        if job.state is not state and not job.state.final:
            state = job.state
            yield event("status", orjson.dumps({"status": state}))
        for number, piece in numbered(pieces):
            yield event("output", piece, number)
        if job.state.final and not pieces:
            name = "completed" if job.state is JobState.COMPLETED else "error"
            yield event(name, orjson.dumps(show(job)))

    return encode
