"""Memory as a file system: huge pages where this user may mount, and nothing left behind."""

import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pilotflame.errors import CacheError, SourceMissing
from pilotflame.snapshot.caching import memory, node
from pilotflame.snapshot.caching.memory import (
    enlarge_cached_pages,
    give_back,
    has_huge_pages,
    is_ours,
    mount,
    prepare,
    sweep,
    unmount,
)
from pilotflame.snapshot.caching.node import Budgets, node_cache, node_tiers, release_memory
from pilotflame.snapshot.fetching.landing import ShardTarget
from pilotflame.snapshot.format.digests import XXH3
from pilotflame.snapshot.restoring.mapping import Mapping
from pilotflame.snapshot.sources.folder import FolderSource
from pulling import make

MIB = 1 << 20
CUT_MEANWHILE = """
import os, resource, sys
from pathlib import Path
from pilotflame.snapshot.caching.memory import enlarge_cached_pages
from pilotflame.snapshot.format.manifest import Manifest
root, told, calls = Path(sys.argv[1]), resource.getrusage, []
def getrusage(who):
    calls.append(who)
    if len(calls) == 3:
        os.truncate(root / "model.safetensors", 3 << 20)
        print("cut")
    return told(who)
resource.getrusage = getrusage
enlarge_cached_pages(root, Manifest.read(root))
"""

