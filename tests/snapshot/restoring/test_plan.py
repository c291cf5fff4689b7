"""Plans match modules with snapshots, or name every misfit. Weights are restored bit for bit, and are private to each process."""

from __future__ import annotations

import gc
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pilotflame.errors import SnapshotMismatch
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.format.dtypes import DTYPES
from pilotflame.snapshot.format.manifest import Manifest
from pilotflame.snapshot.format.slices import part_of
from pilotflame.snapshot.restoring.device.slab import ALIGN_BYTES
from pilotflame.snapshot.restoring.mapping import Mapping
from pilotflame.snapshot.restoring.plan import Supply, blank, make_plan, make_plans, restore
from pilotflame.snapshot.restoring.skeleton import skeleton
from safetensors.torch import save_file
from simulated_device import SimulatedDevice
from torch import nn
from transformers import AutoConfig, AutoModel
from wrapper_weights import Wrapped, wrap

Save = Callable[..., tuple[Path, Manifest]]
SaveIn = Callable[[str, dict[str, torch.Tensor]], tuple[Path, Manifest]]


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))


def mismatch(module: nn.Module, manifest: Manifest, **options: object) -> SnapshotMismatch:
    with pytest.raises(SnapshotMismatch) as caught:
        make_plan(module, manifest, **options)  # type: ignore[arg-type]
    assert caught.value.remedy
    assert "\n" not in str(caught.value)
    return caught.value


def test_a_plan_holds_every_parameter_and_buffer(save: Save) -> None:
    _, manifest = save(net().state_dict())
    with skeleton():
        module = net()
    module[0].bias.requires_grad_(False)
    plan = make_plan(module, manifest)
    steps = {step.name: step for step in plan.steps}
    assert set(steps) == set(module.state_dict())
    assert not isinstance(steps["1.running_mean"].tensor, nn.Parameter)
    assert isinstance(steps["0.bias"].tensor, nn.Parameter)
    assert not steps["0.bias"].tensor.requires_grad
    assert steps["0.weight"].tensor.requires_grad
    assert steps["0.weight"].place.shape == (3, 4)
    assert steps["0.weight"].place.stride == (4, 1)
    assert steps["0.weight"].slots[0].module is module[0]


def test_missing_tensors_are_named_and_counted(save: Save) -> None:
    _, manifest = save({"0.weight": torch.ones(3, 4)})
    error = mismatch(net(), manifest)
    assert "6 tensors are missing from it (0.bias, 1.weight, 1.bias and 3 more)" in error.message
    assert "Sequential" in error.message
    assert "1.num_batches_tracked" in error.details["missing"]


def test_unexpected_tensors_are_refused_unless_ignored(save: Save) -> None:
    _, manifest = save({**net().state_dict(), "head.weight": torch.ones(1), "head.bias": torch.ones(1)})
    error = mismatch(net(), manifest)
    assert "2 tensors are in it but not in the module (head" in error.message
    assert r'ignore=[r"^head\."]' in error.remedy
    make_plan(net(), manifest, ignore=[r"^head\."])


def test_another_shape_is_told_with_both(save: Save) -> None:
    _, manifest = save({**net().state_dict(), "0.weight": torch.ones(3, 5)})
    error = mismatch(net(), manifest)
    assert "1 tensor is of another shape (0.weight [3, 5], not [3, 4])" in error.message
    assert "config" in error.remedy


def test_another_dtype_says_how_to_build_the_skeleton(save: Save) -> None:
    _, manifest = save(nn.Linear(4, 3).half().state_dict())
    error = mismatch(nn.Linear(4, 3), manifest)
    assert "of another dtype" in error.message
    assert "dtype=torch.float16" in error.remedy


def test_all_kinds_come_in_one_error(save: Save) -> None:
    state = net().state_dict()
    del state["0.bias"]
    state |= {"x": torch.ones(1), "0.weight": torch.ones(1), "1.bias": torch.ones(3).double()}
    _, manifest = save(state)
    message = mismatch(net(), manifest).message
    for kind in ("missing", "not in the module", "another shape", "another dtype"):
        assert kind in message


def test_a_prefix_that_the_snapshot_has_is_proposed(save: Save) -> None:
    _, manifest = save({f"bert.{name}": tensor for name, tensor in net().state_dict().items()})
    error = mismatch(net(), manifest)
    assert 'prefix="bert."' in error.remedy
    assert len(make_plan(net(), manifest, prefix="bert.").steps) == 7


def test_a_prefix_is_proposed_with_what_to_ignore(save: Save) -> None:
    state = {f"bert.{name}": tensor for name, tensor in net().state_dict().items()}
    _, manifest = save({**state, "cls.bias": torch.ones(1)})
    error = mismatch(net(), manifest)
    assert 'prefix="bert."' in error.remedy
    assert r'ignore=[r"^cls\."]' in error.remedy
    make_plan(net(), manifest, prefix="bert.", ignore=[r"^cls\."])


