"""The physical floors, measured in the same run as the figures that stand beside them.

python infra/bench/floors.py
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from load import Request, load_apart
from percentiles import median
from report import Report
from servers import start_echo

HELLO = b'{"name": "x"}'
_MiB = 1 << 20
_PAGE = mmap.PAGESIZE
_WRITABLE = mmap.PROT_READ | mmap.PROT_WRITE


def echo_p50_ms(url: str, duration_s: float = 1.0) -> float:
    """Return the median latency of a bare aiohttp echo at `url` for one caller."""
    headers = {"Content-Type": "application/json"}
    tally = load_apart(Request(url + "/", body=HELLO, headers=headers, expect=HELLO), duration_s=duration_s)
    if not tally.clean:
        raise RuntimeError(f"the echo did not answer rightly: {tally.summary()}")
    return tally.p_ms(0.5)


def bare_fork_ms(times: int = 200) -> list[float]:
    """Fork of a process that has imported nothing, until the child's first byte."""
    script = Path(__file__).with_name("floor_fork.py")
    command = [sys.executable, "-I", "-S", str(script), str(times)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=60)
    samples: list[float] = json.loads(done.stdout)
    return samples


def write_safetensors(path: Path, size: int, tensors: int = 100) -> None:
    """Write a valid file of about `size` bytes: `tensors` float32 tensors of equal length, not all zero."""
    elements = size // tensors // 4
    header = {
        f"layer.{index}.weight": {
            "dtype": "F32",
            "shape": [elements],
            "data_offsets": [index * elements * 4, (index + 1) * elements * 4],
        }
        for index in range(tensors)
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    chunk = np.random.default_rng(1).random(elements, dtype=np.float32).tobytes()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _ in range(tensors):
            file.write(chunk)


def cached_share(path: Path) -> float:
    """The share of the file's pages that are in the page cache (mincore)."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE) as mapped:
        whole = np.frombuffer(mapped, dtype=np.uint8)
        marks = np.zeros((len(mapped) + _PAGE - 1) // _PAGE, dtype=np.uint8)
        size, out = ctypes.c_size_t(len(mapped)), ctypes.c_void_p(marks.ctypes.data)
        if libc.mincore(ctypes.c_void_p(whole.ctypes.data), size, out):
            raise OSError(ctypes.get_errno(), "mincore")
        del whole
        return float((marks & 1).mean())


def map_and_touch_ms(path: Path, flags: int = mmap.MAP_PRIVATE, prot: int = _WRITABLE) -> float:
    """Map the file, parse its safetensors header, read one byte of every page."""
    started_ns = time.perf_counter_ns()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, flags, prot) as mapped:
        json.loads(mapped[8 : 8 + int.from_bytes(mapped[:8], "little")])
        pages = np.frombuffer(mapped, dtype=np.uint8)
        int(pages[::_PAGE].sum())
        took_ns = time.perf_counter_ns() - started_ns
        del pages
    return took_ns / 1e6


def map_and_parse_ms(path: Path) -> float:
    """Map the file and parse its safetensors header; no page of the data is touched."""
    started_ns = time.perf_counter_ns()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, _WRITABLE) as mapped:
        json.loads(mapped[8 : 8 + int.from_bytes(mapped[:8], "little")])
        return (time.perf_counter_ns() - started_ns) / 1e6


def first_touch_gb_s(size: int) -> float:
    """Bandwidth of writing memory that has no pages yet, GB/s (10^9)."""
    with mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as fresh:
        array = np.frombuffer(fresh, dtype=np.uint64)
        started_ns = time.perf_counter_ns()
        array.fill(1)
        took_ns = time.perf_counter_ns() - started_ns
        del array
    return size / took_ns


def again(measure: Callable[[], float], times: int = 7) -> float:
    """The median of a few, after one that is thrown away."""
    measure()
    return median([measure() for _ in range(times)])


def enter_floors(report: Report, folder: Path, size: int = 90 * _MiB) -> None:
    """Measure all that need no server, and enter them in the report."""
    path = folder / "floor.safetensors"
    write_safetensors(path, size)
    try:
        path.read_bytes()
        forks = bare_fork_ms()
        report.add("floor_bare_fork_ms", median(forks), "ms")
        report.add("floor_map_cached_share", cached_share(path))
        report.add("floor_map_touch_ms", again(lambda: map_and_touch_ms(path)), "ms")
        populate = mmap.MAP_PRIVATE | mmap.MAP_POPULATE
        read = mmap.PROT_READ
        report.add("floor_map_populate_ms", again(lambda: map_and_touch_ms(path, populate, read)), "ms")
        # The kernel populates a writable private mapping by write faults: it copies the whole file.
        report.add("map_populate_writable_ms", again(lambda: map_and_touch_ms(path, populate)), "ms")
        report.add("floor_map_file_mb", path.stat().st_size / 1e6, "MB")
        report.add("floor_first_touch_gb_s", again(lambda: first_touch_gb_s(256 * _MiB)), "GB/s")
    finally:
        path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the physical floors of this machine.")
    parser.add_argument("--size-mib", type=int, default=90, help="of the mapped file")
    arguments = parser.parse_args()
    report = Report("floors", packages=("numpy",))
    folder = Path("build/bench")
    folder.mkdir(parents=True, exist_ok=True)
    enter_floors(report, folder, arguments.size_mib * _MiB)
    with start_echo() as echo:
        report.add("floor_echo_p50_ms", median([echo_p50_ms(echo.url) for _ in range(3)]), "ms")
    thp = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    report.note(f"transparent huge pages: {thp.read_text().strip() if thp.exists() else 'unknown'}")
    report.note(f"pid {os.getpid()}, page {_PAGE} bytes")
    report.finish()


if __name__ == "__main__":
    main()
