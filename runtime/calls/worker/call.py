"""Defines one invocation inside a worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ....handlers.caller import NO_ORIGIN, CallOrigin
from ....handlers.contract import Cancellation, Context
from ..link.exchange import WorkerExchange
from ..link.stream_credit import Credit


@dataclass(eq=False, slots=True)
class Call:
    """One invocation inside a worker. Only streams use `credit`. Only batch handlers use `event` and `cost`.

    `task` is the task that runs an async handler. `peers` are all invocations in the same handler call of a
    batch handler, including this one.
    """

    channel: int
    body: bytes
    content_type: str
    context: Context
    cancellation: Cancellation
    accept: str = ""
    credit: Credit | None = None
    execution_s: float | None = None
    """The time limit of a job's handler call, from its start."""
    exchange: WorkerExchange | None = None
    """Exchanges pieces with the caller while the handler runs; None if the handler or the caller uses no exchange."""
    origin: CallOrigin = NO_ORIGIN
    received_s: float = field(default_factory=time.monotonic, init=False)
    event: Any = field(default=None, init=False)
    cost: float = field(default=1.0, init=False)
    task: asyncio.Task[Any] | None = field(default=None, init=False)
    peers: Sequence[Call] = field(default=(), init=False)

    def start(self, now_s: float) -> None:
        if self.execution_s is not None:
            self.context.limit(now_s + self.execution_s)

    def set_task(self, task: asyncio.Task[Any] | None, peers: Sequence[Call] = ()) -> None:
        self.task, self.peers = task, peers

    def set_event(self, event: Any, cost: float) -> None:
        self.event, self.cost = event, cost
