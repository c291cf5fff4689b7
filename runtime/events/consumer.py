"""A consumer takes as many messages from a queue as its function has room for and runs each as a stored job.

A message is deleted only after its job is COMPLETED and its output is stored. Otherwise it is left to the queue,
which counts deliveries and dead-letters a message after too many. A second delivery of a message maps to the same job
by its idempotency key: a COMPLETED job is not run again, a running one is awaited, a failed one is retried.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import orjson

from ...errors import BusFailed, PilotflameError
from ..jobs.job import Job, JobState, NewJob
from ..jobs.jobs import Jobs
from ..settings.event_source import MAX_VISIBILITY_S, EventSource
from ..settings.function_settings import FunctionSettings
from ..telemetry.timeline import TRACEPARENT
from .sinks import Sink
from .sqs import Message, MessageQueue

EXTENSIONS = 3
"""How many times a message is extended within its visibility timeout."""
RETRY_S = 1.0
MAX_RETRY_S = 60.0
"""The longest pause between attempts to reach the queue."""
MAX_BACKOFF_S = 900


@dataclass(eq=False)
class _InFlight:
    """A message whose job has not ended."""

    message: Message
    """Its latest delivery."""
    news: asyncio.Event | None = None
    """Set when the job changes or the consumer stops."""
    task: asyncio.Task[None] | None = None


class Consumer:
    """One source of one function. `log` writes to the function's log."""

    def __init__(
        self,
        settings: FunctionSettings,
        source: EventSource,
        jobs: Jobs,
        queue: MessageQueue,
        sink: Sink | None,
        log: Callable[[str], None],
    ) -> None:
        self.source = source
        self._settings = settings
        self._jobs = jobs
        self._queue = queue
        self._sink = sink
        self._log = log
        self._messages: dict[str, _InFlight] = {}
        self._changed = asyncio.Event()
        self._visibility = asyncio.Lock()
        self._stopping = False
        self._polling: asyncio.Task[None] | None = None
        self._extending: asyncio.Task[None] | None = None

    @property
    def in_flight(self) -> int:
        return len(self._messages)

    def start(self, tasks: asyncio.TaskGroup) -> None:
        self._polling = tasks.create_task(self._poll(tasks))
        self._extending = tasks.create_task(self._extend())

    def update(self, settings: FunctionSettings) -> None:
        """Use the settings of a new revision for the next messages."""
        self._settings = settings

    async def close(self, deadline_s: float) -> None:
        """Stop polling, let running jobs end within the deadline, and release all other messages."""
        self._stopping = True
        if self._polling is not None:
            self._polling.cancel()
        for flight in self._messages.values():
            if flight.news is not None:
                flight.news.set()
        if running := [flight.task for flight in self._messages.values() if flight.task is not None]:
            await asyncio.wait(running, timeout=deadline_s)
        left = list(self._messages.values())
        for flight in left:
            if flight.task is not None:
                flight.task.cancel()
        if self._extending is not None:
            self._extending.cancel()
        await self._release([flight.message for flight in left], 0)
        try:
            await self._queue.close()
            if self._sink is not None:
                await self._sink.close()
        except Exception as error:  # noqa: BLE001  one broken source must not end the gateway
            self._log(_text_of(error))

    # -- all messages

    async def _poll(self, tasks: asyncio.TaskGroup) -> None:
        retry_s, logged = RETRY_S, ""
        while True:
            while (room := self._room()) <= 0:
                self._changed.clear()
                await self._changed.wait()
            try:
                for message in await self._queue.receive(room):
                    self._accept(message, tasks)
            except Exception as error:  # noqa: BLE001  one broken source must not end the gateway
                # A lasting error is logged once.
                if _text_of(error) != logged:
                    logged = _text_of(error)
                    self._log(logged)
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, MAX_RETRY_S)
                continue
            retry_s, logged = RETRY_S, ""

    def _room(self) -> int:
        most = self.source.concurrency or self._settings.scale.max * self._settings.concurrency
        return most - len(self._messages)

    def _accept(self, message: Message, tasks: asyncio.TaskGroup) -> None:
        if message.id in self._messages:
            # It was not extended in time. Only its latest delivery can be extended and deleted.
            self._messages[message.id].message = message
            return
        flight = self._messages[message.id] = _InFlight(message)
        self._changed.set()
        flight.task = tasks.create_task(self._run(flight))

    async def _extend(self) -> None:
        """Keep the messages in flight hidden from others."""
        while True:
            while not self._messages:
                self._changed.clear()
                await self._changed.wait()
            await asyncio.sleep(self.source.visibility_s / EXTENSIONS)
            try:
                async with self._visibility:
                    failed = await self._queue.extend([flight.message for flight in self._messages.values()])
            except Exception as error:  # noqa: BLE001  one broken source must not end the gateway
                self._log(f"messages in flight could not be extended: {_text_of(error)}")
            else:
                for message_id in set(failed) & set(self._messages):
                    self._log(f"message {message_id} could not be extended: it may be delivered again")

    async def _release(self, messages: list[Message], delay_s: int) -> None:
        if not messages:
            return
        try:
            # An extension that is on its way would hide the messages again.
            async with self._visibility:
                await self._queue.release(messages, delay_s)
        except BusFailed:
            # The messages become visible when their timeout ends.
            return
        except Exception as error:  # noqa: BLE001  one broken source must not end the gateway
            self._log(f"messages could not be released: {_text_of(error)}")

    # -- one message

    async def _run(self, flight: _InFlight) -> None:
        message = flight.message
        try:
            job = await self._ended_job(flight)
            if job.state is JobState.COMPLETED:
                if self._sink is not None:
                    await self._sink.put(message, job)
                await self._queue.delete(flight.message)
            elif self._stopping and job.state is JobState.CANCELLED:
                # It did not run, so others may have it at once.
                await self._release([flight.message], 0)
            else:
                why = f" ({job.error.get('message', '')})" if job.error else ""
                self._log(f"message {message.id}: job {job.id} is {job.state}{why}; left to the queue")
                await self._release([flight.message], self._backoff_s(message))
        except TimeoutError:
            self._log(
                f"message {message.id}: its job did not end within {MAX_VISIBILITY_S} s; left to the queue"
            )
        except Exception as error:  # noqa: BLE001  one broken source must not end the gateway
            self._log(f"message {message.id}: {_text_of(error)} The message is left to the queue.")
            await self._release([flight.message], self._backoff_s(message))
        finally:
            self._messages.pop(message.id, None)
            self._changed.set()

    async def _ended_job(self, flight: _InFlight) -> Job:
        """Return the message's job once it is final. If the consumer stops, cancel a job that is still queued."""
        job = await self._submit(flight.message)
        with self._jobs.watch(job.id) as news:
            flight.news = news
            async with asyncio.timeout(MAX_VISIBILITY_S):
                while True:
                    job = await self._jobs.store.get(job.function, job.id)
                    if job.state.final:
                        return job
                    if self._stopping and job.state is JobState.IN_QUEUE:
                        return await self._jobs.store.cancel(job.function, job.id)
                    await news.wait()
                    news.clear()

    async def _submit(self, message: Message) -> Job:
        key = f"sqs:{self.source.queue}:{message.id}"
        job, replayed = await self._jobs.submit(self._new_job(message, key))
        if replayed and job.state in (JobState.FAILED, JobState.TIMED_OUT):
            return await self._jobs.store.retry(job.function, job.id)
        if replayed and job.state is JobState.CANCELLED:
            # A cancelled job cannot be retried, so this delivery gets a job of its own.
            job, _ = await self._jobs.submit(self._new_job(message, f"{key}:{message.received}"))
        return job

    def _new_job(self, message: Message, key: str) -> NewJob:
        traceparent = message.attributes.get("traceparent", "")
        return NewJob.for_function(
            self._settings,
            _job_input(message.body),
            # The queue counts the attempts.
            max_attempts=1,
            idempotency=key,
            traceparent=traceparent if TRACEPARENT.fullmatch(traceparent) else "",
        )

    def _backoff_s(self, message: Message) -> int:
        return min(MAX_BACKOFF_S, self.source.backoff_s << min(message.received - 1, 16))


def _job_input(body: bytes) -> bytes:
    """Return the body if it is JSON, else the body as a JSON string."""
    try:
        orjson.loads(body)
    except orjson.JSONDecodeError:
        return orjson.dumps(body.decode("utf-8", "replace"))
    return body


def _text_of(error: Exception) -> str:
    """Return an error's text for the log; of an unexpected one the type only, as its text may quote secrets."""
    if isinstance(error, PilotflameError):
        return str(error)
    return f"Unexpected error ({type(error).__name__}); please report it as a bug of Pilotflame."
