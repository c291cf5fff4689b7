"""The traits of a worker that its speed depends on: its device, and the type of its weights."""

from __future__ import annotations

import sys
from collections import Counter

from ...snapshot.handle import Snapshot


def device() -> str:
    """ "cuda:" and the device's name if the handler has set one up, else "cpu"."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return "cpu"
    return f"cuda:{torch.cuda.get_device_name()}"


def dtype(snapshot: Snapshot | None) -> str:
    """That of most of the snapshot's tensors; "" without any."""
    if snapshot is None:
        return ""
    found = Counter(tensor.dtype for tensor in snapshot.manifest.tensors)
    return found.most_common(1)[0][0] if found else ""
