"""The store's part of `make bench-jobs`: durable submits beside the fsync floor, status with a million jobs, the size.

python infra/bench/jobs_store.py [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sqlite3
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import uvloop
from percentiles import median, percentile
from pilotflame.runtime.jobs.database import Database
from pilotflame.runtime.jobs.job import Job, JobOutcome, JobState, NewJob, new_job_id
from pilotflame.runtime.jobs.schema import SCRIPTS
from pilotflame.runtime.jobs.store import JobStore
from report import Report

BUILD = Path(__file__).resolve().parents[2] / "build"
FUNCTION = "tone"
KEEP_S = 1800.0
SUBMITTERS = 256
BASE = 1000
"""Jobs that go through the store; the million are copies of their rows under ids of their own."""


@dataclass(frozen=True)
class Amounts:
    """How much of each is done."""

    seconds: float
    finished: int
    rounds: int
    looks: int
    """Status calls, in each round, of each store."""
    churn: int
    """Jobs submitted, finished and forgotten in each round of the retention."""


FULL = Amounts(seconds=5.0, finished=1_000_000, rounds=11, looks=3000, churn=5000)
QUICK = Amounts(seconds=1.0, finished=50_000, rounds=3, looks=500, churn=2000)


def new_job(number: int) -> NewJob:
    return NewJob(FUNCTION, b'{"prompt":"%d %s"}' % (number, b"x" * 200), 600.0, 86400.0)


@asynccontextmanager
async def opened(path: Path, clock: Callable[[], float] = time.time) -> AsyncIterator[JobStore]:
    database = Database(path, SCRIPTS)
    database.open()
    try:
        yield JobStore(database, keep_s=KEEP_S, clock=clock)
    finally:
        await asyncio.to_thread(database.close)


async def ended(store: JobStore, job: Job) -> None:
    """A job through its life."""
    fence = await store.take(job.id, "w1")
    if fence is None:
        raise RuntimeError(f"{job.id} was not queued")
    await store.finish(
        job.id,
        fence,
        JobOutcome(JobState.COMPLETED, output=b'{"text":"%s"}' % (b"y" * 200)),
    )


async def in_parallel(work: Callable[[int], AsyncIterator[None]], seconds: float) -> float:
    """How many steps per second SUBMITTERS make together."""
    until_s = time.perf_counter() + seconds
    done = 0

    async def go(number: int) -> None:
        nonlocal done
        async for _ in work(number):
            done += 1
            if time.perf_counter() > until_s:
                return

    started_s = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for number in range(SUBMITTERS):
            tasks.create_task(go(number))
    return done / (time.perf_counter() - started_s)


def fsync_floor(report: Report, folder: Path, amounts: Amounts) -> None:
    """One small row in each transaction, one after the other: what a commit costs here."""
    connection = sqlite3.connect(folder / "floor.db", isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("CREATE TABLE rows (number INTEGER PRIMARY KEY, body BLOB)")
    started_s, done = time.perf_counter(), 0
    while (passed_s := time.perf_counter() - started_s) < amounts.seconds:
        connection.execute("INSERT INTO rows (body) VALUES (?)", (b"x" * 100,))
        done += 1
    connection.close()
    report.add("fsync_floor_per_s", done / passed_s, "/s")


async def submits(report: Report, folder: Path, amounts: Amounts) -> None:
    """Durable submits, and whole lives, of many callers at once."""
    async with opened(folder / "submits.db") as store:

        async def submitting(caller: int) -> AsyncIterator[None]:
            while True:
                await store.submit(new_job(caller))
                yield

        async def living(caller: int) -> AsyncIterator[None]:
            while True:
                job, _ = await store.submit(new_job(caller))
                await ended(store, job)
                yield

        report.add("store_submits_per_s", await in_parallel(submitting, amounts.seconds), "/s", ">= 2000")
        report.add("store_lives_per_s", await in_parallel(living, amounts.seconds), "/s")


async def status_growth(report: Report, folder: Path, amounts: Amounts) -> None:
    """p99 of status with many finished jobs over that with few; in turns, the ratio of the medians."""
    few, many = folder / "few.db", folder / "many.db"
    for path, count in ((few, BASE), (many, amounts.finished)):
        async with opened(path) as store:
            for number in range(BASE):
                await ended(store, (await store.submit(new_job(number)))[0])
        multiply(path, count)
    p99s: dict[Path, list[float]] = {few: [], many: []}
    async with opened(few) as small, opened(many) as large:
        for _ in range(amounts.rounds):
            for path, store in ((few, small), (many, large)):
                p99s[path].append(await status_p99_us(store, some_ids(path, amounts.looks)))
    for path, name in ((few, "few"), (many, "many")):
        report.row(finished=name, p99_us=p99s[path], file_mb=size_of(path) / 1e6)
    report.add("status_p99_us", median(p99s[many]), "us")
    report.add("status_p99_growth", median(p99s[many]) / median(p99s[few]), "x", "<= 2")


def multiply(path: Path, count: int) -> None:
    """Copy the rows of the first BASE jobs until there are `count`, each with an id and a key of its own."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.create_function("new_id", 0, lambda: new_job_id(time.time()))
    names = [row[1] for row in connection.execute("PRAGMA table_info(jobs)") if row[1] != "number"]
    fresh = {"id": "new_id()", "idempotency": "randomblob(16)"}
    values = ", ".join(fresh.get(name, name) for name in names)
    connection.execute("BEGIN")
    for start in range(BASE, count, BASE):
        connection.execute(
            f"INSERT INTO jobs (number, {', '.join(names)}) SELECT number + ?, {values} FROM jobs WHERE number <= ?",
            (start, BASE),
        )
        connection.execute(
            "INSERT INTO inputs SELECT number + ?, body FROM inputs WHERE number <= ?", (start, BASE)
        )
        connection.execute(
            "INSERT INTO results SELECT number + ?, type, logs, body FROM results WHERE number <= ?",
            (start, BASE),
        )
    connection.execute("UPDATE counters SET completed = ?", (count,))
    connection.execute("COMMIT")
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()


