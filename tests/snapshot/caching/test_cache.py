"""Threads and processes use the cache: they open, follow, resume, publish and copy snapshots. Some processes are killed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pilotflame.errors import (
    CacheError,
    Cancelled,
    PilotflameError,
    SnapshotCorrupt,
    SourceDenied,
    SourceError,
    SourceMissing,
    SourceUnavailable,
    StorageFull,
)
from pilotflame.snapshot.caching.cache import Cache
from pilotflame.snapshot.caching.tier import Tier
from pilotflame.snapshot.format.manifest import MANIFEST_NAME, Manifest
from pilotflame.snapshot.format.verify import verify
from pilotflame.snapshot.restoring.mapping import Mapping
from pilotflame.snapshot.sources.folder import FolderConnection, FolderSource
from pulling import CHUNK_BYTES, LIMIT_S, Stopping, check, make, pulling

ROOMY = 64 << 20


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "none", folder], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"no right to mount: {done.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def tier(tmp_path: Path, budget_bytes: int = ROOMY, **how: Any) -> Tier:
    return Tier(tmp_path / "tier", budget_bytes, how.pop("kind", "disk"), **how)


# -- one opener


def test_what_was_opened_arrives_and_is_published(tmp_path: Path, source: Path, manifest: Manifest) -> None:
    progress: list[tuple[int, int]] = []
    with Cache([tier(tmp_path)]).open(
        manifest, FolderSource(source), progress=lambda *done: progress.append(done)
    ) as lease:
        lease.wait(LIMIT_S)
        assert lease.stats is not None
        assert lease.stats.fetched_bytes == manifest.total_bytes
        check(lease.root, source)
        assert Manifest.read(lease.root) == manifest
        verify(lease.root, manifest)
    assert progress[-1] == (manifest.total_bytes, manifest.total_bytes)
    assert [done for done, _ in progress] == sorted(done for done, _ in progress)
    assert lease.root.parents[2].stat().st_mode & 0o777 == 0o700


def test_open_returns_before_the_bytes_are_there(tmp_path: Path, source: Path, manifest: Manifest) -> None:
    stopping = Stopping(source, stop_at=3 * CHUNK_BYTES)
    with Cache([tier(tmp_path)]).open(manifest, stopping) as lease:
        mapping = Mapping(lease.root, manifest, keep=lease.lock)
        lease.arrival.wait(0, 2, LIMIT_S)
        assert not lease.arrival.complete
        assert not (lease.root / MANIFEST_NAME).exists()
        with pytest.raises(SourceUnavailable):
            lease.wait(0.01)

        begun = (source / "model.safetensors").read_bytes()[: 3 * CHUNK_BYTES]
        flat = mapping.flats[0]
        assert bytes(flat[: 3 * CHUNK_BYTES].numpy()) == begun
        stopping.go()
        lease.wait(LIMIT_S)
        assert bytes(flat.numpy()) == (source / "model.safetensors").read_bytes()


def test_what_is_ready_is_used_without_a_source_or_a_thread(
    tmp_path: Path, source: Path, manifest: Manifest
) -> None:
    cache = Cache([tier(tmp_path)])
    with cache.open(manifest, FolderSource(source)) as lease:
        lease.wait(LIMIT_S)
    shutil.rmtree(source)
    before = threading.active_count()
    with Cache([tier(tmp_path)]).open(manifest, FolderSource(source)) as lease:
        assert lease.arrival.complete
        lease.wait(0)
        assert lease.stats is None
        assert threading.active_count() == before
        verify(lease.root, manifest)


def test_a_fast_tier_is_preferred_and_copied_to_the_disk(
    shm: Path, tmp_path: Path, source: Path, manifest: Manifest
) -> None:
    fast, slow = Tier(shm / "fast", ROOMY, "tmpfs"), Tier(tmp_path / "slow", ROOMY, "disk")
    stopping = Stopping(source)
    with Cache([fast, slow]).open(manifest, stopping) as lease:
        assert lease.root.is_relative_to(fast.root)
        lease.wait(LIMIT_S, copied=True)
    assert stopping.given_bytes == manifest.total_bytes
    assert [(stored.folder.parents[1], stored.ready) for stored in Cache([fast, slow]).list()] == [
        (fast.root, True),
        (slow.root, True),
    ]
    fast.evict(manifest.digest)
    with Cache([fast, slow]).open(manifest, FolderSource(tmp_path / "nowhere")) as lease:
        assert lease.root.is_relative_to(slow.root)
        check(lease.root, source)


def test_a_copy_that_was_cancelled_is_continued_by_the_next_that_opens(
    shm: Path, tmp_path: Path, source: Path, manifest: Manifest
) -> None:
    fast, slow = Tier(shm / "fast", ROOMY, "tmpfs"), Tier(tmp_path / "slow", ROOMY, "disk")
    # While the disk tier is locked, the copy cannot begin, and closing the lease cancels it.
    with slow.locked():
        lease = Cache([fast, slow]).open(manifest, FolderSource(source))
        lease.wait(LIMIT_S)
        lease.close()
    assert [stored.ready for stored in fast.list()] == [True]
    assert not any(stored.ready for stored in slow.list())
    with Cache([fast, slow]).open(manifest, FolderSource(tmp_path / "nowhere")) as lease:
        assert lease.root.is_relative_to(fast.root)
        lease.wait(LIMIT_S, copied=True)
    assert [stored.ready for stored in slow.list()] == [True]
    check(slow.folder(manifest.digest) / "files", source)
    before = threading.active_count()
    with Cache([fast, slow]).open(manifest, FolderSource(tmp_path / "nowhere")) as lease:
        assert threading.active_count() == before


def test_without_tee_nothing_is_copied(shm: Path, tmp_path: Path, source: Path, manifest: Manifest) -> None:
    fast, slow = Tier(shm / "fast", ROOMY, "tmpfs"), Tier(tmp_path / "slow", ROOMY, "disk")
    with Cache([fast, slow]).open(manifest, FolderSource(source), tee=False) as lease:
        lease.wait(LIMIT_S, copied=True)
    assert slow.list() == []


def test_a_copy_that_cannot_be_made_says_so_and_harms_nothing(
    shm: Path, tmp_path: Path, source: Path, manifest: Manifest
) -> None:
    fast, slow = Tier(shm / "fast", ROOMY, "tmpfs"), Tier(tmp_path / "slow", 1000, "disk")
    with Cache([fast, slow]).open(manifest, FolderSource(source)) as lease:
        lease.wait(LIMIT_S)
        with pytest.raises(CacheError, match="slow takes 1000 bytes"):
            lease.wait(LIMIT_S, copied=True)
        verify(lease.root, manifest)


def test_closing_stops_the_fetch_and_keeps_what_came(
    tmp_path: Path, source: Path, manifest: Manifest
) -> None:
    cache, stopping = Cache([tier(tmp_path)]), Stopping(source, stop_at=5 * CHUNK_BYTES)
    lease = cache.open(manifest, stopping)
    lease.arrival.wait(0, 4, LIMIT_S)
    lease.close()
    lease.close()
    with pytest.raises((CacheError, Cancelled)):
        lease.arrival.wait(0, lease.arrival.count - 1, LIMIT_S)
    with pytest.raises((CacheError, Cancelled)):
        lease.wait(LIMIT_S)
    again = Stopping(source)
    with cache.open(manifest, again) as lease:
        lease.wait(LIMIT_S)
        check(lease.root, source)
    assert again.given_bytes == manifest.total_bytes - 5 * CHUNK_BYTES


def test_a_source_that_fails_fails_who_waits_and_may_be_tried_again(
    tmp_path: Path, source: Path, manifest: Manifest
) -> None:
    cache = Cache([tier(tmp_path)])
    with cache.open(manifest, FolderSource(tmp_path / "nowhere")) as lease:
        with pytest.raises(SourceMissing):
            lease.wait(LIMIT_S)
        with pytest.raises(SourceMissing):
            lease.arrival.wait(0, 0, LIMIT_S)
    with cache.open(manifest, FolderSource(source)) as lease:
        lease.wait(LIMIT_S)
        check(lease.root, source)


def test_bytes_that_differ_are_never_published(tmp_path: Path, source: Path, manifest: Manifest) -> None:
    file = source / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with Cache([tier(tmp_path)]).open(manifest, FolderSource(source)) as lease:
        with pytest.raises(SnapshotCorrupt):
            lease.wait(LIMIT_S)
        assert not (lease.root / MANIFEST_NAME).exists()


@pytest.mark.parametrize("damage", ["short", "long", "gone"])
def test_a_published_file_of_another_size_is_mended(
    tmp_path: Path, source: Path, manifest: Manifest, damage: str
) -> None:
    cache = Cache([tier(tmp_path)])
    with cache.open(manifest, FolderSource(source)) as lease:
        lease.wait(LIMIT_S)
    file = lease.root / "model.safetensors"
    if damage == "gone":
        file.unlink()
    else:
        os.truncate(file, file.stat().st_size + (-CHUNK_BYTES if damage == "short" else 1))
    again = Stopping(source)
    with cache.open(manifest, again) as lease:
        lease.wait(LIMIT_S)
        verify(lease.root, manifest)
    wanted = {"short": 2 * CHUNK_BYTES, "long": 0, "gone": manifest.total_bytes}[damage]
    assert again.given_bytes <= wanted


def test_what_survived_a_crash_torn_or_stale_is_fetched_again(
    tmp_path: Path, source: Path, manifest: Manifest
) -> None:
    cache = Cache([tier(tmp_path)])
    with cache.open(manifest, FolderSource(source)) as lease:
        lease.wait(LIMIT_S)
    (lease.root / MANIFEST_NAME).unlink()
    drawn = random.Random(3)
    with (lease.root / "model.safetensors").open("r+b") as stream:
        for chunk in (0, 4, 9):
            stream.seek(chunk * CHUNK_BYTES + drawn.randrange(CHUNK_BYTES - 8))
            stream.write(b"stale!!!")
    again = Stopping(source)
    with cache.open(manifest, again) as lease:
        lease.wait(LIMIT_S)
        verify(lease.root, manifest)
    assert again.given_bytes == 3 * CHUNK_BYTES


def test_a_deep_path_is_no_obstacle(tmp_path: Path, source: Path, manifest: Manifest) -> None:
    deep = Tier(tmp_path.joinpath(*["deeper-than-a-socket-may-be"] * 20), ROOMY)
    stopping = Stopping(source, stop_at=CHUNK_BYTES)
    with (
        Cache([deep]).open(manifest, stopping) as first,
        Cache([deep]).open(manifest, FolderSource(source)) as second,
    ):
        second.arrival.wait(0, 0, LIMIT_S)
        assert not second.arrival.complete
        stopping.go()
        first.wait(LIMIT_S)
        second.wait(LIMIT_S)
        assert second.stats is None


# -- several openers


def test_two_openers_fetch_once_and_see_the_same_files(
    tmp_path: Path, source: Path, manifest: Manifest
) -> None:
    cache, stopping, unused = (
        Cache([tier(tmp_path)]),
        Stopping(source, stop_at=2 * CHUNK_BYTES),
        Stopping(source),
    )
    with cache.open(manifest, stopping) as first, cache.open(manifest, unused) as second:
        assert first.root == second.root
        second.arrival.wait(0, 1, LIMIT_S)
        stopping.go()
        second.wait(LIMIT_S)
    assert (stopping.given_bytes, unused.given_bytes) == (manifest.total_bytes, 0)


def test_who_follows_goes_on_when_the_fetching_lease_is_closed(
    tmp_path: Path, source: Path, manifest: Manifest
) -> None:
    cache, stopping, second_source = (
        Cache([tier(tmp_path)]),
        Stopping(source, stop_at=4 * CHUNK_BYTES),
        Stopping(source),
    )
    first = cache.open(manifest, stopping)
    with cache.open(manifest, second_source) as second:
        second.arrival.wait(0, 3, LIMIT_S)
        first.close()
        second.wait(LIMIT_S)
        verify(second.root, manifest)
    assert second_source.given_bytes == manifest.total_bytes - 4 * CHUNK_BYTES


def test_who_follows_gets_the_error_of_the_fetch(tmp_path: Path, source: Path, manifest: Manifest) -> None:
    content = bytearray((source / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (source / "model.safetensors").write_bytes(content)
    cache, stopping = Cache([tier(tmp_path)]), Stopping(source, stop_at=CHUNK_BYTES)
    with cache.open(manifest, stopping) as first, cache.open(manifest, FolderSource(source)) as second:
        stopping.go()
        for lease in (first, second):
            with pytest.raises(SnapshotCorrupt, match="t7"):
                lease.wait(LIMIT_S)


def test_who_follows_one_that_is_denied_tries_its_own_credentials(
    tmp_path: Path, source: Path, manifest: Manifest
) -> None:
    expired, own = Stopping(source, stop_at=4 * CHUNK_BYTES), Stopping(source)
    cache = Cache([tier(tmp_path)])
    with cache.open(manifest, expired) as first, cache.open(manifest, own) as second:
        second.arrival.wait(0, 3, LIMIT_S)
        expired.deny()
        with pytest.raises(SourceDenied):
            first.wait(LIMIT_S)
        second.wait(LIMIT_S)
        verify(second.root, manifest)
    assert own.given_bytes == manifest.total_bytes - 4 * CHUNK_BYTES


def test_a_process_that_follows_resumes_when_the_fetching_one_is_killed(
    tmp_path: Path, source: Path, manifest: Manifest
) -> None:
    here = tier(tmp_path)
    with pulling([here], source, stop_at=6 * CHUNK_BYTES) as fetching:
        assert "opened" in fetching.hear()
        fetching.ask("upto 5")
        with pulling([here], source) as following:
            assert "opened" in following.hear()
            assert following.ask("upto 5") == {"landed": "upto 5"}
            following.tell("wait")
            fetching.kill()
            assert following.hear()["given"] == manifest.total_bytes - 6 * CHUNK_BYTES
    with Cache([here]).open(manifest, FolderSource(tmp_path / "nowhere")) as lease:
        assert lease.arrival.complete
        check(lease.root, source)


def test_killed_again_and_again_it_resumes_and_ends_identical(shm: Path, tmp_path: Path) -> None:
    manifest = make(tmp_path / "source", tensors=8, tensor_bytes=512 << 10)
    here = Tier(shm / "tier", ROOMY, "tmpfs")
    for stop in (10, 25, 40):
        with pulling([here], tmp_path / "source", stop_at=stop * CHUNK_BYTES + 1000) as puller:
            assert "opened" in puller.hear()
            puller.ask(f"upto {stop - 1}")
            puller.kill()
    last = Stopping(tmp_path / "source")
    with Cache([here]).open(manifest, last) as lease:
        lease.wait(LIMIT_S)
        check(lease.root, tmp_path / "source")
        verify(lease.root, manifest)
    assert last.given_bytes <= manifest.total_bytes - 40 * CHUNK_BYTES


class Reporting(FolderSource):
    """Writes a letter into a pipe for each connection ("c"), and for each read, which returns at most 4 KiB ("r")."""

    def __init__(self, root: Path, pipe: int) -> None:
        super().__init__(root)
        self.pipe = pipe

    def connect(self) -> FolderConnection:
        os.write(self.pipe, b"c")
        return ReportingConnection(self)


class ReportingConnection(FolderConnection):
    def read_into(self, view: memoryview) -> int:
        count = super().read_into(view[:4096])
        os.write(self._source.pipe, b"r")  # type: ignore[attr-defined]
        return count


def pull_and_be_killed(here: Tier, manifest: Manifest, source: Path, after: int) -> tuple[int, int]:
    """Fork a process that pulls, and kill it after `after` reads. Return how many connections it opened, and how many reads it made."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with Cache([here]).open(manifest, Reporting(source, write_end)) as lease:
                lease.wait(LIMIT_S)
            code = 0
        finally:
            os._exit(code)
    os.close(write_end)
    letters = b""
    while letters.count(b"r") < after and (more := os.read(read_end, 1)):
        letters += more
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while more := os.read(read_end, 65536):
        letters += more
    os.close(read_end)
    return letters.count(b"c"), letters.count(b"r")


