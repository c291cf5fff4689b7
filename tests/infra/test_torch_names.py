"""Every name of torch.cuda and torch.accelerator that the package uses exists in each version of torch that it supports."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pilotflame.snapshot.restoring.device import cuda
from pilotflame.snapshot.restoring.device.device import OLDEST_TORCH

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = {path.stem: json.loads(path.read_text()) for path in (ROOT / "tests/torch_names").glob("*.json")}
USERS = [
    path for room in ("snapshot", "runtime", "handlers") for path in sorted((ROOT / room).rglob("*.py"))
    if "torch.cuda" in (text := path.read_text()) or "torch.accelerator" in text
]  # fmt: skip


def name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def guarded(tree: ast.Module) -> set[str]:
    """Return the names that the code asks for with `hasattr` or `getattr` before it uses them."""
    asked = [
        (name_of(node.args[0]), node.args[1])
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and name_of(node.func) in {"hasattr", "getattr"}
    ]
    return {f"{owner}.{one.value}" for owner, one in asked if isinstance(one, ast.Constant)}


def faults(source: str, names: dict[str, dict[str, str]]) -> Iterator[str]:
    """Yield the names and calls in the code that a version of torch does not support."""
    tree = ast.parse(source)
    allowed = guarded(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            package, _, name = name_of(node).rpartition(".")
            if package in names and name not in names[package] and f"{package}.{name}" not in allowed:
                yield f"{package}.{name}"
        elif isinstance(node, ast.Call):
            package, _, name = name_of(node.func).rpartition(".")
            if (parameters := names.get(package, {}).get(name)) and not takes(parameters, node):
                yield ast.unparse(node)


def takes(parameters: str, call: ast.Call) -> bool:
    """Return True if a function with these parameters accepts this call."""
    made: dict[str, Any] = {}
    # Replace all defaults by None, because they may be names of torch's modules.
    tree = ast.parse(f"def function{parameters}: pass").body[0]
    assert isinstance(tree, ast.FunctionDef)
    tree.args.defaults = [ast.Constant(None) for _ in tree.args.defaults]
    tree.args.kw_defaults = [one and ast.Constant(None) for one in tree.args.kw_defaults]
    exec(ast.unparse(tree), made)
    signature = inspect.signature(made["function"])
    own = [None] if parameters.startswith(("(self", "(cls")) else []
    try:
        signature.bind(*own, *call.args, **{one.arg: None for one in call.keywords if one.arg})
    except TypeError:
        return False
    return True


def test_the_versions_begin_with_the_oldest_that_is_supported() -> None:
    assert sorted(VERSIONS) == [OLDEST_TORCH, "2.12", "2.13"]
    assert Path(cuda.__file__).name in {path.name for path in USERS}


@pytest.mark.parametrize("version", sorted(VERSIONS))
def test_every_name_that_the_package_uses_exists(version: str) -> None:
    found = {path.name: list(faults(path.read_text(), VERSIONS[version])) for path in USERS}
    assert {name: one for name, one in found.items() if one} == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("torch.accelerator.empty_host_cache()", ["torch.accelerator.empty_host_cache"]),
        ("if hasattr(torch.accelerator, 'empty_host_cache'): torch.accelerator.empty_host_cache()", []),
        ("torch.cuda.Event(blocking=True); torch.cuda.stream(None); torch.cuda.Stream(0)", []),
        ("torch.cuda.Event(sleeping=True)", ["torch.cuda.Event(sleeping=True)"]),
        ("torch.cuda.empty_cache(0)", ["torch.cuda.empty_cache(0)"]),
        ("torch.cuda.stream()", ["torch.cuda.stream()"]),
    ],
)
def test_a_name_that_the_oldest_version_lacks_is_found(source: str, found: list[str]) -> None:
    assert list(faults(source, VERSIONS[OLDEST_TORCH])) == found


def test_this_torch_has_the_names_of_its_version() -> None:
    torch = pytest.importorskip("torch")
    names = VERSIONS.get(".".join(torch.__version__.split(".")[:2]))
    if names is None:
        pytest.skip(f"no names of torch {torch.__version__}")
    missing = [name for name in names["torch.cuda"] if not hasattr(torch.cuda, name.split(".")[0])]
    assert missing == []
