"""What parking an idle worker on a CPU would free, and what the next call would pay for it.

    python infra/bench/park.py [--rounds 5]

A worker holds 64 MiB of its own and 64 MiB of mapped weights. It is stopped (SIGSTOP), trimmed (`malloc_trim`), and paged
out (`process_madvise` with MADV_PAGEOUT). After each, its memory is read and one call is timed.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import tempfile
from pathlib import Path
from statistics import median

import memory
from control import Control
from report import Report
from servers import start_pilotflame

MIB = 1 << 20
SYS_PROCESS_MADVISE, MADV_PAGEOUT = 440, 21
HANDLER = """
import ctypes, mmap, os
held = []
def setup(context):
    held.append(bytearray(b"x") * (64 << 20))
    with open(os.environ["WEIGHTS"], "rb") as file:
        held.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    # Freed pieces between kept ones: what `malloc_trim` could give back.
    held.append([bytes(200) for _ in range(200_000)][::5000])
def handler(event):
    if event == "pid":
        return os.getpid()
    if event == "trim":
        return ctypes.CDLL(None).malloc_trim(0)
    return sum(held[0][::4096]) + sum(held[1][::4096])
"""


class Extent(ctypes.Structure):
    _fields_ = (("start", ctypes.c_void_p), ("size", ctypes.c_size_t))


def page_out(pid: int) -> None:
    """Ask the kernel to reclaim all memory of a process that it can write back or drop."""
    libc, process = ctypes.CDLL(None, use_errno=True), os.pidfd_open(pid)
    try:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "[v" not in line:
                start, end = (int(part, 16) for part in line.split()[0].split("-"))
                extent = Extent(start, end - start)
                libc.syscall(SYS_PROCESS_MADVISE, process, ctypes.byref(extent), 1, MADV_PAGEOUT, 0)
    finally:
        os.close(process)


def stop(control: Control, pid: int) -> None:
    del control
    os.kill(pid, signal.SIGSTOP)


def trim(control: Control, pid: int) -> None:
    control.invoke("held", "trim")
    os.kill(pid, signal.SIGSTOP)


def page(control: Control, pid: int) -> None:
    stop(control, pid)
    page_out(pid)


MEASURES = {"stopped": stop, "trimmed": trim, "paged_out": page}


def measure(report: Report, control: Control, rounds: int) -> None:
    pid = control.invoke("held", "pid").body
    warm_ms = median(control.invoke("held", 1).ms for _ in range(20))
    report.add("warm_ms", warm_ms, "ms")
    report.add("held_mb", memory.held(pid).pss_mb, "MB")
    for name, act in MEASURES.items():
        freed_mb: list[float] = []
        waited_ms: list[float] = []
        for _ in range(rounds):
            control.invoke("held", 1)
            before = memory.held(pid).pss_mb
            act(control, pid)
            freed_mb.append(before - memory.held(pid).pss_mb)
            os.kill(pid, signal.SIGCONT)
            waited_ms.append(control.invoke("held", 1).ms)
        report.add(f"{name}_freed_mb", median(freed_mb), "MB")
        report.add(f"{name}_wake_ms", median(waited_ms) - warm_ms, "ms")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    report = Report("bench-park")
    with start_pilotflame() as server, tempfile.TemporaryDirectory(prefix="pilotflame-park-") as folder:
        weights = Path(folder) / "weights"
        weights.write_bytes(os.urandom(64 * MIB))
        (Path(folder) / "handler.py").write_text(HANDLER)
        control = Control(server.url)
        try:
            control.deploy(
                folder, name="held", **{"scale.min": 1, "scale.max": 1, "env.WEIGHTS": str(weights)}
            )
            measure(report, control, rounds)
        finally:
            control.close()
    return 0 if report.finish() else 1


if __name__ == "__main__":
    sys.exit(main())
