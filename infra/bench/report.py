"""A report: the figures of one benchmark and their targets, as a table, as JSON, and in build/bench/<name>.json."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import operator
import os
import platform
import sys
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
    """One figure and its target."""

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

    def __init__(self, name: str, *, packages: tuple[str, ...] = ()) -> None:
        self.name = name
        self._packages = (*_PACKAGES, *packages)
        self._figures: dict[str, Figure] = {}
        self._rows: list[dict[str, Any]] = []
        self._notes: list[str] = []
        self._failures: list[str] = []
        self._started = datetime.datetime.now(datetime.UTC)

    def add(self, name: str, value: float, unit: str = "", target: str = "") -> None:
        """Enter a figure. `target` is such as "<= 3", or empty for a figure without a target."""
        if name in self._figures:
            raise ValueError(f"{name} is entered twice")
        self._figures[name] = Figure(name, float(value), unit, target)

    def row(self, **cells: Any) -> None:
        """Enter a detail that a figure was computed from. Only the file and --json have it."""
        self._rows.append(cells)

    def note(self, text: str) -> None:
        """Enter a sentence that a reader of the figures needs."""
        self._notes.append(text)

    @property
    def values(self) -> dict[str, float]:
        """Each figure's value."""
        return {name: figure.value for name, figure in self._figures.items()}

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Run a part of the benchmark. If it raises, the other parts still run, and `finish` reports the error."""
        print(f"{name} …", file=sys.stderr, flush=True)
        try:
            yield
        except Exception as error:  # noqa: BLE001  reported at the end
            traceback.print_exc()
            self.fail(f"{name} failed: {type(error).__name__}: {str(error)[-600:]}")

    def fail(self, text: str) -> None:
        """Enter an error. The exit code is then 1."""
        self._failures.append(text)

    def finish(self, options: argparse.Namespace) -> int:
        """Write and print all figures. Return the exit code: 1 if a target is missed or a part failed, else 0."""
        path = self.write()
        if options.json:
            print(path.read_text(), end="")
            return int(bool(self.shortfalls))
        self._print()
        print(f"written: {path.relative_to(_ROOT)}")
        for text in self.shortfalls:
            print(f"fell short: {text}")
        return int(bool(self.shortfalls))

    @property
    def shortfalls(self) -> list[str]:
        """A line for each figure that misses its target, and for each part that failed."""
        missed = [figure for figure in self._figures.values() if figure.met is False]
        lines = [f"{one.name} is {_short(one.value)} {one.unit}, target {one.target}" for one in missed]
        return [*lines, *self._failures]

    def write(self) -> Path:
        """Write build/bench/<name>.json."""
        path = path_of(self.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Write another file first, so that a process that is killed leaves no truncated report.
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(self._content(), indent=2, default=str) + "\n")
        partial.replace(path)
        return path

    def _content(self) -> dict[str, Any]:
        figures = self._figures.values()
        return {
            "name": self.name,
            "figures": self.values,
            "units": {figure.name: figure.unit for figure in figures},
            "targets": {figure.name: figure.target for figure in figures if figure.target},
            "met": {figure.name: figure.met for figure in figures if figure.target},
            "versions": self._versions(),
            "load_average": os.getloadavg(),
            "cpus": len(os.sched_getaffinity(0)),
            "cpu": _cpu_name(),
            "date": self._started.isoformat(timespec="seconds"),
            "seconds": (datetime.datetime.now(datetime.UTC) - self._started).total_seconds(),
            "notes": self._notes,
            "failures": self._failures,
            "rows": self._rows,
        }

    def _versions(self) -> dict[str, str]:
        versions = {"python": platform.python_version(), "kernel": platform.release()}
        for package in self._packages:
            # Some benchmarks run without some packages.
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                versions[package] = importlib.metadata.version(package)
        return versions

    def _print(self) -> None:
        table = Table(title=self.name, title_justify="left")
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


def path_of(name: str) -> Path:
    """Return the path of the report with this name."""
    return _ROOT / "build" / "bench" / f"{name}.json"


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks have."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--json", action="store_true", help="print the report as JSON")
    return made


def _short(value: float) -> str:
    """Return a number with four significant digits; from a thousand on, a whole number."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _cpu_name() -> str:
    return Path("/proc/cpuinfo").read_text().partition("model name\t: ")[2].partition("\n")[0]
