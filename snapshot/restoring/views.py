"""Returns tensors of a mapped snapshot by name, whole or cut into slices, for weights that belong to no module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ...errors import SnapshotMismatch
from ..format.slices import Slices, chosen, matching, named_entries, outside, slice_fault
from .mapping import Mapping
from .place import Elements, place, type_fault


def views(mapping: Mapping, names: Sequence[str], slices: Slices | None = None) -> dict[str, torch.Tensor]:
    """Return the tensors whose names fit one of the patterns `names`. See `Snapshot.load`.

    Raise SnapshotMismatch if no name fits a pattern, or if torch has no such tensor or slice.
    """
    manifest, stored = mapping.manifest, named_entries(mapping.manifest)
    if slices is None and manifest.part is not None:
        slices = manifest.part.slices
    cuts, found = chosen(slices or {}, stored), {}
    for name in dict.fromkeys(name for pattern in names for name in matching(pattern, stored)):
        entry, cut = stored[name], cuts.get(name)
        if fault := type_fault(entry):
            raise SnapshotMismatch(f"Tensor {name!r} is {fault}.", remedy="Save it as bytes (uint8).")
        if cut is not None and (fault := slice_fault(entry, cut)):
            raise SnapshotMismatch(f"Tensor {name!r} cannot be cut: {fault}.", remedy="Give another slice.")
        where = place(entry, cut)
        if outside(manifest, entry.shard, where.begin_bytes, where.end_bytes):
            fault = f"Tensor {name!r} is outside of the part of the snapshot that is fetched."
            raise SnapshotMismatch(fault, remedy="Correct snapshot_part in pilotflame.toml, or the slices.")
        found[name] = _view(where, mapping, entry.shard)
    return found


def arrived(mapping: Mapping, found: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors and aliases in `found`, in the order of the manifest. Wait for the bytes of each before yielding it."""
    aliases = dict[str, list[str]]()
    for alias, target in mapping.manifest.aliases.items():
        aliases.setdefault(target, []).append(alias)
    for entry in mapping.manifest.tensors:
        where = place(entry)
        mapping.wait(entry.shard, where.begin_bytes, where.end_bytes)
        for name in (entry.name, *aliases.get(entry.name, ())):
            yield name, found[name]


def copied(where: Elements, mapping: Mapping, shard: int) -> torch.Tensor:
    """Return a contiguous copy of the elements at `where`. Block until their bytes have landed.

    The bytes in a file may be unaligned for their type, since the header of a file need not have padding. torch's kernels
    read unaligned tensors on some processors only. If the file is saved again, its tensors are aligned.
    """
    mapping.wait(shard, where.begin_bytes, where.end_bytes)
    raw = mapping.flats[shard][where.begin_bytes : where.end_bytes].clone()
    strided = raw.view(where.dtype).as_strided(where.shape, where.stride)
    return strided if strided.is_contiguous() else strided.contiguous()


def _view(where: Elements, mapping: Mapping, shard: int) -> torch.Tensor:
    if (offset := where.offset_elements) is None:
        return copied(where, mapping, shard)
    tensor = torch.empty(0, dtype=where.dtype)
    # Do not make the tensor a view of `flats`, because all views of one tensor share a version counter.
    return tensor.set_(mapping.flats[shard].untyped_storage(), offset, where.shape, where.stride)
