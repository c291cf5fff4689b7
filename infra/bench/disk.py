"""Restoring a file from disk with a cold page cache: beside fio, and beside faults alone.

    python infra/bench/disk.py [--rounds N]

Before each turn the file is dropped from the page cache, which mincore confirms. The order of first touch differs from the
order in the file: libraries write tensors sorted by name, and a forward pass uses another order.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import checkpoint
from floors import cached_share
from lane import Lane
from percentiles import median
from report import Report

TOKENS = 16
_FIO = {
    "fio, direct": ("--direct=1", "--bs=1M", "--ioengine=psync"),
    "fio, direct, 8 x 4 MiB": ("--direct=1", "--bs=4M", "--ioengine=io_uring", "--iodepth=8"),
    "fio, buffered": ("--direct=0", "--bs=1M", "--ioengine=psync"),
}
_RAW, _RAW_BYTES = "raw, direct", 8 << 20
_OURS = ("faults", "ahead", "answer_faults", "answer", "answer_warm")


class Restored:
    """A lane's contestant: the 24-layer toy from its files, to the last byte or to the first answer."""

    def __init__(self, folder: str) -> None:
        import torch  # noqa: PLC0415
        from llama import skeleton  # noqa: PLC0415
        from pilotflame.snapshot.format.manifest import Manifest  # noqa: PLC0415
        from pilotflame.snapshot.restoring import mapping, plan  # noqa: PLC0415

        # With several threads, a neighbour that delays one thread would delay the answer.
        torch.set_num_threads(1)
        self._torch, self._mapping, self._planning = torch, mapping, plan
        self._folder, manifest = Path(folder), Manifest.read(Path(folder))
        names = tuple(sorted(manifest.first_touch))
        self._by_name = manifest.build(**{**dict(manifest), "first_touch": names})
        self._in_order = manifest
        self._plan = plan.make_plan(skeleton(checkpoint.TOY), manifest)
        shape = (1, TOKENS)
        self._tokens = torch.randint(0, checkpoint.TOY.vocabulary, shape, generator=torch.Generator())

    def run(self, what: str) -> dict[str, Any]:
        answers = what.startswith("answer")
        manifest = self._in_order if answers else self._by_name
        started_s = time.perf_counter()
        mapped = self._mapping.Mapping(self._folder, manifest)
        reading = mapped.read_ahead() if what in ("ahead", "answer") else None
        if answers:
            self._planning.restore(self._plan, mapped)
            with self._torch.inference_mode():
                self._plan.module(self._tokens)
        else:
            _touch(mapped)
        seconds = time.perf_counter() - started_s
        if reading is not None and not reading.wait(60):
            raise RuntimeError("the reading did not end")
        self._planning.blank(self._plan)
        return {"seconds": seconds, "read": reading is not None}

    def check(self) -> None:
        """Nothing to check: the mapping is the file."""

    def clear(self) -> None:
        """`run` lets go of the mapping, or else the file would stay in memory."""


def _touch(mapped: Any) -> None:
    """Read a byte of every page, tensor after tensor in the order of first touch."""
    tensors = {entry.name: entry for entry in mapped.manifest.tensors}
    for name in mapped.manifest.first_touch:
        entry = tensors[name]
        begin = entry.offset_bytes & -4096
        mapped.flats[entry.shard][begin : entry.offset_bytes + entry.size_bytes : 4096].sum().item()


def measure(report: Report, rounds: int) -> None:
    """Enters disk_share, disk_vs_faults and disk_answer_vs_read."""
    toy = checkpoint.snapshot(checkpoint.TOY, checkpoint.DATA / checkpoint.BUCKET)
    floors = list(_FIO) if shutil.which("fio") else [_RAW]
    ways = [*floors, *_OURS]
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    with Lane("from disk", "disk:Restored", folder=str(toy.folder)) as lane:
        lane.wait_ready()
        lane.turn(what="answer_warm")
        for number in range(rounds):
            for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
                seconds[way].append(_turn(lane, toy.path, way))
            print(
                "   " + ", ".join(f"{way} {figures[-1]:.2f}" for way, figures in seconds.items()), flush=True
            )
    _enter(report, seconds, floors)


def _turn(lane: Lane, path: Path, way: str) -> float:
    if way == "answer_warm":
        lane.turn(what=way)
        return float(lane.turn(what=way)["seconds"])
    drop(path)
    if way in _FIO:
        return fio(path, _FIO[way])
    if way == _RAW:
        return raw(path)
    told = lane.turn(what=way)
    if told["read"] is not (way in ("ahead", "answer")):
        raise RuntimeError(f"{way}: the weights were taken to be in memory")
    return float(told["seconds"])


def drop(path: Path) -> None:
    """Drop a file from the page cache. Raises RuntimeError if it stays."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    if (share := cached_share(path)) > 0:
        raise RuntimeError(f"{share:.0%} of {path} stays in the page cache")


def fio(path: Path, how: tuple[str, ...]) -> float:
    """Seconds of a sequential read of the whole file by fio, of the reading itself."""
    command = [
        "fio",
        "--name=read",
        f"--filename={path}",
        "--rw=read",
        "--readonly",
        "--output-format=json",
        *how,
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    told = json.loads(done.stdout[done.stdout.index("{") :])
    return float(told["jobs"][0]["read"]["runtime"]) / 1e3


def raw(path: Path) -> float:
    """The same without fio: one thread with O_DIRECT."""
    descriptor, buffer = os.open(path, os.O_RDONLY | os.O_DIRECT), mmap.mmap(-1, _RAW_BYTES)
    started_s, at = time.perf_counter(), 0
    while count := os.preadv(descriptor, [buffer], at):
        at += count
        if count % mmap.PAGESIZE:
            break
    os.close(descriptor)
    return time.perf_counter() - started_s


def _enter(report: Report, seconds: dict[str, list[float]], floors: list[str]) -> None:
    def ratio(one: str, other: str) -> float:
        return median([over / under for over, under in zip(seconds[one], seconds[other], strict=True)])

    for way, figures in seconds.items():
        report.row(group="disk", name=way, seconds=figures, median_s=median(figures))
    report.add("disk_share", ratio(floors[0], "ahead"), "", ">= 0.9")
    for floor in floors[1:]:
        report.add(
            "disk_share_" + floor.partition(", ")[2].replace(", ", "_").replace(" ", ""),
            ratio(floor, "ahead"),
        )
    report.add("disk_vs_faults", ratio("faults", "ahead"), "x", ">= 2")
    report.add("disk_answer_vs_read", ratio("answer", "ahead"), "x", "<= 1.1")
    report.add("disk_answer_vs_faults", ratio("answer_faults", "answer"), "x")
    report.add("disk_answer_warm_s", median(seconds["answer_warm"]), "s")
    report.add("disk_read_s", median(seconds["ahead"]), "s")
    report.note(f"disk: the floor of disk_share is {floors[0]}; {TOKENS} tokens, one thread of torch")


def main() -> int:
    parser = argparse.ArgumentParser(description="Restore from a disk with a cold page cache.")
    parser.add_argument("--rounds", type=int, default=9)
    report = Report("bench-snapshot-disk", packages=("torch",))
    measure(report, parser.parse_args().rounds)
    return 0 if report.finish() else 1


if __name__ == "__main__":
    sys.exit(main())
