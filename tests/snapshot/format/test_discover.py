"""Weights without a manifest beside them, over real sockets: the first fetch makes a manifest, and later fetches use it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fault_server import Faults, FaultServer, Request
from pilotflame.errors import (
    ManifestError,
    PilotflameError,
    SnapshotChanged,
    SnapshotCorrupt,
    SourceMissing,
)
from pilotflame.snapshot.caching.cache import Cache, Lease
from pilotflame.snapshot.caching.download import download
from pilotflame.snapshot.caching.tier import Tier
from pilotflame.snapshot.fetching.fetch import FetchStats
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.format.discover import find_manifest
from pilotflame.snapshot.format.manifest import DEFAULT_CHUNK_BYTES, MANIFEST_NAME, UNKNOWN_DIGEST, Manifest
from pilotflame.snapshot.format.verify import verify
from pilotflame.snapshot.sources.http import HttpSource
from pilotflame.snapshot.sources.locate import open_source, weights_file
from safetensors.torch import save, save_file

LIMIT_S = 30.0
SHARDS = ("model-1.safetensors", "model-2.safetensors")
# Three chunks in the first shard, one in the second.
SIZES = (2_300_000, 500_000)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards with their index and assets, as a hub has them, and no manifest."""
    folder = tmp_path_factory.mktemp("weights")
    generator = torch.Generator().manual_seed(5)
    places = {}
    for number, (name, size) in enumerate(zip(SHARDS, SIZES, strict=True)):
        save_file({f"t{number}": torch.randn(size, generator=generator)}, folder / name)
        places[f"t{number}"] = name
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (folder / "config.json").write_text('{"layers": 2}')
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}")
    return folder


@pytest.fixture
def server(weights: Path) -> Iterator[FaultServer]:
    with FaultServer(weights) as found:
        yield found


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache([Tier(tmp_path / "tier", 256 << 20)])


def brought(lease: Lease, weights: Path) -> FetchStats:
    """Wait for the lease. Check that every byte is there and that the manifest describes the files. Return the statistics."""
    lease.wait(LIMIT_S)
    for name in (*SHARDS, "config.json", "1_Pooling/config.json"):
        assert (lease.root / name).read_bytes() == (weights / name).read_bytes()
    made = lease.described()
    assert made.has_digests
    assert made.published().digest == create(weights).digest
    assert Manifest.read(lease.root).shards == made.shards
    assert lease.stats is not None
    return lease.stats


def test_headers_and_assets_alone_are_read_to_describe_weights(server: FaultServer, weights: Path) -> None:
    manifest = find_manifest(HttpSource(server.url))
    whole = create(weights)
    assert not manifest.has_digests
    assert manifest.tensors == whole.tensors
    assert manifest.assets == whole.assets
    assert {digest for shard in manifest.shards for digest in shard.chunks} == {UNKNOWN_DIGEST}
    assert manifest.observed is not None
    assert manifest.observed.versions == ('"v0"', '"v0"')
    assert sum(request.sent for request in server.requests if request.name in SHARDS) < 1000


def test_the_first_fetch_makes_the_manifest(server: FaultServer, weights: Path, cache: Cache) -> None:
    manifest = find_manifest(HttpSource(server.url))
    with cache.open(manifest, HttpSource(server.url)) as lease:
        assert brought(lease, weights).fetched_bytes == manifest.total_bytes
        learned = lease.described()
        verify(lease.root, learned)
    assert learned.digest == manifest.digest, "the cache would not find it again"
    asked = len(server.requests)
    for known in (learned, manifest):
        with cache.open(known, HttpSource(server.url)) as lease:
            lease.wait(LIMIT_S)
            assert lease.described().shards == learned.shards
    assert len(server.requests) == asked


def test_a_copy_on_the_disk_has_the_manifest_too(
    server: FaultServer, weights: Path, shm: Path, tmp_path: Path
) -> None:
    disk = Tier(tmp_path / "disk", 256 << 20)
    cache = Cache([Tier(shm / "tier", 256 << 20, "tmpfs"), disk])
    manifest = find_manifest(HttpSource(server.url))
    with cache.open(manifest, HttpSource(server.url)) as lease:
        lease.wait(LIMIT_S, copied=True)
        brought(lease, weights)
    copied = disk.folder(manifest.digest) / "files"
    assert Manifest.read(copied).published().digest == create(weights).digest
    verify(copied, Manifest.read(copied))


