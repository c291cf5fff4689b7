"""Count the lines of code of each room, without docstrings, comments and blank lines: python infra/lines.py [ROOT] [--json].

A room is a folder of a wing (`runtime/front/api`), a plugin, or another folder at the second level, with the folders inside it.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("handlers", "runtime", "snapshot")
NO_CODE_TOKENS = {"COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER"}


def code_lines(source: str) -> int:
    """Return the number of lines of code in a module. A statement on three lines counts as three."""
    code = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if tokenize.tok_name[token.type] not in NO_CODE_TOKENS:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        # A string alone is the docstring of a module, a class, a function or an attribute.
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and node.value.value is not ...
        ):
            code -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(code)


def rooms(root: Path = ROOT) -> dict[str, int]:
    """Return the lines of code of each room, and their sum as `total`."""
    counts = Counter[str]()
    for path in (path for package in PACKAGES for path in (root / package).rglob("*.py")):
        folders = path.relative_to(root).parts[:-1]
        counts["/".join(folders[: 3 if folders[0] == "runtime" else 2])] += code_lines(path.read_text())
    return {**dict(sorted(counts.items())), "total": counts.total()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the lines of code of each room.")
    parser.add_argument(
        "root", nargs="?", type=Path, default=ROOT, help="the source tree (default: this one)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    found = rooms(options.root)
    print(
        json.dumps(found) if options.json else "\n".join(f"{count:6} {room}" for room, count in found.items())
    )


if __name__ == "__main__":
    main()
