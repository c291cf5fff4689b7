"""Keeps the messages of the partitions that are assigned to this member of a consumer group.

The messages either wait or are in progress.
"""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ....foreign_json import is_compact
from ....handlers.contract import NOTHING
from ...jobs.events.message_queue import Message
from .unfinished import Record, RecordPlace, TakenOffsets, WaitingRecords

BUSY_SLICE_S = 0.05
"""The interval for reading new messages while messages wait for earlier messages with the same key."""
MAX_SPAN = 10_000
"""A partition is paused while this member has received this many of its messages, counted from the first unfinished one."""
MAX_WAITING_BYTES = 64 << 20
"""All partitions are paused while the waiting messages have this size."""


LAMBDA = "lambda"
"""The dialect whose handlers get whole records. For other dialects, a job stores no headers and no second copy of
the value. While the dialect is not known, jobs store whole records.
"""
_SENT_TYPES = ("NO_TIMESTAMP_TYPE", "CREATE_TIME", "LOG_APPEND_TIME")


def facts_of(record: Record, *, whole: bool) -> dict[str, Any]:
    """Return a record in the form of AWS's event source mapping. With `whole`, include the headers and the value.

    Omit the value if the job's input has the same bytes.
    """
    place, value = record.place, record.value
    facts: dict[str, Any] = {
        "partition": place.partition, "offset": place.offset,
        "timestamp": record.sent_ms, "timestampType": _SENT_TYPES[record.sent_type],
        **({} if record.key is None else {"key": _base64(record.key)}),
    }  # fmt: skip
    if whole:
        # AWS sends the bytes as signed numbers, because Java's bytes have a sign.
        facts["headers"] = [{name: memoryview(one).cast("b").tolist()} for name, one in record.headers]
        if value is None or not is_compact(value):
            facts["value"] = None if value is None else _base64(value)
    return facts


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


