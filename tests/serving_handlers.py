"""Handlers, the weights for one of them, and a kill of a worker, which several test files use."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from live import gone
from safetensors.torch import save_file
from simulated_device import ADDED

PID = "import os\ndef handler(event):\n    return [os.getpid(), os.getppid()]"
WAITS = "import gate, os\ndef handler(event):\n    gate.wait(str(event))\n    return os.getpid()"

DEVICE_WIDTH = 1024
# Runs on a simulated device: its memory is host memory, and its copies end late and in another order.
ON_DEVICE = f"""{ADDED}
import os, torch
from torch import nn

def build(context):
    with context.snapshot.skeleton():
        net = nn.Linear({DEVICE_WIDTH}, {DEVICE_WIDTH})
    context.snapshot.restore(net, device="simulated")
    return net

@torch.inference_mode()
def handler(event, context):
    return os.getpid(), context.state(torch.full(({DEVICE_WIDTH},), float(event))).sum().item()
"""

# ON_DEVICE, but after the event "break" every use of the device fails, as after an illegal access. The event
# "raise" only raises an error.
BREAKS_ITS_DEVICE = ON_DEVICE.replace(
    "def handler(event, context):",
    """def handler(event, context):
    if event == "break":
        from simulated_device import SimulatedDevice
        def broken(self):
            raise RuntimeError("an illegal memory access was encountered")
        SimulatedDevice.finish = broken
    if isinstance(event, str):
        raise RuntimeError(event)""",
)

# ON_DEVICE with a torch that reports KEPT_MB of GPU memory in its allocator. Tests need no GPU.
KEPT_MB = 4000
KEEPS_MEMORY = f"""{ON_DEVICE}
for name, found in {{
    "is_initialized": lambda: True, "device_count": lambda: 1, "get_device_name": lambda: "stand-in",
    "memory_reserved": lambda number: {KEPT_MB} << 20, "synchronize": lambda number: None, "empty_cache": lambda: None,
}}.items():
    setattr(torch.cuda, name, found)
"""

# A module whose import starts a thread, so that it cannot be forked.
THREADED = {
    "chatty.py": "import threading, time\nthreading.Thread(target=time.sleep, args=(3600,), daemon=True).start()\n",
}

# A module whose import opens a file that stands for the device file of a GPU, and keeps this file open.
OPENS_A_DEVICE = """
from pilotflame.runtime.calls.leftovers import descriptors
descriptors.DEVICE_FILES = (__file__,)
KEPT = open(__file__)
"""


def device_weights(folder: Path, seed: int) -> Callable[[float], Any]:
    """Write weights for ON_DEVICE into a folder. Return a function that computes the handler's answer to an event."""
    torch.manual_seed(seed)
    net = torch.nn.Linear(DEVICE_WIDTH, DEVICE_WIDTH)
    folder.mkdir(exist_ok=True)
    save_file(dict(net.state_dict()), folder / "model.safetensors")

    def right(event: float) -> Any:
        with torch.inference_mode():
            found = net(torch.full((DEVICE_WIDTH,), float(event))).sum().item()
        return pytest.approx(found, rel=1e-3, abs=1e-3)

    return right


async def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    await gone(pid)
