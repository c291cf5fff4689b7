"""The CPU time of a warm call, of a durable job and of a cold start of an empty handler, at another commit and now.

    make bench-compare BENCH_ARGS='--against HEAD~3'
    make bench-compare BENCH_ARGS='--against HEAD~3 --only cold --functions 100'

Both commits run at the same time and take turns within each round, so that other work on the machine affects both. Ratios are
taken round by round: their medians and quartiles are reported. The time is of all threads. That of a cold start is also split:
the gateway, the zygote, and the children (standby and worker). There is no target: commits differ.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import io
import itertools
import operator
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import hello
import uvloop
from control import Control
from function_cpu import FunctionCpu, Used
from load import ClosedLoop, Request
from percentiles import median, percentile
from report import Report, parser
from servers import Server, ServerError, start_pilotflame

NAME = "hello"
ROOT = Path(__file__).resolve().parents[2]
# Hard links need the file system of the environment, and /tmp may be another one.
BUILD = ROOT / "build" / "bench"
INSTALL = ["install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation"]
# A cold call needs a function without workers.
IDLE_TIMEOUT_S = 0.05
WARM_UP_S, WARM_UP_COLD_CALLS = 2.0, 3
# Other work on the machine changes within seconds. Short turns distribute it over both sides.
TURN_S = 0.2
NOTHING = Used(0.0, 0.0, 0.0)
# The processes of a cold start, as the figures name them.
PROCESSES = {"gateway": "gateway", "zygote": "zygote", "child": "children"}
UNITS = {"hello": ("us", 1e6), "job": ("us", 1e6), "cold": ("ms", 1e3)}
"""The unit of the CPU time of one call or job, and how many of this unit a second has."""
JOB_BODY = b'{"input": %s}' % hello.BODY
JOBS_WAIT_S, LOOK_S = 60.0, 0.02


@dataclass
class Side:
    """A gateway with the called function, and the CPU time of a call in seconds, round by round."""

    name: str
    server: Server
    control: Control
    cpu: FunctionCpu
    rounds: list[Used] = field(default_factory=list)
    """The CPU time of a call in each round."""

    @property
    def rounds_s(self) -> list[float]:
        """The CPU time of a call in all processes, round by round."""
        return list(map(sum, self.rounds))

    def cold_call(self) -> None:
        """Call the function at zero, and wait until it is at zero again."""
        if not self.control.invoke(NAME, {"name": "x"}).cold:
            raise RuntimeError(f"{NAME} was not at zero")
        self.cpu.wait_at_zero()

    def wait_for_jobs(self) -> None:
        """Wait until all jobs have ended."""
        until_s = time.monotonic() + JOBS_WAIT_S
        while (jobs := self.control.request("GET", f"/v2/{NAME}/health")["jobs"])["completed"] != sum(
            jobs.values()
        ):
            if jobs["failed"] or time.monotonic() > until_s:
                raise RuntimeError(f"jobs of {self.name} have not completed: {jobs}")
            time.sleep(LOOK_S)


class WarmCallers:
    """The callers of one side. Each caller keeps its connection, and sends a call or submits a job when the one before is answered."""

    def __init__(self, side: Side, callers: int, *, jobs: bool) -> None:
        self._side, self._jobs = side, jobs
        call = Request(f"{side.server.url}/invoke/{NAME}", body=hello.BODY, expect=hello.ANSWER)
        request = Request(f"{side.server.url}/v2/{NAME}/run", body=JOB_BODY) if jobs else call
        self._loop = ClosedLoop(request, callers)
        self._used, self._answers = NOTHING, 0

    async def connect(self) -> None:
        """Open the connections, and send calls until all processes are as they will be measured."""
        await self._loop.connect()
        await self.send(WARM_UP_S)
        self._used, self._answers = NOTHING, 0

    async def send(self, seconds: float) -> None:
        """Send calls, and add the CPU time that they use."""
        before = self._side.cpu.used()
        tally = await self._loop.run(seconds)
        if not tally.clean:
            raise ServerError(f"{self._side.name} answered wrongly: {tally.summary()}")
        if self._jobs:
            await asyncio.to_thread(self._side.wait_for_jobs)
        used = self._side.cpu.used().since(before)
        self._used = Used(*map(sum, zip(self._used, used, strict=True)))
        self._answers += tally.right

    def end_round(self) -> None:
        """Enter the CPU time of each call since the last round."""
        self._side.rounds.append(self._used.each(self._answers))
        self._used, self._answers = NOTHING, 0

    def close(self) -> None:
        self._loop.close()


@contextlib.contextmanager
def environment_of(commit: str) -> Iterator[Path]:
    """Copy the environment by hard links, install the wheel of a commit there, and yield its Python interpreter.

    The other packages keep their present versions, even if the commit requires different ones. pip replaces the links of
    the wheel and writes into no shared file.
    """
    BUILD.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="commit-", dir=BUILD) as folder:
        source, environment = Path(folder) / "source", Path(folder) / "environment"
        command = ["git", "-C", str(ROOT), "archive", "--format=tar", commit]
        archive = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(source, filter="data")
        subprocess.run(["cp", "-al", "--", sys.prefix, str(environment)], check=True)
        python = environment / "bin" / "python"
        # The copied `pip` script would start the interpreter of the present environment.
        subprocess.run([python, "-m", "pip", *INSTALL, "--force-reinstall", str(source)], check=True)
        yield python


@contextlib.contextmanager
def started(
    name: str,
    python: str | Path,
    env: Mapping[str, str] | None = None,
    *,
    cold: bool = False,
    others: int = 0,
) -> Iterator[Side]:
    """Start the gateway of this interpreter, and deploy the function beside `others`, each of which has been called."""
    settings = {"scale.idle_timeout_s": IDLE_TIMEOUT_S} if cold else {}
    with start_pilotflame(env, python=python) as server, contextlib.closing(Control(server.url)) as control:
        for number in range(others):
            control.deploy(str(hello.FUNCTION), name=f"other-{number}", **settings)
            control.invoke(f"other-{number}", {"name": "x"})
        control.deploy(str(hello.FUNCTION), name=NAME, **settings)
        yield Side(name, server, control, FunctionCpu(server.pid, NAME))


async def run_warm(sides: Sequence[Side], part: str, options: argparse.Namespace) -> None:
    callers = [WarmCallers(one, hello.CALLERS, jobs=part == "job") for one in sides]
    try:
        for one in callers:
            await one.connect()
        for number in range(options.rounds):
            for turn in range(max(1, round(options.seconds / TURN_S))):
                for one in callers[::-1] if turn % 2 else callers:
                    await one.send(TURN_S)
            for one in callers:
                one.end_round()
            print_progress(sides, number, part, options)
    finally:
        for one in callers:
            one.close()


def run_cold(sides: Sequence[Side], options: argparse.Namespace) -> None:
    for one in sides:
        one.control.close()
        one.cpu.wait_at_zero()
    for _, one in itertools.product(range(WARM_UP_COLD_CALLS), sides):
        one.cold_call()
    for number in range(options.rounds):
        for one in sides:
            # Use a new connection in each round, because a gateway closes connections that are idle for long.
            one.control.close()
        before = [one.cpu.used() for one in sides]
        for call in range(options.calls):
            for one in sides[::-1] if call % 2 else sides:
                one.cold_call()
        for one, used in zip(sides, before, strict=True):
            one.rounds.append(one.cpu.used().since(used).each(options.calls))
        print_progress(sides, number, "cold", options)


def print_progress(sides: Sequence[Side], number: int, part: str, options: argparse.Namespace) -> None:
    unit, factor = UNITS[part]
    rates = ", ".join(f"{one.name} {one.rounds_s[-1] * factor:.4g} {unit}" for one in sides)
    print(f"  round {number + 1} of {options.rounds}: {rates}", file=sys.stderr, flush=True)


def enter(report: Report, before: Side, after: Side, part: str) -> None:
    """Enter the median of each side, and the median and the quartiles of the ratio in one round."""
    unit, factor = UNITS[part]
    kinds: dict[str, Callable[[Used], float]] = {"": sum}
    if part == "cold":
        kinds |= {f"{name}_": operator.attrgetter(field) for name, field in PROCESSES.items()}
    for kind, read in kinds.items():
        times = [[read(used) for used in one.rounds] for one in (before, after)]
        for one, seconds in zip((before, after), times, strict=True):
            report.add(f"{part}_{kind}{one.name}_{unit}", median(seconds) * factor, f"{unit} CPU")
            report.row(part=part, side=one.name, process=kind.rstrip("_"), seconds=seconds)
        ratios = [later / earlier for earlier, later in zip(*times, strict=True)]
        report.add(f"{part}_{kind}cpu_ratio", median(ratios), "x")
        report.add(f"{part}_{kind}cpu_ratio_p25", percentile(ratios, 0.25), "x")
        report.add(f"{part}_{kind}cpu_ratio_p75", percentile(ratios, 0.75), "x")


def compare(report: Report, part: str, python: Path, options: argparse.Namespace) -> None:
    """Start a gateway of each commit, and compare their warm calls, their jobs or their cold starts."""
    how = {"cold": part == "cold", "others": options.functions - 1}
    with contextlib.ExitStack() as stack:
        before = stack.enter_context(started("before", python, **how))
        after = stack.enter_context(started("after", sys.executable, **how))
        for one in (before, after):
            one.cpu.wait_idle()
        if part == "cold":
            run_cold((before, after), options)
        else:
            uvloop.run(run_warm((before, after), part, options))
    enter(report, before, after, part)


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--against", metavar="COMMIT", required=True)
    made.add_argument("--only", choices=UNITS, help="compare only calls, jobs or cold starts")
    made.add_argument(
        "--functions",
        type=int,
        default=1,
        metavar="N",
        help="number of functions of each gateway; one is measured",
    )
    made.add_argument("--rounds", type=int, default=40)
    made.add_argument("--seconds", type=float, default=2.0, help="of warm calls of each side in one round")
    made.add_argument("--calls", type=int, default=20, help="cold starts of each side in one round")
    options = made.parse_args()
    report = Report("bench-compare")
    report.note(
        f"before: commit {options.against}; after: the installed wheel; {options.functions} functions"
    )
    # A garbage collection of the generator would change how many calls arrive together.
    gc.freeze()
    gc.disable()
    with environment_of(options.against) as python:
        for part in [options.only] if options.only else UNITS:
            with report.part(part):
                compare(report, part, python, options)
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