def test_killed_at_50_random_moments_it_loses_a_chunk_a_connection_at_most(shm: Path, tmp_path: Path) -> None:
    manifest = make(tmp_path / "source", tensors=8, tensor_bytes=1 << 20)
    here = Tier(shm / "tier", ROOMY, "tmpfs")
    file = here.folder(manifest.digest) / "files" / "model.safetensors"
    wanted = (tmp_path / "source" / "model.safetensors").read_bytes()

    def arrived() -> int:
        content = file.read_bytes() if file.exists() else b""
        pieces = range(0, len(wanted), CHUNK_BYTES)
        return sum(
            len(wanted[at : at + CHUNK_BYTES])
            for at in pieces
            if content[at : at + CHUNK_BYTES] == wanted[at : at + CHUNK_BYTES]
        )

    drawn = random.Random(5)
    for _ in range(50):
        before = arrived()
        connections, times = pull_and_be_killed(here, manifest, tmp_path / "source", drawn.randrange(1, 150))
        assert arrived() >= before
        assert times * 4096 <= arrived() - before + (connections + 1) * CHUNK_BYTES
        if arrived() == len(wanted):
            verify(file.parent, manifest)
            here.evict(manifest.digest)
    with Cache([here]).open(manifest, FolderSource(tmp_path / "source")) as lease:
        lease.wait(LIMIT_S)
        check(lease.root, tmp_path / "source")


