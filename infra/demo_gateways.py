"""Shows in the terminal how three gateways share one PostgreSQL. A gateway and PostgreSQL are killed while callers submit jobs: no job is lost.

make demo-gateways
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from live import Gateway, gateway_process, short_folder
from postgres import PostgresServer, postgres_server

JOBS, CALLERS, GATEWAYS = 600, 24, 3
JOB_LIMIT_S = 120.0
RETRY_S = 0.2
PAUSE_S = 1.0
HANDLER = """
import asyncio, pathlib
OWN = pathlib.Path(__file__).parents[5]
async def handler(event):
    await asyncio.sleep(0.1)
    with (OWN / "runs").open("a") as runs:
        runs.write(f"{event}\\n")
    return event * 2
"""
"""A handler that writes each event to the file `runs` of its gateway, in the folder that contains the state
folder.
"""


class Demo:
    """The gateways, the jobs that callers have submitted, and what was seen."""

    def __init__(self, folder: Path, server: PostgresServer, stack: contextlib.AsyncExitStack) -> None:
        self._folders = [folder / f"gateway-{number}" for number in range(1, GATEWAYS + 1)]
        self._server, self._stack, self._began_s = server, stack, time.monotonic()
        self._gateways = list[Gateway]()
        self._states, self._accepted = ["-"] * GATEWAYS, Counter[int]()
        self._numbers, self._turns = itertools.count(), itertools.count()
        self._events, self._answers = list[str](), dict[int, tuple[str, Any]]()

    async def start(self, at: int) -> None:
        self._folders[at].mkdir(exist_ok=True)
        state = self._folders[at] / "state"
        gateway = await self._stack.enter_async_context(gateway_process(state, database=self._server.url))
        self._gateways[at : at + 1] = [gateway]
        self._states[at] = "live"

    async def run(self) -> None:
        for at in range(GATEWAYS):
            await self.start(at)
        self.note("three gateways serve a function with PostgreSQL; callers submit jobs at all of them")
        await self._gateways[0].deploy(HANDLER, {"scale.max": 2, "concurrency": 4}, name="echo")
        async with asyncio.TaskGroup() as tasks:
            for _ in range(CALLERS):
                tasks.create_task(self._call())
            await self._ended(JOBS // 4)
            await self._kill_gateway(1)
            await self._ended(JOBS // 2)
            self.note("kill -9 of PostgreSQL")
            await asyncio.to_thread(self._kill_postgresql)
            await asyncio.sleep(PAUSE_S)
            await asyncio.to_thread(self._server.start, "fsync=on")
            self.note("PostgreSQL is back")
            await self._ended(JOBS * 3 // 4)
            await self.start(1)
            self.note("gateway-2 is back")

    def lost(self) -> list[int]:
        """Return the numbers of the jobs that have no right answer."""
        return [number for number in range(JOBS) if self._answers.get(number, ("", None))[1] != number * 2]

    def verdict(self) -> str:
        query = "SELECT string_agg(line, ', ') FROM (SELECT state || ' ' || count(*) AS line FROM jobs GROUP BY state) AS states"
        stored = self._server.program("psql", "-Atc", query).strip()
        runs = self._runs()
        again = sum(map(len, runs)) - len({run for of_one in runs for run in of_one})
        ids = {job for job, _ in self._answers.values()}
        return f"{len(ids)} jobs, lost: {len(self.lost())}, run twice: {again}; in PostgreSQL: {stored}"

    def picture(self) -> Group:
        table = Table("gateway", "state", "jobs accepted", "jobs run", title="Three gateways, one PostgreSQL")
        for at, runs in enumerate(self._runs()):
            colour = "green" if self._states[at] == "live" else "red"
            row = (f"[{colour}]{self._states[at]}", str(self._accepted[at]), str(len(runs)))
            table.add_row(self._folders[at].name, *row)
        ended = f"{sum(self._accepted.values())} of {JOBS} jobs accepted, {len(self._answers)} ended"
        return Group(table, ended, *self._events)

    async def _kill_gateway(self, at: int) -> None:
        process = self._gateways[at].process
        assert process is not None
        process.kill()
        self._states[at] = "killed"
        self.note(
            f"kill -9 of {self._folders[at].name}: the others run its jobs again when its lease has ended"
        )
        await process.wait()

    def _kill_postgresql(self) -> None:
        process, self._server.process = self._server.process, None
        assert process is not None
        processes = [process, *process.children()]
        for one in processes:
            one.kill()
        psutil.wait_procs(processes, JOB_LIMIT_S)

    async def _call(self) -> None:
        """Submit a job and wait for its end, again and again until there are JOBS jobs."""
        while (number := next(self._numbers)) < JOBS:
            async with asyncio.timeout(JOB_LIMIT_S):
                key = {"Idempotency-Key": f"job-{number}"}
                submitted = await self._ask("POST", "run", lambda found: "id" in found, json={"input": number}, headers=key)  # fmt: skip
                path, params = f"status-sync/{submitted['id']}", {"wait": "30000"}
                ended = await self._ask("GET", path, lambda found: found.get("status") == "COMPLETED", params=params)  # fmt: skip
            self._answers[number] = (submitted["id"], ended["output"])

    async def _ask(self, method: str, path: str, right: Callable[[Any], bool], **more: Any) -> Any:
        """Ask one gateway after the other until the answer is right, as a load balancer and a caller that tries again do."""
        while True:
            at = next(self._turns) % GATEWAYS
            with contextlib.suppress(httpx.TransportError, ValueError):
                answer = await self._gateways[at].client.request(method, f"/v2/echo/{path}", **more)
                if right(found := answer.json()):
                    self._accepted[at] += method == "POST"
                    return found
            await asyncio.sleep(RETRY_S)

    async def _ended(self, count: int) -> None:
        while len(self._answers) < count:  # noqa: ASYNC110  the callers have no event for it
            await asyncio.sleep(RETRY_S)

    def _runs(self) -> list[list[str]]:
        files = [folder / "runs" for folder in self._folders]
        return [file.read_text().split() if file.exists() else [] for file in files]

    def note(self, text: str) -> None:
        self._events.append(f"{time.monotonic() - self._began_s:5.1f} s  {text}")


async def main() -> int:
    console = Console()
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(short_folder())
        server = stack.enter_context(postgres_server())
        server.stop()
        server.start("fsync=on")
        demo = Demo(folder, server, stack)
        with Live(console=console, get_renderable=demo.picture, refresh_per_second=5):
            await demo.run()
            demo.note(demo.verdict())
        return 1 if demo.lost() else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
