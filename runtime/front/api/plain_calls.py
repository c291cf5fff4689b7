"""Serves plain calls. A plain call asks only to run a function and to return its output in one response.

Plain calls pass the steps of the `Chain` without a task. `http/transport.py` reads them and sends their responses.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from ....errors import Cancelled, InvocationError, PilotflameError
from ....handlers.codec import JSON_TYPE
from ...calls.serving.invocation import Invocation
from ...calls.serving.revision import Revision
from ..http.chain import Chain, Passage
from ..http.connection import BEGINNING, ClientConnection
from ..http.requests import REQUEST_ID_HEADER, CallHeaders, Headers, request_id_of
from ..http.responses import STALE_HEADER, Response, compress, error_reply, name_coding
from ..http.routes import INVOKE_PATH, Route
from ..http.sliced_body import SLICE_BYTES, SlicedBody
from ..http.transport import CallHead, Send
from .invoke import Invoker

LOG = logging.getLogger(__name__)


class PlainApi(Protocol):
    """A plugin that serves plain calls."""

    plain_path: str
    """The registered path of the calls."""

    def plain(self, path: str, headers: Headers, length: int) -> tuple[Invoker, str] | None:
        """Return the invoker that answers a call, and the name of the function. Return None, or raise PilotflameError,
        if aiohttp must read the call.
        """


class Target(NamedTuple):
    """The invoker, the function and the path of a plain call."""

    invoker: Invoker
    function: str
    path: str
    """The registered path of the route."""


class PlainCalls:
    """Decides which calls are plain calls, and begins them. Sends their responses."""

    def __init__(
        self, chain: Chain, invoker: Invoker, live: Callable[[str], Revision], tasks: asyncio.TaskGroup, routes: Sequence[Route],
        root: str = "", claims: Callable[[Headers], bool] = lambda _headers: False,
        apis: Mapping[str | tuple[str, ...], PlainApi] = {},
    ) -> None:  # fmt: skip
        """`live` returns the live revision of a function, or raises PilotflameError. If `root` is given, `POST /` calls
        the function of this name. aiohttp reads a request if `claims` returns True for its headers. `apis` maps the
        beginnings of paths to the plugins that serve them.
        """
        self.chain, self.tasks = chain, tasks
        self._invoker, self._live, self._root, self._apis = invoker, live, root, tuple(apis.items())
        # Functions that return True for calls that another row of the route table serves, such as CloudEvents.
        others = [row.accepts for row in routes if row.path == INVOKE_PATH and row.accepts is not None]
        self._claims, self._others = claims, others
        self._outgoing: list[tuple[Send, Response, SlicedBody | None]] = []

    def _target(self, head: CallHead) -> Target | None:
        """Return the target of a call, or None if aiohttp must read the call."""
        path, headers = head.path, head.headers
        if head.elsewhere is None:
            head.elsewhere = any(accepts(headers) for accepts in self._others)
        if head.elsewhere or self._claims(headers) or self.chain.guard.waits(headers):
            return None
        name = path[len(BEGINNING) :] if path.startswith(BEGINNING) else self._root if path == "/" else ""
        try:
            if name:
                revision = self._live(name)
                fits = not revision.streaming and head.length <= self._invoker.most(revision)
                return Target(self._invoker, name, INVOKE_PATH) if fits else None
            for beginning, api in self._apis:
                if path.startswith(beginning) and (found := api.plain(path, headers, head.length)):
                    return Target(*found, api.plain_path)
        except PilotflameError:
            pass
        return None

    def take(self, head: CallHead, body: bytes, connection: ClientConnection, send: Send) -> PlainCall | None:
        """Begin a call. Return None if aiohttp must read the call."""
        transport, target = connection.transport, self._target(head)
        if transport is None or target is None:
            return None
        call = PlainCall(self, target, head, transport, send)
        call.begin(body, connection)
        return call

    def send(self, send: Send, response: Response, sliced: SlicedBody | None = None) -> None:
        """Send a response after the callbacks that the event loop runs in this turn, together with all other responses
        of this turn.

        Often one process sends many requests. Waking this process once for several responses saves time.
        """
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.append((send, response, sliced))

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        for send, response, sliced in outgoing:
            try:
                send(response, sliced)
            except Exception:
                # The other responses of this turn must be sent all the same.
                LOG.exception("a response with status %s could not be sent", response.status)


class PlainCall(Passage):
    """A plain call, from its admission to its response."""

    __slots__ = ("_begun", "_head", "_invoker", "_send", "_via")

    def __init__(
        self, via: PlainCalls, target: Target, head: CallHead, transport: asyncio.Transport, send: Send
    ) -> None:
        invoker, function, path = target
        super().__init__("POST", head.path, path, function, head.headers, transport, time.monotonic())
        self._via, self._invoker, self._head, self._send = via, invoker, head, send
        self._begun: tuple[Revision, Invocation] | None = None

    def begin(self, body: bytes, connection: ClientConnection) -> None:
        """Pass the first steps, and submit the invocation. Respond with the error of a step that refuses the call."""
        chain, invoker, name = self._via.chain, self._invoker, self.function or ""
        request_id = request_id_of(self.headers)
        chain.begin(self)
        try:
            chain.admit(self)
        except PilotflameError as error:
            self._end(chain.failed(self, error, request_id))
            return
        connection.admitted()
        caller, head = self.admitted.caller, self._head
        try:
            if head.asked is None:
                head.asked = CallHeaders.read(self.headers)
            self._begun = invoker.begin(
                name,
                self.headers,
                request_id,
                body,
                self.received_s,
                caller,
                self._on_answer,
                asked=head.asked,
            )
        except PilotflameError as error:
            self._end(invoker.refused(name, error, request_id, caller))
            return
        if self._begun[1].ended:
            self._on_answer()

    def abandon(self) -> None:
        """Cancel the invocation: the caller has closed the connection."""
        begun, self._begun = self._begun, None
        if begun is not None:
            revision, invocation = begun
            self._via.chain.ended(self, Cancelled.status, invocation.id)
            revision.cancel(invocation)

    def _on_answer(self) -> None:
        begun, self._begun = self._begun, None
        if begun is None:
            return
        invocation = begun[1]
        try:
            response = self._invoker.answered(self.function or "", invocation, self.admitted.caller)
        except Exception:
            # Respond with an error if the response cannot be made, for example because of a header. An exception from
            # this callback would end the worker's link, on which answers to other invocations arrive in the same turn.
            known = {"request_id": invocation.id}
            LOG.exception("the answer to an invocation of %s cannot be sent", self.function, extra=known)
            failed = InvocationError("The answer could not be sent.", remedy="See `pilotflame logs`.")
            response = error_reply(failed, invocation.id)
        self._end(response)

    def _end(self, response: Response) -> None:
        """Let a response pass the last steps. If its body is large or compressed, do this in a task."""
        media_type = response.headers.get("Content-Type", JSON_TYPE).partition(";")[0]
        coding = name_coding(self.headers, response.headers, media_type, response.body)
        if coding or len(response.body) > SLICE_BYTES:
            self._via.tasks.create_task(self._pack(response, media_type, coding), name="answer")
        else:
            self._leave(response)

    async def _pack(self, response: Response, media_type: str, coding: str) -> None:
        body = response.body
        if coding:
            body = await compress(body, coding, self._via.chain.turn_of(self.owner))
        try:
            packed = self._via.chain.answers.sliced(body, media_type, self.owner, self.transport, called=True)
        except PilotflameError as error:
            self._leave(self._via.chain.failed(self, error, response.headers.get(REQUEST_ID_HEADER, "")))
            return
        sliced = packed if isinstance(packed, SlicedBody) else None
        self._leave(response._replace(body=body), sliced)

    def _leave(self, response: Response, sliced: SlicedBody | None = None) -> None:
        is_stale = self._via.chain.is_stale
        if is_stale is not None and is_stale(self.function):
            response.headers[STALE_HEADER] = "true"
        self._via.chain.ended(self, response.status, response.headers.get(REQUEST_ID_HEADER, ""))
        self._via.send(self._send, response, sliced)
