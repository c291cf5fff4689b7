"""The soak, short: fifty activations in a row leave nothing behind. `make soak` does a thousand."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


async def test_fifty_activations_leave_nothing():
    process = await asyncio.create_subprocess_exec(
        sys.executable, "infra/bench/soak.py", "--activations", "50", "--report", "soak-test",
        cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()
    found = json.loads((ROOT / "build" / "bench" / "soak-test.json").read_text())
    assert found["figures"]["activations"] == 50
    assert set(found["met"]) >= {"leaked_processes", "leaked_descriptors", "leaked_threads", "leaked_files"}
    assert all(found["met"].values())
