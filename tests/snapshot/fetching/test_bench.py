"""The bench: rounds over memory that is reused, against a real server."""

from __future__ import annotations

from pathlib import Path

import pytest
from fault_server import Faults, FaultServer
from pilotflame.errors import CacheError, SnapshotCorrupt
from pilotflame.snapshot.fetching.bench import bench
from pilotflame.snapshot.format.manifest import Manifest
from pilotflame.snapshot.sources.folder import FolderSource
from pilotflame.snapshot.sources.http import HttpSource
from pulling import make


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return make(tmp_path, tensors=16)


def test_every_round_reads_every_byte(manifest: Manifest, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    recorded = manifest.model_copy(update={"first_touch": ("t5", "t0")})
    with FaultServer(tmp_path) as server:
        found = bench(
            recorded, HttpSource(server.url), progress=lambda done, total: told.append((done, total))
        )  # fmt: skip
    assert [item.stats.fetched_bytes for item in found.rounds] == [manifest.total_bytes] * 3
    assert told[-1] == (3 * manifest.total_bytes, 3 * manifest.total_bytes)
    assert found.first_tensor is not None
    assert found.first_tensor.name == "t5"
    assert all(item.first_tensor_s is not None and item.first_tensor_s > 0 for item in found.rounds)
    assert all(item.ceiling_share is not None and item.ceiling_share > 0 for item in found.rounds)
    assert found.latency_s is not None
    others = sorted(item.seconds for item in found.rounds[1:])
    assert found.median(lambda item: item.seconds) == pytest.approx(sum(others) / 2)


def test_the_first_byte_waits_for_the_server(manifest: Manifest, tmp_path: Path) -> None:
    with FaultServer(tmp_path, Faults(latency_s=0.05)) as server:
        found = bench(manifest, HttpSource(server.url), rounds=1, connections=2)
    assert found.latency_s is not None
    assert found.latency_s >= 0.05
    assert found.connections == 2
    assert found.median(lambda item: item.seconds) is None


def test_a_folder_has_no_ceiling_and_damage_is_found_in_reused_memory_too(
    manifest: Manifest, tmp_path: Path
) -> None:
    rounds: list[int] = []

    def damage_later(done: int, total: int) -> None:
        if done == manifest.total_bytes and not rounds:
            rounds.append(1)
            with (tmp_path / "model.safetensors").open("r+b") as stream:
                stream.seek(-1, 2)
                last = stream.read(1)[0]
                stream.seek(-1, 2)
                stream.write(bytes([last ^ 1]))

    found = bench(manifest, FolderSource(tmp_path), rounds=2)
    assert [item.ceiling_share for item in found.rounds] == [None, None]
    with pytest.raises(SnapshotCorrupt, match="chunk 32 of 33"):
        bench(manifest, FolderSource(tmp_path), rounds=2, progress=damage_later)


def test_what_does_not_fit_into_memory_is_refused(manifest: Manifest, tmp_path: Path) -> None:
    huge = manifest.shards[0].model_copy(update={"size_bytes": 1 << 50})
    with pytest.raises(CacheError, match="memory"):
        bench(manifest.model_copy(update={"shards": (huge,)}), FolderSource(tmp_path))
