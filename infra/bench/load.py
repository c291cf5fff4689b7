"""The load generator: a closed loop of callers, an open loop of Poisson arrivals, and bursts.

`load_apart` runs the loops in a process of its own.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import uvloop
from http1 import Answer, Connection, Request, connect
from tally import Tally

__all__ = ["REFUSED", "ClosedLoop", "Request", "Tally", "burst", "load_apart"]

BLANKS = 40
"""The number of blanks after the body of a request of an open loop. Tabs among them encode its number."""
DRAIN_S = 30.0
REFUSED = {429, 503}


class ClosedLoop:
    """Callers that each send a request, wait for the whole answer, and send the next request."""

    def __init__(self, request: Request, callers: int) -> None:
        self._request, self._wire, self._callers = request, request.encode(), callers
        self._connections: list[Connection] = []
        self._tally = Tally()
        self._until_ns = self._waiting = 0
        self._ended = asyncio.Event()

    async def connect(self) -> None:
        self._connections = [await connect(self._request) for _ in range(self._callers)]

    async def run(self, duration_s: float) -> Tally:
        """Send for `duration_s`, and then wait for the answers. A caller whose connection is lost sends nothing more."""
        self._tally, self._waiting = Tally(), self._callers
        self._ended.clear()
        with _measured(self._tally):
            self._until_ns = time.perf_counter_ns() + int(duration_s * 1e9)
            for connection in self._connections:
                self._send(connection)
            try:
                await asyncio.wait_for(self._ended.wait(), duration_s + DRAIN_S)
            except TimeoutError:
                self._tally.errors["no answer"] += 1
        return self._tally

    def close(self) -> None:
        for connection in self._connections:
            connection.close()

    def _send(self, connection: Connection) -> None:
        sent_ns = time.perf_counter_ns()

        def answered(answer: Answer | None) -> None:
            self._tally.enter(self._request, answer, time.perf_counter_ns() - sent_ns)
            if answer is None or time.perf_counter_ns() >= self._until_ns:
                self._waiting -= 1
                if not self._waiting:
                    self._ended.set()
            else:
                self._send(connection)

        connection.send(self._wire, answered)


class OpenLoop:
    """Requests that arrive at given instants, whether or not earlier requests were answered.

    A latency counts from the intended instant, so that a stalled server cannot hide the callers that it kept waiting
    (coordinated omission). The instants are met to a millisecond. Each request has a body of its own, like requests of
    different callers: the same JSON, followed by blanks that encode a number. With `retry`, a refused request is repeated
    once, after the delay that the refusal states, and `second_statuses` has its second answer.
    """

    def __init__(self, request: Request, *, retry: bool) -> None:
        self._request, self._retry = request, retry
        self._wire = replace(request, body=request.body + b" " * BLANKS).encode()[:-BLANKS]
        self._idle: list[Connection] = []
        self._tally = Tally()

    async def run(self, instants_s: Sequence[float]) -> Tally:
        with _measured(self._tally):
            begin_s = time.monotonic()
            tasks = [
                asyncio.create_task(self._call(number, begin_s + at_s))
                for number, at_s in enumerate(instants_s)
            ]
            _, late = await asyncio.wait(tasks, timeout=instants_s[-1] + DRAIN_S)
        for task in late:
            task.cancel()
            self._tally.errors["no answer"] += 1
        for connection in self._idle:
            connection.close()
        return self._tally

    async def _call(self, number: int, at_s: float) -> None:
        await asyncio.sleep(at_s - time.monotonic())
        answer = await self._ask(2 * number)
        self._tally.enter(self._request, answer, int((time.monotonic() - at_s) * 1e9))
        if self._retry and answer is not None and answer.status in REFUSED:
            await asyncio.sleep(retry_after_s(answer))
            if second := await self._ask(2 * number + 1):
                self._tally.second_statuses[second.status] += 1

    async def _ask(self, number: int) -> Answer | None:
        try:
            connection = self._idle.pop() if self._idle else await connect(self._request)
        except OSError:
            return None
        blanks = format(number, f"0{BLANKS}b").replace("0", " ").replace("1", "\t")
        answer = await connection.ask(self._wire + blanks.encode())
        if answer is not None:
            self._idle.append(connection)
        return answer


def retry_after_s(answer: Answer) -> float:
    """Return the delay that a refusal states; one second if it states none."""
    exact, whole = answer.header("retry-after-ms"), answer.header("retry-after")
    return float(exact) / 1e3 if exact else float(whole or 1)


def poisson(rate: float, duration_s: float, seed: int) -> list[float]:
    """Return the instants of a Poisson process, in seconds after the start."""
    draw = random.Random(seed)
    instants = [draw.expovariate(rate)]
    while instants[-1] < duration_s:
        instants.append(instants[-1] + draw.expovariate(rate))
    return instants


def burst(requests: Sequence[Request]) -> Tally:
    """Send all requests at one instant, on connections that are open. Raise RuntimeError unless all are answered."""
    tally = uvloop.run(_burst(requests))
    if not tally.clean:
        raise RuntimeError(f"{tally.right} of {len(requests)} answered: {tally.summary()}")
    return tally


async def _burst(requests: Sequence[Request]) -> Tally:
    tally, connections = Tally(), [await connect(request) for request in requests]

    async def ask(connection: Connection, request: Request) -> None:
        answer = await connection.ask(request.encode())
        tally.enter(request, answer, time.perf_counter_ns() - began_ns)

    with _measured(tally):
        began_ns = time.perf_counter_ns()
        async with asyncio.timeout(4 * DRAIN_S):
            await asyncio.gather(*map(ask, connections, requests))
    for connection in connections:
        connection.close()
    return tally


@contextmanager
def _measured(tally: Tally) -> Iterator[None]:
    """Enter the duration of the block, and the CPU time of this process."""
    started_s, cpu_s = time.perf_counter(), time.process_time()
    yield
    tally.wall_s, tally.cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_s


def load_apart(
    request: Request, *, callers: int = 1, duration_s: float = 2.0, warmup_s: float = 0.3, rate: float | None = None,
    retry: bool = False, seed: int = 1,
) -> Tally:  # fmt: skip
    """Run a closed loop of `callers`, or with `rate` an open loop, in a new process.

    The requests of the first `warmup_s` are not counted.
    """
    given = {
        **asdict(request),
        "body": request.body.decode("latin-1"),
        "expect": (request.expect or b"").decode("latin-1"),
    }
    order = {
        "request": given, "callers": callers, "duration_s": duration_s, "warmup_s": warmup_s, "rate": rate,
        "retry": retry, "seed": seed,
    }  # fmt: skip
    # A file, not a pipe: more than 64 KiB did not always arrive whole through a pipe.
    with tempfile.TemporaryFile() as output:
        command = [sys.executable, __file__, json.dumps(order)]
        subprocess.run(command, check=True, stdout=output, timeout=duration_s + 120)
        output.seek(0)
        return Tally.from_json(output.read().decode())


async def _load(order: dict[str, Any]) -> Tally:
    given = order["request"]
    request = Request(
        **{
            **given,
            "body": given["body"].encode("latin-1"),
            "expect": given["expect"].encode("latin-1") or None,
        }
    )
    loop = ClosedLoop(request, order["callers"])
    await loop.connect()
    warmup = await loop.run(order["warmup_s"])
    if order["rate"] is None:
        tally = await loop.run(order["duration_s"])
    else:
        instants_s = poisson(order["rate"], order["duration_s"], order["seed"])
        tally = await OpenLoop(request, retry=order["retry"]).run(instants_s)
    loop.close()
    tally.warmup_answers = warmup.answers
    for what, times in warmup.errors.items():
        tally.errors[f"warm-up: {what}"] = times
    return tally


def main() -> None:
    # A garbage collection in the generator must not count as latency of the server.
    gc.freeze()
    gc.disable()
    print(uvloop.run(_load(json.loads(sys.argv[1]))).to_json())


if __name__ == "__main__":
    main()
