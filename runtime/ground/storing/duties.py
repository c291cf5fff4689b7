"""Decides which duties a gateway has. A duty is work that only one gateway at a time may do, such as sending webhooks in their order."""

from __future__ import annotations

from collections.abc import Callable, Collection


class Duties:
    """The duties of a single gateway, which has all duties. Call the methods on the event loop."""

    shared = False
    """True if other gateways may have some of the duties."""

    def keep(self, name: str, changed: Callable[[bool], object]) -> None:
        """Offer to do the duty `name`. `changed` is called with True when this gateway gets the duty, at once if it has the duty
        already, and with False when it loses the duty. A second call for the duty replaces its `changed`.
        """
        changed(True)

    def drop(self, name: str) -> None:
        """End the offer to do a duty. Its `changed` is not called."""

    def has(self, _name: str) -> bool:
        """Return True while this gateway may do a duty."""
        return True

    def close(self) -> None:
        """Leave all duties to other gateways. No `changed` is called."""


class SharedDuties(Duties):
    """The duties of one of several gateways. `may_act` returns True while the lease of this gateway lasts."""

    shared = True

    def __init__(self, may_act: Callable[[], bool]) -> None:
        self._may_act = may_act
        self._kept: dict[str, Callable[[bool], object]] = {}
        self._mine = frozenset[str]()
        self.names: tuple[str, ...] = ()
        """The duties that this gateway offers to do. Any thread may read this attribute."""

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
        """Set the duties that this gateway has now. Call `changed` of each duty that it has got or lost."""
        before, self._mine = self._mine, frozenset(mine).intersection(self._kept)
        for name in sorted(before ^ self._mine):
            if (changed := self._kept.get(name)) is not None:
                changed(name in self._mine)

    def close(self) -> None:
        self._kept.clear()
        self.names, self._mine = (), frozenset()
