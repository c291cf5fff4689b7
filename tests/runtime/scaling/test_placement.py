"""Where workers go on the GPUs of a node, and who makes room: by hand, and held to its rules on random nodes."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from pilotflame.runtime.scaling.placement import Gpu, GpuHolder, GpuNeed, Holding, fits, make_room, place

TWO = [Gpu("0", 80), Gpu("1", 40)]


def test_a_worker_goes_where_the_least_stays_free():
    assert place(TWO, [], GpuNeed(1, 30)) == {"1": 30}
    assert place(TWO, [{"1": 20}], GpuNeed(1, 30)) == {"0": 30}
    assert place(TWO, [{"0": 45}, {"1": 20}], GpuNeed(1, 30)) == {"0": 30}
    assert place(TWO, [{"0": 60}, {"1": 20}], GpuNeed(1, 30)) is None


def test_whole_gpus_are_nobody_elses():
    assert place(TWO, [], GpuNeed(2, None)) == {"0": 80, "1": 40}
    assert place(TWO, [{"0": 1}], GpuNeed(1, None)) == {"1": 40}
    assert place(TWO, [{"0": 1}], GpuNeed(2, None)) is None


def test_several_gpus_of_a_worker_are_no_slices():
    sliced = [Gpu("MIG-a", 40), Gpu("GPU-b", 40), Gpu("MIG-c", 40), Gpu("GPU-d", 80)]
    assert place(sliced, [], GpuNeed(2, 40)) == {"GPU-b": 40, "GPU-d": 40}
    assert place(sliced, [{"GPU-d": 80}], GpuNeed(2, 40)) is None
    assert place(sliced, [{"GPU-b": 1}], GpuNeed(1, None)) == {"MIG-a": 40}


def test_room_is_made_by_those_who_lose_least():
    held = [GpuHolder({"0": 40}, cost=3.0), GpuHolder({"0": 40}, cost=1.0), GpuHolder({"1": 40}, cost=2.0)]
    room = make_room(TWO, held, GpuNeed(1, 40))
    assert room is not None
    assert room.takes == (1,)
    assert room.holding == {"0": 40}


def test_nobody_goes_whose_room_is_not_needed():
    # The cheapest one alone is not enough, and with the second it is not needed any more.
    held = [GpuHolder({"1": 20}, cost=1.0), GpuHolder({"0": 80}, cost=2.0), GpuHolder({"1": 20})]
    room = make_room(TWO, held, GpuNeed(1, 50))
    assert room is not None
    assert room.takes == (1,)


def test_it_is_enough_to_wait_for_those_who_leave():
    held = [GpuHolder({"0": 80}, leaving=True), GpuHolder({"1": 40}, cost=1.0)]
    room = make_room(TWO, held, GpuNeed(1, 80))
    assert room is not None
    assert room.takes == ()


def test_without_enough_that_may_go_nobody_goes():
    assert make_room(TWO, [GpuHolder({"0": 80}), GpuHolder({"1": 40}, cost=1.0)], GpuNeed(1, 80)) is None
    # What is parked keeps a part.
    assert make_room(TWO, [GpuHolder({"0": 80}, {"0": 1}, cost=1.0)], GpuNeed(1, 80)) is None


def test_a_parked_one_wants_its_own_gpu():
    held = [GpuHolder({"0": 80}, cost=1.0), GpuHolder({"1": 40}, cost=5.0)]
    room = make_room(TWO, held, GpuNeed(1, 40), only={"1": 39})
    assert room is not None
    assert room.takes == (1,)


SIZES = st.integers(1, 100)
GPUS = st.lists(SIZES, min_size=1, max_size=4).map(
    lambda sizes: [Gpu(str(number), size) for number, size in enumerate(sizes)]
)
NEEDS = st.builds(GpuNeed, st.integers(1, 3), st.none() | SIZES)


@st.composite
def nodes(draw: st.DrawFn) -> tuple[list[Gpu], list[GpuHolder]]:
    """Return a node on which everything has been placed by `place`."""
    gpus, held = draw(GPUS), list[GpuHolder]()
    for need in draw(st.lists(NEEDS, max_size=8)):
        if (found := place(gpus, [one.holding for one in held], need)) is not None:
            left = {gpu: draw(st.integers(0, size)) for gpu, size in found.items()}
            cost = draw(st.none() | st.floats(0, 10))
            held.append(GpuHolder(found, left, cost, leaving=draw(st.booleans())))
    return gpus, held


def used(held: list[Holding]) -> Counter[str]:
    total = Counter[str]()
    for one in held:
        total.update(one)
    return total


@given(nodes())
def test_no_gpu_is_ever_overfilled(node: tuple[list[Gpu], list[GpuHolder]]):
    gpus, held = node
    total = used([one.holding for one in held])
    assert all(total[gpu.id] <= gpu.memory_mb for gpu in gpus)


@given(nodes(), NEEDS)
def test_what_is_placed_has_as_many_gpus_as_it_needs(node: tuple[list[Gpu], list[GpuHolder]], need: GpuNeed):
    gpus, held = node
    kept = [one.holding for one in held]
    found = place(gpus, kept, need)
    if found is None:
        room = [gpu for gpu in gpus if fits([gpu], [{gpu.id: used(kept)[gpu.id]}], {gpu.id: need.of(gpu)})]
        assert len(room) < need.gpus
    else:
        assert len(found) == need.gpus
        assert fits(gpus, kept, found)


@given(nodes(), NEEDS)
def test_room_is_enough_and_no_more_than_needed(node: tuple[list[Gpu], list[GpuHolder]], need: GpuNeed):
    gpus, held = node
    room = make_room(gpus, held, need)

    def kept(takes: set[int]) -> list[Holding]:
        return [
            one.left if one.leaving or number in takes else one.holding for number, one in enumerate(held)
        ]

    if room is None:
        everybody = {number for number, one in enumerate(held) if one.cost is not None}
        assert place(gpus, kept(everybody), need) is None
        return
    takes = set(room.takes)
    assert all(held[number].cost is not None and not held[number].leaving for number in takes)
    assert fits(gpus, kept(takes), room.holding)
    assert len(room.holding) == need.gpus
    for number in takes:
        assert place(gpus, kept(takes - {number}), need) is None
