"""All formats convert to the same snapshot, completely or not at all, with one tensor in memory at a time."""

from __future__ import annotations

import ctypes
import gc
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pilotflame.errors import CacheError, HeaderError, SnapshotError
from pilotflame.snapshot.converting import tensorizer_file
from pilotflame.snapshot.converting.convert import convert, convert_to_tensorizer
from pilotflame.snapshot.format.manifest import Manifest
from pilotflame.snapshot.format.verify import verify
from safetensors.torch import load_file, save_file, save_model
from tensorizer import TensorSerializer

STATE = {"a.weight": torch.rand(5, 3), "a.bias": torch.rand(5).to(torch.bfloat16), "n": torch.arange(3)}


def to_safetensors(folder: Path) -> Path:
    save_file(STATE, folder / "model.safetensors")
    return folder


def to_shards(folder: Path) -> Path:
    places = {}
    for index, (name, tensor) in enumerate(STATE.items()):
        places[name] = f"model-{index}.safetensors"
        save_file({name: tensor}, folder / places[name])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def to_bin(folder: Path) -> Path:
    torch.save(STATE, folder / "pytorch_model.bin")
    torch.save({"lr": 1}, folder / "training_args.bin")
    torch.save({"x": 1}, folder / "optimizer.pt")
    return folder


def to_bins(folder: Path) -> Path:
    places = {}
    for index, (name, tensor) in enumerate(STATE.items()):
        places[name] = f"pytorch_model-{index}.bin"
        torch.save({name: tensor}, folder / places[name])
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def to_pt(folder: Path) -> Path:
    torch.save({"state_dict": STATE}, folder / "best.pth")
    return folder


def to_tensors(folder: Path) -> Path:
    writer = TensorSerializer(str(folder / "model.tensors"))
    writer.write_state_dict(STATE)
    writer.close()
    return folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for shard in Manifest.read(folder).shards:
        found |= load_file(folder / shard.name)
    return found


@pytest.fixture
def given(tmp_path: Path) -> Path:
    """A folder with a tokenizer and no weights yet."""
    folder = tmp_path / "in"
    (folder / "1_Pooling").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "1_Pooling" / "config.json").write_text('{"a": 1}')
    (folder / ".gitattributes").touch()
    return folder


FORMS = [to_safetensors, to_shards, to_bin, to_bins, to_pt, to_tensors]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_becomes_a_snapshot(given: Path, form: Callable[[Path], Path]) -> None:
    seen: list[tuple[int, int]] = []
    out = given.parent / "out"
    manifest = convert(form(given), out, progress=lambda done, total: seen.append((done, total)))
    found = tensors(out)
    assert found.keys() == STATE.keys()
    assert all(
        found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
        for name, tensor in STATE.items()
    )
    assert Manifest.read(out) == manifest
    assert manifest.provenance.source == str(given)
    verify(out, manifest)
    kept = {"model.safetensors.index.json"} if form is to_shards else set()
    assert {asset.name for asset in manifest.assets} == {"config.json", "1_Pooling/config.json"} | kept
    assert {path.name for path in given.parent.iterdir()} == {"in", "out"}
    assert seen[-1][0] == seen[-1][1] > 0


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_cast_and_sharded(given: Path, form: Callable[[Path], Path]) -> None:
    out = given.parent / "out"
    manifest = convert(form(given), out, dtype="fp32", shard_bytes=40)
    found = tensors(out)
    assert len(manifest.shards) == 3
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        "a.weight": torch.float32,
        "a.bias": torch.float32,
        "n": torch.int64,
    }
    assert torch.equal(found["a.bias"], STATE["a.bias"].float())
    assert not list(out.glob("pytorch_model*"))


@pytest.mark.parametrize("form", [to_safetensors, to_bin])
def test_a_single_file_brings_nothing_along(given: Path, form: Callable[[Path], Path]) -> None:
    form(given)
    file = next(path for path in given.iterdir() if path.name in ("model.safetensors", "pytorch_model.bin"))
    manifest = convert(file, given.parent / "out")
    assert manifest.assets == ()
    assert tensors(given.parent / "out").keys() == STATE.keys()


