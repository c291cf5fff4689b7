"""Imports a user's file as if the user ran it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from ..errors import HandlerImportError
from .failure import explain


def import_file(
    root: Path, path: Path, *, as_main: bool = False, prepare: Callable[[], None] | None = None
) -> ModuleType:
    """Import `path`, a file below `root`, and return the module.

    The file's folder and `root` become the first entries of `sys.path`. Then this calls `prepare`, and imports the file in the
    package of its folder, or with `as_main` runs it as `__main__`. Raise HandlerImportError if the file does not exist, is
    not Python, or raises.
    """
    if not path.is_file():
        there = ", ".join(sorted(entry.name for entry in root.iterdir())[:8]) if root.is_dir() else ""
        fault = f"{path.name} is not in the function's folder (there: {there or 'nothing'})."
        remedy = "Create it with `def handler(event): ...`, or set `handler`, or for a web app `asgi`, in pilotflame.toml."
        raise HandlerImportError(fault, remedy=remedy)
    if importlib.util.spec_from_file_location(path.stem, path) is None:
        raise HandlerImportError(f"{path.name} is not a Python file.", remedy="Name a .py file.")
    # The file's folder is searched before the root of the code.
    sys.path[:0] = dict.fromkeys((str(path.parent), str(root)))
    if prepare is not None:
        prepare()
    try:
        return _run(path, "__main__") if as_main else _imported(root, path)
    except (Exception, SystemExit) as error:
        advice = "Add the package that provides `{}` to requirements.txt and deploy with --install."
        remedy = advice.format(error.name) if isinstance(error, ModuleNotFoundError) else ""
        raise explain(HandlerImportError, f"Importing {path.name}", error, root, remedy=remedy) from error


def _imported(root: Path, path: Path) -> ModuleType:
    """Return the module of a file, which is in the package of its folder if there is such a package."""
    package = ".".join(path.parent.relative_to(root).parts)
    if not package or not _is_package(package, path.parent):
        return _run(path, path.stem)
    name = f"{package}.{path.stem}"
    # Do not run the file again if its package has imported it.
    module = sys.modules[name] if name in sys.modules else _run(path, name)
    setattr(sys.modules[package], path.stem, module)
    sys.modules[path.stem] = module
    return module


def _is_package(name: str, folder: Path) -> bool:
    """Return True if `folder` can be imported as the package `name`, and no other package has this name."""
    if not all(part.isidentifier() for part in name.split(".")):
        return False
    return str(folder) in getattr(importlib.import_module(name), "__path__", ())


def _run(path: Path, name: str) -> ModuleType:
    """Run a file as the module `name`, and return the module."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path.name} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    # While the file runs, annotations and dataclasses look up their module here.
    sys.modules[path.stem] = sys.modules[name] = module
    if name == "__main__":
        # Without this, the file would read the arguments of pilotflame's process as its own.
        sys.argv = [str(path)]
        # A script has no spec. With a spec, processes that multiprocessing starts would not run the file as their main module.
        module.__spec__ = None
    spec.loader.exec_module(module)
    return module
