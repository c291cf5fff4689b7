"""infra/lines.py: what counts as a line of code, and which files belong to which room."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "infra" / "lines.py"
MODULE = '''"""A docstring.

Of three lines."""

# A comment.
import os  # beside code

FIELD: int = 3
"""What the field is."""


def add(first: int, second: int) -> str:
    """A docstring."""
    text = """two
    lines"""
    return text if first else (
        # A comment inside an expression.
        "one"
    )
'''


def test_docstrings_comments_and_blank_lines_do_not_count(tmp_path: Path) -> None:
    for name, text in {
        "runtime/cli.py": "import os\n",
        "runtime/front/api/__init__.py": '"""Only a docstring."""\n',
        "runtime/front/api/routes.py": MODULE,
        "runtime/plugins/cog/routes.py": "one = 1\n",
        "snapshot/restoring/device/cuda.py": "one = 1\ntwo = 2\n",
        "tests/test_one.py": "three = 3\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    command = [sys.executable, SCRIPT, tmp_path]
    found = json.loads(subprocess.check_output([*command, "--json"]))
    assert found == {
        "runtime": 1,
        "runtime/front/api": 8,
        "runtime/plugins/cog": 1,
        "snapshot/restoring": 2,
        "total": 12,
    }
    table = subprocess.check_output(command, text=True).split()
    assert dict(zip(table[1::2], map(int, table[::2]), strict=True)) == found
