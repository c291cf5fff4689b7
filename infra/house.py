"""Measure the source tree: boxes, floors and arrows, lines, cycles, repeated names of types, small modules, function lengths.

    python infra/house.py [--json]

`tests/test_house.py` holds these figures to their limits.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("handlers", "runtime", "snapshot")
OPEN_ROOMS = ("runtime.plugins.", "runtime.node.scaling.")
SMALL_LINES = 70
CAMEL_CASE = re.compile(r"_?[A-Z]\w*[a-z]\w*")
# The folders of `runtime` with rooms inside.
WINGS = ("front", "command", "jobs", "node", "calls", "ground")


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a tree.

    Boxes are the wings and the other parts of `runtime`, the packages beside it, and the files of the root. A box stands one floor
    above the highest box that it imports. An arrow is a pair of boxes. The first box imports the second one, also if only in a function or under TYPE_CHECKING.
    `load_cycles` are groups of modules that import each other when they are loaded. `import_cycles` count imports in functions
    and under TYPE_CHECKING, too. `small_modules` are under 70 lines and
    imported by exactly one other module. In OPEN_ROOMS each addition is a module of its own, so the modules there do not count.
    """

    boxes: int
    floors: int
    arrows: int
    lines: int
    files: int
    loose_modules: list[str]
    package_cycles: list[list[str]]
    load_cycles: list[list[str]]
    import_cycles: list[list[str]]
    repeated_types: dict[str, list[str]]
    small_modules: list[str]
    function_lines_median: float
    function_lines_p90: float
    function_lines_max: int


class House:
    """The modules below `root`, by dotted name without the distribution's: `runtime.node.reconciling.pool`."""

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        found = [path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))]
        loose = [path for path in sorted(root.glob("*.py")) if path.name != "__init__.py"]
        self.paths = {_dotted(path.relative_to(root)): path for path in [*found, *loose]}

    @cached_property
    def trees(self) -> dict[str, ast.Module]:
        """The syntax tree of each module."""
        return {name: ast.parse(path.read_text()) for name, path in self.paths.items()}

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """The modules of this tree that each module imports, inside functions too."""
        return {name: set(self._imported(name)) for name in self.paths}

    def figures(self) -> Figures:
        """Measure everything."""
        lengths = sorted(self._function_lengths())
        boxes = self.imports_between(box_of)
        return Figures(
            boxes=len(boxes),
            floors=_floors(boxes),
            arrows=sum(map(len, boxes.values())),
            lines=sum(self._line_count(name) for name in self.paths),
            files=len(self.paths),
            loose_modules=sorted(
                name for name in self.paths if name.startswith("runtime.") and self._is_loose(name)
            ),
            package_cycles=_cycles(self._package_imports()),
            load_cycles=_cycles({name: set(self._imported(name, at_load=True)) for name in self.paths}),
            import_cycles=_cycles({name: set(self._imported(name, at_load=False)) for name in self.paths}),
            repeated_types=self._repeated_types(),
            small_modules=self._small_modules(),
            function_lines_median=statistics.median(lengths),
            function_lines_p90=lengths[int(len(lengths) * 0.9)],
            function_lines_max=lengths[-1],
        )

    def _is_package(self, name: str) -> bool:
        return self.paths[name].name == "__init__.py"

    def _is_loose(self, name: str) -> bool:
        return name.count(".") == 1 and not self._is_package(name)

    def _line_count(self, name: str) -> int:
        return len(self.paths[name].read_text().splitlines())

    def _imported(self, name: str, *, at_load: bool = False) -> Iterator[str]:
        package = name.split(".") if self._is_package(name) else name.split(".")[:-1]
        for node in (_run_at_load if at_load else ast.walk)(self.trees[name]):
            if not isinstance(node, ast.ImportFrom) or not node.level:
                continue
            base = package[: len(package) - node.level + 1] + (node.module.split(".") if node.module else [])
            for alias in node.names:
                inner = ".".join([*base, alias.name])
                target = inner if inner in self.paths else ".".join(base)
                if target in self.paths:
                    yield target

    def imports_between(self, part_of: Callable[[str], str | None]) -> dict[str, set[str]]:
        """Return which parts each part imports. `part_of` names the part of a module; None for a module of no part."""
        found: dict[str, set[str]] = {}
        for name, targets in self.imports.items():
            if (part := part_of(name)) is not None:
                others = {other for target in targets if (other := part_of(target)) is not None}
                found.setdefault(part, set()).update(others - {part})
        return found

    def _package_imports(self) -> dict[str, set[str]]:
        found: dict[str, set[str]] = defaultdict(set)
        for name, targets in self.imports.items():
            package = self._package_of(name)
            found[package] |= {self._package_of(target) for target in targets} - {package}
        return found

    def _package_of(self, name: str) -> str:
        """The module's package. In a package with subpackages, each loose module counts as a package of its own."""
        package = name if self._is_package(name) else name.rpartition(".")[0]
        return name if package in self._parents else package

    @cached_property
    def _parents(self) -> set[str]:
        return {name.rpartition(".")[0] for name in self.paths if self._is_package(name)}

    def _repeated_types(self) -> dict[str, list[str]]:
        modules: dict[str, list[str]] = defaultdict(list)
        for module, tree in self.trees.items():
            for name in sorted(types_of(tree)):
                modules[name].append(module)
        return {name: found for name, found in sorted(modules.items()) if len(found) > 1}

    def _small_modules(self) -> list[str]:
        importers: dict[str, set[str]] = defaultdict(set)
        for name, targets in self.imports.items():
            for target in targets - {name}:
                importers[target].add(name)
        return sorted(
            name
            for name, found in importers.items()
            if len(found) == 1
            and not self._is_package(name)
            and not name.startswith(OPEN_ROOMS)
            and self._line_count(name) < SMALL_LINES
        )

    def _function_lengths(self) -> Iterator[int]:
        for tree in self.trees.values():
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield (node.end_lineno or node.lineno) - node.lineno + 1


