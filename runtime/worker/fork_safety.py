"""Prepares a zygote for forking and makes a forked child independent, in this order.

In the parent, before the first fork:
1. `make_torch_single_threaded`: a fork copies only one thread, and a thread pool without its threads hangs.
   Environment variables do the same for other libraries (`SINGLE_THREADED` in process_launcher.py).
2. `watch_threads`, `thread_count`: known monitor threads are turned off. If an import started threads anyway, the
   zygote is not used for forks. `open_devices` finds a device that was used, because a context on a device survives no
   fork.
3. `freeze_objects`: the garbage collector must not write to pages that parent and children share.

In the child:
4. `detach`: starts a new session, resets signal handlers, and requests SIGTERM when the parent dies.
5. `reseed`: sets new seeds of random number generators.
6. `set_threads`: raises the thread counts of torch and BLAS again, on each thread that runs the handler.
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
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

PR_SET_PDEATHSIG = 1
# How long a thread that has ended may still be listed.
ENDING_S = 0.1
# A process that has a context on a device keeps one of these files open: NVIDIA's, AMD's.
DEVICE_FILES = ("/dev/nvidia-uvm", "/dev/kfd")

_libc = ctypes.CDLL(None, use_errno=True)


def make_torch_single_threaded() -> None:
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


def torch_threads() -> int:
    """Return the number of intra-op threads that torch uses; 1 without torch."""
    torch = sys.modules.get("torch")
    return torch.get_num_threads() if torch is not None else 1


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


def open_devices() -> list[str]:
    """Return the device files that this process has open. If there are any, the process has used a device."""
    found = set[str]()
    for descriptor in Path("/proc/self/fd").iterdir():
        # OSError: the descriptor of the listing itself is closed by now.
        with suppress(OSError):
            found.add(str(descriptor.readlink()))
    return sorted(found.intersection(DEVICE_FILES))


def freeze_objects() -> None:
    gc.collect()
    gc.freeze()


def detach(parent: int) -> None:
    """Start a session, reset signal handlers, and let the kernel send SIGTERM when `parent` dies.

    SIGTERM drains a worker and ends a zygote.
    """
    # A spawned worker runs this twice: after its fork, and again after exec in the fresh interpreter.
    if os.getsid(0) != os.getpid():
        os.setsid()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    # The parent may have died before prctl was called.
    if os.getppid() != parent:
        os._exit(0)


def reseed() -> None:
    """Reseed the generators of random, numpy and torch, because all children inherit the same states."""
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()


def quiet_monitors() -> None:
    """Keep tqdm from starting its monitor thread, which only refreshes bars that stand still.

    Loading a transformers model shows a progress bar. With the thread of that bar, the workers could not be forked.
    """
    if (tqdm := sys.modules.get("tqdm.std")) is not None:
        tqdm.tqdm.monitor_interval = 0


def set_threads(count: int) -> None:
    """Set the number of threads that torch, BLAS and numexpr use when this thread calls them."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(count)
    if (control := sys.modules.get("threadpoolctl")) is not None:
        control.threadpool_limits(count, user_api="blas")
    if (numexpr := sys.modules.get("numexpr")) is not None:
        numexpr.set_num_threads(min(count, numexpr.MAX_THREADS))


class _ThreadWatch(importlib.abc.MetaPathFinder):
    """An import hook that finds modules as Python does and counts the threads that each import starts."""

    def __init__(self) -> None:
        self.started: dict[str, int] = {}

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target)
        loader: Any = spec.loader if spec is not None else None
        if hasattr(loader, "exec_module"):
            # An attribute of the instance hides the method of the loader's class.
            loader.exec_module = partial(self._execute, loader)
        return spec

    def _execute(self, loader: Any, module: ModuleType) -> None:
        del loader.exec_module
        threads, known = thread_count(), sum(self.started.values())
        loader.exec_module(module)
        if module.__name__ == "tqdm.std":
            quiet_monitors()
        # The module may have imported other modules. Subtract the threads of those modules, which are counted under
        # their names.
        started = thread_count() - threads - (sum(self.started.values()) - known)
        if started > 0:
            self.started[module.__name__] = started


@contextmanager
def watch_threads() -> Iterator[dict[str, int]]:
    """Yield a dict that is filled, inside the block, with {module: number of threads its import started}."""
    watch = _ThreadWatch()
    # The base may have imported tqdm.
    quiet_monitors()
    sys.meta_path.insert(0, watch)
    try:
        yield watch.started
    finally:
        sys.meta_path.remove(watch)


def describe_threads(started: dict[str, int]) -> str:
    """Return what started threads, as text for messages: the modules in `started`, else thread names."""
    if started:
        return ", ".join(f"importing {module}" for module in started)
    names = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    return f"threads {', '.join(names)}" if names else "a native library"


def describe_remedy(started: dict[str, int]) -> str:
    """Return what to change in the handler so that `started` is empty and workers can be forked."""
    lines = [f"`import {name}`" for name in dict.fromkeys(module.partition(".")[0] for module in started)]
    if lines:
        return f"To have them forked, put {' and '.join(lines)} into setup(context) instead"
    return "To have them forked, start threads in setup(context) instead"


def describe_devices(files: list[str]) -> str:
    """Return why a process that has opened these device files is not forked, and what to change; "" if there are no
    files.
    """
    if not files:
        return ""
    are = "are" if len(files) > 1 else "is"
    return (
        f"{', '.join(files)} {are} open after the build: the handler has used a device, and its context survives no fork."
        " To have them forked, put what uses the device into setup(context) instead"
    )
