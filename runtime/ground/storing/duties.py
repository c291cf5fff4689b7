"""Says which work a gateway does that only one gateway at a time may do, such as sending webhooks in their order."""

from __future__ import annotations

from collections.abc import Callable, Collection


class Duties:
    """The duties of a gateway that is alone: all of them. Its methods must be called on the event loop."""

    shared = False
    """True if other gateways may have some of them."""

    def keep(self, name: str, changed: Callable[[bool], object]) -> None:
        """Say that this gateway can do a duty. `changed` is called with True when it begins to have it, and with False when it
        has it no more; at once if it has it. If the duty was kept before, the new `changed` replaces the earlier one.
        """
        changed(True)

    def drop(self, name: str) -> None:
        """Say that this gateway can no longer do a duty. Its `changed` is not called."""

    def has(self, _name: str) -> bool:
        """Return True while this gateway may do a duty."""
        return True

    def close(self) -> None:
        """Leave all duties to other gateways. No `changed` is called."""


class SharedDuties(Duties):
    """The duties of one of several gateways. `may_act` returns True while its lease lasts."""

    shared = True

    def __init__(self, may_act: Callable[[], bool]) -> None:
        self._may_act = may_act
        self._kept: dict[str, Callable[[bool], object]] = {}
        self._mine = frozenset[str]()
        self.names: tuple[str, ...] = ()
        """The duties that this gateway can do. Any thread may read it."""

    def keep(self, name: str, changed: Callable[[bool], object]) -> None:
        self._kept[name] = changed
        self.names = (*self._kept,)
        if self.has(name):
            changed(True)

    def drop(self, name: str) -> None:
        self._kept.pop(name, None)
        self.names = (*self._kept,)

    def has(self, name: str) -> bool:
        return name in self._mine and self._may_act()

    def note(self, mine: Collection[str]) -> None:
        """Follow which duties this gateway has now."""
        before, self._mine = self._mine, frozenset(mine).intersection(self._kept)
        for name in sorted(before ^ self._mine):
            if (changed := self._kept.get(name)) is not None:
                changed(name in self._mine)

    def close(self) -> None:
        self._kept.clear()
        self.names, self._mine = (), frozenset()
