"""Serves plain requests to `POST /invoke/{function}` without aiohttp's tasks, routes and response objects.

A request is plain if it asks only to run the function and to return its output in one response. aiohttp handles all
other requests. Both use the same guard and the same `Gateway`, so the caller sees no difference.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from aiohttp import hdrs
from aiohttp.http import HttpVersion11, RawRequestMessage
from aiohttp.streams import StreamReader
from multidict import istr

from ....errors import InvocationError, PilotflameError
from ....handlers.codec import JSON_TYPE
from ...calls.serving.invocation import Invocation
from ...calls.serving.revision import Revision
from ...node.functions.registry import Functions
from ..http.access_log import AccessLog
from ..http.connection import BEGINNING, TakenRequest
from ..http.large_answers import LargeAnswers
from ..http.requests import REQUEST_ID_HEADER, Headers, request_id_of
from ..http.responses import MAX_ON_LOOP_BYTES, Response, choose_coding, compress_now, error_reply, pays
from ..http.routes import INVOKE_PATH, Route
from ..http.sliced_body import SLICE_BYTES
from .guard import Admitted, Guard
from .invoke import Gateway

LOG = logging.getLogger(__name__)
INVOKE_ROUTE = ("POST", INVOKE_PATH)
PREFER = istr("Prefer")
Send: TypeAlias = Callable[[Response], None]


@dataclass(slots=True)
class FastCall:
    """A plain request that a plugin may serve. It has arrived completely."""

    path: FastPath
    route: tuple[str, str]
    message: RawRequestMessage
    payload: StreamReader
    transport: asyncio.Transport
    send: Send
    """Sends a complete response."""
    received_s: float

    def admit(self, function: str) -> Admitted:
        """Admit the request. Raise the guard's error: then aiohttp must handle it. Call `leave` of the result."""
        return self.path.guard.admit(self.message.headers, self.route, function, self.transport)


class FastTaker(Protocol):
    """A plugin with a fast path of its own."""

    fast_route: tuple[str, str]
    """The method and the registered path of the requests, such as ("POST", "/v2/models/{model}/infer")."""

    def take(self, call: FastCall) -> TakenRequest | None:
        """Serve the request, or return None if aiohttp must handle it."""


class FastPath:
    """The fast path of a gateway. All `connection.FastConnection`s offer their requests to it."""

    def __init__(
        self, gateway: Gateway, functions: Functions, guard: Guard, routes: Sequence[Route],
        answers: LargeAnswers, access: AccessLog | None = None, root: str = "",
        claims: Callable[[Headers], bool] = lambda _headers: False,
        takers: Mapping[str | tuple[str, ...], FastTaker] = {},
    ) -> None:  # fmt: skip
        """If `access` is given, each request is written to this access log. If `root` is given, `POST /` calls the
        function of this name. aiohttp handles requests whose headers `claims` claims. `takers` have
        the beginnings of the paths that plugins serve.
        """
        self.gateway, self.answers = gateway, answers
        self.access = access
        # Requests that another row of the route table serves, such as CloudEvents.
        others = [row.accepts for row in routes if row.path == INVOKE_PATH and row.accepts is not None]
        self._elsewhere = [claims, *others]
        self._functions, self.guard, self._claims, self._takers = (
            functions,
            guard,
            claims,
            tuple(takers.items()),
        )
        self._root, self._closed = root, False
        self._outgoing: list[tuple[Send, Response]] = []

    def take(
        self, message: RawRequestMessage, payload: StreamReader, transport: asyncio.Transport, send: Send
    ) -> TakenRequest | None:  # fmt: skip
        """Start the invocation of a plain request. When the invocation has ended, FastRequest passes the response to
        `send`.

        Return None if aiohttp must handle the request, because it is not plain or the guard refuses it.
        """
        received_s = time.monotonic()
        if self._closed or not _is_plain(message):
            return None
        takers = () if message.path.startswith(BEGINNING) else self._takers
        for beginning, taker in takers:
            if message.path.startswith(beginning) and not self._claims(message.headers):
                return taker.take(
                    FastCall(self, taker.fast_route, message, payload, transport, send, received_s)
                )
        revision = self._revision(message)
        if revision is None or payload.total_bytes > self.gateway.most(revision):
            return None
        headers = message.headers
        try:
            admitted = self.guard.admit(headers, INVOKE_ROUTE, revision.spec.function, transport)
        except PilotflameError:
            # In aiohttp's handler, the guard refuses the request again, and the caller gets the error.
            return None
        request = FastRequest(self, revision, admitted, send, received_s)
        request.begin(headers, payload.read_nowait())
        return request

    def close(self) -> None:
        """Leave all further requests to aiohttp, because only aiohttp applies `on_response_prepare` to responses."""
        self._closed = True

    def send(self, send: Send, response: Response) -> None:
        """Send a response after the callbacks that the event loop runs in this turn, together with all other responses
        of this turn.

        Often one process is the caller of many requests. To wake this process up once for several responses saves time.
        """
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.append((send, response))

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        for send, response in outgoing:
            try:
                send(response)
            except Exception:
                # The other responses of this turn must be sent all the same.
                LOG.exception("a response with status %s could not be sent", response.status)

    def _revision(self, message: RawRequestMessage) -> Revision | None:
        """Return the live revision of the function, or None if the request is not plain."""
        path = message.path
        name = path[len(BEGINNING) :] if path.startswith(BEGINNING) else self._root if path == "/" else ""
        if not name or message.method != "POST":
            return None
        headers = message.headers
        for accepts in self._elsewhere:
            if accepts(headers):
                return None
        try:
            revision = self._functions.live(name)
        except PilotflameError:
            return None
        return None if revision.streaming else revision


