"""Short calls among long ones, in random sequences with random gaps: how many of the short calls wait. Part of `make bench-warm`.

At most three long calls run at a time, and four workers are allowed. So a short call may have to wait for the
start of a worker, but never for a long call. While a handler holds the interpreter's lock, its worker cannot
give calls back. Short calls that the worker got before the long call was late then wait for the end of the
long call. These calls are counted separately.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass

import uvloop
from control import Control
from http1 import Request, connect
from pilotflame.runtime.calls.batching.assignment import SHORT_S
from report import Report
from servers import Server, ServerError

HANDLERS = {
    "thread": "import time\ndef handler(event):\n    time.sleep(event)\n",
    "loop": "import asyncio\nasync def handler(event):\n    await asyncio.sleep(event)\n",
    "holds_lock": "import ctypes\nlocked = ctypes.PyDLL(None)\ndef handler(event):\n    locked.usleep(int(event * 1e6))\n",
}
CALLS, FIRST = 60, 5
MOST_LONG, LONG_SHARE, LONG_S = 3, 0.2, (0.3, 1.5)
# Most gaps are shorter than the time after which a long call is late.
GAPS_S = (0.0, 0.0, 0.001, 0.005, 0.02, 0.1, 0.5)
LIMIT_S = 0.1
# The time from a caller to the gateway, and for the answer.
WAY_S = 0.01


@dataclass
class Sent:
    """A call, and when it was sent and answered."""

    takes_s: float
    sent_s: float = 0.0
    ended_s: float = 0.0

    def was_behind(self, long: Sent) -> bool:
        """Return True if this call was sent before the long call was late, and waited for the end of the long
        call.

        Another worker may have run this call: the worker of the long call may give it back when the long call
        has ended.
        """
        began_s = long.ended_s - long.takes_s
        sent_early = self.sent_s <= began_s + SHORT_S + WAY_S <= self.ended_s
        return sent_early and -WAY_S <= self.ended_s - long.ended_s <= LIMIT_S


def measure(report: Report, server: Server, control: Control, seeds: int) -> None:
    """Enter short_calls_above_100_ms for each handler, and how many of them the worker could not give back."""
    for kind, handler in HANDLERS.items():
        late, behind, short = 0, 0, 0
        for seed in range(seeds):
            name = f"{kind.replace('_', '-')}-{seed}"
            control.deploy_code(name, handler, **{"scale.max": 4})
            calls = uvloop.run(sequence(f"{server.url}/invoke/{name}", seed))
            control.request("DELETE", f"/v1/functions/{name}")
            found = [one for one in calls if not one.takes_s]
            waited = [one for one in found if one.ended_s - one.sent_s > LIMIT_S]
            kept = [one for one in waited if any(one.was_behind(other) for other in calls if other.takes_s)]
            waits_ms = [round((one.ended_s - one.sent_s) * 1e3) for one in waited]
            report.row(
                part="slow", handler=kind, seed=seed, short=len(found), waits_ms=waits_ms, behind=len(kept)
            )
            late, behind, short = late + len(waited), behind + len(kept), short + len(found)
        if kind == "holds_lock":
            report.add(f"{kind}_handed_over_early", behind, f"of {short}")
            late -= behind
        report.add(f"{kind}_short_calls_above_100_ms", late, f"of {short}", "== 0")


async def sequence(url: str, seed: int) -> list[Sent]:
    """Send FIRST short calls one after the other, and then calls at random times. Return all but the first ones."""
    draw, calls, running = random.Random(seed), list[Sent](), 0
    for _ in range(FIRST):
        await send(url, Sent(0.0))

    async def long(call: Sent) -> None:
        nonlocal running
        running += 1
        await send(url, call)
        running -= 1

    async with asyncio.TaskGroup() as tasks:
        for _ in range(CALLS):
            if running < MOST_LONG and draw.random() < LONG_SHARE:
                calls.append(Sent(draw.uniform(*LONG_S)))
                tasks.create_task(long(calls[-1]))
            else:
                calls.append(Sent(0.0))
                tasks.create_task(send(url, calls[-1]))
            await asyncio.sleep(draw.choice(GAPS_S) * draw.random())
    return calls


async def send(url: str, call: Sent) -> None:
    request = Request(url, body=str(call.takes_s).encode())
    connection = await connect(request)
    call.sent_s = time.monotonic()
    answer = await connection.ask(request.encode())
    call.ended_s = time.monotonic()
    connection.close()
    if answer is None or answer.status != 200:
        raise ServerError(f"a call was answered with {answer}")
