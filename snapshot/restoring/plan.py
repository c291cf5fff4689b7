"""Makes plans, which say which attribute of which module gets which bytes of a snapshot, and applies them.

A plan is made once, in the zygote, before the fork, by comparing names, shapes and dtypes. No file is opened.
A forked worker then only makes the views, in a loop (`restore`).
"""

from __future__ import annotations

import math
import mmap
import re
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...errors import SnapshotMismatch
from ..format.header import DTYPES
from ..format.manifest import Manifest, TensorEntry
from .mapping import Mapping
from .mismatch import Mismatches, describe

_TORCH_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, dtype.torch_name)
    for name, dtype in DTYPES.items()
    if hasattr(torch, dtype.torch_name)
}


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in a module that holds a tensor: the attribute, and the dict in which the module stores it."""

    module: nn.Module
    attribute: str
    store: MutableMapping[str, Any]
    """The module's `_parameters` or `_buffers`. Writing to the dict avoids nn.Module.__setattr__, which takes
    longer than making the view."""
    watched: bool
    """True if the module's class has its own `__setattr__`, which must be called, as in nn.LSTM."""


@dataclass(frozen=True, slots=True)
class RestoreStep:
    """One tensor to restore: where its bytes are, its shape, and all slots that hold it."""

    entry: TensorEntry
    shard: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset_elements: int
    """The offset from the shard's first byte, in elements. It is -1 if the tensor must be copied, because its
    dtype is converted or its bytes are not aligned for its dtype."""
    tensor: torch.Tensor
    """The parameter or buffer that the module gets. It is empty until `restore` makes it view its bytes."""
    slots: tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """All steps of a restore. They are for the object `module` and not for copies of it."""

    module: nn.Module
    manifest: Manifest
    steps: tuple[RestoreStep, ...]
    replaced: tuple[torch.Tensor, ...]
    """The tensors of the skeleton, which nothing else needs. They are kept because freeing them in a forked
    child would copy their pages (0.3 ms for MiniLM)."""


@dataclass(slots=True)
class _Held:
    """One tensor object of the module, with all its names and slots. `needed`: the snapshot must hold it."""

    tensor: torch.Tensor
    needed: bool = False
    names: list[str] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)


def make_plan(
    module: nn.Module, manifest: Manifest, *, prefix: str = "", ignore: Sequence[str] = (), cast: bool = False
) -> Plan:
    """Return the plan that restores `module` from the snapshot of `manifest`. See `Snapshot.restore`.

    Raises one SnapshotMismatch that names everything that does not fit. `cast` takes memory and time at each
    restore, while `pilotflame snapshot convert --dtype` does it once. If the module has a tensor under
    several names, the snapshot needs only one of them.
    """
    stored = {tensor.name: tensor for tensor in manifest.tensors}
    stored |= {alias: stored[target] for alias, target in manifest.aliases.items()}
    found = Mismatches()
    used: set[str] = set()
    steps = []
    holdings = _holdings(module)
    for held in holdings:
        entries = [stored[name] for name in (prefix + name for name in held.names) if name in stored]
        used.update(entry.name for entry in entries)
        if entries:
            _check_fit(held, entries[0], found, cast=cast)
            steps.append(_step(held, entries[0]))
        elif held.needed:
            found.missing.append(prefix + held.names[0])
        elif held.tensor.is_meta:
            found.unfilled.append(held.names[0])
    found.unexpected = _unexpected(manifest, used, ignore)
    if found:
        names = [name for held in holdings for name in held.names]
        raise describe(found, type(module).__name__, stored, names, prefix)
    steps.sort(key=lambda step: (step.shard, step.entry.offset_bytes))
    return Plan(module, manifest, tuple(steps), tuple(held.tensor for held in holdings))


def _unexpected(manifest: Manifest, used: set[str], ignore: Sequence[str]) -> list[str]:
    patterns = [re.compile(pattern) for pattern in ignore]
    names = (tensor.name for tensor in manifest.tensors if tensor.name not in used)
    return [name for name in names if not any(pattern.search(name) for pattern in patterns)]


def _holdings(module: nn.Module) -> list[_Held]:
    holdings: dict[int, _Held] = {}
    seen: set[tuple[int, str]] = set()
    # Duplicates are kept: a module or tensor with several names may be saved under any of them.
    modules: Iterable[tuple[str, nn.Module]] = module.named_modules(remove_duplicate=False)
    for path, owner in modules:
        # Not named_parameters and named_buffers, which do not return the owner.
        stores: tuple[MutableMapping[str, Any], ...] = (owner._parameters, owner._buffers)  # noqa: SLF001
        places = [(store, attribute) for store in stores for attribute in store]
        for store, attribute in places:
            if (tensor := store[attribute]) is None:
                continue
            held = holdings.setdefault(id(tensor), _Held(tensor))
            held.names.append(f"{path}.{attribute}".removeprefix("."))
            is_parameter = store is owner._parameters  # noqa: SLF001
            held.needed |= is_parameter or attribute not in owner._non_persistent_buffers_set  # noqa: SLF001
            if (id(owner), attribute) not in seen:
                seen.add((id(owner), attribute))
                watched = type(owner).__setattr__ is not nn.Module.__setattr__
                held.slots.append(Slot(owner, attribute, store, watched))
    return list(holdings.values())


