"""The folders of one snapshot that a container mounts: they stay through evictions, and no file in them is written over."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pilotflame.errors import CacheError, SourceDenied
from pilotflame.snapshot.caching.cache import Cache
from pilotflame.snapshot.caching.mounted import KeptFolders
from pilotflame.snapshot.caching.node import follow
from pilotflame.snapshot.caching.tier import Tier
from pilotflame.snapshot.format.manifest import Manifest
from pilotflame.snapshot.sources.folder import FolderSource
from pulling import CHUNK_BYTES, LIMIT_S, Stopping, check, make


@pytest.fixture
def origin(tmp_path: Path) -> tuple[Path, Manifest]:
    return tmp_path / "origin", make(tmp_path / "origin")


@pytest.fixture
def tiers(tmp_path: Path) -> list[Tier]:
    return [Tier(tmp_path / "memory", 1 << 30, "tmpfs"), Tier(tmp_path / "disk", 1 << 30)]


@pytest.fixture
def kept(tiers: list[Tier], origin: tuple[Path, Manifest]) -> Iterator[KeptFolders]:
    folders = KeptFolders(tiers, origin[1].digest)
    yield folders
    folders.close()


def evict(tiers: list[Tier], digest: str) -> None:
    """Evict a snapshot. Try again while a lease that was just closed still has it in use."""
    by_s = time.monotonic() + LIMIT_S
    while any(tier.has(digest) for tier in tiers):
        try:
            Cache(tiers).evict(digest)
        except CacheError:
            assert time.monotonic() < by_s
            time.sleep(0.01)


def test_a_follower_hears_of_a_fetch_that_runs_and_of_one_that_is_done(
    tmp_path: Path, tiers: list[Tier], kept: KeptFolders, origin: tuple[Path, Manifest]
) -> None:
    folder, manifest = origin
    source = Stopping(folder, 100_000)
    with Cache(tiers).open(manifest, source, tee=False), follow(tmp_path, manifest, kept.paths) as lease:
        assert not lease.arrival.complete
        source.go()
        lease.wait(LIMIT_S)
        with follow(tmp_path, manifest, kept.paths) as again:
            assert again.arrival.complete
            assert again.root == tiers[0].folder(manifest.digest) / "files"


def test_folders_stay_in_place_through_an_eviction_and_the_next_fetch(
    tmp_path: Path, tiers: list[Tier], kept: KeptFolders, origin: tuple[Path, Manifest]
) -> None:
    folder, manifest = origin
    inodes = [path.stat().st_ino for path in kept.paths]
    for _ in range(3):
        with Cache(tiers).open(manifest, FolderSource(folder)) as lease:
            lease.wait(LIMIT_S, copied=True)
            with follow(tmp_path, manifest, kept.paths) as followed:
                followed.wait(LIMIT_S)
                with pytest.raises(CacheError, match="in use"):
                    Cache(tiers).evict(manifest.digest)
        evict(tiers, manifest.digest)
        assert [path.stat().st_ino for path in kept.paths] == inodes
    assert Cache(tiers).list() == []


def test_what_nobody_fetches_is_refused_and_never_fetched(
    tmp_path: Path, tiers: list[Tier], kept: KeptFolders, origin: tuple[Path, Manifest]
) -> None:
    _, manifest = origin
    with pytest.raises(SourceDenied, match="no process fetches"):
        follow(tmp_path, manifest, kept.paths)
    assert not any(tier.has(manifest.digest) for tier in tiers)


def test_a_follower_does_not_take_over_a_fetch_that_was_given_up(
    tmp_path: Path, tiers: list[Tier], kept: KeptFolders, origin: tuple[Path, Manifest]
) -> None:
    folder, manifest = origin
    source = Stopping(folder, 100_000)
    fetching = Cache(tiers).open(manifest, source, tee=False)
    with follow(tmp_path, manifest, kept.paths) as lease:
        source.deny()
        fetching.close()
        with pytest.raises(SourceDenied, match="no process fetches"):
            lease.wait(LIMIT_S)
    assert not tiers[0].fetches(manifest.digest)


def test_folders_without_files_are_removed_once_no_container_has_them(
    tiers: list[Tier], origin: tuple[Path, Manifest]
) -> None:
    digest = origin[1].digest
    one, two = KeptFolders(tiers, digest), KeptFolders(tiers, digest)
    one.close()
    for tier in tiers:
        tier.sweep()
    assert all(path.is_dir() for path in two.paths)
    paths = two.paths
    two.close()
    assert not any(path.exists() for path in paths)


def test_a_snapshot_that_no_container_has_mounted_is_evicted_with_its_folder(
    tiers: list[Tier], kept: KeptFolders, origin: tuple[Path, Manifest]
) -> None:
    folder, manifest = origin
    with Cache(tiers).open(manifest, FolderSource(folder), tee=False) as lease:
        lease.wait(LIMIT_S)
    kept.close()
    evict(tiers, manifest.digest)
    assert not tiers[0].folder(manifest.digest).exists()


def test_an_eviction_passes_over_folders_without_files(
    tiers: list[Tier], kept: KeptFolders, origin: tuple[Path, Manifest]
) -> None:
    Cache(tiers).evict(origin[1].digest)
    assert all(path.is_dir() for path in kept.paths)


# -- spares: files with the bytes of another snapshot, possibly of another tenant


@pytest.fixture
def full(tmp_path: Path) -> list[Tier]:
    """Tiers with room for one snapshot in memory. Another snapshot takes the room, so a fetch writes over its files."""
    other = tmp_path / "other", make(tmp_path / "other", 1)
    tiers = [Tier(tmp_path / "memory", other[1].total_bytes, "tmpfs")]
    with Cache(tiers).open(other[1], FolderSource(other[0])) as lease:
        lease.wait(LIMIT_S)
    return tiers


def test_what_has_not_arrived_in_a_mounted_folder_reads_as_zeros(
    full: list[Tier], origin: tuple[Path, Manifest]
) -> None:
    folder, manifest = origin
    kept, source = KeptFolders(full, manifest.digest), Stopping(folder, 5 * CHUNK_BYTES)
    with Cache(full).open(manifest, source) as lease:
        lease.arrival.wait(0, 4, LIMIT_S)
        found = (kept.paths[0] / "files" / "model.safetensors").read_bytes()
        assert not any(found[5 * CHUNK_BYTES :])
        source.go()
        lease.wait(LIMIT_S)
        check(kept.paths[0] / "files", folder)
    kept.close()


def test_a_folder_that_is_fetched_over_anothers_bytes_is_kept_after_the_fetch(
    full: list[Tier], origin: tuple[Path, Manifest]
) -> None:
    folder, manifest = origin
    source = Stopping(folder, 5 * CHUNK_BYTES)
    with Cache(full).open(manifest, source) as lease, ThreadPoolExecutor() as threads:
        lease.arrival.wait(0, 4, LIMIT_S)
        keeping = threads.submit(KeptFolders, full, manifest.digest)
        with pytest.raises(TimeoutError):
            keeping.result(0.2)
        source.go()
        kept = keeping.result(LIMIT_S)
        check(kept.paths[0] / "files", folder)
    kept.close()
    # The snapshot is complete, so this does not wait.
    KeptFolders(full, manifest.digest).close()
    assert full[0].has(manifest.digest)


def test_a_fetch_that_was_given_up_over_anothers_bytes_is_removed(
    full: list[Tier], origin: tuple[Path, Manifest]
) -> None:
    folder, manifest = origin
    source = Stopping(folder, 5 * CHUNK_BYTES)
    with Cache(full).open(manifest, source) as lease:
        lease.arrival.wait(0, 4, LIMIT_S)
        source.deny()
        with pytest.raises(SourceDenied):
            lease.wait(LIMIT_S)
        with pytest.raises(CacheError, match="in use"):
            KeptFolders(full, manifest.digest)
    del lease
    gc.collect()
    kept = KeptFolders(full, manifest.digest)
    assert not full[0].has(manifest.digest)
    with Cache(full).open(manifest, FolderSource(folder)) as again:
        again.wait(LIMIT_S)
        check(kept.paths[0] / "files", folder)
    kept.close()


def test_what_a_container_can_have_open_is_never_written_over(
    tmp_path: Path, origin: tuple[Path, Manifest]
) -> None:
    folder, manifest = origin
    tier = Tier(tmp_path / "memory", manifest.total_bytes, "tmpfs", spare_bytes=manifest.total_bytes)
    kept = KeptFolders([tier], manifest.digest)
    with Cache([tier]).open(manifest, FolderSource(folder)) as lease:
        lease.wait(LIMIT_S)
    with (kept.paths[0] / "files" / "model.safetensors").open("rb") as opened:
        evict([tier], manifest.digest)
        assert tier.space.spares.files() == []
        other = make(tmp_path / "other", 1)
        with Cache([tier]).open(other, FolderSource(tmp_path / "other")) as lease:
            lease.wait(LIMIT_S)
        assert opened.read() == (folder / "model.safetensors").read_bytes()
    kept.close()


def test_followers_wait_for_no_lock_of_the_tier(tmp_path: Path, origin: tuple[Path, Manifest]) -> None:
    folder, manifest = origin
    tier, source = Tier(tmp_path / "cache", 1 << 30), Stopping(folder, 100_000)
    with Cache([tier]).open(manifest, source, tee=False) as first, ThreadPoolExecutor(1) as others:
        with tier.locked():
            # Follow as a worker does, and open the snapshot as a second activation in the fetcher does.
            opened = [others.submit(follow, tmp_path / "cache", manifest)]
            opened.append(others.submit(Cache([tier]).open, manifest, source, tee=False))
            leases = [opening.result(LIMIT_S) for opening in opened]
            assert not any(lease.arrival.complete for lease in leases)
        source.go()
        for lease in (first, *leases):
            lease.wait(LIMIT_S)
            assert lease.root == first.root
            lease.close()
