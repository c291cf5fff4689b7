"""The soak: activations in a row, from zero workers and back to zero, and what is left afterwards.

Processes, descriptors, threads and files of the gateway, its base and the zygote are counted before and after. A few
activations before the first count make the objects that are made only once.

    python infra/bench/soak_activations.py --activations 1000
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import process_tree
import psutil
from control import Control
from report import Report, parser
from servers import Server, gateway_command, running

WARM_UP = 5
EXIT_S = 30.0
NAME = "soak"
ZOMBIE = "zombie"
HANDLER = """
import os

def build(context):
    return {"table": list(range(1000))}

def setup(context):
    print("up")

def handler(event, context):
    return {"pid": os.getpid(), "sum": sum(context.state["table"])}
"""
# What a gateway remembers of a function: a few files of bounded size, written some time after its first call.
KEPT = frozenset({"records", "habits", "usage"})
# Pools of threads grow to their limits if calls happen to meet. A thread that leaks with each activation exceeds this.
POOL_THREADS = 6


@dataclass(frozen=True)
class Held:
    """The processes and their resources at one moment, at zero workers."""

    processes: Counter[str]
    descriptors: Counter[str]
    threads: Counter[str]
    files: Counter[str]
    rss_mb: float


def held(server: Server, folders: list[Path]) -> Held:
    """Count what the processes of a server hold, by role."""
    processes, descriptors, threads, rss = Counter[str](), Counter[str](), Counter[str](), 0.0
    for process in [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]:
        role = "gateway" if process.pid == server.pid else _role(process)
        processes[role] += 1
        if role == ZOMBIE:
            continue
        descriptors[role] += process.num_fds()
        threads[role] += process.num_threads()
        rss += process.memory_info().rss / 1e6 if role == "gateway" else 0.0
    found = {path for folder in folders for path in folder.rglob("*")}
    names = {path: {*path.parts, path.name.partition(".")[0]} for path in found}
    # The folder of a standby is named like its pid. Replace pids, so that another standby's folder counts as
    # the same.
    shown = (
        Path(*("PID" if part.isdecimal() else part for part in path.parts))
        for path in found
        if not KEPT & names[path] and not _of_a_cache(path)
    )
    files = Counter(map(str, shown))
    return Held(processes, descriptors, threads, files, rss)


def _of_a_cache(path: Path) -> bool:
    """Return True for the snapshots in memory of other gateways: the function here has no weights."""
    return path.parts[:3] == ("/", "dev", "shm") and path.parts[3].startswith("pilotflame-")


def activate(control: Control) -> None:
    """Send a request at zero workers, and wait for the end of its worker."""
    reply = control.invoke(NAME, {})
    if not reply.cold or reply.body["sum"] != 499_500:
        raise RuntimeError(f"no cold start, or a wrong answer: {reply}")
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(reply.body["pid"]).wait(EXIT_S)


def soak(activations: int, report: Report) -> None:
    with tempfile.TemporaryDirectory(prefix="pf-soak-", dir="/tmp") as folder:
        state, scratch = Path(folder) / "state", Path(folder) / "tmp"
        scratch.mkdir()
        folders = [state, scratch, Path("/dev/shm")]
        command = gateway_command(state_dir=str(state))
        with running("pilotflame", command, {"TMPDIR": str(scratch)}) as server:
            server.wait_line()
            with contextlib.closing(Control(server.url)) as control:
                control.deploy_code(NAME, HANDLER, **{"scale.idle_timeout_s": 0})
                for _ in range(WARM_UP):
                    activate(control)
                before = _settled(control, server, folders)
                for _ in range(activations):
                    activate(control)
                after = _settled(control, server, folders)
        report.add("activations", activations)
        _enter(report, before, after)
        report.add("left_after_stop", len(server.left_over), "processes", "<= 0")
        report.add("state_files_after_stop", len(list((state / "run").glob("*"))), "", "<= 0")


def _settled(control: Control, server: Server, folders: list[Path]) -> Held:
    """Return the resources that are held once the last worker has been collected. A zombie that stays is a leak."""
    control.wait_for(NAME, workers=0, standby=True)
    deadline = time.monotonic() + EXIT_S
    while ZOMBIE in (found := held(server, folders)).processes and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def _enter(report: Report, before: Held, after: Held) -> None:
    for what, most in (("processes", 0), ("descriptors", 0), ("threads", POOL_THREADS)):
        was, now = getattr(before, what), getattr(after, what)
        report.add(f"leaked_{what}", sum((now - was).values()), "", f"<= {most}")
        report.row(what=what, before=was, after=now)
    left = sorted((after.files - before.files).elements())
    report.add("leaked_files", len(left), "", "<= 0")
    for path in left[:20]:
        report.note(f"left: {path}")


def _role(process: psutil.Process) -> str:
    if not process_tree.alive(process):
        return ZOMBIE
    return process_tree.role(process) or process_tree.title(process)[:40]


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--activations", type=int, default=1000)
    made.add_argument("--report", default="soak", help="name of the file in build/bench")
    options = made.parse_args()
    report = Report(options.report)
    soak(options.activations, report)
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
