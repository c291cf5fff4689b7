"""The restore plan says which attribute of which module views which bytes; `restore` applies it.

A plan is made once, in the zygote, before the fork: pure matching of names, shapes and dtypes, without
opening a file. All that can fail fails here, so that a forked worker is left with a loop of views.
"""

from __future__ import annotations

import math
import mmap
import re
from collections.abc import Iterator, MutableMapping, Sequence
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
    """A place that holds a tensor: `_parameters` or `_buffers` of a module, and the attribute's name."""

    module: nn.Module
    attribute: str
    store: MutableMapping[str, Any]
    """The dict itself: writing into it skips nn.Module.__setattr__, which costs more than making the view."""
    watched: bool
    """The class has its own `__setattr__`, which must be called (nn.LSTM keeps a list of its weights)."""


@dataclass(frozen=True, slots=True)
class RestoreStep:
    """One tensor to restore: where its bytes are, its shape, and every slot that shares it."""

    name: str
    shard: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset_bytes: int
    offset_elements: int
    """From the shard's first byte; -1 if the tensor must be copied: cast, or not aligned for its dtype."""
    tensor: torch.Tensor
    """The parameter or buffer that the module gets; empty until `restore` points it at its bytes."""
    slots: tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything `restore` does. It belongs to this module object, not to copies of it."""

    module: nn.Module
    manifest: Manifest
    steps: tuple[RestoreStep, ...]
    replaced: tuple[torch.Tensor, ...]
    """The skeleton's tensors, kept as freeing them in a forked child copies their pages (0.3 ms for MiniLM)."""


@dataclass(slots=True)
class _Held:
    """One tensor object of the module, with all the names and slots it is reached under."""

    tensor: torch.Tensor
    is_parameter: bool
    needed: bool = False
    names: list[str] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)


def make_plan(
    module: nn.Module, manifest: Manifest, *, prefix: str = "", ignore: Sequence[str] = (), cast: bool = False
) -> Plan:
    """Match `module` with `manifest`, or raise one SnapshotMismatch that names all misfits.

    `prefix` is what the snapshot's names start with and the module's do not. Tensors that the module does not
    use are refused unless a regex of `ignore` is found in their name (`re.search`, as in transformers). With
    `cast`, floating-point tensors are converted to the module's type, which costs memory and time
    (`pilotflame snapshot convert --dtype` does it once). A tensor with several names needs only one of them.
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
        raise describe(found, type(module).__name__, stored, [name for name, *_ in _named(module)], prefix)
    steps.sort(key=lambda step: (step.shard, step.offset_bytes))
    return Plan(module, manifest, tuple(steps), tuple(held.tensor for held in holdings))


def _unexpected(manifest: Manifest, used: set[str], ignore: Sequence[str]) -> list[str]:
    patterns = [re.compile(pattern) for pattern in ignore]
    names = (tensor.name for tensor in manifest.tensors if tensor.name not in used)
    return [name for name in names if not any(pattern.search(name) for pattern in patterns)]


def _named(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, MutableMapping[str, Any]]]:
    """Every name of a parameter or buffer, with its module, attribute, and the dict that holds it."""
    # With duplicates: a shared module, like a shared tensor, may be saved under any of its names.
    for path, owner in module.named_modules(remove_duplicate=False):
        dot = f"{path}." if path else ""
        # named_parameters and named_buffers hide the owner.
        stores: tuple[MutableMapping[str, Any], ...] = (owner._parameters, owner._buffers)  # noqa: SLF001
        for store in stores:
            for attribute, tensor in store.items():
                if tensor is not None:
                    yield dot + attribute, owner, attribute, store


def _holdings(module: nn.Module) -> list[_Held]:
    holdings: dict[int, _Held] = {}
    seen: set[tuple[int, str]] = set()
    for name, owner, attribute, store in _named(module):
        tensor, is_parameter = store[attribute], store is owner._parameters  # noqa: SLF001
        held = holdings.setdefault(id(tensor), _Held(tensor, is_parameter))
        held.names.append(name)
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
        found.shapes.append((entry.name, entry.shape, shape))
    dtype = _TORCH_DTYPES.get(entry.dtype)
    castable = cast and dtype is not None and dtype.is_floating_point and held.tensor.is_floating_point()
    if dtype != held.tensor.dtype and not castable:
        found.dtypes.append((entry.name, str(dtype or entry.dtype), str(held.tensor.dtype)))


def _step(held: _Held, entry: TensorEntry) -> RestoreStep:
    dtype = _TORCH_DTYPES.get(entry.dtype, torch.uint8)
    # An empty tensor may be at the end of the file, where a view would start outside.
    offset_elements, rest = divmod(entry.offset_bytes if entry.size_bytes else 0, dtype.itemsize)
    return RestoreStep(
        name=entry.name,
        shard=entry.shard,
        dtype=dtype,
        shape=entry.shape,
        # The strides of a contiguous tensor; on meta it takes no memory.
        stride=torch.empty(entry.shape, device="meta").stride(),
        offset_bytes=entry.offset_bytes,
        offset_elements=-1 if rest or dtype != held.tensor.dtype else offset_elements,
        tensor=_empty(held),
        slots=tuple(held.slots),
    )


def _empty(held: _Held) -> torch.Tensor:
    """A tensor without memory, of the type and kind of `held`, with the attributes that were set on it."""
    tensor = torch.empty(0, dtype=held.tensor.dtype)
    if held.is_parameter:
        # nn.Parameter calls the same after its checks.
        tensor = torch.Tensor._make_subclass(nn.Parameter, tensor, held.tensor.requires_grad)  # noqa: SLF001
    tensor.__dict__.update(held.tensor.__dict__)
    return tensor


def restore(plan: Plan, mapping: Mapping) -> None:
    """Give `plan.module` its weights. Writing to them changes no file and no other process."""
    if mapping.manifest is not plan.manifest and mapping.manifest.digest != plan.manifest.digest:
        raise SnapshotMismatch("The plan has another manifest than the mapping.", remedy="Use one for both.")
    shard, storage = -1, torch.empty(0).untyped_storage()
    with torch.no_grad():
        for step in plan.steps:
            if step.shard != shard:
                storage, shard = mapping.flats[step.shard].untyped_storage(), step.shard
            if step.offset_elements >= 0:
                # One operation; making a view and a parameter of it would be three (infra/bench/local.py).
                step.tensor.set_(storage, step.offset_elements, step.shape, step.stride)
            else:
                copied = _copied(step, mapping)
                step.tensor.set_(copied.untyped_storage(), 0, step.shape, step.stride)
            _place(step)


def blank(plan: Plan) -> None:
    """Give `plan.module` weights of zeros that take no memory, for a rehearsal.

    All view one region that is never written: reading it maps the kernel's page of zeros.
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
    # The module has another type, or the file does not align the tensor to its elements (a header without
    # padding), which torch's kernels read on some processors only. Saving the file again aligns it.
    end_bytes = step.offset_bytes + step.dtype.itemsize * math.prod(step.shape)
    mapping.wait(step.shard, step.offset_bytes, end_bytes)
    piece = mapping.flats[step.shard][step.offset_bytes : end_bytes].clone()
    return piece.view(step.dtype).reshape(step.shape).to(step.tensor.dtype)
