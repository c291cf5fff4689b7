"""Makes and applies plans. A plan assigns bytes of a snapshot to each parameter and buffer of a module.

The zygote makes a plan once, before it forks, by comparing names, shapes and dtypes. No file is opened for this. A forked
worker then only makes the views, in a loop (`restore`).
"""

from __future__ import annotations

import math
import mmap
import re
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ...errors import SnapshotMismatch
from ..format.dtypes import DTYPES
from ..format.manifest import Manifest, TensorEntry
from ..format.slices import Slice, Slices, chosen, contiguous_stride, named_entries, outside, slice_fault
from .device.device import CPU, Device, check_name
from .device.pinned_shards import PinnedShards
from .device.slab import ALIGN_BYTES, SlabLayout, Wanted
from .device.slab_copies import checksum, random_factors
from .device.upload import DeviceUpload
from .inner_tensors import inner_names, inner_tensors, rebuild
from .mapping import Mapping
from .mismatch import Mismatches, Names, describe
from .place import Elements, place, type_fault
from .renames import renaming_of
from .shared_copies import SharedCopies
from .views import copied


@dataclass(frozen=True, slots=True)
class Slot:
    """An attribute of a module whose value is a tensor, and the dict in which the module stores the attribute."""

    module: nn.Module
    attribute: str
    store: MutableMapping[str, Any]
    """The module's `_parameters` or `_buffers`. `restore` writes to this dict, because nn.Module.__setattr__ takes
    longer than making the view."""
    watched: bool
    """True if the module's class has its own `__setattr__`, as nn.LSTM has. Then `restore` must call this method."""


@dataclass(frozen=True, slots=True)
class RestoreStep:
    """One tensor to restore: where its bytes are in the snapshot, and all slots of the module for the tensor."""

    name: str
    shard: int
    place: Elements
    """The elements of the whole tensor, or of the slice that the module gets."""
    offset_elements: int
    """The offset of `place` in elements, or -1 if the tensor must be copied: because its dtype is converted, or because its
    bytes are not aligned for its dtype."""
    tensor: torch.Tensor
    """The parameter or buffer that the module gets. It is empty until `restore` makes it a view of its bytes."""
    slots: tuple[Slot, ...]
    """Empty for an inner tensor (see `Whole`)."""


@dataclass(frozen=True, slots=True)
class Whole:
    """A tensor with inner tensors (see `inner_tensors`), and all slots for it. Each inner tensor has a step."""

    tensor: torch.Tensor
    """The tensor of the skeleton. Each worker makes a tensor like it from the inner tensors."""
    inner: dict[str, torch.Tensor]
    """The inner tensors, by the path of their attribute."""
    slots: tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """All steps of a restore. They set the weights of the object `module`, not of copies of it."""

    module: nn.Module
    manifest: Manifest
    steps: tuple[RestoreStep, ...]
    wholes: tuple[Whole, ...]
    replaced: tuple[torch.Tensor, ...]
    """The tensors of the skeleton. Do not free them, because freeing them in a forked child would copy their pages (0.3 ms for MiniLM)."""
    device: str = CPU
    """The name of the device for the weights. See `find_device`."""
    layout: SlabLayout | None = None
    """The offsets of the weights on the device. None for the host."""
    computed: tuple[tuple[torch.Tensor, tuple[Slot, ...]], ...] = ()
    """Tensors that the module has computed and that no snapshot has. `upload` moves them to the device too."""
    copies: SharedCopies | None = None
    """The memory on the host for the steps whose `offset_elements` is -1, in their order. None without such steps."""


@dataclass(slots=True)
class _ModuleTensor:
    """One tensor object of the module, with all its names and slots. If `needed`, a snapshot must have the tensor."""

    tensor: torch.Tensor
    needed: bool = False
    names: list[str] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Supply:
    """One of the snapshots that supply a module's weights. For the fields see `Snapshot.restore`."""

    manifest: Manifest
    prefix: str = ""
    ignore: Sequence[str] = ()
    slices: Slices | None = None


