"""Creating manifests of folders: one file, shards with an index, and refusals."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from pilotflame.errors import HeaderError, ManifestError, SnapshotError, SourceMissing
from pilotflame.snapshot.format.create import create, observe
from pilotflame.snapshot.format.digests import RUN_BYTES
from pilotflame.snapshot.format.manifest import MANIFEST_NAME, Manifest
from pilotflame.snapshot.sources.folder import FolderSource
from pilotflame.snapshot.sources.source import Connection, ObjectInfo
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
    assert len(shard.chunks) == 22 == len(seen)
    assert seen[-1] == (shard.size_bytes, shard.size_bytes)
    content = (minilm / shard.name).read_bytes()
    assert shard.chunks[3] == xxhash.xxh3_128_hexdigest(content[3 * (4 << 20) : 4 * (4 << 20)])
    word = next(tensor for tensor in manifest.tensors if tensor.name == "embeddings.word_embeddings.weight")
    assert word.shape == (30522, 384)
    assert manifest.provenance.created_by.startswith("pilotflame ")
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
    with pytest.raises(ManifestError, match="at chunk_bytes: Input should be"):
        save({"a": torch.ones(2)}, chunk_bytes=chunk_bytes)


# -- what lies beside the weights


def test_small_files_beside_the_weights_are_assets(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    wanted = ["config.json", "tokenizer.model", "1_Pooling/config.json", "a/b/c/d/vocab.txt", "empty"]
    left = [
        "onnx/model.onnx",
        "pytorch_model.bin",
        "sub/other.safetensors",
        ".git/config",
        ".hidden",
        "a/b/c/d/e/f.txt",
        "__pycache__/x.pyc",
        MANIFEST_NAME,
        "sub/" + MANIFEST_NAME,
        "large.txt",
    ]
    for name in [*wanted, *left]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(name.encode() if name != "empty" else b"")
    os.truncate(tmp_path / "large.txt", (64 << 20) + 1)
    manifest = create(tmp_path)
    assert [asset.name for asset in manifest.assets] == sorted(wanted)
    config = next(asset for asset in manifest.assets if asset.name == "1_Pooling/config.json")
    assert config.digest == xxhash.xxh3_128_hexdigest(b"1_Pooling/config.json")
    assert config.size_bytes == 21


def test_an_index_is_an_asset_of_its_shards_but_of_no_single_file(tmp_path: Path) -> None:
    assert [asset.name for asset in create(shards(tmp_path)).assets] == ["model.safetensors.index.json"]
    assert create(tmp_path / "model-1-of-2.safetensors").assets == ()


def test_too_many_files_are_no_assets(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    for index in range(1025):
        (tmp_path / f"{index}.txt").touch()
    with pytest.raises(SnapshotError, match="1025 files beside the weights"):
        create(tmp_path)


# -- sources that are not folders


class Elsewhere:
    """A folder that is read like a remote source, by several threads."""

    def __init__(self, root: Path) -> None:
        self._folder = FolderSource(root)
        self.threads: set[str] = set()
        self.largest_bytes = 0
        self.on_read: Callable[[str], None] = lambda name: None

    url = "elsewhere://bucket/prefix"

    def stat(self, name: str) -> ObjectInfo:
        return self._folder.stat(name)

    def read_into(self, name: str, offset: int, view: memoryview) -> int:
        self.threads.add(threading.current_thread().name)
        self.largest_bytes = max(self.largest_bytes, len(view))
        self.on_read(name)
        return self._folder.read_into(name, offset, view)

    def connect(self) -> Connection:
        return self._folder.connect()


class Listed(Elsewhere):
    def names(self) -> list[str]:
        return self._folder.names()


def test_a_listed_source_gives_what_its_folder_gives(minilm: Path) -> None:
    source = Listed(minilm)
    seen: list[tuple[int, int]] = []
    manifest = create(source, chunk_bytes=1 << 20, progress=lambda done, total: seen.append((done, total)))
    here = create(minilm, chunk_bytes=1 << 20)
    assert manifest.digest == here.digest
    assert manifest.provenance.source == source.url
    assert seen == sorted(seen)
    assert seen[-1] == (here.total_bytes, here.total_bytes)
    assert len({name for name in source.threads if "reader" in name}) > 1
    assert source.largest_bytes == RUN_BYTES
    assert create(source, file="model.safetensors", chunk_bytes=1 << 20).digest == here.digest


def test_shards_keep_their_order_over_several_readers(tmp_path: Path) -> None:
    for part in "abc":
        save_file({part: torch.rand(10_000)}, tmp_path / f"{part}.safetensors")
    places = {part: f"{part}.safetensors" for part in "abc"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert create(Listed(tmp_path), chunk_bytes=4096).digest == create(tmp_path, chunk_bytes=4096).digest


def test_a_source_that_cannot_be_listed_must_be_told_the_file(tmp_path: Path) -> None:
    folder = shards(tmp_path)
    source = Elsewhere(folder)
    with pytest.raises(SnapshotError, match=r"elsewhere://bucket/prefix cannot be listed\. Name"):
        create(source)
    one = create(source, file="model-1-of-2.safetensors")
    assert [shard.name for shard in one.shards] == ["model-1-of-2.safetensors"]
    with pytest.raises(SourceMissing, match=r"absent\.safetensors"):
        create(source, file="absent.safetensors")


@pytest.mark.parametrize("how", ["overwritten", "cut"])
def test_a_file_that_changes_while_it_is_read_is_noticed(tmp_path: Path, how: str) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(9000)}, path)
    source, reads = Listed(tmp_path), []

    def change(name: str) -> None:
        reads.append(name)
        # The first two reads are of the header.
        if len(reads) == 3:
            if how == "cut":
                os.truncate(path, 5000)
            else:
                os.utime(path, (1, 1))

    source.on_read = change
    with pytest.raises(SnapshotError, match=r"model\.safetensors.*(shrank|was replaced or written to)"):
        create(source, chunk_bytes=4096)


@pytest.mark.parametrize("key", ["", "long" * 300])
def test_metadata_that_cannot_be_a_tensors_name_is_no_alias(tmp_path: Path, key: str) -> None:
    save_file(
        {"weight": torch.ones(2)},
        tmp_path / "model.safetensors",
        {key: "weight", "tied": "weight"},
    )
    assert create(tmp_path).aliases == {"tied": "weight"}


class ServedElsewhere(Listed):
    def served_at(self, name: str) -> str:
        return f"https://here/{name}"


@pytest.mark.parametrize(
    ("kind", "url"), [(Listed, Listed.url), (ServedElsewhere, "https://here/model-1-of-2.safetensors")]
)
def test_what_was_observed_is_where_the_shards_are_served(
    tmp_path: Path, kind: type[Listed], url: str
) -> None:
    source = kind(shards(tmp_path))
    manifest = observe(source, source.names())
    assert manifest.observed is not None
    assert manifest.observed.url == url
    assert not manifest.has_digests
    assert [one.name for one in manifest.tensors] == ["a", "b", "c"]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_source_that_ends_early_is_noticed(tmp_path: Path, name: str) -> None:
    class Short(Listed):
        def read_into(self, name: str, offset: int, view: memoryview) -> int:
            end = self.stat(name).size_bytes - (10 if name == shrinks else 0)
            return super().read_into(name, offset, view[: max(0, end - offset)])

    save_file({"a": torch.ones(9000)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    shrinks = name
    with pytest.raises(SnapshotError, match=f"{name} shrank while it was read"):
        create(Short(tmp_path), chunk_bytes=4096)
