"""`make bench-jobs`: durable submits and whole jobs over HTTP, PostgreSQL, status among a million jobs, the size of the store.

python infra/bench/jobs_bench.py [--quick]
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path

import uvloop
from control import gateway
from load import Request, Tally, load_apart
from percentiles import median, percentile
from pilotflame.runtime.jobs.sql.store import SqlJobStore
from pilotflame.runtime.jobs.sqlite.database import Database
from pilotflame.runtime.jobs.sqlite.schema import SCRIPTS
from pilotflame.runtime.jobs.sqlite.store import SqliteJobStore
from pilotflame.runtime.jobs.stored.job import JobOutcome, JobState, NewJob, new_job_id
from report import Report, parser
from servers import Server
from shared_jobs import beside_postgresql, over_gateways

BUILD = Path(__file__).resolve().parents[2] / "build" / "bench"
FUNCTION = "tone"
KEEP_S = 1800.0
CALLERS = 64
BASE = 1000
"""The number of jobs that go through the store. The million jobs are copies of their rows with new ids."""
RETENTION_ROUNDS = 12
INPUT = b'{"input": {"prompt": "' + b"x" * 200 + b'"}}'
# This handler keeps its first job, so that submits are measured and not calls.
KEEPS = "import time\n\ndef handler(event):\n    time.sleep(600)\n"
ECHO = "def handler(event):\n    return event\n"
# More jobs are submitted than the limits of a queue usually allow.
SETTINGS = {"scale.max": 1, "max_jobs": 10_000_000}


@dataclass(frozen=True)
class Plan:
    """The amounts. `looks`: status calls in each round. `churn`: jobs that are submitted and forgotten in
    each round.
    """

    seconds: float
    finished: int
    rounds: int
    looks: int
    churn: int


FULL = Plan(seconds=4.0, finished=1_000_000, rounds=11, looks=3000, churn=5000)
QUICK = Plan(seconds=1.0, finished=50_000, rounds=2, looks=500, churn=2000)


def over_http(report: Report, plan: Plan) -> None:
    """Enter submits_per_s and runsync_per_s, of 64 callers."""
    with gateway() as (server, control):
        control.deploy_code("keeps", KEEPS, **SETTINGS)
        control.deploy_code("echo", ECHO, **SETTINGS)
        submits, waits = [], []
        for _ in range(min(plan.rounds, 5)):
            submits.append(_load(server, "/v2/keeps/run", plan.seconds))
            waits.append(_load(server, "/v2/echo/runsync", plan.seconds))
    report.add("submits_per_s", median([tally.per_second for tally in submits]), "/s", ">= 2000")
    report.add("runsync_per_s", median([tally.per_second for tally in waits]), "/s", ">= 2000")


def _load(server: Server, path: str, seconds: float) -> Tally:
    request = Request(server.url + path, body=INPUT)
    tally = load_apart(request, callers=CALLERS, duration_s=seconds)
    if not tally.clean:
        raise RuntimeError(f"{path} was refused or answered wrongly: {tally.summary()}")
    return tally


@asynccontextmanager
async def opened(path: Path, clock: Callable[[], float] = time.time) -> AsyncIterator[SqliteJobStore]:
    database = Database(path, SCRIPTS)
    database.open()
    try:
        yield SqliteJobStore(database, keep_s=KEEP_S, clock=clock)
    finally:
        await asyncio.to_thread(database.close)


async def run_job(store: SqlJobStore, number: int) -> None:
    """Submit a job, start it and finish it."""
    body = b'{"prompt":"%d %s"}' % (number, b"x" * 200)
    job, _ = await store.submit(NewJob(FUNCTION, body, 600.0, 86400.0))
    fence = await store.take(job.id, "w1")
    if fence is None:
        raise RuntimeError(f"{job.id} was not queued")
    output = b'{"text":"%s"}' % (b"y" * 200)
    await store.finish(job.id, fence, JobOutcome(JobState.COMPLETED, output=output))


async def status_growth(report: Report, folder: Path, plan: Plan) -> None:
    """Enter status_p99_growth: the p99 of status with many finished jobs, divided by the p99 with few. The two stores take turns."""
    few, many = folder / "few.db", folder / "many.db"
    for path, count in ((few, BASE), (many, plan.finished)):
        async with opened(path) as store:
            for number in range(BASE):
                await run_job(store, number)
        multiply(path, count)
    p99s: dict[Path, list[float]] = {few: [], many: []}
    async with opened(few) as small, opened(many) as large:
        for _ in range(plan.rounds):
            for path, store in ((few, small), (many, large)):
                p99s[path].append(await status_p99_us(store, some_ids(path, plan.looks)))
    report.row(few_p99_us=p99s[few], many_p99_us=p99s[many])
    report.add("status_p99_growth", median(p99s[many]) / median(p99s[few]), "x", "<= 2")


def multiply(path: Path, count: int) -> None:
    """Copy the rows of the first BASE jobs until there are `count`, each with an id and a key of its own."""
    fresh = {"number": "number + ?", "id": "new_id()", "idempotency": "randomblob(16)"}
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.create_function("new_id", 0, lambda: new_job_id(time.time()))
        connection.execute("BEGIN")
        for table in ("jobs", "inputs", "results"):
            names = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
            values = ", ".join(fresh.get(name, name) for name in names)
            copy = f"INSERT INTO {table} ({', '.join(names)}) SELECT {values} FROM {table} WHERE number <= ?"
            for start in range(BASE, count, BASE):
                connection.execute(copy, (start, BASE))
        connection.execute("UPDATE counters SET completed = ?", (count,))
        connection.execute("COMMIT")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def some_ids(path: Path, count: int) -> list[str]:
    """Return the ids of jobs drawn at random."""
    with closing(sqlite3.connect(path)) as connection:
        (last,) = connection.execute("SELECT max(number) FROM jobs").fetchone()
        query = "SELECT id FROM jobs WHERE number = ?"
        numbers = [random.randint(1, last) for _ in range(count)]
        return [connection.execute(query, (number,)).fetchone()[0] for number in numbers]


async def status_p99_us(store: SqliteJobStore, ids: Sequence[str]) -> float:
    latencies: list[float] = []
    for job_id in ids:
        started_ns = time.perf_counter_ns()
        await store.get(FUNCTION, job_id)
        latencies.append((time.perf_counter_ns() - started_ns) / 1e3)
    return percentile(latencies, 0.99)


def size_of(path: Path) -> int:
    """Return the size of a database and of its log."""
    return sum(found.stat().st_size for found in path.parent.glob(f"{path.name}*"))


async def retention(report: Report, folder: Path, plan: Plan) -> None:
    """Enter size_growth_under_retention: the size after many rounds of jobs that are submitted and forgotten,
    relative to the size after few rounds.
    """
    path, sizes, now_s = folder / "retention.db", list[int](), time.time()
    async with opened(path, lambda: now_s) as store:
        for _ in range(RETENTION_ROUNDS):
            async with asyncio.TaskGroup() as tasks:
                for number in range(plan.churn):
                    tasks.create_task(run_job(store, number))
            now_s += KEEP_S + 1
            while await store.next_expiry(now_s) <= now_s:
                await store.expire()
            sizes.append(size_of(path))
    report.row(retention_sizes_mb=[size / 1e6 for size in sizes])
    report.add("size_growth_under_retention", max(sizes[-3:]) / max(sizes[:3]), "x", "<= 1.3")


async def gateways(report: Report, _: Path, plan: Plan) -> None:
    """Enter the rate of jobs over several gateways."""
    await over_gateways(report, min(plan.rounds, 5), plan.churn // 2)


async def postgresql(report: Report, folder: Path, plan: Plan) -> None:
    """Enter the figures of shared_jobs.py."""
    async with opened(folder / "beside.db") as store:
        await beside_postgresql(report, store, run_job, min(plan.rounds, 5), plan.churn)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--quick", action="store_true", help="smaller amounts, whose figures do not count")
    arguments = options.parse_args()
    report, plan = Report("bench-jobs"), QUICK if arguments.quick else FULL
    BUILD.mkdir(parents=True, exist_ok=True)
    with report.part("http"):
        over_http(report, plan)
    for part in (postgresql, gateways, retention, status_growth):
        with report.part(part.__name__), tempfile.TemporaryDirectory(dir=BUILD, prefix="jobs-") as folder:
            uvloop.run(part(report, Path(folder), plan))
    return report.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())