def _is_plain(message: RawRequestMessage) -> bool:
    """Return True if a request asks for nothing that only aiohttp does."""
    if message.version != HttpVersion11 or message.should_close or message.upgrade:
        return False
    if message.chunked or message.compression:
        return False
    # Prefer may ask for a job instead of an output, and Expect for an interim response. Web pages, which
    # send Origin, need headers in the response.
    headers = message.headers
    return not (PREFER in headers or hdrs.EXPECT in headers or hdrs.ORIGIN in headers)


class FastRequest:
    """One request that the fast path handles, from its admission to its response."""

    __slots__ = (
        "_accept_encoding",
        "_admitted",
        "_fast_path",
        "_gateway",
        "_invocation",
        "_name",
        "_received_s",
        "_revision",
        "_route",
        "_send",
        "owner",
    )

    def __init__(
        self, fast_path: FastPath, revision: Revision, admitted: Admitted, send: Send, received_s: float,
        gateway: Gateway | None = None, route: tuple[str, str] = INVOKE_ROUTE,
    ) -> None:  # fmt: skip
        """`gateway` is another class's `Gateway`, for a plugin's requests, and `route` is their route."""
        self._fast_path, self._revision, self._admitted, self._send = fast_path, revision, admitted, send
        self._gateway, self._route = gateway or fast_path.gateway, route
        self._received_s = received_s
        self.owner = admitted.caller.owner
        self._name = revision.spec.function
        self._invocation: Invocation | None = None
        self._accept_encoding = ""

    def begin(self, headers: Headers, body: bytes) -> None:
        """Submit the invocation. If this raises an error, respond with the error."""
        request_id = request_id_of(headers)
        self._accept_encoding = headers.get(hdrs.ACCEPT_ENCODING, "")
        gateway, caller = self._gateway, self._admitted.caller
        try:
            self._revision, invocation = gateway.begin(
                self._name, headers, request_id, body, self._received_s, caller, self._on_answer
            )
        except PilotflameError as error:
            self._end(gateway.refused(self._name, error, request_id, caller))
            return
        self._invocation = invocation
        if invocation.ended:
            self._on_answer()

    def abandon(self) -> None:
        """Cancel the invocation: the caller has closed the connection."""
        invocation, self._invocation = self._invocation, None
        if invocation is not None:
            self._admitted.leave()
            self._revision.cancel(invocation)

    def _on_answer(self) -> None:
        invocation, self._invocation = self._invocation, None
        if invocation is not None:
            self._answer(invocation)

    def _answer(self, invocation: Invocation) -> None:
        try:
            response = self._gateway.answered(self._name, invocation, self._admitted.caller)
        except Exception:
            # It may be impossible to make the response, for example because of a header. This must not end the worker's
            # link, on which answers to other invocations arrive in the same turn.
            known = {"request_id": invocation.id}
            LOG.exception("the answer to an invocation of %s cannot be sent", self._name, extra=known)
            failed = InvocationError("The answer could not be sent.", remedy="See `pilotflame logs`.")
            response = error_reply(failed, invocation.id)
        self._end(response)

    def _end(self, response: Response) -> None:
        self._admitted.leave()
        if len(response.body) > SLICE_BYTES:
            refusal = self._fast_path.answers.refusal(self.owner, len(response.body))
            response = response if refusal is None else error_reply(refusal, headers=response.headers)
        if (access := self._fast_path.access) is not None:
            access.write(
                *self._route, response.status, self._received_s, owner=self._admitted.caller.owner,
                function=self._name, request_id=response.headers.get(REQUEST_ID_HEADER, ""),
            )  # fmt: skip
        media_type = response.headers.get("Content-Type", JSON_TYPE).partition(";")[0]
        if not pays(response.body, media_type):
            self._fast_path.send(self._send, response)
            return
        coding = choose_coding(self._accept_encoding)
        if not coding or len(response.body) <= MAX_ON_LOOP_BYTES:
            self._finish(response, coding, compress_now([response.body], coding) if coding else response.body)
        else:
            packing = asyncio.get_running_loop().run_in_executor(None, compress_now, [response.body], coding)
            packing.add_done_callback(lambda done: self._finish(response, coding, done.result()))

    def _finish(self, response: Response, coding: str, body: bytes) -> None:
        headers = {**response.headers, "Vary": "Accept-Encoding"}
        if coding:
            headers["Content-Encoding"] = coding
        self._fast_path.send(self._send, Response(response.status, headers, body))
