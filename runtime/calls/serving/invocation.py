"""Defines an invocation: one request, from its acceptance to its response, and the stream of its output."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, InitVar, dataclass, field
from functools import lru_cache
from hashlib import blake2s
from typing import Any, NamedTuple

import orjson

from ....errors import BadInput, LinkError, PilotflameError
from ....foreign_json import dumps
from ....handlers.caller import NORMAL
from ...ground.telemetry.invocation_end import Source, TraceContext
from ...ground.telemetry.logs import Capture
from ...ground.telemetry.timeline import Activation, Timeline
from ..link.stream_credit import Credit
from .input_stream import InputStream

LAST = 5
"""The priority of invocations that can wait."""


_SALT = secrets.token_bytes(16)


@lru_cache(4096)
def opaque(tenant: str) -> str:
    """Return a text that identifies a tenant in the workers of this gateway without revealing the tenant's name."""
    return (
        blake2s(tenant.encode(errors="surrogatepass"), key=_SALT, digest_size=6).hexdigest() if tenant else ""
    )


def encode_extra(extra: Mapping[str, Any]) -> bytes:
    """Return what a handler reads from `context.extra` as JSON. Raise BadInput if it cannot be JSON: callers choose parts of it.

    Call this before the dispatch, where an error would end the worker's link, and the calls of other callers.
    """
    try:
        return dumps(extra)
    except (orjson.JSONEncodeError, UnicodeEncodeError) as error:
        fault = f"A header or a parameter of the request cannot be passed to the function: {error}."
        raise BadInput(fault, remedy="Send headers in UTF-8, and nest parameters less deeply.") from None


class Output(NamedTuple):
    """What the handler returned, as the worker encoded it. The gateway does not decode it."""

    payload: bytes
    content_type: str


