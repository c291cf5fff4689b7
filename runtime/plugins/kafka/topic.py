"""Receives the messages of a topic as a member of a consumer group, and commits what is finished.

Kafka keeps one offset for each partition. So an offset is committed only when all messages before it are finished, and this
process keeps each message that it has to deliver again. If this process ends, the next member of the group receives all
messages from the committed offset on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ....errors import BusFailed, OutputRefused
from ...jobs.events.blocking_calls import call_in_thread
from ...jobs.events.message_queue import Identity, Message
from .client import LOG, REQUEST_S, config_of, failed, failures
from .deliveries import Deliveries
from .settings import KafkaSource
from .sink import MISSING, TopicSink, Writer
from .unfinished import Record

T = TypeVar("T")
BATCH = 500
"""The most messages of one request."""
POLL_S = 5.0
FIRST_POLL_S = 1.0
CHECK_S = 5.0
"""How long a deploy waits for the brokers."""
REFUSALS = frozenset({"_AUTHENTICATION", "SASL_AUTHENTICATION_FAILED", "TOPIC_AUTHORIZATION_FAILED", "CLUSTER_AUTHORIZATION_FAILED"})  # fmt: skip
SLICE_S = 0.5
"""The longest single poll. After each poll, `_receive` checks whether the topic is being closed."""
MAX_POLL_S = 300.0
# After this time without a heartbeat, the group gives the partitions of a member to others. Brokers accept 6 s or more, and a pause of
# the network or of this machine for some seconds must not move partitions.
SESSION_S = 10


class KafkaTopic:
    """A topic as a message queue. A lock lets one thread at a time poll. All methods raise BusFailed if a request fails."""

    batch = BATCH

    def __init__(self, source: KafkaSource, identity: Identity, writer: Writer) -> None:
        self._source, self._identity, self._writer = source, identity, writer
        self._purpose = f"The topic {source.topic}"
        self._consumer: Any = None
        self._polling = threading.Lock()
        self._committing = threading.Lock()
        self._deliveries = Deliveries({
            "eventSource": "SelfManagedKafka", "bootstrapServers": ",".join(source.brokers), "topic": source.topic,
        }, identity.dialect)  # fmt: skip
        self._error: BusFailed | None = None
        self._identified = self._closing = False

    # -- the queue

    async def receive(self, limit: int, *, wait: bool) -> Sequence[Message]:
        timeout_s = POLL_S if wait else FIRST_POLL_S
        return await self._call(lambda: self._receive(min(limit, BATCH), timeout_s), self._give_back)

    async def check(self) -> None:
        await self._call(self._check)

    async def depth(self) -> int:
        return await self._call(self._depth)

    async def extend(self, messages: Sequence[Message]) -> Sequence[str]:
        """Poll without receiving, because a member that does not poll leaves its group."""
        await self._call(self._stay)
        return []

    async def delete(self, message: Message) -> None:
        await self._call(lambda: self._finish(message))

    async def release(self, messages: Sequence[Message], delay_s: int) -> None:
        """Deliver messages again after a delay. After too many failures, a message goes to the topic `dead_letters`."""
        await self._call(lambda: self._release(messages, delay_s))

    async def close(self) -> None:
        """Leave the group, so that another member gets the partitions at once."""
        await self._call(self._close)

    async def _call(self, work: Callable[[], T], on_abandoned: Callable[[T], object] | None = None) -> T:
        def run() -> T:
            with failures(self._purpose):
                return work()

        return await call_in_thread(run, on_abandoned)

    # -- in threads

    def _receive(self, limit: int, timeout_s: float) -> list[Message]:
        until_s = time.monotonic() + timeout_s
        with self._polling:
            consumer = self._opened()
            while not self._closing:
                self._identify(consumer)
                messages = self._live(self._deliveries.take(limit))
                if messages or time.monotonic() >= until_s:
                    return messages
                self._poll(consumer, limit, until_s - time.monotonic())
        return []

    def _identify(self, consumer: Any) -> None:
        """Ask for the id of the cluster before the first message is delivered."""
        if not self._identified and self._deliveries.waiting:
            found = consumer.list_topics(self._source.topic, timeout=REQUEST_S)
            self._deliveries.cluster, self._identified = found.cluster_id or "", True

    def _live(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages that may run.

        The other messages have failed too often, and could not be written to the dead letters. Try to write them again.
        """
        live = []
        for message in messages:
            record = self._deliveries.record_of(message)
            if (
                not self._source.dead_letters
                or not record
                or record.deliveries <= self._source.max_deliveries
            ):
                live.append(message)
            elif self._error is not None:
                # An earlier write to the dead letters has failed, or Kafka has reported an error. The next `_poll` raises
                # `_error`. Do not call `_bury` before that, because it would wait for the brokers again.
                self._deliveries.again(message, self._source.backoff_s, failed=True)
            else:
                try:
                    self._bury(message, record)
                except BusFailed as error:
                    self._error = error
        return live

    def _poll(self, consumer: Any, limit: int, timeout_s: float) -> None:
        """Wait for new messages, or until a waiting message may be delivered. Add at most `limit` new messages to the waiting
        messages. Raise the latest error, if there is one.
        """
        timeout_s = self._deliveries.poll_s(min(timeout_s, SLICE_S))
        self._pause_long(consumer)
        if (first := consumer.poll(timeout_s)) is not None:
            for raw in (first, *(consumer.consume(limit - 1, 0.0) if limit > 1 else [])):
                self._take(raw)
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _take(self, raw: Any) -> None:
        """Add a new message to the waiting messages. If `raw` is an error, keep the error until `_poll` raises it."""
        if (error := raw.error()) is not None:
            self._error = failed(self._purpose, error)
            return
        self._deliveries.add(raw)

    def _check(self) -> None:
        errors: list[Any] = []
        with failures(self._purpose) as kafka:
            client = kafka.Consumer(self._config() | {"error_cb": errors.append}, logger=LOG)
            try:
                known = _metadata(kafka, client, self._source.topic, errors)
            finally:
                client.close()
            errors += (
                [] if known is None else [one for one in [known.topics[self._source.topic].error] if one]
            )
        refused = next((one for one in errors if one.name() in REFUSALS), None)
        if refused is not None:
            raise failed(self._purpose, refused)

    def _depth(self) -> int:
        with self._polling:
            consumer = self._opened()
            parts = consumer.assignment()
            places = {one.partition: one.offset for one in consumer.position(parts)}
            waiting = 0
            for part in parts:
                low, high = consumer.get_watermark_offsets(part, cached=True)
                waiting += max(0, high - max(low, places.get(part.partition, low)))
        return waiting + self._deliveries.waiting

    def _stay(self) -> None:
        # If another thread is polling, its poll keeps this member in the group.
        if self._consumer is None or not self._polling.acquire(blocking=False):
            return
        try:
            self._consumer.pause(self._consumer.assignment())
            if (raw := self._consumer.poll(0.0)) is not None:
                self._take(raw)
            self._pause_long(self._consumer)
        finally:
            self._polling.release()

    def _pause_long(self, consumer: Any) -> None:
        """Pause the partitions that `Deliveries.paused` returns, and resume the others."""
        long = self._deliveries.paused()
        parts = consumer.assignment()
        consumer.pause([one for one in parts if one.partition in long])
        consumer.resume([one for one in parts if one.partition not in long])

    def _finish(self, message: Message) -> None:
        if self._deliveries.finish(message):
            self._commit()

    def _commit(self) -> None:
        """Commit all partitions up to their first unfinished message. A call that has waited for
        the lock often finds that the previous call has committed everything.
        """
        with self._committing, failures(self._purpose) as kafka:
            news = self._deliveries.uncommitted()
            if not news or self._consumer is None:
                return
            topic = self._source.topic
            parts = [kafka.TopicPartition(topic, part, offset) for part, offset in news.items()]
            for one in self._consumer.commit(offsets=parts, asynchronous=False):
                if one.error is not None:
                    raise failed(self._purpose, one.error)
            self._deliveries.note_committed(news)

    def _release(self, messages: Sequence[Message], delay_s: int) -> None:
        for message in messages:
            if (record := self._deliveries.record_of(message)) is None:
                continue
            if delay_s and self._source.dead_letters and record.deliveries >= self._source.max_deliveries:
                self._bury(message, record)
            else:
                # Without a delay, the message did not fail: it waited for an earlier message, or the gateway ends.
                self._deliveries.again(message, delay_s, failed=bool(delay_s))

    def _bury(self, message: Message, record: Record) -> None:
        """Write a message to the topic of dead letters. If the write fails, let the message wait, and raise BusFailed.

        If each further write would fail, too, end the message and raise OutputRefused.
        """
        place, topic = record.place, self._source.dead_letters or ""
        origin = {
            "source-topic": self._source.topic,
            "source-partition": str(place.partition),
            "source-offset": str(place.offset),
            "deliveries": str(record.deliveries),
        }
        headers = [*record.headers, *((name, text.encode()) for name, text in origin.items())]
        try:
            self._writer.write(topic, record.key, record.value, headers)
        except OutputRefused as error:
            if error.details.get("code") in MISSING:
                self._deliveries.again(message, self._source.backoff_s, failed=True)
                raise BusFailed(error.message, remedy=error.remedy, details=error.details) from error
            self._finish(message)
            at = f"partition {place.partition}, offset {place.offset}"
            dropped = f"{error.message} Its place in {self._source.topic} is {at}."
            raise OutputRefused(dropped, remedy=error.remedy, details=error.details) from error
        except BusFailed:
            # The message counts as delivered once more, so `_live` does not let its handler run again.
            self._deliveries.again(message, self._source.backoff_s, failed=True)
            raise
        self._finish(message)

    def _give_back(self, messages: Sequence[Message]) -> None:
        """Let the messages of a request wait again, because its caller was cancelled."""
        self._release(messages, 0)

    # -- the client

    def _opened(self) -> Any:
        if self._consumer is None:
            with failures(self._purpose) as kafka:
                self._consumer = kafka.Consumer(self._config(), logger=LOG)
                self._consumer.subscribe(
                    [self._source.topic],
                    on_assign=self._on_assigned,
                    on_revoke=self._on_revoked,
                    on_lost=self._on_revoked,
                )
        return self._consumer

    def _config(self) -> dict[str, Any]:
        return {
            **config_of(self._source, self._identity),
            "group.id": self._source.group,
            "auto.offset.reset": self._source.begin,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "partition.assignment.strategy": "cooperative-sticky",
            "session.timeout.ms": SESSION_S * 1000,
            "max.poll.interval.ms": int(MAX_POLL_S * 1000),
            "socket.timeout.ms": int(REQUEST_S * 1000),
            "error_cb": self._on_error,
        }

    def _on_assigned(self, _consumer: Any, parts: Sequence[Any]) -> None:
        self._deliveries.assign([one.partition for one in parts])

    def _on_revoked(self, _consumer: Any, parts: Sequence[Any]) -> None:
        self._deliveries.revoke([one.partition for one in parts])

    def _on_error(self, error: Any) -> None:
        # The library itself connects again. Keep the error for the next `_poll`, so that the status of the source shows it.
        self._error = failed(self._purpose, error)

    def _close(self) -> None:
        self._closing = True
        with self._polling, self._committing:
            if self._consumer is not None:
                self._consumer.close()
                self._consumer = None


def _metadata(kafka: Any, client: Any, topic: str, found: Sequence[Any]) -> Any:
    """Return the metadata of a topic. The client adds its errors to `found`. Return None once `found` has a refusal,
    or after CHECK_S.
    """
    until_s = time.monotonic() + CHECK_S
    while time.monotonic() < until_s and not any(one.name() in REFUSALS for one in found):
        try:
            return client.list_topics(topic, timeout=SLICE_S)
        except kafka.KafkaException:
            # `poll` calls `error_cb`, which adds the cause to `found`.
            client.poll(0.0)
    return None


def open_topic(source: KafkaSource, identity: Identity) -> tuple[KafkaTopic, TopicSink | None]:
    """Return the topic, and the sink if the setting `result` names another topic."""
    writer = Writer(source, identity)
    return KafkaTopic(source, identity, writer), TopicSink(source.result, writer) if source.result else None
