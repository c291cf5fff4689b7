"""Starts the threads of a worker. A thread that fails ends the worker, so that no call waits for it."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable

EXIT_CODE = 70
"""EX_SOFTWARE of sysexits.h."""


def start_thread(work: Callable[[], object], name: str) -> None:
    """Run `work` on a new daemon thread. If it raises, the process ends: its calls fail at once, and another worker starts."""
    threading.Thread(target=_own, args=(work,), name=name, daemon=True).start()


def _own(work: Callable[[], object]) -> None:
    try:
        work()
    except BaseException:  # noqa: BLE001  the process ends
        sys.stderr.write(f"The thread {threading.current_thread().name} failed: {traceback.format_exc()}")
        sys.stderr.flush()
        os._exit(EXIT_CODE)