# The program for another mount namespace. At the end of its input, it prints the content of the root.
ELSEWHERE = """
import os, sys
from pathlib import Path
from pilotflame.snapshot.caching.memory import prepare
root = Path(sys.argv[1])
prepare(root, 1 << 20)
(root / "snapshot").touch()
print("mounted" if root.is_mount() else "plain", flush=True)
sys.stdin.read()
print(os.listdir(root))
"""


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs with huge pages, of 8 MiB."""
    folder = tmp_path / "memory"
    folder.mkdir()
    if not mount(folder, 8 * MIB):
        pytest.skip("this user may not mount")
    yield folder
    unmount(folder)


def test_huge_pages_are_told_from_small_ones(mounted: Path) -> None:
    assert has_huge_pages(mounted)
    assert not has_huge_pages(mounted.parent)


def test_a_mounted_folder_is_private_and_runs_nothing(mounted: Path) -> None:
    assert is_ours(mounted)
    program = mounted / "program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    with pytest.raises(PermissionError):
        os.posix_spawn(program, [str(program)], {})


def test_reserved_pages_are_zeros_until_they_are_written(mounted: Path) -> None:
    with (mounted / "file").open("w+b") as file:
        file.truncate(3 * MIB)
        target = ShardTarget("file", file.fileno(), XXH3, memoryview(bytearray()), fresh=True)
        target.reserve(MIB, 3 * MIB)
        assert os.fstat(file.fileno()).st_blocks * 512 >= 2 * MIB
        assert os.pread(file.fileno(), 16, MIB) == bytes(16)


def test_a_full_one_says_so_before_anybody_is_killed(mounted: Path) -> None:
    with (mounted / "file").open("w+b") as file:
        file.truncate(64 * MIB)
        target = ShardTarget("model.safetensors", file.fileno(), XXH3, memoryview(bytearray()), fresh=True)
        target.reserve(0, 4 * MIB)
        with pytest.raises(OSError, match="No space left"):
            target.reserve(4 * MIB, 64 * MIB)


def test_somebody_elses_folder_is_not_taken(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir(mode=0o755)
    assert not prepare(root, MIB)
    root.chmod(0o700)
    assert prepare(root, MIB)
    link = tmp_path / "link"
    link.symlink_to(root)
    assert not prepare(link, MIB)
    assert not is_ours(tmp_path / "nothing")


def test_what_is_there_stays(tmp_path: Path) -> None:
    root = tmp_path / "root"
    assert prepare(root, MIB)
    (root / "snapshot").write_text("kept")
    assert prepare(root, MIB)
    give_back(root)
    assert (root / "snapshot").read_text() == "kept"
    (root / "snapshot").unlink()
    give_back(root)
    assert not root.exists()


def test_what_killed_fetchers_left_is_taken_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roots = {name: tmp_path / name for name in ("left", "own", "full", "used", "young")}
    for name, root in roots.items():
        assert prepare(root, MIB), name
    (roots["full"] / "snapshot").touch()
    stranger = tmp_path / "stranger"
    stranger.mkdir(mode=0o755)
    everything = [*roots.values(), stranger, tmp_path / "gone"]
    sweep(everything, roots["own"])
    # All roots changed recently, so none was removed.
    assert all(root.is_dir() for root in roots.values())

    held = os.open(roots["used"], os.O_RDONLY)
    try:
        monkeypatch.setattr(memory, "LEFT_AFTER_S", -60.0)
        mounts = roots["used"].is_mount()
        os.utime(roots["young"], (0, time.time() + 3600))
        sweep(everything, roots["own"])
        # The kernel keeps a mount that is in use.
        assert roots["used"].is_dir()
    finally:
        os.close(held)
    assert roots["left"].exists() != mounts
    assert all(roots[name].is_dir() for name in ("own", "full", "young"))
    assert stranger.is_dir()

    os.utime(roots["young"], (0, 0))
    sweep(everything, tmp_path)
    if mounts:
        assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "stranger"]
    unmount(roots["full"])


def test_a_root_that_is_mounted_in_another_mount_namespace_is_not_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder looks empty in this namespace. If it were removed here, the kernel would unmount it in the other namespace."""
    root = tmp_path / "root"
    command = ["unshare", "--mount", "--propagation", "private", sys.executable, "-c", ELSEWHERE, str(root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as elsewhere:
        assert elsewhere.stdin is not None
        assert elsewhere.stdout is not None
        if elsewhere.stdout.readline() != "mounted\n":
            pytest.skip("this user may not mount")
        monkeypatch.setattr(memory, "LEFT_AFTER_S", -60.0)
        sweep([root], tmp_path)
        said, _ = elsewhere.communicate(timeout=30)
    assert said == "['snapshot']\n"
    root.rmdir()


def test_a_nodes_cache_sweeps_when_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = tmp_path / "shm"
    shared.mkdir()
    monkeypatch.setattr(node, "SHARED_MEMORY", shared)
    monkeypatch.setattr(memory, "LEFT_AFTER_S", -60.0)
    left = [shared / f"pilotflame-{os.getuid()}-0123456789ab", shared / "pilotflame-x"]
    for root in left:
        assert prepare(root, MIB)
    cache = node_cache(tmp_path / "cache")
    # The second folder has another name than the roots of this user, so it is not swept.
    assert [root.exists() for root in left] == [not cache.tiers[0].root.is_mount(), True]
    for root in left:
        give_back(root)
    release_memory(cache)
    assert list(shared.iterdir()) == []


def test_a_cache_is_prepared_to_fetch_and_leaves_nothing(tmp_path: Path) -> None:
    source, folder = tmp_path / "source", tmp_path / "cache"
    manifest = make(source)
    # `node_tiers` does not make the folder in memory, so it lists only the tier on the disk.
    assert [tier.kind for tier in node_tiers(folder)] == ["disk"]
    cache = node_cache(folder)
    memory = cache.tiers[0]
    assert memory.kind == "tmpfs"
    with cache.open(manifest, FolderSource(source)) as lease:
        lease.wait(30, copied=True)
        assert lease.root.is_relative_to(memory.root)
        assert has_huge_pages(memory.root) == memory.root.is_mount()
        for shard in manifest.shards:
            assert (lease.root / shard.name).read_bytes() == (source / shard.name).read_bytes()
    release_memory(cache)
    assert not memory.root.exists()
    assert [tier.kind for tier in node_tiers(folder)] == ["disk"]


def test_a_cache_has_its_tier_in_memory_if_another_process_gives_the_root_back_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, folder = tmp_path / "source", tmp_path / "cache"
    manifest = make(source)

    def given_back(root: Path, size_bytes: int) -> bool:
        prepared = prepare(root, size_bytes)
        give_back(root)
        return prepared

    monkeypatch.setattr(node, "prepare", given_back)
    cache = node_cache(folder)
    assert [tier.kind for tier in cache.tiers] == ["tmpfs", "disk"]
    with cache.open(manifest, FolderSource(source)) as lease:
        lease.wait(30, copied=True)
        assert lease.root.is_relative_to(cache.tiers[0].root)
    release_memory(cache)
    assert not cache.tiers[0].root.exists()


def test_a_snapshot_beyond_the_budget_of_memory_goes_to_the_disk_and_beyond_that_it_is_refused(
    tmp_path: Path,
) -> None:
    source, folder = tmp_path / "source", tmp_path / "cache"
    manifest = make(source, tensors=2, tensor_bytes=MIB)
    for memory_mb in (0, 1):
        cache = node_cache(folder, Budgets(memory_mb, 3))
        assert [tier.kind for tier in cache.tiers] == ["tmpfs", "disk"][memory_mb == 0 :]
        with cache.open(manifest, FolderSource(source)) as lease:
            lease.wait(30)
            assert lease.root.is_relative_to(folder)
        cache.evict(manifest.digest)
        release_memory(cache)
    with pytest.raises(CacheError, match=rf"{folder} takes {MIB} bytes"):
        node_cache(folder, Budgets(0, 1)).open(manifest, FolderSource(source))


def test_weights_are_cached_in_large_pages_and_stay_what_they_were(tmp_path: Path) -> None:
    """A file that was just written is cached in pages of 4 KiB, and a page fault maps 16 of them."""
    manifest = make(tmp_path / "source", tensors=8, tensor_bytes=4 << 20)
    written = (tmp_path / "source" / "model.safetensors").read_bytes()
    with (tmp_path / "source" / "model.safetensors").open("wb") as stream:
        for begin in range(0, len(written), 4096):
            stream.write(written[begin : begin + 4096])
            stream.flush()
    small = len(written) // (64 << 10)
    faults = enlarge_cached_pages(tmp_path / "source", manifest)
    if faults > small // 4:
        pytest.skip("this file system has no large pages in its cache")
    assert enlarge_cached_pages(tmp_path / "source", manifest) <= faults
    mapping = Mapping(tmp_path / "source", manifest)
    before = resource.getrusage(resource.RUSAGE_THREAD)
    mapping.flats[0][::4096].clone()
    after = resource.getrusage(resource.RUSAGE_THREAD)
    assert after.ru_minflt - before.ru_minflt < small // 2
    assert bytes(mapping.flats[0].numpy()) == written


def test_a_file_is_read_anew_only_where_its_pages_are_small(tmp_path: Path) -> None:
    """Only one piece of the file is in small pages. Over the whole file, a fault still maps many pages on average."""
    manifest = make(tmp_path / "source", tensors=8, tensor_bytes=4 << 20)
    file = tmp_path / "source" / "model.safetensors"
    large = enlarge_cached_pages(tmp_path / "source", manifest)
    if large > file.stat().st_size // (256 << 10):
        pytest.skip("this file system has no large pages in its cache")
    written = file.read_bytes()
    with file.open("rb+", buffering=0) as stream:
        # Only clean pages can be dropped.
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 8 << 20, 2 << 20, os.POSIX_FADV_DONTNEED)
        for begin in range(8 << 20, 10 << 20, 4096):
            os.pwrite(stream.fileno(), written[begin : begin + 4096], begin)
    # If the piece had stayed in pages of 4 KiB, it would take 32 faults.
    assert enlarge_cached_pages(tmp_path / "source", manifest) <= large + memory.MOST_FAULTS
    assert file.read_bytes() == written


def test_a_file_that_is_cut_meanwhile_does_not_end_the_process(tmp_path: Path) -> None:
    """Reading mapped bytes behind the end of a file raises SIGBUS, which would end the gateway."""
    make(tmp_path / "source", tensors=8, tensor_bytes=4 << 20)
    done = subprocess.run(
        [sys.executable, "-c", CUT_MEANWHILE, str(tmp_path / "source")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "cut\n"), done.stderr


def test_a_snapshot_that_cannot_be_read_or_is_too_large_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = make(tmp_path / "source")
    monkeypatch.setattr(memory, "CACHED_SHARE", 0.0)
    assert enlarge_cached_pages(tmp_path / "source", manifest) == 0
    monkeypatch.undo()
    (tmp_path / "source" / "model.safetensors").unlink()
    os.mkfifo(tmp_path / "source" / "model.safetensors")
    with pytest.raises(SourceMissing):
        enlarge_cached_pages(tmp_path / "source", manifest)
