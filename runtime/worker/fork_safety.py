"""What makes a forked child its own process, in order.

In the parent, before the first fork:
1. `make_torch_single_threaded`: a fork copies one thread only, and a pool without its threads hangs.
2. `watch_threads`, `thread_count`: if an import started threads all the same, the zygote does not fork.
3. `freeze_objects`: the garbage collector must not write to pages that parent and children share.

In the child:
4. `detach`: a new session, default signals, and SIGTERM when the parent dies.
5. `reseed`: new seeds for random numbers.
6. `set_threads`: on the thread that runs the handler, the thread counts that the parent had set to one.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.abc
import os
import random
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

PR_SET_PDEATHSIG = 1
TASKS = "/proc/self/task"

_libc = ctypes.CDLL(None, use_errno=True)


def make_torch_single_threaded() -> None:
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


def torch_threads() -> int:
    """Return the number of intra-op threads that torch uses; 1 without torch."""
    torch = sys.modules.get("torch")
    return torch.get_num_threads() if torch is not None else 1


def thread_count() -> int:
    """Return the threads of this process as the kernel counts them, native ones included."""
    return len(os.listdir(TASKS))  # noqa: PTH208  called twice an import, and much cheaper than Path.iterdir


def freeze_objects() -> None:
    gc.collect()
    gc.freeze()


def detach(parent: int) -> None:
    """Start a session, reset signals, and ask for SIGTERM when `parent` dies.

    SIGTERM drains a worker and ends a zygote.
    """
    # A spawned worker started its session before it became a fresh interpreter.
    if os.getsid(0) != os.getpid():
        os.setsid()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    # The parent may have died before the call of prctl.
    if os.getppid() != parent:
        os._exit(0)


def reseed() -> None:
    """Reseed the generators of random, numpy and torch, whose states a child inherits."""
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()


def set_threads(count: int) -> None:
    """Set the number of threads that torch and BLAS use for calls from this thread."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(count)
    if (control := sys.modules.get("threadpoolctl")) is not None:
        control.threadpool_limits(count, user_api="blas")


class _ThreadWatch(importlib.abc.MetaPathFinder):
    """Finds modules as Python does, and counts the threads after each import."""

    def __init__(self) -> None:
        self.started: dict[str, int] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _CountingLoader(spec.loader, self.started)  # type: ignore[assignment]
        return spec


class _CountingLoader:
    def __init__(self, loader: importlib.abc.Loader, started: dict[str, int]) -> None:
        self._loader = loader
        self._started = started

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        threads, known = thread_count(), sum(self._started.values())
        self._loader.exec_module(module)
        # Imports nest: the threads of an inner module are already counted under its name.
        started = thread_count() - threads - (sum(self._started.values()) - known)
        if started > 0:
            self._started[module.__name__] = started


@contextmanager
def watch_threads() -> Iterator[dict[str, int]]:
    """Yield a dict that fills with {module: threads that its import started}."""
    watch = _ThreadWatch()
    sys.meta_path.insert(0, watch)
    try:
        yield watch.started
    finally:
        sys.meta_path.remove(watch)


def describe_threads(started: dict[str, int]) -> str:
    """Return what started threads, for people: modules if imports did, else the threads' names."""
    if started:
        return ", ".join(f"importing {module}" for module in started)
    names = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    return f"threads {', '.join(names)}" if names else "a native library"
