"""What a process has of a device, for `make bench-gpu`: these figures decide how zygotes, standbys and tiers are made.

`python infra/bench/gpu_process.py DEVICE` does what a base does, and then uses the device in a forked child.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys
import time
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from gpu_case import GB, LLAMA_SMALL, GpuBench
from llama import next_token
from memory_folder import SMALL_PAGES, memory_folder
from pilotflame.runtime.launching.gpus import find_driver
from pilotflame.runtime.launching.process_launcher import SINGLE_THREADED

_TESTS = Path(__file__).resolve().parents[2] / "tests/snapshot/restoring/device/test_cuda.py"


def tests(bench: GpuBench) -> None:
    """Enters cuda_tests_passed. Tests that fail are in the notes."""
    import pytest  # noqa: PLC0415  only this part needs it

    # The machine's own plugins may not fit this pytest.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    report = bench.folder / "tests.xml"
    options = ["-c", os.devnull, "--noconftest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    pytest.main([*options, str(_TESTS)])
    cases = list(ET.parse(report).getroot().iter("testcase"))
    for case in cases:
        for fault in (*case.findall("failure"), *case.findall("error")):
            bench.report.note(f"{case.get('name')}: {(fault.text or '')[-600:]}")
    passed = sum(not len(case) for case in cases)
    bench.held("cuda_tests_passed", passed, f"of {len(cases)}", f"== {max(1, len(cases))}")


def fork(bench: GpuBench) -> None:
    """Enters zygote_threads and zygote_child_answers; a row beside it has the same without NVML's check."""
    for check in ("0", "1"):
        environment = {**os.environ, **SINGLE_THREADED, "PYTORCH_NVML_BASED_CUDA_CHECK": check}
        command = [sys.executable, __file__, bench.where]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, timeout=100)
        found = json.loads(done.stdout)
        bench.report.row(part="fork", nvml_check=check, **found)
    bench.held("zygote_threads", found["threads"], "after import", "== 1")
    bench.held("zygote_child_answers", found["child_answers"], "1: yes", "== 1")


def _fork(where: str) -> dict[str, Any]:
    """Ask torch for a device as a base does. Return its threads and open device files, and whether a child can use the device."""
    torch.cuda.is_available()
    opened = {os.path.realpath(one) for one in Path("/proc/self/fd").iterdir()}
    told = {
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "device_files": sorted(one for one in opened if "nvidia" in one),
    }
    if not (child := os.fork()):
        code = 1
        # A child that hangs ends too.
        signal.alarm(60)
        try:
            code = int(torch.ones(2, device=where).sum().item() != 2)
        finally:
            os._exit(code)
    return {**told, "child_answers": int(os.waitpid(child, 0)[1] == 0)}


def context(bench: GpuBench) -> None:
    """Enters the memory of the device that this process has after its first use, a rehearsal, and parking.

    The gateway books 512 MiB for each worker that is parked.
    """
    before = _used_mib(bench)
    with bench.llama(LLAMA_SMALL) as case:
        bench.held("context_mib", _used_mib(bench) - before, "MiB", "<= 512")
        case.snapshots.blank()
        next_token(case.module, 1)
        bench.held("rehearsed_mib", _used_mib(bench) - before, "MiB", "<= 512")
        case.seconds()
        next_token(case.module, 1)
        case.snapshots.park()
        bench.held("parked_mib", _used_mib(bench) - before, "MiB", "<= 512")


def _used_mib(bench: GpuBench) -> int:
    # torch could not say it without making the context.
    return find_driver().uses()[0].used_bytes >> 20 if bench.cuda else 0


def pinning(bench: GpuBench) -> None:
    """Enters ceiling_gb_s, and how fast memory is pinned and mapped files are registered with the driver."""
    # It makes the context.
    bench.finish()
    started_s = time.perf_counter()
    pool = [torch.empty(16 << 20, dtype=torch.uint8, pin_memory=bench.cuda) for _ in range(16)]
    bench.report.add("pin_gb_s", len(pool) * (16 << 20) / (time.perf_counter() - started_s) / GB, "GB/s")
    del pool
    for mib in (1, 4, 16, 64):
        bench.report.row(part="raw copy", mib=mib, gb_s=bench.copy_rate(mib) / GB)
    bench.report.row(part="raw copy, pageable", mib=16, gb_s=bench.copy_rate(16, pinned=False) / GB)
    bench.report.add("ceiling_gb_s", 1 / bench.ceiling_s_per_byte / GB, "GB/s")
    # Last, because an error of the driver would be torch's next one.
    rates = [
        _registered(bench, folder, threads)
        for folder in {memory_folder(), SMALL_PAGES}
        for threads in (1, 2, 4)
    ]
    bench.report.add("register_gb_s", max(rates) / GB, "GB/s")


def _registered(bench: GpuBench, folder: Path, threads: int) -> float:
    """Return bytes a second at which threads register a mapped file of `folder`, or 0 if the driver refuses."""
    window, count = 64 << 20, 32 if bench.cuda else 2
    path = folder / "bench-gpu-registered"
    with path.open("w+b") as file:
        for _ in range(count):
            file.write(bytes(window))
        mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    path.unlink()
    with warnings.catch_warnings(action="ignore"):
        begin = torch.frombuffer(mapped, dtype=torch.uint8).data_ptr()
    register, unregister = _driver(bench)
    windows = [begin + number * window for number in range(count)]
    with ThreadPoolExecutor(threads) as pool:
        started_s = time.perf_counter()
        codes = list(pool.map(lambda at: register(at, window), windows))
        took_s = time.perf_counter() - started_s
    for at, code in zip(windows, codes, strict=True):
        if not code:
            unregister(at)
    if refused := next(filter(None, codes), 0):
        bench.report.note(f"The driver does not register mapped files of {folder}: error {refused}.")
        return 0.0
    rate = window * count / took_s
    bench.report.row(part="register", folder=str(folder), threads=threads, gb_s=rate / GB)
    return rate


def _driver(bench: GpuBench) -> tuple[Callable[[int, int], int], Callable[[int], object]]:
    """Return how memory is registered, which gives the driver's error or 0, and how that is undone."""
    if not bench.cuda:
        return lambda _at, _size: 0, lambda _at: 0
    driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    portable, read_only = 0x01, 0x08
    return lambda at, size: int(
        driver.cudaHostRegister(at, size, portable | read_only)
    ), driver.cudaHostUnregister


if __name__ == "__main__":
    print(json.dumps(_fork(sys.argv[1])))
