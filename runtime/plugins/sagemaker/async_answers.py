"""Writes the answers of InvokeEndpointAsync to S3 when their jobs end.

`PendingAnswers` stores where each answer goes, until the answer is written. So a gateway that starts again writes the
answers of the jobs that it accepted before.
"""

from __future__ import annotations

import asyncio
import contextlib

import orjson

from ....errors import (
    JobBodyMissing,
    JobExpired,
    JobStoreFailed,
    PilotflameError,
    UnknownFunction,
    UnknownJob,
)
from ....handlers.codec import JSON_TYPE
from ...front.api.backend import Backend
from ...jobs.stored.job import Job, JobState
from ...node.functions.live import Live
from .objects import Objects
from .pending_answers import AnswerFiles, PendingAnswer, PendingAnswers, SharedAnswers

WAIT_S = 3600.0
FIRST_PAUSE_S, LONGEST_PAUSE_S, TRIES = 1.0, 300.0, 12
"""If an answer cannot be written, it is written again after pauses that double. The pauses between the tries are about
19 minutes in all. A gateway that starts again tries again, too.
"""


class AsyncAnswers:
    """The answers that are not written yet."""

    def __init__(self, backend: Backend, objects: Objects) -> None:
        self._backend, self._objects = backend, objects
        self._pending: PendingAnswers = AnswerFiles(backend.state)
        self._left = asyncio.Event()
        """Set when another gateway has gone, because it may have left answers."""
        self._present = set[str]()
        if backend.database is not None and (members := backend.members) is not None:
            self._pending = SharedAnswers(backend.database, members.incarnation)
            members.followers.append(lambda: self._look({one.incarnation for one in members.members}))
        self._added: asyncio.Queue[PendingAnswer] = asyncio.Queue()

    async def add(self, pending: PendingAnswer) -> None:
        """Store where the answer of a job goes. Await this before the caller gets the job's id."""
        await asyncio.to_thread(self._pending.put, pending)
        self._added.put_nowait(pending)

    async def run(self) -> None:
        """Write answers until cancelled. If this fails, call it again."""
        self._added = asyncio.Queue()
        begun: set[str] = set()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._take_over())
            while True:
                pending = await self._added.get()
                if pending.job not in begun:
                    begun.add(pending.job)
                    group.create_task(self._deliver(pending, begun))

    async def _take_over(self) -> None:
        """Write the answers that earlier gateways have left, and those that other gateways leave when they end."""
        while True:
            self._left.clear()
            for pending in await asyncio.to_thread(self._pending.take_over):
                self._added.put_nowait(pending)
            await self._left.wait()

    def _look(self, present: set[str]) -> None:
        """Note which gateways there are. Each heartbeat calls this."""
        if not self._present <= present:
            self._left.set()
        self._present = present

    async def _deliver(self, pending: PendingAnswer, begun: set[str]) -> None:
        """Write an answer and forget it. An answer that cannot be written stays pending."""
        try:
            done = await self._written(pending, await self._ended(pending))
        except (UnknownJob, JobExpired, JobBodyMissing, UnknownFunction):
            # The job or its output no longer exists, or the function was deleted with the secrets that may write the answer.
            done = True
        except PilotflameError as error:
            # Do not raise: an error would end the task group with the deliveries of all owners.
            text = f"The answer of {pending.job} stays pending: {error}"
            self._backend.functions.log(pending.function, text)
            done = False
        # Accept the job again: a replay of the request adds it again, and its answer is then written again.
        begun.discard(pending.job)
        if done:
            # If the removal fails, the answer stays pending, and the next gateway writes it again.
            with contextlib.suppress(JobStoreFailed):
                await asyncio.to_thread(self._pending.remove, pending.job)

    async def _written(self, pending: PendingAnswer, job: Job) -> bool:
        """Write an answer and return True; False if all tries fail. Raise UnknownFunction if the function was deleted."""
        pause_s, function = FIRST_PAUSE_S, self._backend.functions.get(pending.function).function
        for left in reversed(range(TRIES)):
            try:
                await self._write(self._live(pending, function), pending, job)
            except UnknownFunction:
                raise
            except PilotflameError as error:
                text = f"The answer of {pending.job} could not be written to S3: {error}"
                self._backend.functions.log(pending.function, text)
            else:
                return True
            # Do not pause after the last try: a replay of the request would be ignored during the pause.
            if left:
                await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return False

    async def _ended(self, pending: PendingAnswer) -> Job:
        """Wait for the end of a job, however late it comes. Raise UnknownJob or JobExpired if the job is removed."""
        while True:
            job = await self._backend.jobs.wait(pending.function, pending.job, WAIT_S)
            if job.state.final:
                return job

    def _live(self, pending: PendingAnswer, function: object) -> Live:
        """Return the live function of an answer. Raise UnknownFunction if `function` was deleted, even if another function has its
        name now, because the secrets of the other function must not write this answer.
        """
        live = self._backend.functions.get(pending.function)
        if live.function is not function:
            raise UnknownFunction(f"{pending.function} was deleted, and another function has its name.")
        return live

    async def _write(self, live: Live, pending: PendingAnswer, job: Job) -> None:
        write = self._objects.write
        if job.state is JobState.COMPLETED:
            await write(live, pending.output, job.output or b"null", job.output_type or JSON_TYPE)
            return
        error = dict(job.error or {"type": job.state.lower(), "message": f"The job is {job.state}."})
        body = orjson.dumps({"Message": error.get("message", ""), "ErrorCode": error.get("type", "")})
        await write(live, pending.failure, body, JSON_TYPE)