def _check_fit(held: _Held, entry: TensorEntry, found: Mismatches, *, cast: bool) -> None:
    if nn.parameter.is_lazy(held.tensor):
        found.lazy.append(held.names[0])
        return
    shape = tuple(held.tensor.shape)
    if shape != entry.shape:
        found.shapes.append((entry.name, str(list(entry.shape)), str(list(shape))))
    dtype = _TORCH_DTYPES.get(entry.dtype)
    castable = cast and dtype is not None and dtype.is_floating_point and held.tensor.is_floating_point()
    if dtype != held.tensor.dtype and not castable:
        found.dtypes.append((entry.name, str(dtype or entry.dtype), str(held.tensor.dtype)))


def _step(held: _Held, entry: TensorEntry) -> RestoreStep:
    dtype = _TORCH_DTYPES.get(entry.dtype, torch.uint8)
    # An empty tensor may be at the end of the file, where no view can begin. So its view begins at 0.
    offset_elements, rest = divmod(entry.offset_bytes if entry.size_bytes else 0, dtype.itemsize)
    if rest or dtype != held.tensor.dtype:
        offset_elements = -1
    # The strides of a contiguous tensor of this shape. On the meta device, making one takes no memory.
    stride = torch.empty(entry.shape, device="meta").stride()
    slots = tuple(held.slots)
    return RestoreStep(entry, entry.shard, entry.shape, stride, offset_elements, _empty(held), slots)


def _empty(held: _Held) -> torch.Tensor:
    """Return an empty tensor with the class, the dtype and the added attributes of `held.tensor`."""
    tensor = torch.empty(0, dtype=held.tensor.dtype)
    if type(held.tensor) is not torch.Tensor:
        # nn.Parameter makes the same call after some checks. A subclass may have a `__new__` with other
        # arguments, which this call does not need.
        kind = type(held.tensor)
        tensor = torch.Tensor._make_subclass(kind, tensor, held.tensor.requires_grad)  # noqa: SLF001
    tensor.__dict__.update(held.tensor.__dict__)
    return tensor


def restore(plan: Plan, mapping: Mapping) -> None:
    """Give `plan.module` its weights from `mapping`. Writing to them changes no file and no other process.

    Raises SnapshotMismatch if the plan was made for another manifest.
    """
    if mapping.manifest is not plan.manifest and mapping.manifest.digest != plan.manifest.digest:
        raise SnapshotMismatch("The plan has another manifest than the mapping.", remedy="Use one for both.")
    shard, storage = -1, torch.empty(0).untyped_storage()
    with torch.no_grad():
        for step in plan.steps:
            if step.shard != shard:
                storage, shard = mapping.flats[step.shard].untyped_storage(), step.shard
            if step.offset_elements >= 0:
                # One operation. To make a view and a parameter of it takes three (infra/bench/local.py).
                step.tensor.set_(storage, step.offset_elements, step.shape, step.stride)
            else:
                copied = _copied(step, mapping)
                step.tensor.set_(copied.untyped_storage(), 0, step.shape, step.stride)
            _place(step)


def blank(plan: Plan) -> None:
    """Give `plan.module` weights of zeros that take no memory, to run it in a rehearsal.

    All weights view one region of memory that is never written: the kernel maps its one page of zeros there.
    """
    largest = max((step.tensor.itemsize * math.prod(step.shape) for step in plan.steps), default=0)
    if not largest:
        return
    zeros = mmap.mmap(-1, largest, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    storage = torch.frombuffer(zeros, dtype=torch.uint8).untyped_storage()
    with torch.no_grad():
        for step in plan.steps:
            step.tensor.set_(storage, 0, step.shape, step.stride)
            _place(step)


def _place(step: RestoreStep) -> None:
    for slot in step.slots:
        if slot.watched:
            setattr(slot.module, slot.attribute, step.tensor)
        else:
            slot.store[slot.attribute] = step.tensor


def _copied(step: RestoreStep, mapping: Mapping) -> torch.Tensor:
    # Either the module has another dtype, or the tensor's bytes are not aligned for its dtype, since the
    # file's header has no padding. torch's kernels can read such a tensor on some processors only. If the
    # file is saved again, its tensors are aligned.
    begin_bytes, end_bytes = step.entry.offset_bytes, step.entry.offset_bytes + step.entry.size_bytes
    mapping.wait(step.shard, begin_bytes, end_bytes)
    piece = mapping.flats[step.shard][begin_bytes:end_bytes].clone()
    return piece.view(_TORCH_DTYPES[step.entry.dtype]).reshape(step.shape).to(step.tensor.dtype)
