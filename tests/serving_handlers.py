"""Handlers and a kill that several tests of this room use."""

from __future__ import annotations

import os
import signal

from live import gone

PID = "import os\ndef handler(event):\n    return [os.getpid(), os.getppid()]"
WAITS = "import gate, os\ndef handler(event):\n    gate.wait(str(event))\n    return os.getpid()"

# A module whose import starts a thread, so that it cannot be forked.
THREADED = {
    "chatty.py": "import threading, time\nthreading.Thread(target=time.sleep, args=(3600,), daemon=True).start()\n",
}


async def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    await gone(pid)