def make_plan(
    module: nn.Module,
    manifest: Manifest,
    *,
    prefix: str = "",
    ignore: Sequence[str] = (),
    cast: bool = False,
    slices: Slices | None = None,
    device: str = CPU,
) -> RestorePlan:
    """Return the plan that restores `module` from the snapshot of `manifest`. See `Snapshot.restore`.

    Raise one SnapshotMismatch that names everything that does not fit. `cast` costs time at the first restore, and memory,
    which all processes that are forked later share. To convert the weights only once, use `pilotflame snapshot convert
    --dtype`. If the module has a tensor under several names, the snapshot needs the tensor only under one of them.
    """
    return make_plans(module, {"": Supply(manifest, prefix, ignore, slices)}, cast=cast, device=device)[""]


def make_plans(
    module: nn.Module, supplies: dict[str, Supply], *, cast: bool = False, device: str = CPU
) -> dict[str, RestorePlan]:
    """Return the plans that together restore `module` from several snapshots, by the snapshots' names.

    Each tensor of the module must be in exactly one snapshot. If several snapshots have a tensor, a snapshot whose
    `ignore` fits the tensor's name does not supply it. Raise what `make_plan` raises. The error names the snapshots.
    """
    check_name(device)
    rename = renaming_of(module)
    planners = {name: _Planner(supply, cast, rename) for name, supply in supplies.items()}
    entries = _module_tensors(module)
    common, computed = Mismatches(), list[_ModuleTensor]()
    for entry in entries:
        owners = _owners(entry, planners)
        if len(owners) == 1:
            planners[owners[0]].add(entry)
        elif owners:
            common.twice.append((entry.names[0], {name: planners[name].skip(entry) for name in owners}))
        else:
            _lacks(common, entry, entry.names[0])
            computed.append(entry)
    found = {name: planner.mismatches() for name, planner in planners.items()}
    if common or any(found.values()):
        wanted = [name for entry in entries for name in entry.names]
        stored = {name: planner.names() for name, planner in planners.items()}
        raise describe(common, found, type(module).__name__, stored, wanted)
    replaced = tuple(entry.tensor for entry in entries)
    plans = {name: _with_copies(planner.plan(module, replaced)) for name, planner in planners.items()}
    if device == CPU:
        return plans
    computed += [one for planner in planners.values() for one in planner.computed]
    return {name: _for_device(plan, device, computed) for name, plan in plans.items()}


def _with_copies(plan: RestorePlan) -> RestorePlan:
    sizes = [_size_bytes(step) for step in plan.steps if step.offset_elements < 0]
    return replace(plan, copies=SharedCopies(sizes)) if sizes else plan


def _size_bytes(step: RestoreStep) -> int:
    return step.tensor.itemsize * math.prod(step.place.shape)


def _for_device(plan: RestorePlan, device: str, computed: Iterable[_ModuleTensor]) -> RestorePlan:
    wanted = [Wanted(step.name, step.shard, step.place, step.tensor.dtype) for step in plan.steps]
    layout = SlabLayout(plan.manifest, wanted)
    moved = tuple((entry.tensor, tuple(entry.slots)) for entry in computed)
    return replace(plan, device=device, layout=layout, computed=moved)


def _owners(entry: _ModuleTensor, planners: dict[str, _Planner]) -> list[str]:
    """Return the names of the snapshots that supply a tensor of the module. More than one name is an error.

    If the function has only one snapshot, return its name in any case, because it must have all tensors.
    """
    if len(planners) == 1:
        return list(planners)
    owners = [name for name, planner in planners.items() if planner.has(entry)]
    if len(owners) < 2:
        return owners
    return [name for name in owners if not planners[name].gives_way(entry)] or owners


