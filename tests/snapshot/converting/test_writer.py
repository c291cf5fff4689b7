"""The safetensors library reads written files bit for bit, also several shards and cast tensors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pilotflame.errors import SnapshotError
from pilotflame.snapshot.converting.origin import TORCH_DTYPES
from pilotflame.snapshot.converting.writer import write_shards
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.format.header import parse_header
from safetensors.torch import load_file
from tensor_origin import Given, bits


def random(dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor of random bits."""
    count = torch.Size(shape).numel() * TORCH_DTYPES[dtype].itemsize
    bits = torch.randint(0, 2 if dtype == "BOOL" else 256, (count,), dtype=torch.uint8)
    return bits.view(TORCH_DTYPES[dtype]).reshape(tuple(shape))


def ignore(count: int) -> None:
    """A progress callback that does nothing."""
    del count


layouts = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=9).filter(
        lambda name: name != "__metadata__"
    ),
    st.tuples(st.sampled_from(sorted(TORCH_DTYPES)), st.lists(st.integers(0, 4), max_size=3)).filter(
        # safetensors has no scalar of half a byte.
        lambda kind: kind != ("F4", [])
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60)
@given(layouts)
def test_what_is_written_is_read_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, layout: dict[str, tuple[str, list[int]]]
) -> None:
    tensors = {name: random(*what) for name, what in layout.items()}
    folder = tmp_path_factory.mktemp("written")
    write_shards(folder, Given(tensors), shard_bytes=1 << 30, wrote=ignore)
    path = folder / "model.safetensors"
    found = load_file(path)
    assert {name: (tensor.dtype, tensor.shape, bits(tensor)) for name, tensor in found.items()} == {
        name: (tensor.dtype, tensor.shape, bits(tensor)) for name, tensor in tensors.items()
    }
    text = path.read_bytes()
    header_bytes = int.from_bytes(text[:8], "little")
    assert header_bytes % 8 == 0
    assert parse_header(text[8 : 8 + header_bytes], file="x", file_bytes=len(text)).metadata == {
        "format": "pt"
    }


def test_every_tensor_is_aligned_to_its_elements(tmp_path: Path) -> None:
    tensors = {dtype: random(dtype, (3,)) for dtype in sorted(TORCH_DTYPES)}
    write_shards(tmp_path, Given(tensors), shard_bytes=1 << 30, wrote=ignore)
    manifest = create(tmp_path)
    assert len(manifest.tensors) == len(TORCH_DTYPES)
    assert all(tensor.offset_bytes % TORCH_DTYPES[tensor.dtype].itemsize == 0 for tensor in manifest.tensors)


def test_more_than_a_shard_becomes_shards_and_their_index(tmp_path: Path) -> None:
    tensors = {f"t{index}": torch.rand(100) for index in range(5)} | {"large": torch.rand(1000)}
    wrote: list[int] = []
    origin = Given(tensors, {"tied": "t4"})
    write_shards(tmp_path, origin, shard_bytes=900, wrote=wrote.append)
    names = [f"model-0000{number}-of-00004.safetensors" for number in range(1, 5)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [*names, "model.safetensors.index.json"]
    found: dict[str, torch.Tensor] = {}
    for name in names:
        found |= load_file(tmp_path / name)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert sum(wrote) == 6000
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 6000}
    assert create(tmp_path).aliases == {"tied": "t4"}


def test_a_cast_is_torchs_and_leaves_what_does_not_float(tmp_path: Path) -> None:
    tensors = {
        "f": torch.rand(7),
        "d": torch.rand(7, dtype=torch.float64),
        "h": torch.tensor([float("inf"), float("nan"), 1.0]),
        "i": torch.arange(3),
        "q": torch.rand(4).to(torch.float8_e4m3fn),
    }
    write_shards(tmp_path, Given(tensors), shard_bytes=1 << 30, cast="BF16", wrote=ignore)
    found = load_file(tmp_path / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        "f": torch.bfloat16,
        "d": torch.bfloat16,
        "h": torch.bfloat16,
        "i": torch.int64,
        "q": torch.float8_e4m3fn,
    }
    assert all(bits(found[name]) == bits(tensor.to(found[name].dtype)) for name, tensor in tensors.items())


def test_a_cast_that_overflows_is_refused_by_name(tmp_path: Path) -> None:
    origin = Given({"fine": torch.ones(2), "large": torch.tensor([1.0, 70_000.0])})
    with pytest.raises(SnapshotError, match="'large' holds numbers too large for F16"):
        write_shards(tmp_path, origin, shard_bytes=1 << 30, cast="F16", wrote=ignore)
    assert not list(tmp_path.iterdir())
