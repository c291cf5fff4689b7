"""Files of torch.save: their tensors are read, tied tensors only once, and code in them never runs."""

from __future__ import annotations

import collections
import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from pilotflame.errors import SnapshotError
from pilotflame.snapshot.converting.origin import DTYPE_NAMES
from pilotflame.snapshot.converting.torch_file import TorchOrigin


def saved(folder: Path, what: Any, name: str = "m.pt", **options: Any) -> Path:
    torch.save(what, folder / name, **options)
    return folder / name


def read(*paths: Path) -> dict[str, torch.Tensor]:
    origin = TorchOrigin(paths)
    names = [spec.name for spec in origin.specs]
    found = dict(zip(names, origin.tensors(names), strict=True))
    for spec in origin.specs:
        assert (DTYPE_NAMES[found[spec.name].dtype], tuple(found[spec.name].shape)) == (
            spec.dtype,
            spec.shape,
        )
        assert found[spec.name].is_contiguous()
    return found


@pytest.mark.parametrize("new", [True, False], ids=["zip", "legacy"])
def test_a_state_dict_is_read(tmp_path: Path, new: bool) -> None:
    state = {
        "a": torch.rand(3, 4),
        "b": torch.rand(2).to(torch.bfloat16),
        "p": torch.nn.Parameter(torch.ones(1)),
    }
    found = read(saved(tmp_path, state, _use_new_zipfile_serialization=new))
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    assert not found["p"].requires_grad


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: {"state_dict": state, "epoch": 3},
        lambda state: {"model": state, "optimizer": {"state": {}}},
        lambda state: {"state_dict": {"model": collections.OrderedDict(state)}},
        lambda state: {"model_state_dict": state},
    ],
)
def test_what_trainers_wrap_is_unwrapped(tmp_path: Path, wrap: Any) -> None:
    assert read(saved(tmp_path, wrap({"a": torch.ones(2)}))).keys() == {"a"}


def test_a_tensor_that_is_called_model_is_one(tmp_path: Path) -> None:
    assert read(saved(tmp_path, {"model": torch.ones(2)})).keys() == {"model"}


def test_tied_weights_become_aliases_and_views_become_their_own(tmp_path: Path) -> None:
    weight, base = torch.rand(4, 4), torch.rand(10)
    state = {
        "embed": weight,
        "head": weight,
        "transposed": weight.t(),
        "first": base[:6],
        "last": base[4:],
        "again": base[:6],
        "empty": torch.empty(0),
        "none": torch.empty(0),
    }
    path = saved(tmp_path, state)
    assert TorchOrigin([path]).aliases == {"head": "embed", "again": "first"}
    found = read(path)
    assert found.keys() == state.keys() - {"head", "again"}
    assert all(torch.equal(tensor, state[name]) for name, tensor in found.items())


def test_a_name_of_the_metadata_is_no_alias(tmp_path: Path) -> None:
    weight = torch.rand(4)
    assert read(saved(tmp_path, {"a": weight, "format": weight})).keys() == {"a", "format"}


@pytest.mark.parametrize(
    ("what", "fault"),
    [
        ({"a": torch.ones(1), "step": 3}, "'step': it is a int, not a tensor"),
        ({"model": {"a": torch.ones(1), "deep": {"b": torch.ones(1)}}}, "'model.deep': it is a dict"),
        ({3: torch.ones(1)}, "'3': its key is not text"),
        ([torch.ones(1)], "holds a list, not a dict"),
        (torch.ones(1), "holds a Tensor, not a dict"),
        ({}, "holds no tensors"),
        ({"s": torch.eye(3).to_sparse()}, "'s': it is a sparse"),
        ({"c": torch.ones(1, dtype=torch.complex128)}, "'c': safetensors does not hold torch.complex128"),
        ({"m": torch.ones(1, device="meta")}, "'m': it is on meta"),
        ({"": torch.ones(1)}, "name that no file may hold"),
        ({"__metadata__": torch.ones(1)}, "name that no file may hold"),
        ({"wide": torch.ones(1).expand(1 << 40)}, "holds 4 bytes that its tensors repeat to"),
    ],
)
def test_what_is_no_tensor_is_named(tmp_path: Path, what: Any, fault: str) -> None:
    with pytest.raises(SnapshotError) as caught:
        TorchOrigin([saved(tmp_path, what)])
    assert fault in caught.value.message
    assert str(tmp_path) in caught.value.message


class Code:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("new", [True, False], ids=["zip", "legacy"])
def test_code_is_refused_and_not_run(tmp_path: Path, new: bool) -> None:
    path = saved(tmp_path, {"a": Code(tmp_path / "ran")}, _use_new_zipfile_serialization=new)
    with pytest.raises(
        SnapshotError, match=r"m\.pt holds code, not only weights: loading it would call posix\.mkdir"
    ):
        TorchOrigin([path])
    assert not (tmp_path / "ran").exists()


def test_a_whole_module_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match=r"would call torch\.nn\.modules\.linear\.Linear"):
        TorchOrigin([saved(tmp_path, torch.nn.Linear(2, 2))])


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x80\x02", b"x" * 5000, b"\x80\x04K\x01."])
def test_what_is_no_such_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.pt").write_bytes(content)
    with pytest.raises(SnapshotError, match=r"m\.pt (is not a file of torch\.save|holds)"):
        TorchOrigin([tmp_path / "m.pt"])


def test_a_damaged_file_never_crashes(tmp_path: Path) -> None:
    content = saved(tmp_path, {"a": torch.rand(50), "b": torch.rand(9)}).read_bytes()
    for position in range(0, len(content), 41):
        damaged = bytearray(content)
        damaged[position] ^= 0xFF
        (tmp_path / "d.pt").write_bytes(damaged)
        with contextlib.suppress(SnapshotError):
            read(tmp_path / "d.pt")
    with pytest.raises(SnapshotError):
        read(tmp_path / "absent.pt")


def test_files_that_hold_the_same_name_are_refused(tmp_path: Path) -> None:
    one, two = saved(tmp_path, {"a": torch.ones(1)}, "1.bin"), saved(tmp_path, {"a": torch.ones(1)}, "2.bin")
    with pytest.raises(SnapshotError, match=r"2\.bin holds 'a', as another file does"):
        TorchOrigin([one, two])