def test_a_needless_prefix_is_called_so(save: Save) -> None:
    _, manifest = save(net().state_dict())
    assert 'prefix=""' in mismatch(net(), manifest, prefix="bert.").remedy


def test_a_snapshot_of_a_part_says_which_part(save: Save) -> None:
    _, manifest = save(net().state_dict())
    whole = nn.ModuleDict({"body": net()})
    assert "restore module.body instead" in mismatch(whole, manifest).remedy


class Computed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2))
        self.register_buffer("frequencies", torch.arange(3.0), persistent=False)


def test_a_computed_buffer_is_left_alone_or_taken_from_the_snapshot(save: Save) -> None:
    _, manifest = save({"weight": torch.ones(2)})
    with skeleton():
        module = Computed()
    assert [step.name for step in make_plan(module, manifest).steps] == ["weight"]
    _, manifest = save({"weight": torch.ones(2), "frequencies": torch.ones(3)})
    assert len(make_plan(module, manifest).steps) == 2


def test_a_computed_buffer_on_meta_is_an_error_that_names_skeleton(save: Save) -> None:
    _, manifest = save({"weight": torch.ones(2)})
    with torch.device("meta"):
        module = Computed()
    error = mismatch(module, manifest)
    assert "frequencies" in error.message
    assert "skeleton()" in error.remedy


@pytest.mark.parametrize("name", ["a.weight", "b.weight", "c.inner.weight"])
def test_any_name_of_a_tied_weight_will_do(save: Save, name: str) -> None:
    a, b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    b.weight = a.weight
    module = nn.ModuleDict({"a": a, "b": b, "c": nn.ModuleDict({"inner": a})})
    _, manifest = save({name: torch.ones(3, 3)})
    (step,) = make_plan(module, manifest).steps
    # The weight has two slots: one in module a, which is also c.inner, and one in module b.
    assert len(step.slots) == 2


def test_all_names_of_a_tied_weight_may_be_there(save: Save) -> None:
    module = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    module["b"].weight = module["a"].weight
    _, manifest = save({"a.weight": torch.ones(2, 2), "b.weight": torch.ones(2, 2)})
    assert len(make_plan(module, manifest).steps) == 1


def test_an_alias_stands_for_its_tensor(save: Save) -> None:
    module = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    _, manifest = save({"a.weight": torch.ones(2, 2)}, metadata={"b.weight": "a.weight"})
    assert len(make_plan(module, manifest).steps) == 2


def test_a_lazy_module_is_an_error(save: Save) -> None:
    _, manifest = save({"weight": torch.ones(2, 2), "bias": torch.ones(2)})
    with pytest.raises(SnapshotMismatch, match="lazy"):
        make_plan(nn.LazyLinear(2), manifest)


# -- restoring


def bag(tensors: dict[str, torch.Tensor]) -> nn.Module:
    """Return a module with buffers like these tensors, on the meta device."""
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, torch.empty_like(tensor, device="meta"))
    return module


def restored(tensors: dict[str, torch.Tensor], root: Path, manifest: Manifest) -> nn.Module:
    module = bag(tensors)
    restore(make_plan(module, manifest), Mapping(root, manifest))
    return module


def in_child(work: Callable[[], None]) -> int:
    """Run `work` in a forked child. Return the child's exit status."""
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


@pytest.mark.parametrize("name", sorted(set(DTYPES) - {"F6_E2M3", "F6_E3M2"}))
def test_every_dtype_is_restored(save: Save, name: str) -> None:
    dtype = getattr(torch, DTYPES[name].torch_name or "")
    values = torch.arange(6).reshape(2, 3)
    # torch cannot convert numbers to F4, which has two elements in a byte.
    tensor = values.to(torch.uint8).view(dtype) if name == "F4" else values.to(dtype)
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
    # Views of one base share a version counter. If the restored tensors were such views, BatchNorm would make `backward` fail,
    # because it changes its statistics in place.
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
    # `shared` is restored before the fork, so it has the same address in the child. `own` is restored only in the child.
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


class Scaled(nn.Parameter):
    """A parameter with a method, and with a constructor that takes other arguments."""

    def __new__(cls, data: torch.Tensor, scale: float) -> Scaled:
        made: Scaled = torch.Tensor._make_subclass(cls, data, True)
        made.scale = scale
        return made

    scale: float

    def scaled(self) -> torch.Tensor:
        return self * self.scale


class Marked(torch.Tensor):
    """A subclass of tensors, for a buffer."""


