"""Runs one WebSocket of a web app in a worker."""

from __future__ import annotations

import enum
import sys
from typing import Any

from ....errors import HandlerFailed
from ....handlers.contract import PieceExchange
from .http_call import App, AsgiMessage, CallerGone, as_bytes, is_of_leaving
from .messages import (
    ABNORMAL,
    BYTES,
    CLOSE,
    DENY,
    PART_BYTES,
    TEXT,
    MessageParts,
    decode_close,
    encode_accept,
    encode_close,
    encode_head,
    encode_message,
    encode_response,
    parts,
)

NORMAL = 1000
# The gateway limits the messages of callers, so this limit is never reached.
MAX_BYTES = 1 << 31


class SocketState(enum.Enum):
    CONNECTING = "connecting"
    OPEN = "open"
    DENYING = "denying"
    CLOSED = "closed"
    """The app has closed the WebSocket, or has denied the handshake."""


class WebSocketCall:
    """One WebSocket. The app gets the methods `receive` and `send`."""

    def __init__(self, exchange: PieceExchange) -> None:
        self._exchange, self._joined = exchange, MessageParts(MAX_BYTES)
        self._state = SocketState.CONNECTING
        self._announced = self._gone = False
        # The code with which the app has closed the WebSocket.
        self._code = ABNORMAL
        self._status, self._head = 0, b""
        self._offered: list[str] = []

    async def run(self, app: App, scope: dict[str, Any]) -> bytes:
        """Call the app. Raise the app's error, and HandlerFailed if it has not answered the handshake."""
        self._offered = scope["subprotocols"]
        try:
            await app(scope, self.receive, self.send)
        except Exception as error:
            if (self._gone or self._exchange.gone) and is_of_leaving(error):
                return b""
            raise
        if self._gone or self._exchange.gone:
            return b""
        if self._state in (SocketState.CONNECTING, SocketState.DENYING):
            raise HandlerFailed("The app returned without answering the handshake of a WebSocket.")
        if self._state is SocketState.OPEN:
            await self._exchange.send(encode_close(NORMAL, ""))
        return b""

    async def receive(self) -> AsgiMessage:
        """Return the next message of the caller. Raise RuntimeError after a disconnect."""
        if not self._announced:
            self._announced = True
            return {"type": "websocket.connect"}
        if self._gone:
            raise RuntimeError("The WebSocket was disconnected, so there are no more messages.")
        while (
            self._state is not SocketState.CLOSED and (message := await self._exchange.receive()) is not None
        ):
            if (found := self._joined.add(message)) is None:
                continue
            kind, data = found
            if kind == CLOSE:
                code, reason = decode_close(data)
                return self._disconnect(code, reason)
            if kind == TEXT:
                return {"type": "websocket.receive", "text": data.decode()}
            return {"type": "websocket.receive", "bytes": data}
        return self._disconnect(self._code, "")

    def _disconnect(self, code: int, reason: str) -> AsgiMessage:
        self._gone = True
        return {"type": "websocket.disconnect", "code": code, "reason": reason}

    async def send(self, message: AsgiMessage) -> None:
        """Pass on a message of the app.

        Raise CallerGone after a disconnect, RuntimeError if the message may not be sent now, and OutputInvalid for a
        header that HTTP does not allow.
        """
        kind = message["type"]
        if self._gone and kind != "websocket.close":
            raise CallerGone("The caller has disconnected.")
        match self._state, kind:
            case SocketState.CONNECTING, "websocket.accept":
                await self._accept(message)
            case SocketState.CONNECTING, "websocket.http.response.start":
                self._status, self._head = int(message["status"]), encode_head(message.get("headers", ()))
                self._state = SocketState.DENYING
            case SocketState.DENYING, "websocket.http.response.body":
                await self._deny(message)
            case SocketState.OPEN, "websocket.send":
                await self._send(message)
            case ((SocketState.CONNECTING | SocketState.OPEN), "websocket.close"):
                code, reason = message.get("code"), message.get("reason") or ""
                self._code = NORMAL if code is None else int(code)
                self._state = SocketState.CLOSED
                await self._pass(encode_close(self._code, reason))
                # Another task of the app may wait in `receive`. End that wait, because no message follows.
                self._exchange.close()
            case _:
                state = self._state.value
                raise RuntimeError(f"Unexpected ASGI message {kind!r}: the WebSocket is {state}.")

    async def _accept(self, message: AsgiMessage) -> None:
        head, chosen = encode_head(message.get("headers", ())), message.get("subprotocol") or ""
        if chosen and chosen not in self._offered:
            offered = ", ".join(self._offered) or "none"
            sys.stderr.write(
                f"The app accepts the subprotocol {chosen!r}, but its client offers {offered}: it is not sent.\n"
            )
        self._state = SocketState.OPEN
        await self._pass(encode_accept(chosen, head))

    async def _deny(self, message: AsgiMessage) -> None:
        last = not message.get("more_body", False)
        *before, final = parts(as_bytes(message.get("body", b"")), PART_BYTES - len(self._head))
        for part in before:
            await self._pass_denial(part, last=False)
        await self._pass_denial(final, last=last)
        if last:
            self._state = SocketState.CLOSED
            self._exchange.close()

    async def _pass_denial(self, body: bytes, *, last: bool) -> None:
        piece = encode_response(body, status=self._status, head=self._head, last=last)
        self._status, self._head = 0, b""
        await self._pass(bytes((DENY,)) + piece)

    async def _send(self, message: AsgiMessage) -> None:
        text = message.get("text")
        kind, data = (TEXT, text.encode()) if text is not None else (BYTES, as_bytes(message.get("bytes")))
        for part in encode_message(kind, data):
            await self._pass(part)

    async def _pass(self, piece: bytes) -> None:
        if not await self._exchange.send(piece) and piece[0] != CLOSE:
            raise CallerGone("The caller has disconnected.")