def test_processes_that_pull_the_same_at_once_fetch_it_once(
    tmp_path: Path, source: Path, manifest: Manifest
) -> None:
    here = tier(tmp_path)
    with pulling([here], source) as one, pulling([here], source) as two, pulling([here], source) as three:
        for puller in (one, two, three):
            assert "opened" in puller.hear()
        given = [puller.ask("wait")["given"] for puller in (one, two, three)]
    assert sum(given) == manifest.total_bytes
    check(here.folder(manifest.digest) / "files", source)


def test_processes_that_pull_different_snapshots_share_the_budget(tmp_path: Path) -> None:
    manifests = [make(tmp_path / f"source{index}", index) for index in range(3)]
    here = tier(tmp_path, 2 * manifests[0].total_bytes + 1000)
    stopped = {"stop_at": CHUNK_BYTES}
    with (
        pulling([here], tmp_path / "source0", **stopped) as one,
        pulling([here], tmp_path / "source1", **stopped) as two,
        pulling([here], tmp_path / "source2", **stopped) as three,
    ):
        answers = [puller.hear() for puller in (one, two, three)]
        refused = [answer for answer in answers if "error" in answer]
        assert [answer["error"] for answer in refused] == ["cache_error"]
        assert "is full" in refused[0]["message"]
        for puller, answer in zip((one, two, three), answers, strict=True):
            if "opened" in answer:
                puller.ask("go")
                assert puller.ask("wait")["given"] == manifests[0].total_bytes
        assert here.space.used_bytes() <= here.budget_bytes
    for stored in here.list():
        verify(stored.folder / "files", Manifest.read(stored.folder / "files"))