def test_subclasses_of_parameters_and_of_buffers_survive(save: Save) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = Scaled(torch.empty(3), 2.0)
            self.register_buffer("mark", torch.empty(2).as_subclass(Marked))

    root, manifest = save({"weight": torch.arange(3.0), "mark": torch.ones(2)})
    with skeleton():
        module = Own()
    restore(make_plan(module, manifest), Mapping(root, manifest))
    assert type(module.weight) is Scaled
    assert module.weight.scaled().tolist() == [0.0, 2.0, 4.0]
    assert module.weight.requires_grad
    assert type(module.mark) is Marked
    assert module.mark.tolist() == [1.0, 1.0]


def test_a_weight_made_of_another_tensor_is_restored_or_its_missing_part_is_named(save: Save) -> None:
    module = wrap(nn.Linear(3, 2))
    weight = torch.randn(2, 3)
    root, manifest = save({"weight.held": weight, "bias.held": torch.ones(2)})
    restore(make_plan(module, manifest), Mapping(root, manifest))
    assert isinstance(module.weight.data, Wrapped)
    given = torch.rand(4, 3)
    assert torch.equal(module(given), nn.functional.linear(given, weight, torch.ones(2)))
    _, less = save({"weight.held": weight})
    assert "1 tensor is missing from it (bias.held)" in mismatch(module, less).message


@pytest.mark.parametrize("noted", [True, False])
def test_the_slices_of_a_part_are_restored_unless_others_are_given(save: Save, noted: bool) -> None:
    weight = torch.arange(24.0).reshape(6, 4)
    root, manifest = save({"weight": weight, "bias": torch.ones(4)})
    module = bag({"weight": torch.empty(3, 4), "bias": torch.empty(4)})
    # The second half of the rows.
    slices = {"weight": (0, 1, 2)}
    if noted:
        manifest = part_of(manifest, [], slices)
    restore(make_plan(module, manifest, slices=None if noted else slices), Mapping(root, manifest))
    assert torch.equal(module.weight, weight[3:])
    assert torch.equal(module.bias, torch.ones(4))


@pytest.mark.parametrize("device", ["cpu", "simulated"])
def test_a_rehearsal_has_zeros_in_one_region_for_all_weights(save: Save, device: str) -> None:
    tensors = {"large": torch.ones(300), "small": torch.ones(2, 3).half()}
    _, manifest = save(tensors)
    module = bag(tensors)
    blank(make_plan(module, manifest, device=device), None if device == "cpu" else SimulatedDevice())
    for name, tensor in tensors.items():
        found = module.get_buffer(name)
        assert torch.equal(found, torch.zeros_like(tensor))
        assert 1200 <= found.untyped_storage().nbytes() < 1200 + ALIGN_BYTES
    assert module.large.data_ptr() == module.small.data_ptr()


# -- several snapshots


class Lora(nn.Linear):
    """A layer of a base with a low-rank adapter, under PEFT's names."""

    def __init__(self, inputs: int = 4, outputs: int = 3) -> None:
        super().__init__(inputs, outputs)
        self.lora_A, self.lora_B = nn.Linear(inputs, 2, bias=False), nn.Linear(2, outputs, bias=False)


def adapted() -> nn.Sequential:
    return nn.Sequential(Lora(), nn.BatchNorm1d(3))


def halves(
    save: SaveIn, prefix: str = "base_model.model."
) -> tuple[dict[str, Supply], dict[str, torch.Tensor]]:
    """Return a base and an adapter for `adapted`, and all their tensors by the module's names."""
    state = adapted().state_dict()
    _, base = save("base", {name: tensor for name, tensor in state.items() if "lora" not in name})
    _, style = save("style", {prefix + name: tensor for name, tensor in state.items() if "lora" in name})
    return {"base": Supply(base), "style": Supply(style, prefix)}, state


@pytest.fixture
def save_in(tmp_path: Path) -> SaveIn:
    def write(name: str, tensors: dict[str, torch.Tensor]) -> tuple[Path, Manifest]:
        (folder := tmp_path / name).mkdir(exist_ok=True)
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "model.safetensors")
        return folder, create(folder)

    return write


def misfits(module: nn.Module, supplies: dict[str, Supply]) -> SnapshotMismatch:
    with pytest.raises(SnapshotMismatch) as caught:
        make_plans(module, supplies)
    assert "\n" not in str(caught.value)
    return caught.value


def test_a_base_and_an_adapter_fill_one_module(save_in: SaveIn, tmp_path: Path) -> None:
    supplies, state = halves(save_in)
    with skeleton():
        module = adapted()
    for name, plan in make_plans(module, supplies).items():
        restore(plan, Mapping(tmp_path / name, supplies[name].manifest))
    assert all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())
    assert not any(tensor.is_meta for tensor in module.state_dict().values())


