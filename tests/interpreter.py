"""Runs short programs, each in a fresh interpreter."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any


def program(text: str, *arguments: str, cwd: Path | None = None) -> Any:
    """Run `text` in a fresh interpreter and return what it printed, as JSON."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(text), *arguments],
        capture_output=True, text=True, check=False, cwd=cwd, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
