"""The soak of containers: activations in a row from zero, with kills and a restart of the engine, and what is left.

Every fiftieth time the container is killed first. Half way the engine is restarted. Descriptors and threads of the
gateway are counted before and after. At the end no container, mount, cgroup or process of it may be left.

    python infra/bench/soak_containers.py --activations 500
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from container_gateway import ContainerGateway, container_gateway, made_image
from containers_bench import PLAIN
from report import Report, parser
from soak_activations import POOL_THREADS

WARM_UP = 5
KILL_EVERY = 50
SETTLE_S = 20.0
NAME = "soak"
CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Held:
    """The resources of the gateway and its containers, at zero workers."""

    descriptors: int
    threads: int
    processes: int
    containers: int

    def beyond(self, before: Held) -> dict[str, int]:
        return {name: max(0, count - getattr(before, name)) for name, count in vars(self).items()}


def held(at: ContainerGateway) -> Held:
    gateway = psutil.Process(at.server.pid)
    return Held(gateway.num_fds(), gateway.num_threads(), len(at.processes(NAME)), len(at.containers()))


def settled(at: ContainerGateway, before: Held | None = None) -> Held:
    """Return the resources that are held once the last worker has ended. They may take a moment to be released."""
    deadline_s = time.monotonic() + SETTLE_S
    while True:
        at.control.wait_for(NAME, workers=0, standby=True)
        found = held(at)
        over = before is not None and any(found.beyond(before).values())
        if not over or time.monotonic() > deadline_s:
            return found
        time.sleep(0.05)


def activate(at: ContainerGateway) -> None:
    """Send a request at zero workers, and wait for the end of its worker."""
    reply = at.control.invoke(NAME, {})
    if not reply.cold or reply.body["sum"] != 499_500:
        raise RuntimeError(f"no cold start, or a wrong answer: {reply}")
    at.control.wait_for(NAME, workers=0)


def kill(at: ContainerGateway, seen: set[str]) -> None:
    """Kill the container, and add its id to `seen`."""
    for container in at.containers():
        seen.add(container["Id"])
        at.ask("POST", f"/containers/{container['Id']}/kill", missing=True)


def soak(at: ContainerGateway, activations: int, seen: set[str]) -> None:
    """Run the activations. Add the ids of all containers to `seen`."""
    for number in range(1, activations + 1):
        if number == activations // 2:
            at.engine.stop()
            at.engine.start()
        if number % KILL_EVERY == 0:
            kill(at, seen)
        activate(at)
    seen |= {container["Id"] for container in at.containers()}


def left_of(ids: set[str]) -> dict[str, int]:
    """Return the number of mounts, cgroups and processes of these containers."""
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
    made = parser(__doc__)
    made.add_argument("--activations", type=int, default=500)
    made.add_argument("--report", default="soak-containers", help="name of the file in build/bench")
    options = made.parse_args()
    report, seen = Report(options.report, packages=("aiodocker",)), set[str]()
    with container_gateway() as at:
        at.control.deploy_code(NAME, PLAIN, **{"image.name": made_image(), "scale.idle_timeout_s": 0})
        for _ in range(WARM_UP):
            activate(at)
        # Kill a container before the first count: threads that wait for files start at the first need, and
        # stay.
        kill(at, seen)
        activate(at)
        found = settled(at)
        before = replace(found, threads=found.threads + POOL_THREADS)
        soak(at, options.activations, seen)
        after = settled(at, before)
        at.delete(NAME)
        report.add("containers_after_delete", len(at.containers()), "", "<= 0")
        at.server.stop()
        report.add("containers_after_stop", len(at.containers()), "", "<= 0")
    report.add("activations", options.activations)
    for what, count in after.beyond(before).items():
        report.add(f"leaked_{what}", count, "", "<= 0")
    for what, count in left_of(seen).items():
        report.add(f"{what}_after_stop", count, "", "<= 0")
    report.add("containers_seen", len(seen))
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
