"""A report: the figures of one benchmark and what they are to be; a table, and build/bench/<target>.json."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import operator
import os
import platform
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

_ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("pilotflame", "aiohttp", "uvloop")
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}


@dataclass(frozen=True)
class Figure:
    """One figure, and the bound it is held to."""

    name: str
    value: float
    unit: str = ""
    target: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the target holds; None without a target. Not-a-number meets no target."""
        if not self.target:
            return None
        sign, _, bound = self.target.partition(" ")
        return _COMPARE[sign](self.value, float(bound))


class Report:
    """Collects figures and rows; `finish` prints and writes them and says whether all targets are met."""

    def __init__(self, target: str, *, packages: tuple[str, ...] = ()) -> None:
        self.target = target
        self._packages = (*_PACKAGES, *packages)
        self._figures: dict[str, Figure] = {}
        self._rows: list[dict[str, Any]] = []
        self._notes: list[str] = []
        self._failures: list[str] = []
        self._load_at_start = os.getloadavg()
        self._started = datetime.datetime.now(datetime.UTC)

    def add(self, name: str, value: float, unit: str = "", target: str = "") -> None:
        """Enter a figure. `target` is such as "<= 3", or empty for a figure without a target."""
        sign, _, bound = target.partition(" ")
        if target and (sign not in _COMPARE or not _is_number(bound)):
            raise ValueError(f"{name}: a target is a sign and a number, such as '<= 3', not {target!r}")
        if name in self._figures:
            raise ValueError(f"{name} is entered twice")
        self._figures[name] = Figure(name, float(value), unit, target)

    def row(self, **cells: Any) -> None:
        """Enter a detail: what a figure was made of."""
        self._rows.append(cells)

    def note(self, text: str) -> None:
        """Enter a sentence that a reader of the figures must know."""
        self._notes.append(text)

    @property
    def values(self) -> dict[str, float]:
        """Each figure's value."""
        return {name: figure.value for name, figure in self._figures.items()}

    @property
    def met(self) -> bool:
        return not self.shortfalls

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Run a part of the benchmark. If it fails, `finish` reports the failure, and the other parts go on."""
        print(f"{name} …", flush=True)
        try:
            yield
        except Exception as error:  # noqa: BLE001  it is told at the end
            traceback.print_exc()
            self.fail(f"{name} failed: {type(error).__name__}: {str(error)[-600:]}")

    def fail(self, text: str) -> None:
        """Enter a sentence on what went wrong. The figures count as not met."""
        self._failures.append(text)

    def finish(self) -> bool:
        """Print and write all figures, list the figures that fell short, and return whether all targets were met."""
        self._print()
        path = self.write()
        print(f"written: {path.relative_to(_ROOT)}")
        for text in self.shortfalls:
            print(f"fell short: {text}")
        return self.met

    @property
    def shortfalls(self) -> list[str]:
        """A line for each figure that misses its target, and for each part that failed."""
        missed = [figure for figure in self._figures.values() if figure.met is False]
        told = [f"{one.name} is {_short(one.value)} {one.unit}, target {one.target}" for one in missed]
        return [*told, *self._failures]

    def write(self) -> Path:
        """Write build/bench/<target>.json."""
        path = path_of(self.target)
        path.parent.mkdir(parents=True, exist_ok=True)
        # A process that is killed leaves no half report.
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(self._content(), indent=2, default=str) + "\n")
        partial.replace(path)
        return path

    def include(self, path: Path) -> None:
        """Enter the figures, rows, notes and failures that another report wrote to `path`."""
        found = json.loads(path.read_text())
        for name, value in found["figures"].items():
            self.add(name, value, found["units"][name], found["targets"].get(name, ""))
        self._rows += found["rows"]
        self._notes += [note for note in found["notes"] if note not in self._notes]
        self._failures += found["failures"]

    def _content(self) -> dict[str, Any]:
        figures = self._figures.values()
        return {
            "target": self.target,
            "figures": self.values,
            "units": {figure.name: figure.unit for figure in figures},
            "targets": {figure.name: figure.target for figure in figures if figure.target},
            "met": {figure.name: figure.met for figure in figures if figure.target},
            "versions": self._versions(),
            "load_average": {"start": self._load_at_start, "end": os.getloadavg()},
            "cpus": len(os.sched_getaffinity(0)),
            "cpu": _cpu_name(),
            "date": self._started.isoformat(timespec="seconds"),
            "seconds": (datetime.datetime.now(datetime.UTC) - self._started).total_seconds(),
            "notes": self._notes,
            "fell_short": self.shortfalls,
            "failures": self._failures,
            "rows": self._rows,
        }

    def _versions(self) -> dict[str, str]:
        versions = {"python": platform.python_version(), "kernel": platform.release()}
        for package in self._packages:
            try:
                versions[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                versions[package] = "not installed"
        return versions

    def _print(self) -> None:
        table = Table(title=self.target, title_justify="left")
        table.add_column("figure")
        table.add_column("value", justify="right")
        table.add_column("target", justify="right")
        table.add_column("met")
        words = {True: "[green]yes[/]", False: "[red]NO[/]", None: ""}
        for figure in self._figures.values():
            table.add_row(
                figure.name, f"{_short(figure.value)} {figure.unit}".strip(), figure.target, words[figure.met]
            )
        console = Console()
        console.print(table)
        for note in self._notes:
            console.print(f"  {note}", highlight=False, markup=False)


def path_of(target: str) -> Path:
    """Return where the report of a target is written."""
    return _ROOT / "build" / "bench" / f"{target}.json"


def _short(value: float) -> str:
    """Four significant digits; whole numbers from a thousand on."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def copy_figure(name: str, source: str, target: str) -> None:
    """Enter a figure of one target's last report into another's, if both were written."""
    paths = [path_of(one) for one in (source, target)]
    if not all(path.exists() for path in paths):
        return
    found, content = (json.loads(path.read_text()) for path in paths)
    if name not in found["figures"]:
        return
    for part in ("figures", "units", "targets", "met"):
        content[part][name] = found[part].get(name)
    content["notes"].append(f"{name}: {source} of {found['date']}")
    paths[1].write_text(json.dumps(content, indent=2) + "\n")
