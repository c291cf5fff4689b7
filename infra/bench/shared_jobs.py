"""The store of jobs on PostgreSQL beside the one on SQLite, and `pgbench` as the floor. Both write durably (fsync)."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from percentiles import median
from pilotflame.runtime.jobs.postgres.database import PostgresDatabase
from pilotflame.runtime.jobs.postgres.store import PostgresJobStore
from pilotflame.runtime.jobs.sql.store import SqlJobStore
from pilotflame.runtime.jobs.stored.job import NewJob, new_job_id
from report import Report

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
from postgres import PostgresServer, new_schema, postgres_server

Job = Callable[[SqlJobStore, int], Awaitable[object]]


async def submit(store: SqlJobStore, number: int) -> None:
    new = NewJob("tone", b'{"prompt":"%d %s"}' % (number, b"x" * 200), 600.0, 86400.0)
    await store.submit(new, new_job_id(time.time()))


async def per_second(store: SqlJobStore, job: Job, callers: int, count: int) -> float:
    async def call() -> None:
        for number in range(count // callers):
            await job(store, number)

    began_s = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(callers):
            tasks.create_task(call())
    return count / (time.perf_counter() - began_s)


async def p50_ms(store: SqlJobStore, count: int) -> float:
    took_ms = list[float]()
    for number in range(count):
        began_s = time.perf_counter()
        await submit(store, number)
        took_ms.append((time.perf_counter() - began_s) * 1e3)
    return median(took_ms)


def pgbench(server: PostgresServer, clients: int, seconds: int) -> float:
    """Return the transactions a second of `pgbench -N`, with prepared statements."""
    text = server.program(
        "pgbench", "-N", "-M", "prepared", "-c", str(clients), "-j", "2", "-T", str(seconds)
    )
    return float(re.findall(r"tps = ([\d.]+)", text)[0])


async def beside_postgresql(report: Report, file: SqlJobStore, run_job: Job, rounds: int, count: int) -> None:
    """Enter the figures of the store on PostgreSQL. `file` is the store on SQLite."""
    with postgres_server() as server:
        server.stop()
        server.start("fsync=on", "max_connections=100")
        shared = PostgresJobStore(PostgresDatabase(new_schema(server.url, "jobs")), keep_s=1800.0)
        await shared.open()
        submits, jobs, waits = list[float](), list[float](), list[float]()
        for _ in range(rounds + 1):
            for what, found in ((submit, submits), (run_job, jobs)):
                beside = await per_second(file, what, 64, count)
                found.append(await per_second(shared, what, 64, count) / beside)
            waits.append(await p50_ms(shared, count // 10))
        await shared.close()
        server.program("pgbench", "-i", "-q")
        floor = pgbench(server, 64, 4)
    # The first round warms both.
    report.row(postgresql_submit_ratios=submits, postgresql_job_ratios=jobs, postgresql_submit_p50s_ms=waits)
    report.add("postgresql_submit_ratio", median(submits[1:]), "x", ">= 0.4")
    report.add("postgresql_submit_p50_ms", median(waits[1:]), "ms", "<= 4")
    report.add("postgresql_job_ratio", median(jobs[1:]), "x")
    report.add("pgbench_per_s", floor, "/s")
