"""The soak of containers: activations in a row from zero, with kills and a restart of the engine, and what they leave.

Every fiftieth time the container is killed first. Half way the engine is restarted. Descriptors and threads of the
gateway are counted before and after; at the end no container, mount, cgroup or process of it may be left.

    python infra/bench/soak_containers.py --activations 500
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from container_gateway import Place, container_gateway, made_image
from percentiles import percentile
from report import Report
from soak import POOL_THREADS

WARM_UP = 5
KILL_EVERY = 50
SETTLE_S = 20.0
NAME = "soak"
CGROUPS = Path("/sys/fs/cgroup")
HANDLER = """
import os

def build(context):
    return {"table": list(range(1000))}

def handler(event, context):
    return {"pid": os.getpid(), "sum": sum(context.state["table"])}
"""


@dataclass(frozen=True)
class Held:
    """What the gateway and its containers hold, at zero workers."""

    descriptors: int
    threads: int
    processes: int
    containers: int

    def beyond(self, before: Held) -> dict[str, int]:
        return {name: max(0, count - getattr(before, name)) for name, count in vars(self).items()}


def held(place: Place) -> Held:
    gateway = psutil.Process(place.server.pid)
    boxed = [process for process in place.processes(NAME) if process.is_running()]
    return Held(gateway.num_fds(), gateway.num_threads(), len(boxed), len(place.containers()))


def settled(place: Place, before: Held | None = None) -> Held:
    """Return the resources that are held once the last worker has ended. They may take a moment to be released."""
    deadline_s = time.monotonic() + SETTLE_S
    while True:
        place.control.wait_for(NAME, workers=0, standby=True)
        found = held(place)
        over = before is not None and any(found.beyond(before).values())
        if not over or time.monotonic() > deadline_s:
            return found
        time.sleep(0.05)


def activate(place: Place) -> float:
    """One request from zero; how long the caller waited, in ms."""
    reply = place.control.invoke(NAME, {})
    if not reply.cold or reply.body["sum"] != 499_500:
        raise RuntimeError(f"no cold start, or a wrong answer: {reply}")
    place.control.wait_for(NAME, workers=0)
    return reply.ms


def kill(place: Place, seen: set[str]) -> None:
    """Kill the container. `seen` gets it."""
    for container in place.containers():
        seen.add(container["Id"])
        place.client.request("POST", f"/containers/{container['Id']}/kill", missing=True)


def soak(place: Place, activations: int, seen: set[str]) -> tuple[list[float], list[float]]:
    """Return the times of ordinary activations and of activations after a kill, in ms. Add all containers' ids to `seen`."""
    usual: list[float] = []
    after_kill: list[float] = []
    for number in range(1, activations + 1):
        if number == activations // 2:
            place.engine.stop()
            place.engine.start()
        killed = number % KILL_EVERY == 0
        if killed:
            kill(place, seen)
        (after_kill if killed else usual).append(activate(place))
    seen |= {container["Id"] for container in place.containers()}
    return usual, after_kill


def left_of(ids: set[str]) -> dict[str, int]:
    """How many mounts, cgroups and processes of these containers there are."""
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    lines = [_cgroup_of(pid) for pid in psutil.pids()]
    return {
        "mounts": sum(any(one in line for one in ids) for line in mounts),
        "cgroups": sum(any(one in path.name for one in ids) for path in CGROUPS.rglob("*") if path.is_dir()),
        "processes": sum(any(one in text for one in ids) for text in lines),
    }


def _cgroup_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cgroup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--activations", type=int, default=500)
    parser.add_argument("--report", default="soak-containers", help="name of the file in build/bench")
    options = parser.parse_args()
    report, seen = Report(options.report, packages=("aiodocker",)), set[str]()
    with container_gateway() as place:
        place.deploy(NAME, HANDLER, **{"image.name": made_image(), "scale.idle_timeout_s": 0})
        for _ in range(WARM_UP):
            activate(place)
        # The threads that wait for files are started at the first need, and stay: as many as calls happen to meet.
        kill(place, seen)
        activate(place)
        found = settled(place)
        before = replace(found, threads=found.threads + POOL_THREADS)
        usual, after_kill = soak(place, options.activations, seen)
        after = settled(place, before)
        place.delete(NAME)
        report.add("containers_after_delete", len(place.containers()), "", "<= 0")
        place.server.stop()
        report.add("containers_after_stop", len(place.containers()), "", "<= 0")
    report.add("activations", len(usual) + len(after_kill))
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        report.add(f"cold_{name}_ms", percentile(usual, share), "ms")
    report.add("cold_after_kill_p50_ms", percentile(after_kill, 0.5), "ms")
    for what, count in after.beyond(before).items():
        report.add(f"leaked_{what}", count, "", "<= 0")
    for what, count in left_of(seen).items():
        report.add(f"{what}_after_stop", count, "", "<= 0")
    report.add("containers_seen", len(seen))
    return 0 if report.finish() else 1


if __name__ == "__main__":
    sys.exit(main())