# -- errors


def test_larger_than_every_budget_names_the_sizes(tmp_path: Path, source: Path, manifest: Manifest) -> None:
    tiers = [Tier(tmp_path / "one", 1000), Tier(tmp_path / "two", 2000)]
    with pytest.raises(CacheError) as caught:
        Cache(tiers).open(manifest, FolderSource(source))
    for part in (str(manifest.total_bytes), "1000", "2000", str(tmp_path / "one"), str(tmp_path / "two")):
        assert part in str(caught.value)
    assert "larger budget" in caught.value.remedy
    assert not list(tmp_path.glob("*/snapshots/*"))


def test_a_full_tmpfs_gives_way_to_the_next_tier(
    small: Path, tmp_path: Path, source: Path, manifest: Manifest
) -> None:
    (small / "other").write_bytes(bytes(3 << 19))
    tiers = [Tier(small / "fast", ROOMY, "tmpfs"), Tier(tmp_path / "slow", ROOMY)]
    with Cache(tiers).open(manifest, FolderSource(source)) as lease:
        assert lease.root.is_relative_to(tmp_path / "slow")
        lease.wait(LIMIT_S)
        verify(lease.root, manifest)
    with pytest.raises(CacheError, match="few bytes free") as caught:
        Cache(tiers[:1]).open(make(tmp_path / "another", 1), FolderSource(tmp_path / "another"))
    assert str(small / "fast") in str(caught.value)


