"""The copy of weights to a device, for `make bench-gpu`: beside a raw copy and other loaders, overlapped, parked."""

from __future__ import annotations

import math
import resource
import time

import gpu_peers
import torch
from gpu_case import GB, MB, ROUNDS, Case, GpuBench
from percentiles import median


def dense(bench: GpuBench) -> None:
    """Enters h2d_share, of the first copy of a process with pinning on the clock, and h2d_vs_best_peer of later ones."""
    size = 16 * GB if bench.cuda else 300 * MB
    before_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    with bench.chain(size, max(8, size // (256 * MB)), 4096) as case:
        first_s, *later_s = [case.seconds() for _ in range(1 + ROUNDS)]
        peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3 - before_mb
        # The other loaders may need all of the device.
        case.snapshots.park()
        floor_s, best_s = case.bytes * bench.ceiling_s_per_byte, _peers(bench, case)
        bench.report.row(
            part="dense", gb=case.bytes / GB, first_s=first_s, later_s=median(later_s), ceiling_s=floor_s,
            best_peer_s=best_s,
        )  # fmt: skip
    bench.held("peak_extra_host_mb", peak_mb, "MB", "<= 1000")
    bench.held("h2d_share", floor_s / first_s, "of the ceiling", ">= 0.9")
    bench.held("h2d_vs_best_peer", best_s / median(later_s), "times as fast", ">= 2")


def _peers(bench: GpuBench, case: Case) -> float:
    """Return how long the fastest of the other loaders takes."""
    best_s = math.inf
    for name in gpu_peers.installed():
        try:
            took_s = median(
                [gpu_peers.seconds(name, case.path, bench.where, bench.finish) for _ in range(ROUNDS)]
            )
        except Exception as error:  # noqa: BLE001  told, and the others go on
            bench.report.note(f"{name} failed: {type(error).__name__}: {str(error)[:200]}")
            continue
        bench.report.row(part=f"dense, {name}", gb=case.bytes / GB, seconds=took_s)
        best_s = min(best_s, took_s)
    return best_s


def many(bench: GpuBench) -> None:
    """Enters many_share, of 20,000 small tensors."""
    with bench.chain(2 * GB if bench.cuda else 80 * MB, 20_000, 64) as case:
        took_s = median([case.seconds() for _ in range(ROUNDS)])
        share = case.bytes * bench.ceiling_s_per_byte / took_s
    bench.held("many_share", share, "of the ceiling", ">= 0.9")


def overlap(bench: GpuBench) -> None:
    """Enters overlap_ratio, of a forward pass that begins with the copy, beside the copy alone."""
    ratios = []
    with bench.chain(*_large(bench)) as case:
        for _ in range(1 + ROUNDS):
            alone_s = case.seconds()
            started_s = case.begin()
            answer = case.answer(_ones(bench))
            ratios.append((time.perf_counter() - started_s) / alone_s)
            case.snapshots.wait()
            if not torch.equal(answer, case.answer(_ones(bench))):
                raise RuntimeError("the answers differ")
    bench.held("overlap_ratio", median(ratios[1:]), "of the copy alone", "<= 1.1")


def parking(bench: GpuBench) -> None:
    """Enters park_freed_share, and what parking and waking take beyond the bytes that they copy."""
    freed, park_s, wake_s = list[float](), list[float](), list[float]()
    with bench.chain(*_large(bench)) as case:
        alone_s, before = median([case.seconds() for _ in range(ROUNDS)]), _allocated(bench)
        right = case.answer(_ones(bench))
        for _ in range(30):
            freed_bytes = _park(case, park_s)
            freed.append((before - _allocated(bench)) / before if bench.cuda else freed_bytes / case.bytes)
            started_s = time.perf_counter()
            case.snapshots.unpark()
            answer = case.answer(_ones(bench))
            wake_s.append(time.perf_counter() - started_s)
            if not torch.equal(answer, right):
                raise RuntimeError("the answer after waking is another")
        for buffer in case.module.buffers():
            buffer.neg_()
        bench.finish()
        changed_s = list[float]()
        _park(case, changed_s)
        floor_s = case.bytes * bench.ceiling_s_per_byte
    bench.report.add("park_freed_share", min(freed), "of the function's device memory", ">= 0.95")
    bench.held("wake_extra_ms", 1e3 * (median(wake_s) - alone_s), "ms beyond the copy", "<= 100")
    bench.held("park_extra_ms", 1e3 * median(park_s), "ms, weights unchanged", "<= 100")
    bench.held("park_changed_extra_ms", 1e3 * (changed_s[0] - floor_s), "ms beyond the copy", "<= 100")


def _park(case: Case, took_s: list[float]) -> int:
    # The clock excludes the copy and its end.
    case.snapshots.wait()
    started_s = time.perf_counter()
    freed_bytes = case.snapshots.park()
    took_s.append(time.perf_counter() - started_s)
    return freed_bytes


def _large(bench: GpuBench) -> tuple[int, int, int]:
    return (8 * GB, 64, 4096) if bench.cuda else (200 * MB, 64, 1024)


def _ones(bench: GpuBench) -> torch.Tensor:
    return torch.ones(1, 4096 if bench.cuda else 1024, dtype=torch.bfloat16, device=bench.where)


def _allocated(bench: GpuBench) -> int:
    return torch.cuda.memory_reserved() if bench.cuda else 0
