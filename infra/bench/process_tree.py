"""A process and its descendants: list them, measure their CPU time, and end them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterable

import psutil

MARK = "BENCH_MARK_OF_SERVER"
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def end_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends. It is for `preexec_fn`."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def tree(pid: int) -> list[psutil.Process]:
    """The process and its descendants, without zombies; empty where it is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        return [process for process in (root, *root.children(recursive=True)) if alive(process)]
    return []


def marked(mark: str) -> list[psutil.Process]:
    """Return the processes that inherited this mark in the environment, including processes that left the tree."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark and alive(process):
                found.append(process)
    return found


def session(leader: int) -> list[psutil.Process]:
    """Return the members of a session, even if their parent has ended."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) == leader and alive(process):
                found.append(process)
    return found


def cpu_s(pid: int) -> float:
    """CPU time of the tree so far, ended and reaped children included; its grain is the tick, 10 ms."""
    total = 0.0
    for process in tree(pid):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def end(processes: Iterable[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """KILL each by its pid (psutil checks that it is still the same process); returns who is left."""
    processes = list(processes)
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(processes, timeout=timeout_s)
    return [process for process in processes if alive(process)]


def alive(process: psutil.Process) -> bool:
    """Whether it runs; a zombie, which only its parent or init can remove, does not."""
    with contextlib.suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False
