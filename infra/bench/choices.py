"""Puts the measured tables into docs/snapshot-choices.md, between its marks.

python infra/bench/hashes.py; python infra/bench/destinations.py; python infra/bench/clients.py
python infra/bench/choices.py
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

import checkpoint

PAGE = Path(__file__).resolve().parents[2] / "docs" / "snapshot-choices.md"
_RESULTS = checkpoint.DATA.parent
_HEADS = {
    "contestant": "",
    "gb_s": "GB/s",
    "of_ceiling": "of the ceiling",
    "worst_gb_s": "worst",
    "best_gb_s": "best",
    "hash": "digest",
    "hot_gb_s": "GB/s, 512 KiB just received",
    "cold_gb_s": "GB/s, 8 MiB from memory",
}


def main() -> int:
    clients = _read("clients")
    tables = {
        "clients": _table(clients["plain"]),
        "tls": _table(clients["tls"]),
        "destinations": _table(_read("destinations")),
        "hashes": _table(_read("hashes")),
        "machine": f"{_cpu()}, {len(clients['plain'][0]['seconds'])} rounds, kernel {platform.release()}.",
    }
    text = PAGE.read_text()
    for name, table in tables.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not pattern.search(text):
            print(f"{PAGE.name} has no place marked {name}")
            return 1
        text = pattern.sub(lambda found, table=table: f"{found[1]}{table}\n{found[2]}", text)  # type: ignore[misc]
    PAGE.write_text(text)
    return 0


def _table(rows: list[dict[str, Any]]) -> str:
    shown = [row for row in rows if "failed" not in row]
    columns = [column for column in shown[0] if column != "seconds"]
    lines = ["| " + " | ".join(_HEADS.get(column, column) for column in columns) + " |"]
    lines.append("|---|" + "---:|" * (len(columns) - 1))
    for row in shown:
        cells = [
            f"{row[column]:.2f}" if isinstance(row[column], float) else str(row[column]) for column in columns
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [f"\nOut, for it failed: {row['contestant']}." for row in rows if "failed" in row]
    return "\n".join(lines)


def _read(name: str) -> Any:
    return json.loads((_RESULTS / f"{name}.json").read_text())


def _cpu() -> str:

    cpus = len(os.sched_getaffinity(0))
    found = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return f"{cpus} cores of {found[1] if found else platform.processor()}"


if __name__ == "__main__":
    sys.exit(main())