def test_a_tmpfs_that_fills_up_meanwhile_is_an_error_and_then_resumed(
    small: Path, tmp_path: Path, source: Path, manifest: Manifest
) -> None:
    here, stopping = Tier(small / "fast", ROOMY, "tmpfs"), Stopping(source, stop_at=2 * CHUNK_BYTES)
    with Cache([here]).open(manifest, stopping) as lease:
        lease.arrival.wait(0, 1, LIMIT_S)
        status = os.statvfs(small)
        (small / "other").write_bytes(bytes(status.f_bavail * status.f_frsize - (256 << 10)))
        stopping.go()
        with pytest.raises(CacheError, match="No space left") as caught:
            lease.wait(LIMIT_S)
        assert "model.safetensors" in str(caught.value)
    (small / "other").unlink()
    with Cache([here]).open(manifest, FolderSource(source)) as lease:
        lease.wait(LIMIT_S)
        verify(lease.root, manifest)


def fill(folder: Path, left_bytes: int) -> None:
    """Fill the file system of `folder` until at most `left_bytes` are free. Other processes may write to it at the same time."""
    with (folder / "other").open("wb") as stream:
        while (free := free_bytes(folder)) > left_bytes:
            # If another process took the free space, this raises. Then the loop tries again.
            with contextlib.suppress(OSError):
                size = stream.seek(0, os.SEEK_END)
                os.posix_fallocate(stream.fileno(), size, free - left_bytes)


