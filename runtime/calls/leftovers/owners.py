"""Finds the variables of a handler that hold an object, a descriptor or a process."""

from __future__ import annotations

import gc
import io
import os
import select
import socket
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path, PurePath
from types import FunctionType, ModuleType
from typing import Any

# How many objects the search looks at.
MOST_OBJECTS = 50_000


def owners(code: Path, state: object) -> dict[object, str]:
    """Return the things that the handler's variables hold, each with the variable, as text.

    A thing is ("descriptor", number), ("process", pid) or ("object", id).
    """
    found: dict[object, str] = {}
    for name, one in reachable(code, state):
        for thing in (_thing(one), ("object", id(one))):
            found.setdefault(thing, name)
    return found


def reachable(code: Path, state: object) -> Iterator[tuple[str, Any]]:
    """Yield the objects that a handler holds, each with the variable that holds it, as text.

    The variables are the globals of the modules below `code`, and `state`, which `build` has returned.
    """
    queue = deque(_variables(code, state))
    seen = {id(value) for _, value in queue}
    while queue:
        name, one = queue.popleft()
        yield name, one
        for held in _held(one, code):
            if id(held) not in seen and len(seen) < MOST_OBJECTS:
                seen.add(id(held))
                queue.append((name, held))


def paths(objects: Iterable[tuple[str, Any]], folder: Path, code: Path) -> Iterator[tuple[str, str]]:
    """Yield the paths in `folder` to which a handler's variables or the environment refer: the name of the variable, and the path.

    Leave out paths that are themselves the value of a module's variable, because each fork replaces these values. Leave out
    TMPDIR, because copies of the environment contain it.
    """
    replaced = {id(value) for name, value in _variables(code, None)}
    inside = (str(folder), f"{folder}{os.sep}")
    for name, one in objects:
        is_path = type(one) is str or issubclass(type(one), PurePath)
        if not is_path or id(one) in replaced or str(one) == os.environ.get("TMPDIR"):
            continue
        if str(one) == inside[0] or str(one).startswith(inside[1]):
            yield name, str(one)
    for name, value in os.environ.items():
        if name != "TMPDIR" and (value == inside[0] or value.startswith(inside[1])):
            yield f"the environment variable {name}", value


def _variables(code: Path, state: object) -> Iterator[tuple[str, object]]:
    for module in list(sys.modules.values()):
        # Read `__file__` without `__getattr__`, which imports something in modules that are lazy.
        file = str(getattr(module, "__dict__", {}).get("__file__") or "")
        if file.startswith(f"{code}{os.sep}"):
            for name, value in list(vars(module).items()):
                if not name.startswith("__"):
                    yield f"`{name}` in {Path(file).name}", value
    yield "what `build` returned", state


def _thing(one: Any) -> object:
    kind = type(one)
    if issubclass(kind, (socket.socket, select.epoll)) or kind is io.FileIO:
        # ValueError means that the object is closed.
        with suppress(ValueError):
            return ("descriptor", one.fileno())
    if kind.__module__ == "multiprocessing.connection":
        return ("descriptor", getattr(one, "_handle", None))
    if kind.__module__ == "subprocess" and kind.__name__ == "Popen":
        return ("process", one.pid)
    return None


def _held(one: object, code: Path) -> list[Any]:
    """Return what an object refers to. Leave out what leads to all other objects: modules, and functions' globals."""
    # Use `type`, because `isinstance` would ask the object for its `__class__`, which may run code of the handler.
    if issubclass(type(one), ModuleType):
        return []
    if type(one) is FunctionType:
        return [one.__closure__, one.__defaults__, one.__kwdefaults__]
    if issubclass(type(one), type):
        module = sys.modules.get(str(one.__dict__.get("__module__")))
        file = str(getattr(module, "__dict__", {}).get("__file__") or "")
        return list(vars(one).values()) if file.startswith(f"{code}{os.sep}") else []
    return [held for held in gc.get_referents(one) if not issubclass(type(held), ModuleType)]
