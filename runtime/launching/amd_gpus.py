"""AMD's GPUs, through amdsmi. This never ran on a machine with one: the tests have amdsmi's answers from its reference.

It needs the package amdsmi, which comes with ROCm, and AMD's driver.
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
                # It fails where there is no process.
                with contextlib.suppress(smi.AmdSmiException):
                    for process in smi.amdsmi_get_gpu_process_list(gpu):
                        if process["pid"] == pid:
                            found[name] = int(process["memory_usage"]["vram_mem"])
        return found

    def environment(self, ids: Sequence[str], memory_mb: int | None) -> dict[str, str]:
        # HIP counts the GPUs that ROCr leaves it from 0. Without it, an inherited variable might name others.
        return {self.visible: ",".join(ids), "HIP_VISIBLE_DEVICES": ",".join(map(str, range(len(ids))))}


@contextlib.contextmanager
def _opened() -> Iterator[Any]:
    """Yield amdsmi, initialised; None if it or the driver is not there."""
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
        # "N/A" where the GPU does not tell.
        busy / 100 if isinstance(busy, int) else None,
    )  # fmt: skip