def free_bytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


@pytest.mark.parametrize("follows", [False, True])
def test_a_tmpfs_that_fills_up_meanwhile_is_continued_on_the_disk(
    small: Path, tmp_path: Path, source: Path, manifest: Manifest, follows: bool
) -> None:
    tiers = [Tier(small / "fast", ROOMY, "tmpfs"), Tier(tmp_path / "slow", ROOMY)]
    whole = (source / "model.safetensors").read_bytes()
    stopping = Stopping(source, stop_at=2 * CHUNK_BYTES)
    with Cache(tiers).open(manifest, stopping) as first, Cache(tiers).open(manifest, stopping) as second:
        lease = second if follows else first
        assert lease.root.is_relative_to(small)
        lease.arrival.wait(0, 1, LIMIT_S)
        mapping = Mapping(lease.root, manifest, keep=lease, arrival=lease.arrival)
        address = mapping.flats[0].data_ptr()
        with pulling(tiers, source) as other:
            assert other.hear()["opened"].startswith(str(small))
            other.ask("map")
            fill(small, 512 << 10)
            stopping.go()
            mapping.wait(0, 0, len(whole))
            assert bytes(mapping.flats[0].numpy()) == whole
            assert mapping.flats[0].data_ptr() == address
            assert other.ask("read") == {"read": hashlib.sha256(whole).hexdigest()}
        lease.wait(LIMIT_S, copied=True)
        assert lease.root.is_relative_to(tmp_path / "slow")
        verify(lease.root, manifest)
        late = Mapping(lease.root, manifest, keep=lease.lock)
        assert bytes(late.flats[0].numpy()) == whole
    # Chunks in the tmpfs were copied. Only the chunks that were being received are fetched again.
    assert stopping.given_bytes < manifest.total_bytes + 4 * CHUNK_BYTES
    with Cache(tiers).open(manifest, FolderSource(tmp_path / "nowhere")) as lease:
        assert lease.root.is_relative_to(tmp_path / "slow")


