"""Finds the variables of a handler that hold an object, a descriptor or a process."""

from __future__ import annotations

import gc
import io
import os
import select
import socket
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

# How many objects the search looks at.
MOST_OBJECTS = 50_000


def owners(code: Path, state: object) -> dict[object, str]:
    """Return the variable, as text, that holds each thing. A thing is ("descriptor", number), ("process", pid) or
    ("object", id).
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


def _variables(code: Path, state: object) -> Iterator[tuple[str, object]]:
    for module in list(sys.modules.values()):
        file = str(getattr(module, "__file__", None) or "")
        if file.startswith(f"{code}{os.sep}"):
            for name, value in list(vars(module).items()):
                if not name.startswith("__"):
                    yield f"`{name}` in {Path(file).name}", value
    yield "what `build` returned", state


def _thing(one: Any) -> object:
    kind = type(one)
    if issubclass(kind, (socket.socket, select.epoll)) or kind is io.FileIO:
        # ValueError: it is closed.
        with suppress(ValueError):
            return ("descriptor", one.fileno())
    if kind.__module__ == "multiprocessing.connection":
        return ("descriptor", getattr(one, "_handle", None))
    if kind.__module__ == "subprocess" and kind.__name__ == "Popen":
        return ("process", one.pid)
    return None


def _held(one: object, code: Path) -> list[Any]:
    """Return what an object refers to. Leave out what leads to all other objects: modules, and functions' globals."""
    if isinstance(one, ModuleType):
        return []
    if type(one) is FunctionType:
        return [one.__closure__, one.__defaults__, one.__kwdefaults__]
    if isinstance(one, type):
        file = getattr(sys.modules.get(one.__module__), "__file__", None) or ""
        return list(vars(one).values()) if file.startswith(f"{code}{os.sep}") else []
    return [held for held in gc.get_referents(one) if not isinstance(held, ModuleType)]
