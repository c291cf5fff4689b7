"""Compares jobs on PostgreSQL with jobs on SQLite, in a store and in whole gateways. Both write durably (fsync). `pgbench` is the floor."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from percentiles import median
from pilotflame.runtime.jobs.postgres.database import PostgresDatabase
from pilotflame.runtime.jobs.postgres.store import PostgresJobStore
from pilotflame.runtime.jobs.sql.store import SqlJobStore
from pilotflame.runtime.jobs.stored.job import NewJob, new_job_id
from report import Report

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
from live import Gateway, gateway_process, short_folder, until
from postgres import PostgresServer, new_schema, postgres_server

GATEWAYS, CALLERS = 3, 48
NAME, NOTHING = "nothing", "def handler(event):\n    return None\n"
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


async def over_gateways(report: Report, rounds: int, count: int) -> None:
    """Enter the rate of jobs of three gateways on PostgreSQL, divided by the rate of one gateway on SQLite. A job lasts from submit to end."""
    ratios = list[float]()
    async with contextlib.AsyncExitStack() as stack:
        server = stack.enter_context(postgres_server())
        server.stop()
        server.start("fsync=on", "max_connections=100")
        alone, three = [await _gateway(stack)], [await _gateway(stack, server.url) for _ in range(GATEWAYS)]
        for gateways in (alone, three):
            await gateways[0].deploy(NOTHING, {"scale.max": 2}, name=NAME)
        for _ in range(rounds + 1):
            beside = await _jobs_per_s(alone, count)
            ratios.append(await _jobs_per_s(three, count) / beside)
    report.row(gateways_jobs_ratios=ratios)
    report.add("gateways_jobs_ratio", median(ratios[1:]), "x", ">= 0.5")


async def _gateway(stack: contextlib.AsyncExitStack, database: str | None = None) -> Gateway:
    state = stack.enter_context(short_folder()) / "state"
    return await stack.enter_async_context(gateway_process(state, database=database))


async def _jobs_per_s(gateways: Sequence[Gateway], count: int) -> float:
    path, left = f"/v2/{NAME}", iter(range(count))

    async def completed() -> int:
        answer = await gateways[0].client.get(f"{path}/health")
        return int(answer.json()["jobs"]["completed"])

    async def ended() -> bool:
        return await completed() == before + count

    async def submit_all() -> None:
        for number in left:
            answer = await gateways[number % len(gateways)].client.post(f"{path}/run", json={"input": 1})
            answer.raise_for_status()

    before, began_s = await completed(), time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(CALLERS):
            tasks.create_task(submit_all())
    await until(ended, "the end of all jobs")
    return count / (time.perf_counter() - began_s)
