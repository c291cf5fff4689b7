"""A closed loop of callers: each caller sends a request, waits for the whole answer, and sends the next request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

from http1 import Answer, Connection, Request
from tally import Judge, Tally

_RECONNECT_S = 0.01


class Caller:
    """One caller with one connection. The caller reconnects if the server closes the connection."""

    def __init__(self, loop: ClosedLoop) -> None:
        self._loop = loop
        self._connection: Connection | None = None
        self._sent_ns = 0
        self._waiting = False
        self.finished = asyncio.Event()

    async def connect(self) -> None:
        address = self._loop.request.address
        running = asyncio.get_running_loop()
        _, self._connection = await running.create_connection(
            lambda: Connection(self._answered, self._lost), *address
        )

    def go(self) -> None:
        if not self._loop.may_send():
            self.finished.set()
            return
        self._sent_ns = time.perf_counter_ns()
        self._waiting = True
        if self._connection is not None and self._connection.alive:
            self._connection.send(self._loop.wire)
        else:
            self._loop.spawn(self._reconnect())

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    async def _reconnect(self) -> None:
        """The connection's cost falls on the request that needed it: `_sent_ns` stays as it was."""
        try:
            await self.connect()
        except OSError as error:
            self._loop.judge.error(type(error).__name__)
            await asyncio.sleep(_RECONNECT_S)
            self.go()
            return
        assert self._connection is not None
        self._connection.send(self._loop.wire)

    def _answered(self, connection: Connection, answer: Answer) -> None:
        del connection
        self._waiting = False
        self._loop.answered(answer, time.perf_counter_ns() - self._sent_ns)
        self.go()

    def _lost(self, connection: Connection) -> None:
        if connection is not self._connection or self.finished.is_set() or not self._waiting:
            return
        self._loop.judge.error("connection lost")
        self.go()


class ClosedLoop:
    """The callers of one run and what they may still send."""

    def __init__(self, request: Request, callers: int) -> None:
        self.request = request
        self.wire = request.encode()
        self.tally = Tally()
        self.judge = Judge(request, self.tally)
        self._callers = [Caller(self) for _ in range(callers)]
        self._left = 0
        self._until_ns = 0
        self._last_ns = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def may_send(self) -> bool:
        if self._left <= 0 or time.perf_counter_ns() >= self._until_ns:
            return False
        self._left -= 1
        return True

    def answered(self, answer: Answer, latency_ns: int) -> None:
        self._last_ns = time.perf_counter_ns()
        self.judge.enter(answer, latency_ns)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def connect(self) -> None:
        await asyncio.gather(*(caller.connect() for caller in self._callers))

    async def run(self, duration_s: float, count: int, drain_s: float) -> Tally:
        """Send for `duration_s` or `count` requests, whichever ends first; then wait for the answers."""
        self.tally = Tally()
        self.judge = Judge(self.request, self.tally)
        self._left = count
        started_ns, cpu_ns = time.perf_counter_ns(), time.process_time_ns()
        self._last_ns = started_ns
        self._until_ns = started_ns + int(duration_s * 1e9)
        for caller in self._callers:
            caller.finished.clear()
            caller.go()
        await self._drain(duration_s + drain_s)
        self.tally.wall_s = (self._last_ns - started_ns) / 1e9
        self.tally.cpu_s = (time.process_time_ns() - cpu_ns) / 1e9
        return self.tally

    async def _drain(self, timeout_s: float) -> None:
        waits = [asyncio.ensure_future(caller.finished.wait()) for caller in self._callers]
        _, pending = await asyncio.wait(waits, timeout=timeout_s)
        for wait in pending:
            self.judge.error("no answer")
            wait.cancel()

    def close(self) -> None:
        for caller in self._callers:
            caller.finished.set()
            caller.close()


async def closed_loop(
    request: Request,
    *,
    callers: int = 1,
    duration_s: float = 2.0,
    count: int = 2**62,
    warmup_s: float = 0.0,
    drain_s: float = 30.0,
) -> Tally:
    """Load with `callers` callers; what `warmup_s` sends first, on the same connections, is not counted."""
    loop = ClosedLoop(request, callers)
    try:
        await loop.connect()
        warmup = await loop.run(warmup_s, 2**62, drain_s) if warmup_s else Tally()
        tally = await loop.run(duration_s, count, drain_s)
    finally:
        loop.close()
    tally.warmup_answers = warmup.answers
    for what, times in warmup.errors.items():
        tally.errors[f"warm-up: {what}"] = times
    return tally