def some_ids(path: Path, count: int) -> list[str]:
    """Ids of jobs, drawn by chance."""
    connection = sqlite3.connect(path)
    (last,) = connection.execute("SELECT max(number) FROM jobs").fetchone()
    numbers = [random.randint(1, last) for _ in range(count)]
    ids = [
        connection.execute("SELECT id FROM jobs WHERE number = ?", (number,)).fetchone()[0]
        for number in numbers
    ]
    connection.close()
    return ids


async def status_p99_us(store: JobStore, ids: Sequence[str]) -> float:
    latencies: list[float] = []
    for job_id in ids:
        started_ns = time.perf_counter_ns()
        await store.get(FUNCTION, job_id)
        latencies.append((time.perf_counter_ns() - started_ns) / 1e3)
    return percentile(latencies, 0.99)


async def retention(report: Report, folder: Path, amounts: Amounts) -> None:
    """Rounds of jobs that come, end, and are forgotten: the file at the end over the file after the first rounds."""
    path = folder / "retention.db"
    sizes: list[int] = []
    now_s = time.time()
    async with opened(path, lambda: now_s) as store:
        for _ in range(12):
            async with asyncio.TaskGroup() as tasks:
                for number in range(amounts.churn):
                    tasks.create_task(_life(store, number))
            now_s += KEEP_S + 1
            while await store.next_expiry(now_s) <= now_s:
                await store.expire()
            sizes.append(size_of(path))
    report.row(retention_sizes_mb=[size / 1e6 for size in sizes])
    report.add("store_mb_under_retention", max(sizes[-3:]) / 1e6, "MB")
    report.add("size_growth_under_retention", max(sizes[-3:]) / max(sizes[:3]), "x", "<= 1.3")


def size_of(path: Path) -> int:
    """A database's file and its log."""
    return sum(found.stat().st_size for found in path.parent.glob(f"{path.name}*"))


async def _life(store: JobStore, number: int) -> None:
    job, _ = await store.submit(new_job(number))
    await ended(store, job)


async def measure(report: Report, amounts: Amounts) -> None:
    """All of it, on the file system of the build folder."""
    (BUILD / "bench").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILD / "bench", prefix="jobs-") as made:
        folder = Path(made)
        print("== fsync floor", flush=True)
        fsync_floor(report, folder, amounts)
        for part in (submits, retention, status_growth):
            print(f"== {part.__name__}", flush=True)
            await part(report, folder, amounts)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the store of jobs.")
    parser.add_argument("--quick", action="store_true", help="does it work at all: not the figures")
    arguments = parser.parse_args()
    report = Report("bench-jobs")
    report.note(f"SQLite {sqlite3.sqlite_version}, WAL, synchronous=FULL; {SUBMITTERS} submitters at once")
    if arguments.quick:
        report.note("a quick run: not the figures")
    uvloop.run(measure(report, QUICK if arguments.quick else FULL))
    return 0 if report.finish() else 1


if __name__ == "__main__":
    sys.exit(main())
