"""infra/weight.py: what counts as a line of code, and the limits of the tree."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "infra"))

import weight

MODULE = '''"""A docstring.

Of three lines."""

# A comment.
import os  # beside code

FIELD: int = 3


def add(first: int, second: int) -> str:
    """A docstring."""
    text = """two
    lines"""
    return text if first else (
        # A comment inside an expression.
        "one"
    )
'''


def test_each_file_counts_in_its_figure() -> None:
    methods = "\n".join(f"    def m{number}(self): ..." for number in range(weight.LARGE_METHODS + 1))
    found = weight.weigh(
        {
            "runtime/front/api/__init__.py": '"""Only a docstring."""\n',
            "runtime/front/api/routes.py": MODULE,
            "runtime/plugins/cog/routes.py": f"one = 1  # fmt: skip\nclass Large:\n{methods}\n",
            "runtime/front/pages/main.js": "one\n\ntwo\n",
            "tests/test_one.py": "three = 3\n",
            "infra/pages.py": "one = 1\ntwo = 2\n",
            "Makefile": "all: ## Everything\n\ttrue\n.venv/uv:\n",
            "docs/settings.md": "| name |\n| `one` | two |\n",
            "CHANGELOG.md": "one two three",
            "templates/basic/handler.py": "one = 1\n",
        }.items()
    )
    assert found == {
        "product": 8,
        "plugins": 2 + weight.LARGE_METHODS + 1,
        "tests": 1,
        "infra": 2,
        "product's sql, js, html, css": 2,
        "large classes": 1,
        "settings": 1,
        "make targets": 1,
        "fmt: skip": 1,
        "words of docs": 8,
        "words of CHANGELOG": 3,
    }
    assert "+6" in weight.table(found, {**found, "product": 2})


@pytest.fixture(scope="module")
def tree() -> dict[str, int]:
    return weight.weigh((path, text) for path, text in weight.present() if not path.startswith("tests/"))


@pytest.mark.parametrize("figure", weight.LIMITS)
def test_the_tree_stays_within_its_limits(tree: dict[str, int], figure: str) -> None:
    assert tree[figure] <= weight.LIMITS[figure], (
        f"{figure}: remove something, or state a new limit in infra/weight.py"
    )
