"""GPUs according to the packages for NVML and amdsmi:
a small library, or a module, replaces the driver, because test machines have no GPU.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pilotflame.runtime.node.launching.gpus import names_within

COMPILER = shutil.which("cc")
needs_compiler = pytest.mark.skipif(
    COMPILER is None, reason="a C compiler makes the library that stands for the driver's"
)
no_driver = pytest.mark.skipif(
    Path("/proc/driver/nvidia").exists(), reason="the driver of this machine's GPUs answers"
)
# GPU 0 is whole, GPU 1 is cut into two MIG slices, with the indices 0 and 2 of three, and GPU 2 is lost.
NVML = """
#include <stdio.h>
#include <string.h>
typedef unsigned long long u64;
static int known(const char *gpu) { return gpu[0] == 'G' || gpu[0] == 'M'; }
int nvmlInitWithFlags(unsigned flags) { return INIT; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return "the driver is not loaded"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 3; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned number, void **gpu) {
    *gpu = number == 2 ? "LOST" : number ? "GPU-1" : "GPU-0";
    return 0;
}
int nvmlDeviceGetMigMode(const char *gpu, unsigned *now, unsigned *then) {
    if (strcmp(gpu, "GPU-1")) return 3;
    *now = *then = 1;
    return 0;
}
int nvmlDeviceGetMaxMigDeviceCount(const char *gpu, unsigned *count) { *count = 3; return 0; }
int nvmlDeviceGetMigDeviceHandleByIndex(const char *gpu, unsigned number, void **slice) {
    if (number == 1) return 6;
    *slice = number ? "MIG-b" : "MIG-a";
    return 0;
}
int nvmlDeviceGetMemoryInfo(const char *gpu, u64 *sizes) {
    if (!known(gpu)) return 15;
    u64 total = gpu[0] == 'G' ? 80ULL << 30 : 10ULL << 30;
    sizes[0] = total; sizes[1] = total - (3ULL << 30); sizes[2] = 3ULL << 30;
    return 0;
}
typedef struct { unsigned version; u64 total, reserved, free, used; } memory_v2;
int nvmlDeviceGetMemoryInfo_v2(const char *gpu, memory_v2 *memory) {
    u64 sizes[3];
    if (RESERVED < 0) return 13;
    if (nvmlDeviceGetMemoryInfo(gpu, sizes)) return 15;
    memory->total = sizes[0]; memory->reserved = (u64)RESERVED << 20; memory->used = sizes[2] - memory->reserved;
    memory->free = sizes[1];
    return 0;
}
typedef struct { unsigned pid; u64 used; unsigned gpu, compute; } process;
int nvmlDeviceGetComputeRunningProcesses_v3(const char *gpu, unsigned *count, process *found) {
    if (!known(gpu)) return 15;
    if (*count < 2) { *count = 2; return 7; }
    *count = 2;
    found[0].pid = 77; found[0].used = gpu[0] == 'G' ? 500ULL << 20 : 0;
    found[1].pid = 78; found[1].used = 1ULL << 30;
    return 0;
}
int nvmlDeviceGetUtilizationRates(const char *gpu, unsigned *rates) {
    if (gpu[0] == 'M') return 3;
    rates[0] = 25; rates[1] = 5;
    return 0;
}
int nvmlDeviceGetUUID(const char *gpu, char *text, unsigned size) { snprintf(text, size, "%s", gpu); return 0; }
int nvmlDeviceGetName(const char *gpu, char *text, unsigned size) { snprintf(text, size, "NVIDIA H100"); return 0; }
"""
ASK = """
import json
from pilotflame.runtime.node.launching.gpus import find_driver
driver = find_driver()
print(json.dumps([driver.find(), driver.uses()]))
"""


def nvml(init: int = 0, reserved_mb: int = -1) -> str:
    """Return the library. With `reserved_mb`, it also tells how much memory of a GPU the driver keeps for itself."""
    return NVML.replace("INIT", str(init)).replace("RESERVED", str(reserved_mb))


# What amdsmi 6.4 returns, as its reference describes it. No machine with AMD's GPUs has run this.
AMDSMI = """
class AmdSmiException(Exception):
    pass
def amdsmi_init(): pass
def amdsmi_shut_down(): pass
def amdsmi_get_processor_handles(): return [0, 1, 2]
def amdsmi_get_gpu_enumeration_info(gpu):
    if gpu == 2:
        raise AmdSmiException("AMDSMI_STATUS_DRIVER_NOT_LOADED")
    return {"drm_render": 128 + gpu, "drm_card": gpu, "hsa_id": gpu + 1, "hip_id": gpu, "hip_uuid": f"GPU-{gpu:016x}"}
def amdsmi_get_gpu_asic_info(gpu): return {"market_name": "AMD Instinct MI300X", "asic_serial": f"0x{gpu:016X}"}
def amdsmi_get_gpu_vram_usage(gpu): return {"vram_total": 196592, "vram_used": 283 + gpu}
def amdsmi_get_gpu_activity(gpu):
    return {"gfx_activity": 40 if gpu == 0 else "N/A", "umc_activity": 3, "mm_activity": "N/A"}
def amdsmi_get_gpu_process_list(gpu):
    return [
        {"name": "python3", "pid": 77, "mem": 512 << 20, "memory_usage": {"gtt_mem": 1, "cpu_mem": 2, "vram_mem": 300 << 20}},
        {"name": "N/A", "pid": 78, "mem": 0, "memory_usage": {"gtt_mem": 0, "cpu_mem": 0, "vram_mem": 0}},
    ] if gpu == 0 else []
