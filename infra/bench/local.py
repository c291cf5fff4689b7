"""Restoring what is on this machine already, page cache warm: beside a bare mapping, and beside torch.load.

    python infra/bench/local.py [--quick] [--rounds N]

It also measures a second process that attaches to the same snapshot while the first has it, by its smaps.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import checkpoint
import psutil
from floors import map_and_parse_ms
from lane import Lane
from percentiles import median
from pilotflame.snapshot.format.manifest import Manifest
from report import Report
from rich.console import Console
from rich.table import Table

_OF_MAPPING = ("Size", "Rss", "Shared_Clean", "Private_Clean", "Private_Dirty", "Anonymous")
_MANY = 15


class Local:
    """A lane's contestant: a module on the meta device, its plan, and ways of giving it its weights."""

    def __init__(self, folder: str, shape: str) -> None:
        import torch  # noqa: PLC0415
        from llama import skeleton  # noqa: PLC0415
        from pilotflame.snapshot.restoring import mapping, plan  # noqa: PLC0415
        from safetensors import safe_open  # noqa: PLC0415

        self._torch, self._mapping, self._planning = torch, mapping, plan
        self._open = safe_open
        self._folder = Path(folder)
        self._shape = checkpoint.QUICK if shape == checkpoint.QUICK.name else checkpoint.FULL
        self._skeleton = skeleton
        self._manifest = Manifest.read(self._folder)
        self._model = skeleton(self._shape)
        self._plan = plan.make_plan(self._model, self._manifest)
        self._held: Any = None

    def run(self, what: str) -> dict[str, Any]:
        told: dict[str, Any] = getattr(self, f"_{what}")()
        return told

    def check(self) -> None:
        if not all(not parameter.is_meta for parameter in self._model.parameters()):
            raise RuntimeError("weights are missing")

    def clear(self) -> None:
        """Nothing is let go: `attach` is looked at afterwards."""

    def _restore(self) -> dict[str, Any]:
        """Mapping and restore of the prepared plan. What the turn before restored is let go off the clock."""
        samples = []
        for _ in range(_MANY):
            self._planning.blank(self._plan)
            started_ns = time.perf_counter_ns()
            mapped = self._mapping.Mapping(self._folder, self._manifest)
            self._planning.restore(self._plan, mapped)
            samples.append((time.perf_counter_ns() - started_ns) / 1e9)
            del mapped
        return {"seconds": median(samples)}

    def _whole(self) -> dict[str, Any]:
        """With everything that can be prepared: manifest read, skeleton made, plan made."""
        samples = []
        for _ in range(3):
            started_ns = time.perf_counter_ns()
            manifest = Manifest.read(self._folder)
            model = self._skeleton(self._shape)
            plan = self._planning.make_plan(model, manifest)
            self._planning.restore(plan, self._mapping.Mapping(self._folder, manifest))
            samples.append((time.perf_counter_ns() - started_ns) / 1e9)
        return {"seconds": median(samples)}

    def _bare(self) -> dict[str, Any]:
        """The floor: map the file and parse its header."""
        path = self._folder / checkpoint.SAFETENSORS
        return {"seconds": median([map_and_parse_ms(path) for _ in range(_MANY)]) / 1e3}

    def _safe_open(self) -> dict[str, Any]:
        """The same as `bare`, by the safetensors library."""
        path, samples = self._folder / checkpoint.SAFETENSORS, []
        for _ in range(_MANY):
            started_ns = time.perf_counter_ns()
            with self._open(path, "pt"):
                samples.append((time.perf_counter_ns() - started_ns) / 1e9)
        return {"seconds": median(samples)}

    def _torch_load(self) -> dict[str, Any]:
        started_ns = time.perf_counter_ns()
        state = self._torch.load(self._folder / checkpoint.TORCH, weights_only=True)
        seconds = (time.perf_counter_ns() - started_ns) / 1e9
        del state
        return {"seconds": seconds}

    def _attach(self) -> dict[str, Any]:
        """Restore, then read every page; USS before and after both, and the mapping's lines of smaps."""
        self._planning.blank(self._plan)
        before = _uss()
        started_ns = time.perf_counter_ns()
        self._held = self._mapping.Mapping(self._folder, self._manifest)
        self._planning.restore(self._plan, self._held)
        seconds = (time.perf_counter_ns() - started_ns) / 1e9
        after = _uss()
        for parameter in self._model.parameters():
            parameter.detach().view(self._torch.int16).flatten()[::2048].sum().item()
        return {
            "seconds": seconds,
            "own_kb": (after - before) / 1024,
            "own_read_kb": (_uss() - before) / 1024,
            "smaps": _smaps(checkpoint.SAFETENSORS),
        }


