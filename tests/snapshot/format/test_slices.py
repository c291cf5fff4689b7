"""Parts: a part has exactly the chunks with bytes of its tensors or slices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.errors import ManifestError, SnapshotMismatch
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.format.manifest import MANIFEST_NAME, Manifest, NeededPart, read_manifest
from pilotflame.snapshot.format.slices import outside, part_of
from pilotflame.snapshot.sources.folder import FolderSource
from safetensors.torch import save_file

CHUNK_BYTES = 4096
ROWS, COLUMNS = 48, 300


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """Two shards of three tensors."""
    root = tmp_path_factory.mktemp("whole")
    names = [[f"{shard}.{name}" for name in "abc"] for shard in range(2)]
    for shard, held in enumerate(names):
        save_file({name: torch.rand(ROWS, COLUMNS) for name in held}, root / f"m-{shard}.safetensors")
    places = {name: f"m-{shard}.safetensors" for shard, held in enumerate(names) for name in held}
    (root / "m.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return create(root, chunk_bytes=CHUNK_BYTES)


def needed(manifest: Manifest, name: str, cut: tuple[int, int, int] | None) -> set[tuple[int, int]]:
    """Compute the chunks of a tensor or its slice from the offsets of the elements. Return them as pairs (shard, chunk)."""
    tensor = next(tensor for tensor in manifest.tensors if tensor.name == name)
    offsets = torch.arange(tensor.offset_bytes, tensor.offset_bytes + tensor.size_bytes).view(
        ROWS, COLUMNS, 4
    )
    if cut is not None:
        dim, rank, world = cut
        offsets = offsets.chunk(world, dim)[rank]
    # A row is shorter than a chunk, so each of its chunks has its first or its last byte.
    ends = torch.cat([offsets[:, 0, 0], offsets[:, -1, -1]])
    return {(tensor.shard, chunk) for chunk in (ends // CHUNK_BYTES).tolist()}


@given(
    st.lists(
        st.sampled_from([f"{shard}.{name}" for shard in range(2) for name in "abc"]), min_size=1, unique=True
    ),
    st.sampled_from([None, (0, 0, 1), (0, 2, 3), (0, 5, 48), (1, 1, 2)]),
)
def test_the_chunks_of_a_part_are_those_of_its_bytes(
    manifest: Manifest, names: list[str], cut: tuple[int, int, int] | None
) -> None:
    part = part_of(manifest, names, {"*": cut} if cut else {})
    wanted = set().union(*(needed(manifest, name, cut) for name in names))
    firsts = [0, len(manifest.shards[0].chunks)]
    assert part.part is not None
    found = {chunk for first, last in part.part.chunks for chunk in range(first, last + 1)}
    assert found == {firsts[shard] + position for shard, position in wanted}
    sizes = [
        min(CHUNK_BYTES, manifest.shards[shard].size_bytes - position * CHUNK_BYTES)
        for shard, position in wanted
    ]
    assert part.needed_bytes == sum(sizes)
    extents = [(shard, *extent) for shard in range(2) for extent in part.needed_extents(shard)]
    assert sum(end - begin for _, begin, end in extents) == sum(sizes)
    for tensor in manifest.tensors:
        begin, end = tensor.offset_bytes, tensor.offset_bytes + tensor.size_bytes
        whole = needed(manifest, tensor.name, None) <= wanted
        assert outside(part, tensor.shard, begin, end) is not whole


def test_a_part_is_read_back_and_has_its_own_digest(manifest: Manifest) -> None:
    parts = [part_of(manifest, ["0.a"], {}), part_of(manifest, ["0.*"], {"*": (0, 0, 2)})]
    assert len({manifest.digest, *(part.digest for part in parts)}) == 3
    for part in parts:
        found = Manifest.parse(part.to_json())
        assert (found, found.digest) == (part, part.digest)
    assert part_of(manifest, [], {}).needed_bytes == manifest.total_bytes
    assert b"part" not in manifest.to_json()


@pytest.mark.parametrize(
    "chunks", [[(3, 2)], [(-1, 2)], [(0, 2), (2, 3)], [(4, 5), (0, 1)], [(0, 10**6)]], ids=str
)
def test_a_part_that_cannot_be_is_refused(manifest: Manifest, chunks: list[tuple[int, int]]) -> None:
    text = manifest.model_copy(update={"part": NeededPart(chunks=tuple(chunks))}).to_json()
    with pytest.raises(ManifestError, match="part"):
        Manifest.parse(text)


def test_no_source_may_say_that_a_part_is_all(manifest: Manifest, tmp_path: Path) -> None:
    part_of(manifest, ["0.a"], {}).write(tmp_path / MANIFEST_NAME)
    with pytest.raises(ManifestError, match="has `part`"):
        read_manifest(FolderSource(tmp_path))


def test_a_name_that_no_tensor_has_is_refused(manifest: Manifest) -> None:
    with pytest.raises(SnapshotMismatch, match=r"fits '0\.z'"):
        part_of(manifest, ["0.a", "0.z"], {})
    with pytest.raises(SnapshotMismatch, match=r"'0.a' cannot be cut: \[48, 300\] is not divisible by 7"):
        part_of(manifest, ["0.a"], {"*": (0, 0, 7)})


def test_parts_with_the_same_chunks_are_one_snapshot_in_a_cache(manifest: Manifest) -> None:
    columns = [part_of(manifest, (), {"*": (1, rank, 2)}) for rank in range(2)]
    rows = [part_of(manifest, ("0.a",), {"*": (0, rank, 2)}) for rank in range(2)]
    assert columns[0].part.slices != columns[1].part.slices
    assert columns[0].part.chunks == columns[1].part.chunks
    assert columns[0].digest == columns[1].digest != manifest.digest
    assert rows[0].digest != rows[1].digest
