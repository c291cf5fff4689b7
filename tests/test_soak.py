"""The soaks, short: fifty activations, also in containers, and some hours of traffic leave nothing behind.

`make soak` does a thousand activations, `make soak PART=containers` five hundred, `make soak PART=gateway` 24 hours.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from containers import require_podman

ROOT = Path(__file__).resolve().parent.parent


async def soaked(script: str, report: str, *arguments: str) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, f"infra/bench/{script}.py", *arguments, "--report", report,
        cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()
    found: dict[str, Any] = json.loads((ROOT / "build" / "bench" / f"{report}.json").read_text())
    assert all(found["met"].values())
    return found


async def test_fifty_activations_leave_nothing():
    found = await soaked("soak_activations", "soak-test", "--activations", "50")
    assert found["figures"]["activations"] == 50
    assert set(found["met"]) >= {"leaked_processes", "leaked_descriptors", "leaked_threads", "leaked_files"}


@pytest.mark.timeout(300)
async def test_fifty_activations_in_containers_leave_nothing():
    require_podman()
    found = await soaked("soak_containers", "soak-containers-test", "--activations", "50")
    assert found["figures"]["activations"] == 50
    assert found["figures"]["containers_seen"] >= 2
    assert set(found["met"]) >= {
        "containers_after_stop", "mounts_after_stop", "cgroups_after_stop", "processes_after_stop",
        "leaked_descriptors", "leaked_threads",
    }  # fmt: skip


async def test_hours_of_traffic_leave_nothing():
    amounts = ("--hours", "4", "--jobs", "60", "--leavers", "20", "--deploys", "30")
    found = await soaked("soak_gateway", "soak-gateway-test", *amounts)
    assert found["figures"]["hours"] == 4
    assert set(found["met"]) >= {
        "grown_processes",
        "grown_descriptors",
        "grown_threads",
        "timers",
        "grown_objects",
    }


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_replacements_drop_no_long_call():
    amounts = (
        "--calls",
        "40",
        "--call-s",
        "4",
        "--concurrency",
        "10",
        "--deploys",
        "3",
        "--restarts",
        "1",
        "--drain-s",
        "2",
    )
    found = await soaked("soak_revisions", "soak-revisions-test", *amounts)
    assert set(found["met"]) == {"free_unanswered", "one_unanswered"}
    assert (found["figures"]["free_replacements"], found["figures"]["one_replacements"]) == (5, 5)