def test_a_tensor_that_no_snapshot_has_is_missing_from_all(save_in: SaveIn) -> None:
    supplies, state = halves(save_in)
    _, less = save_in("style", {"base_model.model.0.lora_A.weight": state["0.lora_A.weight"]})
    error = misfits(adapted(), supplies | {"style": Supply(less, "base_model.model.")})
    assert error.message.startswith("The snapshots base and style do not fit Sequential: ")
    assert "1 tensor is missing from them (0.lora_B.weight)" in error.message
    assert error.details["missing"] == ["0.lora_B.weight"]


def test_a_tensor_that_two_snapshots_have_is_refused_unless_one_gives_way(
    save_in: SaveIn, tmp_path: Path
) -> None:
    supplies, state = halves(save_in)
    own = {
        f"base_model.model.{name}": state[name] + 1 for name in state if "lora" in name or name == "1.bias"
    }
    _, style = save_in("style", own)
    supplies["style"] = Supply(style, "base_model.model.")
    error = misfits(adapted(), supplies)
    assert "1 tensor is in several of them (1.bias in base and style)" in error.message
    assert r'ignore={"base": [r"^1\."]}' in error.remedy
    # The remedy ignores the tensor in a snapshot that has it, so not in `another`. Its pattern has the name in the snapshot.
    _, other = save_in("another", {"x.y": torch.ones(1)})
    more = {"another": Supply(other, ignore=["^x"]), "tune": supplies["style"], "style": supplies["style"]}
    error = misfits(adapted(), more)
    assert r'ignore={"style": [r"^base_model\."]}' in error.remedy
    for gives_way, more in (("base", 1), ("style", 0)):
        chosen = supplies | {
            gives_way: Supply(supplies[gives_way].manifest, supplies[gives_way].prefix, [r"1\.bias$"])
        }
        module = adapted()
        for name, plan in make_plans(module, chosen).items():
            restore(plan, Mapping(tmp_path / name, chosen[name].manifest))
        assert torch.equal(module[1].bias, state["1.bias"] + more)
    # If both snapshots ignore the tensor, neither is chosen, and the error names both.
    both = {name: Supply(one.manifest, one.prefix, [r"1\.bias$"]) for name, one in supplies.items()}
    assert "1.bias in base and style" in misfits(adapted(), both).message


def test_what_does_not_fit_is_told_with_its_snapshot(save_in: SaveIn) -> None:
    supplies, state = halves(save_in)
    _, style = save_in("style", {"0.lora_A.weight": torch.ones(1, 1), "0.lora_B.weight": state["0.lora_B.weight"], "x.y": torch.ones(1)})  # fmt: skip
    error = misfits(adapted(), supplies | {"style": Supply(style)})
    assert "in them but not in the module (x.y of style)" in error.message
    assert "another shape (0.lora_A.weight of style [1, 1], not [2, 4])" in error.message
    assert r'ignore={"style": [r"^x\."]}' in error.remedy


def test_the_prefix_of_an_adapter_is_proposed(save_in: SaveIn) -> None:
    supplies, _ = halves(save_in)
    error = misfits(adapted(), supplies | {"style": Supply(supplies["style"].manifest)})
    assert 'prefixes={"style": "base_model.model."}' in error.remedy


@given(st.data())
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_each_tensor_comes_from_the_one_snapshot_that_has_it(save_in: SaveIn, data: st.DataObject) -> None:
    """Spread the tensors over three snapshots. If each tensor is in exactly one, all are restored. Otherwise the error names each
    tensor that is missing or in several."""
    state = {name: tensor for name, tensor in net().state_dict().items() if tensor.dim()}
    labels = ["a", "b", "c"]
    owners = {name: data.draw(st.sets(st.sampled_from(labels))) for name in state}
    supplies = {}
    for label in labels:
        _, manifest = save_in(label, {name: state[name] for name, those in owners.items() if label in those} | {f"own.{label}": torch.ones(1)})  # fmt: skip
        supplies[label] = Supply(manifest, ignore=["^own"])
    module = net()
    del module[1]._buffers["num_batches_tracked"]
    missing = [name for name, those in owners.items() if not those]
    twice = [name for name, those in owners.items() if len(those) > 1]
    if missing or twice:
        error = misfits(module, supplies)
        assert error.details["missing"] == missing
        assert error.details.get("twice", []) == twice
        assert error.details["unexpected"] == []
        return
    plans = make_plans(module, supplies)
    found = {step.name: label for label, plan in plans.items() for step in plan.steps}
    assert found == {name: min(those) for name, those in owners.items()}
    assert sum(len(plan.steps) for plan in plans.values()) == len(state)
