"""Keeps the unfinished messages of partitions: the offset up to which all messages are finished, and the waiting messages.

A message waits while an earlier message with the same key is in progress, and after it has failed. Kafka itself cannot
keep single messages back: a consumer can only go back to an offset.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import NamedTuple


class RecordPlace(NamedTuple):
    """The place of a message. `epoch` counts the times that the partition was assigned to this consumer."""

    partition: int
    offset: int
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Record:
    """A message, and how often it was delivered."""

    place: RecordPlace
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...]
    sent_ms: int
    sent_type: int = 1
    """The origin of `sent_ms`: 1 is the producer, 2 the broker, 0 unknown."""
    deliveries: int = 1

    @property
    def group(self) -> str:
        """A group is all messages of a partition with the same key. They run one after the other. "" for a message
        without a key.
        """
        return "" if self.key is None else f"{self.place.partition}:{self.key.hex()}"

    @property
    def body(self) -> bytes:
        return self.value or b"null"

    def again(self) -> Record:
        return replace(self, deliveries=self.deliveries + 1)


class WaitingRecords:
    """The waiting records, by group. The records of a group keep their order, even if a later record is due first."""

    def __init__(self) -> None:
        self._groups: dict[str, list[tuple[RecordPlace, float, Record]]] = {}
        """For each group, a heap. A record without a key has a group of its own."""
        self._count = self.size_bytes = 0
        """`size_bytes` is the size of all bodies."""

    def __len__(self) -> int:
        return self._count

    def add(self, record: Record, due_s: float) -> None:
        """Add a record. It is delivered at `due_s` at the earliest, and after all earlier waiting records of its group."""
        heap = self._groups.setdefault(record.group or f"{record.place}", [])
        heapq.heappush(heap, (record.place, due_s, record))
        self._count += 1
        self.size_bytes += len(record.body)

    def take(self, limit: int, now_s: float, busy: Collection[str]) -> list[Record]:
        """Remove and return up to `limit` records that are due, one of each group. The groups in `busy` have to wait."""
        ready = [
            (heap[0][0], group)
            for group, heap in self._groups.items()
            if group not in busy and heap[0][1] <= now_s
        ]
        return [self._pop(group) for _, group in heapq.nsmallest(limit, ready)]

    def due_s(self, busy: Collection[str]) -> float:
        """Return when the first record of the groups that are not busy is due; infinity if there is no such record."""
        heads = (heap[0][1] for group, heap in self._groups.items() if group not in busy)
        return min(heads, default=math.inf)

    def drop(self, partition: int) -> None:
        """Forget the records of a partition, which another consumer has now."""
        for group, heap in list(self._groups.items()):
            if heap[0][0].partition == partition:
                for _ in range(len(heap)):
                    self._pop(group)

    def _pop(self, group: str) -> Record:
        heap = self._groups[group]
        record = heapq.heappop(heap)[2]
        if not heap:
            del self._groups[group]
        self._count -= 1
        self.size_bytes -= len(record.body)
        return record


class TakenOffsets:
    """The offsets of the received messages of one partition, and which of these messages are finished."""

    def __init__(self) -> None:
        self._open: list[int] = []
        """A heap. Offsets in `_finished` stay until they are at its top."""
        self._finished: set[int] = set()
        self._next: int | None = None

    def take(self, offset: int) -> None:
        """Note that a message was received. Offsets come in rising order; some may be missing."""
        heapq.heappush(self._open, offset)
        self._next = offset + 1

    def finish(self, offset: int) -> None:
        """Note that a taken message is finished."""
        self._finished.add(offset)
        while self._open and self._open[0] in self._finished:
            self._finished.discard(heapq.heappop(self._open))

    @property
    def resume_at(self) -> int | None:
        """The offset of the first message that is not finished, where another consumer has to begin. None if nothing was taken."""
        return self._open[0] if self._open else self._next

    @property
    def span(self) -> int:
        """The number of messages that another consumer would receive again."""
        return len(self._open)
