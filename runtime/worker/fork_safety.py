"""What makes a forked child its own process: session, parent-death signal, seeds, thread counts, threads found."""

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


def detach(parent: int) -> None:
    """In a new child: a session of its own, and SIGTERM when `parent` dies (which drains a worker, ends a zygote)."""
    if (
        os.getsid(0) != os.getpid()
    ):  # a spawned worker has had its own since before it became a fresh interpreter
        os.setsid()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before the signal was asked for
        os._exit(0)


def reseed() -> None:
    """Random numbers of its own: a fork inherits the generators' states."""
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()


def settle() -> None:
    """Before the first fork: whatever lives now stays where it is, so that children do not copy pages to collect it."""
    gc.collect()
    gc.freeze()


def thread_count() -> int:
    """Threads of this process as the kernel counts them, native ones included."""
    return len(os.listdir(TASKS))  # noqa: PTH208  twice an import: this is the cheap way


def torch_threads() -> int:
    """The intra-op threads torch would use by itself; 1 without torch."""
    torch = sys.modules.get("torch")
    return torch.get_num_threads() if torch is not None else 1


def own_threads(count: int) -> None:
    """In a worker: the thread counts that the zygote had set to one."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(count)
    if (control := sys.modules.get("threadpoolctl")) is not None:
        control.threadpool_limits(count, user_api="blas")


class _ThreadWatch(importlib.abc.MetaPathFinder):
    """Finds modules as Python would, and looks after each import whether there are more threads than before."""

    def __init__(self) -> None:
        self.culprits: dict[str, int] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _CountingLoader(spec.loader, self.culprits)  # type: ignore[assignment]
        return spec


class _CountingLoader:
    def __init__(self, loader: importlib.abc.Loader, culprits: dict[str, int]) -> None:
        self._loader = loader
        self._culprits = culprits

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        threads, known = thread_count(), sum(self._culprits.values())
        self._loader.exec_module(module)
        # Imports nest: what an inner module started is already written down under its name.
        started = thread_count() - threads - (sum(self._culprits.values()) - known)
        if started > 0:
            self._culprits[module.__name__] = started


@contextmanager
def watch_threads() -> Iterator[dict[str, int]]:
    """Yields a dict that fills with {module: threads its import started}."""
    watch = _ThreadWatch()
    sys.meta_path.insert(0, watch)
    try:
        yield watch.culprits
    finally:
        sys.meta_path.remove(watch)


def describe_threads(culprits: dict[str, int]) -> str:
    """Who started threads, for people: modules if imports did, else the threads' names."""
    if culprits:
        return ", ".join(f"importing {module}" for module in culprits)
    names = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    return f"threads {', '.join(names)}" if names else "a native library"
