"""Serves a request for a web app whose body is complete, without a task and the response objects of aiohttp."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

from ....errors import LinkError, OutputInvalid, PilotflameError
from ...api.fast_path import FastCall
from ...api.guard import Admitted
from ...http.event_stream import LAST_EVENT_S
from ...http.responses import SERVER, error_reply, invocation_headers
from ...link.stream_credit import ReadPieces
from ...serving.invocation import Invocation, Stream
from ...serving.revision import Revision
from .messages import ResponsePiece, decode_response
from .response_encoder import ResponseEncoder


class FastAppRequest:
    """One request, from its admission to the end of its response. Events of the stream and the connection drive it."""

    def __init__(self, call: FastCall, admitted: Admitted) -> None:
        self.caller, self.owner = admitted.caller, admitted.caller.owner
        self._call, self._admitted = call, admitted
        self._encoder, self._read = ResponseEncoder(head=call.message.method == "HEAD"), ReadPieces()
        self._revision: Revision | None = None
        self._paused = self._scheduled = self._over = False
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, request_id: str, submit: Callable[[], tuple[Revision, Invocation]]) -> None:
        """Submit the invocation. If that raises an error, respond with the error."""
        try:
            self._revision, self._invocation = submit()
        except PilotflameError as error:
            self._end_with(error, error_reply(error, request_id).headers)
            return
        if self._invocation.stream is None:
            raise LinkError("An invocation of a web app has no stream.")
        self._stream: Stream = self._invocation.stream
        self._stream.on_change = self._schedule
        if self._stream.ready:
            self._schedule()

    # -- what the connection calls

    def abandon(self) -> None:
        """Cancel the invocation: the caller has closed the connection."""
        if not self._over:
            self._leave(499)
            if self._revision is not None and not self._invocation.ended:
                self._revision.cancel(self._invocation)

    def pause(self) -> None:
        """Send no more until `resume`, because the caller reads slowly. Close the connection after the deadline."""
        self._paused = True
        left_s = max(0.0, self._invocation.deadline_s - time.monotonic()) + LAST_EVENT_S
        self._timer = asyncio.get_running_loop().call_later(left_s, self._call.transport.abort)

    def resume(self) -> None:
        self._paused = False
        self._stop_timer()
        self._schedule()

    # -- the response

    def _schedule(self) -> None:
        """Send the pieces after the callbacks of this turn, so that one process with many requests wakes up once."""
        if not self._scheduled and not self._over:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        self._scheduled = False
        if self._over or self._revision is None:
            return
        output = self._invocation.output
        failure = output.exception() if output.done() and not output.cancelled() else None
        if self._paused and failure is None:
            return
        try:
            if pieces := self._take():
                self._write(pieces)
            if not self._over and isinstance(failure, PilotflameError):
                self._fail(failure)
        except (OutputInvalid, LinkError) as error:
            self._revision.cancel(self._invocation, error)
            self._fail(error)

    def _take(self) -> list[ResponsePiece]:
        """Return the pieces that have arrived, with the piece in the result of the invocation."""
        found, output = self._stream.take_now(), self._invocation.output
        for piece in found:
            if count := self._read.add(len(piece)):
                self._stream.consumed(count)
        pieces = [decode_response(piece) for piece in found]
        if output.done() and not output.cancelled() and output.exception() is None:
            self._invocation.timeline.mark_responded(time.monotonic())
            if payload := output.result().payload:
                pieces.append(decode_response(payload))
        return pieces

    def _write(self, pieces: list[ResponsePiece]) -> None:
        encoder = self._encoder
        if not encoder.status:
            encoder.begin(pieces[0], partial(invocation_headers, self._invocation))
            encoder.headers.setdefault("Server", SERVER)
        self._call.transport.write(encoder.encode(pieces))
        if encoder.complete:
            self._leave(encoder.status)
            self._call.sent()

    def _fail(self, error: PilotflameError) -> None:
        """Respond with an error, or close the connection if the response has started."""
        if self._encoder.started:
            self._leave(error.status)
            self._call.transport.abort()
        else:
            self._end_with(error, invocation_headers(self._invocation))

    def _end_with(self, error: PilotflameError, headers: dict[str, str]) -> None:
        self._leave(error.status)
        response = error_reply(error, headers.get("X-Request-Id", ""), headers)
        asyncio.get_running_loop().call_soon(self._call.send, response)

    def _leave(self, status: int) -> None:
        self._over = True
        self._stop_timer()
        self._admitted.leave()
        self._call.log(status, self.owner)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
