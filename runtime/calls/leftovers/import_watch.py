"""Watches imports: which module started threads, and which module left descriptors open."""

from __future__ import annotations

import importlib.abc
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

# How long a thread that has ended may still be listed.
ENDING_S = 0.1


def thread_count() -> int:
    """Return the number of threads of this process, including threads that Python does not know."""
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208  called twice per import, and much cheaper than Path.iterdir


def lasting_thread_count() -> int:
    """Return the number of threads, except threads that end within ENDING_S.

    Native libraries join their threads after an import, and the kernel lists a joined thread for a moment longer.
    """
    until_s = time.monotonic() + ENDING_S
    while (count := thread_count()) > 1 and time.monotonic() < until_s:
        os.sched_yield()
    return count


def open_descriptors() -> set[int]:
    # The listing itself opens a descriptor, which gets the lowest free number. Find this number with `dup`, and leave it out.
    os.close(own := os.dup(0))
    return set(map(int, os.listdir("/proc/self/fd"))) - {own}  # noqa: PTH208  as in `thread_count`


def quiet_tqdm() -> None:
    """Keep tqdm from starting its monitor thread, which only refreshes bars that do not advance, and from making a lock
    that processes share.

    Loading a transformers model shows a progress bar. With the thread of that bar, the workers could not be forked. A
    worker that is killed while it holds the lock would stop the bars of all others.
    """
    if (tqdm := sys.modules.get("tqdm.std")) is not None:
        tqdm.tqdm.monitor_interval = 0
        if not hasattr(tqdm.TqdmDefaultWriteLock, "mp_lock"):
            tqdm.TqdmDefaultWriteLock.mp_lock = None


class ImportWatch(importlib.abc.MetaPathFinder):
    """An import hook that finds modules as Python does, and compares threads and descriptors around each import."""

    def __init__(self, on_import: Callable[[str], None] = lambda _: None) -> None:
        """`on_import` is called with the name of each module that was imported."""
        self.started: dict[str, int] = {}
        """How many threads the import of each module started."""
        self.opened: dict[int, str] = {}
        """The module whose import opened a descriptor, by the descriptor."""
        self._on_import = on_import

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target)
        loader: Any = spec.loader if spec is not None else None
        if hasattr(loader, "exec_module"):
            # Hide the method of the loader's class by an attribute of the instance.
            loader.exec_module = partial(self._execute, loader)
        return spec

    def _execute(self, loader: Any, module: ModuleType) -> None:
        del loader.exec_module
        threads, known, before = thread_count(), sum(self.started.values()), open_descriptors()
        loader.exec_module(module)
        name = module.__name__
        if name == "tqdm.std":
            quiet_tqdm()
        self._on_import(name)
        # The module may have imported other modules. Subtract the threads of those modules, which are counted under
        # their names.
        started = thread_count() - threads - (sum(self.started.values()) - known)
        if started > 0:
            self.started[name] = started
        after = open_descriptors()
        for closed in self.opened.keys() - after:
            del self.opened[closed]
        # Do not overwrite the entries of modules that this module imported.
        for opened in after - before:
            self.opened.setdefault(opened, name)


@contextmanager
def watch_imports(on_import: Callable[[str], None] = lambda _: None) -> Iterator[ImportWatch]:
    """Yield a watch of the imports in the block."""
    watch = ImportWatch(on_import)
    # Do this also before the first import, because the base may have imported tqdm.
    quiet_tqdm()
    sys.meta_path.insert(0, watch)
    try:
        yield watch
    finally:
        sys.meta_path.remove(watch)