def _uss() -> int:
    return int(psutil.Process().memory_full_info().uss)


def _smaps(suffix: str) -> dict[str, int]:
    """kB of all mappings of files that end so, summed."""
    found, ours = dict.fromkeys(_OF_MAPPING, 0), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.partition(" ")[0]:
            ours = line.endswith(suffix)
        elif ours and (field := line.partition(":")[0]) in found:
            found[field] += int(line.split()[1])
    return found


def measure(report: Report, data: checkpoint.Checkpoint, rounds: int) -> None:
    """Enters restore_vs_mmap, restore_vs_torch_load and what a second process holds."""
    given: dict[str, Any] = {"folder": str(data.folder), "shape": data.shape.name}
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(Lane(name, "local:Local", **given)) for name in ("first", "second")
        )
        first.wait_ready()
        second.wait_ready()
        ways = ["bare", "restore", "safe_open", "whole", "torch_load"]
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        first.turn(what="bare")
        for number in range(rounds):
            for way in ways if number % 2 == 0 else ways[::-1]:
                seconds[way].append(first.turn(what=way, check=way == "restore")["seconds"])
            print(f"  round {number + 1}, ms: " + _shown(seconds), flush=True)
        holder, attached = first.turn(what="attach"), second.turn(what="attach")
    _enter(report, seconds)
    _enter_attached(report, holder, attached)


def _shown(seconds: dict[str, list[float]]) -> str:
    return ", ".join(f"{way} {figures[-1] * 1e3:.3g}" for way, figures in seconds.items())


def _enter(report: Report, seconds: dict[str, list[float]]) -> None:
    def ratio(one: str, other: str) -> float:
        pairs = zip(seconds[one], seconds[other], strict=True)
        return median([over / under for over, under in pairs])

    report.add("restore_vs_mmap", ratio("restore", "bare"), "x", "<= 2")
    report.add("restore_vs_safe_open", ratio("restore", "safe_open"), "x")
    report.add("restore_vs_torch_load", ratio("torch_load", "restore"), "x", ">= 100")
    report.add("restore_whole_vs_torch_load", ratio("torch_load", "whole"), "x")
    names = {
        "bare": "mmap_parse_ms",
        "restore": "restore_ms",
        "whole": "restore_whole_ms",
        "safe_open": "safe_open_ms",
    }
    for way, name in {**names, "torch_load": "torch_load_ms"}.items():
        report.add(name, median(seconds[way]) * 1e3, "ms")


def _enter_attached(report: Report, holder: dict[str, Any], attached: dict[str, Any]) -> None:
    table = Table(title="smaps of the weights' mapping, kB", title_justify="left")
    table.add_column("process")
    for field in _OF_MAPPING:
        table.add_column(field, justify="right")
    for name, told in (("first", holder), ("second", attached)):
        table.add_row(name, *(f"{told['smaps'][field]:,}" for field in _OF_MAPPING))
        report.row(group="attach", process=name, own_kb=told["own_kb"], **told["smaps"])
    Console(width=110).print(table)
    report.add("attach_private_dirty_kb", attached["smaps"]["Private_Dirty"], "kB", "== 0")
    report.add("attach_own_kb", attached["own_kb"], "kB", "<= 1024")
    report.add("attach_own_read_kb", attached["own_read_kb"], "kB", "<= 1024")
    report.note(
        "attach_own_read_kb: own memory (USS) of a second process after it read a value of every page, too"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Local restore and a second process.")
    parser.add_argument("--quick", action="store_true", help="100 MB and 2 rounds")
    parser.add_argument("--rounds", type=int)
    arguments = parser.parse_args()
    data = checkpoint.checkpoint(checkpoint.QUICK if arguments.quick else checkpoint.FULL)
    report = Report("bench-snapshot-local", packages=("torch",))
    measure(report, data, arguments.rounds or (2 if arguments.quick else 5))
    return 0 if report.finish() else 1


if __name__ == "__main__":
    sys.exit(main())
