"""A thread that fails ends its worker with a traceback. `start_thread` starts all threads of a worker, so this is true of each."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from pilotflame.runtime.calls import worker
from pilotflame.runtime.calls.worker.owned_thread import EXIT_CODE

SCRIPT = """
import threading
from pilotflame.runtime.calls.worker.owned_thread import start_thread
def work():
    raise {error}
start_thread(work, "handler-1")
threading.Event().wait()
"""


@pytest.mark.parametrize("error", ["ValueError('x')", "SystemExit(0)", "MemoryError()"])
def test_a_thread_that_fails_ends_the_process(error: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(error=error)],
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == EXIT_CODE
    assert "The thread handler-1 failed: Traceback" in ended.stderr


def test_workers_start_their_threads_here_only() -> None:
    folder = Path(str(worker.__path__[0]))
    found = [path.name for path in folder.glob("*.py") if re.search(r"\bThread\(", path.read_text())]
    assert found == ["owned_thread.py"]
