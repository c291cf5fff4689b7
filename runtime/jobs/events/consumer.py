"""Receives messages from a queue, at most as many as the function can run at once, and runs each as a stored job.

A message is deleted from the queue only after its job is COMPLETED and the output was passed to the sink. If the sink
can never take the output, the message is deleted, too: the output stays with the job, and the function's log says so.
Otherwise the message stays in the queue, which delivers it again and, after too many deliveries, moves it to
its dead-letter queue. All deliveries of a message have the same idempotency key and so the same job. If the
message is delivered again, a COMPLETED job is not run again, a queued or running job is awaited, and a FAILED
or TIMED_OUT job is retried. Only a CANCELLED job is replaced by a new one.

The messages of one group of a FIFO queue run one after the other. If a message is left to the queue, the messages
behind it are given back too. The queue delivers all of them again in order.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Literal

import orjson

from ....errors import BusFailed, OutputRefused, PilotflameError
from ....foreign_json import excess
from ....snapshot.sources.access import Access
from ...ground.settings.event_source import EventSource
from ...ground.settings.function_settings import FunctionSettings
from ...ground.telemetry.background import BackgroundTasks
from ...ground.telemetry.timeline import TRACEPARENT
from ...node.functions.status import SourceStatus
from ..stored.job import Job, JobState, NewJob
from ..stored.jobs import Jobs
from .message_queue import Message, MessageQueue, Sink

PARSED_ON_LOOP_BYTES = 16 << 10
"""A larger message is parsed in a thread."""
EXTENSIONS = 3
"""How many times per visibility timeout the timeouts of messages in progress are renewed."""
RETRY_S = 1.0
"""The first pause after a failure to receive messages. Each further pause is twice as long."""
MAX_RETRY_S = 60.0
BACKLOG_S = 5.0
"""The shortest time between two queries for the number of waiting messages."""
BACKLOG_RETRY_S = 300.0
"""The pause before the next query if a query fails."""
MAX_BACKOFF_S = 900
"""The longest time for which a message whose job failed is hidden before its next delivery."""


class ReceivedMessages:
    """The messages in progress, each with its latest delivery, and their visibility timeouts."""

    def __init__(self, queue: MessageQueue, lease_s: float, log: Callable[[str], None]) -> None:
        """`lease_s` is the visibility timeout."""
        self._queue, self._lease_s, self._log = queue, lease_s, log
        self.latest: dict[str, Message] = {}
        """By message id, the latest delivery of each message that is in progress."""
        self._left: set[str] = set()
        """The ids of messages that are given back to the queue, whose tasks are about to end."""
        self._again: dict[str, Message] = {}
        """By message id, new deliveries of messages in `_left`. A delivery is run after the task of the earlier delivery has ended."""
        self._changed = asyncio.Event()
        """Set when a message was added to or removed from `latest`."""
        self._visibility = asyncio.Lock()
        """Held while visibility timeouts are changed."""

    def add(self, message: Message) -> bool:
        """Add a delivery. Return True if a new task must run it."""
        if message.id in self._left:
            self._again[message.id] = message
            return False
        running = message.id in self.latest
        # If the timeout of a message was not renewed in time, the queue delivers it again. Then only the
        # receipt of the latest delivery can be used to renew the timeout and to delete the message.
        self.latest[message.id] = message
        if not running:
            self._changed.set()
        return not running

    def remove(self, message_id: str) -> Message | None:
        """Remove a message whose task ends. Return a new delivery that has come since the message was given back."""
        del self.latest[message_id]
        self._left.discard(message_id)
        self._changed.set()
        return self._again.pop(message_id, None)

    async def wait_change(self) -> None:
        """Wait until a message is added or removed."""
        self._changed.clear()
        await self._changed.wait()

    async def extend(self) -> None:
        """Renew the visibility timeouts of messages in progress, so that no other consumer receives them."""
        while True:
            while not self.latest:
                await self.wait_change()
            await asyncio.sleep(self._lease_s / EXTENSIONS)
            try:
                async with self._visibility:
                    kept = [one for one in self.latest.values() if one.id not in self._left]
                    failed = await self._queue.extend(kept)
            except Exception as error:  # noqa: BLE001  whatever it is, the function's log has it
                self._log(f"messages in flight could not be extended: {_text_of(error)}")
            else:
                for message_id in set(failed) & set(self.latest):
                    self._log(f"message {message_id} could not be extended: it may be delivered again")

    async def give_back(self, message: Message, delay_s: int) -> None:
        """Let the queue deliver a message again after `delay_s`. Its task ends next."""
        # Mark the message before the release: the queue may deliver it again before it confirms the release. From now
        # on, a delivery counts as new.
        self._left.add(message.id)
        await self.release([self.latest[message.id]], delay_s)

    async def release(self, messages: list[Message], delay_s: int) -> None:
        try:
            # Wait for a running renewal. If the renewal ended after the release, it would hide the messages again.
            async with self._visibility:
                await self._queue.release(messages, delay_s)
        except OutputRefused as error:
            self._log(_text_of(error))
        except BusFailed:
            # The messages become visible when their timeout ends.
            return
        except Exception as error:  # noqa: BLE001  whatever it is, the function's log has it
            self._log(f"messages could not be released: {_text_of(error)}")


class Consumer:
    """The consumer of one event source of one function. `log` writes a line to the function's log."""

    def __init__(
        self, settings: FunctionSettings, source: EventSource, jobs: Jobs, queue: MessageQueue, sink: Sink | None,
        log: Callable[[str], None], on_backlog: Callable[[int], None], access: Access,
    ) -> None:  # fmt: skip
        """`access` is the rule with which `queue` and `sink` were opened. The consumer calls `on_backlog` with the number of messages that run or that it is about to receive."""
        self.source, self.access = source, access
        self._settings, self._jobs = settings, jobs
        self._queue, self._sink = queue, sink
        self._log, self._on_backlog = log, on_backlog
        self._backlog: int | None = None
        self._look_at_s = 0.0
        self.ended: Counter[str] = Counter()
        """The number of messages by outcome: completed, left to the queue, or unsent if their output can never be sent."""
        self._messages = ReceivedMessages(queue, source.lease_s, log)
        self._news: dict[str, asyncio.Event] = {}
        """By message id, an event that is set when the message's job changes or the consumer stops."""
        self._running: set[asyncio.Task[bool]] = set()
        self._last: dict[str, asyncio.Task[bool]] = {}
        """By message group, the task of the latest message. The task is removed if a message of the group fails."""
        self._stopping = False
        self._state: Literal["connecting", "connected", "failing"] = "connecting"
        self._lag_s: float | None = None
        self._last_error = ""
        self._last_error_at: datetime | None = None
        self._tasks: BackgroundTasks
        self._polling: asyncio.Task[None]
        self._extending: asyncio.Task[None]

    def status(self) -> SourceStatus:
        """Return whether the queue can be reached, and how many messages were run."""
        return SourceStatus(
            queue=self.source.address, state=self._state, in_flight=len(self._messages.latest), lag_s=self._lag_s,
            completed=self.ended["completed"], left=self.ended["left"], backlog=self._backlog,
            last_error=self._last_error, last_error_at=self._last_error_at,
        )  # fmt: skip

    def start(self, tasks: BackgroundTasks) -> None:
        self._tasks = tasks
        self._polling = tasks.keep(self._poll, name="source")
        self._extending = tasks.keep(self._messages.extend, name="source_visibility")

    def update(self, settings: FunctionSettings) -> None:
        """Use the settings of a new revision for messages that are received from now on."""
        self._settings = settings

    async def close(self, deadline_s: float) -> None:
        """Stop receiving, and wait up to `deadline_s` seconds until running jobs have ended.

        The other messages are released, so that the queue delivers them again.
        """
        self._stopping = True
        self._polling.cancel()
        for news in self._news.values():
            news.set()
        if self._running:
            await asyncio.wait(self._running, timeout=deadline_s)
        for task in (*self._running, self._extending):
            task.cancel()
        if self._messages.latest:
            await self._messages.release(list(self._messages.latest.values()), 0)
        try:
            await self._queue.close()
            if self._sink is not None:
                await self._sink.close()
        except Exception as error:  # noqa: BLE001  whatever it is, the function's log has it
            self._log(_text_of(error))

    # -- all messages

    async def _poll(self) -> None:
        retry_s = RETRY_S
        while True:
            while (room := self._room()) <= 0:
                await self._messages.wait_change()
            try:
                # The first request does not wait for messages, so that the status soon shows whether the queue answers.
                messages = await self._queue.receive(room, wait=self._state == "connected")
                for message in messages:
                    self._accept(message)
                self._note_received(messages)
                retry_s = RETRY_S
                await self._look_behind(room, len(messages))
            except Exception as error:  # noqa: BLE001  whatever it is, the function's log has it
                self._note_failure(_text_of(error))
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, MAX_RETRY_S)

    def _note_received(self, messages: Sequence[Message]) -> None:
        self._state, self._last_error, self._last_error_at = "connected", "", None
        waited_s = [time.time() - message.sent_s for message in messages if message.received == 1]
        # The age of a message that is delivered again does not show how far the consumer is behind.
        if waited_s or not messages:
            self._lag_s = round(max([0.0, *waited_s[-1:]]), 3)

    async def _look_behind(self, room: int, received: int) -> None:
        """If the queue returned as many messages as requested, query how many more wait, and call `on_backlog`."""
        if not received:
            self._backlog = 0
        now_s = time.monotonic()
        if received < min(room, self._queue.batch) or now_s < self._look_at_s:
            return
        self._look_at_s = now_s + BACKLOG_S
        try:
            self._backlog = await self._queue.depth()
        except BusFailed as error:
            # Go on receiving messages: the credentials may allow all requests except this one.
            self._look_at_s = now_s + BACKLOG_RETRY_S
            self._log(f"the number of waiting messages is not known: {error}")
            return
        self._on_backlog(len(self._messages.latest) + min(self._backlog, max(0, self._room())))

    def _note_failure(self, text: str) -> None:
        # An error that repeats is logged only once.
        if self._state != "failing" or text != self._last_error:
            self._log(text)
        self._state, self._last_error, self._last_error_at = "failing", text, datetime.now(UTC)

    def _room(self) -> int:
        most = self.source.concurrency or self._settings.scale.max * self._settings.concurrency
        return most - len(self._messages.latest)

    def _accept(self, message: Message) -> None:
        if self._messages.add(message):
            task = self._tasks.create_task(self._run(message, self._last.get(message.group)))
            if message.group:
                self._last[message.group] = task
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    # -- one message

    async def _run(self, message: Message, before: asyncio.Task[bool] | None) -> bool:
        """Run a message. Return True if it was deleted. `before` is the task of the previous message in its group."""
        try:
            if before is not None and not await self._may_follow(before):
                await self._messages.give_back(message, 0)
                return False
            return await self._run_job(message)
        except TimeoutError:
            # Kafka has no visibility timeout: it delivers a message again only if the message is given back.
            longest_s = self.source.longest_s
            await self._leave(message, f"its job did not end in {longest_s:.0f} s; left to the queue")
        except Exception as error:  # noqa: BLE001  whatever it is, the function's log has it
            await self._leave(message, f"{_text_of(error)} The message is left to the queue.")
        finally:
            self._news.pop(message.id, None)
            if self._last.get(message.group) is asyncio.current_task():
                del self._last[message.group]
            if (again := self._messages.remove(message.id)) is not None:
                self._accept(again)
        return False

    async def _run_job(self, message: Message) -> bool:
        job = await self._ended_job(message)
        if job.state is JobState.COMPLETED:
            outcome = await self._sent(message, job)
            await self._queue.delete(self._messages.latest[message.id])
            self.ended[outcome] += 1
            return True
        if self._stopping and job.state is JobState.CANCELLED:
            # The job did not run, so the message may be delivered to another consumer immediately.
            self._end_group(message)
            await self._messages.give_back(message, 0)
        else:
            why = f" ({job.error.get('message', '')})" if job.error else ""
            await self._leave(message, f"job {job.id} is {job.state}{why}; left to the queue")
        return False

    async def _sent(self, message: Message, job: Job) -> str:
        """Send the output of a job, and return the outcome of its message."""
        if self._sink is not None:
            try:
                await self._sink.put(message, job)
            except OutputRefused as error:
                text = f"{_text_of(error)} The output was not sent, and stays with job {job.id}."
                self._log(f"message {message.id}: {text}")
                return "unsent"
        return "completed"

    async def _may_follow(self, before: asyncio.Task[bool]) -> bool:
        """Wait until the previous message has ended. Return True if it was deleted: then the next may run."""
        await asyncio.wait({before})
        return not self._stopping and not before.cancelled() and before.result()

    def _end_group(self, message: Message) -> None:
        """Let new messages of the group run without waiting for the messages that are given back to the queue."""
        self._last.pop(message.group, None)

    async def _leave(self, message: Message, why: str) -> None:
        """Log why the message stays in the queue, and hide it for a time that doubles with each delivery."""
        self._end_group(message)
        self._log(f"message {message.id}: {why}")
        self.ended["left"] += 1
        backoff_s = min(MAX_BACKOFF_S, self.source.backoff_s << min(message.received - 1, 16))
        await self._messages.give_back(message, backoff_s)

    async def _ended_job(self, message: Message) -> Job:
        """Submit the message's job, wait until it is final and return it.

        A queued job is cancelled when the consumer stops. Raise TimeoutError after `EventSource.longest_s`.
        """
        job = await self._submit(message)
        with self._jobs.watch(job.id) as news:
            self._news[message.id] = news
            async with asyncio.timeout(self.source.longest_s):
                while True:
                    job = await self._jobs.store.glance(job.function, job.id)
                    if job.state.final:
                        return await self._jobs.store.get(job.function, job.id)
                    if self._stopping and job.state is JobState.IN_QUEUE:
                        return await self._jobs.store.cancel(job.function, job.id)
                    await news.wait()
                    news.clear()

    async def _submit(self, message: Message) -> Job:
        key = f"{self.source.type}:{self.source.scope}:{message.id}"
        given = message.body
        large = len(given) > PARSED_ON_LOOP_BYTES
        given = await asyncio.to_thread(_job_input, given) if large else _job_input(given)
        job, replayed = await self._jobs.submit(self._new_job(message, given, key))
        if replayed and job.state in (JobState.FAILED, JobState.TIMED_OUT):
            return await self._jobs.store.retry(job.function, job.id)
        if replayed and job.state is JobState.CANCELLED:
            # A CANCELLED job cannot be retried, so this delivery is submitted as a new job with another key.
            job, _ = await self._jobs.submit(self._new_job(message, given, f"{key}:{message.received}"))
        return job

    def _new_job(self, message: Message, given: bytes, key: str) -> NewJob:
        traceparent = message.attributes.get("traceparent", "")
        return NewJob.for_function(
            self._settings,
            given,
            # One attempt per delivery: the queue counts deliveries and limits their number.
            max_attempts=1,
            idempotency=key,
            source="queue",
            traceparent=traceparent if TRACEPARENT.fullmatch(traceparent) else "",
            extra={"message": dict(message.facts)} if message.facts else None,
        )


def _job_input(body: bytes) -> bytes:
    """Return the body unchanged if it is JSON, or JSON with values that only Python's parser accepts, such as NaN.
    Otherwise, return it encoded as a JSON string.
    """
    try:
        # Do not parse a message with too many values: the worker refuses it.
        _ = excess(body) or orjson.loads(body)
    except orjson.JSONDecodeError:
        try:
            json.loads(body.decode())
        except RecursionError:
            pass
        except ValueError:
            return orjson.dumps(body.decode("utf-8", "replace"))
    return body


def _text_of(error: Exception) -> str:
    if isinstance(error, PilotflameError):
        return str(error)
    # Only the type is logged, because the text of an unexpected error may quote secrets.
    return f"Unexpected error ({type(error).__name__}); please report it as a bug of Pilotflame."