class _Planner:
    """Collects the steps for the tensors that a module gets from one snapshot, and what does not fit."""

    def __init__(self, supply: Supply, cast: bool, rename: Callable[[str], str] | None) -> None:
        self.prefix, self._cast = supply.prefix, cast
        self._manifest, self._stored = supply.manifest, named_entries(supply.manifest)
        slices = supply.slices
        if slices is None and supply.manifest.part is not None:
            slices = supply.manifest.part.slices
        self._slices: dict[str, Slice] = chosen(slices or {}, self._stored)
        if rename is not None:
            self._add_names(rename)
        self._ignore = [re.compile(pattern) for pattern in supply.ignore]
        self._found = Mismatches()
        self._used: set[str] = set()
        self._steps: list[RestoreStep] = []
        self._wholes: list[Whole] = []
        self.computed: list[_ModuleTensor] = []
        """The tensors given to `add` that the snapshot does not have. Needed tensors among them are also in `_found`, as missing."""

    def _add_names(self, rename: Callable[[str], str]) -> None:
        """Add each tensor also under its new name, which the module uses."""
        for old, entry in list(self._stored.items()):
            if (new := rename(old)) not in self._stored:
                self._stored[new] = entry
                if old in self._slices:
                    self._slices[new] = self._slices[old]

    def names(self) -> Names:
        """Return the names of all tensors of the snapshot."""
        return Names(named_entries(self._manifest), self.prefix)

    def has(self, entry: _ModuleTensor) -> bool:
        """Return True if the snapshot has the tensor, or at least one of its inner tensors."""
        return bool(self._names_of(entry))

    def gives_way(self, entry: _ModuleTensor) -> bool:
        """Return True if `ignore` fits all names of the tensor in this snapshot, so that another snapshot supplies the tensor."""
        names = self._names_of(entry)
        return all(any(pattern.search(name) for pattern in self._ignore) for name in names)

    def skip(self, entry: _ModuleTensor) -> str:
        """Record that the module has the tensor, although this snapshot does not supply it. A recorded tensor is not "unexpected". Return
        the tensor's name in this snapshot.
        """
        names = [self._stored[name].name for name in self._names_of(entry)]
        self._used.update(names)
        return names[0]

    def _names_of(self, entry: _ModuleTensor) -> list[str]:
        inner = inner_tensors(entry.tensor)
        names = entry.names
        if inner is not None:
            names = [one for path in inner for name in entry.names for one in inner_names(name, path)]
        return [name for name in (self.prefix + name for name in names) if name in self._stored]

    def plan(self, module: nn.Module, replaced: tuple[torch.Tensor, ...]) -> RestorePlan:
        """Return the plan for the tensors that were given to `add`. `replaced` are all tensors of the module."""
        steps = sorted(self._steps, key=lambda step: (step.shard, step.place.begin_bytes))
        return RestorePlan(module, self._manifest, tuple(steps), tuple(self._wholes), replaced)

    def mismatches(self) -> Mismatches:
        """Return what does not fit. Call this only after all tensors of the module were added."""
        self._found.unexpected = [
            tensor.name
            for tensor in self._manifest.tensors
            if tensor.name not in self._used and not any(one.search(tensor.name) for one in self._ignore)
        ]
        return self._found

    def add(self, entry: _ModuleTensor) -> None:
        """Plan a tensor of the module that no other snapshot supplies."""
        inner = inner_tensors(entry.tensor)
        if inner is not None:
            self._add_whole(entry, inner)
        elif (name := self._stored_name(entry.names)) is not None:
            self._add_step(name, entry.tensor, tuple(entry.slots))
        else:
            self.computed.append(entry)
            _lacks(self._found, entry, entry.names[0], self.prefix)

    def _add_whole(self, entry: _ModuleTensor, inner: dict[str, torch.Tensor]) -> None:
        names = {path: [one for name in entry.names for one in inner_names(name, path)] for path in inner}
        stored = {path: self._stored_name(names[path]) for path in inner}
        entry.needed |= any(stored.values())
        made = {}
        for path, name in stored.items():
            if name is None:
                _lacks(self._found, entry, names[path][0], self.prefix)
            elif (step := self._add_step(name, inner[path], ())) is not None:
                made[path] = step.tensor
        if len(made) == len(inner):
            self._wholes.append(Whole(entry.tensor, made, tuple(entry.slots)))

    def _stored_name(self, names: Sequence[str]) -> str | None:
        """Return the first of `names`, with the prefix, that the snapshot has. Mark all of `names` that the snapshot has as used."""
        found = [name for name in (self.prefix + name for name in names) if name in self._stored]
        self._used.update(self._stored[name].name for name in found)
        return found[0] if found else None

    def _add_step(self, name: str, tensor: torch.Tensor, slots: tuple[Slot, ...]) -> RestoreStep | None:
        entry, cut = self._stored[name], self._slices.get(name)
        if nn.parameter.is_lazy(tensor):
            self._found.lazy.append(name.removeprefix(self.prefix))
        elif fault := type_fault(entry):
            self._found.untyped.append(f"{entry.name} {fault}")
        elif cut is not None and (fault := slice_fault(entry, cut)):
            self._found.uncut.append(f"{entry.name}: {fault}")
        elif outside(self._manifest, entry.shard, (where := place(entry, cut)).begin_bytes, where.end_bytes):
            self._found.outside.append(entry.name)
        elif self._fits(entry, where, tensor):
            step = _step(entry, where, tensor, slots)
            self._steps.append(step)
            return step
        return None

    def _fits(self, entry: TensorEntry, where: Elements, tensor: torch.Tensor) -> bool:
        fits, shape, dtype = True, tuple(tensor.shape), where.dtype
        if shape != where.shape:
            self._found.shapes.append((entry.name, str(list(where.shape)), str(list(shape))))
            fits = False
        # Do not cast elements that are smaller than a byte, because torch cannot convert them.
        castable = self._cast and dtype.is_floating_point and DTYPES[entry.dtype].packed == 1
        if dtype != tensor.dtype and not (castable and tensor.is_floating_point()):
            self._found.dtypes.append((entry.name, str(dtype), str(tensor.dtype)))
            fits = False
        return fits


