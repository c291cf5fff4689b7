"""Downloads into folders: what is kept, what is refused, and what an interrupted download leaves behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fault_server import Faults, FaultServer
from pilotflame.errors import CacheError, Cancelled, SnapshotCorrupt, SourceDenied
from pilotflame.snapshot.caching.download import MARK_NAME, download
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.format.manifest import MANIFEST_NAME, SIGNATURE_NAME, Manifest
from pilotflame.snapshot.format.verify import verify
from pilotflame.snapshot.sources.folder import FolderSource
from pilotflame.snapshot.sources.http import HttpSource
from pulling import CHUNK_BYTES, Stopping, check, make

SHARD = "model.safetensors"


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    (tmp_path / "origin").mkdir()
    (tmp_path / "origin" / "config.json").write_text('{"layers": 2}')
    make(tmp_path / "origin")
    return tmp_path / "origin"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "target"


@pytest.fixture
def server(origin: Path) -> Iterator[FaultServer]:
    with FaultServer(origin) as served:
        yield served


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def whole(target: Path, origin: Path) -> None:
    """Check that the target has the files of the snapshot with the right bytes, and no other files."""
    manifest = Manifest.read(origin)
    assert Manifest.read(target).digest == manifest.digest
    verify(target, manifest)
    check(target, origin)
    assert sorted(path.name for path in target.iterdir()) == sorted(["config.json", MANIFEST_NAME, SHARD])


def test_a_snapshot_comes_whole(origin: Path, target: Path, server: FaultServer) -> None:
    reported: list[tuple[int, int]] = []
    manifest = Manifest.read(origin)
    stats = download(
        manifest, HttpSource(server.url), target / "deep", progress=lambda done, total: reported.append((done, total))
    )  # fmt: skip
    whole(target / "deep", origin)
    assert stats.fetched_bytes == manifest.total_bytes
    assert reported[0] == (0, manifest.total_bytes)
    assert reported[-1] == (manifest.total_bytes, manifest.total_bytes)


def test_digests_of_sha256_are_compared_and_the_signature_comes_too(origin: Path, target: Path) -> None:
    manifest = create(origin, chunk_bytes=CHUNK_BYTES, algorithm="sha256")
    manifest.write(origin / MANIFEST_NAME)
    (origin / SIGNATURE_NAME).write_bytes(b"a signature")
    download(manifest, FolderSource(origin), target)
    verify(target, Manifest.read(target))
    assert (target / SIGNATURE_NAME).read_bytes() == b"a signature"
    data = bytearray((origin / SHARD).read_bytes())
    data[-1] ^= 1
    (origin / SHARD).write_bytes(data)
    with pytest.raises(SnapshotCorrupt, match=f"Shard {SHARD}: chunk 16 of 17"):
        download(manifest, FolderSource(origin), target.with_name("other"))


def test_what_is_there_is_not_fetched_again(origin: Path, target: Path, server: FaultServer) -> None:
    manifest = Manifest.read(origin)
    download(manifest, HttpSource(server.url), target)
    before = len(server.requests)
    again = download(manifest, HttpSource(server.url), target)
    assert (again.fetched_bytes, len(server.requests)) == (0, before)
    whole(target, origin)


def test_damage_in_a_whole_snapshot_is_mended(origin: Path, target: Path) -> None:
    manifest = Manifest.read(origin)
    download(manifest, FolderSource(origin), target)
    with (target / SHARD).open("r+b") as stream:
        stream.seek(3 * CHUNK_BYTES + 5)
        stream.write(b"damage")
    (target / "config.json").write_text("{}")
    assert download(manifest, FolderSource(origin), target).fetched_bytes == CHUNK_BYTES
    whole(target, origin)
    with (target / SHARD).open("r+b") as stream:
        stream.truncate(2 * CHUNK_BYTES)
    assert (
        download(manifest, FolderSource(origin), target).fetched_bytes
        == manifest.total_bytes - 2 * CHUNK_BYTES
    )
    whole(target, origin)


def test_files_that_came_another_way_are_kept(origin: Path, target: Path) -> None:
    target.mkdir()
    (target / SHARD).write_bytes((origin / SHARD).read_bytes())
    assert download(Manifest.read(origin), FolderSource(origin), target).fetched_bytes == 0
    whole(target, origin)


@pytest.mark.parametrize(
    "how", ["manifest", "broken manifest", "larger", "same size", "link", "asset", "asset of the same size"]
)
def test_files_of_others_are_refused_unless_forced(
    origin: Path, target: Path, tmp_path: Path, how: str
) -> None:
    manifest = Manifest.read(origin)
    target.mkdir()
    (tmp_path / "mine").write_bytes(b"mine")
    if how == "manifest":
        make(target, seed=1)
    elif how == "broken manifest":
        (target / MANIFEST_NAME).write_text("{")
    elif how == "larger":
        (target / SHARD).write_bytes(b"x" * (manifest.total_bytes + 1))
    elif how == "same size":
        make(target, seed=1)
        (target / MANIFEST_NAME).unlink()
    elif how == "link":
        (target / SHARD).symlink_to(tmp_path / "mine")
    elif how == "asset":
        (target / "config.json").write_text("{}")
    else:
        (target / "config.json").write_text('{"layers": 3}')
    before = files(target)
    with pytest.raises(CacheError, match="--force") as refused:
        download(manifest, FolderSource(origin), target)
    assert str(target) in str(refused.value)
    assert files(target) == before
    download(manifest, FolderSource(origin), target, force=True)
    whole(target, origin)
    assert (tmp_path / "mine").read_bytes() == b"mine"


def test_a_linked_folder_inside_is_never_followed(origin: Path, target: Path, tmp_path: Path) -> None:
    manifest = Manifest.read(origin)
    inside = manifest.model_copy(
        update={
            "shards": tuple(
                shard.model_copy(update={"name": f"part/{shard.name}"}) for shard in manifest.shards
            )
        }
    )
    target.mkdir()
    (tmp_path / "outside").mkdir()
    (target / "part").symlink_to(tmp_path / "outside")
    with pytest.raises(CacheError, match="leads out"):
        download(inside, FolderSource(origin), target, force=True)
    assert not list((tmp_path / "outside").iterdir())


def test_it_is_broken_off_and_resumed(origin: Path, target: Path) -> None:
    manifest, source = Manifest.read(origin), Stopping(origin, 5 * CHUNK_BYTES)

    def stop_then(done: int, total: int) -> None:
        if done >= 4 * CHUNK_BYTES:
            raise Cancelled("The progress is seen no more.")

    with pytest.raises(Cancelled):
        download(manifest, source, target, progress=stop_then, connections=1)
    assert not (target / MANIFEST_NAME).exists()
    assert (target / MARK_NAME).read_text() == manifest.digest
    rest = Stopping(origin)
    stats = download(manifest, rest, target)
    assert (
        rest.given_bytes <= manifest.total_bytes - 4 * CHUNK_BYTES + (origin / "config.json").stat().st_size
    )
    assert stats.fetched_bytes <= manifest.total_bytes - 4 * CHUNK_BYTES
    whole(target, origin)


def test_what_was_begun_of_another_snapshot_is_not_mixed_in(
    origin: Path, target: Path, tmp_path: Path
) -> None:
    other = make(tmp_path / "other", seed=1)
    source = Stopping(tmp_path / "other", 8 * CHUNK_BYTES)
    source.denied = True
    with pytest.raises(SourceDenied):
        download(other, source, target, connections=1)
    with pytest.raises(CacheError, match="--force"):
        download(Manifest.read(origin), FolderSource(origin), target)
    assert (target / MARK_NAME).read_text() == other.digest
    download(Manifest.read(origin), FolderSource(origin), target, force=True)
    whole(target, origin)


def test_two_do_not_pull_into_one_folder(origin: Path, target: Path) -> None:
    manifest, source = Manifest.read(origin), Stopping(origin, 2 * CHUNK_BYTES)
    begun, failures = threading.Event(), list[BaseException]()

    def first() -> None:
        try:
            download(manifest, source, target, connections=1, progress=lambda done, total: begun.set())
        except BaseException as error:  # noqa: BLE001  for the test's own thread
            failures.append(error)

    thread = threading.Thread(target=first)
    thread.start()
    assert begun.wait(20)
    with pytest.raises(CacheError, match="Another pull into"):
        download(manifest, FolderSource(origin), target)
    source.go()
    thread.join(20)
    assert failures == []
    whole(target, origin)


def test_a_failing_source_leaves_what_came(origin: Path, target: Path) -> None:
    manifest, source = Manifest.read(origin), Stopping(origin, 6 * CHUNK_BYTES)
    source.denied = True
    with pytest.raises(SourceDenied):
        download(manifest, source, target, connections=1)
    assert not (target / MANIFEST_NAME).exists()
    assert (
        download(manifest, FolderSource(origin), target).fetched_bytes
        == manifest.total_bytes - 6 * CHUNK_BYTES
    )
    whole(target, origin)


def test_bytes_that_are_wrong_at_the_source_are_named(origin: Path, target: Path) -> None:
    damaged = bytearray((origin / SHARD).read_bytes())
    damaged[-1] ^= 1
    (origin / SHARD).write_bytes(damaged)
    with pytest.raises(SnapshotCorrupt, match="t7"):
        download(Manifest.read(origin), FolderSource(origin), target)
    assert not (target / MANIFEST_NAME).exists()


def test_faults_on_the_way_are_healed(origin: Path, target: Path, server: FaultServer) -> None:
    plain = Faults(times=1, flip_share=0.2, reset_share=0.2, busy_share=0.2)
    server.faults = lambda request: plain if request.name == SHARD else replace(plain, flip_share=0.0)
    download(Manifest.read(origin), HttpSource(server.url), target, part_bytes=2 * CHUNK_BYTES)
    whole(target, origin)


def test_an_order_that_was_recorded_here_is_kept(origin: Path, target: Path) -> None:
    manifest = Manifest.read(origin)
    download(manifest, FolderSource(origin), target)
    manifest.model_copy(update={"first_touch": ("t3", "t1")}).write(target / MANIFEST_NAME)
    download(manifest, FolderSource(origin), target)
    assert Manifest.read(target).first_touch == ("t3", "t1")
    download(manifest.model_copy(update={"first_touch": ("t0",)}), FolderSource(origin), target)
    assert Manifest.read(target).first_touch == ("t0",)


def test_it_is_not_pulled_into_itself_nor_where_nothing_can_be(origin: Path, tmp_path: Path) -> None:
    manifest = Manifest.read(origin)
    with pytest.raises(CacheError, match="where the snapshot is"):
        download(manifest, FolderSource(origin), origin)
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="cannot be written"):
        download(manifest, FolderSource(origin), tmp_path / "file" / "below")


def test_a_disk_without_room_is_found_before_anything_is_fetched(origin: Path, target: Path) -> None:
    manifest = Manifest.read(origin)
    huge = manifest.shards[0].model_copy(update={"size_bytes": 1 << 60})
    source = Stopping(origin)
    with pytest.raises(CacheError, match="bytes free"):
        download(manifest.model_copy(update={"shards": (huge,)}), source, target)
    assert source.given_bytes == 0
    assert not list(target.iterdir())
