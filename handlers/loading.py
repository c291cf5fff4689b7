"""Imports a user's file as if the user ran it."""

from __future__ import annotations

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

    The file's folder becomes the first entry of `sys.path`. Then this calls `prepare`, and runs the file, with `as_main`
    as `__main__`. Raise HandlerImportError if the file does not exist, is
    not Python, or raises.
    """
    if not path.is_file():
        there = ", ".join(sorted(entry.name for entry in root.iterdir())[:8]) if root.is_dir() else ""
        fault = f"{path.name} is not in the function's folder (there: {there or 'nothing'})."
        remedy = "Create it with `def handler(event): ...`, or set `handler`, or for a web app `asgi`, in pilotflame.toml."
        raise HandlerImportError(fault, remedy=remedy)
    sys.path.insert(0, str(path.parent))
    if prepare is not None:
        prepare()
    spec = importlib.util.spec_from_file_location("__main__" if as_main else path.stem, path)
    if spec is None or spec.loader is None:
        raise HandlerImportError(f"{path.name} is not a Python file.", remedy="Name a .py file.")
    module = importlib.util.module_from_spec(spec)
    # While the file runs, annotations and dataclasses look up their module here.
    sys.modules[path.stem] = module
    if as_main:
        sys.modules["__main__"] = module
        # Without this, the file would read the arguments of pilotflame's process as its own.
        sys.argv = [str(path)]
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        advice = "Add the package that provides `{}` to requirements.txt and deploy with --install."
        remedy = advice.format(error.name) if isinstance(error, ModuleNotFoundError) else ""
        raise explain(HandlerImportError, f"Importing {path.name}", error, root, remedy=remedy) from error
    return module
