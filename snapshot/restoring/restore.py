"""Restoring puts a plan's tensors, as views of the mapping, into the module."""

from __future__ import annotations

import math
import mmap

import torch

from ...errors import SnapshotMismatch
from .mapping import Mapping
from .plan import Plan, RestoreStep


def restore(plan: Plan, mapping: Mapping) -> None:
    """Give `plan.module` its weights. Writing to them changes no file and no other process."""
    if mapping.manifest is not plan.manifest and mapping.manifest.digest != plan.manifest.digest:
        raise SnapshotMismatch(
            "The plan was made for another manifest than the mapping.", remedy="Use one manifest for both."
        )
    shard, storage = -1, torch.empty(0).untyped_storage()
    with torch.no_grad():
        for step in plan.steps:
            if step.shard != shard:
                storage, shard = mapping.storage(step.shard), step.shard
            if step.offset_elements >= 0 and step.cast_to is None:
                # One operation a tensor; making a view and a parameter of it would be three (infra/bench/local.py).
                step.tensor.set_(storage, step.offset_elements, step.shape, step.stride)
            else:
                copied = _copied(step, mapping)
                step.tensor.set_(copied.untyped_storage(), 0, step.shape, step.stride)
            _place(step)


def blank(plan: Plan) -> None:
    """Give `plan.module` weights of zeros that take no memory, for a rehearsal before the real ones are there.

    All view one region as large as the largest of them, which is never written: reading it maps the kernel's page of
    zeros. `restore` replaces them.
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
    # Either the module has another type, or the file does not align the tensor to its elements (a header without
    # padding), and torch's kernels read such addresses on some processors only. Saving the file again aligns it.
    raw = mapping.flat(step.shard, torch.uint8)
    size_bytes = step.dtype.itemsize * math.prod(step.shape)
    mapping.wait(step.shard, step.offset_bytes, step.offset_bytes + size_bytes)
    piece = raw[step.offset_bytes : step.offset_bytes + size_bytes].clone()
    return piece.view(step.dtype).reshape(step.shape).to(step.cast_to or step.dtype)
