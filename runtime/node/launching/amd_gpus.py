"""Reads the state of AMD's GPUs through amdsmi.

This code has never run on a machine with such a GPU: the tests use the answers in amdsmi's reference.

It needs AMD's driver, and the package amdsmi, which comes with ROCm.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from .gpu_driver import MIB, GpuDriver, GpuUse, warn


class AmdDriver(GpuDriver):
    library = "amdsmi"
    package = "amdsmi, of the release of ROCm on this machine"
    visible = "ROCR_VISIBLE_DEVICES"
    cdi_kind = "amd.com/gpu"

    def uses(self) -> list[GpuUse]:
        with _opened() as smi:
            return list(_uses(smi)) if smi is not None else []

    def held_by(self, pid: int) -> Mapping[str, int]:
        found = dict[str, int]()
        with _opened() as smi:
            for _, name, gpu in _gpus(smi) if smi is not None else ():
                # amdsmi raises an error for a GPU that no process uses.
                with contextlib.suppress(smi.AmdSmiException):
                    for process in smi.amdsmi_get_gpu_process_list(gpu):
                        if process["pid"] == pid:
                            found[name] = int(process["memory_usage"]["vram_mem"])
        return found

    def environment(self, ids: Sequence[str], memory_mb: int | None) -> dict[str, str]:
        # HIP numbers the GPUs that ROCr leaves to it from 0. Set HIP's variable too: an inherited value might name
        # other GPUs.
        return {self.visible: ",".join(ids), "HIP_VISIBLE_DEVICES": ",".join(map(str, range(len(ids))))}


@contextlib.contextmanager
def _opened() -> Iterator[Any]:
    """Yield the initialised amdsmi; None if the package or the driver is missing."""
    smi: ModuleType | Any = None
    # amdsmi raises KeyError and OSError if it does not find ROCm's library.
    with contextlib.suppress(ImportError, KeyError, OSError):
        smi = importlib.import_module("amdsmi")
    if smi is None:
        yield None
        return
    try:
        smi.amdsmi_init()
        smi.amdsmi_get_processor_handles()
    except smi.AmdSmiException as error:
        warn(f"amdsmi does not tell which GPUs there are: {error}")
        yield None
        return
    try:
        yield smi
    finally:
        smi.amdsmi_shut_down()


def _gpus(smi: Any) -> Iterator[tuple[int, str, Any]]:
    """Yield the number, the UUID and the handle of each GPU."""
    for number, gpu in enumerate(smi.amdsmi_get_processor_handles()):
        try:
            yield number, str(smi.amdsmi_get_gpu_enumeration_info(gpu)["hip_uuid"]), gpu
        except smi.AmdSmiException as error:
            warn(f"amdsmi does not tell the UUID of GPU {number}, which is left out: {error}")


def _uses(smi: Any) -> Iterator[GpuUse]:
    for number, name, gpu in _gpus(smi):
        try:
            yield _use(smi, number, name, gpu)
        except smi.AmdSmiException as error:
            warn(f"amdsmi does not tell the memory of GPU {number}, which is left out: {error}")


def _use(smi: Any, number: int, name: str, gpu: Any) -> GpuUse:
    memory = smi.amdsmi_get_gpu_vram_usage(gpu)
    busy = smi.amdsmi_get_gpu_activity(gpu)["gfx_activity"]
    return GpuUse(
        name, number, str(smi.amdsmi_get_gpu_asic_info(gpu)["market_name"]),
        int(memory["vram_total"]) * MIB, int(memory["vram_used"]) * MIB,
        # amdsmi returns "N/A" for a GPU that does not report its activity.
        busy / 100 if isinstance(busy, int) else None,
    )  # fmt: skip
