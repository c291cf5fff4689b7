"""The soak: activations in a row, from zero and back, and what they leave behind.

Processes, descriptors, threads and files of the gateway, its base and the zygote are counted before and after; the
first activations are not measured, so that what is made once is there before. Ends with 1 if anything is left.

    python infra/bench/soak.py --activations 1000
"""

from __future__ import annotations

import argparse
import os
import select
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import process_tree
import psutil
from control import Control
from report import Report
from servers import Server

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
GATEWAY = """
import json, sys
from pathlib import Path
from pilotflame.runtime.main import run
from pilotflame.runtime.settings.gateway_settings import GatewaySettings

run(
    GatewaySettings(port=0, state_dir=Path(sys.argv[1])),
    on_listening=lambda url: print(json.dumps({"url": url}), flush=True),
)
"""


@dataclass(frozen=True)
class Held:
    """The processes and resources at one moment, at zero workers."""

    processes: Counter[str]
    descriptors: Counter[str]
    threads: Counter[str]
    files: frozenset[str]
    rss_mb: float


# What a gateway remembers of a function: a few files of bounded size, written some time after its first call.
KEPT = frozenset({"records", "habits", "usage"})


# Pools of threads grow to their limits when calls happen to meet. A thread that leaks with each activation exceeds this.
POOL_THREADS = 6


def held(server: Server, folders: list[Path]) -> Held:
    """Counts by role: several zygotes would be one number."""
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
    files = frozenset(str(path) for path in found if not KEPT & names[path] and not _of_a_cache(path))
    return Held(processes, descriptors, threads, files, rss)


def _of_a_cache(path: Path) -> bool:
    """Return True for the snapshots in memory of other gateways: the function here has no weights."""
    return path.parts[:3] == ("/", "dev", "shm") and path.parts[3].startswith("pilotflame-")


def activate(control: Control) -> float:
    """One request from zero, and the end of its worker; how long the caller waited, in ms."""
    reply = control.invoke(NAME, {})
    if not reply.cold or reply.body["sum"] != 499_500:
        raise RuntimeError(f"no cold start, or a wrong answer: {reply}")
    _wait_for_end(reply.body["pid"])
    return reply.ms


def soak(activations: int, report: Report) -> None:
    with tempfile.TemporaryDirectory(prefix="pf-soak-", dir="/tmp") as folder:
        root = Path(folder)
        state, scratch = root / "state", root / "tmp"
        scratch.mkdir()
        folders = [state, scratch, Path("/dev/shm")]
        command = [sys.executable, "-c", GATEWAY, str(state)]
        server = Server("pilotflame", command, root / "gateway.log", {"TMPDIR": str(scratch)})
        try:
            server.wait_line()
            control = Control(server.url)
            control.deploy(str(_function(root)), **{"scale.idle_timeout_s": 0})
            for _ in range(WARM_UP):
                activate(control)
            before = _settled(control, server, folders)
            times_ms = [activate(control) for _ in range(activations)]
            after = _settled(control, server, folders)
            control.close()
        finally:
            server.stop()
        _tell(report, before, after, times_ms)
        report.add("left_after_stop", len(server.left_over), "processes", "<= 0")
        report.add("state_files_after_stop", len(list((state / "run").glob("*"))), "", "<= 0")


def _settled(control: Control, server: Server, folders: list[Path]) -> Held:
    """Return the resources that are held once the last worker has been collected. A zombie that stays is a leak."""
    control.wait_for(NAME, workers=0, standby=True)
    deadline = time.monotonic() + EXIT_S
    while ZOMBIE in (found := held(server, folders)).processes and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def _tell(report: Report, before: Held, after: Held, times_ms: list[float]) -> None:
    report.add("activations", len(times_ms))
    report.add("cold_p50_ms", statistics.median(times_ms), "ms")
    report.add("cold_max_ms", max(times_ms), "ms")
    for what, most in (("processes", 0), ("descriptors", 0), ("threads", POOL_THREADS)):
        was, now = getattr(before, what), getattr(after, what)
        report.add(f"leaked_{what}", sum((now - was).values()), "", f"<= {most}")
        for role in sorted(was | now):
            report.row(what=what, role=role, before=was[role], after=now[role])
    left = sorted(after.files - before.files)
    report.add("leaked_files", len(left), "", "<= 0")
    for path in left[:20]:
        report.row(what="file", path=path)
        report.note(f"left: {path}")
    report.add("gateway_rss_growth_mb", after.rss_mb - before.rss_mb, "MB")


def _function(root: Path) -> Path:
    folder = root / NAME
    folder.mkdir()
    (folder / "handler.py").write_text(HANDLER)
    return folder


def _role(process: psutil.Process) -> str:
    """Return the role from the process title: "zygote" from "pilotflame: zygote soak r1-…"."""
    if not process_tree.alive(process):
        return ZOMBIE
    title = " ".join(process.cmdline())
    return title.removeprefix("pilotflame: ").split()[0] if title.startswith("pilotflame: ") else title[:40]


def _wait_for_end(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if not select.select([descriptor], [], [], EXIT_S)[0]:
            raise RuntimeError(f"worker {pid} is still there, {EXIT_S:.0f} s after its answer")
    finally:
        os.close(descriptor)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--activations", type=int, default=1000)
    parser.add_argument("--report", default="soak", help="name of the file in build/bench")
    options = parser.parse_args()
    report = Report(options.report)
    soak(options.activations, report)
    return 0 if report.finish() else 1


if __name__ == "__main__":
    sys.exit(main())
