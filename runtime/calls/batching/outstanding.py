"""Records the items that were sent to one worker and have not ended, with their order and their batches."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Generic, NamedTuple, Protocol, TypeVar

from .latency_curve import LatencyCurve


class SentItem(Protocol):
    @property
    def sent_s(self) -> float: ...


T = TypeVar("T", bound=SentItem)


class BatchEnd(NamedTuple):
    """An ended batch: its number of items, their total cost, and how long it ran (0 if unknown)."""

    size: int
    cost: float
    seconds: float


@dataclass(eq=False, slots=True)
class _SentBatch:
    """A batch that was sent to a worker."""

    channels: set[int]
    """The channels of the items that have not ended."""
    size: int
    started_s: float = 0.0
    """When the batch started; 0 while all slots of the worker are busy with earlier batches."""
    called_s: float = 0.0
    """When its present handler call started. If a call fails or is too large, the batch is split into several calls."""
    _cost: float = 0.0
    _known: int = 0

    def remove(self, channel: int, cost: float) -> None:
        """Remove an item that has ended. `cost` is 0 if the item failed, because its cost is unknown then."""
        self.channels.discard(channel)
        self._cost += cost
        self._known += cost > 0

    def end(self, now_s: float) -> BatchEnd:
        """Return the totals of the batch. An item of unknown cost counts with the mean cost of the other items."""
        seconds = now_s - self.started_s if self.started_s and self._cost else 0.0
        return BatchEnd(self.size, self._cost * self.size / max(1, self._known), seconds)


class Outstanding(Generic[T]):
    """The items that were sent to one worker and have not ended. The worker runs `slots` items, or batches if `batching`, at a time."""

    def __init__(self, slots: int = 1, *, batching: bool = False) -> None:
        self.calls: dict[int, T] = {}
        self.slots = slots
        self.batching = batching
        self.busy_s = 0.0
        self._busy_since_s = 0.0
        # The sum of the times at which items were added, minus the sum of the times at which items were removed. `load_s`
        # computes from it the time that all items have spent at the worker.
        self._added_s = 0.0
        self._batches: list[_SentBatch] = []
        self._batch_of: dict[int, _SentBatch] = {}
        self._last_channel = 0
        self.newest_start_s = 0.0
        """When the worker last started an item or a batch."""
        # `_waiting` has the items without a batch that wait at the worker for a slot, oldest first. `_started_late` has
        # the start times of the items that waited and run now. Every other item started when it was sent.
        self._waiting: dict[int, None] = {}
        self._started_late: dict[int, float] = {}

    @property
    def load(self) -> int:
        """The number of items, or of batches if `batching`."""
        return len(self._batches) if self.batching else len(self.calls)

    @property
    def largest(self) -> int:
        """The size of the largest running batch. All slots must be busy."""
        return max(batch.size for batch in self._batches[: self.slots]) if self.batching else 1

    def resize(self, slots: int, now_s: float) -> None:
        """Set the number of slots. The oldest waiting items or batches start in the new slots."""
        self.slots = slots
        for batch in self._batches[:slots]:
            self._start(batch, now_s)
        self._fill_slots(now_s)

    def add(self, item: T, now_s: float) -> int:
        """Add an item that is in no batch, and return its channel."""
        channel = self._add(item, now_s)
        if len(self.calls) > self.slots:
            self._waiting[channel] = None
        else:
            self.newest_start_s = now_s
        return channel

    def _add(self, item: T, now_s: float) -> int:
        if not self.calls:
            self._busy_since_s = now_s
        self._added_s += now_s
        self._last_channel += 1
        self.calls[self._last_channel] = item
        return self._last_channel

    def add_batch(self, items: list[T], now_s: float) -> list[int]:
        """Add items that run together in one batch, and return their channels in the same order."""
        channels = [self._add(item, now_s) for item in items]
        batch = _SentBatch(set(channels), len(channels))
        if len(self._batches) < self.slots:
            self._start(batch, now_s)
        self._batches.append(batch)
        self._batch_of.update(dict.fromkeys(channels, batch))
        return channels

    def remove(self, channel: int, now_s: float, cost: float = 1.0) -> tuple[T | None, BatchEnd | None]:
        """Remove an item and return it; None if it is not here. Its `cost` is 0 if it failed.

        Also return a BatchEnd if all items of its batch have ended now.
        """
        item = self.calls.pop(channel, None)
        if self._waiting:
            self._waiting.pop(channel, None)
            self._fill_slots(now_s)
        if self._started_late:
            self._started_late.pop(channel, None)
        if item is not None:
            self._added_s -= now_s
            if not self.calls:
                self.busy_s += now_s - self._busy_since_s
        batch = self._batch_of.pop(channel, None) if self.batching else None
        if batch is None:
            return item, None
        batch.remove(channel, cost)
        if batch.channels:
            return item, None
        self._batches.remove(batch)
        if len(self._batches) >= self.slots:
            self._start(self._batches[self.slots - 1], now_s)
        return item, batch.end(now_s)

    def _start(self, batch: _SentBatch, now_s: float) -> None:
        """Start a batch, unless it has started before."""
        if not batch.started_s:
            batch.started_s = batch.called_s = self.newest_start_s = now_s

    def _fill_slots(self, now_s: float) -> None:
        """Let the oldest waiting items without a batch start in free slots."""
        while self._waiting and len(self.calls) - len(self._waiting) < self.slots:
            channel = next(iter(self._waiting))
            del self._waiting[channel]
            self._started_late[channel] = self.newest_start_s = now_s

    def split(self, channel: int, now_s: float) -> list[T]:
        """Record that the worker starts another handler call for the batch of `channel`. Return the items that have not ended."""
        if (batch := self._batch_of.get(channel)) is not None:
            batch.called_s = now_s
        return list(self.batch_of(channel).values())

    def running(self) -> set[int]:
        """Return the channels that the worker may have started: the channels of the oldest items or batches."""
        if not self.batching:
            return self.calls.keys() - self._waiting.keys()
        return {channel for batch in self._batches[: self.slots] for channel in batch.channels}

    def started_s(self, item: T) -> float | None:
        """Return when the present handler call for an item started; None if the item waits for a slot, or has ended."""
        if (channel := self.channel_of(item)) is None or channel in self._waiting:
            return None
        if (batch := self._batch_of.get(channel)) is not None:
            return batch.called_s or None
        return self._started_late.get(channel, item.sent_s)

    def batch_of(self, channel: int) -> dict[int, T]:
        """Return the items of the batch of `channel` that have not ended, by channel."""
        batch = self._batch_of.get(channel)
        channels = batch.channels if batch is not None else {channel} & self.calls.keys()
        return {one: self.calls[one] for one in channels}

    def channel_of(self, item: T) -> int | None:
        return next((channel for channel, sent in self.calls.items() if sent is item), None)

    def clear(self, now_s: float) -> tuple[list[T], list[T]]:
        """Forget all items, because their worker is dead. Return the items that it has not started, and the others."""
        running = self.running()
        unstarted = [item for channel, item in self.calls.items() if channel not in running]
        started = [item for channel, item in self.calls.items() if channel in running]
        if self.calls:
            self.busy_s += now_s - self._busy_since_s
            self._added_s -= len(self.calls) * now_s
        self.calls.clear()
        self._batches.clear()
        self._batch_of.clear()
        self._waiting.clear()
        self._started_late.clear()
        return unstarted, started

    def total_busy_s(self, now_s: float) -> float:
        """Return the total number of seconds in which the worker had at least one item."""
        return self.busy_s + (now_s - self._busy_since_s if self.calls else 0.0)

    def load_s(self, now_s: float) -> float:
        """Return the seconds that items have spent at the worker so far, summed over all items."""
        return len(self.calls) * now_s - self._added_s

    def overdue(self, before_s: float) -> float:
        """Return the share of the slots whose item or batch was started before `before_s`."""
        if self.batching:
            started = [batch.started_s for batch in self._batches[: self.slots]]
        else:
            oldest = islice(self.calls.items(), self.slots)
            started = [self._started_late.get(channel, item.sent_s) for channel, item in oldest]
        return sum(started_s < before_s for started_s in started) / self.slots

    def expected_at(self, now_s: float, curve: LatencyCurve) -> float:
        """Return when a slot will be free, according to `curve`.

        The time is `now_s` if a slot is free, and in the past if an item or batch takes longer than predicted.
        """
        if self.load < self.slots:
            return now_s
        if not self.batching:
            oldest = next(iter(self.calls.values()))
            return oldest.sent_s + len(self.calls) // self.slots * curve.typical(1)
        running, behind = self._batches[: self.slots], self._batches[self.slots :]
        behind_s = sum(curve.typical(batch.size) for batch in behind)
        return min(batch.started_s + curve.typical(batch.size) for batch in running) + behind_s
