"""The gateway against its OpenAPI document: generated requests to every operation, each response as described.

`make check-api` makes thousands of requests; this test makes only the requests that fit into its time.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("schemathesis")
CHECK = Path(__file__).parents[4] / "infra" / "bench" / "schema.py"


@pytest.mark.timeout(300)
def test_every_response_is_as_described() -> None:
    arguments = ["--examples", "3", "--phases", "fuzzing", "--least", "280"]
    done = subprocess.run(
        [sys.executable, CHECK, *arguments], capture_output=True, text=True, timeout=290, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert re.search(r"^\d+ requests \(200: \d+", done.stdout, re.MULTILINE)
