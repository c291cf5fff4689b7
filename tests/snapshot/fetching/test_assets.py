"""Assets in the cache: they are there before the weights, verified, and published with the weights."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fault_server import Faults, FaultServer
from pilotflame.errors import SnapshotCorrupt, SourceMissing
from pilotflame.snapshot.caching.cache import Cache
from pilotflame.snapshot.caching.related import Related
from pilotflame.snapshot.caching.tier import Tier
from pilotflame.snapshot.fetching.assets import READERS, fetch_assets
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.format.manifest import MANIFEST_NAME, Manifest
from pilotflame.snapshot.format.verify import verify
from pilotflame.snapshot.sources.folder import FolderConnection, FolderSource
from pilotflame.snapshot.sources.http import HttpSource
from pilotflame.snapshot.sources.source import ObjectInfo
from pulling import CHUNK_BYTES, LIMIT_S, Stopping, make

ROOMY = 64 << 20


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    make(folder)
    (folder / "config.json").write_text('{"hidden_size": 8}')
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "vocab.txt").write_text("a\nb\n")
    (folder / "empty.txt").touch()
    return folder


@pytest.fixture
def manifest(source: Path) -> Manifest:
    made = create(source, chunk_bytes=CHUNK_BYTES)
    assert {asset.name for asset in made.assets} >= {"config.json", "tokenizer/vocab.txt"}
    return made


def test_assets_are_there_when_open_returns_and_published_with_the_rest(
    tmp_path: Path, source: Path, manifest: Manifest
) -> None:
    cache, stopping = Cache([Tier(tmp_path / "tier", ROOMY)]), Stopping(source, stop_at=0)
    with cache.open(manifest, stopping) as lease:
        assert (lease.root / "config.json").read_text() == '{"hidden_size": 8}'
        assert (lease.root / "tokenizer" / "vocab.txt").read_text() == "a\nb\n"
        stopping.go()
        lease.wait(LIMIT_S)
        verify(lease.root, manifest)
    shutil.rmtree(source)
    with cache.open(manifest, FolderSource(source)) as lease:
        verify(lease.root, manifest)


def test_who_follows_has_the_assets_too(tmp_path: Path, source: Path, manifest: Manifest) -> None:
    cache, stopping = Cache([Tier(tmp_path / "tier", ROOMY)]), Stopping(source, stop_at=CHUNK_BYTES)
    with cache.open(manifest, stopping) as first:
        (first.root / "config.json").unlink()
        with cache.open(manifest, FolderSource(source)) as second:
            assert (second.root / "config.json").read_text() == '{"hidden_size": 8}'
            stopping.go()
            second.wait(LIMIT_S)
            verify(second.root, manifest)


def test_an_asset_that_differs_is_refused_and_named(tmp_path: Path, source: Path, manifest: Manifest) -> None:
    (source / "config.json").write_text('{"hidden_size": 9}')
    cache = Cache([Tier(tmp_path / "tier", ROOMY)])
    with pytest.raises(SnapshotCorrupt, match=r"config\.json"):
        cache.open(manifest, FolderSource(source))
    (source / "config.json").unlink()
    with pytest.raises(SourceMissing, match=r"config\.json"):
        cache.open(manifest, FolderSource(source))
    (source / "config.json").write_text('{"hidden_size": 8}')
    with cache.open(manifest, FolderSource(source)) as lease:
        lease.wait(LIMIT_S)
        verify(lease.root, manifest)


def test_an_asset_torn_by_a_crash_or_lost_is_brought_again(
    tmp_path: Path, source: Path, manifest: Manifest
) -> None:
    cache = Cache([Tier(tmp_path / "tier", ROOMY)])
    with cache.open(manifest, FolderSource(source)) as lease:
        lease.wait(LIMIT_S)
    (lease.root / "config.json").write_text("{")
    (lease.root / "tokenizer" / "vocab.txt").unlink()
    again = Stopping(source)
    with cache.open(manifest, again) as lease:
        lease.wait(LIMIT_S)
        verify(lease.root, manifest)
    # Only the assets were read again.
    assert again.given_bytes == 0


class SlowAssets(FolderSource):
    """Gives assets only after `go`. A request for a shard sets `shards_asked`."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.go, self.shards_asked = threading.Event(), threading.Event()
        self.assets_asked: list[str] = []

    def connect(self) -> FolderConnection:
        return SlowAssetsConnection(self)


