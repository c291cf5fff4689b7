"""The soak of the gateway: 24 hours of traffic, by counts instead of by the clock, and what they leave behind.

Each hour has jobs with long and different times to live (some are cancelled), callers who disconnect while their call
runs, and functions that are deployed, called, given jobs and deleted. At the end of each hour, at zero workers, the
processes, descriptors, threads, timers, tasks and the memory are counted. The first hours are not compared, because
objects that are made only once appear in them. Ends with 1 if anything has grown.

    python infra/bench/soak_gateway.py --hours 24 --deploys 200
"""

from __future__ import annotations

import argparse
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
from report import Report
from servers import Server
from soak import POOL_THREADS, ZOMBIE, Held, held

WARM_UP_HOURS = 2
SETTLE_S = 60.0
COUNTS = 5
# Growth of the gateway's memory that the allocator explains, and of its objects that are caches with a limit.
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
from pilotflame.runtime.settings.gateway_settings import GatewaySettings

def tell():
    gc.collect()
    kinds = collections.Counter(type(one).__name__ for one in gc.get_objects())
    tasks = len(asyncio.all_tasks())
    found = {"timers": kinds["TimerHandle"], "tasks": tasks, "objects": sum(kinds.values())}
    Path(sys.argv[2]).write_text(json.dumps(found | {"kinds": kinds}))

def listening(url):
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, tell)
    print(json.dumps({"url": url}), flush=True)

run(GatewaySettings(port=0, state_dir=Path(sys.argv[1]), keep_result_s=1.0), on_listening=listening)
"""


@dataclass(frozen=True)
class Amounts:
    """What happens in one hour."""

    jobs: int
    leavers: int
    deploys: int


@dataclass(frozen=True)
class Hour:
    """What there is at the end of an hour."""

    held: Held
    timers: int
    tasks: int
    objects: int
    kinds: dict[str, int]


class Traffic:
    """All users of the gateway."""

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
            # A caller of the plain handler leaves a call behind that goes on.
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
    """One run of it, within `root`."""

    def __init__(self, root: Path, seed: int) -> None:
        self._root, self._seed = root, seed
        self._state, self._told = root / "state", root / "told.json"
        command = [sys.executable, "-c", GATEWAY, str(self._state), str(self._told)]
        self._server = Server("pilotflame", command, root / "gateway.log")

    def run(self, hours: int, amounts: Amounts, report: Report) -> None:
        try:
            self._server.wait_line()
            found = asyncio.run(self._hours(hours, amounts))
        finally:
            self._server.stop()
        _tell(report, found)
        report.add("left_after_stop", len(self._server.left_over), "processes", "<= 0")

    async def _hours(self, hours: int, amounts: Amounts) -> list[Hour]:
        found: list[Hour] = []
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(self._server.url, connector=connector) as session:
            traffic = Traffic(session, self._root, self._seed)
            for name, source in HANDLERS.items():
                await traffic.deploy(name, source)
            for number in range(hours):
                began = time.monotonic()
                await traffic.hour(amounts)
                found.append(await asyncio.to_thread(self._settle))
                print(_line(number, time.monotonic() - began, found[-1]), flush=True)
        return found

    def _settle(self) -> Hour:
        """Wait until nothing runs, and count what there is."""
        deadline = time.monotonic() + SETTLE_S
        # The expiry of results, and of the gateway's closed connections.
        time.sleep(1.5)
        kept = self._least(deadline)
        self._told.unlink(missing_ok=True)
        os.kill(self._server.pid, signal.SIGUSR1)
        while time.monotonic() < deadline:
            with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
                return Hour(kept, **json.loads(self._told.read_text()))
            time.sleep(0.01)
        raise RuntimeError(f"the gateway did not tell what it holds: {self._server.errors()}")

    def _least(self, deadline: float) -> Held:
        """The least of some counts at zero workers. Ending objects are in some of the counts; a leak is in all.

        A worker may have been started ahead of calls, as the functions are called in turns that can be learned.
        """
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


def _line(number: int, seconds: float, hour: Hour) -> str:
    kept = hour.held
    counts = f"{kept.processes.total()} processes, {kept.descriptors.total()} descriptors, {kept.threads.total()} threads"
    memory = f"{hour.timers} timers, {hour.tasks} tasks, {hour.objects:,} objects, {kept.rss_mb:.1f} MB"
    return f"hour {number + 1:2} ({seconds:4.1f} s): {counts}, {memory}"


def _tell(report: Report, hours: list[Hour]) -> None:
    """Compare the last hour with the first after the warm-up."""
    before, after = hours[min(WARM_UP_HOURS, len(hours) - 1)], hours[-1]
    report.add("hours", len(hours))
    # A connection may still be closing, which is one descriptor.
    for what, most in (("processes", 0), ("descriptors", 2), ("threads", POOL_THREADS)):
        was, now = getattr(before.held, what), getattr(after.held, what)
        report.add(f"grown_{what}", sum((now - was).values()), "", f"<= {most}")
        for role in sorted(was | now):
            report.row(what=what, role=role, before=was[role], after=now[role])
    # A few come and go: the timer of the next deadline, of the keep-alive, of the rest.
    report.add("timers", after.timers, "", f"<= {before.timers + 4}")
    report.add("tasks", after.tasks, "", f"<= {before.tasks + 1}")
    report.add("grown_objects", after.objects / before.objects - 1, "", f"<= {OBJECTS}")
    report.add("grown_memory_mb", after.held.rss_mb - before.held.rss_mb, "MB", f"<= {MEMORY_MB}")
    grown = {kind: after.kinds[kind] - before.kinds.get(kind, 0) for kind in after.kinds}
    for kind in sorted(grown, key=lambda kind: -grown[kind])[:12]:
        report.row(what="objects", role=kind, before=before.kinds.get(kind, 0), after=after.kinds[kind])
    kinds = sorted(grown, key=lambda kind: -grown[kind])[:5]
    report.note("most grown: " + ", ".join(f"{kind} {grown[kind]:+}" for kind in kinds))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--hours", type=int, default=24)
    parser.add_argument("--jobs", type=int, default=200, help="jobs of one hour")
    parser.add_argument("--leavers", type=int, default=60, help="disconnecting callers of one hour")
    parser.add_argument("--deploys", type=int, default=200, help="deploys and deletes of all hours")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", default="soak-gateway", help="name of the file in build/bench")
    options = parser.parse_args()
    report = Report(options.report)
    amounts = Amounts(options.jobs, options.leavers, -(-options.deploys // options.hours))
    with tempfile.TemporaryDirectory(prefix="pf-soak-", dir="/tmp") as folder:
        GatewaySoak(Path(folder), options.seed).run(options.hours, amounts, report)
    return 0 if report.finish() else 1


if __name__ == "__main__":
    sys.exit(main())
