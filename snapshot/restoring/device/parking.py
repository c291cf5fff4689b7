"""Frees the device memory of a module's weights, and restores the weights later. The module keeps its tensor objects.

Bytes that equal the snapshot are dropped, and later copied from the snapshot again. Changed bytes are kept on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage, nn

from ..inner_tensors import tensors_with_bytes
from .device import Device
from .upload import DeviceUpload


@dataclass(frozen=True, slots=True)
class ParkedWeights:
    """What `unpark` needs to restore a module whose device memory is freed."""

    upload: DeviceUpload
    kept: dict[int, Tensor]
    """Copies on the host of the changed spans of the slab, by number of the span."""
    others: list[tuple[UntypedStorage, Tensor]]
    """The other storages of the module on the device, each with a copy of its bytes on the host."""
    freed_bytes: int


def park(
    module: nn.Module | None, upload: DeviceUpload, slabs: Sequence[Tensor], timeout_s: float
) -> ParkedWeights:
    """Free the memory of `module` on the device of `upload`. Nothing may use the module until `unpark`.

    `slabs` are the slabs of all uploads: weights of the module in the slab of another upload are not freed here. First wait for
    the end of the upload. If the upload has failed, `unpark` tries it again. Device memory of the handler that no
    parameter or buffer of the module uses is not freed.
    """
    device, spans = upload.device, upload.layout.spans
    upload.end(timeout_s)
    device.finish()
    kept = {one: _on_host(upload.slab[spans[one].begin : spans[one].end]) for one in _changed(upload)}
    storage = upload.slab.untyped_storage()
    found = [(one, _on_host(_bytes_of(one))) for one in _others(module, upload.slab.device, slabs)]
    freed_bytes = storage.nbytes() + sum(one.nbytes() for one, _ in found)
    device.resize(storage, 0, copied_to=True)
    for one, _ in found:
        device.resize(one, 0, copied_to=False)
    device.release()
    return ParkedWeights(upload, kept, found, freed_bytes)


def unpark(parked: ParkedWeights) -> DeviceUpload:
    """Allocate the memory again, and begin to copy the weights. Operations before the end of the copy need a `Gate`.

    Raise SnapshotError if the device has too little free memory. Then the module stays parked.
    """
    upload = parked.upload
    device, storage = upload.device, upload.slab.untyped_storage()
    device.resize(storage, upload.layout.size_bytes, copied_to=True)
    try:
        _put_back(device, parked.others)
    except BaseException:
        device.resize(storage, 0, copied_to=True)
        raise
    return DeviceUpload(
        device, upload.layout, upload.mapping, slab=upload.slab, kept=parked.kept, pinned=upload.pinned
    )


def _put_back(device: Device, others: list[tuple[UntypedStorage, Tensor]]) -> None:
    try:
        for storage, content in others:
            device.resize(storage, content.numel(), copied_to=False)
            _bytes_of(storage).copy_(content)
    except BaseException:
        for storage, _ in others:
            device.resize(storage, 0, copied_to=False)
        raise
    # Wait until the tensors are copied, because threads with other streams will use them too.
    device.finish()


def _changed(upload: DeviceUpload) -> list[int]:
    """Return the numbers of the spans on the device whose bytes differ from the bytes of the snapshot.

    Leave out the spans that a failed upload has not copied to the device: no operation could change them.
    """
    spans = upload.layout.spans
    # Count a span without a checksum as changed: it was copied from the host because it had changed before, or the upload
    # makes no checksums.
    copied = sorted(upload.copies.sums)
    changed = set(range(len(spans))).difference(copied)
    if copied:
        before = torch.stack([upload.copies.sums[number] for number in copied])
        now = torch.stack([upload.copies.sum_of(one) for one in copied])
        changed.update(copied[at] for at in (before != now).nonzero().flatten().tolist())
    return sorted(one for one in changed if upload.has(spans[one].begin, spans[one].end))


def _on_host(content: Tensor) -> Tensor:
    return content.to("cpu", copy=True)


def _others(module: nn.Module | None, device: torch.device, slabs: Sequence[Tensor]) -> list[UntypedStorage]:
    """Return the storages on the device of the module's tensors outside of `slabs`, if they can be resized."""
    found: dict[int, UntypedStorage] = {}
    whole = (*module.parameters(), *module.buffers()) if module is not None else ()
    for tensor in (inner for one in whole for inner in tensors_with_bytes(one)):
        storage = tensor.untyped_storage()
        if storage.device == device and storage.nbytes() and storage.resizable() and _has_data(storage):
            found[storage.data_ptr()] = storage
    for slab in slabs:
        found.pop(slab.untyped_storage().data_ptr(), None)
    return list(found.values())


def _has_data(storage: UntypedStorage) -> bool:
    """Return False for a storage without memory. For some, such as the storage of a functional tensor, `data_ptr` raises."""
    try:
        return storage.data_ptr() != 0
    except RuntimeError:
        return False


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
