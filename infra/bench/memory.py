"""What processes hold in memory: RSS, PSS and USS per pid, and of a whole tree.

USS is the memory that only this process holds (its end would free it). PSS adds the process's share of shared memory.
RSS counts shared pages once per process and so must not be summed.

    python infra/bench/memory.py PID
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import asdict, dataclass
from typing import Any

import process_tree
import psutil
from rich.console import Console
from rich.table import Table

_MB = 1e6


@dataclass(frozen=True)
class Holding:
    """One process and what it holds, in MB (10^6 bytes)."""

    pid: int
    parent: int
    name: str
    threads: int
    rss_mb: float
    uss_mb: float
    pss_mb: float

    def as_row(self) -> dict[str, Any]:
        return asdict(self)


def held(pid: int) -> Holding:
    """Return the memory that one process holds. Raise psutil.NoSuchProcess if it has ended."""
    process = psutil.Process(pid)
    with process.oneshot():
        memory = process.memory_full_info()
        command = process.cmdline()
        return Holding(
            pid=pid,
            parent=process.ppid(),
            name=_short(command) or process.name(),
            threads=process.num_threads(),
            rss_mb=memory.rss / _MB,
            uss_mb=memory.uss / _MB,
            pss_mb=memory.pss / _MB,
        )


def held_by_tree(pid: int) -> list[Holding]:
    """A row for the process and each of its descendants; those that end meanwhile are left out."""
    rows: list[Holding] = []
    for process in process_tree.tree(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            rows.append(held(process.pid))
    return rows


def total_pss_mb(rows: list[Holding]) -> float:
    """What the processes hold together, a page that they share counted once."""
    return sum(row.pss_mb for row in rows)


def total_uss_mb(rows: list[Holding]) -> float:
    return sum(row.uss_mb for row in rows)


def print_holdings(rows: list[Holding], title: str = "held") -> None:
    """The rows as a table with the totals that may be summed."""
    table = Table(title=title, title_justify="left")
    for column in ("pid", "parent", "process", "threads", "rss MB", "uss MB", "pss MB"):
        table.add_column(column, justify="left" if column == "process" else "right")
    for row in rows:
        sizes = [f"{size:.1f}" for size in (row.rss_mb, row.uss_mb, row.pss_mb)]
        table.add_row(str(row.pid), str(row.parent), row.name, str(row.threads), *sizes)
    table.add_row("", "", "together", "", "", f"{total_uss_mb(rows):.1f}", f"{total_pss_mb(rows):.1f}")
    Console().print(table)


def _short(command: list[str], width: int = 36) -> str:
    """The command line, paths without their folders."""
    text = " ".join(part.rpartition("/")[2] if part.startswith("/") else part for part in command)
    return text if len(text) <= width else text[: width - 1] + "…"


if __name__ == "__main__":
    print_holdings(held_by_tree(int(sys.argv[1])))
