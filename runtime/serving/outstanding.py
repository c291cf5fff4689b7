"""The given: what one worker was sent and has not answered, in groups that run together, in order."""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

from ..batching.latency_curve import LatencyCurve
from .invocation import Invocation


class SentGroup:
    """Invocations that run together, by their channels."""

    __slots__ = ("begun_s", "channels", "cost", "known", "size")

    def __init__(self, channels: set[int], begun_s: float) -> None:
        self.channels = channels
        self.size = len(channels)
        self.begun_s = begun_s
        """Since when it runs; 0 while another group is before it."""
        self.cost = 0.0
        self.known = 0
        """Of how many of them the cost is known, which is not said of those that failed."""


class GroupEnd(NamedTuple):
    """A group of which all are answered: how many there were, their cost, and the seconds it took."""

    size: int
    cost: float
    seconds: float


class Outstanding:
    """Singles (a plain handler's) run `slots` at a time, groups (a batch handler's) one in each of its lanes."""

    def __init__(self) -> None:
        self.calls: dict[int, Invocation] = {}
        self.slots = 1
        self.batching = False
        self.busy_s = 0.0
        self._busy_since_s = 0.0
        self._groups: list[SentGroup] = []
        self._group_of: dict[int, SentGroup] = {}
        self._next_channel = 0
        self._taken_s = 0.0

    def __len__(self) -> int:
        return len(self.calls)

    @property
    def groups(self) -> int:
        return len(self._groups)

    def add(self, invocations: list[Invocation], now_s: float) -> list[int]:
        """Their channels, in order."""
        if not self.calls:
            self._busy_since_s = now_s
        first = self._next_channel + 1
        self._next_channel += len(invocations)
        channels = list(range(first, self._next_channel + 1))
        self.calls.update(zip(channels, invocations, strict=True))
        if self.batching:
            group = SentGroup(set(channels), now_s if len(self._groups) < self.slots else 0.0)
            self._groups.append(group)
            self._group_of.update(dict.fromkeys(channels, group))
        return channels

    def add_single(self, invocation: Invocation, now_s: float) -> int:
        """As `add`, of a handler that takes no batch: the shortest way."""
        if not self.calls:
            self._busy_since_s = now_s
        self._next_channel += 1
        self.calls[self._next_channel] = invocation
        return self._next_channel

    def take(
        self, channel: int, now_s: float, cost: float = 1.0
    ) -> tuple[Invocation | None, GroupEnd | None]:
        """Answered, or failed or given back (0: its cost is not known): the invocation, and its group if that has ended with it."""
        invocation = self.calls.pop(channel, None)
        self._taken_s = now_s
        if invocation is not None and not self.calls:
            self.busy_s += now_s - self._busy_since_s
        group = self._group_of.pop(channel, None) if self.batching else None
        if group is None:
            return invocation, None
        group.channels.discard(channel)
        group.cost += cost
        group.known += cost > 0
        if group.channels:
            return invocation, None
        self._groups.remove(group)
        if len(self._groups) >= self.slots and not (follower := self._groups[self.slots - 1]).begun_s:
            follower.begun_s = now_s
        seconds = now_s - group.begun_s if group.begun_s and group.cost else 0.0
        return invocation, GroupEnd(group.size, group.cost * group.size / max(1, group.known), seconds)

    def running(self) -> set[int]:
        """The channels that the worker has started, or may have: the oldest ones."""
        if not self.batching:
            return set(islice(self.calls, self.slots))
        return {channel for group in self._groups[: self.slots] for channel in group.channels}

    def began_s(self, channel: int) -> float | None:
        """Since when the worker runs it, as far as is known: not before. None while it is behind another."""
        if channel not in self.running():
            return None
        if (group := self._group_of.get(channel)) is not None:
            return group.begun_s
        sent_s = self.calls[channel].timeline.sent_s
        return max(sent_s, self._taken_s) if self.slots == 1 else sent_s

    def together(self, channel: int) -> set[int]:
        """The channels that run with this one, itself among them."""
        group = self._group_of.get(channel)
        return set(group.channels) if group is not None else {channel}

    def beside(self, channel: int) -> list[Invocation]:
        """What of its group is not answered yet."""
        return [self.calls[other] for other in self.together(channel) if other in self.calls]

    def channel_of(self, invocation: Invocation) -> int | None:
        return next((channel for channel, held in self.calls.items() if held is invocation), None)

    def clear(self, now_s: float) -> None:
        """Nothing of it will be answered any more."""
        if self.calls:
            self.busy_s += now_s - self._busy_since_s
        self.calls.clear()
        self._groups.clear()
        self._group_of.clear()

    def working_s(self, now_s: float) -> float:
        """For how long it has had something to do."""
        return self.busy_s + (now_s - self._busy_since_s if self.calls else 0.0)

    def free_at(self, now_s: float, curve: LatencyCurve) -> float:
        """When a lane will be free, as far as the curve tells: now, if one is, or should be."""
        return max(now_s, self.expected_at(now_s, curve))

    def expected_at(self, now_s: float, curve: LatencyCurve) -> float:
        """The same, but in the past if what runs should have ended by now."""
        if self.batching:
            return self._group_expected_at(now_s, curve)
        if len(self.calls) < self.slots:
            return now_s
        oldest = next(iter(self.calls.values()))
        return oldest.timeline.sent_s + len(self.calls) // self.slots * curve.typical(1)

    def _group_expected_at(self, now_s: float, curve: LatencyCurve) -> float:
        running, behind = self._groups[: self.slots], self._groups[self.slots :]
        if len(running) < self.slots:
            return now_s
        behind_s = sum(curve.typical(group.size) for group in behind)
        return min(group.begun_s + curve.typical(group.size) for group in running) + behind_s
