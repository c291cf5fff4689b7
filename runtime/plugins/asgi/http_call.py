"""Runs one HTTP request of a web app in a worker: passes the body to the app, and the app's response to the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from ....errors import HandlerFailed
from ....handlers.contract import PieceExchange
from .messages import PART_BYTES, encode_head, encode_response, parts

AsgiMessage = MutableMapping[str, Any]
AsgiReceive = Callable[[], Awaitable[AsgiMessage]]
AsgiSend = Callable[[AsgiMessage], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], AsgiReceive, AsgiSend], Awaitable[None]]
BODIES = (bytes, bytearray, memoryview)


class CallerGone(OSError):
    """Raised in an app that sends to a caller who has disconnected."""


class HttpCall:
    """One request. The app gets the methods `receive` and `send`."""

    __slots__ = ("_body", "_ended", "_exchange", "_has_body", "_head", "_started", "_status", "_waiting")

    def __init__(self, exchange: PieceExchange, body: bytes | None) -> None:
        """`body` is None if the body follows in pieces."""
        self._exchange, self._body = exchange, body
        # True once the app has the whole body.
        self._has_body = False
        self._status, self._head = 0, b""
        # True once the status was sent to the gateway. Further pieces have no status.
        self._started = False
        # True once the response is complete.
        self._ended = False
        self._waiting: asyncio.Event | None = None

    async def run(self, app: App, scope: dict[str, Any]) -> bytes:
        """Call the app, and return b"". `send` has already sent the pieces of the response, so that they arrive even if the
        app then blocks.

        Raise the app's error, and HandlerFailed if the app has not completed its response.
        """
        try:
            await app(scope, self.receive, self.send)
        except BaseException as error:
            if self._exchange.gone and is_of_leaving(error):
                return b""
            raise
        if not self._ended and not self._exchange.gone:
            what = "completing" if self._status else "starting"
            raise HandlerFailed(f"The app returned without {what} a response.")
        return b""

    async def receive(self) -> AsgiMessage:
        """Return a piece of the body. After the body, wait until the response is complete or the caller has disconnected, and
        return a disconnect.
        """
        if not self._has_body:
            if self._body is not None:
                self._has_body = True
                return {"type": "http.request", "body": self._body, "more_body": False}
            if (piece := await self._exchange.receive()) is not None:
                return {"type": "http.request", "body": piece, "more_body": True}
            self._has_body = True
            if not self._exchange.gone:
                return {"type": "http.request", "body": b"", "more_body": False}
        await self._wait_ended()
        return {"type": "http.disconnect"}

    async def send(self, message: AsgiMessage) -> None:
        """Pass on a message of the app.

        Raise CallerGone after a disconnect, RuntimeError if the message may not be sent now, and OutputInvalid for a
        header that HTTP does not allow.
        """
        kind = message["type"]
        if kind == "http.response.body" and self._status and not self._ended:
            body = as_bytes(message.get("body", b""))
            await self._send_body(body, last=not message.get("more_body", False))
        elif kind == "http.response.start" and not self._status:
            self._head = encode_head(message.get("headers", ()))
            self._status = int(message["status"])
        else:
            expected = "nothing" if self._ended else "a body" if self._status else "http.response.start"
            raise RuntimeError(f"Unexpected ASGI message {kind!r}: expected {expected}.")

    async def _send_body(self, body: bytes, *, last: bool) -> None:
        *before, final = parts(body, PART_BYTES - len(self._head))
        for part in before:
            self._check_sent(await self._exchange.send(self._piece(part)))
        if last:
            sent = await self._exchange.send(self._piece(final, last=True))
            self._end()
            self._check_sent(sent)
        elif final or not self._started:
            self._check_sent(await self._exchange.send(self._piece(final)))

    def _piece(self, body: bytes, *, last: bool = False) -> bytes:
        """Return a piece with a part of the body, and the status and headers if it is the first piece."""
        status, head = (0, b"") if self._started else (self._status, self._head)
        self._started, self._head = True, b""
        return encode_response(body, status=status, head=head, last=last)

    @staticmethod
    def _check_sent(sent: bool) -> None:
        if not sent:
            raise CallerGone("The caller has disconnected.")

    def _end(self) -> None:
        self._ended = True
        if self._waiting is not None:
            self._waiting.set()

    async def _wait_ended(self) -> None:
        if self._ended or self._exchange.gone:
            return
        if self._waiting is None:
            self._waiting = asyncio.Event()
            self._exchange.on_gone = self._waiting.set
        await self._waiting.wait()


def as_bytes(body: object) -> bytes:
    """Return a body that an app sent. Raise TypeError if it is not bytes."""
    if isinstance(body, bytes):
        return body
    if isinstance(body, BODIES):
        return bytes(body)
    raise TypeError(f"A body must be bytes, not {type(body).__name__}.")


def is_of_leaving(error: BaseException) -> bool:
    """Return True if an app's error only says that its caller has disconnected."""
    if isinstance(error, BaseExceptionGroup):
        return all(is_of_leaving(one) for one in error.exceptions)
    return isinstance(error, CallerGone) or isinstance(error.__context__, CallerGone)
