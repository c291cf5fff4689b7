"""Writes the public names of torch.cuda and torch.accelerator in wheels of torch, with the parameters of each.

    pip download --no-deps --only-binary=:all: -d WHEELS torch==2.11.0    # and the others, for any platform
    python infra/torch_names.py WHEELS/*.whl

The files are parsed and not run. The result is tests/torch_names/VERSION.json, which the tests compare the code with.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from zipfile import Path as ZipPath
from zipfile import ZipFile

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "torch_names"
PACKAGES = ("torch.cuda", "torch.accelerator")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("wheels", nargs="+", type=Path)
    for wheel in parser.parse_args().wheels:
        version = re.match(r"torch-(\d+\.\d+)", wheel.name)
        if version is None:
            sys.exit(f"{wheel.name} is no wheel of torch.")
        with ZipFile(wheel) as archive:
            found = {package: names_of(ZipPath(archive), package) for package in PACKAGES}
        FOLDER.mkdir(exist_ok=True)
        text = json.dumps(found, indent=0, sort_keys=True)
        (FOLDER / f"{version[1]}.json").write_text(f"{text}\n")


def names_of(root: ZipPath, package: str) -> dict[str, str]:
    """Return the public names of a package and of its classes, each with its parameters; "" if Python has none."""
    folder = root.joinpath(*package.split("."))
    found = names_in(parsed(folder / "__init__.py"), imported=True)
    for node in statements(parsed(folder / "__init__.py").body):
        if (
            isinstance(node, ast.ImportFrom)
            and (source := module_of(node, package))
            and (folder / source).exists()
        ):
            there = names_in(parsed(folder / source))
            imported = {alias.name: alias.asname or alias.name for alias in node.names}
            for name, parameters in there.items():
                first, dot, rest = name.partition(".")
                if first in imported or "*" in imported:
                    # The definition in the package itself takes precedence.
                    here = imported.get(first, first) + dot + rest
                    found[here] = found.get(here) or parameters
    return {name: parameters for name, parameters in found.items() if name[0].isalpha()}


def module_of(node: ast.ImportFrom, package: str) -> str | None:
    """Return the file of a module of the package from which names are imported; None for other modules."""
    if node.level == 1 and node.module:
        return f"{node.module}.py"
    if node.level == 0 and (node.module or "").startswith(f"{package}."):
        return f"{(node.module or '').removeprefix(f'{package}.')}.py"
    return None


def names_in(tree: ast.Module, *, imported: bool = False) -> dict[str, str]:
    found: dict[str, str] = {}
    for node in statements(tree.body):
        if isinstance(node, ast.FunctionDef):
            found[node.name] = parameters_of(node)
        elif isinstance(node, ast.ClassDef):
            found |= names_in_class(node)
        elif imported and isinstance(node, ast.ImportFrom) and (node.level or "torch" in str(node.module)):
            for alias in node.names:
                found.setdefault(alias.asname or alias.name, "")
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, "")
    return found


def names_in_class(node: ast.ClassDef) -> dict[str, str]:
    methods = [one for one in statements(node.body) if isinstance(one, ast.FunctionDef)]
    made = [parameters_of(one) for one in methods if one.name in {"__new__", "__init__"}]
    public = {
        f"{node.name}.{one.name}": parameters_of(one) for one in methods if not one.name.startswith("_")
    }
    return {node.name: made[0] if made else ""} | public


def statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a body that run, also those below `if` and `try`."""
    for node in body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from statements([*node.body, *node.orelse])
            yield from statements(one for handler in getattr(node, "handlers", ()) for one in handler.body)


def parameters_of(node: ast.FunctionDef) -> str:
    """Return the parameters of a function with their defaults, without annotations, in brackets."""
    parameters = node.args
    for one in ast.walk(parameters):
        if isinstance(one, ast.arg):
            one.annotation = None
    return f"({ast.unparse(parameters)})"


def parsed(path: ZipPath) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


if __name__ == "__main__":
    main()
