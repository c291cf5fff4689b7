"""A process and its descendants: list them, measure their CPU time and memory, and end them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterable, Iterator

import psutil

MARK = "BENCH_MARK_OF_SERVER"
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def end_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends. It is for `preexec_fn`."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def tree(pid: int) -> list[psutil.Process]:
    """Return the process and its descendants, without zombies; an empty list if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        return [process for process in (root, *root.children(recursive=True)) if alive(process)]
    return []


def marked(mark: str) -> Iterator[psutil.Process]:
    """Yield the processes that inherited this mark in the environment, including processes that left the tree."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark and alive(process):
                yield process


def session(leader: int) -> Iterator[psutil.Process]:
    """Yield the members of a session, even if their parent has ended."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) == leader and alive(process):
                yield process


def cpu_s(pid: int) -> float:
    """Return the CPU time of the tree so far, ended children included. The resolution is 10 ms."""
    total = 0.0
    for process in tree(pid):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def pss_mb(processes: Iterable[psutil.Process]) -> float:
    """Return the memory of these processes together in MB (10^6 bytes). A page that they share counts once.

    Processes that have ended count nothing.
    """
    total = 0.0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_full_info().pss / 1e6
    return total


def title(process: psutil.Process) -> str:
    """Return the command line of a process; empty if it has ended."""
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def role(process: psutil.Process) -> str:
    """Return the role of a process of a gateway: "zygote" for the title "pilotflame: zygote soak r1-…"; else empty."""
    found = title(process)
    return found.split()[1] if found.startswith("pilotflame: ") else ""


def end(processes: Iterable[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Send SIGKILL to each process, and return the processes that are still alive after `timeout_s`."""
    processes = list(processes)
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(processes, timeout=timeout_s)
    return [process for process in processes if alive(process)]


def alive(process: psutil.Process) -> bool:
    """Return whether the process exists and is no zombie."""
    with contextlib.suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False
