"""Receives the messages of a topic as a member of a consumer group, and commits what is finished.

Kafka keeps one offset for each partition. So an offset is committed only when all messages before it are finished, and a message that has to
be delivered again is kept here. If this process ends, the next member of the group receives all messages from the committed offset on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ....errors import BusFailed
from ...jobs.events.blocking_calls import call_in_thread
from ...jobs.events.message_queue import Identity, Message
from .client import LOG, REQUEST_S, config_of, failed, failures
from .settings import KafkaSource
from .sink import TopicSink, Writer
from .unfinished import Record, RecordPlace, TakenOffsets, WaitingRecords

T = TypeVar("T")
BATCH = 500
"""The most messages of one request."""
POLL_S = 5.0
FIRST_POLL_S = 1.0
SLICE_S = 0.5
"""After this time, a poll looks whether the topic is being closed."""
BUSY_SLICE_S = 0.05
"""While messages wait for others with their key, new messages of other keys are looked for this often."""
MAX_SPAN = 10_000
"""While this number of messages of a partition are not finished, it is not read on."""
MAX_WAITING_BYTES = 64 << 20
"""While the waiting messages have this size, no partition is read on."""
MAX_POLL_S = 300.0


class KafkaTopic:
    """A topic as a message queue. A lock lets one thread at a time poll. All methods raise BusFailed if a request fails."""

    batch = BATCH

    def __init__(self, source: KafkaSource, identity: Identity, writer: Writer) -> None:
        self._source, self._identity, self._writer = source, identity, writer
        self._purpose = f"The topic {source.topic}"
        self._consumer: Any = None
        self._polling = threading.Lock()
        self._committing = threading.Lock()
        # These change with the partitions of this member, and with each message.
        self._state = threading.RLock()
        self._epochs: dict[int, int] = {}
        """How often each partition was assigned to this member."""
        self._taken: dict[int, TakenOffsets] = {}
        """The partitions of this member."""
        self._committed: dict[int, int] = {}
        self._waiting = WaitingRecords()
        self._delivered: dict[str, Record] = {}
        """The messages in progress, by receipt."""
        self._busy: set[str] = set()
        """The groups of the messages in progress."""
        self._freed = threading.Condition(self._state)
        """Notified when a group is no longer busy."""
        self._error: BusFailed | None = None
        self._closing = False

    # -- the queue

    async def receive(self, limit: int, *, wait: bool) -> Sequence[Message]:
        timeout_s = POLL_S if wait else FIRST_POLL_S
        return await self._call(lambda: self._receive(min(limit, BATCH), timeout_s), self._give_back)

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
                with self._state:
                    found = self._waiting.take(limit, time.monotonic(), self._busy)
                    messages = [self._deliver(record) for record in found]
                if messages or time.monotonic() >= until_s:
                    return messages
                self._poll(consumer, limit, until_s - time.monotonic())
        return []

    def _poll(self, consumer: Any, limit: int, timeout_s: float) -> None:
        """Wait for new messages, or until a waiting one may be delivered. Let at most `limit` new messages wait."""
        with self._state:
            due_s = self._waiting.due_s(self._busy) - time.monotonic()
            timeout_s = max(0.0, min(timeout_s, due_s, SLICE_S))
            if self._busy and len(self._waiting):
                # These messages may go on sooner than a new one comes.
                self._freed.wait(min(timeout_s, BUSY_SLICE_S))
                timeout_s = 0.0
        self._pause_long(consumer)
        if (first := consumer.poll(timeout_s)) is not None:
            for raw in (first, *(consumer.consume(limit - 1, 0.0) if limit > 1 else [])):
                self._take(raw)
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _take(self, raw: Any) -> None:
        """Let a new message wait. Remember an error."""
        if (error := raw.error()) is not None:
            self._error = failed(self._purpose, error)
            return
        with self._state:
            if (taken := self._taken.get(raw.partition())) is not None:
                place = RecordPlace(raw.partition(), raw.offset(), self._epochs[raw.partition()])
                taken.take(place.offset)
                headers = tuple(raw.headers() or ())
                record = Record(place, raw.key(), raw.value() or b"null", headers, raw.timestamp()[1])
                self._waiting.add(record, 0.0)

    def _deliver(self, record: Record) -> Message:
        place = record.place
        receipt = f"{place.epoch}/{place.partition}/{place.offset}"
        self._delivered[receipt] = record
        if record.group:
            self._busy.add(record.group)
        attributes = {name: value.decode("utf-8", "replace") for name, value in record.headers}
        # A topic that was made anew has the same offsets again.
        message_id = f"{place.partition}/{place.offset}/{record.sent_ms}"
        return Message(
            message_id,
            receipt,
            record.body,
            record.deliveries,
            attributes,
            record.sent_ms / 1000,
            record.group,
        )

    def _depth(self) -> int:
        with self._polling:
            consumer = self._opened()
            parts = consumer.assignment()
            places = {one.partition: one.offset for one in consumer.position(parts)}
            waiting = 0
            for part in parts:
                low, high = consumer.get_watermark_offsets(part, cached=True)
                waiting += max(0, high - max(low, places.get(part.partition, low)))
        return waiting + len(self._waiting)

    def _stay(self) -> None:
        # If another thread is polling, that is enough.
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
        """Do not read on in partitions with too many unfinished messages, or in any if too much waits."""
        with self._state:
            full = self._waiting.size_bytes >= MAX_WAITING_BYTES
            long = {part for part, taken in self._taken.items() if full or taken.span >= MAX_SPAN}
        parts = consumer.assignment()
        consumer.pause([one for one in parts if one.partition in long])
        consumer.resume([one for one in parts if one.partition not in long])

    def _finish(self, message: Message) -> None:
        with self._state:
            if (record := self._ended(message)) is None:
                # Another member has the partition, and receives the message again.
                return
            self._taken[record.place.partition].finish(record.place.offset)
        self._commit()

    def _commit(self) -> None:
        """Commit all partitions up to their first unfinished message. Calls that wait for the lock have little left to do."""
        with self._committing, failures(self._purpose) as kafka:
            with self._state:
                resume = {part: taken.resume_at for part, taken in self._taken.items()}
                news = {
                    part: offset
                    for part, offset in resume.items()
                    if offset is not None and offset > self._committed.get(part, -1)
                }
            if not news or self._consumer is None:
                return
            topic = self._source.topic
            parts = [kafka.TopicPartition(topic, part, offset) for part, offset in news.items()]
            for one in self._consumer.commit(offsets=parts, asynchronous=False):
                if one.error is not None:
                    raise failed(self._purpose, one.error)
            with self._state:
                self._committed |= {part: offset for part, offset in news.items() if part in self._taken}

    def _release(self, messages: Sequence[Message], delay_s: int) -> None:
        for message in messages:
            with self._state:
                record = self._delivered.get(message.receipt)
                if record is None:
                    continue
                if not (delay_s and self._is_dead(record)):
                    self._ended(message)
                    # Without a delay, the message did not fail: it waited for another one, or the gateway ends.
                    self._wait(record.again() if delay_s else record, delay_s)
                    continue
            self._bury(message, record)

    def _is_dead(self, record: Record) -> bool:
        return bool(self._source.dead_letters) and record.deliveries >= self._source.max_deliveries

    def _wait(self, record: Record, delay_s: float) -> None:
        if self._ours(record.place):
            self._waiting.add(record, time.monotonic() + delay_s)

    def _bury(self, message: Message, record: Record) -> None:
        """Write a message to the topic of dead letters. If that fails, deliver the message again."""
        place, topic = record.place, self._source.dead_letters or ""
        origin = {
            "source-topic": self._source.topic,
            "source-partition": str(place.partition),
            "source-offset": str(place.offset),
            "deliveries": str(record.deliveries),
        }
        headers = [*record.headers, *((name, text.encode()) for name, text in origin.items())]
        try:
            self._writer.write(topic, record.key, record.body, headers)
        except BusFailed:
            with self._state:
                self._ended(message)
                self._wait(record, self._source.backoff_s)
            raise
        self._finish(message)

    def _give_back(self, messages: Sequence[Message]) -> None:
        """Keep the messages of a request whose caller was cancelled."""
        self._release(messages, 0)

    def _ended(self, message: Message) -> Record | None:
        """Return the record of a message that is no longer in progress. Return None if another member has its partition."""
        record = self._delivered.pop(message.receipt, None)
        if record is None:
            return None
        self._busy.discard(record.group)
        self._freed.notify_all()
        return record if self._ours(record.place) else None

    def _ours(self, place: RecordPlace) -> bool:
        return place.partition in self._taken and self._epochs.get(place.partition) == place.epoch

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
            "session.timeout.ms": self._source.session_s * 1000,
            "max.poll.interval.ms": int(MAX_POLL_S * 1000),
            "socket.timeout.ms": int(REQUEST_S * 1000),
            "error_cb": self._on_error,
        }

    def _on_assigned(self, _consumer: Any, parts: Sequence[Any]) -> None:
        with self._state:
            for one in parts:
                self._epochs[one.partition] = self._epochs.get(one.partition, 0) + 1
                self._taken[one.partition] = TakenOffsets()
                self._committed.pop(one.partition, None)

    def _on_revoked(self, _consumer: Any, parts: Sequence[Any]) -> None:
        with self._state:
            for one in parts:
                self._taken.pop(one.partition, None)
                self._waiting.drop(one.partition)
                for receipt, record in list(self._delivered.items()):
                    if record.place.partition == one.partition:
                        del self._delivered[receipt]
                        self._busy.discard(record.group)

    def _on_error(self, error: Any) -> None:
        # The library itself connects again. The status of the source says what it tells.
        self._error = failed(self._purpose, error)

    def _close(self) -> None:
        self._closing = True
        with self._polling, self._committing:
            if self._consumer is not None:
                self._consumer.close()
                self._consumer = None


def open_topic(source: KafkaSource, identity: Identity) -> tuple[KafkaTopic, TopicSink | None]:
    """Return the topic, and the sink if the setting `result` names another topic."""
    writer = Writer(source, identity)
    return KafkaTopic(source, identity, writer), TopicSink(source.result, writer) if source.result else None
