"""Sends the body of a request to a web app, and the app's response to the caller, both while they arrive."""

from __future__ import annotations

import asyncio
import time

from aiohttp import web

from ....errors import BadInput, DeadlineExceeded, InputTimeout, LinkError, OutputInvalid, PilotflameError
from ...calls.link.stream_credit import PIECE_BYTES, ReadPieces
from ...calls.serving.input_stream import InputStream
from ...calls.serving.invocation import Invocation, Stream
from ...calls.serving.revision import Revision
from ...front.http.event_stream import LAST_EVENT_S
from ...front.http.requests import BODY_TIMEOUT_S, continue_body, too_large
from ...front.http.responses import error_reply, invocation_headers
from .app_response import AppResponse
from .messages import ResponsePiece, decode_response, parts


class HttpExchange:
    """One request and its response."""

    def __init__(
        self, request: web.Request, revision: Revision, invocation: Invocation, stream: Stream, most: int
    ) -> None:
        """`most` limits the bytes of the body. Each part of the body must arrive within `BODY_TIMEOUT_S`."""
        self._request, self._revision, self._invocation = request, revision, invocation
        self._stream, self._most = stream, most
        self._read = ReadPieces()
        self.response = AppResponse(request, invocation)

    async def run(self) -> web.StreamResponse:
        """Return the response. If the caller disconnects before the response is complete, cancel the invocation."""
        body = self._invocation.input
        try:
            return await (self._respond() if body is None else self._respond_while_sending(body))
        finally:
            self._invocation.answered = self.response.complete
            if not self.response.complete and not self._invocation.ended:
                self._revision.cancel(self._invocation)

    async def _respond_while_sending(self, body: InputStream) -> web.StreamResponse:
        try:
            async with asyncio.TaskGroup() as tasks:
                sending = tasks.create_task(self._send_body(body))
                responding = tasks.create_task(self._respond())
                responding.add_done_callback(lambda _: sending.cancel())
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        return responding.result()

    async def _respond(self) -> web.StreamResponse:
        """Return the response once it is complete. On an error, respond with the error, or close the connection if the app's
        response has started.
        """
        try:
            await self._send_response()
        except (OutputInvalid, LinkError) as error:
            self._revision.cancel(self._invocation, error)
            return self._failed(error)
        except PilotflameError as error:
            return self._failed(error)
        return self.response

    def _failed(self, error: PilotflameError) -> web.StreamResponse:
        """Respond with an error, or close the connection if the app's response has started."""
        if not self.response.started:
            return error_reply(error, self._invocation.id, invocation_headers(self._invocation)).response()
        self.response.abort()
        return self.response

    async def _send_response(self) -> None:
        """Send the response until it is complete. The app may run on afterwards, for example in background tasks.

        Raise the error of the invocation if it fails. Raise OutputInvalid or LinkError if the pieces are not a valid
        response, and DeadlineExceeded if the caller reads too slowly.
        """
        pieces = await self._next()
        left_s = max(0.0, self._invocation.deadline_s - time.monotonic())
        try:
            async with asyncio.timeout(left_s + LAST_EVENT_S):
                await self.response.send(pieces)
                while not self.response.complete:
                    await self.response.send(await self._next())
        except TimeoutError:
            late = "The caller has not read the response by the deadline."
            raise DeadlineExceeded(late, remedy="Read it faster.") from None

    async def _next(self) -> list[ResponsePiece]:
        """Return the next pieces. Raise the error of the invocation if it has failed."""
        if found := await self._stream.take():
            for piece in found:
                if count := self._read.add(len(piece)):
                    self._stream.consumed(count)
            return [decode_response(piece) for piece in found]
        output = await self._invocation.wait()
        self._invocation.timeline.mark_responded(time.monotonic())
        return [decode_response(output.payload)]

    async def _send_body(self, body: InputStream) -> None:
        """Send the body of the request in pieces. If the body is invalid, too long or too slow, fail the invocation."""
        try:
            if await body.wait_asked():
                await continue_body(self._request)
                await self._send_parts(body)
        except TimeoutError:
            late = f"A part of the body took longer than {BODY_TIMEOUT_S:.0f} s."
            self._fail(InputTimeout(late, remedy="Send less."))
        except web.RequestPayloadError as error:
            self._fail(BadInput(f"The body broke off or is malformed: {error}."))
        except PilotflameError as error:
            self._fail(error)

    async def _send_parts(self, body: InputStream) -> None:
        content, size = self._request.content, 0
        while True:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                read = await content.readany()
            if not read:
                break
            size += len(read)
            if size > self._most:
                raise too_large(self._most)
            for part in parts(read, PIECE_BYTES):
                if not await body.put(part):
                    return
        await body.put(b"", last=True)

    def _fail(self, error: PilotflameError) -> None:
        self._revision.cancel(self._invocation, error)