def test_a_fetch_that_is_killed_over_a_full_tmpfs_is_continued_by_who_follows(
    small: Path, tmp_path: Path, source: Path, manifest: Manifest
) -> None:
    tiers = [Tier(small / "fast", ROOMY, "tmpfs"), Tier(tmp_path / "slow", ROOMY)]
    whole = (source / "model.safetensors").read_bytes()
    with pulling(tiers, source, stop_at=9 * CHUNK_BYTES) as puller:
        assert puller.hear()["opened"].startswith(str(small))
        puller.ask("upto 1")
        with Cache(tiers).open(manifest, FolderSource(source)) as lease:
            mapping = Mapping(lease.root, manifest, keep=lease, arrival=lease.arrival)
            fill(small, 0)
            puller.kill()
            mapping.wait(0, 0, len(whole))
            assert bytes(mapping.flats[0].numpy()) == whole
            lease.wait(LIMIT_S)
            verify(lease.root, manifest)


def test_a_fetch_closed_while_it_is_moved_lets_go_of_both_tiers(
    small: Path, tmp_path: Path, source: Path, manifest: Manifest
) -> None:
    tiers = [Tier(small / "fast", ROOMY, "tmpfs"), Tier(tmp_path / "slow", ROOMY)]
    stopping = Stopping(source, stop_at=2 * CHUNK_BYTES)
    lease = Cache(tiers).open(manifest, stopping)
    lease.arrival.wait(0, 1, LIMIT_S)
    fill(small, 0)
    # While the disk tier is locked, the fetch cannot continue there.
    with tiers[1].locked():
        stopping.go()
        closing = threading.Thread(target=lease.close)
        closing.start()
    closing.join(LIMIT_S)
    # If the fetch found room and completed before it was closed, `wait` raises nothing.
    with contextlib.suppress(CacheError, Cancelled):
        lease.wait(LIMIT_S)
    for tier in tiers:
        with tier.locked():
            pass
        tier.evict(manifest.digest)
        assert tier.list() == []


def test_when_both_tiers_are_full_the_error_names_both(
    small: Path, tmp_path: Path, source: Path, manifest: Manifest
) -> None:
    tiers = [Tier(small / "fast", ROOMY, "tmpfs"), Tier(tmp_path / "slow", 1000)]
    stopping = Stopping(source, stop_at=2 * CHUNK_BYTES)
    with Cache(tiers).open(manifest, stopping) as lease:
        lease.arrival.wait(0, 1, LIMIT_S)
        fill(small, 256 << 10)
        stopping.go()
        with pytest.raises(StorageFull, match=r"No space left.*slow takes 1000 bytes"):
            lease.wait(LIMIT_S)
        with pytest.raises(StorageFull, match="No space left"):
            lease.arrival.wait(0, lease.arrival.count - 1, LIMIT_S)


