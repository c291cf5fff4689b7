"""Spare files that are made ahead of need: used by the next fetch, within their limits, out of the way of fetches."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.snapshot.caching.ahead import TouchedAhead, missing_sizes
from pilotflame.snapshot.caching.cache import Cache
from pilotflame.snapshot.caching.tier import LEAST_SPARE_BYTES, Tier
from pilotflame.snapshot.format.manifest import Manifest
from pilotflame.snapshot.format.slices import part_of
from pilotflame.snapshot.sources.folder import FolderSource
from pulling import LIMIT_S, Stopping, check, make

ROOMY = 64 << 20


@pytest.fixture
def tier(shm: Path) -> Tier:
    found = Tier(shm / "tier", ROOMY, "tmpfs", spare_bytes=ROOMY // 2)
    found.root.mkdir()
    return found


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return make(tmp_path / "source")


def sizes(tier: Tier) -> list[int]:
    return [size_bytes for size_bytes, _ in tier.spares.files()]


def in_trash(tier: Tier) -> list[Path]:
    return list((tier.root / "trash").glob("*"))


def test_the_next_fetch_uses_them(tmp_path: Path, tier: Tier, manifest: Manifest) -> None:
    ahead = TouchedAhead([tier])
    ahead.expect(manifest)
    ahead.wait(LIMIT_S)
    assert sizes(tier) == [manifest.shards[0].size_bytes]
    spare = tier.spares.files()[0][1]
    assert not any(spare.read_bytes())
    made = spare.stat()
    # All of its pages are there.
    assert made.st_blocks * 512 >= made.st_size
    with ahead.paused(), Cache([tier]).open(manifest, FolderSource(tmp_path / "source")) as lease:
        lease.wait(LIMIT_S)
        check(lease.root, tmp_path / "source")
        assert (lease.root / manifest.shards[0].name).stat().st_ino == made.st_ino
    ahead.wait(LIMIT_S)
    # It is here now, so it is not expected any more.
    assert sizes(tier) == []


def test_nothing_is_made_while_something_is_fetched(tier: Tier, manifest: Manifest) -> None:
    ahead = TouchedAhead([tier])
    with ahead.paused():
        with ahead.paused():
            ahead.expect(manifest)
        ahead.wait(LIMIT_S)
        assert sizes(tier) == []
    ahead.wait(LIMIT_S)
    assert len(sizes(tier)) == 1


def test_a_file_that_a_fetch_interrupts_leaves_nothing_and_is_made_after_it(
    tmp_path: Path, tier: Tier
) -> None:
    large = make(tmp_path / "large", tensors=1, tensor_bytes=30 << 20)
    ahead = TouchedAhead([tier])
    for _ in range(5):
        ahead.expect(large)
        with ahead.paused():
            ahead.wait(LIMIT_S)
            assert sizes(tier) in ([], [large.shards[0].size_bytes])
            assert in_trash(tier) == []
        ahead.wait(LIMIT_S)
        assert sizes(tier) == [large.shards[0].size_bytes]
        ahead.give_back()


def test_an_unfinished_file_evicts_nothing_when_a_fetch_begins(
    tmp_path: Path, shm: Path, manifest: Manifest
) -> None:
    other = make(tmp_path / "other", seed=1)
    small = shm / "small"
    small.mkdir()
    size = f"size={manifest.total_bytes * 2 + (512 << 10)}"
    if subprocess.run(["mount", "-t", "tmpfs", "-o", size, "none", small], check=False).returncode:
        pytest.skip("no right to mount")
    try:
        tier = Tier(small / "tier", ROOMY, "tmpfs")
        with Cache([tier]).open(manifest, FolderSource(tmp_path / "source")) as lease:
            lease.wait(LIMIT_S)
        unfinished = tier.root / "trash" / "unfinished"
        unfinished.parent.mkdir(exist_ok=True)
        unfinished.write_bytes(bytes(other.total_bytes))
        source = Stopping(tmp_path / "other", stop_at=0)
        with Cache([tier]).open(other, source) as lease:
            unfinished.unlink()
            source.go()
            lease.wait(LIMIT_S)
            check(lease.root, tmp_path / "other")
        assert tier.has(manifest.digest)
    finally:
        subprocess.run(["umount", "-l", small], check=True)


def test_nothing_is_made_for_what_would_not_use_it(
    tmp_path: Path, shm: Path, tier: Tier, manifest: Manifest
) -> None:
    small = Tier(shm / "small", manifest.total_bytes - 1, "tmpfs", spare_bytes=ROOMY)
    small.root.mkdir()
    two = make(tmp_path / "two", seed=1)
    files = [
        shard.model_copy(update={"name": f"{number}.safetensors"})
        for number in range(2)
        for shard in two.shards
    ]
    larger = Manifest.build(chunk_bytes=two.chunk_bytes, shards=tuple(files), tensors=())
    small.budget_bytes = larger.total_bytes - 1
    for one, expected in ((small, larger), (tier, part_of(manifest, ["t1"], {}))):
        ahead = TouchedAhead([one])
        ahead.expect(expected)
        ahead.wait(LIMIT_S)
        assert sizes(one) == []


def test_memory_that_is_given_back_is_not_taken_again_at_once(tier: Tier, manifest: Manifest) -> None:
    ahead = TouchedAhead([tier])
    ahead.expect(manifest)
    ahead.wait(LIMIT_S)
    ahead.give_back()
    ahead.wait(LIMIT_S)
    assert sizes(tier) == []
    with ahead.paused():
        pass
    ahead.wait(LIMIT_S)
    assert len(sizes(tier)) == 1


def test_limits_are_kept_and_what_a_tier_has_is_not_expected(
    tmp_path: Path, shm: Path, tier: Tier, manifest: Manifest
) -> None:
    disk = Tier(tmp_path / "disk", ROOMY)
    with Cache([disk]).open(manifest, FolderSource(tmp_path / "source")) as lease:
        lease.wait(LIMIT_S)
    without = [Tier(shm / "small", ROOMY, "tmpfs", spare_bytes=manifest.total_bytes - 1)]
    without.append(Tier(shm / "full", manifest.total_bytes - 1, "tmpfs", spare_bytes=ROOMY))
    for number, tiers in enumerate(([without[0]], [without[1]], [tier, disk], [disk])):
        tiers[0].root.mkdir(exist_ok=True)
        ahead = TouchedAhead(tiers)
        ahead.expect(manifest)
        ahead.wait(LIMIT_S)
        assert sizes(tiers[0]) == [], number


def test_a_closed_one_and_a_tier_that_is_gone_make_nothing(shm: Path, tier: Tier, manifest: Manifest) -> None:
    closed, gone = TouchedAhead([tier]), TouchedAhead([Tier(shm / "gone", ROOMY, "tmpfs", spare_bytes=ROOMY)])
    closed.close()
    for ahead in (closed, gone):
        ahead.expect(manifest)
        ahead.wait(LIMIT_S)
        ahead.give_back()
    assert sizes(tier) == []
    assert not (shm / "gone").exists()


@given(
    st.lists(st.integers(0, 1 << 30), max_size=8),
    st.lists(st.integers(0, 1 << 30), max_size=8),
    st.integers(-(1 << 30), 1 << 32),
)
def test_missing_files_have_wanted_sizes_and_stay_within_the_limit(
    wanted: list[int], kept: list[int], left_bytes: int
) -> None:
    missing = missing_sizes(wanted, kept, left_bytes)
    assert sum(missing) <= max(0, left_bytes)
    rest = list(wanted)
    for size_bytes in missing:
        rest.remove(size_bytes)
    if left_bytes >= sum(wanted):
        # Every other one is served by a kept file of its own, or is too small to be worth it.
        spares = sorted(kept)
        for size_bytes in sorted((one for one in rest if one >= LEAST_SPARE_BYTES), reverse=True):
            assert spares
            assert spares.pop() >= size_bytes
