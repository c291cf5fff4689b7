"""infra/bench/source_bench.py: rounds over memory that is reused, against a real server; the ceiling; one line of JSON."""

from __future__ import annotations

import importlib.util
import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fault_server import Faults, FaultServer
from pilotflame.errors import CacheError, SnapshotCorrupt
from pilotflame.snapshot.format.manifest import Manifest
from pilotflame.snapshot.sources.folder import FolderSource
from pilotflame.snapshot.sources.http import HttpSource
from pilotflame.snapshot.sources.location import Location
from pulling import make

SCRIPT = Path(__file__).parents[1] / "infra" / "bench" / "source_bench.py"
SIZE_BYTES = 1_000_003


def _load() -> Any:
    spec = importlib.util.spec_from_file_location("source_bench", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["source_bench"] = module
    spec.loader.exec_module(module)
    return module


source_bench = _load()


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return make(tmp_path, tensors=16)


def test_every_round_reads_every_byte(manifest: Manifest, tmp_path: Path) -> None:
    reported: list[tuple[int, int]] = []
    recorded = manifest.model_copy(update={"first_touch": ("t5", "t0")})
    with FaultServer(tmp_path) as server:
        found = source_bench.bench(
            recorded, HttpSource(server.url), progress=lambda done, total: reported.append((done, total))
        )
    assert [item.stats.fetched_bytes for item in found.rounds] == [manifest.total_bytes] * 3
    assert reported[-1] == (3 * manifest.total_bytes, 3 * manifest.total_bytes)
    assert found.first_tensor.name == "t5"
    assert all(item.first_tensor_s is not None and item.first_tensor_s > 0 for item in found.rounds)
    assert all(item.ceiling_share is not None and item.ceiling_share > 0 for item in found.rounds)
    assert found.latency_s is not None
    others = sorted(item.seconds for item in found.rounds[1:])
    assert found.median(lambda item: item.seconds) == pytest.approx(sum(others) / 2)


def test_the_first_byte_waits_for_the_server(manifest: Manifest, tmp_path: Path) -> None:
    with FaultServer(tmp_path, Faults(latency_s=0.05)) as server:
        found = source_bench.bench(manifest, HttpSource(server.url), rounds=1, connections=2)
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

    found = source_bench.bench(manifest, FolderSource(tmp_path), rounds=2)
    assert [item.ceiling_share for item in found.rounds] == [None, None]
    with pytest.raises(SnapshotCorrupt, match="chunk 32 of 33"):
        source_bench.bench(manifest, FolderSource(tmp_path), rounds=2, progress=damage_later)


def test_a_snapshot_larger_than_memory_is_refused(manifest: Manifest, tmp_path: Path) -> None:
    huge = manifest.shards[0].model_copy(update={"size_bytes": 1 << 50})
    with pytest.raises(CacheError, match="memory"):
        source_bench.bench(manifest.model_copy(update={"shards": (huge,)}), FolderSource(tmp_path))


def test_the_ceiling_asks_for_every_byte_once() -> None:
    with FaultServer({"object": bytes(SIZE_BYTES)}) as server:
        location = Location(f"{server.url}/object?key=1", {"Authorization": "me"})
        rate = source_bench.ceiling(location, SIZE_BYTES)
        asked = sorted((request.begin, request.end) for request in server.requests)
        assert {request.headers["authorization"] for request in server.requests} == {"me"}
        assert {request.target for request in server.requests} == {"/object?key=1"}
    assert rate > 0
    assert (asked[0][0], asked[-1][1], len(asked)) == (0, SIZE_BYTES, source_bench.CEILING_CONNECTIONS)
    assert all(one[1] == two[0] for one, two in pairwise(asked))


def test_there_is_no_ceiling_without_plain_http_ranges_or_bytes() -> None:
    ceiling = source_bench.ceiling
    assert ceiling(Location("https://127.0.0.1:1/object"), 10) is None
    with FaultServer({"object": bytes(100)}) as server:
        location = Location(f"{server.url}/object")
        assert ceiling(location, 0) is None
        assert ceiling(location, 3) is not None
        for faults in (Faults(ranges=False), Faults(status=403), Faults(short_share=1.0)):
            server.faults = faults
            assert ceiling(location, 100) is None, faults
    # The server has ended: nothing listens any more.
    assert ceiling(location, 100) is None


def test_json_is_one_line(
    manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with FaultServer(tmp_path) as server:
        monkeypatch.setattr(
            sys, "argv", ["source_bench.py", server.url, "--rounds", "2", "--connections", "3", "--json"]
        )
        assert source_bench.main() == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["digest"], facts["bytes"]) == (manifest.digest, manifest.total_bytes)
    assert facts["connections"] == 3
    assert len(facts["rounds"]) == 2
    assert facts["others"]["seconds"] == facts["rounds"][1]["seconds"]
    first = facts["rounds"][0]
    assert first["ceiling_share"] == pytest.approx(first["bytes_per_s"] / first["ceiling_bytes_per_s"])
