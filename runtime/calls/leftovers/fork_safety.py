"""Prepares a zygote for forking and makes a forked child independent, in this order.

In the parent, before the first fork:
1. `make_torch_single_threaded`: a fork copies only one thread, and a thread pool without its threads hangs.
   Environment variables do the same for other libraries (`SINGLE_THREADED` in process_launcher.py).
2. `leftovers.watch`: known monitor threads are turned off. If the import or the build left threads
   anyway, or other things that forks cannot share, the zygote is not used for forks.
3. `freeze_objects`: the garbage collector must not write to pages that parent and children share.

In the child:
4. `detach`: starts a new session, resets signal handlers, and requests SIGTERM when the parent dies.
5. `Leftovers.renew`: opens files again that are only read, and reseeds random number generators.
6. `end_of`: a worker sees the end of its parent without a signal, because signals belong to the handler (`signals.py`).
7. `set_threads`: raises the thread counts of torch and BLAS again, on each thread that runs the handler.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Iterable

from . import signals

PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


def make_torch_single_threaded() -> None:
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


def torch_threads() -> int:
    """Return the number of intra-op threads that torch uses; 1 without torch."""
    torch = sys.modules.get("torch")
    return torch.get_num_threads() if torch is not None else 1


def freeze_objects() -> None:
    gc.collect()
    gc.freeze()


def detach(
    parent: int, handled: Iterable[signal.Signals] = signals.HANDLED, *, signalled: bool = True
) -> None:
    """Start a session, reset the signals that the parent handles, and let the kernel send SIGTERM when `parent` dies.

    SIGTERM drains a worker and ends a zygote. With `signalled=False`, do not request the signal.
    """
    # Start only one session: a spawned worker runs this after its fork, and again after exec in the fresh interpreter.
    if os.getsid(0) != os.getpid():
        os.setsid()
    signals.reset(handled)
    if signalled:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    # End without the signal if the parent has died before prctl was called.
    if os.getppid() != parent:
        os._exit(0)


def end_of(pid: int) -> int | None:
    """Return a descriptor that is readable once a process has ended; None if the kernel has no such descriptors."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def end_of_parent() -> int | None:
    """Return a descriptor that is readable once the parent has ended, and cancel the SIGTERM that `detach` has requested.

    If the kernel has no such descriptors, return None, and do not cancel the SIGTERM.
    """
    if (descriptor := end_of(os.getppid())) is not None:
        _libc.prctl(PR_SET_PDEATHSIG, 0)
    return descriptor


def set_threads(count: int) -> None:
    """Set the number of threads that torch, BLAS and numexpr use when this thread calls them."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(count)
    if (control := sys.modules.get("threadpoolctl")) is not None:
        control.threadpool_limits(count, user_api="blas")
    if (numexpr := sys.modules.get("numexpr")) is not None:
        numexpr.set_num_threads(min(count, numexpr.MAX_THREADS))
