"""Parts in the cache: only their chunks are requested, kept and counted. The bytes between them are always zeros."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from pilotflame.errors import CacheError, SnapshotMismatch
from pilotflame.snapshot.caching.cache import Cache, Lease
from pilotflame.snapshot.caching.tier import Tier
from pilotflame.snapshot.format.create import create, observe
from pilotflame.snapshot.format.manifest import Manifest
from pilotflame.snapshot.format.slices import part_of
from pilotflame.snapshot.restoring.mapping import Mapping
from pilotflame.snapshot.restoring.plan import make_plan, restore
from pilotflame.snapshot.restoring.views import views
from pilotflame.snapshot.sources.realm import realm_of
from pulling import CHUNK_BYTES, LIMIT_S, Stopping, make
from safetensors.torch import load_file, save_file
from torch import nn

ROOMY = 64 << 20
REALM = realm_of("s3://bucket/one")


def mapped(lease: Lease) -> Mapping:
    return Mapping(lease.root, lease.manifest, keep=lease.lock, arrival=lease.arrival)


def fetched(tiers: list[Tier], manifest: Manifest, source: Path, realm: str = "") -> int:
    """Open a snapshot and wait for it. Return how many bytes its source gave."""
    counted = Stopping(source)
    with Cache(tiers).open(manifest.with_realm(realm), counted) as lease:
        lease.wait(LIMIT_S)
        check(lease, source)
    return counted.given_bytes


def check(lease: Lease, source: Path) -> None:
    """Check that the chunks of the part equal the source, and that the bytes between them are zeros."""
    for index, shard in enumerate(lease.manifest.shards):
        wanted = bytearray(shard.size_bytes)
        whole = (source / shard.name).read_bytes()
        for begin, end in lease.manifest.needed_extents(index):
            wanted[begin:end] = whole[begin:end]
        assert (lease.root / shard.name).read_bytes() == wanted


def halves(manifest: Manifest) -> list[Manifest]:
    return [part_of(manifest, [], {"*": (0, rank, 2)}) for rank in range(2)]


@pytest.mark.parametrize("kind", ["disk", "tmpfs"])
def test_only_the_chunks_of_a_part_are_fetched_and_once(
    tmp_path: Path, shm: Path, source: Path, manifest: Manifest, kind: Any
) -> None:
    part = part_of(manifest, ["t2", "t5"], {"t5": (0, 1, 2)})
    assert part.needed_bytes < manifest.total_bytes // 3
    # The tier has room for the part, but not for the whole snapshot.
    tier = Tier(shm / "tier" if kind == "tmpfs" else tmp_path / "tier", part.needed_bytes, kind)
    with pytest.raises(CacheError):
        Cache([tier]).open(manifest, Stopping(source))
    assert fetched([tier], part, source) == part.needed_bytes
    assert tier.space.used_bytes() == part.needed_bytes
    [stored] = tier.list()
    assert stored.ready
    assert stored.allocated_bytes <= part.needed_bytes + 2 * 4096
    assert fetched([tier], part, source) == 0


def test_a_module_gets_its_slice_of_what_was_fetched(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    save_file(
        {"up.weight": torch.rand(512, 256), "down.weight": torch.rand(256, 512)}, source / "model.safetensors"
    )
    whole, cuts = create(source, chunk_bytes=CHUNK_BYTES), {"up.*": (0, 1, 4), "down.*": (0, 1, 2)}
    counted = Stopping(source)
    with Cache([Tier(tmp_path / "tier", ROOMY)]).open(part_of(whole, [], cuts), counted) as lease:
        module: Any = nn.ModuleDict(
            {"up": nn.Linear(256, 128, bias=False), "down": nn.Linear(512, 128, bias=False)}
        )
        mapping = mapped(lease)
        # `make_plan` gets no slices, so it uses the slices of the part.
        restore(make_plan(module, lease.manifest), mapping)
        lease.wait(LIMIT_S)
        library = load_file(source / "model.safetensors")
        assert torch.equal(module.up.weight, library["up.weight"][128:256])
        assert torch.equal(module.down.weight, library["down.weight"][128:])
        assert counted.given_bytes == lease.manifest.needed_bytes < whole.total_bytes * 3 // 5
        # Tensors that were not fetched are refused, and are not read as zeros.
        for wrong in ({}, {"up.*": (0, 0, 4)}):
            with pytest.raises(SnapshotMismatch, match=r"up.weight' is outside of the part"):
                views(mapping, ["up.weight"], wrong)
        with pytest.raises(SnapshotMismatch, match=r"outside of the part that is fetched \(up.weight\)"):
            make_plan(module, lease.manifest, slices={"up.*": (0, 2, 4), "down.*": (0, 1, 2)})


def test_the_next_part_is_fetched_without_what_the_first_one_has(
    tmp_path: Path, source: Path, manifest: Manifest
) -> None:
    one, two = part_of(manifest, ["t0", "t1", "t2"], {}), part_of(manifest, ["t2", "t3"], {})
    tiers = [Tier(tmp_path / "tier", ROOMY)]
    assert fetched(tiers, one, source, REALM) == one.needed_bytes
    both = part_of(manifest, ["t0", "t1", "t2", "t3"], {}).needed_bytes
    assert fetched(tiers, two, source, REALM) == both - one.needed_bytes
    # The whole snapshot is fetched without the chunks that the parts have.
    assert fetched(tiers, manifest, source, REALM) == manifest.total_bytes - both


def test_no_bytes_of_evicted_weights_are_between_those_of_a_part(
    tmp_path: Path, shm: Path, source: Path, manifest: Manifest
) -> None:
    tier = Tier(shm / "tier", ROOMY, "tmpfs", spare_bytes=ROOMY)
    other = make(tmp_path / "other", seed=1)
    assert fetched([tier], other, tmp_path / "other") == other.total_bytes
    tier.evict(other.digest)
    assert tier.space.spares.total_bytes() == other.total_bytes
    # `fetched` checks that zeros, not bytes of `other`, are between the chunks of the part.
    for part in halves(manifest):
        assert fetched([tier], part, source) == part.needed_bytes
        tier.evict(part.digest)
    # The files of an evicted part have holes, so they do not become spares.
    assert tier.space.spares.total_bytes() == other.total_bytes


def test_a_part_that_was_interrupted_goes_on(tmp_path: Path, source: Path, manifest: Manifest) -> None:
    part, tier = part_of(manifest, ["t1", "t6"], {}), Tier(tmp_path / "tier", ROOMY)
    first = Stopping(source, stop_at=manifest.total_bytes // 2)
    with Cache([tier]).open(part, first) as lease:
        lease.arrival.wait(*lease.arrival.chunks.covering(0, *part.needed_extents(0)[0]), LIMIT_S)
        assert not lease.arrival.complete
    assert fetched([tier], part, source) == part.needed_bytes - first.given_bytes


def test_processes_that_open_a_part_share_one_fetch(tmp_path: Path, source: Path, manifest: Manifest) -> None:
    part, tier = part_of(manifest, ["t1", "t6"], {}), Tier(tmp_path / "tier", ROOMY)
    first, second = Stopping(source, stop_at=manifest.total_bytes // 2), Stopping(source)
    with Cache([tier]).open(part, first) as one, Cache([tier]).open(part, second) as two:
        first.go()
        one.wait(LIMIT_S)
        two.wait(LIMIT_S)
        check(two, source)
    assert (first.given_bytes, second.given_bytes) == (part.needed_bytes, 0)


def test_a_part_in_memory_is_copied_to_the_disk(
    tmp_path: Path, shm: Path, source: Path, manifest: Manifest
) -> None:
    part = part_of(manifest, ["t1", "t6"], {})
    memory, disk = Tier(shm / "tier", ROOMY, "tmpfs"), Tier(tmp_path / "disk", part.needed_bytes)
    with Cache([memory, disk]).open(part, Stopping(source)) as lease:
        lease.wait(LIMIT_S, copied=True)
    memory.evict(part.digest)
    assert fetched([memory, disk], part, source) == 0
    assert disk.space.used_bytes() == part.needed_bytes


def test_a_part_of_weights_without_a_manifest_learns_its_own_digests(tmp_path: Path) -> None:
    big = tmp_path / "big"
    big.mkdir()
    save_file({"t": torch.arange(3 << 20, dtype=torch.int32)}, big / "model.safetensors")
    part = part_of(observe(Stopping(big), ["model.safetensors"]), [], {"t": (0, 2, 3)})
    tier = Tier(tmp_path / "tier", ROOMY)
    counted = Stopping(big)
    with Cache([tier]).open(part, counted) as lease:
        lease.wait(LIMIT_S)
        described = lease.described()
        assert described.has_digests
        assert described.digest == part.digest
        assert views(mapped(lease), ["t"])["t"][0].item() == 2 << 20
    assert counted.given_bytes == part.needed_bytes < (3 << 20) * 4
    assert fetched([tier], described, big) == 0
    # The part has digests now, so a new version of the object with the same bytes is accepted.
    tier.evict(part.digest)
    os.utime(big / "model.safetensors")
    assert fetched([tier], described, big) == part.needed_bytes
