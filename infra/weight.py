"""What the tree weighs: python infra/weight.py [--base REVISION] [--json].

Code lines are lines with code: no blank lines, comments or docstrings. Lines of SQL, JavaScript, HTML and CSS count apart, so
that a move of code into them shows. `tests/infra/test_weight.py` fails if a figure exceeds its limit in
`LIMITS`.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import subprocess
import tarfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LARGE_LINES, LARGE_METHODS = 250, 20
PACKAGES = ("handlers", "runtime", "snapshot")
NO_PRODUCT = ("tests", "infra", "templates")
PLUGINS = "runtime/plugins/"
SUFFIXES = (".py", ".sql", ".js", ".html", ".css", ".md", "Makefile")
LIMITS = {
    "product": 60_640,
    "infra": 8_840,
    "large classes": 10,
    "settings": 128,
    "make targets": 27,
    "words of docs": 47_350,
    "words of CHANGELOG": 800,
}
"""The limit of each figure. An issue that adds something states the new limit."""


def code_lines(text: str) -> int:
    """Return the number of code lines of a module. A statement on three lines counts as three."""
    lines = {
        number
        for number, line in enumerate(text.split("\n"), 1)
        if (found := line.strip()) and not found.startswith("#")
    }
    docstrings = set[int]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant | ast.JoinedStr):
            # In a string, blank lines and lines with `#` count, too.
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        elif isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                docstrings.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(lines - docstrings)


def large_classes(text: str) -> list[str]:
    """Return the names of the classes of a module that have too many lines or methods."""
    return [
        node.name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef)
        and (
            (node.end_lineno or node.lineno) - node.lineno + 1 > LARGE_LINES
            or sum(isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) for child in node.body)
            > LARGE_METHODS
        )
    ]


def rooms(root: Path = ROOT) -> dict[str, int]:
    """Return the code lines of each room: a folder of a wing, a plugin, or another folder at the second level."""
    counts = Counter[str]()
    for path in (path for package in PACKAGES for path in (root / package).rglob("*.py")):
        folders = path.relative_to(root).parts[:-1]
        counts["/".join(folders[: 3 if folders[0] == "runtime" else 2])] += code_lines(path.read_text())
    return dict(counts)


def weigh(files: Iterable[tuple[str, str]]) -> dict[str, int]:
    """Return each figure of a tree. `files` are pairs of a path and a text."""
    found = dict.fromkeys(
        ("product", "plugins", "tests", "infra", "product's sql, js, html, css", "large classes", "settings",
         "make targets", "fmt: skip", "words of docs", "words of CHANGELOG"), 0,
    )  # fmt: skip
    for path, text in files:
        folder = path.split("/")[0]
        in_product = folder not in NO_PRODUCT
        if path.endswith(".py"):
            part = "plugins" if path.startswith(PLUGINS) else "product" if in_product else folder
            if part in found:
                found[part] += code_lines(text)
                found["fmt: skip"] += text.count("# fmt: skip")
            if in_product:
                found["large classes"] += len(large_classes(text))
        elif path == "Makefile":
            found["make targets"] = len(re.findall(r"^[a-z-]+:.*## ", text, re.MULTILINE))
        elif path == "CHANGELOG.md":
            found["words of CHANGELOG"] = len(text.split())
        elif path.startswith("docs/") and path.endswith(".md"):
            found["words of docs"] += len(text.split())
            if path == "docs/settings.md":
                found["settings"] = len(re.findall(r"^\| `", text, re.MULTILINE))
        elif in_product and not path.endswith(".md"):
            found["product's sql, js, html, css"] += sum(bool(line.strip()) for line in text.splitlines())
    return found


def present(root: Path = ROOT) -> Iterable[tuple[str, str]]:
    """Yield the files of the working tree that git does not ignore."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root, capture_output=True, check=True,
    ).stdout.decode()  # fmt: skip
    for name in filter(None, names.split("\0")):
        if name.endswith(SUFFIXES) and (root / name).is_file():
            yield name, (root / name).read_text()


def committed(revision: str) -> Iterable[tuple[str, str]]:
    """Yield the files of a revision of git."""
    archive = subprocess.run(["git", "archive", revision], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        for member in files:
            if member.name.endswith(SUFFIXES) and (file := files.extractfile(member)) is not None:
                yield member.name, file.read().decode()


def table(now: Mapping[str, int], before: Mapping[str, int] | None) -> str:
    """Return one figure a line: now, the difference to before, and the limit."""
    lines = []
    for name, count in now.items():
        change = "" if before is None else f"{count - before[name]:+10,}"
        limit = f"   at most {LIMITS[name]:,}" if name in LIMITS else ""
        lines.append(f"{name:30}{count:10,}{change}{limit}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="What the tree weighs: lines, classes, settings, targets, words.")  # fmt: skip
    parser.add_argument("--base", metavar="REVISION", help="show the difference to this revision of git")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    now = weigh(present())
    before = weigh(committed(options.base)) if options.base else None
    print(json.dumps(now) if options.json else table(now, before))


if __name__ == "__main__":
    main()
