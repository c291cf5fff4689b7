"""Provides the first process of a container. It passes signals on and collects the exit codes of orphans."""

from __future__ import annotations

import contextlib
import os
import signal
from types import FrameType

FIRST = 1
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def become_child_of_init() -> None:
    """If this process is the first of a container, fork. The child goes on, and this process becomes its init.

    The kernel makes the first process the parent of orphans, so this process must collect their exit codes. The kernel also
    ignores signals that the first process does not handle. Call this before other threads are started.
    """
    if os.getpid() != FIRST:
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    if child := os.fork():
        _serve_as_init(child)
    # Put the child into a process group of its own. Then Ctrl-C on the container's terminal reaches the child only
    # once, through the first process.
    os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    # Let the child use the sockets that systemd has passed to the first process.
    if os.environ.get("LISTEN_PID") == str(FIRST):
        os.environ["LISTEN_PID"] = str(os.getpid())


def _serve_as_init(child: int) -> None:
    """Pass signals on to the child, and end with its exit code."""

    def forward(number: int, _frame: FrameType | None) -> None:
        # Drop a signal for a child that has ended in the meantime.
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for number in SIGNALS:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    while True:
        ended, status = os.wait()
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
