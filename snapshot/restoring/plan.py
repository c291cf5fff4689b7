"""The restore plan: which attribute of which module views which bytes.

Made once, in the zygote, before the fork. Pure matching of names, shapes and dtypes; no file is opened. All
that can fail fails here, so that what is left for a forked worker (`restore`) is a loop of views.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..format.header import DTYPES
from ..format.manifest import Manifest, TensorEntry
from .mismatch import Mismatches, describe

_TORCH_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, dtype.torch_name)
    for name, dtype in DTYPES.items()
    if hasattr(torch, dtype.torch_name)
}


@dataclass(frozen=True, slots=True)
class Slot:
    """One place that holds a tensor: `_parameters` or `_buffers` of a module, and the attribute's name."""

    module: nn.Module
    attribute: str
    store: MutableMapping[str, Any]
    """The dict itself: writing into it skips nn.Module.__setattr__, which costs more than making the view."""
    watched: bool
    """The class has its own `__setattr__` and must hear of it (nn.LSTM keeps a list of its weights)."""


@dataclass(frozen=True, slots=True)
class RestoreStep:
    """One tensor to restore: where it lies, what it looks like, and every slot that shares it."""

    name: str
    shard: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset_bytes: int
    offset_elements: int
    """From the shard's first byte; -1 if the bytes are not aligned for the dtype, and must be copied."""
    cast_to: torch.dtype | None
    """What the module has it in, if that is another type than the snapshot's: then it is copied, not mapped."""
    tensor: torch.Tensor
    """What the module is given, parameter or buffer; empty until it is restored, which points it at its bytes."""
    slots: tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything `restore` does. It belongs to this module object, not to copies of it."""

    module: nn.Module
    manifest: Manifest
    steps: tuple[RestoreStep, ...]
    replaced: tuple[torch.Tensor, ...]
    """The skeleton's tensors. Held so that a forked child does not free them: freeing writes to their pages,
    which
    are then copied (0.3 of 1.6 ms for MiniLM)."""


@dataclass(slots=True)
class _Held:
    """One tensor object of the module, with all the names and slots it is reached under."""

    tensor: torch.Tensor
    is_parameter: bool
    needed: bool = False
    names: list[str] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)


def make_plan(
    module: nn.Module,
    manifest: Manifest,
    *,
    prefix: str = "",
    ignore: Sequence[str] = (),
    cast: bool = False,
) -> Plan:
    """Match `module` with `manifest`, or raise one SnapshotMismatch that says all that does not fit.

    `prefix` is what the snapshot's names start with and the module's do not. Tensors that the module has no
    use for are refused unless a regex of `ignore` is found in their name (`re.search`, as in transformers).
    With `cast`, floating-point tensors of another type than the module's are converted; that costs memory and time of
    their own, where mapping costs neither: better convert the snapshot once (`pilotflame snapshot convert --dtype`).
    A tensor reached under several names (tied weights) needs only one of them, or an alias, in the snapshot.
    """
    stored = _stored(manifest)
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
        raise describe(found, type(module).__name__, stored, [name for name, _ in _named(module)], prefix)
    steps.sort(key=lambda step: (step.shard, step.offset_bytes))
    return Plan(module, manifest, tuple(steps), tuple(held.tensor for held in holdings))


def _stored(manifest: Manifest) -> dict[str, TensorEntry]:
    stored = {tensor.name: tensor for tensor in manifest.tensors}
    stored.update({alias: stored[target] for alias, target in manifest.aliases.items()})
    return stored


def _unexpected(manifest: Manifest, used: set[str], ignore: Sequence[str]) -> list[str]:
    patterns = [re.compile(pattern) for pattern in ignore]
    return [
        tensor.name
        for tensor in manifest.tensors
        if tensor.name not in used and not any(pattern.search(tensor.name) for pattern in patterns)
    ]


def _named(module: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, str, bool]]]:
    """Every name under which a parameter or buffer is reached, with its module, attribute and kind."""
    # Duplicates kept: a shared module, like a shared tensor, may be saved under any of its names.
    for path, owner in module.named_modules(remove_duplicate=False):
        dot = f"{path}." if path else ""
        for attribute, tensor in owner._parameters.items():  # noqa: SLF001 - named_parameters hides the owner
            if tensor is not None:
                yield dot + attribute, (owner, attribute, True)
        for attribute, buffer in owner._buffers.items():  # noqa: SLF001
            if buffer is not None:
                yield dot + attribute, (owner, attribute, False)


def _holdings(module: nn.Module) -> list[_Held]:
    holdings: dict[int, _Held] = {}
    seen: set[tuple[int, str]] = set()
    for name, (owner, attribute, is_parameter) in _named(module):
        store: MutableMapping[str, Any] = owner._parameters if is_parameter else owner._buffers  # noqa: SLF001
        tensor = store[attribute]
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
    itemsize_bytes = DTYPES[entry.dtype].itemsize_bytes
    offset_elements, rest = divmod(entry.offset_bytes, itemsize_bytes)
    if entry.size_bytes == 0:
        offset_elements, rest = 0, 0  # it may lie at the end of the file, where a view would start outside
    dtype = _TORCH_DTYPES.get(entry.dtype, torch.uint8)
    return RestoreStep(
        name=entry.name,
        shard=entry.shard,
        dtype=dtype,
        cast_to=held.tensor.dtype if held.tensor.dtype != dtype else None,
        shape=entry.shape,
        stride=_contiguous(entry.shape),
        offset_bytes=entry.offset_bytes,
        offset_elements=-1 if rest else offset_elements,
        tensor=_empty(held),
        slots=tuple(held.slots),
    )


def _empty(held: _Held) -> torch.Tensor:
    """A tensor without memory of the type and kind of `held`, with the attributes that somebody put on it."""
    tensor = torch.empty(0, dtype=held.tensor.dtype)
    if held.is_parameter:
        # What nn.Parameter calls, without its checks.
        tensor = torch.Tensor._make_subclass(nn.Parameter, tensor, held.tensor.requires_grad)  # noqa: SLF001
    tensor.__dict__.update(held.tensor.__dict__)
    return tensor


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))
