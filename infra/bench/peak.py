"""Peak memory of loading a model much larger than any buffer: 6 GB of sparse-generated weights, in a child.

    python infra/bench/peak.py [--quick]

The child fetches into fresh files, and may map them meanwhile. The first value is the kernel's own high water mark of the
child's resident memory (VmHWM: no sampling, no gap) minus the mapped pages of the files at the end, when all of them are
mapped: the peak above the mapped file, interpreter, libraries and all. Then the child maps, restores and reads a value of
every page. The second value is its memory that is not the file (RssAnon; file pages of libraries are left out, because
they belong to torch). The figure is the greater value.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import checkpoint
import ours
from lane import Lane
from memory_folder import SMALL_PAGES, memory_folder
from nginx import start_nginx
from report import Report


class Load:
    """A lane's contestant: one load, with what it cost in memory."""

    def __init__(self, url: str, folder: str) -> None:
        from pilotflame.snapshot.format.manifest import Manifest  # noqa: PLC0415

        self._url = url
        self._manifest = Manifest.read(Path(folder))
        self._files: ours.Files | None = None

    def run(self, what: str) -> dict[str, Any]:
        told: dict[str, Any] = self._fetch() if what == "fetch" else self._read()
        return told

    def check(self) -> None:
        """The engine verifies every chunk; nothing is read twice here."""

    def clear(self) -> None:
        """The files stay for the second turn."""

    def _fetch(self) -> dict[str, Any]:
        from pilotflame.snapshot.fetching.arrival import Arrival  # noqa: PLC0415
        from pilotflame.snapshot.fetching.fetch import fetch  # noqa: PLC0415

        before = status_kb()
        self._files = ours.Files(self._manifest, memory_folder())
        stats = fetch(self._manifest, ours.source_of(self._url), self._files.targets, Arrival(self._manifest))
        after = status_kb()
        return {
            "peak_kb": after["VmHWM"] - after["RssShmem"],
            "before_kb": before["VmRSS"],
            "connections": stats.connections,
            "bytes": self._manifest.total_bytes,
        }

    def _read(self) -> dict[str, Any]:
        assert self._files is not None
        import torch  # noqa: PLC0415

        before = status_kb()
        tensors = ours.all_tensors(self._files.folder, self._manifest)
        for tensor in tensors.values():
            tensor.view(torch.int16).flatten()[::2048].sum().item()
        after = status_kb()
        self._files.close()
        return {"anonymous_kb": after["RssAnon"], "before_kb": before["RssAnon"]}


def status_kb() -> dict[str, int]:
    """The memory lines of /proc/self/status."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {line[0].rstrip(":"): int(line[1]) for line in lines if line[-1] == "kB"}


def measure(report: Report, shape: checkpoint.Shape = checkpoint.GIANT) -> None:
    """Enters peak_extra_mb."""
    with tempfile.TemporaryDirectory(prefix="pilotflame-bench-", dir=SMALL_PAGES) as name:
        made = checkpoint.snapshot(shape, Path(name), sparse=True)
        with (
            start_nginx(Path(name)) as server,
            Lane("peak", "peak:Load", url=f"{server.url}/{shape.name}", folder=str(made.folder)) as lane,
        ):
            lane.wait_ready()
            fetched, read = lane.turn(what="fetch"), lane.turn(what="read")
    report.row(group="peak", shape=shape.name, fetch=fetched, read=read)
    peak_kb = max(fetched["peak_kb"], read["anonymous_kb"])
    report.add("peak_extra_mb", peak_kb * 1024 / 1e6, "MB", "<= 256")
    report.add("peak_of_fetch_mb", fetched["peak_kb"] * 1024 / 1e6, "MB")
    report.add("peak_of_fetch_over_start_mb", (fetched["peak_kb"] - fetched["before_kb"]) * 1024 / 1e6, "MB")
    report.add("peak_model_gb", fetched["bytes"] / 1e9, "GB")
    report.add("peak_model_gb_s", fetched["bytes"] / 1e9 / fetched["seconds"], "GB/s")
    report.note(
        "peak_extra_mb is of the whole process: interpreter, libraries, buffers; not of the file's own pages"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Peak memory of a load.")
    parser.add_argument("--quick", action="store_true", help="1.1 GB in place of 6 GB")
    arguments = parser.parse_args()
    report = Report("bench-snapshot-peak")
    measure(report, checkpoint.FULL if arguments.quick else checkpoint.GIANT)
    return 0 if report.finish() else 1


if __name__ == "__main__":
    sys.exit(main())