class Stream:
    """The unread pieces of a streamed output. When the reader has consumed pieces, the worker may send more pieces."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        # Made by the first wait.
        self._arrived: asyncio.Event | None = None
        self._closed = False
        self._grant: Callable[[int], None] | None = None
        # Checks that the worker does not send too much, because its process runs the function's code. Made when the first piece
        # arrives.
        self._credit: Credit | None = None
        self.on_piece: Callable[[bytes], None] | None = None
        """Called with each piece when it arrives."""

    @property
    def ready(self) -> bool:
        """True if `take` returns without waiting."""
        return bool(self._pieces) or self._closed

    def connect(self, grant: Callable[[int], None]) -> None:
        """Set `grant`, which is called with the number of further pieces that the worker may send."""
        self._grant = grant

    def put(self, piece: bytes) -> None:
        """Add a piece. Raise LinkError if the worker has sent more than the reader has granted."""
        if self._credit is None:
            self._credit = Credit()
        if not self._credit.spend(len(piece), 0.0):
            raise LinkError("A worker sent more of a streamed output than it may.")
        self._pieces.append(piece)
        if self.on_piece is not None:
            self.on_piece(piece)
        self._note_change()

    def close(self) -> None:
        self._closed = True
        self._note_change()

    def _note_change(self) -> None:
        if self._arrived is not None:
            self._arrived.set()

    async def take(self) -> list[bytes]:
        """Wait for pieces, and return all that have arrived; [] at the end. A cancelled wait loses no pieces."""
        while not self._pieces:
            if self._closed:
                return []
            if self._arrived is None:
                self._arrived = asyncio.Event()
            self._arrived.clear()
            await self._arrived.wait()
        pieces, self._pieces = self._pieces, []
        return pieces

    def consumed(self, count: int) -> None:
        """Let the worker send `count` more pieces, because the reader has received `count` pieces."""
        if self._credit is not None:
            self._credit.grant(count)
        if self._grant is not None:
            self._grant(count)


@dataclass(eq=False, slots=True)
class Invocation:
    """A request, which never changes, and the state of its execution, which only the dispatcher changes.

    An invocation ends once: with an output, with an error, or because its caller has gone. Later ends are
    ignored. Times are in monotonic seconds.
    """

    id: str
    body: bytes
    _: KW_ONLY
    now_s: InitVar[float]
    deadline_s: float
    """When the invocation must have ended; if `execution_s` is set and the invocation waits, when it must have been sent."""
    hold_until_s: float
    """If it still waits at this time and no worker is ready, it fails."""
    content_type: str = ""
    accept: str = ""
    """The media types that the caller wants; "" for any."""
    traceparent: str = ""
    tracestate: str = ""
    streaming: InitVar[bool] = False
    extra: Mapping[str, Any] | None = None
    """Data that the handler can read from `context.extra`, as JSON."""
    execution_s: float | None = None
    """Only for stored jobs: the seconds in which it must end after it was sent. A job is never refused as late."""
    tenant: str = ""
    """The tenant of the caller. The queue shares the workers fairly between tenants."""
    priority: int = NORMAL
    source: Source = "http"
    """The kind of the invocation's submitter."""
    on_sent: Callable[[], None] | None = None
    """Called each time the invocation is sent to a worker."""
    on_progress: Callable[[bytes], None] | None = None
    """Called with each progress report, as JSON."""
    on_metrics: Callable[[bytes], None] | None = None
    """Called with each report of metrics, as a JSON object."""
    on_leaving: Callable[[], None] | None = None
    """Called when its worker or its revision is about to end, for a caller that can connect again."""
    exchanges: bool = False
    """True if its handler may use `context.exchange`. Then `streaming` must be true."""
    input: InputStream | None = None
    """The pieces of the input that follow `body`, if `exchanges` is True; None if `body` is the whole input."""
    idle_s: float | None = None
    """Only for a connection that stays open: `deadline_s` is this number of seconds after the last message."""
    on_end: Callable[[], None] | None = None
    """Called as soon as the invocation has an output or an error, but not if its caller has gone."""
    capture: Capture | None = None
    """Receives the lines that the invocation prints; None if they are not captured."""
    counted: bool = False
    """True if the caller's quota has already counted all calls of the request and their answers."""
    max_batch: int = 0
    """The size of the largest batch it may run in; 0 for no limit."""
    output: asyncio.Future[Output] = field(init=False)
    stream: Stream | None = field(init=False)
    timeline: Timeline = field(init=False)
    timeout_s: float = field(init=False)
    hold_s: float = field(init=False)
    patient: bool = field(init=False)
    ended: bool = field(init=False, default=False)
    answered: bool = field(init=False, default=False)
    """True once its caller has the whole response, although its handler call goes on."""
    execution_deadline_s: float = field(init=False, default=math.inf)
    """When the present handler call exceeds its time limit; infinity without a limit or a worker."""
    attempt: int = field(init=False, default=1)
    first: bool = field(init=False, default=False)
    """True after a reservation has put it before the invocations of all priorities."""
    batch_size: int = field(init=False, default=1)
    """The number of invocations that were sent to its worker in one batch, itself included."""
    worker: str = field(init=False, default="")
    """The name of the worker that it was last sent to; "" while it waits."""
    span: str = field(init=False, default="")
    """The `traceparent` of the invocation's own span. The worker gets it in place of `traceparent`. "" without an observer."""
    trace: TraceContext | None = field(init=False, default=None)
    """Set if an observer records a span for the invocation."""
    active_s: float = field(init=False, default=0.0)
    """When the last message of its open connection passed; 0 before the first message."""
    cache_status: str = field(init=False, default="")
    """The value of the header Cache-Status; "" if the function has no response cache."""

    extra_json: bytes = field(init=False, default=b"")
    """`extra` as bytes; b"" without it."""

    def __post_init__(self, now_s: float, streaming: bool) -> None:
        """Raise BadInput if `extra` cannot be JSON."""
        self.extra_json = encode_extra(self.extra) if self.extra else b""
        self.output = asyncio.get_running_loop().create_future()
        self.stream = Stream() if streaming else None
        self.timeline = Timeline(now_s)
        self.timeout_s, self.hold_s = self.deadline_s - now_s, self.hold_until_s - now_s
        self.patient = self.execution_s is not None

    @property
    def sent_s(self) -> float:
        return self.timeline.sent_s

    def head(self, now_s: float, more: int = 0) -> dict[str, Any]:
        """Return what is sent to the worker with the body. `more` invocations of its batch follow."""
        head: dict[str, Any] = {"id": self.id, "remaining_s": self.deadline_s - now_s}
        if self.execution_s is not None:
            head["execution_s"] = self.execution_s
        if more:
            head["more"] = more
        if self.attempt > 1:
            head["attempt"] = self.attempt
        if self.content_type:
            head["type"] = self.content_type
        if self.accept:
            head["accept"] = self.accept
        if self.span or self.traceparent:
            self._put_trace(head)
        if self.extra_json:
            head["extra"] = orjson.Fragment(self.extra_json)
        if self.tenant or self.priority != NORMAL:
            head["origin"] = opaque(self.tenant), self.priority
        if self.exchanges:
            head["exchange"] = self.input is not None
        return head

    def _put_trace(self, head: dict[str, Any]) -> None:
        head["traceparent"] = self.span or self.traceparent
        if self.tracestate:
            head["tracestate"] = self.tracestate

    async def wait(self) -> Output:
        """Wait for the output, and return it. Raise a copy of its error.

        Without a copy, the invocation would refer to the raised error, and the frames in the error's traceback refer to the
        invocation. So a failed call would keep its body in memory until the garbage collector finds the cycle.
        """
        try:
            return await self.output
        except PilotflameError as error:
            error.__traceback__ = None
            raise error.copied() from None

    # -- changes of state, in the order in which they happen; called by the dispatcher

    def mark_traced(self, span: str, trace: TraceContext | None = None) -> None:
        """Set the span that an observer gives the invocation, in the form of a `traceparent`, before it is queued or sent."""
        self.span, self.trace = span, trace

    def renew_hold(self, now_s: float) -> None:
        """Count the hold time from `now_s`, because the invocation could not be sent before."""
        self.hold_until_s = now_s + self.hold_s

    def mark_sent(self, worker: str, batch_size: int, now_s: float, activation: Activation | None) -> None:
        """Set the worker. `activation` is its start if it has ended no invocation yet."""
        self.worker, self.batch_size = worker, batch_size
        waited = activation is not None and activation.ready_s > self.timeline.received_s
        self.timeline.mark_sent(now_s, activation if waited else None)
        if self.execution_s is not None:
            self.deadline_s = now_s + self.execution_s

    def limit_execution(self, started_s: float, limit_s: float | None) -> None:
        """Limit the present handler call, which started at `started_s`, to `limit_s`. `execution_s` also counts from `started_s`."""
        self.execution_deadline_s = math.inf if limit_s is None else started_s + limit_s
        if self.execution_s is not None:
            self.deadline_s = started_s + self.execution_s

    def mark_active(self, now_s: float) -> None:
        """Count `idle_s` from now on, because a message of the invocation's open connection has passed."""
        self.active_s = now_s
        if self.idle_s is not None:
            self.deadline_s = now_s + self.idle_s

    def mark_requeued(self) -> None:
        """Let the invocation wait again, because its worker gave it back or died."""
        self.worker, self.execution_deadline_s = "", math.inf
        if self.execution_s is not None:
            self.deadline_s = self.hold_until_s

    def mark_repeated(self) -> None:
        """Count another attempt. If the worker died while it ran a batch, this invocation runs again outside a batch."""
        self.attempt += 1
        if self.batch_size > 1:
            self.max_batch = self.batch_size = 1

    def end(self, outcome: Output | PilotflameError | None) -> None:
        """End the invocation, unless it has ended. `outcome` is None if its caller has gone."""
        if self.ended:
            return
        self.ended = True
        if self.stream is not None:
            self.stream.close()
        if self.input is not None:
            self.input.close()
        if self.output.done():
            return
        if outcome is None:
            self.output.cancel()
            return
        if isinstance(outcome, Output):
            self.output.set_result(outcome)
        else:
            self.output.set_exception(outcome)
            # Mark the exception as retrieved, so that asyncio does not warn about it if the caller has gone.
            self.output.exception()
        if self.on_end is not None:
            self.on_end()
