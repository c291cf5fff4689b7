"""The soak of jobs: callers submit them without end while gateways, zygotes and workers are killed at random moments.

The checks follow when all is quiet. Each accepted job has ended once, with the right output, and its webhook has received
that end under one id. A key stands for one job. No process of the gateways is left. Ends with 1 if a check fails.

    python infra/bench/soak_jobs.py --kills 500
"""

from __future__ import annotations

import argparse
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
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import aiohttp
from crowd import Crowd
from hooked import Hooked, receiving
from mortal import Mortal
from report import Report

SUBMITTERS, WATCHERS = 8, 2
PAUSE_S = 0.25
"""Between the calls of one caller, at most; between two kills, on average."""
QUIET_S = 400.0
HOOKS_S = 120.0
LEFT_S = 10.0
ROLES = {"gateway": 8, "worker": 8, "zygote": 3, "standby": 1, "base": 1}
"""Relative frequency of each role among the processes to kill."""
AT_START = 0.15
"""Probability that a gateway is killed again at a random moment within twice the median restart time."""
STATE_FILES = 200
VICTIM_S = 2.0
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
    """One run of it, within `root`."""

    def __init__(self, root: Path, seed: int) -> None:
        mark = secrets.token_hex(3)
        self.functions = {f"{kind}-{mark}": kind for kind in HANDLERS}
        self.killed = Counter[str]()
        self.kill_s: dict[str, list[float]] = {}
        self._root = root
        self._seed = seed
        self._chance = random.Random(seed)  # of its own, so that callers do not change the sequence of kills
        self._gateway = Mortal(root, mark)

    async def run(self, kills: int, report: Report) -> None:
        await self._gateway.start()
        try:
            async with receiving(self._gateway.state / "webhook-secret") as hooked:
                await self._deploy()
                crowd = Crowd(self._gateway, self.functions, hooked.url, random.Random(self._seed))
                for name, phase in (
                    ("storm", self._storm(kills, crowd)), ("calm", self._calm(crowd)),
                    ("hooks", self._hooks(crowd, hooked)),
                ):  # fmt: skip
                    began = time.monotonic()
                    await phase
                    report.add(f"{name}_s", time.monotonic() - began, "s")
                self._check_promises(crowd, report)
                self._check_hooks(crowd, hooked, report)
                code = await self._gateway.stop()
        finally:
            await self._gateway.kill()
            left = await self._gateway.left(LEFT_S)
        report.add("exit_code", code, "", "== 0")
        report.add("left_processes", len(left), "", "<= 0")
        for name in left[:20]:
            report.note(f"left: {name}")
        self._check_runs(crowd, report)
        self._check_rows(crowd, report)
        self._tell_kills(report)

    # -- what happens

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

    async def _storm(self, kills: int, crowd: Crowd) -> None:
        """All the kills, while callers call."""
        over = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(SUBMITTERS):
                tasks.create_task(crowd.submit(over, PAUSE_S))
            for _ in range(WATCHERS):
                tasks.create_task(crowd.watch(over))
            await asyncio.sleep(PAUSE_S)
            while self.killed.total() < kills:
                await self._kill()
                await asyncio.sleep(self._chance.expovariate(1 / PAUSE_S))
            over.set()
            await crowd.wake()

    async def _calm(self, crowd: Crowd) -> None:
        """Wait until all jobs have ended, including jobs whose submission got no answer."""
        with contextlib.suppress(TimeoutError):  # what has not ended by then is counted
            async with asyncio.timeout(QUIET_S):
                await crowd.see_out(self.functions)
        await crowd.look_at_all()

    async def _kill(self) -> None:
        began = time.monotonic()
        (role,) = self._chance.choices(list(ROLES), list(ROLES.values()))
        if role == "gateway":
            await self._kill_gateway()
        else:
            role = await self._kill_one(role)
        self.killed[role] += 1
        self.kill_s.setdefault(role, []).append(time.monotonic() - began)

    async def _kill_one(self, role: str) -> str:
        """Kill a process of this role as soon as one exists. After VICTIM_S try roles at random. Return the role."""
        until = time.monotonic() + VICTIM_S
        while not self._gateway.kill_one(role, self._chance):
            await asyncio.sleep(0.02)
            if time.monotonic() > until:
                role = self._chance.choice(["base", "zygote", "worker"])
        return role

    async def _kill_gateway(self) -> None:
        await self._gateway.kill()
        while self._chance.random() < AT_START:
            await self._gateway.spawn()
            await asyncio.sleep(self._chance.uniform(0, 2 * statistics.median(self._gateway.restarts_s)))
            await self._gateway.kill()
            self.killed["gateway at its start"] += 1
        await self._gateway.start()

    async def _hooks(self, crowd: Crowd, hooked: Hooked) -> None:
        """Until every webhook has come, or will not."""
        until = time.monotonic() + HOOKS_S
        while time.monotonic() < until:
            if all(job.id in hooked.completed for job in crowd.promises.values() if job.hooked):
                return
            await asyncio.sleep(0.05)

    # -- what is checked

    def _check_promises(self, crowd: Crowd, report: Report) -> None:
        jobs = crowd.promises.values()
        for name in ("sent", "twice", "again", "resent", "unanswered"):
            report.add(f"submissions_{name}", crowd.counts[name])
        report.add("accepted", len(jobs), "jobs", "> 0")
        report.add("not_ended", sum(not job.result for job in jobs), "jobs", "<= 0")
        wrong = [job for job in jobs if job.status == "COMPLETED" and not crowd.right(job)]
        report.add("wrong_output", len(wrong), "jobs", "<= 0")
        ended = Counter(job.status for job in jobs)
        exhausted = [job for job in jobs if job.status == "FAILED" and job.error.get("type") == "worker_died"]
        report.add("completed", ended["COMPLETED"], "jobs")
        report.add("exhausted", len(exhausted), "jobs")
        report.add(
            "ended_otherwise", len(jobs) - ended["COMPLETED"] - len(exhausted) - ended[""], "jobs", "<= 0"
        )
        report.add("broken_promises", len(crowd.wrong), "", "<= 0")
        bad = [job for job in jobs if not job.result or (job.status != "COMPLETED" and job not in exhausted)]
        for text in [*crowd.wrong[:20], *map(str, wrong[:5]), *map(str, bad[:10])]:
            report.note(text)

    def _check_hooks(self, crowd: Crowd, hooked: Hooked, report: Report) -> None:
        wanted = {job.id for job in crowd.promises.values() if job.hooked}
        report.add("webhooks_received", hooked.came)
        report.add("webhooks_missing", len(wanted - set(hooked.completed)), "jobs", "<= 0")
        several = [
            job for job, ids in hooked.completed.items() if len(set(ids)) > 1 or len(hooked.said[job]) > 1
        ]
        report.add("webhooks_with_several_ids", len(several), "jobs", "<= 0")
        report.add("webhooks_repeated", sum(len(ids) - 1 for ids in hooked.completed.values()))
        report.add("webhooks_forged", len(hooked.forged), "", "<= 0")
        for text in [*several[:5], *hooked.forged[:5]]:
            report.note(text)

    def _check_runs(self, crowd: Crowd, report: Report) -> None:
        """Each line is (job, attempt, pid, number): a key's number ran under one id."""
        runs = [line.split() for line in (self._root / "runs").read_text().splitlines()]
        ids: dict[int, set[str]] = {}
        for job, _, _, number in runs:
            ids.setdefault(int(number), set()).add(job)
        keyed = [job for job in crowd.promises.values() if job.key]
        strayed = [job for job in keyed if ids.get(job.number, set()) - {job.id}]
        never = [
            job for job in crowd.promises.values() if job.status == "COMPLETED" and job.number not in ids
        ]
        report.add("runs", len(runs))
        report.add("runs_per_job", len(runs) / max(1, len({run[0] for run in runs})))
        report.add("keys_that_ran_as_two_jobs", len(strayed), "", "<= 0")
        report.add("completed_without_a_run", len(never), "jobs", "<= 0")

    def _check_rows(self, crowd: Crowd, report: Report) -> None:
        """Check the store once the gateway has gone: it has no job that was not submitted."""
        with closing(sqlite3.connect(self._gateway.state / "jobs.sqlite3")) as connection:
            states: Mapping[str, int] = dict(
                connection.execute("SELECT state, count(*) FROM jobs GROUP BY state")
            )
            rows = {
                table: connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
                for table in ("jobs", "inputs", "results", "pieces", "deliveries")
            }
            (attempts,) = connection.execute("SELECT max(attempts) FROM jobs").fetchone()
            (healthy,) = connection.execute("PRAGMA integrity_check").fetchone()
        asked = len(crowd.promises) + crowd.counts["unanswered"]
        report.add("rows_too_many", max(0, rows["jobs"] - asked), "jobs", "<= 0")
        report.add("rows_lost", max(0, len(crowd.promises) - rows["jobs"]), "jobs", "<= 0")
        report.add("rows_not_ended", states.get("IN_QUEUE", 0) + states.get("IN_PROGRESS", 0), "jobs", "<= 0")
        report.add("most_attempts", attempts)
        report.add("database_damaged", healthy != "ok", "", "<= 0")
        report.row(**rows, **states)
        files = [path for path in self._gateway.state.rglob("*") if path.is_file()]
        report.add("state_files", len(files), "", f"<= {STATE_FILES}")
        report.add("state_mb", sum(path.stat().st_size for path in files) / 1e6, "MB")

    def _tell_kills(self, report: Report) -> None:
        report.add("kills", self.killed.total())
        for role, count in sorted(self.killed.items()):
            report.row(killed=role, times=count)
            report.note(f"killed: {role} {count} times")
        restarts_s = self._gateway.restarts_s
        report.add("restart_p50_s", statistics.median(restarts_s), "s")
        report.add("restart_max_s", max(restarts_s), "s")
        for role, times_s in sorted(self.kill_s.items()):
            report.add(f"kill_of_{role}_mean_s", statistics.mean(times_s), "s")


def soak(kills: int, seed: int, report: Report) -> None:
    with tempfile.TemporaryDirectory(prefix="pf-soak-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        report.note(f"seed {seed}")
        asyncio.run(Soak(Path(folder), seed).run(kills, report))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 30), help="of who is killed when")
    parser.add_argument("--report", default="soak-jobs", help="name of the file in build/bench")
    options = parser.parse_args()
    report = Report(options.report)
    soak(options.kills, options.seed, report)
    return 0 if report.finish() else 1


if __name__ == "__main__":
    sys.exit(main())