def _lacks(found: Mismatches, entry: _ModuleTensor, name: str, prefix: str = "") -> None:
    """Record that no snapshot has tensor or inner tensor `name` of the module. If the module has computed it, do nothing."""
    if entry.needed:
        found.missing.append(prefix + name)
    elif entry.tensor.is_meta:
        found.unfilled.append(name)


def _module_tensors(module: nn.Module) -> list[_ModuleTensor]:
    entries: dict[int, _ModuleTensor] = {}
    seen: set[tuple[int, str]] = set()
    # Keep duplicates, because a module or a tensor with several names may be saved under any of its names.
    modules: Iterable[tuple[str, nn.Module]] = module.named_modules(remove_duplicate=False)
    for path, owner in modules:
        # Do not use named_parameters and named_buffers, which do not return the owner of a tensor.
        stores: tuple[MutableMapping[str, Any], ...] = (owner._parameters, owner._buffers)  # noqa: SLF001
        places = [(store, attribute) for store in stores for attribute in store]
        for store, attribute in places:
            if (tensor := store[attribute]) is None:
                continue
            entry = entries.setdefault(id(tensor), _ModuleTensor(tensor))
            entry.names.append(f"{path}.{attribute}".removeprefix("."))
            is_parameter = store is owner._parameters  # noqa: SLF001
            entry.needed |= is_parameter or attribute not in owner._non_persistent_buffers_set  # noqa: SLF001
            if (id(owner), attribute) not in seen:
                seen.add((id(owner), attribute))
                watched = type(owner).__setattr__ is not nn.Module.__setattr__
                entry.slots.append(Slot(owner, attribute, store, watched))
    return list(entries.values())


def _step(entry: TensorEntry, where: Elements, tensor: torch.Tensor, slots: tuple[Slot, ...]) -> RestoreStep:
    offset = where.offset_elements if where.dtype == tensor.dtype else None
    return RestoreStep(
        entry.name, entry.shard, where, -1 if offset is None else offset, _empty(tensor), slots
    )


