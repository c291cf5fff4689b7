"""Assets in the cache: there before the weights, verified, part of what is published."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from pilotflame.errors import SnapshotCorrupt, SourceMissing
from pilotflame.snapshot.caching.cache import Cache
from pilotflame.snapshot.caching.tier import Tier
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.format.manifest import Manifest
from pilotflame.snapshot.format.verify import verify
from pilotflame.snapshot.sources.folder import FolderSource
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
