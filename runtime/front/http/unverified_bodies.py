"""Limits the bodies that are in memory although their signatures are not verified yet.

A signature of AWS covers the body, so the body is read first. Anyone can name the key of another tenant in a signature.
So only a few requests at a time get a place for their body in memory, with these rules:

- The last free place of each key, and the last free place of all, are for addresses that have no place.
- While a request waits, a body that has stopped arriving loses its place.
- Waiting addresses take turns. Among the requests of an address, the newest is first: if one caller fills the queue, the
  older requests are mostly from this caller.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from ..listening.origins import network_of

PLACES, PLACES_OF_KEY = 16, 4
LOOK_S = 0.5
"""While a request waits, check at this interval whether the bodies with places still arrive."""
MOST_WAITING = 256
"""If more requests wait, refuse the oldest request of the address with the most waiting requests."""
LEAST_BYTES = 8 << 10
"""If fewer bytes of a body arrive between two checks, the body has stopped arriving."""


class PlaceLost(Exception):
    """The request got no place in time, or lost its place to a request that waited."""


@dataclass(eq=False)
class _Body:
    key: str
    address: str
    received: Callable[[], int | None]
    """Returns how many bytes of the body have arrived; None if all bytes have."""
    granted: asyncio.Future[None]
    timeout: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))
    seen: int = -1
    """What `received` returned at the latest check; -1 before the first check."""

    def arrives(self) -> bool:
        """Return True if enough of the body has arrived since the last call."""
        if (received := self.received()) is None:
            return True
        seen, self.seen = self.seen, received
        return seen < 0 or received - seen >= LEAST_BYTES


class UnverifiedBodies:
    """The requests whose bodies have a place, and the requests that wait for one."""

    def __init__(self, places: int = PLACES, of_key: int = PLACES_OF_KEY) -> None:
        self._places, self._places_of_key = places, of_key
        self._held: list[_Body] = []
        self._waiting: list[_Body] = []
        self._last_address = ""
        self._look: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def place(
        self, key: str, address: str, received: Callable[[], int | None], timeout_s: float
    ) -> AsyncIterator[None]:
        """Wait for a place, and keep it during the block. Raise PlaceLost after `timeout_s`, or if the place is lost."""
        body = _Body(key, network_of(address), received, asyncio.get_running_loop().create_future())
        self._waiting.append(body)
        self._grant()
        if len(self._waiting) > MOST_WAITING:
            self._refuse_oldest()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await body.granted
            if body not in self._held:
                raise PlaceLost
            try:
                async with body.timeout:
                    yield
            except TimeoutError:
                if body.timeout.expired():
                    raise PlaceLost from None
                raise
        finally:
            self._leave(body)

    def _leave(self, body: _Body) -> None:
        for bodies in (self._held, self._waiting):
            with suppress(ValueError):
                bodies.remove(body)
        self._grant()

    def _grant(self) -> None:
        """Give free places to requests that wait. If requests still wait, check the bodies later."""
        while (body := next(iter(self._in_turn()), None)) is not None:
            self._waiting.remove(body)
            self._held.append(body)
            self._last_address = body.address
            if not body.granted.done():
                body.granted.set_result(None)
        if self._waiting and self._look is None:
            self._look = asyncio.get_running_loop().call_later(LOOK_S, self._look_at_bodies)

    def _in_turn(self) -> list[_Body]:
        """Return the requests that can get a place: the newest request of each address. Begin with the address after
        the address that got the last place.
        """
        newest = {body.address: body for body in self._waiting if self._has_room(body)}
        addresses = sorted(newest)
        first = sum(address <= self._last_address for address in addresses)
        return [newest[address] for address in (*addresses[first:], *addresses[:first])]

    def _has_room(self, body: _Body) -> bool:
        return self._key_has_room(body) and self._fits(body, self._held, self._places)

    def _key_has_room(self, body: _Body) -> bool:
        return self._fits(body, [one for one in self._held if one.key == body.key], self._places_of_key)

    def _fits(self, body: _Body, held: list[_Body], most: int) -> bool:
        return len(held) < most - any(one.address == body.address for one in held)

    def _refuse_oldest(self) -> None:
        ((address, _),) = Counter(one.address for one in self._waiting).most_common(1)
        body = next(one for one in self._waiting if one.address == address)
        self._waiting.remove(body)
        if not body.granted.done():
            body.granted.set_exception(PlaceLost())

    def _look_at_bodies(self) -> None:
        self._look = None
        stalled = [body for body in self._held if not body.arrives()]
        keys = {body.key for body in self._waiting if not self._key_has_room(body)}
        full = any(body.key not in keys for body in self._waiting)
        for body in stalled:
            if full or body.key in keys:
                # The block of `place` ends, and `_leave` gives the place to another request.
                body.timeout.reschedule(0.0)
        self._grant()
