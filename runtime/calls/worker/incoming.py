"""Handles the frames of invocations in a worker: starts and cancels calls of the runner, and passes inputs and credit to them."""

from __future__ import annotations

import time

import orjson

from ....handlers.caller import NO_ORIGIN, CallOrigin
from ....handlers.contract import NOTHING, Cancellation, Context
from ....handlers.handler import Handler
from ....snapshot.named import Snapshots
from ..link.connection import Link
from ..link.exchange import WorkerExchange
from ..link.frames import Frame, FrameKind
from ..link.stream_credit import Credit
from ..link.worker_spec import WorkerSpec
from .call import Call
from .hooks import WorkerHooks
from .host import WorkerHost
from .parking import WorkerParking
from .runner import Runner


class IncomingCalls:
    """The invocations that the gateway sends. Use it on the thread of the link's loop only."""

    def __init__(
        self, handler: Handler, spec: WorkerSpec, link: Link, runner: Runner, hooks: WorkerHooks,
        snapshots: Snapshots | None,
    ) -> None:  # fmt: skip
        self._handler, self._spec, self._link, self._runner = handler, spec, link, runner
        self._hooks, self._snapshots = hooks, snapshots
        self._closed = False

    def bind(self, host: WorkerHost, parking: WorkerParking) -> None:
        """Set the host, which contexts call, and the parking, which defers invocations while the worker is parked."""
        self._host, self._parking = host, parking

    def take(self, frame: Frame) -> bool:
        """Handle a frame. Return False if its kind is not about invocations."""
        if frame.kind == FrameKind.INVOKE:
            self._invoke(frame)
        elif frame.kind == FrameKind.CANCEL:
            if self._parking.awake:
                self._runner.cancel(frame.channel)
            else:
                self._parking.defer(frame)
        elif frame.kind == FrameKind.MORE:
            self._runner.grant(frame.channel, int(frame.json()["count"]))
        elif frame.kind in (FrameKind.INPUT, FrameKind.INPUT_END):
            self._runner.feed(frame.channel, frame.payload, last=frame.kind == FrameKind.INPUT_END)
        elif frame.kind == FrameKind.ASK_BACK:
            # A worker that drains has given its waiting invocations back already, in `close`.
            self._return([] if self._closed else self._runner.give_back())
        else:
            return False
        return True

    def close(self) -> None:
        """Send the invocations that have not started back to the gateway, and also all invocations that arrive from now on."""
        self._closed = True
        self._return(self._runner.close())
        self._parking.close()

    def _return(self, calls: list[Call]) -> None:
        for call in calls:
            self._link.send(FrameKind.RETURNED, call.channel)

    def _invoke(self, frame: Frame) -> None:
        if self._closed:
            self._link.send(FrameKind.RETURNED, frame.channel)
            return
        if not self._parking.awake:
            self._parking.defer(frame)
            return
        head = orjson.loads(frame.head)
        cancellation = Cancellation()
        remaining_s = head.get("remaining_s")
        context = Context(
            self._spec.function, self._spec.revision,
            invocation_id=head["id"], attempt=head.get("attempt", 1),
            deadline_s=None if remaining_s is None else time.monotonic() + remaining_s,
            state=self._hooks.state, snapshots=self._snapshots, cancellation=cancellation,
            traceparent=head.get("traceparent", ""), extra=head.get("extra", NOTHING),
            host=self._host, channel=frame.channel, tracestate=head.get("tracestate", ""),
        )  # fmt: skip
        exchange = None
        if self._handler.exchanges and "exchange" in head:
            context.exchange = exchange = WorkerExchange(self._link, frame.channel, follows=head["exchange"])
        call = Call(
            frame.channel, frame.payload, head.get("type", ""), context, cancellation, head.get("accept", ""),
            Credit() if self._handler.kind.streaming else None, head.get("execution_s"), exchange,
            CallOrigin(*head["origin"]) if "origin" in head else NO_ORIGIN,
        )  # fmt: skip
        self._runner.submit(call, head.get("more", 0))
