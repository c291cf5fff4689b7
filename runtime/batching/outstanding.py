"""Outstanding: what one worker was sent and has not finished, by order and batch."""

from __future__ import annotations

from itertools import islice
from typing import Generic, NamedTuple, Protocol, TypeVar

from .latency_curve import LatencyCurve


class Sent(Protocol):
    @property
    def sent_s(self) -> float: ...


T = TypeVar("T", bound=Sent)


class BatchEnd(NamedTuple):
    """A batch that has ended: how many items it had, their cost, and how long it ran."""

    size: int
    cost: float
    seconds: float


class _SentBatch:
    """The channels of invocations that run together."""

    __slots__ = ("_cost", "_known", "channels", "size", "started_s")

    def __init__(self, channels: set[int], started_s: float) -> None:
        self.channels = channels
        self.size = len(channels)
        self.started_s = started_s
        """When it started to run; 0 while another batch is before it."""
        self._cost = 0.0
        self._known = 0

    def start(self, now_s: float) -> None:
        self.started_s = self.started_s or now_s

    def remove(self, channel: int, cost: float) -> None:
        """Take out an item that has ended; `cost` is 0 if it failed, for then its cost is not known."""
        self.channels.discard(channel)
        self._cost += cost
        self._known += cost > 0

    def end(self, now_s: float) -> BatchEnd:
        """Return its totals; items of unknown cost count as much as the mean of the others."""
        seconds = now_s - self.started_s if self.started_s and self._cost else 0.0
        return BatchEnd(self.size, self._cost * self.size / max(1, self._known), seconds)


class Outstanding(Generic[T]):
    """By channel. A worker runs `slots` items at a time or, if `batching`, `slots` batches at a time."""

    def __init__(self, slots: int = 1, *, batching: bool = False) -> None:
        self.calls: dict[int, T] = {}
        self.slots = slots
        self.batching = batching
        self.busy_s = 0.0
        self._busy_since_s = 0.0
        self._batches: list[_SentBatch] = []
        self._batch_of: dict[int, _SentBatch] = {}
        self._last_channel = 0
        self._removed_s = 0.0

    @property
    def batches(self) -> int:
        return len(self._batches)

    def resize(self, slots: int) -> None:
        self.slots = slots

    def add(self, item: T, now_s: float) -> int:
        """Add one item that runs by itself; return its channel."""
        if not self.calls:
            self._busy_since_s = now_s
        self._last_channel += 1
        self.calls[self._last_channel] = item
        return self._last_channel

    def add_batch(self, items: list[T], now_s: float) -> list[int]:
        """Add items that run together; return their channels, in order."""
        channels = [self.add(item, now_s) for item in items]
        batch = _SentBatch(set(channels), now_s if len(self._batches) < self.slots else 0.0)
        self._batches.append(batch)
        self._batch_of.update(dict.fromkeys(channels, batch))
        return channels

    def remove(self, channel: int, now_s: float, cost: float = 1.0) -> tuple[T | None, BatchEnd | None]:
        """Remove an item that has ended, and return it; and its batch if that has ended with it.

        `cost` is 0 if the item failed or was returned unstarted.
        """
        item = self.calls.pop(channel, None)
        self._removed_s = now_s
        if item is not None and not self.calls:
            self.busy_s += now_s - self._busy_since_s
        batch = self._batch_of.pop(channel, None) if self.batching else None
        if batch is None:
            return item, None
        batch.remove(channel, cost)
        if batch.channels:
            return item, None
        self._batches.remove(batch)
        if len(self._batches) >= self.slots:
            self._batches[self.slots - 1].start(now_s)
        return item, batch.end(now_s)

    def running(self) -> set[int]:
        """Return the channels that the worker has started, or may have started: the oldest ones."""
        if not self.batching:
            return set(islice(self.calls, self.slots))
        return {channel for batch in self._batches[: self.slots] for channel in batch.channels}

    def started_s(self, channel: int) -> float | None:
        """Return the earliest time at which an item can have started; None while it is behind another."""
        if channel not in self.running():
            return None
        if (batch := self._batch_of.get(channel)) is not None:
            return batch.started_s
        sent_s = self.calls[channel].sent_s
        return max(sent_s, self._removed_s) if self.slots == 1 else sent_s

    def batch_of(self, channel: int) -> set[int]:
        """Return the channels that run together with this one and have not ended, this one included."""
        batch = self._batch_of.get(channel)
        return set(batch.channels) if batch is not None else {channel}

    def channel_of(self, item: T) -> int | None:
        return next((channel for channel, sent in self.calls.items() if sent is item), None)

    def clear(self, now_s: float) -> None:
        """Forget all items: their worker is gone."""
        if self.calls:
            self.busy_s += now_s - self._busy_since_s
        self.calls.clear()
        self._batches.clear()
        self._batch_of.clear()

    def total_busy_s(self, now_s: float) -> float:
        """Return for how many seconds anything was outstanding."""
        return self.busy_s + (now_s - self._busy_since_s if self.calls else 0.0)

    def free_at(self, now_s: float, curve: LatencyCurve) -> float:
        """Return when the curve predicts a free slot; `now_s` if one is free or overdue."""
        return max(now_s, self.expected_at(now_s, curve))

    def expected_at(self, now_s: float, curve: LatencyCurve) -> float:
        """Return when the curve predicts a free slot; a time in the past if it is overdue."""
        if self.batching:
            return self._batch_expected_at(now_s, curve)
        if len(self.calls) < self.slots:
            return now_s
        oldest = next(iter(self.calls.values()))
        return oldest.sent_s + len(self.calls) // self.slots * curve.typical(1)

    def _batch_expected_at(self, now_s: float, curve: LatencyCurve) -> float:
        running, behind = self._batches[: self.slots], self._batches[self.slots :]
        if len(running) < self.slots:
            return now_s
        behind_s = sum(curve.typical(batch.size) for batch in behind)
        return min(batch.started_s + curve.typical(batch.size) for batch in running) + behind_s