def _empty(like: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor with the class, the dtype and the added attributes of `like`."""
    tensor = torch.empty(0, dtype=like.dtype)
    if type(like) is not torch.Tensor:
        # nn.Parameter makes the same call after some checks. The direct call also works for a subclass whose `__new__` has
        # other arguments.
        tensor = torch.Tensor._make_subclass(type(like), tensor, like.requires_grad)  # noqa: SLF001
    tensor.__dict__.update(like.__dict__)
    return tensor


def restore(plan: RestorePlan, mapping: Mapping) -> None:
    """Set the weights of `plan.module` from `mapping`. Writing to them changes no file and no other process.

    Raise SnapshotMismatch if the plan was made for another manifest.
    """
    _check_manifest(plan, mapping)
    shard, storage = -1, torch.empty(0).untyped_storage()
    copies, offsets = storage, iter(plan.copies.offsets if plan.copies is not None else ())
    with torch.no_grad():
        if plan.copies is not None:
            copies = plan.copies.mapped(partial(_copy, plan, mapping))
        for step in plan.steps:
            where = step.place
            if step.shard != shard:
                storage, shard = mapping.flats[step.shard].untyped_storage(), step.shard
            if step.offset_elements >= 0:
                # Use `set_`, which is one operation. Making a view, and a parameter of the view, takes three operations.
                step.tensor.set_(storage, step.offset_elements, where.shape, where.stride)
            else:
                offset = next(offsets) // step.tensor.itemsize
                step.tensor.set_(copies, offset, where.shape, contiguous_stride(where.shape))
            _set(step.slots, step.tensor)
        _rebuild(plan)


def _copy(plan: RestorePlan, mapping: Mapping, memory: torch.Tensor) -> None:
    """Copy the weights of `plan.copies` to `memory`, converted to the dtypes of the module."""
    offsets = iter(plan.copies.offsets if plan.copies is not None else ())
    for step in plan.steps:
        if step.offset_elements < 0:
            at = next(offsets)
            copy = memory[at : at + _size_bytes(step)].view(step.tensor.dtype).view(step.place.shape)
            copy.copy_(copied(step.place, mapping, step.shard))


def upload(
    plan: RestorePlan,
    mapping: Mapping,
    device: Device,
    *,
    parks: bool = True,
    pinned: PinnedShards | None = None,
) -> DeviceUpload:
    """Set the weights of `plan.module` to views of memory on `device`. Begin to copy the bytes of `mapping` there.

    Operations before the end of the copy need a `Gate`. For the options see `DeviceUpload`. Raise
    SnapshotMismatch if the plan was made for another manifest or for the host, and SnapshotError if the device has too
    little free memory.
    """
    _check_manifest(plan, mapping)
    if plan.layout is None:
        raise SnapshotMismatch("The plan is for the host.", remedy="Make it with the name of a device.")
    made = DeviceUpload(device, plan.layout, mapping, parks=parks, pinned=pinned)
    _view_in(plan, made.slab, plan.layout.offsets)
    return made


def blank(plan: RestorePlan, device: Device | None = None, *, parks: bool = True) -> None:
    """Set the weights of `plan.module` to zeros, for a rehearsal. On the host they take no memory.

    All weights are views of one region, to which nothing is written. On the host, the kernel maps the same page of zeros
    for the whole region. On a device, the region takes as much memory as the largest weight. For a device, this also pins
    the buffers for copying the real weights and, with `parks`, loads the operations for their checksums.
    """
    largest = max(map(_size_bytes, plan.steps), default=0)
    if not largest:
        return
    if device is not None:
        region = device.empty(-(-largest // ALIGN_BYTES) * ALIGN_BYTES).zero_()
        _view_in(plan, region, [0] * len(plan.steps))
        if plan.layout is not None:
            device.buffers.reserve(len(plan.layout.pieces), plan.layout.largest_bytes)
        if parks:
            checksum(region, random_factors(region.device))
        return
    zeros = mmap.mmap(-1, largest, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    storage = torch.frombuffer(zeros, dtype=torch.uint8).untyped_storage()
    with torch.no_grad():
        for step in plan.steps:
            step.tensor.set_(storage, 0, step.place.shape, contiguous_stride(step.place.shape))
            _set(step.slots, step.tensor)
        _rebuild(plan)


def _view_in(plan: RestorePlan, region: torch.Tensor, offsets: Sequence[int]) -> None:
    """Set the weights of `plan.module` to views of `region`, which is on a device, each at its offset."""
    storage, device = region.untyped_storage(), region.device
    with torch.no_grad():
        for step, offset in zip(plan.steps, offsets, strict=True):
            tensor, shape = step.tensor, step.place.shape
            if tensor.device != device:
                # Assign `data`, as nn.Module.to does, because `set_` cannot change the device. The tensor object stays the same.
                tensor.data = torch.empty(0, dtype=tensor.dtype, device=device)
            tensor.set_(storage, offset // tensor.itemsize, shape, contiguous_stride(shape))
            _set(step.slots, tensor)
        for tensor, slots in plan.computed:
            if inner_tensors(tensor) is None:
                tensor.data = tensor.data.to(device)
            else:
                _set(slots, tensor.to(device))
        _rebuild(plan)


def _check_manifest(plan: RestorePlan, mapping: Mapping) -> None:
    if mapping.manifest is not plan.manifest and mapping.manifest.digest != plan.manifest.digest:
        raise SnapshotMismatch("The plan has another manifest than the mapping.", remedy="Use one for both.")


def _rebuild(plan: RestorePlan) -> None:
    """Make the tensors that consist of inner tensors. Call this after the inner tensors were set."""
    for whole in plan.wholes:
        _set(whole.slots, rebuild(whole.tensor, whole.inner))


def _set(slots: Sequence[Slot], tensor: torch.Tensor) -> None:
    for slot in slots:
        if slot.watched:
            setattr(slot.module, slot.attribute, tensor)
        else:
            slot.store[slot.attribute] = tensor
