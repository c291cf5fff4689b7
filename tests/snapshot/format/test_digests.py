"""Digests: chunk boundaries, files that end early, and reading in order with few buffers."""

from __future__ import annotations

import hashlib
import random
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash
from fault_server import FaultServer
from hypothesis import given
from hypothesis import strategies as some
from pilotflame.snapshot.format.digests import (
    ALGORITHMS,
    RUN_BYTES,
    XXH3,
    AlgorithmName,
    chunk_digests,
    file_digest,
    in_order,
)
from pilotflame.snapshot.sources.folder import FolderSource
from pilotflame.snapshot.sources.http import HttpSource


@pytest.mark.parametrize("readers", [1, 3])
def test_chunks_cover_the_files_in_order(tmp_path: Path, readers: int) -> None:
    (tmp_path / "f").write_bytes(b"aaaabbbbcc")
    (tmp_path / "g").write_bytes(b"dd")
    found = list(chunk_digests(FolderSource(tmp_path), {"f": 10, "g": 2}, 4, readers, algorithm=XXH3))
    parts = [("f", 0, b"aaaa"), ("f", 1, b"bbbb"), ("f", 2, b"cc"), ("g", 0, b"dd")]
    assert found == [(name, index, len(part), xxhash.xxh3_128_hexdigest(part)) for name, index, part in parts]


@pytest.mark.parametrize("readers", [1, 3])
def test_a_file_that_ends_early_has_a_short_chunk(tmp_path: Path, readers: int) -> None:
    (tmp_path / "f").write_bytes(b"aaaabb")
    found = list(chunk_digests(FolderSource(tmp_path), {"f": 12}, 4, readers, algorithm=XXH3))
    assert [chunk.size_bytes for chunk in found] == [4, 2, 0]


@given(some.binary(max_size=300), some.integers(1, 64), some.sampled_from(["xxh3-128", "sha256"]))
def test_each_algorithm_has_the_digests_of_its_library(
    content: bytes, chunk_bytes: int, name: AlgorithmName
) -> None:
    whole = {"xxh3-128": xxhash.xxh3_128, "sha256": hashlib.sha256}[name]
    algorithm = ALGORITHMS[name]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "f").write_bytes(content)
        source = FolderSource(Path(folder))
        found = list(chunk_digests(source, {"f": len(content)}, chunk_bytes, algorithm=algorithm))
        buffer = memoryview(bytearray(chunk_bytes))
        assert file_digest(source, "f", len(content), buffer, algorithm) == (
            whole(content).hexdigest(), len(content),
        )  # fmt: skip
    parts = [content[at : at + chunk_bytes] for at in range(0, len(content), chunk_bytes)]
    assert [chunk.digest for chunk in found] == [whole(part).hexdigest() for part in parts]
    assert all(len(chunk.digest) == algorithm.digits for chunk in found)


def test_digests_of_different_algorithms_differ_in_length() -> None:
    assert len({algorithm.digits for algorithm in ALGORITHMS.values()}) == len(ALGORITHMS)


def test_many_chunks_of_a_remote_file_come_with_one_connection(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(random.Random(1).randbytes(RUN_BYTES + 5000))
    sizes = {"f": RUN_BYTES + 5000}
    with FaultServer(tmp_path) as server:
        found = list(chunk_digests(HttpSource(server.url), sizes, 1 << 20, 4, algorithm=XXH3))
        assert server.connections <= 3
    assert found == list(chunk_digests(FolderSource(tmp_path), sizes, 1 << 20, algorithm=XXH3))


@pytest.mark.parametrize("readers", [1, 3])
def test_results_come_in_the_jobs_order_whoever_is_first(readers: int) -> None:
    last = threading.Event()

    def job(index: int) -> Callable[[memoryview], int]:
        def run(buffer: memoryview) -> int:
            assert len(buffer) == 7
            if index == 2:
                last.set()
            elif index == 0 and readers > 1:
                # This job ends only when a later job has begun, so the jobs do not end in order.
                assert last.wait(10)
            return index

        return run

    assert list(in_order((job(index) for index in range(50)), readers, 7)) == list(range(50))


def test_buffers_are_kept_and_not_shared() -> None:
    seen: set[int] = set()
    together = threading.Barrier(3, timeout=10)

    def job(buffer: memoryview) -> int:
        seen.add(id(buffer.obj))
        together.wait()
        return id(buffer.obj)

    found = list(in_order([job] * 12, 3, 10))
    assert len(seen) == 3
    assert len(found) == 12


@pytest.mark.parametrize("readers", [1, 3])
def test_the_first_failure_ends_it(readers: int) -> None:
    begun: list[int] = []

    def job(index: int) -> Callable[[memoryview], int]:
        def run(_: memoryview) -> int:
            begun.append(index)
            if index == 5:
                raise OSError("broken")
            return index

        return run

    found: list[int] = []
    with pytest.raises(OSError, match="broken"):
        found.extend(in_order((job(index) for index in range(1000)), readers, 1))
    assert len(begun) < 50
    assert not [thread for thread in threading.enumerate() if "snapshot-reader" in thread.name]