class Deliveries:
    """Keeps each message from its receipt to its end. Any thread may call the methods. Between two calls, this member may get
    or lose partitions.
    """

    def __init__(self, facts: Mapping[str, str] = NOTHING, dialect: Callable[[], str] = str) -> None:
        """`facts` describe the topic. They are added to the facts of each message. `dialect`
        returns the dialect of the function's handler, or "" if it is not known yet.
        """
        self._facts, self._dialect = facts, dialect
        self.cluster = ""
        """The id of the cluster, for the ids of messages. Another cluster may have a copy of the topic, with the same offsets and times."""
        self._lock = threading.RLock()
        self._epochs: dict[int, int] = {}
        """How often each partition was assigned to this member."""
        self._taken: dict[int, TakenOffsets] = {}
        """For each partition of this member, the offsets of the received messages."""
        self._committed: dict[int, int] = {}
        self._waiting = WaitingRecords()
        self._in_progress: dict[str, Record] = {}
        """The messages in progress, by receipt."""
        self._busy: set[str] = set()
        """The groups of the messages in progress."""
        self._freed = threading.Condition(self._lock)
        """Notified when a group is no longer busy."""

    # -- the partitions

    def assign(self, partitions: Collection[int]) -> None:
        with self._lock:
            for one in partitions:
                self._epochs[one] = self._epochs.get(one, 0) + 1
                self._taken[one] = TakenOffsets()
                self._committed.pop(one, None)

    def revoke(self, partitions: Collection[int]) -> None:
        """Forget the messages of partitions that another member gets."""
        with self._lock:
            for one in partitions:
                self._taken.pop(one, None)
                self._waiting.drop(one)
            for receipt, record in list(self._in_progress.items()):
                if record.place.partition in partitions:
                    del self._in_progress[receipt]
                    self._busy.discard(record.group)

    def paused(self) -> set[int]:
        """Return the partitions to pause: all if too many bytes wait, else those that have reached MAX_SPAN."""
        with self._lock:
            full = self._waiting.size_bytes >= MAX_WAITING_BYTES
            return {part for part, taken in self._taken.items() if full or taken.span >= MAX_SPAN}

    def uncommitted(self) -> dict[int, int]:
        """Return, by partition, the offsets to commit: the offset of the first unfinished message, if it is larger than the
        committed offset.
        """
        with self._lock:
            resume = {part: taken.resume_at for part, taken in self._taken.items()}
            return {
                part: offset
                for part, offset in resume.items()
                if offset is not None and offset > self._committed.get(part, -1)
            }

    def note_committed(self, offsets: Mapping[int, int]) -> None:
        with self._lock:
            self._committed |= {part: offset for part, offset in offsets.items() if part in self._taken}

    # -- the messages

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def add(self, raw: Any) -> None:
        """Add a received message to the waiting messages. Ignore it if this member has lost its partition."""
        with self._lock:
            if (taken := self._taken.get(raw.partition())) is not None:
                place = RecordPlace(raw.partition(), raw.offset(), self._epochs[raw.partition()])
                taken.take(place.offset)
                headers = tuple((name, value or b"") for name, value in raw.headers() or ())
                sent_type, sent_ms = raw.timestamp()
                record = Record(place, raw.key(), raw.value(), headers, sent_ms, sent_type)
                self._waiting.add(record, 0.0)

    def take(self, limit: int) -> list[Message]:
        """Return up to `limit` messages that may be delivered now. They are in progress from now on."""
        with self._lock:
            return [
                self._deliver(record) for record in self._waiting.take(limit, time.monotonic(), self._busy)
            ]

    def poll_s(self, timeout_s: float) -> float:
        """Return the seconds to wait for new messages: at most `timeout_s`, and not after the next waiting message is due.

        If messages wait while groups are busy, first wait up to BUSY_SLICE_S for the end of a busy group. Then return 0.
        """
        with self._lock:
            due_s = self._waiting.due_s(self._busy) - time.monotonic()
            timeout_s = max(0.0, min(timeout_s, due_s))
            if not self._busy or not len(self._waiting):
                return timeout_s
            # A waiting message may become free sooner than a new message arrives.
            self._freed.wait(min(timeout_s, BUSY_SLICE_S))
            return 0.0

    def _deliver(self, record: Record) -> Message:
        place = record.place
        receipt = f"{place.epoch}/{place.partition}/{place.offset}"
        self._in_progress[receipt] = record
        if record.group:
            self._busy.add(record.group)
        attributes = {name: value.decode("utf-8", "replace") for name, value in record.headers}
        # The id includes the time, because a topic that was deleted and created again has the same offsets.
        message_id = f"{self.cluster}/{place.partition}/{place.offset}/{record.sent_ms}"
        return Message(
            message_id,
            receipt,
            record.body,
            record.deliveries,
            attributes,
            record.sent_ms / 1000,
            record.group,
            {**self._facts, **facts_of(record, whole=self._dialect() in ("", LAMBDA))},
        )

    def record_of(self, message: Message) -> Record | None:
        """Return the record of a message in progress; None if another member has its partition."""
        with self._lock:
            return self._in_progress.get(message.receipt)

    def finish(self, message: Message) -> bool:
        """End a message for good. Return False if another member has its partition, and receives the message again."""
        with self._lock:
            if (record := self._end(message)) is None:
                return False
            self._taken[record.place.partition].finish(record.place.offset)
            return True

    def again(self, message: Message, delay_s: float, *, failed: bool) -> None:
        """Let a message in progress wait again. Count another delivery only if the message has `failed`."""
        with self._lock:
            if (record := self._end(message)) is not None:
                self._waiting.add(record.again() if failed else record, time.monotonic() + delay_s)

    def _end(self, message: Message) -> Record | None:
        record = self._in_progress.pop(message.receipt, None)
        if record is None:
            return None
        self._busy.discard(record.group)
        self._freed.notify_all()
        place = record.place
        ours = place.partition in self._taken and self._epochs.get(place.partition) == place.epoch
        return record if ours else None
