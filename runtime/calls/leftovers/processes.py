"""Finds and ends the processes that a handler has started: they end with the worker or the zygote that started them.

A base and a zygote adopt the orphans below them (PR_SET_CHILD_SUBREAPER). An orphan belongs to the process that its
environment names (OWNER), or that leads its session: each worker and zygote starts a session.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
# The environment variable of a program with the pid of the worker or zygote that started the program.
OWNER = "PILOTFLAME_PROCESS"
ENDED = "a process that has ended"
# Added to the OOM score of the base. Zygotes and workers inherit this score. With a score of 1000, the kernel counts a process as if it used all
# memory of the machine.
OOM_SCORE, MOST_OOM_SCORE = 500, 1000
_OOM_SCORE = Path("/proc/self/oom_score_adj")

_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Become the parent of each process below this process when its parent ends."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def own_programs() -> None:
    """Let the programs that this process starts from now on belong to it."""
    os.environ[OWNER] = str(os.getpid())


def yield_memory() -> None:
    """Let the kernel end this process and all processes below it before the gateway, if memory runs out."""
    with suppress(OSError, ValueError):
        given = int(_OOM_SCORE.read_text(encoding="ascii"))
        _OOM_SCORE.write_text(f"{min(MOST_OOM_SCORE, max(given, 0) + OOM_SCORE)}", encoding="ascii")


def has_children() -> bool:
    """Return True if this process has a child. The child may have ended."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def children() -> Iterator[int]:
    """Yield the pids of the children of this process."""
    return filter(_is_child, _candidates())


def _candidates() -> list[int]:
    found = list[int]()
    with suppress(OSError):
        # Use no pathlib, which is slower, because this runs at each end of a worker.
        for task in os.listdir("/proc/self/task"):  # noqa: PTH208
            with open(f"/proc/self/task/{task}/children", "rb", buffering=0) as file:  # noqa: PTH123
                found += map(int, file.readall().split())
        return found
    # Return all processes if the kernel has no lists of children.
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]  # noqa: PTH208


def _is_child(pid: int) -> bool:
    # OSError means that the process has ended.
    with suppress(OSError), open(f"/proc/{pid}/stat", "rb", buffering=0) as file:  # noqa: PTH123
        # Search for the last parenthesis, because the name of the program in the parentheses may contain anything.
        return int(file.read(1024).rpartition(b")")[2].split(maxsplit=2)[1]) == os.getpid()
    return False


def end_orphans(known: Collection[int], *, last: bool = False) -> None:
    """Kill the adopted children whose owner has ended. `known` are the children that this process has forked.

    An adopted child that does not name its owner may belong to any of `known`. Do not kill it before `known` is empty. Do not
    kill it at all if it leads a session, because it may be a worker that drains after the death of its zygote. With `last`,
    kill these children too, because this process is about to end.
    """
    for pid in _candidates():
        # Ask for the session first: this system call is much faster than reading a file. Threads of the kernel have session 0.
        if (
            pid in known
            or not (session := _session(pid))
            or (session != pid and _session(session) is not None)
        ):
            continue
        if _is_child(pid) and (
            _session(owner) is None if (owner := _owner(pid)) else last or not (known or session == pid)
        ):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def _session(pid: int) -> int | None:
    """Return the session of a process; None if the process has ended."""
    with suppress(OSError):
        return os.getsid(pid)
    return None


def _owner(pid: int) -> int | None:
    with suppress(OSError, ValueError):
        start = f"{OWNER}=".encode()
        for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if variable.startswith(start):
                return int(variable[len(start) :])
    return None


def describe(pid: int) -> str:
    """Return the first words of the command of a process. Return ENDED if the process has ended."""
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        text = " ".join(word.decode(errors="replace") for word in words[:2])[:80]
        return f"the process {text}" if text else ENDED
    return ENDED
