"""Manifests made from folders: one file, shards with an index, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from pilotlight.errors import HeaderError, ManifestError, SnapshotError
from pilotlight.snapshot.create import create
from pilotlight.snapshot.manifest import Manifest
from safetensors.torch import save_file, save_model


def shards(folder: Path, weight_map: dict[str, str] | None = None) -> Path:
    save_file({"a": torch.ones(2), "b": torch.ones(3)}, folder / "model-1-of-2.safetensors")
    save_file({"c": torch.ones(4)}, folder / "model-2-of-2.safetensors")
    names = {
        "a": "model-1-of-2.safetensors",
        "b": "model-1-of-2.safetensors",
        "c": "model-2-of-2.safetensors",
    }
    index = {"metadata": {"total_size": 36}, "weight_map": names | (weight_map or {})}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_one_file_is_described(minilm: Path) -> None:
    seen: list[tuple[int, int]] = []
    manifest = create(minilm, progress=lambda done, total: seen.append((done, total)))
    (shard,) = manifest.shards
    assert shard.name == "model.safetensors"
    assert len(shard.chunks) == 11 == len(seen)
    assert seen[-1] == (shard.size_bytes, shard.size_bytes)
    content = (minilm / shard.name).read_bytes()
    assert shard.chunks[3] == xxhash.xxh3_128_hexdigest(content[3 * (8 << 20) : 4 * (8 << 20)])
    word = next(tensor for tensor in manifest.tensors if tensor.name == "embeddings.word_embeddings.weight")
    assert word.shape == (30522, 384)
    assert manifest.provenance.created_by.startswith("pilotlight ")
    assert create(minilm / "model.safetensors").digest == manifest.digest


def test_shards_are_described_by_their_index(tmp_path: Path) -> None:
    manifest = create(shards(tmp_path))
    assert [shard.name for shard in manifest.shards] == [
        "model-1-of-2.safetensors",
        "model-2-of-2.safetensors",
    ]
    assert {tensor.name: tensor.shard for tensor in manifest.tensors} == {"a": 0, "b": 0, "c": 1}


def test_files_that_the_index_does_not_list_are_left_alone(tmp_path: Path) -> None:
    save_file({"z": torch.ones(1)}, shards(tmp_path) / "consolidated.safetensors")
    assert len(create(tmp_path).shards) == 2


def test_a_whole_model_beside_its_index_is_ambiguous(tmp_path: Path) -> None:
    save_file({"z": torch.ones(1)}, shards(tmp_path) / "model.safetensors")
    with pytest.raises(SnapshotError, match="nothing says which"):
        create(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "fault"),
    [
        ({"a": "model-2-of-2.safetensors"}, "'a' is in model-2-of-2.safetensors, but it is in model-1"),
        ({"x": "model-2-of-2.safetensors"}, "'x' is in model-2-of-2.safetensors, but no shard holds it"),
        ({"a": "../model.safetensors"}, "not a file: it holds"),
        ({"a": "/etc/passwd"}, "absolute"),
        ({"a": 3}, "not text"),
    ],
)
def test_an_index_that_lies_is_refused(tmp_path: Path, weight_map: dict[str, Any], fault: str) -> None:
    with pytest.raises(HeaderError) as caught:
        create(shards(tmp_path, weight_map))
    assert fault in caught.value.message


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    (shards(tmp_path) / "model-2-of-2.safetensors").unlink()
    with pytest.raises(SnapshotError, match=r"not there: model-2-of-2\.safetensors"):
        create(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": []}', "[" * 100_000])
def test_what_is_no_index_is_refused(tmp_path: Path, text: str) -> None:
    (shards(tmp_path) / "model.safetensors.index.json").write_text(text)
    with pytest.raises(HeaderError, match=r"index\.json"):
        create(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    shards(tmp_path)
    save_file({"a": torch.ones(2), "c": torch.ones(4)}, tmp_path / "model-2-of-2.safetensors")
    with pytest.raises(HeaderError, match="'a' is both in"):
        create(tmp_path)


def test_several_files_without_an_index_are_ambiguous(tmp_path: Path) -> None:
    for name in ("one.safetensors", "two.safetensors"):
        save_file({"a": torch.ones(2)}, tmp_path / name)
    with pytest.raises(SnapshotError, match=r"one\.safetensors, two\.safetensors"):
        create(tmp_path)
    assert create(tmp_path / "two.safetensors").shards[0].name == "two.safetensors"


def test_a_folder_without_safetensors_says_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="it is empty"):
        create(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SnapshotError, match=r"only config\.json"):
        create(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(SnapshotError, match=r"only pytorch_model\.bin\. Convert with"):
        create(tmp_path)
    with pytest.raises(SnapshotError, match="neither a folder nor a file"):
        create(tmp_path / "missing")


def test_names_dropped_by_save_model_become_aliases(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    save_model(model, str(tmp_path / "model.safetensors"), metadata={"format": "pt"})
    assert create(tmp_path).aliases == {"b.weight": "a.weight"}


def test_a_file_without_tensors_is_a_snapshot(save: Callable[..., tuple[Path, Manifest]]) -> None:
    _, manifest = save({})
    assert manifest.tensors == ()


@pytest.mark.parametrize("chunk_bytes", [-1, 0, 100, 1 << 40])
def test_a_chunk_size_out_of_bounds_is_refused(
    save: Callable[..., tuple[Path, Manifest]], chunk_bytes: int
) -> None:
    with pytest.raises(ManifestError, match=f"chunk_bytes is {chunk_bytes}"):
        save({"a": torch.ones(2)}, chunk_bytes=chunk_bytes)
