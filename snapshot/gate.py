"""The gate: execute while loading. Every operation waits for its own tensors' bytes, and for no others.

torch calls `__torch_dispatch__` for every operation of the thread that entered the mode, whatever Python or C++ it came
from, with the tensors that it is about to read. Modules need no hooks and no names: a weight used by a module that does
not own it (tied, or inside a fused layer) is waited for like any other. What the gate cannot see is memory read without
an operation, as `.numpy()` and `.tolist()` do, and other threads, each of which needs a gate of its own.
"""

from __future__ import annotations

import time
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from .arrival import Arrival
from .mapping import Mapping
from .touch import Touched


class Gate(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`with Gate(mapping, arrival): model(x)`. Once all has arrived it is in nobody's way; better then to leave it out.

    Raises what the fetch failed with, or SourceUnavailable if a tensor does not come for `timeout_s` seconds.
    """

    def __init__(self, mapping: Mapping, arrival: Arrival, *, timeout_s: float = 600.0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.waited_s = 0.0
        """How long operations waited, all together."""
        self._touched = Touched(mapping)
        self._arrival = arrival
        self._timeout_s = timeout_s
        self._chunk_bytes = mapping.manifest.chunk_bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._arrival.complete:
            for shard, begin, end in self._touched.extents(func, args, kwargs):
                self._wait(shard, begin, end)
        return func(*args, **kwargs)

    def _wait(self, shard: int, begin: int, end: int) -> None:
        first = self._arrival.first[shard]
        low, high = first + begin // self._chunk_bytes, first + (end - 1) // self._chunk_bytes
        if all(self._arrival.landed(chunk) for chunk in range(low, high + 1)):
            return
        started_s = time.monotonic()
        self._arrival.wait(low, high, self._timeout_s)
        self.waited_s += time.monotonic() - started_s
