"""A model of 6 GB is fetched and restored in at most 256 MiB of memory.

The model is a sparse file with little content between holes. The engine reads, hashes and verifies all 6 GB. Only the
test's target skips writing zeros, because a new file reads as zeros. So the test takes seconds and little disk.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import xxhash
from pilotflame.snapshot.fetching.arrival import Arrival
from pilotflame.snapshot.fetching.fetch import fetch
from pilotflame.snapshot.fetching.landing import ShardTarget
from pilotflame.snapshot.format.digests import XXH3
from pilotflame.snapshot.format.header import read_header
from pilotflame.snapshot.format.manifest import (
    DEFAULT_CHUNK_BYTES,
    MANIFEST_NAME,
    Manifest,
    Shard,
    TensorEntry,
)
from pilotflame.snapshot.restoring.mapping import Mapping
from pilotflame.snapshot.restoring.plan import make_plan, restore
from pilotflame.snapshot.sources.folder import FolderSource
from torch import nn

NAME = "model.safetensors"
BLOCKS, ROWS, COLUMNS = 6, 16384, 32768
"""Each block has 1 GiB as float16."""
MOST_BYTES = 256 << 20
DISK_BYTES = 1 << 30


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ParameterList(torch.empty(ROWS, COLUMNS, dtype=torch.float16) for _ in range(BLOCKS))
        self.norm = nn.Parameter(torch.empty(COLUMNS))


class Sparse(ShardTarget):
    """A target that does not write zeros, so that its file keeps the holes."""

    def write(self, offset: int, view: memoryview) -> None:
        if numpy.frombuffer(view, numpy.uint8).any():
            super().write(offset, view)


def row(block: int, at: int) -> torch.Tensor:
    """Return the content of row `at` of a block. Only rows that are not holes have this content."""
    return torch.full((COLUMNS,), float(10 * block + (at > 0) + 1), dtype=torch.float16)


def norm() -> torch.Tensor:
    return torch.arange(COLUMNS, dtype=torch.float32)


def sparse_model(folder: Path) -> Manifest:
    """Write the file, and return its manifest. All chunks of holes have the same digest."""
    shapes = {f"blocks.{block}": ("F16", [ROWS, COLUMNS], 2 * ROWS * COLUMNS) for block in range(BLOCKS)}
    shapes["norm"] = ("F32", [COLUMNS], 4 * COLUMNS)
    entries, end = {}, 0
    for name, (dtype, shape, size_bytes) in shapes.items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size_bytes]}
        end += size_bytes
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    with (folder / NAME).open("w+b", buffering=0) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    header = read_header(FolderSource(folder), NAME)
    begins = {tensor.name: tensor.offset_bytes for tensor in header.tensors}
    pieces = {begins["norm"]: norm()}
    for block in range(BLOCKS):
        for at in (0, ROWS // 2, ROWS - 1):
            pieces[begins[f"blocks.{block}"] + 2 * COLUMNS * at] = row(block, at)
    return _described(folder, header, pieces)


def _described(folder: Path, header: Any, pieces: dict[int, torch.Tensor]) -> Manifest:
    size_bytes = header.file_bytes
    touched = {0}
    with (folder / NAME).open("r+b", buffering=0) as file:
        for begin, piece in pieces.items():
            content = piece.numpy().tobytes()
            os.pwrite(file.fileno(), content, begin)
            touched |= {begin // DEFAULT_CHUNK_BYTES, (begin + len(content) - 1) // DEFAULT_CHUNK_BYTES}
        count = -(-size_bytes // DEFAULT_CHUNK_BYTES)
        digests = [xxhash.xxh3_128_hexdigest(bytes(DEFAULT_CHUNK_BYTES))] * count
        for chunk in touched:
            content = os.pread(file.fileno(), DEFAULT_CHUNK_BYTES, chunk * DEFAULT_CHUNK_BYTES)
            digests[chunk] = xxhash.xxh3_128_hexdigest(content)
    tensors = [
        TensorEntry(
            name=tensor.name, dtype=tensor.dtype, shape=tensor.shape, shard=0,
            offset_bytes=tensor.offset_bytes, size_bytes=tensor.size_bytes,
        )
        for tensor in header.tensors
    ]  # fmt: skip
    shard = Shard(
        name=NAME,
        size_bytes=size_bytes,
        data_offset_bytes=header.data_offset_bytes,
        chunks=tuple(digests),
    )
    return Manifest.build(shards=(shard,), tensors=tuple(tensors))


@pytest.fixture
def room() -> Iterator[Path]:
    """A folder in memory, where reading a hole takes no page, unlike on a disk."""
    if not Path("/dev/shm").is_dir() or shutil.disk_usage("/dev/shm").free < DISK_BYTES:
        pytest.skip("no room in /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="pilotflame-test-") as folder:
        yield Path(folder)


def test_six_gigabytes_in_little_memory(room: Path) -> None:
    for name in ("there", "here"):
        (room / name).mkdir()
    manifest = sparse_model(room / "there")
    assert manifest.total_bytes > 6 << 30
    manifest.write(room / "there" / MANIFEST_NAME)
    done = subprocess.run(
        [sys.executable, "-W", "error", __file__, room / "there", room / "here"],
        capture_output=True, text=True, check=False, timeout=50,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["fetched_bytes"] == found["received_bytes"] == manifest.total_bytes
    assert found["right"] == [True] * (3 * BLOCKS + 1)
    assert found["fetch_bytes"] <= MOST_BYTES
    assert found["restore_bytes"] <= MOST_BYTES
    assert found["noticed_bytes"] > MOST_BYTES, "the measure would not notice"
    assert sum(path.stat().st_blocks * 512 for path in room.glob("*/*")) <= DISK_BYTES


# -- the process that is measured


def memory_bytes(field: str) -> int:
    """Return VmRSS (the current size of the process) or VmHWM (its peak)."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{field}:")[2].split()[0]) << 10


def main(there: Path, here: Path) -> None:
    """Fetch, restore and read some rows; then allocate too much, to check that the test notices.

    The kernel's peak of resident memory counts mapped files too, so it is an upper bound of the anonymous peak. The bound
    is close: nothing maps the weights while they are fetched, and later only a few rows are read.
    """
    manifest = Manifest.read(there)
    before_bytes = memory_bytes("VmRSS")
    descriptor = os.open(here / NAME, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(descriptor, manifest.shards[0].size_bytes)
        arrival = Arrival(manifest)
        stats = fetch(manifest, FolderSource(there), [Sparse(NAME, descriptor, XXH3)], arrival)
    finally:
        os.close(descriptor)
    fetch_bytes = memory_bytes("VmHWM") - before_bytes
    with torch.device("meta"):
        net = Net()
    restore(make_plan(net, manifest), Mapping(here, manifest, arrival=arrival))
    right = [torch.equal(net.norm, norm())]
    for block, weights in enumerate(net.blocks):
        right += [torch.equal(weights[at], row(block, at)) for at in (0, ROWS // 2, ROWS - 1)]
    restore_bytes = memory_bytes("VmHWM") - before_bytes
    too_much = bytearray(b"\1") * (MOST_BYTES + (64 << 20))
    noticed_bytes = memory_bytes("VmHWM") - before_bytes
    del too_much
    json.dump(
        {
            "fetched_bytes": stats.fetched_bytes, "received_bytes": stats.received_bytes, "right": right,
            "fetch_bytes": fetch_bytes, "restore_bytes": restore_bytes, "noticed_bytes": noticed_bytes,
            "seconds": stats.seconds,
        },
        sys.stdout,
    )  # fmt: skip


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
