"""An open loop: requests arrive at a rate of their own (Poisson), whether or not earlier ones were answered.

A latency counts from the intended instant of sending, so a stalled server cannot hide the callers it kept
waiting (no coordinated omission). What the generator itself was late by is in `send_lag_ns`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from dataclasses import replace

from http1 import Answer, Connection, Request
from tally import Judge, Tally
from timerfd import TimerFd

BLANKS = 40
"""Number of blanks after the body of a patient loop's request. Tabs among them number the request."""


def poisson(rate: float, duration_s: float, seed: int) -> list[int]:
    """The intended instants, in ns after the start."""
    draw = random.Random(seed)
    at_s = draw.expovariate(rate)
    instants: list[int] = []
    while at_s < duration_s:
        instants.append(int(at_s * 1e9))
        at_s += draw.expovariate(rate)
    return instants


class OpenLoop:
    """A pool of connections, and the arrivals that take them; the newest idle connection first."""

    def __init__(self, request: Request, most_connections: int) -> None:
        self.tally = Tally()
        self._request = request
        self._wire = request.encode()
        self._judge = Judge(request, self.tally)
        self._most = most_connections
        self._idle: list[Connection] = []
        self._busy: dict[Connection, int] = {}
        self._opening = 0
        self._queue: deque[int] = deque()  # intended instants that are due and have no connection yet
        self._arrivals: deque[int] = deque()
        self._outstanding = 0
        self._last_ns = 0
        self._done = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, instants_ns: list[int], connections: int, drain_s: float) -> Tally:
        """Open `connections`, then send at the instants given; more connections follow as they are needed."""
        await asyncio.gather(*(self._open() for _ in range(connections)))
        timer = TimerFd(lambda: self._due(timer))
        # A little ahead, so that the first instants are not past before the timer is armed.
        started_ns, cpu_ns = time.monotonic_ns() + 5_000_000, time.process_time_ns()
        self._last_ns = started_ns
        self._arrivals.extend(started_ns + instant for instant in instants_ns)
        self._outstanding = len(instants_ns)
        try:
            if self._arrivals:
                timer.arm(self._arrivals[0])
                await self._wait((instants_ns[-1] / 1e9) + drain_s)
        finally:
            timer.close()
            self._close()
        self.tally.wall_s = (self._last_ns - started_ns) / 1e9
        self.tally.cpu_s = (time.process_time_ns() - cpu_ns) / 1e9
        return self.tally

    async def _wait(self, timeout_s: float) -> None:
        try:
            await asyncio.wait_for(self._done.wait(), timeout_s)
        except TimeoutError:
            self.tally.errors["no answer"] = self._outstanding

    def _due(self, timer: TimerFd) -> None:
        now_ns = time.monotonic_ns()
        while self._arrivals and self._arrivals[0] <= now_ns:
            self._queue.append(self._arrivals.popleft())
        self._dispatch()
        if self._arrivals:
            timer.arm(self._arrivals[0])

    def _dispatch(self) -> None:
        while self._queue and self._idle:
            connection, intended_ns = self._idle.pop(), self._queue.popleft()
            self._busy[connection] = intended_ns
            self.tally.send_lag_ns.append(time.monotonic_ns() - intended_ns)
            connection.send(self._wire_of(intended_ns))
        wanted = min(len(self._queue) - self._opening, self._most - len(self._busy) - self._opening)
        for _ in range(wanted):
            self._opening += 1
            task = asyncio.ensure_future(self._open_one_more())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _wire_of(self, _intended_ns: int) -> bytes:
        return self._wire

    async def _open(self) -> None:
        running = asyncio.get_running_loop()
        _, connection = await running.create_connection(
            lambda: Connection(self._answered, self._lost), *self._request.address
        )
        self._idle.append(connection)

    async def _open_one_more(self) -> None:
        try:
            await self._open()
        except OSError as error:
            if self._queue:
                self._queue.popleft()
                self._judge.error(type(error).__name__)
                self._settle()
        finally:
            self._opening -= 1
        self._dispatch()

    def _answered(self, connection: Connection, answer: Answer) -> None:
        self._last_ns = time.monotonic_ns()
        final = self._enter(answer, self._busy.pop(connection))
        if connection.alive:
            self._idle.append(connection)
        if final:
            self._settle()
        self._dispatch()

    def _enter(self, answer: Answer, intended_ns: int) -> bool:
        """Enters an answer in the tally; whether it was the last to this request."""
        self._judge.enter(answer, self._last_ns - intended_ns)
        return True

    def _lost(self, connection: Connection) -> None:
        if connection in self._idle:
            self._idle.remove(connection)
        if self._busy.pop(connection, None) is not None:
            self._judge.error("connection lost")
            self._settle()
        self._dispatch()

    def _settle(self) -> None:
        self._outstanding -= 1
        if self._outstanding == 0:
            self._done.set()

    def _close(self) -> None:
        self._queue.clear()
        for connection in [*self._idle, *self._busy]:
            connection.close()


class PatientLoop(OpenLoop):
    """An open loop that sends a refused request once more, after the delay that the refusal states.

    The tally has the first answers. `second_statuses` counts the statuses of the second answers. Each request has a body of
    its own, like requests of different callers: the same JSON, followed by blanks that encode a number.
    """

    def __init__(self, request: Request, most_connections: int) -> None:
        super().__init__(replace(request, body=request.body + b" " * BLANKS), most_connections)
        self._second: dict[int, int] = {}

    def _wire_of(self, intended_ns: int) -> bytes:
        number = self._second.get(intended_ns, intended_ns)
        blanks = format(number % 2**BLANKS, f"0{BLANKS}b").replace("0", " ").replace("1", "\t")
        return self._wire[:-BLANKS] + blanks.encode()

    def _enter(self, answer: Answer, intended_ns: int) -> bool:
        statuses = self.tally.second_statuses
        if intended_ns in self._second:
            statuses[answer.status] = statuses.get(answer.status, 0) + 1
            return True
        super()._enter(answer, intended_ns)
        if answer.status not in {429, 503}:
            return True
        wait_s = retry_after_s(answer)
        again_ns = time.monotonic_ns() + int(wait_s * 1e9)
        while again_ns in self._second:
            again_ns += 1
        self._second[again_ns] = intended_ns
        asyncio.get_running_loop().call_later(wait_s, self._again, again_ns)
        return False

    def _again(self, at_ns: int) -> None:
        self._queue.append(at_ns)
        self._dispatch()


def retry_after_s(answer: Answer) -> float:
    """How long a refusal says to wait, the exact header first; a second where it says nothing."""
    exact, whole = answer.header("retry-after-ms"), answer.header("retry-after")
    return float(exact) / 1e3 if exact else float(whole or 1)


async def open_loop(
    request: Request,
    instants_ns: list[int],
    *,
    retry: bool = False,
    connections: int = 8,
    most_connections: int = 1024,
    drain_s: float = 30.0,
) -> Tally:
    """Load at the instants given (`poisson` makes such), in ns after the start."""
    loop = (PatientLoop if retry else OpenLoop)(request, most_connections)
    return await loop.run(instants_ns, connections, drain_s)