def types_of(tree: ast.Module) -> set[str]:
    """Return the names of a module's classes, also inside functions, and of its aliases, NewTypes and other types.

    By convention, the name of a type is in CamelCase, and the name of a constant is not.
    """
    found = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    bodies = [
        tree.body,
        *(part for node in tree.body if isinstance(node, ast.If) for part in (node.body, node.orelse)),
    ]
    for node in (node for body in bodies for node in body if isinstance(node, ast.Assign | ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = (target.id for target in targets if isinstance(target, ast.Name))
        found.update(name for name in names if CAMEL_CASE.fullmatch(name))
    return found


def box_of(name: str) -> str | None:
    """Return the box of a module: `front`, `plugins`, `handlers`, `errors`. The root of `runtime` has none."""
    first, *rest = name.split(".")
    return (rest[0] if rest else None) if first == "runtime" else first


def room_of(name: str, wing: str) -> str | None:
    """Return the room of a module in a wing of `runtime`. None for a module outside."""
    prefix = f"runtime.{wing}."
    return name.removeprefix(prefix).partition(".")[0] if name.startswith(prefix) else None


def _floors(imports: dict[str, set[str]]) -> int:
    """Return the number of boxes on the longest way along the arrows. An arrow that closes a circle does not count."""
    floors: dict[str, int] = {}

    def floor(box: str) -> int:
        if box not in floors:
            floors[box] = 0
            floors[box] = 1 + max(map(floor, imports.get(box, ())), default=0)
        return floors[box]

    return max(map(floor, imports))


def _run_at_load(node: ast.AST) -> Iterator[ast.AST]:
    """Walk the code that runs when a module is loaded: no bodies of functions, no code for type checkers alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        yield child
        yield from _run_at_load(child)


def _dotted(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of nodes that can reach each other, by Kosaraju's algorithm."""
    order: list[str] = []
    seen: set[str] = set()

    def visit(node: str, edges: dict[str, set[str]], out: list[str]) -> None:
        seen.add(node)
        for target in sorted(edges.get(node, ())):
            if target not in seen:
                visit(target, edges, out)
        out.append(node)

    for node in sorted(graph):
        if node not in seen:
            visit(node, graph, order)
    reverse: dict[str, set[str]] = defaultdict(set)
    for node, targets in graph.items():
        for target in targets:
            reverse[target].add(node)
    seen.clear()
    groups: list[list[str]] = []
    for node in reversed(order):
        if node not in seen:
            group: list[str] = []
            visit(node, reverse, group)
            groups.append(sorted(group))
    return sorted(group for group in groups if len(group) > 1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    figures = asdict(House().figures())
    if arguments.json:
        json.dump(figures, sys.stdout, indent=2)
        return
    for name, value in figures.items():
        shown = f"{len(value)}: {value}" if isinstance(value, list | dict) else value
        print(f"{name:24} {shown}")


if __name__ == "__main__":
    main()