"""
ASK_DRIVER = """
import json
from pilotflame.runtime.node.launching.gpus import find_driver
driver = find_driver()
seen = {"found": driver.find(), "uses": driver.uses(), "held": [driver.held_by(77), driver.held_by(1)]}
print(json.dumps(seen | {"environment": driver.environment(["GPU-a", "GPU-b"], 2048), "none": driver.environment([], None)}))
"""


def asked(folder: Path, driver: str | None, ask: str = ASK, **environ: str) -> tuple[Any, str]:
    """Run `ask` in a process with `driver` as the driver's library. Return what it found, and its log."""
    if driver is not None:
        (folder / "nvml.c").write_text(driver)
        built = [str(COMPILER), "-shared", "-fPIC", "-o", "libnvidia-ml.so.1", "nvml.c"]
        subprocess.run(built, cwd=folder, check=True)
    # Remove the variable with which conftest.py hides the machine's own GPUs from all tests.
    inherited = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    done = subprocess.run(
        [sys.executable, "-c", ask], env=inherited | {"LD_LIBRARY_PATH": str(folder), **environ},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout), done.stderr


@needs_compiler
def test_gpus_and_slices_are_found(tmp_path: Path):
    (found, uses), said = asked(tmp_path, nvml())
    assert found == [["GPU-0", 81920], ["MIG-a", 10240], ["MIG-b", 10240]]
    name, used = "NVIDIA H100", 3 << 30
    assert uses == [
        ["GPU-0", 0, name, 80 << 30, used, 0.25],
        ["MIG-a", 1, name, 10 << 30, used, None],
        ["MIG-b", 1, name, 10 << 30, used, None],
    ]
    # One message, although there were two queries.
    assert said.count("GPU 2, which is left out") == 1


@needs_compiler
@pytest.mark.parametrize(
    ("seen", "wanted"), [("1", ["MIG-a", "MIG-b"]), ("MIG-b,GPU-0", ["GPU-0", "MIG-b"]), ("", [])]
)
def test_gpus_that_the_gateway_does_not_see_are_not_given_to_workers(
    tmp_path: Path, seen: str, wanted: list[str]
):
    (found, _), _ = asked(tmp_path, nvml(), CUDA_VISIBLE_DEVICES=seen)
    assert [name for name, _ in found] == wanted


@needs_compiler
def test_a_driver_that_is_not_loaded_is_told(tmp_path: Path):
    (found, uses), said = asked(tmp_path, nvml(init=9))
    assert found == uses == []
    assert "NVML does not tell which GPUs there are" in said


@no_driver
def test_a_machine_without_a_driver_has_none(tmp_path: Path):
    found, said = asked(tmp_path, None)
    assert found == [[], []]
    assert said == ""


def test_a_container_counts_the_gpus_that_it_is_given_from_zero():
    assert names_within(["2", "5", "7"], ["7", "2"]) == ["2", "0"]
    assert names_within(["GPU-a", "MIG-b"], ["MIG-b"]) == ["MIG-b"]


@needs_compiler
def test_memory_that_the_driver_keeps_is_not_given_to_workers(tmp_path: Path):
    (found, _), _ = asked(tmp_path, nvml(reserved_mb=600))
    assert found == [["GPU-0", 81920 - 600], ["MIG-a", 10240 - 600], ["MIG-b", 10240 - 600]]


@needs_compiler
def test_the_driver_tells_what_a_process_holds(tmp_path: Path):
    seen, _ = asked(tmp_path, nvml(reserved_mb=600), ASK_DRIVER)
    assert seen["held"] == [{"GPU-0": 500 << 20, "MIG-a": 0, "MIG-b": 0}, {}]
    assert seen["environment"] == {
        "CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=2048M,1=2048M",
    }  # fmt: skip
    assert seen["none"] == {"CUDA_VISIBLE_DEVICES": ""}


@no_driver
def test_gpus_of_amd_are_found_through_amdsmi(tmp_path: Path):
    (tmp_path / "amdsmi.py").write_text(AMDSMI)
    seen, said = asked(tmp_path, None, ASK_DRIVER, PYTHONPATH=str(tmp_path))
    first, second, name = "GPU-0000000000000000", "GPU-0000000000000001", "AMD Instinct MI300X"
    assert seen["found"] == [[first, 196592], [second, 196592]]
    assert seen["uses"] == [
        [first, 0, name, 196592 << 20, 283 << 20, 0.4],
        [second, 1, name, 196592 << 20, 284 << 20, None],
    ]
    assert said.count("GPU 2, which is left out") == 1
    assert seen["held"] == [{first: 300 << 20}, {}]
    # ROCR_VISIBLE_DEVICES chooses GPUs. HIP_VISIBLE_DEVICES counts the chosen GPUs from 0. It is set, too, because a
    # worker could inherit other numbers.
    assert seen["environment"] == {"ROCR_VISIBLE_DEVICES": "GPU-a,GPU-b", "HIP_VISIBLE_DEVICES": "0,1"}
    seen, _ = asked(tmp_path, None, ASK_DRIVER, PYTHONPATH=str(tmp_path), ROCR_VISIBLE_DEVICES="1")
    assert [name for name, _ in seen["found"]] == [second]
