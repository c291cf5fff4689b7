"""A consumer takes as many messages from a queue as its function has room for and runs each as a stored job.

A message is deleted only after its job is COMPLETED and its output is stored. Otherwise it is left to the queue,
which counts deliveries and dead-letters a message after too many. A second delivery of a message maps to the same job
by its idempotency key: a COMPLETED job is not run again, a running one is awaited, a failed one is retried.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

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
        self._messages: dict[str, Message] = {}
        """The latest delivery of each message whose job has not ended."""
        self._news: dict[str, asyncio.Event] = {}
        """Per message: set when its job changes or the consumer stops."""
        self._running: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._visibility = asyncio.Lock()
        self._stopping = False
        self._polling: asyncio.Task[None]
        self._extending: asyncio.Task[None]

    def start(self, tasks: asyncio.TaskGroup) -> None:
        self._polling = tasks.create_task(self._poll(tasks))
        self._extending = tasks.create_task(self._extend())

    def update(self, settings: FunctionSettings) -> None:
        """Use the settings of a new revision for the next messages."""
        self._settings = settings

    async def close(self, deadline_s: float) -> None:
        """Stop polling, let running jobs end within the deadline, and release all other messages."""
        self._stopping = True
        self._polling.cancel()
        for news in self._news.values():
            news.set()
        if self._running:
            await asyncio.wait(self._running, timeout=deadline_s)
        for task in (*self._running, self._extending):
            task.cancel()
        if self._messages:
            await self._release(list(self._messages.values()), 0)
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
                retry_s, logged = RETRY_S, ""
            except Exception as error:  # noqa: BLE001  one broken source must not end the gateway
                # A lasting error is logged once.
                if _text_of(error) != logged:
                    logged = _text_of(error)
                    self._log(logged)
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, MAX_RETRY_S)

    def _room(self) -> int:
        most = self.source.concurrency or self._settings.scale.max * self._settings.concurrency
        return most - len(self._messages)

    def _accept(self, message: Message, tasks: asyncio.TaskGroup) -> None:
        running = message.id in self._messages
        # Only the latest delivery of a message, which was not extended in time, can be extended and deleted.
        self._messages[message.id] = message
        if not running:
            self._changed.set()
            task = tasks.create_task(self._run(message))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _extend(self) -> None:
        """Keep the messages in flight hidden from others."""
        while True:
            while not self._messages:
                self._changed.clear()
                await self._changed.wait()
            await asyncio.sleep(self.source.visibility_s / EXTENSIONS)
            try:
                async with self._visibility:
                    failed = await self._queue.extend(list(self._messages.values()))
            except Exception as error:  # noqa: BLE001  one broken source must not end the gateway
                self._log(f"messages in flight could not be extended: {_text_of(error)}")
            else:
                for message_id in set(failed) & set(self._messages):
                    self._log(f"message {message_id} could not be extended: it may be delivered again")

    async def _release(self, messages: list[Message], delay_s: int) -> None:
        try:
            # An extension that is on its way would hide the messages again. BusFailed: their timeout shows them.
            async with self._visibility:
                with contextlib.suppress(BusFailed):
                    await self._queue.release(messages, delay_s)
        except Exception as error:  # noqa: BLE001  one broken source must not end the gateway
            self._log(f"messages could not be released: {_text_of(error)}")

    # -- one message

    async def _run(self, message: Message) -> None:
        try:
            job = await self._ended_job(message)
            if job.state is JobState.COMPLETED:
                if self._sink is not None:
                    await self._sink.put(message, job)
                await self._queue.delete(self._messages[message.id])
            elif self._stopping and job.state is JobState.CANCELLED:
                # It did not run, so others may have it at once.
                await self._release([self._messages[message.id]], 0)
            else:
                why = f" ({job.error.get('message', '')})" if job.error else ""
                await self._leave(message, f"job {job.id} is {job.state}{why}; left to the queue")
        except TimeoutError:
            self._log(
                f"message {message.id}: no end of its job within {MAX_VISIBILITY_S} s; left to the queue"
            )
        except Exception as error:  # noqa: BLE001  one broken source must not end the gateway
            await self._leave(message, f"{_text_of(error)} The message is left to the queue.")
        finally:
            del self._messages[message.id]
            self._news.pop(message.id, None)
            self._changed.set()

    async def _leave(self, message: Message, why: str) -> None:
        self._log(f"message {message.id}: {why}")
        backoff_s = min(MAX_BACKOFF_S, self.source.backoff_s << min(message.received - 1, 16))
        await self._release([self._messages[message.id]], backoff_s)

    async def _ended_job(self, message: Message) -> Job:
        """Return the message's job once it is final. If the consumer stops, cancel a job that is still queued."""
        job = await self._submit(message)
        with self._jobs.watch(job.id) as news:
            self._news[message.id] = news
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
