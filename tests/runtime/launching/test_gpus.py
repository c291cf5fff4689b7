"""What NVML says of the GPUs: the real package beside a small library in place of the driver's, as no GPU is here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pilotflame.runtime.launching.gpus import names_within

COMPILER = shutil.which("cc")
# GPU 0 is whole, GPU 1 is cut into two MIG slices, at the places 0 and 2 of three, and GPU 2 is lost.
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
from pilotflame.runtime.launching.gpus import find_gpus, gpu_uses
print(json.dumps([find_gpus(), gpu_uses()]))
"""


def asked(folder: Path, driver: str | None, **environ: str) -> tuple[Any, str]:
    """Return what the module finds where the driver's library is `driver`, and what it logs."""
    if driver is not None:
        (folder / "nvml.c").write_text(driver)
        built = [str(COMPILER), "-shared", "-fPIC", "-o", "libnvidia-ml.so.1", "nvml.c"]
        subprocess.run(built, cwd=folder, check=True)
    done = subprocess.run(
        [sys.executable, "-c", ASK], env=os.environ | {"LD_LIBRARY_PATH": str(folder), **environ},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout), done.stderr


@pytest.mark.skipif(
    COMPILER is None, reason="there is no C compiler, which makes a library in place of the driver's"
)
def test_gpus_and_slices_are_found(tmp_path: Path):
    (found, uses), said = asked(tmp_path, NVML.replace("INIT", "0"))
    assert found == [["GPU-0", 81920], ["MIG-a", 10240], ["MIG-b", 10240]]
    name, used = "NVIDIA H100", 3 << 30
    assert uses == [
        ["GPU-0", 0, name, 80 << 30, used, 0.25],
        ["MIG-a", 1, name, 10 << 30, used, None],
        ["MIG-b", 1, name, 10 << 30, used, None],
    ]
    # Once, although it was asked twice.
    assert said.count("GPU 2, which is left out") == 1


@pytest.mark.skipif(
    COMPILER is None, reason="there is no C compiler, which makes a library in place of the driver's"
)
@pytest.mark.parametrize(
    ("seen", "wanted"), [("1", ["MIG-a", "MIG-b"]), ("MIG-b,GPU-0", ["GPU-0", "MIG-b"]), ("", [])]
)
def test_gpus_that_the_gateway_does_not_see_are_not_given_to_workers(
    tmp_path: Path, seen: str, wanted: list[str]
):
    (found, _), _ = asked(tmp_path, NVML.replace("INIT", "0"), CUDA_VISIBLE_DEVICES=seen)
    assert [name for name, _ in found] == wanted


@pytest.mark.skipif(
    COMPILER is None, reason="there is no C compiler, which makes a library in place of the driver's"
)
def test_a_driver_that_is_not_loaded_is_told(tmp_path: Path):
    (found, uses), said = asked(tmp_path, NVML.replace("INIT", "9"))
    assert found == uses == []
    assert "NVML does not tell which GPUs there are" in said


def test_a_machine_without_a_driver_has_none(tmp_path: Path):
    found, said = asked(tmp_path, None)
    assert found == [[], []]
    assert said == ""


def test_a_container_counts_the_gpus_that_it_is_given_from_zero():
    assert names_within(["2", "5", "7"], ["7", "2"]) == ["2", "0"]
    assert names_within(["GPU-a", "MIG-b"], ["MIG-b"]) == ["MIG-b"]
