"""The CPU time of a warm hello, process by process, beside a bare echo; or of a hello at two commits.

    python infra/bench/path_cost.py                               # beside the echo
    python infra/bench/path_cost.py --profile                     # and the functions of gateway and worker (py-spy)
    python infra/bench/path_cost.py --against HEAD~3              # a warm hello at that commit, and now
    python infra/bench/path_cost.py --against HEAD~3 --cold       # a cold start at that commit, and now
    python infra/bench/path_cost.py --functions 1000 [--cold]     # with one function, and with 1,000 others

The two sides take turns in each round, so that other work on the machine affects both.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import path_pairs
import process_tree
import psutil
from commit_environment import environment_of, hash_of
from contestant import HELLO
from control import Control
from hello import CALLERS, FUNCTION
from load import Request, load_apart
from percentiles import median
from report import Report
from servers import Server, ServerError, start_echo, start_pilotflame

HEADERS = {"Content-Type": "application/json"}
PARTS = ("gateway", "worker", "others")
SHARE = 0.55
# A call among 1,000 functions costs at most this much of a call with one function.
MANY = "<= 1.1"
ROUNDS, PAIRS = 5, 10
SAMPLES_PER_S = 400
TOP = 28


@dataclass(frozen=True, slots=True)
class Spent:
    """The CPU time of processes in user mode and in the kernel, in seconds, and the number of their context switches."""

    user_s: float = 0.0
    system_s: float = 0.0
    switches: int = 0

    @property
    def total_s(self) -> float:
        return self.user_s + self.system_s

    def __add__(self, other: Spent) -> Spent:
        return Spent(
            self.user_s + other.user_s, self.system_s + other.system_s, self.switches + other.switches
        )

    def __sub__(self, other: Spent) -> Spent:
        return Spent(
            self.user_s - other.user_s, self.system_s - other.system_s, self.switches - other.switches
        )


@dataclass(frozen=True, slots=True)
class Cost:
    """The CPU time of a number of requests, by part, and the rate of the requests."""

    parts: dict[str, Spent]
    requests: int
    per_second: float

    def us(self, part: str) -> float:
        return self.parts[part].total_s / self.requests * 1e6

    @property
    def whole_us(self) -> float:
        return sum(self.us(part) for part in self.parts)


def spent(process: psutil.Process) -> Spent:
    """Return what a process has spent so far, its ended and reaped children included."""
    times = process.cpu_times()
    switches = sum(
        int(line.split()[1])
        for status in Path(f"/proc/{process.pid}/task").glob("*/status")
        for line in status.read_text().splitlines()
        if "ctxt_switches" in line
    )
    return Spent(times.user + times.children_user, times.system + times.children_system, switches)


def part_of(process: psutil.Process, server: Server, worker: str) -> str:
    if process.pid == server.pid:
        return "gateway"
    return "worker" if worker in " ".join(process.cmdline()) else "others"


def look(server: Server, worker: str) -> dict[str, Spent]:
    """Return what each part of a server has spent so far."""
    found = dict.fromkeys(PARTS, Spent())
    for process in process_tree.tree(server.pid):
        part = part_of(process, server, worker)
        found[part] += spent(process)
    return found


class Side:
    """A server under measurement, and its rounds."""

    def __init__(self, server: Server, path: str, worker: str) -> None:
        self.server, self._worker = server, worker
        self._request = Request(server.url + path, body=HELLO, headers=HEADERS)
        self.rounds: list[Cost] = []

    def load(self, callers: int, duration_s: float) -> Cost:
        before = look(self.server, self._worker)
        tally = load_apart(self._request, callers=callers, duration_s=duration_s, warmup_s=0.0)
        after = look(self.server, self._worker)
        if not tally.clean:
            raise ServerError(f"{self.server.name} answered wrongly: {tally.summary()}")
        parts = {part: after[part] - before[part] for part in PARTS}
        return Cost(parts, tally.right, tally.per_second)

    def median(self, part: str) -> float:
        return median([cost.us(part) for cost in self.rounds])

    def pid_of(self, part: str) -> int:
        """Return the id of the process that has spent most of its part."""
        tree = process_tree.tree(self.server.pid)
        of_part = [found for found in tree if part_of(found, self.server, self._worker) == part]
        return int(max(of_part, key=lambda found: spent(found).total_s).pid)


@contextmanager
def sides(workers: int) -> Iterator[tuple[Side, Side]]:
    """Start the echo and a gateway, so that their rounds can take turns."""
    with ExitStack() as stack:
        echo = Side(stack.enter_context(start_echo()), "/", "-")
        server = stack.enter_context(start_pilotflame())
        control = Control(server.url)
        overrides = {"scale.max": workers} if workers else {}
        control.deploy(str(FUNCTION), name="hello", **overrides)
        control.close()
        yield echo, Side(server, "/invoke/hello", "pilotflame: worker hello")


def measure(echo: Side, ours: Side, arguments: argparse.Namespace) -> None:
    for side in (echo, ours):
        side.load(arguments.callers, 1.0)
    for number in range(arguments.rounds or ROUNDS):
        for side in (echo, ours) if number % 2 else (ours, echo):
            side.rounds.append(side.load(arguments.callers, arguments.seconds))


def enter(report: Report, echo: Side, ours: Side) -> None:
    whole = [cost.whole_us for cost in ours.rounds]
    bare = [cost.whole_us for cost in echo.rounds]
    report.add("echo_us", median(bare), "us CPU")
    for part in PARTS:
        report.add(f"{part}_us", ours.median(part), "us CPU")
        report.add(f"{part}_system_share", _over(ours, part, "system_s", "total_s"))
        report.add(f"{part}_switches_per_request", median(
            [cost.parts[part].switches / cost.requests for cost in ours.rounds]
        ))  # fmt: skip
    report.add("ours_us", median(whole), "us CPU")
    report.add("echo_rps", median([cost.per_second for cost in echo.rounds]), "/s")
    report.add("ours_rps", median([cost.per_second for cost in ours.rounds]), "/s")
    report.add("echo_cpu_share", median(bare) / median(whole), "of echo's req/cpu-s", f">= {SHARE}")
    for of_echo, of_ours in zip(echo.rounds, ours.rounds, strict=True):
        report.row(echo_us=of_echo.whole_us, ours_us=of_ours.whole_us, rps=of_ours.per_second)


def _over(side: Side, part: str, above: str, below: str) -> float:
    shares = [
        getattr(cost.parts[part], above) / max(getattr(cost.parts[part], below), 1e-9) for cost in side.rounds
    ]
    return median(shares)


def profile(ours: Side, part: str, callers: int, seconds: float) -> None:
    """Print the functions in which a process of the gateway was while it held Python's lock, by the number of samples.

    A system call that keeps the lock counts for its whole duration, even while the process does not run.
    """
    beside = Path(sys.executable).with_name("py-spy")
    sampler = str(beside) if beside.exists() else shutil.which("py-spy")
    if sampler is None:
        raise ServerError("py-spy is missing, which takes the profile: pip install py-spy")
    load = threading.Thread(target=ours.load, args=(callers, seconds + 1.0))
    load.start()
    with tempfile.NamedTemporaryFile(suffix=".raw") as raw:
        command = [sampler, "record", "--gil", "-f", "raw", "-o", raw.name, "-r", str(SAMPLES_PER_S)]
        command += ["-d", str(int(seconds)), "-p", str(ours.pid_of(part))]
        subprocess.run(command, check=True, capture_output=True)
        stacks = Path(raw.name).read_text().splitlines()
    load.join()
    tell(part, stacks)


def tell(part: str, stacks: list[str]) -> None:
    alone, within, total = Counter[str](), Counter[str](), 0
    for line in stacks:
        stack, _, count = line.rpartition(" ")
        names = [name.rpartition(":")[0] or name for name in stack.split(";")]
        alone[names[-1]] += int(count)
        for name in set(names):
            within[name] += int(count)
        total += int(count)
    for title, counted in (("itself", alone), ("with what it calls", within)):
        print(f"\n{part}, {title}: share of {total} samples")
        for name, samples in counted.most_common(TOP):
            print(f"  {samples / total:6.1%}  {name}")


def compare(arguments: argparse.Namespace) -> bool:
    """Measure another commit beside this one, or a gateway with many functions beside a gateway with one.

    Return True if the targets are met.
    """
    plan = path_pairs.Plan(arguments.cold, arguments.callers, arguments.seconds, arguments.calls)
    overrides = {"scale.max": arguments.workers} if arguments.workers else {}
    report = Report("path-cost-cold" if arguments.cold else "path-cost-warm")
    with ExitStack() as stack:
        if arguments.against is None:
            few = path_pairs.Case("one", sys.executable, 0)
            cases = [few, path_pairs.Case("many", sys.executable, arguments.functions)]
            report.note(
                f"one: {path_pairs.NAME} is the only function; many: beside {arguments.functions} others"
            )
        else:
            python = stack.enter_context(environment_of(arguments.against))
            before = path_pairs.Case("before", python, arguments.functions)
            cases = [before, path_pairs.Case("after", sys.executable, arguments.functions)]
            report.note(f"before: commit {arguments.against}; after: the installed wheel")
        first, second = (stack.enter_context(path_pairs.side(case, plan, overrides)) for case in cases)
        path_pairs.play((first, second), arguments.rounds or PAIRS, plan)
    path_pairs.enter(report, first, second, plan=plan, target=MANY if arguments.against is None else "")
    if arguments.json:
        print(report.write().read_text())
        return report.met
    return report.finish()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, help=f"default: {ROUNDS}, and {PAIRS} of a comparison")
    parser.add_argument("--seconds", type=float, default=2.0, help="of warm calls in one round")
    parser.add_argument("--callers", type=int, default=CALLERS)
    parser.add_argument("--workers", type=int, default=0, help="the most workers; 0: the function's default")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--against", metavar="COMMIT", help="compare with this commit")
    parser.add_argument("--functions", type=int, default=0, help="deploy this number of other functions too")
    parser.add_argument("--cold", action="store_true", help="compare cold starts, not warm calls")
    parser.add_argument("--calls", type=int, default=20, help="cold starts in one round")
    parser.add_argument("--json", action="store_true", help="print the figures of a comparison as JSON")
    arguments = parser.parse_args()
    if arguments.against is not None:
        try:
            arguments.against = hash_of(arguments.against)
        except ValueError as error:
            parser.error(str(error))
    arguments.compares = arguments.against is not None or arguments.functions > 0
    if (arguments.cold or arguments.json) and not arguments.compares:
        parser.error("--cold and --json need --against or --functions")
    if arguments.profile and arguments.compares:
        parser.error("--profile is for the path beside the echo, not for a comparison")
    return arguments


def main() -> int:
    arguments = _arguments()
    if arguments.compares:
        return 0 if compare(arguments) else 1
    report = Report("path-cost")
    with sides(arguments.workers) as (echo, ours):
        measure(echo, ours, arguments)
        enter(report, echo, ours)
        met = report.finish()
        if arguments.profile:
            for part in ("gateway", "worker"):
                profile(ours, part, arguments.callers, 4.0)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