class Raising(FolderSource):
    """A source with a bug: its method `where` raises ZeroDivisionError."""

    def __init__(self, folder: Path, where: str) -> None:
        super().__init__(folder)
        self._where = where

    def connect(self) -> FolderConnection:
        if self._where == "connect":
            raise ZeroDivisionError("of the test")
        connection = FolderConnection(self)
        setattr(connection, self._where, lambda *_: 1 // 0)
        return connection


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("where", ["connect", "begin", "read_into"])
def test_a_source_that_raises_fails_those_who_wait_with_its_error(
    tmp_path: Path, source: Path, manifest: Manifest, where: str
) -> None:
    with Cache([tier(tmp_path)]).open(manifest, Raising(source, where)) as lease:
        mapping = Mapping(lease.root, manifest, keep=lease, arrival=lease.arrival)
        for wait in (lambda: mapping.wait(0, 0, 1), lambda: lease.wait(LIMIT_S)):
            with pytest.raises(SourceError, match="ZeroDivisionError"):
                wait()
    # The failed fetch does not block another fetch.
    with Cache([tier(tmp_path)]).open(manifest, FolderSource(source)) as lease:
        lease.wait(LIMIT_S)
        check(lease.root, source)


@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_tier_that_raises_when_a_fetch_moves_there_fails_those_who_wait(
    small: Path, tmp_path: Path, source: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = [Tier(small / "fast", ROOMY, "tmpfs"), Tier(tmp_path / "slow", ROOMY)]
    stopping = Stopping(source, stop_at=2 * CHUNK_BYTES)
    with Cache(tiers).open(manifest, stopping) as lease:
        lease.arrival.wait(0, 1, LIMIT_S)
        fill(small, 256 << 10)
        monkeypatch.setattr(tiers[1], "make_room", lambda *_: 1 // 0)
        stopping.go()
        with pytest.raises(CacheError, match="ZeroDivisionError"):
            lease.wait(LIMIT_S)
        with pytest.raises(CacheError, match="ZeroDivisionError"):
            lease.arrival.wait(0, lease.arrival.count - 1, LIMIT_S)


def test_a_full_disk_is_found_out_before_anything_is_handed_out(
    small: Path, tmp_path: Path, source: Path, manifest: Manifest
) -> None:
    (small / "other").write_bytes(bytes(3 << 19))
    with pytest.raises(CacheError) as caught:
        Cache([Tier(small / "disk", ROOMY, "disk")]).open(manifest, FolderSource(source))
    assert str(small / "disk") in str(caught.value)
    assert not (small / "disk" / "snapshots" / manifest.digest).exists()


def test_a_read_only_cache_gives_what_it_has_and_refuses_the_rest(
    small: Path, tmp_path: Path, source: Path, manifest: Manifest
) -> None:
    here = Tier(small / "tier", ROOMY)
    with Cache([here]).open(manifest, FolderSource(source)) as lease:
        lease.wait(LIMIT_S)
    subprocess.run(["mount", "-o", "remount,ro", small], check=True)
    with Cache([here]).open(manifest, FolderSource(tmp_path / "nowhere")) as lease:
        assert lease.arrival.complete
        verify(lease.root, manifest)
    another = make(tmp_path / "another", 1)
    with pytest.raises(CacheError, match="Read-only") as caught:
        Cache([here]).open(another, FolderSource(tmp_path / "another"))
    assert str(here.root) in str(caught.value)
    with Cache([here, Tier(tmp_path / "next", ROOMY)]).open(
        another, FolderSource(tmp_path / "another")
    ) as lease:
        lease.wait(LIMIT_S)
        assert lease.root.is_relative_to(tmp_path / "next")


def test_a_folder_without_permission_is_named(shm: Path) -> None:
    shm.chmod(0o755)
    make(shm / "source")
    (shm / "tier").mkdir(mode=0o755)
    # Root may write anywhere, so another user tries.
    user = {"user": 65534} if os.getuid() == 0 else {}
    if not user:
        (shm / "tier").chmod(0o555)
    with pulling([Tier(shm / "tier", ROOMY)], shm / "source", **user) as puller:
        answer = puller.hear()
    assert answer["error"] == "cache_error"
    assert "Permission denied" in answer["message"]
    assert str(shm / "tier") in answer["message"]


def test_a_cache_without_tiers_says_so(source: Path, manifest: Manifest) -> None:
    with pytest.raises(PilotflameError, match="No tier"):
        Cache([]).open(manifest, FolderSource(source))
