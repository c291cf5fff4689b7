"""The soak of jobs, short: ten kills at random moments lose nothing. `make soak PART=jobs` does five hundred."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


async def test_ten_kills_lose_no_job():
    process = await asyncio.create_subprocess_exec(
        sys.executable, "infra/bench/soak_jobs.py", "--kills", "10", "--report", "soak-jobs-test",
        cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()
    found = json.loads((ROOT / "build" / "bench" / "soak-jobs-test.json").read_text())
    assert found["figures"]["kills"] >= 10
    assert set(found["met"]) >= {
        "not_ended",
        "wrong_output",
        "broken_promises",
        "webhooks_missing",
        "left_processes",
    }
    assert all(found["met"].values())
