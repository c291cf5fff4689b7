"""The ledger of GPU memory: random histories of a node whose processes use at most their booked memory."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from pilotflame.runtime.ground.settings.resources import CONTEXT_MB
from pilotflame.runtime.node.scaling.gpu_ledger import REHEARSAL_MB, Booking, GpuLedger
from pilotflame.runtime.node.scaling.placement import Gpu, GpuNeed

ONE = [Gpu("0", 4096)]
NEED = GpuNeed(1, 3000)


def test_a_standby_rehearses_with_what_is_free_and_keeps_less():
    ledger: GpuLedger[Booking] = GpuLedger(ONE)
    ledger.add(Booking({"0": 3000}, {"0": 3000}))
    room = ledger.rehearsal_room(NEED)
    assert room == ({"0": 3000}, {"0": 1096})
    standby = Booking(*room)
    ledger.add(standby)
    assert ledger.rehearsal_room(NEED) is None
    ledger.note_held(standby, {"0": CONTEXT_MB})
    assert ledger.booked == {"0": 3000 + CONTEXT_MB}


def test_a_standby_needs_no_room_beside_itself_to_become_a_worker():
    ledger: GpuLedger[Booking] = GpuLedger(ONE)
    standby = Booking({"0": 4096}, {"0": CONTEXT_MB})
    ledger.add(standby)
    whole = GpuNeed(1, None)
    assert ledger.plan(whole, 1, (), None) is None
    found = ledger.plan(whole, 1, (), standby)
    assert found == [{"0": 4096}]
    ledger.promote(standby, found[0])
    assert ledger.booked == {"0": 4096}


def test_where_its_gpus_are_not_known_yet_a_standby_does_not_rehearse():
    two = [Gpu("0", 4096), Gpu("1", 4096)]
    assert GpuLedger[Booking](two).rehearsal_room(NEED) is None
    assert GpuLedger[Booking](two).rehearsal_room(GpuNeed(2, 3000)) is not None
    # The other GPU is too small for a worker, so the worker's GPU is known.
    assert GpuLedger[Booking]([Gpu("0", 4096), Gpu("1", 2048)]).rehearsal_room(NEED) is not None


@dataclass(eq=False)
class Process(Booking):
    """A worker, parked worker or standby of the model, with the memory that it really uses."""

    need: GpuNeed
    kind: str
    held: Counter[str] = field(default_factory=Counter)


class Node:
    """A node whose processes take and release memory at random, within their bookings."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.gpus = [
            Gpu(f"{chance.choice(('GPU', 'GPU', 'MIG'))}-{number}", chance.randint(REHEARSAL_MB, 20000))
            for number in range(chance.randint(1, 3))
        ]
        self.ledger: GpuLedger[Process] = GpuLedger(self.gpus)
        sizes = (None, *(chance.randint(REHEARSAL_MB, 16000) for _ in range(3)))
        self.needs = [GpuNeed(chance.randint(1, 2), chance.choice(sizes)) for _ in range(4)]
        self.done = Counter[str]()

    def run(self, steps: int) -> None:
        acts = (
            self.start,
            self.rehearse,
            self.rest,
            self.promote,
            self.park,
            self.wake,
            self.end,
            self.give_room,
        )
        for _ in range(steps):
            act = self.chance.choice(acts)
            self.done[act.__name__] += bool(act())
            self.use()
            self.check()

    def check(self) -> None:
        booked, held = self.ledger.booked, Counter[str]()
        for one in self.ledger.bookings:
            held.update(one.held)
        for gpu in self.gpus:
            assert held[gpu.id] <= booked[gpu.id] <= gpu.memory_mb

    def use(self) -> None:
        """Let workers, and standbys in their dry run, take memory. A process takes at most the memory that is booked for it."""
        for one in self.ledger.bookings:
            if one.kind in {"worker", "rehearsing"}:
                one.held = Counter({gpu: self.chance.randint(0, most) for gpu, most in one.holding.items()})

    def pick(self, kind: str) -> Process | None:
        found = [one for one in self.ledger.bookings if one.kind == kind]
        return self.chance.choice(found) if found else None

    def start(self) -> bool:
        need = self.chance.choice(self.needs)
        if (found := self.ledger.plan(need, self.chance.randint(1, 2), (), None)) is None:
            return False
        for holding in found:
            self.ledger.add(Process(holding, holding, need, "worker"))
        return True

    def rehearse(self) -> bool:
        need = self.chance.choice(self.needs)
        if (room := self.ledger.rehearsal_room(need)) is None:
            return False
        self.ledger.add(Process(*room, need, "rehearsing"))
        return True

    def rest(self) -> bool:
        return self._shrink(self.pick("rehearsing"), "standby")

    def park(self) -> bool:
        return self._shrink(self.pick("worker"), "parked")

    def _shrink(self, one: Process | None, kind: str) -> bool:
        if one is None:
            return False
        one.kind = kind
        # A process may release all, a part or none of its memory.
        one.held = Counter({gpu: self.chance.randint(0, size) for gpu, size in one.held.items()})
        self.check()
        self.ledger.note_held(one, dict(one.held))
        return True

    def promote(self) -> bool:
        one = self.pick("standby")
        if one is None or (found := self.ledger.plan(one.need, 1, (), one)) is None:
            return False
        assert found[0].keys() == one.full.keys()
        self.ledger.promote(one, found[0])
        one.kind = "worker"
        return True

    def wake(self) -> bool:
        one = self.pick("parked")
        if one is None or not self.ledger.wake(one):
            return False
        one.kind = "worker"
        return True

    def end(self) -> bool:
        if not self.ledger.bookings:
            return False
        self.ledger.remove(self.chance.choice(self.ledger.bookings))
        return True

    def give_room(self) -> bool:
        """End processes until a new worker fits, and start this worker."""
        need = self.chance.choice(self.needs)
        bookings = self.chance.sample(self.ledger.bookings, len(self.ledger.bookings))
        while (room := self.ledger.plan(need, 1, (), None)) is None and bookings:
            self.ledger.remove(bookings.pop())
        self.check()
        if room is None:
            return False
        [holding] = room
        self.ledger.add(Process(holding, holding, need, "worker"))
        return True


def play(seeds: range) -> Counter[str]:
    done = Counter[str]()
    for seed in seeds:
        node = Node(random.Random(seed))
        node.run(30)
        done += node.done
    return done


def test_booked_is_never_less_than_held_nor_more_than_there_is():
    done = play(range(1000))
    # Each kind of step must happen often enough to be tested.
    assert (
        min(
            done[name]
            for name in ("start", "rehearse", "rest", "promote", "park", "wake", "end", "give_room")
        )
        > 20
    )


@pytest.mark.slow
def test_ten_thousand_histories():
    play(range(10_000))
