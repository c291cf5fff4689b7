"""Runs the tests of 32 architectures of language models with several versions of transformers.

    python infra/architectures.py [VERSION ...]

A version is installed into a folder of its own, which comes first on the path.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("4.57.6", "5.23.0", "5.24.0")
TESTS = (
    "tests/handlers/language_model/test_architectures.py",
    "tests/handlers/language_model/test_schedule.py",
)


def run(version: str) -> int:
    """Return the exit status of the tests with this version."""
    with tempfile.TemporaryDirectory(prefix="pf-transformers-") as folder:
        install = ["-m", "uv", "pip", "install", "--quiet", "--target", folder, f"transformers=={version}"]
        subprocess.run([sys.executable, *install], check=True)
        command = [sys.executable, "-m", "pytest", "-q", "-m", "slow", *TESTS]
        print(f"transformers {version}", flush=True)
        return subprocess.run(
            command, cwd=ROOT, env=os.environ | {"PYTHONPATH": folder}, check=False
        ).returncode


if __name__ == "__main__":
    sys.exit(max(run(version) for version in sys.argv[1:] or VERSIONS))
