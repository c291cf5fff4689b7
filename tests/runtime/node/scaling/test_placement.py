"""Where workers go on the GPUs of a node, and which workers make room: examples, and rules for random nodes."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from pilotflame.runtime.ground.settings.resources import Resources
from pilotflame.runtime.node.scaling.placement import Gpu, GpuNeed, MemoryByGpu, fit, need_of, place

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


def test_what_a_function_needs_of_its_gpus_is_in_its_resources():
    assert need_of(Resources()) is None
    assert need_of(Resources(gpus=2, gpu_memory_mb=2048)) == GpuNeed(2, 2048)
    assert need_of(Resources(gpus=1)) == GpuNeed(1, None)


SIZES = st.integers(1, 100)
GPUS = st.lists(SIZES, min_size=1, max_size=4).map(
    lambda sizes: [Gpu(str(number), size) for number, size in enumerate(sizes)]
)
NEEDS = st.builds(GpuNeed, st.integers(1, 3), st.none() | SIZES)


@st.composite
def nodes(draw: st.DrawFn) -> tuple[list[Gpu], list[MemoryByGpu]]:
    """Draw the GPUs of a node, and the memory that `place` has given to some workers."""
    gpus, held = draw(GPUS), list[MemoryByGpu]()
    for need in draw(st.lists(NEEDS, max_size=8)):
        if (found := place(gpus, held, need)) is not None:
            held.append(found)
    return gpus, held


def used(held: list[MemoryByGpu]) -> Counter[str]:
    total = Counter[str]()
    for one in held:
        total.update(one)
    return total


@given(nodes())
def test_no_gpu_is_ever_overfilled(node: tuple[list[Gpu], list[MemoryByGpu]]):
    gpus, held = node
    total = used(held)
    assert all(total[gpu.id] <= gpu.memory_mb for gpu in gpus)


@given(nodes(), NEEDS)
def test_what_is_placed_has_as_many_gpus_as_it_needs(
    node: tuple[list[Gpu], list[MemoryByGpu]], need: GpuNeed
):
    gpus, held = node
    found = place(gpus, held, need)
    if found is None:
        room = [gpu for gpu in gpus if fit([gpu], [{gpu.id: used(held)[gpu.id]}, {gpu.id: need.of(gpu)}])]
        assert len(room) < need.gpus
    else:
        assert len(found) == need.gpus
        assert fit(gpus, [*held, found])
