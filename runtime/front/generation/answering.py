"""Responds to a request for text: with the whole answer, or with a stream of its pieces."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import orjson
from aiohttp import web

from ....errors import DeadlineExceeded, PilotflameError
from ....handlers.codec import JSON_TYPE
from ....handlers.language_model.contract import Delta, GenerationRequest
from ...node.functions.live import Live
from ..api.backend import Backend
from ..api.invoke import Invoker
from ..http.call_group import CallGroup
from ..http.event_stream import HEARTBEAT, HEARTBEAT_S, LAST_EVENT_S, STREAM_HEADERS, comments
from ..http.guard import count_calls
from ..http.large_answers import ANSWERS
from ..http.requests import timeout_of
from ..http.responses import made
from .deltas import Deltas
from .targets import with_targets

MAX_ON_LOOP_BYTES = 128 << 10
"""The largest answer or piece that is encoded on the event loop. Larger ones, such as a piece with the logprobs of a
long prompt, are encoded in threads, which serve callers in turn.
"""
AHEAD = "X-Queue-Ahead"
"""A header of a stream that begins while its call waits for a worker. Its value is the number of calls of the same
caller that workers take first.
"""


class TextAnswer(Protocol):
    """The answer to one request in the form of a protocol. It grows with each delta."""

    def add(self, prompt: int, delta: Delta) -> None:
        """Add a piece of the answer to prompt number `prompt`."""

    def whole(self) -> Any:
        """Return the JSON value of the response to a request without a stream."""

    def piece(self, prompt: int, delta: Delta) -> bytes:
        """Add a piece, and return its events in a stream; b"" if it has none."""

    def end(self) -> bytes:
        """Return the last events of a stream."""

    def failed(self, error: PilotflameError) -> bytes:
        """Return the last event of a stream that ends with an error."""


async def respond(
    backend: Backend, request: web.Request, live: Live, events: Sequence[GenerationRequest], answer: TextAnswer, *, stream: bool
) -> web.StreamResponse:  # fmt: skip
    """Call the function once for each event, and return the response. Raise the function's error."""
    asked = with_targets(request, events)
    count_calls(request, sum(event.n or 1 for event in asked))
    limit_s = timeout_of(request.headers, live.record.settings.timeout_s)
    async with CallGroup() as tasks:
        deltas = Deltas(Invoker(backend), request, live, asked, tasks, backend.functions.events.generated)
        try:
            async with asyncio.timeout(limit_s + LAST_EVENT_S):
                return await (_sent if stream else _whole)(request, answer, deltas)
        except TimeoutError:
            # The calls end at their own deadline, so after this time limit the caller is not reading the answer. Close
            # the connection.
            if request.transport is not None:
                request.transport.abort()
            raise DeadlineExceeded("The answer could not be sent in time.") from None
        finally:
            deltas.close()


async def _whole(request: web.Request, answer: TextAnswer, deltas: Deltas) -> web.StreamResponse:
    while (found := await deltas.next()) is not None:
        answer.add(*found[:2])

    body = await made(request, deltas.size, lambda: orjson.dumps(answer.whole()), MAX_ON_LOOP_BYTES)
    return web.Response(body=body, headers=deltas.headers, content_type=JSON_TYPE)


async def _sent(request: web.Request, answer: TextAnswer, deltas: Deltas) -> web.StreamResponse:
    """Send the events as they arrive. While no event arrives, send a comment every HEARTBEAT_S.

    Raise an error that occurs before the first event or comment. Send a later error as the last event.
    """
    response, waited = web.StreamResponse(headers=STREAM_HEADERS), False
    try:
        while True:
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    found = await deltas.next()
            except TimeoutError:
                waited |= not response.prepared
                await _write(request, response, deltas, _comment(deltas))
                continue
            if found is None:
                break
            if waited:
                waited = False
                await response.write(comments(deltas.headers))
            prompt, delta, size = found
            # Count the last piece as large as all pieces: in some protocols, its events repeat the whole text.
            size = size if delta.finish_reason is None else deltas.size
            if data := await made(request, size, partial(answer.piece, prompt, delta), MAX_ON_LOOP_BYTES):
                await _write(request, response, deltas, data)
    except PilotflameError as error:
        if not response.prepared:
            raise
        await _write(request, response, deltas, answer.failed(error))
    else:
        last = await made(request, deltas.size, answer.end, MAX_ON_LOOP_BYTES)
        await _write(request, response, deltas, last)
    await response.write_eof()
    return response


def _comment(deltas: Deltas) -> bytes:
    """Return the comment for a caller who waits. It contains the number of their own calls that workers take first."""
    return (
        HEARTBEAT
        if (ahead := deltas.ahead) is None
        else f": waiting for a worker, {ahead} ahead\n\n".encode()
    )


async def _write(request: web.Request, response: web.StreamResponse, deltas: Deltas, data: bytes) -> None:
    if not response.prepared:
        response.headers.update(deltas.headers)
        if (ahead := deltas.ahead) is not None:
            response.headers[AHEAD] = str(ahead)
        await response.prepare(request)
    await request.app[ANSWERS].write(request, response, data)