class SlowAssetsConnection(FolderConnection):
    def begin(self, name: str, begin: int, end: int, version: str = "") -> ObjectInfo:
        slow = self._source
        assert isinstance(slow, SlowAssets)
        if name.endswith(".safetensors"):
            slow.shards_asked.set()
        else:
            slow.assets_asked.append(name)
            assert slow.go.wait(LIMIT_S)
        return super().begin(name, begin, end, version)


def test_shards_are_fetched_beside_the_assets_and_published_only_with_them(
    tmp_path: Path, source: Path, manifest: Manifest
) -> None:
    tier, slow = Tier(tmp_path / "tier", ROOMY), SlowAssets(source)
    with ThreadPoolExecutor(1) as opener:
        opening = opener.submit(Cache([tier]).open, manifest, slow)
        try:
            assert slow.shards_asked.wait(LIMIT_S)
            # A second lease follows the first one and receives the arrival of all chunks.
            following = Cache([tier])._pull(manifest.digest, manifest, FolderSource(source), Related())
            following.start(lambda: None)
            following.arrival.wait(0, following.arrival.count - 1, LIMIT_S)
            assert not opening.done()
            assert not (tier.folder(manifest.digest) / "files" / MANIFEST_NAME).exists()
        finally:
            slow.go.set()
        following.wait(LIMIT_S)
        with opening.result(LIMIT_S) as lease:
            lease.wait(LIMIT_S)
            verify(lease.root, manifest)
        following.close()


def test_copies_of_the_assets_are_taken_if_they_are_right(
    tmp_path: Path, source: Path, manifest: Manifest
) -> None:
    copies = tmp_path / "copies"
    shutil.copytree(source, copies)
    (copies / "config.json").write_text('{"hidden_size": 9}')
    slow = SlowAssets(source)
    slow.go.set()
    with Cache([Tier(tmp_path / "tier", ROOMY)]).open(manifest, slow, assets=copies) as lease:
        lease.wait(LIMIT_S)
        verify(lease.root, manifest)
    assert slow.assets_asked == ["config.json"]


@pytest.mark.parametrize("text", ["{", '{"hidden_size": 8}' * 1000])
def test_an_asset_of_another_size_is_refused_at_once(
    tmp_path: Path, source: Path, manifest: Manifest, text: str
) -> None:
    (source / "config.json").write_text(text)
    with FaultServer(source) as server:
        for remote in (HttpSource(server.url), FolderSource(source)):
            with pytest.raises(SnapshotCorrupt, match=r"config\.json"):
                fetch_assets(manifest, remote, tmp_path / "files")


def test_assets_are_asked_for_once_each_over_few_connections(tmp_path: Path, source: Path) -> None:
    for number in range(20):
        (source / f"more{number}.json").write_text(f"[{number}]")
    manifest = create(source, chunk_bytes=CHUNK_BYTES)
    with FaultServer(source) as server:
        fetch_assets(manifest, HttpSource(server.url), tmp_path / "files")
        asked = [request.name for request in server.requests]
        assert sorted(asked) == sorted(asset.name for asset in manifest.assets if asset.size_bytes)
        assert server.connections <= READERS
    for asset in manifest.assets:
        assert (tmp_path / "files" / asset.name).read_bytes() == (source / asset.name).read_bytes()


def test_assets_come_whole_through_faults_that_pass(tmp_path: Path, source: Path, manifest: Manifest) -> None:
    faults = [
        Faults(times=1, **{share: 1.0})
        for share in ("short_share", "reset_share", "busy_share", "flip_share")
    ]  # type: ignore[arg-type]
    for number, fault in enumerate((*faults, Faults(late_share=1.0))):
        with FaultServer(source, fault) as server:
            fetch_assets(manifest, HttpSource(server.url), tmp_path / str(number))
        for asset in manifest.assets:
            assert (tmp_path / str(number) / asset.name).read_bytes() == (source / asset.name).read_bytes()
