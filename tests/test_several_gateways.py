"""Suites of foreign clients against three gateways behind a proxy (`round_robin.py`), each in a pytest of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import slow_suites

ROOT = Path(__file__).parents[1]
SUITES = ("runpod/test_routes.py", "replicate/test_pypi_client.py", "openai/test_routes.py")
"""Run the other suites by hand: PILOTFLAME_TEST_GATEWAYS=3 pytest tests/runtime/plugins/SUITE."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("suite", SUITES)
def test_suite(suite: str) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environ.pop(slow_suites.VARIABLE, None)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n0",
        "-p",
        "no:cacheprovider",
        f"tests/runtime/plugins/{suite}",
    ]
    ran = subprocess.run(
        command, cwd=ROOT, env=environ | {"PILOTFLAME_TEST_GATEWAYS": "3"}, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-20_000:]
