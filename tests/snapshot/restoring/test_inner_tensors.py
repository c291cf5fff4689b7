"""Quantised weights are restored: tensors that are made of other tensors, and parameters that have a state beside their values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pilotflame.errors import SnapshotMismatch
from pilotflame.snapshot.fetching.arrival import Arrival
from pilotflame.snapshot.format.manifest import Manifest
from pilotflame.snapshot.handle import Snapshot
from pilotflame.snapshot.restoring.gate import Gate, Unlanded
from pilotflame.snapshot.restoring.mapping import Mapping
from pilotflame.snapshot.restoring.plan import blank, make_plan, restore
from pilotflame.snapshot.restoring.skeleton import skeleton
from torch import nn

Save = Callable[..., tuple[Path, Manifest]]


class Quantised(torch.Tensor):
    """Numbers of 8 bits with a scale for each row, in the manner of torchao. The values are computed at each use and not stored."""

    numbers: torch.Tensor
    scale: torch.Tensor
    zero: int

    def __new__(cls, numbers: torch.Tensor, scale: torch.Tensor, zero: int) -> Quantised:
        made: Quantised = torch.Tensor._make_wrapper_subclass(
            cls, numbers.shape, dtype=scale.dtype, device=numbers.device
        )
        made.numbers, made.scale, made.zero = numbers, scale, zero
        return made

    def __repr__(self) -> str:
        return "Quantised(...)"

    def __tensor_flatten__(self) -> tuple[list[str], int]:
        return ["numbers", "scale"], self.zero

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], zero: int, size: Any, stride: Any) -> Quantised:
        made = Quantised(inner["numbers"], inner["scale"], zero)
        assert (made.size(), made.stride()) == (size, stride)
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return Quantised(args[0].numbers, args[0].scale, args[0].zero)
        plain = [one.values() if isinstance(one, Quantised) else one for one in args]
        # Some of these classes call functions like this. The gate does not see the calls on the inner tensors then.
        with torch._C._DisableTorchDispatch():
            return func(*plain, **(kwargs or {}))

    def values(self) -> torch.Tensor:
        with torch._C._DisableTorchDispatch():
            return (self.numbers.to(self.scale.dtype) - self.zero) * self.scale[:, None]


class Packed(nn.Parameter):
    """Two numbers in each byte, and a state that is needed to decode them, in the manner of bitsandbytes."""

    state: dict[str, torch.Tensor] | None

    def __new__(cls, data: torch.Tensor, state: dict[str, torch.Tensor] | None = None) -> Packed:
        made: Packed = torch.Tensor._make_subclass(cls, data, False)
        made.state = state
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return super().__torch_function__(func, types, tuple(args), kwargs or {})


def quantise(weight: torch.Tensor) -> Quantised:
    scale = weight.abs().amax(1) / 127
    return Quantised((weight / scale[:, None]).round().to(torch.int8) + 3, scale, 3)


def quantised_linear(device: str, rows: int = 4, columns: int = 6) -> nn.Linear:
    module = nn.Linear(columns, rows)
    made = Quantised(
        torch.empty(rows, columns, dtype=torch.int8, device=device), torch.empty(rows, device=device), 3
    )
    module.weight = nn.Parameter(made, requires_grad=False)
    module.weight.axis = "rows"  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize(
    "names", [("0.weight.numbers", "0.weight.scale"), ("0._weight_numbers", "0._weight_scale")]
)
def test_a_weight_made_of_tensors_is_restored(save: Save, device: str, names: tuple[str, str]) -> None:
    weight = quantise(torch.randn(4, 6))
    root, manifest = save({names[0]: weight.numbers, names[1]: weight.scale, "0.bias": torch.rand(4)})
    model = nn.Sequential(quantised_linear(device))
    plan, mapping = make_plan(model, manifest), Mapping(root, manifest)
    blank(plan)
    given = torch.rand(2, 6)
    assert torch.equal(model(given), torch.zeros(2, 4))
    restore(plan, mapping)
    found = model[0].weight
    assert type(found) is Quantised
    assert isinstance(found, nn.Parameter)
    assert not found.requires_grad
    assert found.axis == "rows"  # type: ignore[attr-defined]
    assert found.zero == 3
    assert torch.equal(model(given), nn.functional.linear(given, weight.values(), model[0].bias))
    # Its inner tensors are mapped, not copied.
    begin = mapping.flats[0].data_ptr()
    assert begin <= found.numbers.data_ptr() < begin + len(mapping.flats[0])
    assert dict(model.named_parameters())["0.weight"] is found


def test_a_part_may_be_made_of_parts(save: Save) -> None:
    inner = quantise(torch.rand(4, 1) + 1)
    module = nn.Module()
    scale = Quantised(torch.empty(4, 1, dtype=torch.int8), torch.empty(4), 3)
    module.weight = nn.Parameter(
        Quantised(torch.empty(4, 6, dtype=torch.int8), scale, 0), requires_grad=False
    )
    numbers = torch.randint(-9, 9, (4, 6), dtype=torch.int8)
    root, manifest = save(
        {"weight.numbers": numbers, "weight.scale.numbers": inner.numbers, "weight.scale.scale": inner.scale}
    )
    restore(make_plan(module, manifest), Mapping(root, manifest))
    assert torch.equal(module.weight.numbers, numbers)
    assert torch.equal(module.weight.scale.values(), inner.values())


def test_each_part_that_is_missing_is_named(save: Save) -> None:
    _, manifest = save({"0.weight.numbers": torch.zeros(4, 6, dtype=torch.int8), "0.bias": torch.rand(4)})
    with pytest.raises(SnapshotMismatch, match=r"1 tensor is missing from it \(0\.weight\.scale\)"):
        make_plan(nn.Sequential(quantised_linear("meta")), manifest)


def test_a_part_of_another_type_is_named(save: Save) -> None:
    inner = {"0.weight.numbers": torch.zeros(4, 6, dtype=torch.uint8), "0.weight.scale": torch.rand(4)}
    _, manifest = save({**inner, "0.bias": torch.rand(4)})
    with pytest.raises(SnapshotMismatch, match=r"0\.weight\.numbers torch\.uint8, not torch\.int8"):
        make_plan(nn.Sequential(quantised_linear("meta")), manifest)


def test_tied_weights_made_of_tensors_stay_tied(save: Save) -> None:
    model = nn.Sequential(quantised_linear("meta"), quantised_linear("meta"))
    model[1].weight = model[0].weight
    weight = quantise(torch.randn(4, 6))
    biases = {"0.bias": torch.rand(4), "1.bias": torch.rand(4)}
    root, manifest = save({"1.weight.numbers": weight.numbers, "1.weight.scale": weight.scale, **biases})
    restore(make_plan(model, manifest), Mapping(root, manifest))
    assert model[0].weight is model[1].weight
    assert torch.equal(model[0].weight.values(), weight.values())


class Older(torch.Tensor):
    """A tensor that is made of another tensor, but lacks `__tensor_flatten__`, which would name the other tensor."""

    inside: torch.Tensor

    def __new__(cls, inside: torch.Tensor) -> Older:
        made: Older = torch.Tensor._make_wrapper_subclass(cls, inside.shape, dtype=inside.dtype)
        made.inside = inside
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C._DisableTorchDispatch():
            return func(*(one.inside if isinstance(one, Older) else one for one in args), **(kwargs or {}))


@pytest.mark.parametrize("older", [True, False])
def test_an_operation_waits_for_what_its_weight_is_made_of(save: Save, older: bool) -> None:
    weight = quantise(torch.randn(40, 600))
    root, manifest = save(
        {"0.weight.numbers": weight.numbers, "0.weight.scale": weight.scale, "0.bias": torch.rand(40)},
        chunk_bytes=4096,
    )
    arrival = Arrival(manifest)
    mapping = Mapping(root, manifest, arrival=arrival)
    model = nn.Sequential(quantised_linear("meta", 40, 600))
    restore(make_plan(model, manifest), mapping)
    # Chunks land when a thread waits for them. Until then, the mapping does not show their bytes.
    arrival.on_demand(lambda first, last: [arrival.land(chunk) for chunk in range(first, last + 1)] and None)
    given = torch.rand(2, 600)
    with Gate(Unlanded(mapping, arrival)):
        if older:
            found = Older(model[0].weight.scale) + 0
            assert torch.equal(found, weight.scale)
            assert not arrival.complete
        else:
            found = model(given)
            assert torch.equal(found, nn.functional.linear(given, weight.values(), model[0].bias))


def test_a_packed_parameter_and_its_state_are_restored(save: Save) -> None:
    packed = torch.randint(0, 256, (12, 1), dtype=torch.uint8)
    stored = {"weight": packed, "weight.absmax": torch.rand(3), "weight.quant_map": torch.rand(16)}
    root, manifest = save(
        {**stored, "weight.quant_state.bitsandbytes__nf4": torch.zeros(9, dtype=torch.uint8)}
    )
    module = nn.Module()
    with skeleton():
        module.weight = Packed(torch.empty(12, 1, dtype=torch.uint8))
    snapshot = Snapshot(root, manifest)
    snapshot.restore(module, ignore=[r"\.(absmax|quant_map|quant_state\..*)$"])
    snapshot.open()
    state = snapshot.load("weight.absmax", "*.quant_map")
    module.weight.state = state
    assert type(module.weight) is Packed
    assert torch.equal(module.weight, packed)
    assert state.keys() == {"weight.absmax", "weight.quant_map"}
    assert all(torch.equal(tensor, stored[name]) for name, tensor in state.items())
