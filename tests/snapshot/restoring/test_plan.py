"""Matching modules with snapshots: ties, buffers, and every mismatch told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pilotflame.errors import SnapshotMismatch
from pilotflame.snapshot.format.manifest import Manifest
from pilotflame.snapshot.restoring.plan import make_plan
from pilotflame.snapshot.restoring.skeleton import skeleton
from torch import nn

Save = Callable[..., tuple[Path, Manifest]]


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
    assert steps["0.weight"].shape == (3, 4)
    assert steps["0.weight"].stride == (4, 1)
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
    assert len(step.slots) == 2  # a, which is also c.inner, and b


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
