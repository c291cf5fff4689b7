"""The fault server of the tests as a process of its own, for grids and stragglers."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_SCRIPT = Path(__file__).resolve().parents[2] / "tests" / "fault_server.py"
_START_S = 20.0


@contextmanager
def start_faulty(folder: Path, faults: dict[str, Any] | None = None, bytes_s: float = 0) -> Iterator[str]:
    """Its URL. `faults` are the fields of the fault server's `Faults`; `bytes_s` holds all connections together."""
    process = subprocess.Popen(
        [sys.executable, str(_SCRIPT), str(folder), json.dumps(faults or {}), str(bytes_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        ready, _, _ = select.select([process.stdout], [], [], _START_S)
        url = process.stdout.readline().decode().strip() if ready else ""
        if not url:
            raise RuntimeError("the fault server did not start")
        yield url
    finally:
        process.stdin.close()  # it ends with its input
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