def test_safetensors_stay_as_they_are(given: Path, tmp_path: Path) -> None:
    convert(to_safetensors(given), tmp_path / "out")
    there = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert there == (given / "model.safetensors").read_bytes()


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    torch.save(model.state_dict(), tmp_path / "m.pt")
    save_model(model, str(tmp_path / "m.safetensors"))
    for name, dtype in (("m.pt", None), ("m.pt", "bf16"), ("m.safetensors", None), ("m.safetensors", "bf16")):
        manifest = convert(tmp_path / name, tmp_path / f"{name}-{dtype}", dtype=dtype)
        assert manifest.aliases == {"b.weight": "a.weight"}


@pytest.mark.parametrize("form", FORMS)
def test_to_tensorizer_and_back(given: Path, form: Callable[[Path], Path]) -> None:
    size_bytes = convert_to_tensorizer(form(given), given.parent / "m.tensors")
    assert size_bytes == 5 * 3 * 4 + 5 * 2 + 3 * 8
    convert(given.parent / "m.tensors", given.parent / "back")
    found = tensors(given.parent / "back")
    assert found.keys() == STATE.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in STATE.items())
    with pytest.raises(SnapshotError, match=r"m\.tensors is there already"):
        convert_to_tensorizer(given, given.parent / "m.tensors")


def test_what_is_ambiguous_or_unknown_is_refused(given: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(SnapshotError, match=r"only config\.json"):
        convert(given, out)
    torch.save(STATE, given / "one.pt")
    torch.save(STATE, given / "two.pt")
    with pytest.raises(SnapshotError, match=r"one\.pt, two\.pt, and nothing says"):
        convert(given, out)
    with pytest.raises(SnapshotError, match=r"has no supported format\. Supported are .*\.tensors"):
        convert(given / "config.json", out)
    with pytest.raises(SnapshotError, match="neither a folder nor a file"):
        convert(given / "absent", out)
    with pytest.raises(SnapshotError, match="dtype 'int4' is unknown"):
        convert(given / "one.pt", out, dtype="int4")
    assert not out.exists()


def test_an_index_of_torch_files_that_lies_is_refused(given: Path, tmp_path: Path) -> None:
    index = to_bins(given) / "pytorch_model.bin.index.json"
    places = json.loads(index.read_text())["weight_map"]
    for lie, fault in (
        ({"x": "pytorch_model-0.bin"}, "tensors that no file holds: x"),
        ({"x": "absent.bin"}, r"not there: absent\.bin"),
        ({"x": "config.json"}, r"config\.json, which torch\.save did not write"),
        ({"x": "../x.bin"}, "not a file: it holds"),
    ):
        index.write_text(json.dumps({"weight_map": places | lie}))
        with pytest.raises((SnapshotError, HeaderError), match=fault):
            convert(given, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_full_disk_leaves_nothing(given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(CacheError, match="out cannot be written: No space left"):
        convert(to_bin(given), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def anonymous_bytes() -> int:
    """Return the anonymous memory of this process."""
    text = Path("/proc/self/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith("RssAnon")).split()[1]) << 10


@pytest.mark.parametrize("form", ["pt", "safetensors", "tensors"])
def test_memory_is_a_tensors_not_the_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    count, each_bytes = 24, 8 << 20
    state = {f"t{index}": torch.full((each_bytes // 4,), float(index)) for index in range(count)}
    path = tmp_path / f"m.{form}"
    if form == "pt":
        torch.save(state, path)
    else:
        save_file(state, tmp_path / "m.safetensors")
    if form == "tensors":
        convert_to_tensorizer(tmp_path / "m.safetensors", path)
    del state
    monkeypatch.setattr(tensorizer_file, "BATCH_BYTES", 2 * each_bytes)

    def peak_bytes(out: Path) -> int:
        # Give free memory back to the kernel: allocations from free memory would not raise the measured size.
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        before_bytes, found = anonymous_bytes(), list[int]()
        convert(
            path, out, dtype="bf16", shard_bytes=1 << 30,
            progress=lambda _done, _of: found.append(anonymous_bytes() - before_bytes),
        )  # fmt: skip
        assert (out / "model.safetensors").stat().st_size > count * each_bytes // 2
        return max(found)

    # Other threads of this process allocate memory, too, but not in every run. So check the smallest of three peaks.
    assert min(peak_bytes(tmp_path / f"out{number}") for number in range(3)) < count * each_bytes / 2
