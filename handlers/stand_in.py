"""Makes stand-ins for foreign packages that are not installed: modules with the names that handlers import.

A plugin's folder `in_children` has a file of the package's name, which provides the stand-in to processes that a handler starts.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

CHILDREN = "in_children"


def is_installed(package: str) -> bool:
    """Return True if the real package can be imported. A plain folder of that name does not count."""
    spec = find_spec(package) if package not in sys.modules else sys.modules[package].__spec__
    return spec is not None and spec.origin is not None and Path(spec.origin).parent.name != CHILDREN


def provide(modules: Mapping[str, ModuleType], plugin: str) -> None:
    """Let this process and its child processes import the modules of a stand-in. `plugin` is the file of a module of the plugin."""
    sys.modules.update(modules)
    sys.path.append(str(Path(plugin).with_name(CHILDREN)))


def stand_in_modules(contents: Mapping[str, Mapping[str, Any]]) -> dict[str, ModuleType]:
    """Return a module for each name in `contents`, where a package comes before its submodules."""
    modules: dict[str, ModuleType] = {}
    for name, attributes in contents.items():
        modules[name] = module = _module(name)
        vars(module).update(attributes)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(modules[parent], last, module)
    return modules


def _module(name: str) -> ModuleType:
    def missing(attribute: str) -> Any:
        package = name.partition(".")[0]
        fault = f"pilotflame's stand-in for {name} has no {attribute!r}"
        raise AttributeError(f"{fault}: add {package} to requirements.txt and deploy with --install")

    module = ModuleType(name, "Pilotflame's stand-in.")
    # The empty path makes this module a package whose submodules are not searched in any folder.
    module.__path__ = []
    vars(module)["__getattr__"] = missing
    return module
