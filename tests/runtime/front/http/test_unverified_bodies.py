"""Places of unverified bodies: a body that does not arrive loses its place, and addresses take turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
from pilotflame.runtime.front.http import unverified_bodies
from pilotflame.runtime.front.http.unverified_bodies import LEAST_BYTES, PlaceLost, UnverifiedBodies

WAIT_S = 20.0
LOOK_S = 0.02


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unverified_bodies, "LOOK_S", LOOK_S)


class Caller:
    """A request that keeps its place until `done`. When it gets the place, it appends its name to `order`."""

    def __init__(
        self, bodies: UnverifiedBodies, order: list[str], name: str, *, key: str = "k", address: str = "evil",
        received: Callable[[], int | None] = lambda: 0, timeout_s: float = WAIT_S,
    ) -> None:  # fmt: skip
        self.done = asyncio.Event()
        self._order, self._name = order, name
        self._place = bodies.place(key, address, received, timeout_s)
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> str:
        try:
            async with self._place:
                self._order.append(self._name)
                await self.done.wait()
        except PlaceLost:
            return "lost"
        return "read"


def growing() -> Callable[[], int]:
    sizes: Iterator[int] = iter(range(0, 1 << 40, LEAST_BYTES))
    return lambda: next(sizes)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_an_address_leaves_the_last_place_to_another_one() -> None:
    bodies, order = UnverifiedBodies(places=3, of_key=3), list[str]()
    evil = [Caller(bodies, order, f"evil-{number}", received=growing()) for number in range(5)]
    await settle()
    own = Caller(bodies, order, "own", address="own", received=growing())
    await settle()
    assert order == ["evil-0", "evil-1", "own"]
    for caller in (own, *evil):
        caller.done.set()
    assert {await caller.task for caller in evil} == {"read"}


async def test_a_body_that_does_not_arrive_gives_its_place_to_the_newest_request() -> None:
    bodies, order = UnverifiedBodies(places=8, of_key=2), list[str]()
    stuck = [Caller(bodies, order, f"stuck-{number}") for number in range(4)]
    await settle()
    own = Caller(bodies, order, "own", received=growing())
    assert await asyncio.wait_for(stuck[0].task, WAIT_S) == "lost"
    await settle()
    assert order == ["stuck-0", "own"]
    own.done.set()
    assert await own.task == "read"
    for caller in stuck[1:]:
        caller.task.cancel()
    await asyncio.wait([caller.task for caller in stuck])


@pytest.mark.parametrize("received", [growing, lambda: lambda: None])
async def test_a_body_that_arrives_or_has_arrived_keeps_its_place(
    received: Callable[[], Callable[[], int | None]],
) -> None:
    bodies, order = UnverifiedBodies(places=2, of_key=1), list[str]()
    first = Caller(bodies, order, "first", received=received())
    late = Caller(bodies, order, "late", timeout_s=10 * LOOK_S)
    assert await late.task == "lost"
    first.done.set()
    assert await first.task == "read"
    assert order == ["first"]


async def test_nobody_loses_a_place_that_nobody_needs() -> None:
    bodies, order = UnverifiedBodies(places=8, of_key=2), list[str]()
    stuck = Caller(bodies, order, "stuck")
    others = [
        Caller(bodies, order, f"other-{number}", key="other", received=growing()) for number in range(3)
    ]
    await asyncio.sleep(5 * LOOK_S)
    assert not stuck.task.done()
    for caller in (stuck, *others):
        caller.done.set()
    assert await stuck.task == "read"


async def test_addresses_take_turns() -> None:
    bodies, order = UnverifiedBodies(places=2, of_key=2), list[str]()
    first = Caller(bodies, order, "first", address="x", received=growing())
    await settle()
    waiting = [
        Caller(bodies, order, f"{address}-{number}", address=address, received=growing())
        for address in ("a", "b")
        for number in range(2)
    ]
    await settle()
    for caller in (*waiting, first):
        caller.done.set()
    await asyncio.wait([caller.task for caller in (first, *waiting)])
    assert [name[0] for name in order[1:]] == ["a", "b", "a", "b"]


async def test_a_request_whose_key_has_no_room_does_not_stop_others_of_its_address() -> None:
    bodies, order = UnverifiedBodies(places=9, of_key=2), list[str]()
    first = Caller(bodies, order, "x-0", key="x", received=growing())
    waits = Caller(bodies, order, "x-1", key="x", received=growing())
    other = Caller(bodies, order, "y-0", key="y", received=growing())
    await settle()
    assert order == ["x-0", "y-0"]
    for caller in (first, waits, other):
        caller.done.set()
    assert {await caller.task for caller in (first, waits, other)} == {"read"}


async def test_the_oldest_of_the_address_with_the_most_is_refused_if_too_many_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unverified_bodies, "MOST_WAITING", 3)
    bodies, order = UnverifiedBodies(places=1, of_key=1), list[str]()
    callers = [
        Caller(bodies, order, f"{number}", address=f"2001:db8::{number}", received=growing())
        for number in range(4)
    ]
    own = Caller(bodies, order, "own", address="192.0.2.1", received=growing())
    assert await asyncio.wait_for(callers[1].task, WAIT_S) == "lost"
    for caller in (*callers, own):
        caller.done.set()
    assert await own.task == "read"
    assert [await caller.task for caller in callers] == ["read", "lost", "read", "read"]
