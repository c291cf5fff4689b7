"""The lane: the short way of a plain `POST /invoke/{function}`, past aiohttp's tasks, routes and responses.

It takes a request only if nothing in it asks for more than "call this function and answer with what it returns"; every
other one goes the ordinary way. Who may call, and what an invocation is and answers, is said by the same guard and the
same gateway there and here: a caller cannot tell which way his request went.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import cast

from aiohttp import hdrs
from aiohttp.helpers import rfc822_formatted_time
from aiohttp.http import SERVER_SOFTWARE, HttpVersion11, RawRequestMessage
from aiohttp.http_writer import _serialize_headers
from aiohttp.streams import StreamReader
from multidict import CIMultiDict, istr

from ...errors import OutputInvalid, PilotflameError
from ...handlers.codec import JSON_TYPE
from ..functions.registry import Functions
from ..serving.invocation import Invocation
from ..serving.revision import Revision
from .compression import MOST_ON_LOOP_BYTES, chosen, pack_now, pays
from .guard import Admitted, Guard
from .invoke import Gateway
from .requests import request_id_of
from .responses import Response, error_reply

BEGINNING = "/invoke/"
ROUTE = "/invoke/{function}"
PREFER = istr("Prefer")
STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}" for status in HTTPStatus}


class FastPath:
    """Takes requests from connections."""

    def __init__(self, gateway: Gateway, functions: Functions, guard: Guard) -> None:
        self.gateway = gateway
        self._functions, self._guard = functions, guard
        self._leaving: list[tuple[Callable[[bytes], None], bytes]] = []

    def take(
        self,
        message: RawRequestMessage,
        payload: StreamReader,
        transport: asyncio.Transport,
        send: Callable[[bytes], None],
    ) -> FastRequest | None:
        """None: it goes the ordinary way. Otherwise `send` is called with all of the response, after this returns."""
        received_s = time.monotonic()
        revision = self._revision(message)
        if revision is None or payload.total_bytes > self.gateway.most(revision):
            return None
        name, headers = revision.spec.function, message.headers
        try:
            admitted = self._guard.admit(headers, ROUTE, name, transport)
        except PilotflameError:  # the guard says the same once more, and says it to the caller
            return None
        passage = FastRequest(self, name, admitted, send)
        passage.begin(headers, payload.read_nowait(), received_s)
        return passage

    def leave(self, send: Callable[[bytes], None], reply: Response) -> None:
        """Sends an answer with all others of this turn of the loop, one right after the other.

        Their callers are often one process; sent one by one, each answer would wake it up anew, which costs the kernel
        several times what sending does.
        """
        try:
            answer = encode(reply)
        except ValueError:  # what the worker says of its answer would be more than one header
            error = OutputInvalid("The answer's Content-Type cannot be sent.", remedy="Return another one.")
            answer = encode(error_reply(error, reply.headers["X-Request-Id"]))
        if not self._leaving:
            asyncio.get_running_loop().call_soon(self._flush)
        self._leaving.append((send, answer))

    def _flush(self) -> None:
        leaving, self._leaving = self._leaving, []
        for send, answer in leaving:
            send(answer)

    def _revision(self, message: RawRequestMessage) -> Revision | None:
        """Whose function a plain request calls."""
        path = message.path
        if message.method != "POST" or not path.startswith(BEGINNING) or message.version != HttpVersion11:
            return None
        if message.should_close or message.upgrade or message.chunked or message.compression:
            return None
        if (
            PREFER in message.headers or hdrs.EXPECT in message.headers
        ):  # a later answer; a word before the body
            return None
        try:
            revision = self._functions.live(path[len(BEGINNING) :])
        except PilotflameError:
            return None
        return None if revision.streaming else revision


class FastRequest:
    """One request in the lane."""

    __slots__ = ("_accepted", "_admitted", "_invocation", "_lane", "_name", "_over", "_revision", "_send")

    def __init__(self, lane: FastPath, name: str, admitted: Admitted, send: Callable[[bytes], None]) -> None:
        self._lane, self._name, self._admitted, self._send = lane, name, admitted, send
        self._invocation: Invocation | None = None
        self._revision: Revision | None = None
        self._over = False
        self._accepted = ""

    def begin(self, headers: Mapping[str, str], body: bytes, received_s: float) -> None:
        """Hands the request on; what is wrong with it is its answer."""
        request_id = request_id_of(headers)
        self._accepted = headers.get(hdrs.ACCEPT_ENCODING, "")
        gateway = self._lane.gateway
        try:
            self._revision, invocation = gateway.begin(
                self._name, headers, request_id, body, received_s, self._admitted.caller, self._on_answer
            )
        except PilotflameError as error:
            self._end(gateway.refused(self._name, error, request_id))
            return
        self._invocation = invocation
        if invocation.ended:  # refused while it was handed on
            self._on_answer()

    def abandon(self) -> None:
        """The caller has gone."""
        if self._over:
            return
        self._over = True
        self._admitted.leave()
        if self._revision is not None and self._invocation is not None:
            self._revision.cancel(self._invocation)

    def _on_answer(self) -> None:
        if self._invocation is not None and not self._over:
            self._end(self._lane.gateway.answered(self._name, self._invocation))

    def _end(self, reply: Response) -> None:
        self._over = True
        self._admitted.leave()
        kind = reply.headers.get("Content-Type", JSON_TYPE).partition(";")[0]
        if not pays(reply.body, kind):
            self._lane.leave(self._send, reply)
        elif coding := chosen(self._accepted):
            self._pack(reply, coding)
        else:
            self._lane.leave(self._send, _varied(reply, {}))

    def _pack(self, reply: Response, coding: str) -> None:
        coded = {"Content-Encoding": coding}
        if len(reply.body) <= MOST_ON_LOOP_BYTES:
            packed = _varied(reply._replace(body=pack_now(reply.body, coding)), coded)
            self._lane.leave(self._send, packed)
            return
        packing = asyncio.get_running_loop().run_in_executor(None, pack_now, reply.body, coding)
        packing.add_done_callback(
            lambda done: self._lane.leave(self._send, _varied(reply._replace(body=done.result()), coded))
        )


def _varied(reply: Response, more: Mapping[str, str]) -> Response:
    return reply._replace(headers={**reply.headers, "Vary": "Accept-Encoding", **more})


def encode(reply: Response) -> bytes:
    """As aiohttp writes it. Raises ValueError if a header could be taken for more than one."""
    headers = {
        **reply.headers,
        "Content-Length": str(len(reply.body)),
        "Date": rfc822_formatted_time(),
        "Server": SERVER_SOFTWARE,
    }
    head: bytes = _serialize_headers(STATUS_LINES[reply.status], cast("CIMultiDict[str]", headers))
    return head + reply.body
