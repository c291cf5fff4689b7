"""The pump: takes from a bus as many messages as its function has room for, and runs each as a stored job.

A message is deleted after its job is COMPLETED and its answer is where it belongs, never sooner; else it is left to the
queue, which counts, and puts it aside when that is enough. Delivered again, it is the same job: one that was COMPLETED
meanwhile is not run again, one that is at work is waited for, one that failed is run once more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ...errors import BusFailed, PilotflameError
from ..jobs.job import Job, JobState, NewJob
from ..jobs.jobs import Jobs
from ..jobs.order import order
from ..settings.event_source import MAX_VISIBILITY_S, EventSource
from ..settings.function_settings import FunctionSettings
from .body import job_input, trace
from .bus import Bus, Message, Sink

BEATS = 3
"""How often a message is renewed within its visibility."""
PAUSE_S = 1.0
MAX_PAUSE_S = 60.0
"""Between attempts to reach a queue that cannot be asked."""
MAX_BACKOFF_S = 900


class _Work:
    """A message whose job is at work. `message` is its newest delivery; `news`: its job changed, or the pump stops."""

    def __init__(self, message: Message) -> None:
        self.message = message
        self.news: asyncio.Event | None = None
        self.task: asyncio.Task[None] | None = None


class Consumer:
    """One source of one function. `say` is told what an operator is to know, for the function's log."""

    def __init__(
        self, settings: FunctionSettings, source: EventSource, jobs: Jobs, bus: Bus, sink: Sink | None, say: Callable[[str], None]
    ) -> None:  # fmt: skip
        self.settings = settings
        self.source = source
        self._jobs = jobs
        self._bus = bus
        self._sink = sink
        self._say = say
        self._work: dict[str, _Work] = {}
        self._changed = asyncio.Event()
        self._renewing = asyncio.Lock()
        self._stopping = False
        self._tasks: asyncio.TaskGroup | None = None
        self._polling: asyncio.Task[None] | None = None
        self._beating: asyncio.Task[None] | None = None

    @property
    def room(self) -> int:
        """How many messages may be at work at a time."""
        return self.source.concurrency or self.settings.scale.max * self.settings.concurrency

    @property
    def in_flight(self) -> int:
        return len(self._work)

    def start(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        self._polling = tasks.create_task(self._poll(tasks))
        self._beating = tasks.create_task(self._beat())

    async def close(self, deadline_s: float) -> None:
        """Polls no more. Messages whose jobs run may finish until the deadline; all others are given back."""
        self._stopping = True
        if self._polling is not None:
            self._polling.cancel()
        for work in self._work.values():
            if work.news is not None:
                work.news.set()
        if running := [work.task for work in self._work.values() if work.task is not None]:
            await asyncio.wait(running, timeout=deadline_s)
        left = list(self._work.values())
        for work in left:
            if work.task is not None:
                work.task.cancel()
        if self._beating is not None:
            self._beating.cancel()
        await self._give_back([work.message for work in left], 0)
        try:
            await self._bus.close()
            if self._sink is not None:
                await self._sink.close()
        except Exception as error:  # noqa: BLE001  what is wrong with one source must not end the gateway
            self._say(_told(error))

    # -- taking

    async def _poll(self, tasks: asyncio.TaskGroup) -> None:
        pause_s, said = PAUSE_S, ""
        while True:
            while len(self._work) >= self.room:
                self._changed.clear()
                await self._changed.wait()
            try:
                for message in await self._bus.receive(self.room - len(self._work)):
                    self._take(message, tasks)
            except Exception as error:  # noqa: BLE001  what is wrong with one source must not end the gateway
                if _told(error) != said:  # once, not every minute
                    said = _told(error)
                    self._say(said)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
                continue
            pause_s, said = PAUSE_S, ""

    def _take(self, message: Message, tasks: asyncio.TaskGroup) -> None:
        known = self._work.get(message.id)
        if known is not None:  # it was not renewed in time: from now on this delivery is the one that counts
            known.message = message
            return
        work = self._work[message.id] = _Work(message)
        self._changed.set()
        work.task = tasks.create_task(self._run(work))

    async def _beat(self) -> None:
        """Keeps all that is at work from others."""
        while True:
            while not self._work:
                self._changed.clear()
                await self._changed.wait()
            await asyncio.sleep(self.source.visibility_s / BEATS)
            try:
                async with self._renewing:
                    failed = await self._bus.hold([work.message for work in self._work.values()])
            except Exception as error:  # noqa: BLE001  see _poll; it is tried again at the next beat
                self._say(f"messages at work could not be kept from others: {_told(error)}")
            else:
                for name in set(failed) & set(self._work):
                    self._say(
                        f"message {name} is at work, and could not be kept from others: it may come again"
                    )

    # -- one message

    async def _run(self, work: _Work) -> None:
        message = work.message
        try:
            job = await self._end_of(work)
            if job.state is JobState.COMPLETED:
                if self._sink is not None:
                    await self._sink.put(message, job)
                await self._bus.delete(work.message)
                return
            if not self._stopping or job.state in (JobState.FAILED, JobState.TIMED_OUT):
                self._say(f"message {message.id}: job {job.id} is {job.state}{_why(job)}; left to the queue")
                await self._give_back([work.message], self._backoff_s(message))
            else:  # not run, or taken away with its function: another may run it at once
                await self._give_back([work.message], 0)
        except TimeoutError:
            self._say(
                f"message {message.id}: its job did not end within {MAX_VISIBILITY_S} s; left to the queue"
            )
        except Exception as error:  # noqa: BLE001  see _poll
            self._say(f"message {message.id}: {_told(error)} The message is left to the queue.")
            await self._give_back([work.message], self._backoff_s(message))
        finally:
            self._work.pop(message.id, None)
            self._changed.set()

    async def _end_of(self, work: _Work) -> Job:
        """Its job once that has ended. If the pump stops, one that does not run is cancelled: another is to run it."""
        job = await self._submit(work.message)
        with self._jobs.board.reading(job.id) as news:
            work.news = news
            async with asyncio.timeout(MAX_VISIBILITY_S):
                while True:
                    job = await self._jobs.get(job.function, job.id)
                    if job.state.final:
                        return job
                    if self._stopping and job.state is JobState.IN_QUEUE:
                        return await self._jobs.cancel(job.function, job.id)
                    await news.wait()
                    news.clear()

    async def _submit(self, message: Message) -> Job:
        key = f"sqs:{self.source.queue}:{message.id}"
        job, replayed = await self._jobs.submit(self._new(message, key))
        if replayed and job.state in (JobState.FAILED, JobState.TIMED_OUT):
            return await self._jobs.retry(job.function, job.id)
        if replayed and job.state is JobState.CANCELLED:  # it stays so: this delivery is a job of its own
            job, _ = await self._jobs.submit(self._new(message, f"{key}:{message.received}"))
        return job

    def _new(self, message: Message, key: str) -> NewJob:
        # One attempt: how often a message is tried is for the queue to count.
        return order(
            self.settings, job_input(message.body),
            max_attempts=1, idempotency=key, traceparent=trace(message.attributes),
        )  # fmt: skip

    def _backoff_s(self, message: Message) -> int:
        return min(MAX_BACKOFF_S, self.source.backoff_s << min(message.received - 1, 16))

    async def _give_back(self, messages: list[Message], delay_s: int) -> None:
        if not messages:
            return
        try:
            async with self._renewing:  # a renewal on its way would keep them for longer
                await self._bus.give_back(messages, delay_s)
        except Exception as error:  # noqa: BLE001  see _poll
            if not isinstance(error, BusFailed):  # they come back by themselves, when their time is over
                self._say(f"messages could not be given back: {_told(error)}")


def _told(error: Exception) -> str:
    """What is said of it. An error that is none of ours is told by its kind: its text may quote what is signed."""
    if isinstance(error, PilotflameError):
        return str(error)
    return f"An error that nobody expected ({type(error).__name__}), to be reported as Pilotflame's."


def _why(job: Job) -> str:
    return f" ({job.error.get('message', '')})" if job.error else ""
