"""A tier: its budget, evictions, snapshots that are never evicted, spare files, and what a crash leaves behind."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import mmap
import os
import shutil
import threading
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from pilotflame.errors import CacheError
from pilotflame.snapshot.caching.cache import Cache
from pilotflame.snapshot.caching.flock import locked_file, try_lock
from pilotflame.snapshot.caching.tier import Tier
from pilotflame.snapshot.format.manifest import MANIFEST_NAME, Manifest
from pilotflame.snapshot.format.verify import verify
from pilotflame.snapshot.restoring.mapping import Mapping
from pilotflame.snapshot.sources.folder import FolderSource
from pulling import CHUNK_BYTES, LIMIT_S, Stopping, check, make, pulling

MIB = 1 << 20
LIBC = ctypes.CDLL(None)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
# Linux has this flag since 4.17, and Python's `mmap` since 3.13.
MAP_FIXED_NOREPLACE = 0x100000


@pytest.fixture
def sources(tmp_path: Path) -> list[tuple[Path, Manifest]]:
    """Three snapshots of the same size, 1 MiB and a header."""
    folders = [tmp_path / f"source{index}" for index in range(3)]
    return [(folder, make(folder, index)) for index, folder in enumerate(folders)]


def pull(tier: Tier, source: tuple[Path, Manifest]) -> None:
    with Cache([tier]).open(source[1], FolderSource(source[0])) as lease:
        lease.wait(LIMIT_S)


def ready(tier: Tier) -> set[str]:
    return {stored.digest for stored in tier.list() if stored.ready}


def digests(*sources: tuple[Path, Manifest]) -> set[str]:
    return {manifest.digest for _, manifest in sources}


@pytest.fixture(params=["tmpfs", "disk"])
def tier(request: pytest.FixtureRequest, shm: Path, tmp_path: Path) -> Tier:
    """A tier with room for two of the three snapshots."""
    root = shm if request.param == "tmpfs" else tmp_path
    return Tier(root / "tier", 2 * MIB + (64 << 10), request.param)


# -- eviction


def test_the_least_recently_used_goes_first(tier: Tier, sources: list[tuple[Path, Manifest]]) -> None:
    one, two, three = sources
    pull(tier, one)
    pull(tier, two)
    # The first snapshot is used again, so the second one is the least recently used.
    pull(tier, one)
    pull(tier, three)
    assert ready(tier) == digests(one, three)
    assert tier.space.used_bytes() <= tier.budget_bytes


def test_what_a_lease_holds_is_not_evicted(tier: Tier, sources: list[tuple[Path, Manifest]]) -> None:
    one, two, three = sources
    pull(tier, one)
    pull(tier, two)
    with Cache([tier]).open(one[1], FolderSource(one[0])) as lease:
        pull(tier, three)
        assert ready(tier) == digests(one, three)
        with pytest.raises(CacheError, match="in use"):
            tier.evict(one[1].digest)
        check(lease.root, one[0])
    tier.evict(one[1].digest)
    tier.evict(one[1].digest)
    assert ready(tier) == digests(three)


def test_what_is_mapped_is_not_evicted_though_its_lease_is_closed(
    tier: Tier, sources: list[tuple[Path, Manifest]]
) -> None:
    one, two, three = sources
    with Cache([tier]).open(one[1], FolderSource(one[0])) as lease:
        lease.wait(LIMIT_S)
        mapping = Mapping(lease.root, one[1], keep=lease.lock)
    tensor = mapping.flats[0][100:]
    del mapping, lease
    pull(tier, two)
    pull(tier, three)
    assert ready(tier) == digests(one, three)
    assert bytes(tensor.numpy()) == (one[0] / "model.safetensors").read_bytes()[100:]
    del tensor
    tier.evict(one[1].digest)


def test_what_another_process_has_mapped_is_not_evicted(
    tier: Tier, sources: list[tuple[Path, Manifest]]
) -> None:
    one, two, three = sources
    pull(tier, one)
    pull(tier, two)
    with pulling([tier], one[0]) as puller:
        assert "opened" in puller.hear()
        puller.ask("map")
        puller.ask("close")
        pull(tier, three)
        assert ready(tier) == digests(one, three)
        puller.kill()
    pull(tier, two)
    assert ready(tier) == digests(two, three)


def test_an_eviction_that_fails_keeps_nothing_locked(
    tier: Tier, sources: list[tuple[Path, Manifest]]
) -> None:
    one = sources[0]
    pull(tier, one)
    shutil.rmtree(tier.root / "trash", ignore_errors=True)
    (tier.root / "trash").write_text("in the way")
    with pytest.raises(OSError, match="File exists"):
        tier.evict(one[1].digest)
    assert tier.ready(one[1].digest, one[1]) is not None
    (tier.root / "trash").unlink()
    tier.evict(one[1].digest)
    assert ready(tier) == set()


def test_nothing_is_evicted_in_vain(tier: Tier, sources: list[tuple[Path, Manifest]], tmp_path: Path) -> None:
    one, two, _ = sources
    large = tmp_path / "large", make(tmp_path / "large", 9, tensors=16)
    pull(tier, one)
    pull(tier, two)
    with Cache([tier]).open(two[1], FolderSource(two[0])), pytest.raises(CacheError, match="is full"):
        Cache([tier]).open(large[1], FolderSource(large[0]))
    assert ready(tier) == digests(one, two)


def test_a_fetch_under_way_is_not_evicted_and_an_abandoned_one_is(
    tier: Tier, sources: list[tuple[Path, Manifest]]
) -> None:
    one, two, three = sources
    stopping = Stopping(one[0], stop_at=2 * CHUNK_BYTES)
    with Cache([tier]).open(one[1], stopping) as lease:
        pull(tier, two)
        pull(tier, three)
        assert ready(tier) == digests(three)
        stopping.go()
        lease.wait(LIMIT_S)
    assert ready(tier) == digests(one, three)
    Cache([tier]).open(two[1], Stopping(two[0], stop_at=0)).close()
    pull(tier, one)
    pull(tier, three)
    assert two[1].digest not in {stored.digest for stored in tier.list()}


# -- what a crash may leave


def test_what_was_left_behind_is_swept(tier: Tier, sources: list[tuple[Path, Manifest]]) -> None:
    one, two, three = sources
    pull(tier, one)
    (tier.root / "trash" / "half").mkdir(parents=True)
    for source in (two, three):
        lease = Cache([tier]).open(source[1], Stopping(source[0], stop_at=0))
        lease.close()
        if source is two:
            os.utime(tier.folder(two[1].digest), (0, 0))
    os.utime(tier.folder(one[1].digest), (0, 0))
    if tier.has(one[1].digest):
        tier.sweep()
    assert not list((tier.root / "trash").glob("*"))
    assert two[1].digest not in {stored.digest for stored in tier.list()}
    assert tier.has(three[1].digest)


def test_a_stale_fetch_that_is_still_running_is_not_swept(
    tier: Tier, sources: list[tuple[Path, Manifest]]
) -> None:
    one = sources[0]
    stopping = Stopping(one[0], stop_at=CHUNK_BYTES)
    with Cache([tier]).open(one[1], stopping) as lease:
        os.utime(tier.folder(one[1].digest), (0, 0))
        tier.sweep()
        stopping.go()
        lease.wait(LIMIT_S)
        verify(lease.root, one[1])


def test_published_is_what_has_a_manifest(tier: Tier, sources: list[tuple[Path, Manifest]]) -> None:
    one = sources[0]
    pull(tier, one)
    assert tier.ready(one[1].digest, one[1]) is not None
    (tier.folder(one[1].digest) / "files" / MANIFEST_NAME).unlink()
    assert tier.ready(one[1].digest, one[1]) is None
    assert [stored.ready for stored in tier.list()] == [False]


def test_a_lock_that_nobody_lets_go_of_is_named(tier: Tier) -> None:
    path = tier.root / "lock"
    with tier.locked(), pytest.raises(CacheError, match="lock stayed locked"), locked_file(path, 0.01):
        pass


def test_a_wait_that_is_given_up_locks_no_other_file(tmp_path: Path) -> None:
    """The thread that waits may call flock only after the caller gave up and closed its descriptor. The number of this descriptor
    may then belong to another file."""
    reached, go_on = threading.Event(), threading.Event()

    def hold_back(frame: Any, event: str, argument: Any) -> None:
        if event == "c_call" and argument is fcntl.flock and threading.current_thread().daemon:
            reached.set()
            go_on.wait(20)

    def give_up() -> None:
        with locked_file(tmp_path / "lock", 0.0):
            pass

    before = set(threading.enumerate())
    with locked_file(tmp_path / "lock"):
        threading.setprofile(hold_back)
        try:
            with pytest.raises(CacheError, match="stayed locked"):
                give_up()
        finally:
            threading.setprofile(None)
        with (tmp_path / "other").open("wb") as other, (tmp_path / "other").open("rb") as again:
            (waiter,) = set(threading.enumerate()) - before
            assert reached.wait(20)
            go_on.set()
            # The thread must wait for the lock now. If it had locked the other file, it would have ended.
            waiter.join(0.2)
            assert waiter.is_alive()
            assert try_lock(other.fileno(), exclusive=True)
            assert not try_lock(again.fileno(), exclusive=True)
    waiter.join(20)
    assert not waiter.is_alive()
    with locked_file(tmp_path / "lock", 0.0):
        pass


# -- spare files


def test_an_evicted_file_is_written_over(shm: Path, sources: list[tuple[Path, Manifest]]) -> None:
    tier = Tier(shm / "tier", MIB + (64 << 10), "tmpfs")
    pull(tier, sources[0])
    inode = (tier.folder(sources[0][1].digest) / "files" / "model.safetensors").stat().st_ino
    with Cache([tier]).open(sources[1][1], FolderSource(sources[1][0])) as lease:
        lease.wait(LIMIT_S)
        assert (lease.root / "model.safetensors").stat().st_ino == inode
        verify(lease.root, sources[1][1])
        check(lease.root, sources[1][0])
    assert ready(tier) == digests(sources[1])
    assert tier.space.spares.total_bytes() == 0


@pytest.mark.parametrize("tensors", [3, 8, 12])
def test_a_spare_of_another_size_does_too(
    shm: Path, tmp_path: Path, sources: list[tuple[Path, Manifest]], tensors: int
) -> None:
    tier = Tier(shm / "tier", 4 * MIB, "tmpfs", spare_bytes=2 * MIB)
    pull(tier, sources[0])
    tier.evict(sources[0][1].digest)
    assert tier.space.spares.total_bytes() == sources[0][1].total_bytes
    other = tmp_path / "other", make(tmp_path / "other", 7, tensors=tensors)
    pull(tier, other)
    assert tier.space.spares.total_bytes() == 0
    check(tier.folder(other[1].digest) / "files", other[0])


def test_spares_are_kept_within_their_limit_and_the_budget(
    shm: Path, sources: list[tuple[Path, Manifest]]
) -> None:
    tier = Tier(shm / "tier", 3 * MIB + (64 << 10), "tmpfs", spare_bytes=MIB + (64 << 10))
    for source in sources:
        pull(tier, source)
    for source in sources[:2]:
        tier.evict(source[1].digest)
    assert tier.space.spares.total_bytes() == sources[0][1].total_bytes
    pull(tier, sources[0])
    pull(tier, sources[1])
    assert tier.space.spares.total_bytes() == 0
    assert tier.space.used_bytes() <= tier.budget_bytes


def test_a_spare_is_never_of_a_snapshot_that_is_mapped(
    shm: Path, sources: list[tuple[Path, Manifest]]
) -> None:
    """Otherwise the tensors of the old snapshot would show the bytes of the new one."""
    tier = Tier(shm / "tier", MIB + (64 << 10), "tmpfs", spare_bytes=4 * MIB)
    with Cache([tier]).open(sources[0][1], FolderSource(sources[0][0])) as lease:
        lease.wait(LIMIT_S)
        mapping = Mapping(lease.root, sources[0][1], keep=lease.lock)
    with pytest.raises(CacheError, match="in use"):
        tier.evict(sources[0][1].digest)
    with pytest.raises(CacheError, match="is full"):
        Cache([tier]).open(sources[1][1], FolderSource(sources[1][0]))
    assert tier.space.spares.files() == []
    old = mapping.flats[0]
    assert bytes(old.numpy()) == (sources[0][0] / "model.safetensors").read_bytes()


def test_a_fetch_killed_over_a_spare_resumes_from_its_own_bytes_alone(
    shm: Path, sources: list[tuple[Path, Manifest]]
) -> None:
    tier = Tier(shm / "tier", MIB + (64 << 10), "tmpfs")
    pull(tier, sources[0])
    with pulling([tier], sources[1][0], stop_at=5 * CHUNK_BYTES) as puller:
        assert "opened" in puller.hear()
        puller.ask("upto 4")
        puller.kill()
    again = Stopping(sources[1][0])
    with Cache([tier]).open(sources[1][1], again) as lease:
        lease.wait(LIMIT_S)
        check(lease.root, sources[1][0])
    assert again.given_bytes == sources[1][1].total_bytes - 5 * CHUNK_BYTES


@pytest.mark.parametrize("follows", [False, True])
def test_who_reads_without_waiting_sees_zeros_and_never_the_spares_old_bytes(
    shm: Path, sources: list[tuple[Path, Manifest]], follows: bool
) -> None:
    """The old bytes may be the weights of another function."""
    tier = Tier(shm / "tier", MIB + (64 << 10), "tmpfs")
    pull(tier, sources[0])
    old, new = ((folder / "model.safetensors").read_bytes() for folder, _ in sources[:2])
    landed = 5 * CHUNK_BYTES
    stopping = Stopping(sources[1][0], stop_at=landed + 1000)
    cache = Cache([tier])
    with cache.open(sources[1][1], stopping) as first, cache.open(sources[1][1], stopping) as second:
        lease = second if follows else first
        assert (lease.root / "model.safetensors").read_bytes()[landed + 2000 :] == old[
            landed + 2000 : len(new)
        ]
        early = Mapping(lease.root, sources[1][1], keep=lease, arrival=lease.arrival)
        lease.arrival.wait(0, 4, LIMIT_S)
        late = Mapping(lease.root, sources[1][1], keep=lease, arrival=lease.arrival)
        addresses = [mapping.flats[0].data_ptr() for mapping in (early, late)]
        for mapping in (early, late):
            shown = bytes(mapping.flats[0].numpy())
            assert shown[:landed] == new[:landed]
            assert shown[landed:] == bytes(len(new) - landed)
        stopping.go()
        for mapping in (early, late):
            mapping.wait(0, 0, len(new))
            assert bytes(mapping.flats[0].numpy()) == new
        assert [mapping.flats[0].data_ptr() for mapping in (early, late)] == addresses
        first.wait(LIMIT_S)
    # Without the leases, a mapping alone keeps its bytes, and a write to one mapping does not change the other.
    del first, second, lease
    early.flats[0][:5] = 7
    assert bytes(early.flats[0].numpy()) == b"\7" * 5 + new[5:]
    assert bytes(late.flats[0].numpy()) == new


def mapped_at(address: int, size_bytes: int) -> tuple[int, int] | None:
    """Map new memory over the pages of these bytes. Return its address and its size in bytes; None if a page is mapped already."""
    begin = address // mmap.PAGESIZE * mmap.PAGESIZE
    count = -(-(address + size_bytes - begin) // mmap.PAGESIZE) * mmap.PAGESIZE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED_NOREPLACE
    found = LIBC.mmap(begin, count, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    return (begin, count) if found == begin else None


def test_a_mapping_that_is_gone_is_not_shown_anything(
    shm: Path, sources: list[tuple[Path, Manifest]]
) -> None:
    """When a chunk lands, other memory may have the addresses of a mapping that is gone. No chunk may be written there."""
    tier = Tier(shm / "tier", MIB + (64 << 10), "tmpfs")
    stopping = Stopping(sources[0][0], stop_at=CHUNK_BYTES)
    with Cache([tier]).open(sources[0][1], stopping) as lease:
        for _ in range(100):
            mapping = Mapping(lease.root, sources[0][1], keep=lease, arrival=lease.arrival)
            address, size_bytes = mapping.flats[0].data_ptr(), mapping.flats[0].numel()
            del mapping
            gc.collect()
            # If another thread of the tests has mapped memory there first, try again.
            if taken := mapped_at(address, size_bytes):
                break
        assert taken
        stopping.go()
        lease.wait(LIMIT_S)
        assert ctypes.string_at(address, size_bytes) == bytes(size_bytes)
        assert LIBC.munmap(*taken) == 0


def test_memory_is_given_out_only_where_all_pages_are_there(shm: Path) -> None:
    tier = Tier(shm, MIB, "tmpfs")
    whole, holes = shm / "whole", shm / "holes"
    whole.write_bytes(bytes(64 << 10))
    with holes.open("wb") as stream:
        stream.truncate(64 << 10)
    found = []
    for path in (whole, holes):
        descriptor = os.open(path, os.O_RDWR)
        try:
            found.append(tier.space.spares.map_pages(descriptor))
        finally:
            os.close(descriptor)
    assert found[0] is not None
    assert found[1] is None
    found[0][:5] = b"bytes"
    assert whole.read_bytes()[:5] == b"bytes"


def test_a_disk_keeps_no_spares(tmp_path: Path, sources: list[tuple[Path, Manifest]]) -> None:
    tier = Tier(tmp_path / "tier", 4 * MIB, "disk", spare_bytes=4 * MIB)
    pull(tier, sources[0])
    tier.evict(sources[0][1].digest)
    assert tier.space.used_bytes() == 0
    shutil.rmtree(tier.root)
    assert tier.list() == []


def test_an_empty_tier_leaves_nothing_and_one_in_use_stays(tmp_path: Path) -> None:
    tier = Tier(tmp_path / "tier", 1 << 20)
    with tier.locked():
        pass
    tier.release()
    assert not tier.root.exists()
    (tier.root / "snapshots" / "0").mkdir(parents=True)
    tier.release()
    assert (tier.root / "snapshots" / "0").is_dir()


def test_a_lock_file_that_is_removed_meanwhile_locks_nobody_out(tmp_path: Path) -> None:
    tier = Tier(tmp_path / "tier", 1 << 20)
    at_the_path: list[bool] = []

    def enter() -> None:
        with tier.locked():
            at_the_path.append((tier.root / "lock").exists())

    with tier.locked():
        waiter = threading.Thread(target=enter)
        waiter.start()
        (tier.root / "lock").unlink()
    waiter.join(20)
    assert at_the_path == [True]


def test_a_tier_that_another_process_removes_meanwhile_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = Tier(tmp_path / "tier", 1 << 20)

    def removed_before(path: Path, timeout_s: float) -> AbstractContextManager[int]:
        monkeypatch.undo()
        tier.root.rmdir()
        return locked_file(path, timeout_s)

    monkeypatch.setattr("pilotflame.snapshot.caching.tier.locked_file", removed_before)
    with tier.locked():
        assert (tier.root / "lock").exists()
