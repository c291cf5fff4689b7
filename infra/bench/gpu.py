"""`make bench-gpu`: weights to a device, beside the device's own ceilings and other loaders.

    python infra/bench/gpu.py [--device cuda|simulated] [--seconds N]

On a machine without a CUDA device it runs on the simulated device with small models. Then the figures say that the
script and the code work, and nothing about speed.

Each part is a process, and writes its figures to build/bench/bench-gpu-<device>-<part>.json. The next run continues a run that
was killed or out of time: it skips the parts that have figures.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Callable

import gpu_copy
import gpu_functions
import gpu_process
import torch
from gpu_case import GpuBench
from memory_folder import mounted, unmount_left
from pilotflame.runtime.launching.gpus import find_driver
from process_tree import end_with_parent
from report import Report, path_of

_MEMORY_BYTES = 24 << 30
PACKAGES = ("torch", "safetensors", "fastsafetensors", "runai-model-streamer", "nvidia-ml-py")
PARTS: dict[str, tuple[int, tuple[Callable[[GpuBench], None], ...]]] = {
    "tests": (240, (gpu_process.tests,)),
    "process": (180, (gpu_process.fork, gpu_process.context)),
    "pinning": (120, (gpu_process.pinning,)),
    "copy": (420, (gpu_copy.dense, gpu_copy.many, gpu_copy.overlap)),
    "parking": (240, (gpu_copy.parking,)),
    "functions": (480, (gpu_functions.from_memory,)),
    "disk": (420, (gpu_functions.from_disk,)),
}
"""The time limit of each part in seconds, and its functions. With the final report, these are eight files."""


def target(device: str, part: str) -> str:
    """Return the name of a part's report."""
    return f"bench-gpu-{device}-{part}"


def measure(device: str, part: str) -> None:
    """Measure one part in this process, and write its figures."""
    report = Report(target(device, part), packages=PACKAGES)
    if device == "cuda":
        report.note(f"Measured on {', '.join(one.name for one in find_driver().uses())}.")
    else:
        report.note("SIMULATED device: these are copies in the host's memory, and no speed of any GPU.")
    with mounted(_MEMORY_BYTES):
        bench = GpuBench(report, cuda=device == "cuda")
        # A part that was killed has left files there.
        shutil.rmtree(bench.folder, ignore_errors=True)
        bench.folder.mkdir()
        for one in PARTS[part][1]:
            with report.part(one.__name__):
                one(bench)
    report.write()


def is_done(device: str, part: str) -> bool:
    """Return True if a run has written the part's figures, and nothing in it has failed."""
    path = path_of(target(device, part))
    return path.exists() and not json.loads(path.read_text())["failures"]


def run(device: str, seconds: float) -> None:
    """Measure the parts whose figures are not there, each in a process, as long as the time is enough."""
    ends_s = time.monotonic() + seconds
    for part, (most_s, _) in PARTS.items():
        if is_done(device, part):
            print(f"{part}: its figures are there", flush=True)
            continue
        if time.monotonic() + most_s > ends_s:
            print(f"{part}: it may take {most_s} s, and less is left", flush=True)
            return
        print(f"{part}: measured", flush=True)
        unmount_left()
        command = [sys.executable, __file__, "--device", device, "--part", part]
        with subprocess.Popen(command, preexec_fn=end_with_parent) as process:  # noqa: PLW1509  one thread here
            try:
                process.wait(most_s)
            except subprocess.TimeoutExpired:
                print(f"{part}: killed after {most_s} s", flush=True)
                process.kill()


def finish(device: str) -> bool:
    """Write build/bench/bench-gpu.json from all parts. If every part has figures, remove their files, so that the next run is new."""
    report = Report("bench-gpu", packages=PACKAGES)
    for part in PARTS:
        if (path := path_of(target(device, part))).exists():
            report.include(path)
        else:
            report.fail(f"{part} has no figures yet: run this again")
    met = report.finish()
    if all(is_done(device, part) for part in PARTS):
        for part in PARTS:
            path_of(target(device, part)).unlink()
    return met


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure how weights get to a device.")
    found = "cuda" if torch.cuda.is_available() else "simulated"
    parser.add_argument("--device", choices=["cuda", "simulated"], default=found)
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="begin no part that may take longer than what is left"
    )
    parser.add_argument("--part", choices=PARTS, help="measure this one part, in this process")
    arguments = parser.parse_args()
    if arguments.part:
        measure(arguments.device, arguments.part)
        return 0
    run(arguments.device, arguments.seconds)
    return 0 if finish(arguments.device) else 1


if __name__ == "__main__":
    sys.exit(main())
