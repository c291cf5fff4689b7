"""The soak of the gateway: counts before and after 24 rounds of traffic. A round is called an hour, but takes less.

Each hour has jobs with long and different times to live, some of which are cancelled, callers who disconnect while their
call runs, and functions that are deployed, called, given jobs and deleted. At the end of each hour, at zero workers, the
processes, descriptors, threads, timers, tasks and the memory are counted. The last hour is compared with the third,
because objects that are made only once appear in the first hours.

    python infra/bench/soak_gateway.py --hours 24 --deploys 200
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from control import Control
from report import Report, parser
from servers import Server, running
from soak_activations import POOL_THREADS, ZOMBIE, Held, held

WARM_UP_HOURS = 2
SETTLE_S = 60.0
COUNTS = 5
COUNTS_FILE = "counts.json"
# Growth of the gateway's memory that the allocator explains, and growth of its number of objects that caches with a limit explain.
MEMORY_MB = 12.0
OBJECTS = 0.15
AT_ONCE = 8
HANDLERS = {
    # Its calls are interrupted when their callers leave.
    "async": "import asyncio\nasync def handler(event):\n    await asyncio.sleep(event['s'])\n    return event\n",
    # Its calls run on, so the gateway limits the time that they may still take.
    "plain": "import time\ndef handler(event):\n    time.sleep(event['s'])\n    return event\n",
}
GATEWAY = """
import asyncio, collections, gc, json, signal, sys
from pathlib import Path
from pilotflame.runtime.main import run
from pilotflame.runtime.ground.settings.gateway_settings import GatewaySettings

def write_counts():
    gc.collect()
    kinds = collections.Counter(type(one).__name__ for one in gc.get_objects())
    tasks = len(asyncio.all_tasks())
    found = {"timers": kinds["TimerHandle"], "tasks": tasks, "objects": sum(kinds.values())}
    Path(sys.argv[2]).write_text(json.dumps(found))

def listening(url):
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, write_counts)
    print(json.dumps({"url": url}), flush=True)

