"""Tensorizer files are imported and exported bit for bit."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from pilotflame.errors import CacheError, SnapshotError
from pilotflame.snapshot.converting import tensorizer_file
from pilotflame.snapshot.converting.origin import TORCH_DTYPES
from pilotflame.snapshot.converting.tensorizer_file import TensorizerOrigin, export
from tensor_origin import Given, bits
from tensorizer import TensorDeserializer, TensorSerializer


def every_dtype() -> dict[str, torch.Tensor]:
    tensors = {}
    for dtype, torch_dtype in TORCH_DTYPES.items():
        for shape in ((3, 5), ()) if dtype != "F4" else ((3, 5),):
            count = torch.Size(shape).numel() * torch_dtype.itemsize
            bits = torch.randint(0, 2 if dtype == "BOOL" else 256, (count,), dtype=torch.uint8)
            tensors[f"layers.{dtype}.{len(shape)}"] = bits.view(torch_dtype).reshape(shape)
    return tensors


def check(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert {name: (tensor.dtype, tensor.shape, bits(tensor)) for name, tensor in found.items()} == {
        name: (tensor.dtype, tensor.shape, bits(tensor)) for name, tensor in wanted.items()
    }


def read(origin: TensorizerOrigin, names: Sequence[str]) -> dict[str, torch.Tensor]:
    return dict(zip(names, origin.tensors(names), strict=True))


@pytest.mark.parametrize("batch_bytes", [tensorizer_file.BATCH_BYTES, 1])
def test_every_type_comes_back_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_bytes: int
) -> None:
    monkeypatch.setattr(tensorizer_file, "BATCH_BYTES", batch_bytes)
    tensors = every_dtype() | {"empty": torch.empty(0, 4)}
    seen: list[tuple[int, int]] = []
    size_bytes = export(
        Given(tensors), tmp_path / "m.tensors", lambda done, total: seen.append((done, total))
    )
    assert seen[-1] == (size_bytes, size_bytes)
    assert [path.name for path in tmp_path.iterdir()] == ["m.tensors"]
    origin = TensorizerOrigin(tmp_path / "m.tensors")
    backwards = [spec.name for spec in reversed(origin.specs)]
    check(read(origin, backwards), tensors)


def test_the_library_reads_what_we_write_under_every_name(tmp_path: Path) -> None:
    tensors = every_dtype()
    first = next(iter(tensors))
    export(Given(tensors, {"tied": first}), tmp_path / "m.tensors")
    reader = TensorDeserializer(tmp_path / "m.tensors", device="cpu", num_readers=1)
    check(dict(reader.items()), tensors | {"tied": tensors[first]})
    reader.close()


def test_we_read_what_the_library_writes(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    writer = TensorSerializer(str(tmp_path / "m.tensors"))
    writer.write_module(module)
    writer.close()
    origin = TensorizerOrigin(tmp_path / "m.tensors")
    check(read(origin, [spec.name for spec in origin.specs]), module.state_dict())
    writer = TensorSerializer(str(tmp_path / "bare.tensors"))
    writer.write_module(module[0])
    writer.close()
    assert {spec.name for spec in TensorizerOrigin(tmp_path / "bare.tensors").specs} == {"weight", "bias"}


def test_damage_is_a_snapshot_error(tmp_path: Path) -> None:
    path = tmp_path / "m.tensors"
    export(Given({"a": torch.rand(500), "b": torch.rand(500)}), path)
    content = path.read_bytes()
    for broken in (b"", b"x" * 100, content[:300], content[:-100]):
        path.write_bytes(broken)
        with pytest.raises(SnapshotError, match=r"m\.tensors"):
            read(TensorizerOrigin(path), ["a", "b"])
    flipped = bytearray(content)
    flipped[-40] ^= 1
    path.write_bytes(flipped)
    with pytest.raises(SnapshotError, match=r"m\.tensors is not a valid tensorizer file"):
        read(TensorizerOrigin(path), ["a", "b"])
    with pytest.raises(SnapshotError, match="No such file"):
        TensorizerOrigin(tmp_path / "absent.tensors")


def test_what_tensorizer_cannot_read_back_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="'e' is empty and BF16"):
        export(Given({"e": torch.empty(0, dtype=torch.bfloat16)}), tmp_path / "m.tensors")
    with pytest.raises(CacheError, match="cannot be written"):
        export(Given({"a": torch.ones(1)}), tmp_path / "absent" / "m.tensors")
    assert not list(tmp_path.iterdir())


def test_without_the_package_its_install_command_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m.tensors").touch()
    monkeypatch.setitem(sys.modules, "tensorizer", None)
    for attempt in (
        lambda: TensorizerOrigin(tmp_path / "m.tensors"),
        lambda: export(Given({"a": torch.ones(1)}), tmp_path / "n.tensors"),
    ):
        with pytest.raises(SnapshotError) as caught:
            attempt()
        assert "pip install 'pilotflame[tensorizer]'" in caught.value.remedy
