"""Sends large answers in slices, and limits the bytes of answers that callers have not read.

The owners of API keys share the room for unread answers. A caller that reads nothing for a while is disconnected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from aiohttp import web

from ....errors import Overloaded
from ...ground.access.fair_share import SharedRoom
from .requests import caller_of, request_id_of
from .responses import Handler, error_reply
from .sliced_body import SLICE_BYTES, SlicedBody

MAX_BYTES = 1 << 30
RETRY_S = 1.0


class LargeAnswers:
    """The large answers that are being sent."""

    def __init__(self, timeout_s: float, most: int = MAX_BYTES) -> None:
        """A slice may take `timeout_s`. All answers together may have `most` unread bytes."""
        self.timeout_s = timeout_s
        self.room = SharedRoom(most)

    def refusal(self, owner: str, size: int) -> Overloaded | None:
        """Return the error for an owner whose callers have left too many bytes unread; else None."""
        if self.room.takes(owner, size):
            return None
        message = "The gateway holds as many bytes of answers as it may, which callers have not read."
        return Overloaded(
            message, remedy="Read the answers to your other requests.", details={"retry_after_s": RETRY_S}
        )

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        response = await handler(request)
        if not isinstance(response, web.Response):
            return response
        body = response.body
        if isinstance(body, bytes) and len(body) > SLICE_BYTES:
            body = response.body = SlicedBody([body], response.content_type)
        if isinstance(body, SlicedBody):
            owner = caller_of(request).owner
            if (refusal := self.refusal(owner, body.size)) is not None:
                return error_reply(refusal, request_id_of(request.headers)).response()
            body.timeout_s = self.timeout_s
            body.sending = partial(self._sending, request.transport, owner, body.size)
        return response

    @contextmanager
    def _sending(self, transport: asyncio.Transport | None, owner: str, size: int) -> Iterator[None]:
        """Count an answer while it is sent. If its caller reads nothing, close the connection."""
        self.room.add(owner, size)
        try:
            yield
        except TimeoutError:
            if transport is not None:
                transport.abort()
            raise ConnectionResetError("The caller reads nothing.") from None
        finally:
            self.room.remove(owner, size)


class SlicedWrite:
    """One body that the fast path sends in slices. The connection calls `pause` and `resume`, and `stop` at its end."""

    def __init__(
        self,
        answers: LargeAnswers,
        owner: str,
        transport: asyncio.Transport,
        body: bytes,
        done: Callable[[], None],
    ) -> None:
        """After the last slice, `done` is called."""
        self._answers, self._owner, self._transport, self._done = answers, owner, transport, done
        self._unsent, self._size = memoryview(body), len(body)
        self._paused = False
        self._next: asyncio.Handle | None = None
        self._timer = self._start_timer()
        answers.room.add(owner, self._size)

    def begin(self, *, paused: bool) -> None:
        """Send the first slice now, or after `resume` if the transport is paused."""
        self._paused = paused
        self._soon()

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self._soon()

    def stop(self) -> None:
        """End without the rest of the body."""
        self._timer.cancel()
        self._unsent = memoryview(b"")
        self._answers.room.remove(self._owner, self._size)
        self._size = 0

    def _start_timer(self) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self._answers.timeout_s, self._transport.abort)

    def _soon(self) -> None:
        if self._next is None:
            self._next = asyncio.get_running_loop().call_soon(self._write)

    def _write(self) -> None:
        self._next = None
        if self._paused or not self._unsent:
            return
        slice_, self._unsent = self._unsent[:SLICE_BYTES], self._unsent[SLICE_BYTES:]
        self._timer.cancel()
        self._timer = self._start_timer()
        self._transport.write(slice_)
        if self._unsent:
            self._soon()
        else:
            self.stop()
            self._done()
