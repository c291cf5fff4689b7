"""Two gateways, whose CPU time per call is measured in turns: those of two commits, or with few and with many functions."""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fleet
import uvloop
from closed import ClosedLoop
from contestant import HELLO, HELLO_ANSWER
from control import Control
from function_cpu import FunctionCpu, Used
from hello import FUNCTION
from http1 import Request
from percentiles import median, percentile
from report import Report
from servers import Server, ServerError, start_pilotflame

NAME = "hello"
EVENT = {"name": "x"}
# A cold call needs a function without workers.
IDLE_TIMEOUT_S = 0.05
WARM_UP_S, WARM_UP_COLD_CALLS = 2.0, 3
# Other work on the machine comes and goes within seconds. Short turns share it out to both sides.
TURN_S = 0.2
DRAIN_S = 30.0
NOTHING = Used()
PARTS = ("loop_s", "function_s", "threads_s", "path_s", "total_s")
RATIOS = ("loop_s", "function_s", "path_s", "total_s")
UNITS = {False: ("us", 1e6), True: ("ms", 1e3)}
"""The unit of one call's CPU time and its number in a second, by `Plan.cold`."""


@dataclass(frozen=True)
class Plan:
    """The calls of one gateway in one round."""

    cold: bool
    callers: int
    seconds: float
    """How long warm calls are sent."""
    calls: int
    """How many cold calls are sent."""


@dataclass(frozen=True)
class Case:
    """The condition of one side: the interpreter whose pilotflame runs, and the number of other functions."""

    name: str
    python: str | Path
    functions: int


@dataclass
class Side:
    """A gateway with the called function, and its CPU time per call in seconds, round by round."""

    name: str
    server: Server
    control: Control
    cpu: FunctionCpu
    rounds: list[Used] = field(default_factory=list)

    def cold_call(self) -> None:
        """Call the function at zero, and wait until it is at zero again."""
        if not self.control.invoke(NAME, EVENT).cold:
            raise RuntimeError(f"{NAME} was not at zero")
        self.cpu.wait_at_zero()

    def figures(self, part: str) -> list[float]:
        """Return the seconds per call, round by round; `part` names a field or property of `Used`."""
        return [getattr(used, part) for used in self.rounds]


class WarmCallers:
    """The callers of one side. Each keeps its connection and sends one call after another."""

    def __init__(self, of: Side, callers: int) -> None:
        self.side = of
        url, headers = f"{of.server.url}/invoke/{NAME}", {"Content-Type": "application/json"}
        self._loop = ClosedLoop(Request(url, body=HELLO, headers=headers, expect=HELLO_ANSWER), callers)
        self._used, self._answers = NOTHING, 0

    async def connect(self) -> None:
        """Open the connections, and send calls until all processes are as they will be measured."""
        await self._loop.connect()
        await self.send(WARM_UP_S)
        self._used, self._answers = NOTHING, 0

    async def send(self, seconds: float) -> None:
        """Send calls, and add what they use."""
        before = self.side.cpu.used()
        tally = await self._loop.run(seconds, 2**62, DRAIN_S)
        if not tally.clean:
            raise ServerError(f"{self.side.name} answered wrongly: {tally.summary()}")
        self._used += self.side.cpu.used() - before
        self._answers += tally.right

    def end_round(self) -> None:
        """Enter the CPU time of each call since the last round."""
        self.side.rounds.append(self._used.each(self._answers))
        self._used, self._answers = NOTHING, 0

    def close(self) -> None:
        self._loop.close()


@contextlib.contextmanager
def side(case: Case, plan: Plan, overrides: dict[str, Any]) -> Iterator[Side]:
    """Start the gateway of a case, and deploy the other functions and then the called one with these settings."""
    settings = {"scale.idle_timeout_s": IDLE_TIMEOUT_S, **overrides} if plan.cold else overrides
    functions = case.functions
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(start_pilotflame(fleet.ENVIRONMENT, case.python))
        control = stack.enter_context(contextlib.closing(Control(server.url)))
        if functions:
            others = fleet.Fleet(functions, server, control, stack.enter_context(fleet.nothing()))
            others.deploy(others.names)
            others.wait_at_zero()
        control.deploy(str(FUNCTION), name=NAME, **settings)
        yield Side(case.name, server, control, FunctionCpu(server.pid, NAME))


def play(sides: Sequence[Side], rounds: int, plan: Plan) -> None:
    """Measure both sides in each round. The two take turns, so that other work on the machine affects both."""
    for one in sides:
        one.cpu.wait_idle()
    if plan.cold:
        _play_cold(sides, rounds, plan)
        return
    # As in load.py: a pause of the generator would change how many calls arrive together.
    gc.freeze()
    gc.disable()
    uvloop.run(_play_warm(sides, rounds, plan))
    gc.enable()


async def _play_warm(sides: Sequence[Side], rounds: int, plan: Plan) -> None:
    callers = [WarmCallers(one, plan.callers) for one in sides]
    try:
        for one in callers:
            await one.connect()
        for number in range(rounds):
            for turn in range(max(1, round(plan.seconds / TURN_S))):
                for one in callers[::-1] if turn % 2 else callers:
                    await one.send(TURN_S)
            for one in callers:
                one.end_round()
            _tell(sides, number, rounds, plan)
    finally:
        for one in callers:
            one.close()


def _play_cold(sides: Sequence[Side], rounds: int, plan: Plan) -> None:
    for one in sides:
        one.control.close()
        one.cpu.wait_at_zero()
    for _, one in itertools.product(range(WARM_UP_COLD_CALLS), sides):
        one.cold_call()
    for number in range(rounds):
        for one in sides:
            # A gateway closes connections that are idle for long.
            one.control.close()
        before = [one.cpu.used() for one in sides]
        for call in range(plan.calls):
            for one in sides[::-1] if call % 2 else sides:
                one.cold_call()
        for one, used in zip(sides, before, strict=True):
            one.rounds.append((one.cpu.used() - used).each(plan.calls))
        _tell(sides, number, rounds, plan)


def _tell(sides: Sequence[Side], number: int, rounds: int, plan: Plan) -> None:
    unit, factor = UNITS[plan.cold]
    told = ", ".join(f"{one.name} {one.rounds[-1].path_s * factor:.4g} {unit}" for one in sides)
    print(f"  round {number + 1} of {rounds}: {told}", file=sys.stderr, flush=True)


def enter(report: Report, first: Side, second: Side, *, plan: Plan, target: str) -> None:
    """Enter the median of each side, and the median and the quartiles of the ratio in one round."""
    unit, factor = UNITS[plan.cold]
    for part in PARTS:
        name = part.removesuffix("_s")
        for one in (first, second):
            report.add(
                f"{one.name}_{name}_{unit}", round(median(one.figures(part)) * factor, 4), f"{unit} CPU"
            )
    for part in RATIOS:
        name = part.removesuffix("_s")
        pairs = zip(first.figures(part), second.figures(part), strict=True)
        ratios = [later / earlier for earlier, later in pairs]
        report.add(f"{name}_ratio", median(ratios), "x", target if part == "path_s" else "")
        report.add(f"{name}_ratio_p25", percentile(ratios, 0.25), "x")
        report.add(f"{name}_ratio_p75", percentile(ratios, 0.75), "x")
    for one in (first, second):
        for used in one.rounds:
            report.row(side=one.name, **{part: getattr(used, part) for part in PARTS})
