"""Element types: each type, also small and packed floats, passes every step bit for bit, or an error names it."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.errors import SnapshotError, SnapshotMismatch
from pilotflame.snapshot.caching.download import download
from pilotflame.snapshot.converting.convert import convert
from pilotflame.snapshot.converting.push import push
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.format.dtypes import DTYPES
from pilotflame.snapshot.format.manifest import Manifest
from pilotflame.snapshot.format.verify import verify
from pilotflame.snapshot.handle import Snapshot
from pilotflame.snapshot.sources.folder import FolderSource
from safetensors.torch import load_file, save_file
from torch import nn

Save = Callable[..., tuple[Path, Manifest]]
TORCH = {name: getattr(torch, dtype.torch_name) for name, dtype in DTYPES.items() if dtype.torch_name}


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def random(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def holder(tensors: dict[str, torch.Tensor]) -> nn.Module:
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
    return module


def like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor of the same type and shape."""
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def restored(root: Path, manifest: Manifest, tensors: dict[str, torch.Tensor]) -> nn.Module:
    module, snapshot = holder(tensors), Snapshot(root, manifest)
    snapshot.restore(module)
    snapshot.open()
    return module


def raw_file(path: Path, dtype: str, shape: list[int], size_bytes: int) -> None:
    entry = {"dtype": dtype, "shape": shape, "data_offsets": [0, size_bytes]}
    text = json.dumps({"odd": entry}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(range(size_bytes)))


layouts = st.lists(
    st.tuples(st.sampled_from(sorted(TORCH)), st.lists(st.integers(0, 4), max_size=3)).filter(
        # safetensors has no scalar of half a byte.
        lambda kind: kind != ("F4", [])
    ),
    min_size=1,
    max_size=6,
)


@given(layouts)
def test_what_the_library_saves_is_restored(
    tmp_path_factory: pytest.TempPathFactory, layout: list[tuple[str, list[int]]]
) -> None:
    root = tmp_path_factory.mktemp("types")
    tensors = {f"t{number}": random(TORCH[dtype], *shape) for number, (dtype, shape) in enumerate(layout)}
    save_file(tensors, root / "model.safetensors")
    module = restored(root, create(root), tensors)
    for name, tensor in tensors.items():
        found = module.get_buffer(name)
        assert (found.dtype, found.shape, found.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
        assert bits(found) == bits(tensor)


def test_every_type_passes_every_step(tmp_path: Path) -> None:
    tensors = {name.lower(): random(dtype, 3, 8) for name, dtype in TORCH.items()}
    # This tensor is neither contiguous nor at the start of its storage. torch cannot make it contiguous, because torch
    # cannot copy elements that share a byte.
    tensors["turned"] = random(torch.float4_e2m1fn_x2, 8, 6).t()[1:]
    torch.save(tensors, tmp_path / "m.pt")
    convert(tmp_path / "m.pt", tmp_path / "converted")
    (tmp_path / "pushed").mkdir()
    push(tmp_path / "converted", Manifest.read(tmp_path / "converted"), FolderSource(tmp_path / "pushed"))
    manifest = Manifest.read(tmp_path / "pushed")
    download(manifest, FolderSource(tmp_path / "pushed"), tmp_path / "pulled")
    verify(tmp_path / "pulled", manifest)
    module = restored(tmp_path / "pulled", manifest, tensors)
    library = load_file(tmp_path / "pulled" / "model.safetensors")
    for name in tensors:
        assert bits(module.get_buffer(name)) == bits(library[name])
    wanted = [tensors["turned"].view(torch.uint8).contiguous().reshape(-1).tolist()]
    assert [bits(module.get_buffer("turned"))] == wanted


@pytest.mark.parametrize(
    ("dtype", "shape", "size_bytes", "fault"),
    [
        ("F6_E2M3", [2, 4], 6, "F6_E2M3, for which torch"),
        ("F6_E3M2", [8], 6, "F6_E3M2, for which torch"),
        ("F4", [2, 3], 3, "F4 [2, 3], whose rows do not fill whole bytes"),
    ],
)
def test_a_type_that_torch_lacks_is_kept_and_named(
    tmp_path: Path, dtype: str, shape: list[int], size_bytes: int, fault: str
) -> None:
    root = tmp_path / "given"
    root.mkdir()
    raw_file(root / "model.safetensors", dtype, shape, size_bytes)
    create(root).write(root / "pilotflame.manifest.json")
    manifest = Manifest.read(root)
    (tmp_path / "pushed").mkdir()
    push(root, manifest, FolderSource(tmp_path / "pushed"))
    convert(root, tmp_path / "copied")
    for copy in ("pushed", "copied"):
        assert (tmp_path / copy / "model.safetensors").read_bytes() == (
            root / "model.safetensors"
        ).read_bytes()
    module = holder({"odd": torch.empty(size_bytes, dtype=torch.uint8)})
    with pytest.raises(SnapshotMismatch, match="of a type or shape that this torch does not have") as caught:
        Snapshot(root, manifest).restore(module)
    assert f"odd {fault}" in caught.value.message
    snapshot = Snapshot(root, manifest)
    snapshot.open()
    with pytest.raises(SnapshotMismatch, match="'odd'"):
        snapshot.load("odd")
    # A cast reads the values, so it is refused, too.
    with pytest.raises(SnapshotError, match="'odd'"):
        convert(root, tmp_path / "cast", dtype="bf16")


@pytest.mark.parametrize("dtype", ["complex128"])
def test_a_type_that_safetensors_lacks_is_named(tmp_path: Path, dtype: str) -> None:
    tensor = torch.empty(0, dtype=getattr(torch, dtype)).set_(
        torch.zeros(64, dtype=torch.uint8).untyped_storage(), 0, (2,), (1,)
    )
    torch.save({"layer.weight": tensor}, tmp_path / "m.pt")
    with pytest.raises(SnapshotError, match=f"'layer.weight': safetensors does not hold torch.{dtype}"):
        convert(tmp_path / "m.pt", tmp_path / "out")


@pytest.mark.parametrize("dtype", [torch.uint4, torch.int4])
def test_a_module_of_a_type_that_no_file_has_is_refused(save: Save, dtype: torch.dtype) -> None:
    _, manifest = save({"t": random(torch.uint8, 4)})
    with pytest.raises(SnapshotMismatch, match=rf"t torch\.uint8, not {dtype}"):
        Snapshot(Path(), manifest).restore(holder({"t": torch.empty(4, dtype=dtype, device="meta")}))


def test_packed_floats_are_never_cast(save: Save) -> None:
    _, manifest = save({"t": random(torch.float4_e2m1fn_x2, 2, 4)})
    with pytest.raises(SnapshotMismatch, match=r"t torch\.float4_e2m1fn_x2, not torch\.float32"):
        Snapshot(Path(), manifest).restore(holder({"t": torch.empty(2, 4)}), cast=True)


def test_an_empty_tensor_of_any_shape_is_no_overflow(tmp_path: Path) -> None:
    raw_file(tmp_path / "model.safetensors", "F32", [0, 1 << 53, 1 << 53], 0)
    module: Any = holder({"odd": torch.empty(0, 3)})
    with pytest.raises(SnapshotMismatch, match="too large a shape for torch"):
        Snapshot(tmp_path, create(tmp_path)).restore(module)
    snapshot = Snapshot(tmp_path, create(tmp_path))
    snapshot.open()
    with pytest.raises(SnapshotMismatch, match="'odd'"):
        snapshot.load("odd")
