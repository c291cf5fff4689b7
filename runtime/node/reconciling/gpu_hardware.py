"""Asks the driver about the GPUs of this node: their use, the memory of a process, and the variables that choose GPUs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from ....errors import SettingsError
from ...calls.link.child import Child
from ...ground.settings.resources import CONTEXT_MB, Resources
from ...ground.telemetry.metrics import Reading
from ..launching.gpu_driver import MIB, GpuDriver, GpuUse
from ..launching.gpus import names_within
from ..scaling.placement import Gpu, MemoryByGpu, candidates, need_of, place


class GpuHardware:
    """The GPUs of this node, and their driver."""

    def __init__(self, gpus: Sequence[Gpu], driver: GpuDriver) -> None:
        self.gpus, self._driver = tuple(gpus), driver

    def check(self, function: str, resources: Resources) -> None:
        """Raise SettingsError if the GPUs of this node, even without other workers, have no room for a worker of a function."""
        if (need := need_of(resources)) is None or place(self.gpus, (), need) is not None:
            return
        memory = f" with {need.memory_mb} MiB of each" if need.memory_mb is not None else ""
        there = ", ".join(f"{gpu.id} with {gpu.memory_mb} MiB" for gpu in self.gpus) or "none"
        sliced = need.gpus > 1 and any(gpu.slice for gpu in self.gpus)
        why = "; a process can use one MIG slice only" if sliced else ""
        raise SettingsError(
            f"{function!r} needs {need.gpus} GPU{'s' if need.gpus > 1 else ''}{memory} (resources.gpus); this node has: {there}{why}.",
            remedy="Lower resources.gpus or resources.gpu_memory_mb, leave them out to run without a GPU of its own, or"
            " see `pilotflame doctor` and the gateway's setting `gpus`.",
        )

    def environment(
        self, resources: Resources, held: Iterable[str] | None = None, *, contained: bool
    ) -> dict[str, str]:
        """Return the environment variables that show a worker only its own GPUs, and limit the worker to its part of the
        GPUs' memory.

        `held` are the ids of the worker's GPUs. Without `held`, return the variables of the zygote, which sees all GPUs that a
        worker may get. If `contained`, the worker runs in a container, which numbers its GPUs from 0.
        """
        if resources.gpus is None:
            return {}
        need = need_of(resources)
        given = [gpu.id for gpu in candidates(self.gpus, need)] if need is not None else []
        seen = list(held) if held is not None else given
        if contained:
            seen = names_within(given, seen)
        return self._driver.environment(seen, resources.gpu_memory_mb)

    async def kept(self, full: MemoryByGpu, child: Child, reserved: Sequence[int]) -> MemoryByGpu:
        """Return the memory that a process still holds after it has given memory back: a measurement of the driver, or an estimate.

        The estimate is the memory that torch's allocator keeps of each GPU (`reserved`, in bytes), plus an allowance for the
        context of the GPU. `full` is the memory of the process while it is awake. `reserved` has the same order of GPUs.
        """
        measured = await asyncio.to_thread(self._driver.held_by, child.pid)
        torchs = dict(zip(full, reserved, strict=False))
        return {
            gpu: -(-measured[gpu] // MIB) if gpu in measured else CONTEXT_MB - (-torchs.get(gpu, 0) // MIB)
            for gpu in full
        }

    async def readings(self, booked: Mapping[str, int]) -> list[Reading]:
        """Return for each GPU its memory, the booked memory (`booked`, in MiB), the used memory, and the share of busy time."""
        uses = await asyncio.to_thread(self._driver.uses)
        used = {self._label(one): one.used_bytes for one in uses}
        busy = {self._label(one): one.busy_share for one in uses if one.busy_share is not None}
        return [
            _reading(
                "memory_bytes",
                "Memory of the node's GPUs.",
                {gpu.id: gpu.memory_mb << 20 for gpu in self.gpus},
            ),
            _reading(
                "held_bytes",
                "Memory of GPUs that is booked for workers, parked workers and standbys.",
                {gpu.id: booked[gpu.id] << 20 for gpu in self.gpus},
            ),
            _reading("used_bytes", "Memory of GPUs that all processes of the machine use.", used),
            _reading("busy_ratio", "Share of the time in which a GPU ran something.", busy),
        ]

    def _label(self, use: GpuUse) -> str:
        """Return the id by which the settings name a GPU."""
        return next((gpu.id for gpu in self.gpus if use.is_named(gpu.id)), use.id)


def _reading(name: str, text: str, by_gpu: Mapping[str, float]) -> Reading:
    return Reading(f"gpu_{name}", text, {(gpu,): float(value) for gpu, value in by_gpu.items()}, ("gpu",))
