"""Ranges: each byte has been read, or is in exactly one part or waiting range, whatever is taken, split, put back or demanded."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pilotflame.snapshot.fetching.ranges import Chunks, Part, Range, Ranges, wanted_order
from pilotflame.snapshot.format.manifest import Manifest, Shard, TensorEntry

CHUNK = 4096
DIGEST = "0" * 32


def manifest_of(
    *sizes: int, first_touch: tuple[str, ...] = (), tensors: tuple[TensorEntry, ...] = ()
) -> Manifest:
    shards = tuple(
        Shard(name=f"s{number}", size_bytes=size, data_offset_bytes=0, chunks=(DIGEST,) * -(-size // CHUNK))
        for number, size in enumerate(sizes)
    )
    return Manifest.build(chunk_bytes=CHUNK, shards=shards, tensors=tensors, first_touch=first_touch)


def everything(manifest: Manifest) -> Ranges:
    return Ranges(manifest, wanted_order(manifest))


class RangesMachine(RuleBasedStateMachine):
    """Takes, reads, splits, demands and finishes parts of a few small shards in any order, as connections do."""

    @initialize(sizes=st.lists(st.integers(0, 5 * CHUNK), min_size=1, max_size=3), seed=st.integers(0, 99))
    def start(self, sizes: list[int], seed: int) -> None:
        self.manifest = manifest_of(*sizes)
        order = wanted_order(self.manifest)
        random.Random(seed).shuffle(order)
        self.ranges = Ranges(self.manifest, order)
        self.done = [bytearray(size) for size in sizes]

    def _read(self, part: Part, count: int) -> None:
        for offset in range(part.at, min(part.end, part.at + count)):
            assert self.done[part.shard][offset] == 0, "a byte was read twice"
            self.done[part.shard][offset] = 1
        part.at = min(part.end, part.at + count)

    @rule(limit=st.sampled_from([1, 100, CHUNK, 3 * CHUNK]))
    def take(self, limit: int) -> None:
        part = self.ranges.take(limit, now_s=0.0)
        assert part is None or 0 < part.end - part.at <= max(limit, CHUNK)

    @precondition(lambda self: self.ranges.active)
    @rule(which=st.integers(0, 9), count=st.integers(1, 2 * CHUNK))
    def read(self, which: int, count: int) -> None:
        self._read(self.ranges.active[which % len(self.ranges.active)], count)

    @precondition(lambda self: self.ranges.active)
    @rule(which=st.integers(0, 9))
    def finish(self, which: int) -> None:
        self.ranges.finish(self.ranges.active[which % len(self.ranges.active)])

    @rule(least=st.integers(1, CHUNK), margin=st.integers(0, CHUNK))
    def split(self, least: int, margin: int) -> None:
        longest = max(self.ranges.active, key=lambda part: part.end - part.at, default=None)
        half = self.ranges.split(least, margin)
        if half is not None:
            assert longest is not None
            # A read in progress may still receive `margin` bytes, so the part keeps at least these.
            assert longest.end >= longest.at + margin
            assert half.end - half.at >= least

    @rule(data=st.data())
    def demand(self, data: st.DataObject) -> None:
        count = sum(len(shard.chunks) for shard in self.manifest.shards)
        if not count:
            return
        first = data.draw(st.integers(0, count - 1))
        last = data.draw(st.integers(first, min(count - 1, first + 2)))
        self.ranges.demand(first, last)
        part = self.ranges.take(CHUNK, now_s=0.0)
        wanted = [Chunks(self.manifest).extent(chunk) for chunk in range(first, last + 1)]
        if part is None:
            return
        inside = any(item.shard == part.shard and item.begin <= part.at < item.end for item in wanted)
        waiting = [
            offset
            for item in wanted
            for offset in range(item.begin, item.end)
            if not self.done[item.shard][offset]
            and not any(a.shard == item.shard and a.at <= offset < a.end for a in self.ranges.active)
        ]
        # Nothing else is taken before the demanded chunks.
        assert inside or not waiting

    @invariant()
    def every_byte_is_in_one_place(self) -> None:
        if not hasattr(self, "ranges"):
            return
        seen = [bytearray(done) for done in self.done]
        places = [(item.shard, item.begin, item.end) for item in self.ranges._waiting]
        places += [(part.shard, part.at, part.end) for part in self.ranges.active]
        for shard, begin, end in places:
            for offset in range(begin, end):
                assert seen[shard][offset] == 0
                seen[shard][offset] = 1
        assert all(all(shard) for shard in seen)

    def teardown(self) -> None:
        """Check that after any sequence of steps, the fetch can be completed."""
        if not hasattr(self, "ranges"):
            return
        while not self.ranges.idle:
            part = self.ranges.take(1 << 30, 0.0) or self.ranges.active[0]
            self._read(part, 1 << 30)
            self.ranges.finish(part)
        assert all(all(done) for done in self.done)


TestRanges = RangesMachine.TestCase


def test_what_is_not_due_is_left_alone() -> None:
    ranges = everything(manifest_of(CHUNK))
    part = ranges.take(CHUNK, 0.0)
    assert part is not None
    part.at = 100
    ranges.finish(part, attempts=3, due_s=5.0)
    assert ranges.take(CHUNK, 4.0) is None
    assert ranges.next_due_s() == 5.0
    again = ranges.take(CHUNK, 5.0)
    assert again is not None
    assert (again.at, again.attempts) == (100, 3)


def test_a_chunk_asked_for_again_comes_next() -> None:
    ranges = everything(manifest_of(4 * CHUNK))
    first = ranges.take(CHUNK, 0.0)
    assert first is not None
    first.at = first.end
    ranges.finish(first)
    ranges.again(0)
    again = ranges.take(CHUNK, 0.0)
    assert again is not None
    assert (again.at, again.end) == (0, CHUNK)


def test_what_a_connection_left_unread_comes_next() -> None:
    ranges = Ranges(manifest_of(9 * CHUNK), [0, 2, 4, 6, 8])
    part = ranges.take(CHUNK, 0.0)
    assert part is not None
    ranges.finish(part, attempts=1)
    again = ranges.take(CHUNK, 0.0)
    assert again is not None
    assert (again.at, again.attempts) == (0, 1)
    following = ranges.take(CHUNK, 0.0)
    assert following is not None
    assert (following.at, following.attempts) == (2 * CHUNK, 0)


def test_a_part_is_split_in_the_middle_of_what_is_unread() -> None:
    ranges = everything(manifest_of(8 * CHUNK))
    part = ranges.take(8 * CHUNK, 0.0)
    assert part is not None
    part.at, part.attempts = 2 * CHUNK, 3
    assert ranges.split(3 * CHUNK, CHUNK) is None
    half = ranges.split(CHUNK, 0)
    assert half is not None
    # The second half has not failed yet.
    assert (part.end, half.at, half.end, half.attempts) == (5 * CHUNK, 5 * CHUNK, 8 * CHUNK, 0)


class Racing(Part):
    """A part whose connection receives more bytes at the moment in which the part is cut."""

    def __setattr__(self, name: str, value: int) -> None:
        if name == "end" and value == 4 * CHUNK:
            self.at = 4 * CHUNK - 10
        super().__setattr__(name, value)


def test_a_part_is_not_split_if_its_connection_has_come_too_close_to_the_cut() -> None:
    ranges = everything(manifest_of(8 * CHUNK))
    ranges.take(8 * CHUNK, 0.0)
    racing = ranges.active[0] = Racing(0, 0, 8 * CHUNK)
    assert ranges.split(CHUNK, 11) is None
    assert (racing.at, racing.end) == (4 * CHUNK - 10, 8 * CHUNK)
    assert ranges.active == [racing]


def test_chunks_are_found_across_shards_and_empty_ones() -> None:
    chunks = Chunks(manifest_of(0, CHUNK + 1, 0, 10))
    assert [chunks.extent(chunk) for chunk in range(chunks.count)] == [
        Range(1, 0, CHUNK), Range(1, CHUNK, CHUNK + 1), Range(3, 0, 10)]  # fmt: skip
    assert chunks.at(1, CHUNK) == 1
    assert chunks.at(3, 9) == 2
    assert chunks.covering(1, 0, CHUNK) == (0, 0)
    assert chunks.covering(1, CHUNK - 1, CHUNK + 1) == (0, 1)


@given(st.permutations(range(4)), st.integers(0, 4))
def test_the_first_touched_come_first_and_all_come_once(order: list[int], recorded: int) -> None:
    tensors = tuple(
        TensorEntry(name=f"t{n}", dtype="U8", shape=(3000,), shard=0, offset_bytes=3000 * n, size_bytes=3000)
        for n in range(4)
    )
    names = tuple(f"t{n}" for n in order[:recorded])
    manifest = manifest_of(12_000, tensors=tensors, first_touch=names)
    found = wanted_order(manifest)
    assert sorted(found) == [0, 1, 2]
    if recorded:
        assert found[0] == 3000 * order[0] // CHUNK
    else:
        assert found == [0, 1, 2]