run(GatewaySettings(port=0, state_dir=Path(sys.argv[1]), keep_result_s=1.0), on_listening=listening)
"""


@dataclass(frozen=True)
class Amounts:
    """The amounts of one hour."""

    jobs: int
    leavers: int
    deploys: int


@dataclass(frozen=True)
class Hour:
    """The counts at the end of an hour."""

    held: Held
    timers: int
    tasks: int
    objects: int


class Traffic:
    """The callers of the gateway."""

    def __init__(self, session: aiohttp.ClientSession, root: Path, seed: int) -> None:
        self._session, self._root = session, root
        self._chance = random.Random(seed)
        self._room = asyncio.Semaphore(AT_ONCE)
        self._deployed = 0

    async def hour(self, amounts: Amounts) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(amounts.jobs):
                tasks.create_task(self._job(("async", "plain")[number % 2], cancelled=number % 5 == 0))
            for number in range(amounts.leavers):
                tasks.create_task(self._leave(("async", "plain")[number % 2]))
            tasks.create_task(self._deploy_and_delete(amounts.deploys))

    async def deploy(self, name: str, source: str) -> None:
        folder = self._root / name
        folder.mkdir(exist_ok=True)
        (folder / "handler.py").write_text(source)
        overrides = {"name": name, "scale.idle_timeout_s": 0.2, "scale.max": 2, "concurrency": 4}
        await self._send("POST", "/v1/functions", {"path": str(folder), "overrides": overrides})

    async def _deploy_and_delete(self, count: int) -> None:
        for _ in range(count):
            self._deployed += 1
            name, source = f"passing-{self._deployed}", HANDLERS[("async", "plain")[self._deployed % 2]]
            await self.deploy(name, source)
            await self._send("POST", f"/invoke/{name}", {"s": 0})
            await self._send("POST", f"/v2/{name}/run", {"input": {"s": 0}, "policy": {"ttl": 86_400_000}})
            await self._send("DELETE", f"/v1/functions/{name}")

    async def _job(self, name: str, *, cancelled: bool) -> None:
        ttl_ms = self._chance.randrange(3600, 86_400) * 1000
        async with self._room:
            order = {"input": {"s": 0.002}, "policy": {"ttl": ttl_ms}}
            job = await self._send("POST", f"/v2/{name}/run", order)
            if cancelled:
                await self._send("POST", f"/v2/{name}/cancel/{job['id']}")

    async def _leave(self, name: str) -> None:
        async with self._room:
            # A call of the plain handler continues after its caller has left, so it must be short.
            seconds = 3600.0 if name == "async" else 0.2
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.05 + 0.1 * self._chance.random()):
                    await self._send("POST", f"/invoke/{name}", {"s": seconds})

    async def _send(self, method: str, path: str, body: Any = None) -> Any:
        async with self._session.request(method, path, json=body) as answer:
            if answer.status >= 300:
                raise RuntimeError(f"{method} {path}: {answer.status} {await answer.text()}")
            return await answer.json()


class GatewaySoak:
    """One run of the soak, within `root`."""

    def __init__(self, server: Server, root: Path, seed: int) -> None:
        self._server, self._root, self._seed = server, root, seed
        self._counts = root / COUNTS_FILE

    async def run(self, hours: int, amounts: Amounts) -> list[Hour]:
        found: list[Hour] = []
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(self._server.url, connector=connector) as session:
            traffic = Traffic(session, self._root, self._seed)
            for name, source in HANDLERS.items():
                await traffic.deploy(name, source)
            for number in range(hours):
                await traffic.hour(amounts)
                found.append(await asyncio.to_thread(self._settle))
                print(f"hour {number + 1} of {hours}", file=sys.stderr, flush=True)
        return found

    def _settle(self) -> Hour:
        """Wait until nothing runs, and count."""
        deadline = time.monotonic() + SETTLE_S
        # Wait until results and the gateway's closed connections have expired.
        time.sleep(1.5)
        kept = self._least(deadline)
        self._counts.unlink(missing_ok=True)
        os.kill(self._server.pid, signal.SIGUSR1)
        while time.monotonic() < deadline:
            with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
                return Hour(kept, **json.loads(self._counts.read_text()))
            time.sleep(0.01)
        raise RuntimeError(f"the gateway did not report its counts: {self._server.errors()}")

    def _least(self, deadline: float) -> Held:
        """Return the least of some counts at zero workers. Objects that are ending are in some of the counts, a leak in all."""
        counts: list[Held] = []
        control = Control(self._server.url)
        while len(counts) < COUNTS:
            for name in HANDLERS:
                control.wait_for(name, workers=0, standby=True)
            now = held(self._server, [])
            if not now.processes.keys() & {ZOMBIE, "worker"}:
                counts.append(now)
            elif time.monotonic() > deadline:
                raise RuntimeError(f"processes that should have ended: {dict(now.processes)}")
            time.sleep(0.1)
        control.close()
        return min(counts, key=lambda one: (one.processes.total(), one.descriptors.total()))


def _enter(report: Report, hours: list[Hour]) -> None:
    """Compare the last hour with the first after the warm-up."""
    before, after = hours[min(WARM_UP_HOURS, len(hours) - 1)], hours[-1]
    report.add("hours", len(hours))
    # A connection may still be closing, which is one descriptor.
    for what, most in (("processes", 0), ("descriptors", 2), ("threads", POOL_THREADS)):
        was, now = getattr(before.held, what), getattr(after.held, what)
        report.add(f"grown_{what}", sum((now - was).values()), "", f"<= {most}")
        for role in sorted(was | now):
            report.row(what=what, role=role, before=was[role], after=now[role])
    # The number of timers varies by a few, such as that of the next deadline.
    report.add("timers", after.timers, "", f"<= {before.timers + 4}")
    report.add("tasks", after.tasks, "", f"<= {before.tasks + 1}")
    report.add("grown_objects", after.objects / before.objects - 1, "", f"<= {OBJECTS}")
    report.add("grown_memory_mb", after.held.rss_mb - before.held.rss_mb, "MB", f"<= {MEMORY_MB}")


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--hours", type=int, default=24)
    made.add_argument("--jobs", type=int, default=200, help="jobs of one hour")
    made.add_argument("--leavers", type=int, default=60, help="disconnecting callers of one hour")
    made.add_argument("--deploys", type=int, default=200, help="deploys and deletes of all hours")
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--report", default="soak-gateway", help="name of the file in build/bench")
    options = made.parse_args()
    report = Report(options.report)
    amounts = Amounts(options.jobs, options.leavers, -(-options.deploys // options.hours))
    with tempfile.TemporaryDirectory(prefix="pf-soak-", dir="/tmp") as folder:
        root = Path(folder)
        command = [sys.executable, "-c", GATEWAY, str(root / "state"), str(root / COUNTS_FILE)]
        with running("pilotflame", command) as server:
            server.wait_line()
            hours = asyncio.run(GatewaySoak(server, root, options.seed).run(options.hours, amounts))
    _enter(report, hours)
    report.add("left_after_stop", len(server.left_over), "processes", "<= 0")
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
