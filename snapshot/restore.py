"""Restoring: the plan's tensors, as views of the mapping, put into the module. A loop, and nothing else."""

from __future__ import annotations

import mmap

import torch
from torch import nn

from ..errors import SnapshotMismatch
from .mapping import Mapping
from .plan import Plan, Step


def restore(plan: Plan, mapping: Mapping) -> None:
    """Give `plan.module` its weights. Writing to them changes no file and no other process."""
    if mapping.manifest is not plan.manifest and mapping.manifest.digest != plan.manifest.digest:
        raise SnapshotMismatch(
            "The plan was made for another manifest than the mapping.", remedy="Use one manifest for both."
        )
    shard, dtype, flat = -1, None, torch.empty(0)
    for step in plan.steps:
        # Steps are in the order of their bytes, so runs of one dtype are long.
        if step.shard != shard or step.dtype is not dtype:
            shard, dtype = step.shard, step.dtype
            flat = mapping.flat(shard, dtype)
        if step.offset_elements >= 0:
            # `.data`: a view proper would share one version counter with all others, and an in-place write to
            # one (BatchNorm's running mean) would then look to autograd like a write to every weight.
            tensor = flat.as_strided(step.shape, step.stride, step.offset_elements).data
        else:
            tensor = _copied(step, mapping)
        _place(step, tensor)


def blank(plan: Plan) -> None:
    """Give `plan.module` weights of zeros that hold no memory, for a rehearsal before the real ones are there.

    All are views of one region as large as the largest of them, never written: reading it maps the kernel's page of
    zeros. `restore` replaces them.
    """
    largest = max((_extent_bytes(step) for step in plan.steps), default=0)
    if not largest:
        return
    zeros = mmap.mmap(-1, largest, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    flats = {dtype: torch.frombuffer(zeros, dtype=dtype) for dtype in {step.dtype for step in plan.steps}}
    for step in plan.steps:
        _place(step, flats[step.dtype].as_strided(step.shape, step.stride, 0).data)


def _extent_bytes(step: Step) -> int:
    """How far the tensor reaches from its first element; rounded up so that every dtype fits a whole number of times."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(step.shape, step.stride, strict=True))
    return -(-reach * step.dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE


def _place(step: Step, tensor: torch.Tensor) -> None:
    if step.is_parameter:
        # What nn.Parameter calls, without its checks.
        tensor = torch.Tensor._make_subclass(nn.Parameter, tensor, step.requires_grad)  # noqa: SLF001
    if step.extras is not None:
        tensor.__dict__.update(step.extras)
    for slot in step.slots:
        if slot.watched:
            setattr(slot.module, slot.attribute, tensor)
        else:
            slot.store[slot.attribute] = tensor


def _copied(step: Step, mapping: Mapping) -> torch.Tensor:
    # The file does not align the tensor to its elements (a header without padding): torch's kernels may read
    # such addresses on some processors only. A copy costs its memory and time; saving the file again mends it
    # for good.
    raw = mapping.flat(step.shard, torch.uint8)
    size_bytes = step.dtype.itemsize
    for size in step.shape:
        size_bytes *= size
    mapping.wait(step.shard, step.offset_bytes, step.offset_bytes + size_bytes)
    piece = raw[step.offset_bytes : step.offset_bytes + size_bytes].clone()
    return piece.view(step.dtype).reshape(step.shape)