def test_what_changed_since_it_was_described_is_refused_and_not_mixed(
    server: FaultServer, cache: Cache
) -> None:
    manifest = find_manifest(HttpSource(server.url))
    server.faults = Faults(changed_from=0)
    for _ in range(2):
        with cache.open(manifest, HttpSource(server.url)) as lease:
            with pytest.raises(SnapshotChanged, match=r"model-\d\.safetensors") as caught:
                lease.wait(LIMIT_S)
            assert "Deploy the function again" in str(caught.value.remedy)
            assert lease.arrival.landed_bytes == 0
    again = find_manifest(HttpSource(server.url))
    assert again.digest != manifest.digest
    with cache.open(again, HttpSource(server.url)) as lease:
        lease.wait(LIMIT_S)


def test_once_digests_are_known_they_decide_and_versions_do_not(
    server: FaultServer, weights: Path, cache: Cache
) -> None:
    manifest = find_manifest(HttpSource(server.url))
    with cache.open(manifest, HttpSource(server.url)) as lease:
        lease.wait(LIMIT_S)
        learned = lease.described()
    cache.evict(manifest.digest)
    server.faults = Faults(changed_from=0)
    with cache.open(learned, HttpSource(server.url)) as lease:
        assert brought(lease, weights).fetched_bytes == manifest.total_bytes
    cache.evict(manifest.digest)
    server.faults = lambda request: Faults(flip_share=float(request.name == SHARDS[1]))
    with (
        cache.open(learned, HttpSource(server.url)) as lease,
        pytest.raises(SnapshotCorrupt, match=r"model-2"),
    ):
        lease.wait(LIMIT_S)


def test_a_fetch_that_was_broken_off_goes_on_and_believes_bytes_not_notes(
    server: FaultServer, weights: Path, cache: Cache
) -> None:
    manifest = find_manifest(HttpSource(server.url))
    chunks = [shard.chunks for shard in create(weights).shards]

    def refuse_the_second(request: Request) -> Faults:
        return Faults(status=404) if request.name == SHARDS[1] else Faults(latency_s=0.01)

    source = HttpSource(server.url)
    server.faults = lambda request: replace(
        refuse_the_second(request), latency_s=0.5 if request.name == SHARDS[1] else 0.0
    )
    with cache.open(manifest, source) as lease:
        with pytest.raises(SourceMissing):
            lease.wait(LIMIT_S)
        landed = [lease.arrival.landed(chunk) for chunk in range(lease.arrival.count)]
        files = lease.root
    assert landed == [True] * len(chunks[0]) + [False]
    assert not (files / MANIFEST_NAME).exists()
    # Possible leftovers of a crash: a chunk that differs from its noted digest, and half a note.
    with (files / SHARDS[0]).open("r+b") as stream:
        stream.seek(DEFAULT_CHUNK_BYTES + 77)
        stream.write(b"torn")
    with (files.parent / "digests").open("ab") as notes:
        notes.write(b"half")
    server.faults = Faults()
    with cache.open(manifest, source) as lease:
        stats = brought(lease, weights)
    rest = manifest.shards[1].size_bytes
    assert stats.fetched_bytes == rest + DEFAULT_CHUNK_BYTES
    assert not (files.parent / "digests").exists()


