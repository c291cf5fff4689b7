"""A process that submits jobs until it is killed and prints the id of each accepted job: `submitter.py FILE`."""

import asyncio
import os
import sys
from pathlib import Path

from pilotflame.runtime.jobs.sqlite.database import Database
from pilotflame.runtime.jobs.sqlite.schema import SCRIPTS
from pilotflame.runtime.jobs.sqlite.store import SqliteJobStore
from pilotflame.runtime.jobs.stored import large_bodies
from pilotflame.runtime.jobs.stored.job import JobOutcome, JobState, NewJob


async def submit(store: SqliteJobStore, caller: int) -> None:
    number = 0
    while True:
        number += 1
        new = NewJob(
            "tone", b"%d-%d" % (caller, number), 60.0, 3600.0, idempotency=f"{os.getpid()}-{caller}-{number}"
        )
        job, _ = await store.submit(new)
        os.write(1, f"{job.id} {JobState.IN_QUEUE} {new.input.decode()}\n".encode())
        if number % 2:
            fence = await store.take(job.id)
            if fence is None:
                raise SystemExit("the job was not queued")
            await store.finish(job.id, fence, JobOutcome(JobState.COMPLETED, output=new.input))
            os.write(1, f"{job.id} {JobState.COMPLETED} {new.input.decode()}\n".encode())


async def main() -> None:
    # Store some bodies in files.
    large_bodies.MOST_INLINE_BYTES = 3
    database = Database(Path(sys.argv[1]), SCRIPTS)
    database.open()
    store = SqliteJobStore(database, keep_s=3600.0)
    await store.requeue_dead()
    async with asyncio.TaskGroup() as tasks:
        for caller in range(8):
            tasks.create_task(submit(store, caller))


asyncio.run(main())
