"""Restored weights: right, tied, private to their process, alive as long as used."""

from __future__ import annotations

import gc
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pilotflame.errors import SnapshotMismatch
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.format.header import DTYPES
from pilotflame.snapshot.format.manifest import Manifest
from pilotflame.snapshot.restoring.mapping import Mapping
from pilotflame.snapshot.restoring.plan import make_plan
from pilotflame.snapshot.restoring.restore import restore
from pilotflame.snapshot.restoring.skeleton import skeleton
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModel

Save = Callable[..., tuple[Path, Manifest]]


def bag(tensors: dict[str, torch.Tensor]) -> nn.Module:
    """A module with these tensors as buffers, on meta."""
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, torch.empty_like(tensor, device="meta"))
    return module


def restored(tensors: dict[str, torch.Tensor], root: Path, manifest: Manifest) -> nn.Module:
    module = bag(tensors)
    restore(make_plan(module, manifest), Mapping(root, manifest))
    return module


def in_child(work: Callable[[], None]) -> int:
    """Run `work` in a forked child; its exit status."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_minilm_restored_is_minilm_loaded_bit_for_bit(minilm: Path) -> None:
    manifest = create(minilm)
    with skeleton():
        model = AutoModel.from_config(AutoConfig.from_pretrained(minilm)).eval()
    restore(make_plan(model, manifest), Mapping(minilm, manifest))
    loaded = AutoModel.from_pretrained(minilm).eval()
    tokens = torch.randint(1, 30_000, (3, 21))
    with torch.inference_mode():
        assert torch.equal(model(tokens).last_hidden_state, loaded(tokens).last_hidden_state)
        assert torch.equal(model(tokens).pooler_output, loaded(tokens).pooler_output)
    for (name, mine), (other, theirs) in zip(
        model.named_parameters(), loaded.named_parameters(), strict=True
    ):
        assert name == other
        assert torch.equal(mine, theirs)
        assert mine.requires_grad == theirs.requires_grad


def test_shards_are_restored(tmp_path: Path) -> None:
    tensors = {name: torch.rand(5, 7) for name in "abcd"}
    for number, names in enumerate(("ab", "cd")):
        save_file({name: tensors[name] for name in names}, tmp_path / f"m-{number}.safetensors")
    places = {name: f"m-{number}.safetensors" for number, names in enumerate(("ab", "cd")) for name in names}
    (tmp_path / "m.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    module = restored(tensors, tmp_path, create(tmp_path))
    for name, tensor in tensors.items():
        assert torch.equal(module.get_buffer(name), tensor)


@pytest.mark.parametrize("name", sorted(set(DTYPES) - {"F8_E8M0"}))
def test_every_dtype_is_restored(save: Save, name: str) -> None:
    dtype = getattr(torch, DTYPES[name].torch_name)
    tensor = torch.arange(6).reshape(2, 3).to(dtype)
    module = restored(
        {"pad": torch.ones(3, dtype=torch.int8), "t": tensor},
        *save({"pad": torch.ones(3, dtype=torch.int8), "t": tensor}),
    )
    assert module.t.dtype == dtype
    assert module.t.view(torch.uint8).tolist() == tensor.view(torch.uint8).tolist()


def test_scalars_and_nothings_are_restored(save: Save) -> None:
    tensors = {
        "scalar": torch.tensor(3.5),
        "none": torch.empty(0),
        "flat": torch.empty(4, 0, 2, dtype=torch.int64),
        "byte": torch.tensor([7], dtype=torch.uint8),
    }
    module = restored(tensors, *save(tensors))
    for name, tensor in tensors.items():
        assert torch.equal(module.get_buffer(name), tensor)
        assert module.get_buffer(name).stride() == tensor.stride()


def test_a_snapshot_without_tensors_is_restored(save: Save) -> None:
    restored({}, *save({}))


def test_unaligned_tensors_are_copied_and_right(tmp_path: Path) -> None:
    values = torch.rand(4)
    header = json.dumps({"t": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}).encode()
    header += b" " * (-len(header) % 8 + 3)
    content = struct.pack("<Q", len(header)) + header + values.numpy().tobytes()
    (tmp_path / "model.safetensors").write_bytes(content)
    manifest = create(tmp_path)
    module = bag({"t": values.reshape(2, 2)})
    plan = make_plan(module, manifest)
    assert plan.steps[0].offset_elements == -1
    restore(plan, Mapping(tmp_path, manifest))
    assert torch.equal(module.t, values.reshape(2, 2))


def test_tied_weights_stay_tied(save: Save) -> None:
    module = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    module["b"].weight = module["a"].weight
    root, manifest = save({"b.weight": torch.ones(3, 3)})
    restore(make_plan(module, manifest), Mapping(root, manifest))
    assert module["a"].weight is module["b"].weight
    assert module["a"].weight.sum() == 9


def test_parameters_keep_what_the_skeleton_says_of_them(save: Save) -> None:
    module = nn.Linear(3, 3)
    module.bias.requires_grad_(False)
    module.weight.tensor_parallel = "row"  # type: ignore[attr-defined]
    root, manifest = save(module.state_dict())
    restore(make_plan(module, manifest), Mapping(root, manifest))
    assert isinstance(module.weight, nn.Parameter)
    assert module.weight.requires_grad
    assert module.weight.is_leaf
    assert not module.bias.requires_grad
    assert module.weight.tensor_parallel == "row"  # type: ignore[attr-defined]


def test_a_restored_module_can_be_trained(save: Save) -> None:
    # Views of one base share a version counter: BatchNorm's in-place statistics would break backward.
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    root, manifest = save(module.state_dict())
    restore(make_plan(module, manifest), Mapping(root, manifest))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    before = (root / "model.safetensors").read_bytes()
    for _ in range(2):
        module(torch.rand(4, 3)).sum().backward()
        optimizer.step()
    assert (root / "model.safetensors").read_bytes() == before
    assert module[1].num_batches_tracked == 2


def test_a_write_is_seen_by_nobody_else(save: Save) -> None:
    tensors = {"t": torch.zeros(5000)}
    root, manifest = save(tensors)
    before = (root / "model.safetensors").read_bytes()
    # One restored before the fork, and so shared by address with the child; one restored in the child alone.
    shared = restored(tensors, root, manifest)

    def write() -> None:
        own = restored(tensors, root, manifest)
        shared.t.fill_(1)
        own.t.fill_(2)
        if shared.t.sum() != 5000 or own.t.sum() != 10_000:
            raise ValueError("the child does not see its own writes")

    assert in_child(write) == 0
    assert not shared.t.any()
    assert not restored(tensors, root, manifest).t.any()
    assert (root / "model.safetensors").read_bytes() == before


def test_two_restores_in_one_process_are_apart(save: Save) -> None:
    tensors = {"t": torch.zeros(10)}
    one, two = restored(tensors, *save(tensors)), restored(tensors, *save(tensors))
    one.t.fill_(1)
    assert not two.t.any()


def test_tensors_keep_their_memory_alive(save: Save) -> None:
    tensors = {"t": torch.arange(10_000)}
    root, manifest = save(tensors)
    tensor = restored(tensors, root, manifest).t
    (root / "model.safetensors").unlink()
    gc.collect()
    assert torch.equal(tensor, torch.arange(10_000))


def test_a_plan_is_for_its_own_manifest(save: Save) -> None:
    root, manifest = save({"t": torch.zeros(10)})
    plan = make_plan(bag({"t": torch.zeros(10)}), manifest)
    restore(plan, Mapping(root, Manifest.parse(manifest.to_json())))
    root, other = save({"t": torch.ones(10)})
    with pytest.raises(SnapshotMismatch, match="another manifest"):
        restore(plan, Mapping(root, other))


def test_restoring_again_brings_the_weights_back(save: Save) -> None:
    tensors = {"t": torch.ones(10)}
    root, manifest = save(tensors)
    module = bag(tensors)
    plan = make_plan(module, manifest)
    restore(plan, Mapping(root, manifest))
    module.t.zero_()
    restore(plan, Mapping(root, manifest))
    assert module.t.all()


def test_weights_of_another_type_are_cast_only_on_request(save: Save) -> None:
    stored = {
        "weight": torch.randn(3, 2).to(torch.bfloat16),
        "bias": torch.randn(3),
        "steps": torch.tensor([7]),
    }
    root, manifest = save(stored)
    wanted = {
        "weight": torch.empty(3, 2),
        "bias": torch.empty(3, dtype=torch.float16),
        "steps": torch.tensor([0]),
    }
    with pytest.raises(SnapshotMismatch, match="weight"):
        make_plan(bag(wanted), manifest)
    module = bag(wanted)
    restore(make_plan(module, manifest, cast=True), Mapping(root, manifest))
    found = dict(module.named_buffers())
    assert torch.equal(found["weight"], stored["weight"].float())
    assert torch.equal(found["bias"], stored["bias"].half())
    assert found["weight"].dtype == torch.float32
    assert torch.equal(found["steps"], stored["steps"])


def test_whole_numbers_are_never_cast(save: Save) -> None:
    _, manifest = save({"steps": torch.tensor([7])})
    with pytest.raises(SnapshotMismatch, match="steps"):
        make_plan(bag({"steps": torch.tensor([0.0])}), manifest, cast=True)