def test_a_tier_that_is_full_hands_over_what_it_has_learned(
    server: FaultServer, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pilotflame.snapshot.fetching import landing

    first = tmp_path / "small"
    written = []
    write = landing.ShardTarget.write

    def full(self: landing.ShardTarget, offset: int, view: memoryview) -> None:
        if self.name.startswith(str(first)):
            written.append(len(view))
            if sum(written) > 6 << 20:
                raise OSError(28, "No space left on device")
        write(self, offset, view)

    monkeypatch.setattr(landing.ShardTarget, "write", full)
    cache = Cache([Tier(first, 256 << 20), Tier(tmp_path / "large", 256 << 20)])
    manifest = find_manifest(HttpSource(server.url))
    with cache.open(manifest, HttpSource(server.url)) as lease:
        brought(lease, weights)
        assert lease.root.is_relative_to(tmp_path / "large")
    verify(lease.root, Manifest.read(lease.root))


def test_a_pull_into_a_folder_leaves_an_ordinary_snapshot(
    server: FaultServer, weights: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    manifest = find_manifest(HttpSource(server.url))
    server.faults = lambda request: Faults(
        status=403 if request.name == SHARDS[1] else None, latency_s=0.3 * (request.name == SHARDS[1])
    )
    with pytest.raises(PilotflameError):
        download(manifest, HttpSource(server.url), target)
    server.faults = Faults()
    stats = download(manifest, HttpSource(server.url), target)
    assert 0 < stats.fetched_bytes < manifest.total_bytes
    made = Manifest.read(target)
    assert made.observed is None
    assert made.digest == create(weights).digest
    assert b"observed" not in (target / MANIFEST_NAME).read_bytes()
    verify(target, made)
    assert not [path for path in target.iterdir() if path.name.startswith(".")]
    assert download(manifest, HttpSource(server.url), target).fetched_bytes == 0
    assert find_manifest(open_source(str(target))).digest == made.digest


def test_the_same_url_at_another_server_is_another_snapshot(cache: Cache, tmp_path: Path) -> None:
    """A function may choose the server of the hub (HF_ENDPOINT). Weights from this server must not pass for the weights of other
    functions in the node's cache."""
    commit = "5" * 40
    # Both servers have the same headers, sizes and ETags. Only the values of the tensors differ.
    files = [save({"a": torch.full((100_000,), value)}) for value in (1.0, 2.0)]
    about = json.dumps({"sha": commit, "siblings": [{"rfilename": "model.safetensors"}]}).encode()
    seen = []
    for data in files:
        content = {
            f"org/net/resolve/{commit}/model.safetensors": data,
            f"api/models/org/net/revision/{commit}": about,
        }
        with FaultServer(content) as server:
            source = open_source(f"hf://org/net@{commit}", {"HF_ENDPOINT": server.url})
            manifest = find_manifest(source)
            with cache.open(manifest, source) as lease:
                lease.wait(LIMIT_S)
                seen.append((lease.root / "model.safetensors").read_bytes())
            target = tmp_path / "target"
            download(manifest, source, target, force=True)
            seen.append((target / "model.safetensors").read_bytes())
    assert seen == [files[0], files[0], files[1], files[1]]


def test_one_file_is_enough(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1000)}, tmp_path / "any name.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with FaultServer(tmp_path) as server:
        for url in (f"{server.url}/any name.safetensors", f"{server.url}/any name.safetensors?x=1"):
            manifest = find_manifest(open_source(url), weights_file(url))
            assert [shard.name for shard in manifest.shards] == ["any name.safetensors"]
            assert [asset.name for asset in manifest.assets] == ["config.json"]
        with pytest.raises(SourceMissing, match=r"There are no weights at .*is not there.*cannot be listed"):
            find_manifest(open_source(server.url))


def test_an_adapter_is_found_where_nothing_lists_its_files(tmp_path: Path) -> None:
    save_file({"base_model.model.a.lora_A.weight": torch.rand(2, 4)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"r": 2}')
    with FaultServer(tmp_path) as server:
        manifest = find_manifest(open_source(server.url))
    assert [shard.name for shard in manifest.shards] == ["adapter_model.safetensors"]
    assert [asset.name for asset in manifest.assets] == ["adapter_config.json"]


def test_a_manifest_of_a_cache_is_refused_at_a_source(server: FaultServer, tmp_path: Path) -> None:
    find_manifest(HttpSource(server.url)).write(tmp_path / MANIFEST_NAME)
    with FaultServer(tmp_path) as there, pytest.raises(ManifestError, match="observed"):
        find_manifest(HttpSource(there.url))


def test_a_page_that_lists_a_folder_is_not_read(tmp_path: Path) -> None:
    """The gateway asks only for the usual names. If the file has another name, the URL must name it."""
    save_file({"a": torch.ones(1000)}, tmp_path / "any name.safetensors")
    content = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    content[""] = b'<a href="any%20name.safetensors">any name.safetensors</a>'
    html = Faults(headers={"Content-Type": "text/html"})
    with (
        FaultServer(content, lambda request: html if not request.name else Faults()) as server,
        pytest.raises(SourceMissing, match=r"There are no weights at .*cannot be listed"),
    ):
        find_manifest(open_source(server.url))
