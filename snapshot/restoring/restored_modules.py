"""Restores modules from one snapshot by their plans. Sets zeros for a rehearsal, and frees device memory while parked."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ...errors import snapshot_errors_about

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..format.manifest import Manifest
    from .device.device import Device
    from .device.parking import ParkedWeights
    from .device.pinned_shards import PinnedShards
    from .device.upload import DeviceUpload
    from .mapping import Mapping
    from .plan import RestorePlan

UPLOAD_TIMEOUT_S = 600.0


class RestoredModules:
    """The modules with weights of one snapshot. If there are no such modules, the methods do nothing."""

    def __init__(self, subject: str, *, parks: bool, gpus: int) -> None:
        """Errors begin with `subject`. For `parks` and `gpus` see `Snapshot`."""
        self._subject, self._parks, self._gpus = subject, parks, gpus
        self._plans: list[RestorePlan] = []
        self._mapping: Mapping | None = None
        self.restored = False
        """True if a module gets weights, now or when the snapshot is opened."""
        self._viewed = False
        """True if weights are views of the mapped files."""
        # Weak references, so that a module that `setup` restored can be freed. `_plans` keeps the modules of `build`.
        self._uploads: list[tuple[weakref.ref[nn.Module], DeviceUpload]] = []
        self._parked: list[tuple[weakref.ref[nn.Module], ParkedWeights]] = []
        self._pinned: PinnedShards | None = None
        # The devices that this process has used, by their names.
        self._devices: dict[str, Device] = {}

    def apply(self, plan: RestorePlan) -> None:
        """Apply a plan that was made for this snapshot: now if the snapshot is open, or else when it is opened."""
        self.restored = True
        if self._mapping is None:
            self._plans.append(plan)
        elif (upload := self._apply(plan, self._mapping)) is not None:
            # Wait, because `setup` runs without a gate, and may use the module as soon as `apply` returns.
            upload.wait(UPLOAD_TIMEOUT_S)

    def open(self, mapping: Mapping) -> None:
        """Apply the plans that `build` made."""
        self._mapping = mapping
        for plan in self._plans:
            self._apply(plan, mapping)

    def _apply(self, plan: RestorePlan, mapping: Mapping) -> DeviceUpload | None:
        from .plan import restore, upload  # noqa: PLC0415  only restoring loads torch

        if (device := self._device(plan)) is None:
            restore(plan, mapping)
            self._viewed = True
            return None
        self._uploads = [(module, one) for module, one in self._uploads if module() is not None]
        made = upload(plan, mapping, device, parks=self._parks, pinned=self._pinned)
        self._uploads.append((weakref.ref(plan.module), made))
        return made

    def _device(self, plan: RestorePlan) -> Device | None:
        from .device.device import find_device  # noqa: PLC0415  only restoring loads torch

        if (device := find_device(plan.device, self._gpus)) is not None:
            self._devices[device.name] = device
        return device

    def blank(self) -> None:
        """Set the weights of the modules that `build` restored to zeros, which take no memory on the host.

        A standby worker calls this before `rehearse`, because only `open`, which runs later, sets the real weights.
        """
        from .plan import blank  # noqa: PLC0415  only restoring loads torch

        for plan in self._plans:
            blank(plan, self._device(plan), parks=self._parks)

    def pin(self, manifest: Manifest, opened: Callable[[str], int], stop: Callable[[], bool]) -> None:
        """Pin the files of weights that go to a device. End early once `stop` returns True. `opened` opens a shard by its name."""
        from .device.pinned_shards import shards_to_pin  # noqa: PLC0415  only restoring loads torch

        for plan in self._plans:
            if plan.layout is None or (device := self._device(plan)) is None:
                continue
            if self._pinned is None:
                self._pinned = shards_to_pin(device, manifest, opened)
            if self._pinned is not None:
                self._pinned.pin(plan.layout.pieces, stop)

    @property
    def uploads(self) -> list[DeviceUpload]:
        """The copies to devices, running or complete."""
        return [one for _, one in self._uploads]

    @property
    def read_files(self) -> bool:
        """True if weights are views of the mapped files, or copies whose files were not compared after the copy."""
        return self._viewed or not all(one.compared for _, one in self._uploads)

    @property
    def complete(self) -> bool:
        """True if all weights that go to devices are on their devices."""
        return all(one.complete for _, one in self._uploads)

    def wait(self, timeout_s: float) -> None:
        """Block until all weights are on their devices. Each copy may take `timeout_s`. Raise what `DeviceUpload.wait` raises."""
        for _, upload in self._uploads:
            upload.wait(timeout_s)

    @property
    def copied(self) -> tuple[float, float, tuple[float, float]] | None:
        """When the first copy to a device began and the last one ended, by the monotonic clock. None without copies.

        The end is 0 while a copy runs. The third element has the times at which the creation of the device, with the
        process's context on it, began and ended.
        """
        if not (found := self.uploads):
            return None
        ended_s = max(one.ended_s for one in found) if all(one.ended_s for one in found) else 0.0
        return min(one.started_s for one in found), ended_s, found[0].device.made_s

    def park(self, slabs: Sequence[torch.Tensor]) -> int:
        """Free the device memory of the weights. Return the freed bytes. `slabs` has the slabs of all snapshots."""
        if not self._uploads:
            return 0
        from .device.parking import park  # noqa: PLC0415  only restoring loads torch

        freed_bytes = 0
        with snapshot_errors_about(self._subject):
            while self._uploads:
                module, upload = self._uploads[-1]
                parked = park(module(), upload, slabs, UPLOAD_TIMEOUT_S)
                self._parked.append((module, parked))
                self._uploads.pop()
                freed_bytes += parked.freed_bytes
        return freed_bytes

    def unpark(self) -> None:
        """Copy the weights to their devices again. After an error, call this again for the weights that are still parked."""
        if not self._parked:
            return
        from .device.parking import unpark  # noqa: PLC0415  only restoring loads torch

        with snapshot_errors_about(self._subject):
            while self._parked:
                module, parked = self._parked[-1]
                self._uploads.append((module, unpark(parked)))
                self._parked.pop()

    def finish(self) -> None:
        """Wait until the devices have done all work of this process. Raise the error of a failed device."""
        for device in self._devices.values():
            device.finish()
