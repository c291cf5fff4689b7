"""Damage is found and named by shard, chunk and tensor."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pilotflame.errors import SnapshotCorrupt
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.format.manifest import Manifest
from pilotflame.snapshot.format.verify import verify
from safetensors.torch import save_file

CHUNK = 4096


@pytest.fixture
def snapshot(tmp_path: Path) -> tuple[Path, Manifest]:
    save_file({name: torch.rand(1024) for name in "abcde"}, tmp_path / "model.safetensors")
    return tmp_path, create(tmp_path, chunk_bytes=CHUNK)


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as stream:
        stream.seek(offset)
        byte = stream.read(1)[0]
        stream.seek(offset)
        stream.write(bytes([byte ^ 1]))


def test_what_is_whole_passes(snapshot: tuple[Path, Manifest], minilm: Path) -> None:
    seen: list[tuple[int, int]] = []
    verify(*snapshot, progress=lambda done, total: seen.append((done, total)))
    size_bytes = snapshot[1].total_bytes
    assert seen[-1] == (size_bytes, size_bytes)
    assert len(seen) == len(snapshot[1].shards[0].chunks)
    verify(minilm, create(minilm))


def test_one_flipped_bit_is_found_and_its_tensor_named(snapshot: tuple[Path, Manifest]) -> None:
    root, manifest = snapshot
    tensor = next(tensor for tensor in manifest.tensors if tensor.name == "c")
    flip(root / "model.safetensors", tensor.offset_bytes + 2000)
    with pytest.raises(SnapshotCorrupt) as caught:
        verify(root, manifest)
    chunk = (tensor.offset_bytes + 2000) // CHUNK
    assert caught.value.details["shard"] == "model.safetensors"
    assert caught.value.details["chunk"] == chunk
    assert "c" in caught.value.details["tensors"]
    assert f"chunk {chunk} of {len(manifest.shards[0].chunks)}" in caught.value.message
    assert set(caught.value.details["tensors"]) <= {"b", "c", "d"}


def test_every_position_is_covered(snapshot: tuple[Path, Manifest]) -> None:
    root, manifest = snapshot
    path = root / "model.safetensors"
    size_bytes = path.stat().st_size
    for offset in {0, 8, *range(100, size_bytes, 997), size_bytes - 1}:
        flip(path, offset)
        chunk = offset // CHUNK
        with pytest.raises(SnapshotCorrupt, match=rf"chunk {chunk} of \d+ \(from byte {chunk * CHUNK}\)"):
            verify(root, manifest)
        flip(path, offset)
    verify(root, manifest)


def test_a_truncated_file_is_named_with_its_lost_tensors(snapshot: tuple[Path, Manifest]) -> None:
    root, manifest = snapshot
    os.truncate(root / "model.safetensors", manifest.total_bytes - 10)
    with pytest.raises(SnapshotCorrupt, match="truncated in chunk") as caught:
        verify(root, manifest)
    assert manifest.tensors[-1].name in caught.value.details["tensors"]


def test_a_longer_or_missing_file_is_named(snapshot: tuple[Path, Manifest]) -> None:
    root, manifest = snapshot
    with (root / "model.safetensors").open("ab") as stream:
        stream.write(b"\0")
    with pytest.raises(SnapshotCorrupt, match=r"Shard model\.safetensors: it has"):
        verify(root, manifest)
    (root / "model.safetensors").unlink()
    with pytest.raises(SnapshotCorrupt, match=r"Shard model\.safetensors: .*No such file"):
        verify(root, manifest)


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda path: flip(path, 1), "its bytes differ"),
        (lambda path: os.truncate(path, 1), "it has 1 bytes, 3 expected"),
        (lambda path: path.write_bytes(b"123456"), "it has 6 bytes, 3 expected"),
        (Path.unlink, "No such file"),
    ],
    ids=["flip", "truncated", "longer", "missing"],
)
def test_a_damaged_asset_is_named(tmp_path: Path, damage: Callable[[Path], None], fault: str) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    for name in ("config.json", "1_Pooling/config.json", "empty.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"{ }" if name != "empty.txt" else b"")
    manifest = create(tmp_path)
    verify(tmp_path, manifest)
    damage(tmp_path / "1_Pooling" / "config.json")
    with pytest.raises(SnapshotCorrupt, match=r"^Asset 1_Pooling/config\.json: ") as caught:
        verify(tmp_path, manifest)
    assert fault in caught.value.message
    assert caught.value.details == {"asset": "1_Pooling/config.json"}
