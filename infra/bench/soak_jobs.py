"""The soak of jobs: callers submit jobs while gateways, zygotes and workers are killed at random moments.

The checks follow when all jobs have ended. Each accepted job has ended once, with the right output, and its webhook has
received that end under one id. A key stands for one job. No process of the gateways is left.

    python infra/bench/soak_jobs.py --kills 500
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import sqlite3
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import aiohttp
from job_callers import JobCallers
from killable_gateway import KillableGateway
from report import Report, parser
from webhook_receiver import WebhookReceiver, receiving

SUBMITTERS, WATCHERS = 8, 2
PAUSE_S = 0.25
"""The longest pause between two calls of one caller, and the mean pause between two kills."""
QUIET_S = 400.0
HOOKS_S = 120.0
LEFT_S = 10.0
ROLES = {"gateway": 8, "worker": 8, "zygote": 3, "standby": 1, "base": 1}
"""Relative frequency of each role among the processes to kill."""
AT_START = 0.15
"""Probability that a gateway is killed again at a random moment within twice the median restart time."""
STATE_FILES = 200
FIND_S = 2.0
HEAD = """
import asyncio, os, time

def note(event, context):
    job = context.extra["job"]
    line = f"{job['id']} {job['attempt']} {os.getpid()} {event['number']}\\n"
    file = os.open(os.environ["RUNS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, line.encode())
    os.close(file)
    return {"number": event["number"], "square": event["number"] ** 2}
"""
HANDLERS = {
    "plain": """
def handler(event, context):
    time.sleep(0.01 + event["number"] % 5 / 100)
    return note(event, context)
""",
    "slow": """
def handler(event, context):
    answer = note(event, context)
    time.sleep(0.4)
    return answer
""",
    "async": """
async def handler(event, context):
    answer = note(event, context)
    await asyncio.sleep(0.03)
    return answer
""",
    "pieces": """
def handler(event, context):
    note(event, context)
    for piece in range(3):
        time.sleep(0.01)
        yield {"number": event["number"], "piece": piece}
""",
}


class Soak:
    """One run of the soak, within `root`."""

    def __init__(self, root: Path, seed: int) -> None:
        mark = secrets.token_hex(3)
        self.functions = {f"{kind}-{mark}": kind for kind in HANDLERS}
        self.killed = Counter[str]()
        self._root, self._seed = root, seed
        # Callers have another generator, so that they do not change the sequence of kills.
        self._chance = random.Random(seed)
        self._gateway = KillableGateway(root, mark)

    async def run(self, kills: int, report: Report) -> None:
        await self._gateway.start()
        try:
            async with receiving(self._gateway.state / "webhook-secret") as hooks:
                await self._deploy()
                callers = JobCallers(self._gateway, self.functions, hooks.url, random.Random(self._seed))
                await self._kill_under_load(kills, callers)
                await self._wait_for_ends(callers, hooks)
                self._check_jobs(callers, report)
                self._check_hooks(callers, hooks, report)
                code = await self._gateway.stop()
        finally:
            await self._gateway.kill()
            left = await asyncio.to_thread(self._gateway.left, LEFT_S)
        report.add("exit_code", code, "", "== 0")
        report.add("left_processes", len(left), f"{left[:20]}", "<= 0")
        self._check_runs(callers, report)
        self._check_rows(callers, report)
        report.add("kills", self.killed.total())
        report.note(f"killed: {dict(self.killed)}")

    async def _deploy(self) -> None:
        async with aiohttp.ClientSession(self._gateway.url) as session:
            for name, kind in self.functions.items():
                folder = self._root / name
                folder.mkdir()
                (folder / "handler.py").write_text(HEAD + HANDLERS[kind])
                overrides = {
                    "name": name, "scale.max": 2, "attempts": 100, "idempotent": kind == "async",
                    "env.RUNS": str(self._root / "runs"), "concurrency": 4 if kind == "async" else 1,
                }  # fmt: skip
                order = {"path": str(folder), "overrides": overrides}
                async with session.post("/v1/functions", json=order) as answer:
                    if answer.status != 201:
                        raise RuntimeError(f"{name} was not deployed: {await answer.text()}")

    async def _kill_under_load(self, kills: int, callers: JobCallers) -> None:
        over = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(SUBMITTERS):
                tasks.create_task(callers.submit(over, PAUSE_S))
            for _ in range(WATCHERS):
                tasks.create_task(callers.watch(over))
            await asyncio.sleep(PAUSE_S)
            while self.killed.total() < kills:
                await self._kill()
                await asyncio.sleep(self._chance.expovariate(1 / PAUSE_S))
            over.set()

    async def _wait_for_ends(self, callers: JobCallers, hooks: WebhookReceiver) -> None:
        """Wait until all jobs have ended, also those whose submission got no answer, and all webhooks have come."""
        # After this time, the jobs that have not ended are counted.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(QUIET_S):
                await callers.see_out(self.functions)
        await callers.look_at_all()
        wanted = {job.id for job in callers.jobs.values() if job.hooked}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HOOKS_S):
                while wanted - hooks.completed.keys():  # noqa: ASYNC110  the receiver has no event
                    await asyncio.sleep(0.05)

    async def _kill(self) -> None:
        (role,) = self._chance.choices(list(ROLES), list(ROLES.values()))
        if role == "gateway":
            await self._kill_gateway()
        else:
            role = await self._kill_one(role)
        self.killed[role] += 1

    async def _kill_one(self, role: str) -> str:
        """Kill a process of this role as soon as one exists. After FIND_S try roles at random. Return the role."""
        until = time.monotonic() + FIND_S
        while not self._gateway.kill_one(role, self._chance):
            await asyncio.sleep(0.02)
            if time.monotonic() > until:
                role = self._chance.choice(["base", "zygote", "worker"])
        return role

    async def _kill_gateway(self) -> None:
        await self._gateway.kill()
        while self._chance.random() < AT_START:
            self._gateway.spawn()
            await asyncio.sleep(self._chance.uniform(0, 2 * statistics.median(self._gateway.restarts_s)))
            await self._gateway.kill()
            self.killed["gateway at its start"] += 1
        await self._gateway.start()

    def _check_jobs(self, callers: JobCallers, report: Report) -> None:
        jobs = callers.jobs.values()
        wrong = [job for job in jobs if job.status == "COMPLETED" and not callers.right(job)]
        # A job whose attempts were all killed fails with this error.
        exhausted = [job for job in jobs if job.status == "FAILED" and job.error.get("type") == "worker_died"]
        other = [job for job in jobs if job.status not in {"COMPLETED", ""} and job not in exhausted]
        report.add("accepted", len(jobs), "jobs", "> 0")
        report.add("not_ended", sum(not job.result for job in jobs), "jobs", "<= 0")
        report.add("wrong_output", len(wrong), "jobs", "<= 0")
        report.add("ended_otherwise", len(other), "jobs", "<= 0")
        report.add("broken_promises", len(callers.wrong), "", "<= 0")
        unended = [job for job in jobs if not job.result]
        for text in [*callers.wrong[:20], *map(str, [*wrong[:5], *other[:5], *unended[:5]])]:
            report.note(text)

    def _check_hooks(self, callers: JobCallers, hooks: WebhookReceiver, report: Report) -> None:
        wanted = {job.id for job in callers.jobs.values() if job.hooked}
        several = [job for job, ids in hooks.completed.items() if len(ids) > 1 or len(hooks.said[job]) > 1]
        report.add("webhooks_missing", len(wanted - hooks.completed.keys()), "jobs", "<= 0")
        report.add("webhooks_with_several_ids", len(several), "jobs", "<= 0")
        report.add("webhooks_forged", len(hooks.forged), "", "<= 0")
        for text in [*several[:5], *hooks.forged[:5]]:
            report.note(text)

    def _check_runs(self, callers: JobCallers, report: Report) -> None:
        """Check the lines that the handlers wrote: job, attempt, pid, number. If a job has a key, all lines with
        its number must name this job.
        """
        ids: dict[int, set[str]] = {}
        for line in (self._root / "runs").read_text().splitlines():
            job, _, _, number = line.split()
            ids.setdefault(int(number), set()).add(job)
        jobs = callers.jobs.values()
        twice = [job for job in jobs if job.key and ids.get(job.number, set()) - {job.id}]
        never = [job for job in jobs if job.status == "COMPLETED" and job.number not in ids]
        report.add("keys_that_ran_as_two_jobs", len(twice), "", "<= 0")
        report.add("completed_without_a_run", len(never), "jobs", "<= 0")

    def _check_rows(self, callers: JobCallers, report: Report) -> None:
        """Check the store once the gateway has ended: it has all jobs, and none that was not submitted."""
        with closing(sqlite3.connect(self._gateway.state / "jobs.sqlite3")) as connection:
            states = dict(connection.execute("SELECT state, count(*) FROM jobs GROUP BY state"))
            (healthy,) = connection.execute("PRAGMA integrity_check").fetchone()
        rows, accepted = sum(states.values()), len(callers.jobs)
        report.add("rows_too_many", max(0, rows - accepted - callers.unanswered), "jobs", "<= 0")
        report.add("rows_lost", max(0, accepted - rows), "jobs", "<= 0")
        report.add("rows_not_ended", states.get("IN_QUEUE", 0) + states.get("IN_PROGRESS", 0), "jobs", "<= 0")
        report.add("database_damaged", healthy != "ok", "", "<= 0")
        files = [path for path in self._gateway.state.rglob("*") if path.is_file()]
        report.add("state_files", len(files), "", f"<= {STATE_FILES}")


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--kills", type=int, default=500)
    made.add_argument("--seed", type=int, default=secrets.randbelow(1 << 30), help="of the sequence of kills")
    made.add_argument("--report", default="soak-jobs", help="name of the file in build/bench")
    options = made.parse_args()
    report = Report(options.report)
    report.note(f"seed {options.seed}")
    with tempfile.TemporaryDirectory(prefix="pf-soak-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        asyncio.run(Soak(Path(folder), options.seed).run(options.kills, report))
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
