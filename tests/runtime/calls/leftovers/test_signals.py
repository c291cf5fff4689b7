"""Signals of the processes that a handler forks."""

from __future__ import annotations

import signal
import subprocess
import sys

FORK = """
import os, signal, time
from pilotflame.runtime.calls.leftovers import signals

def on_term(*_):
    pass

signal.signal(signal.SIGTERM, on_term)
# The signal reaches the new process before it has the handlers of a program.
os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))
signals.leave_to_forks(on_term, lambda: None)
if not (child := os.fork()):
    time.sleep(10)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), signal.pthread_sigmask(signal.SIG_BLOCK, ()))
"""


def test_a_signal_that_a_new_process_gets_at_once_is_not_lost() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORK], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == [f"-{signal.SIGTERM}", "set()"]
