"""Sends large answers in slices, and limits the bytes of answers that callers have not read.

The owners of API keys share the limit for unread answers. The gateway disconnects a caller that reads nothing for a
while.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from aiohttp import web

from ....errors import CallEnded, Overloaded
from ...ground.access.fair_share import SharedRoom
from .requests import BODY_TIMEOUT_S, caller_of
from .sliced_body import SLICE_BYTES, SlicedBody, write_slices

MAX_BYTES = 1 << 30
RETRY_S = 1.0


class LargeAnswers:
    """The large answers that are being sent."""

    def __init__(self, timeout_s: float = BODY_TIMEOUT_S, most: int = MAX_BYTES) -> None:
        """`timeout_s` limits the time for sending a slice. `most` limits the unread bytes of all answers together."""
        self.timeout_s = timeout_s
        self.room = SharedRoom(most)

    def sliced(
        self, body: bytes | SlicedBody, media_type: str, owner: str, transport: asyncio.Transport | None, *, called: bool
    ) -> bytes | SlicedBody:  # fmt: skip
        """Return a body as it is sent: in slices if it is large. If the callers of this owner have left too many bytes
        unread, raise Overloaded. If `called` is True, raise CallEnded instead: a call may have ended, so the caller
        must not repeat it.
        """
        if isinstance(body, bytes):
            if len(body) <= SLICE_BYTES:
                return body
            body = SlicedBody([body], media_type)
        self._check_room(owner, body.size, called=called)
        body.timeout_s = self.timeout_s
        body.sending = partial(self._sending, transport, owner, body.size)
        return body

    async def write(self, request: web.Request, response: web.StreamResponse, part: bytes) -> None:
        """Send a part of a streamed response, whose header was sent. Raise ConnectionResetError if the caller reads nothing, or if the
        callers of this owner have left too many bytes unread.
        """
        if len(part) <= SLICE_BYTES:
            # Set no time limit for a small part. If its caller does not read, the deadline of the invocation ends the
            # write.
            await response.write(part)
            return
        try:
            await self.send(request, response, part)
        except Overloaded as error:
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError(error.message) from None

    async def send(self, request: web.Request, response: web.StreamResponse, part: bytes) -> None:
        """Send a part of a streamed response in slices. Raise Overloaded if the callers of this owner have left too many
        bytes unread, and ConnectionResetError if the caller reads nothing.
        """
        owner = caller_of(request).owner
        if len(part) > SLICE_BYTES:
            self._check_room(owner, len(part))
        with self._sending(request.transport, owner, len(part)):
            await write_slices([part], response.write, self.timeout_s)

    def _check_room(self, owner: str, size: int, *, called: bool = False) -> None:
        if not self.room.takes(owner, size):
            message = "The gateway holds as many bytes of answers as it may, which callers have not read."
            remedy = "Read the answers to your other requests."
            error = Overloaded(message, remedy=remedy, details={"retry_after_s": RETRY_S})
            raise CallEnded.after(error) if called else error

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


ANSWERS = web.AppKey("answers", LargeAnswers)
