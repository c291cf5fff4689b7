"""The gate: execute while loading. Every operation waits for its own tensors' bytes, and for no others.

torch calls `__torch_dispatch__` for every operation of the thread that entered the mode, whatever Python or C++ it came
from, with the tensors that it is about to read. Modules need no hooks and no names: a weight used by a module that does
not own it (tied, or inside a fused layer) is waited for like any other. Memory that is read without an
operation (`.numpy()`, `.tolist()`, an address) is waited for when it is asked for. A thread that is
started inside waits until all has arrived. What the gate cannot see is threads that were there before, each of which needs a
gate of its own, and addresses that were taken before.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any, Self

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..fetching.arrival import Arrival
from .mapping import Mapping
from .touch import Touched


class Gate(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`with Gate(mapping, arrival): model(x)`. Once all has arrived it is in nobody's way; better then to leave it out.

    Raises what the fetch failed with, or SourceUnavailable if a tensor does not come for `timeout_s` seconds.
    """

    def __init__(self, mapping: Mapping, arrival: Arrival, *, timeout_s: float = 600.0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.thread = 0
        """Who entered it; 0 while it waits itself, and what it starts is no user's thread."""
        self.waited_s = 0.0
        """How long operations waited, all together."""
        self._touched = Touched(mapping)
        self._arrival = arrival
        self._timeout_s = timeout_s
        self._chunk_bytes = mapping.manifest.chunk_bytes

    def __enter__(self) -> Self:
        self.thread = threading.get_ident()
        _exits.enter(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *failure: object) -> None:
        super().__exit__(*failure)  # type: ignore[no-untyped-call]
        _exits.leave(self)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.wait_for(func, args, kwargs)
        return func(*args, **kwargs)

    def wait_for(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Until the bytes that `func` is about to read or write are there."""
        if not self._arrival.complete:
            for shard, begin, end in self._touched.extents(func, args, kwargs):
                self._wait(shard, begin, end)

    def wait_for_all(self) -> None:
        """Until everything is there: for those whom no gate stands before."""
        if self._arrival.count:
            self._arrival.wait(0, self._arrival.count - 1, self._timeout_s)

    def _wait(self, shard: int, begin: int, end: int) -> None:
        first = self._arrival.first[shard]
        low, high = first + begin // self._chunk_bytes, first + (end - 1) // self._chunk_bytes
        if all(self._arrival.landed(chunk) for chunk in range(low, high + 1)):
            return
        started_s, self.thread, thread = time.monotonic(), 0, self.thread
        try:
            self._arrival.wait(low, high, self._timeout_s)
        finally:
            self.thread = thread
            self.waited_s += time.monotonic() - started_s


class _Exits:
    """Stands before the methods that give memory away, and before starting threads, while any gate is entered.

    Not a TorchFunctionMode: under one torch leaves its fused kernels, and the answer differs in the last bits.
    """

    def __init__(self) -> None:
        self._gates: list[Gate] = []
        self._lock = threading.Lock()

    def enter(self, gate: Gate) -> None:
        with self._lock:
            if not self._gates:
                for name in _READS:
                    setattr(Tensor, name, self._waiting(name))
                threading.Thread.start = self._starting()  # type: ignore[method-assign, assignment]
            self._gates.append(gate)

    def leave(self, gate: Gate) -> None:
        with self._lock:
            self._gates.remove(gate)
            if not self._gates:
                for name, own in _READS.items():
                    if own is None:
                        delattr(Tensor, name)
                    else:
                        setattr(Tensor, name, own)
                threading.Thread.start = _START  # type: ignore[method-assign]

    def _starting(self) -> Callable[[threading.Thread], None]:
        @functools.wraps(_START)
        def start(thread: threading.Thread) -> None:
            for gate in tuple(self._gates):
                if gate.thread == threading.get_ident():  # others' threads have nothing to do with it
                    gate.wait_for_all()
            _START(thread)

        return start

    def _waiting(self, name: str) -> Callable[..., Any]:
        plain = getattr(Tensor, name)

        @functools.wraps(plain)
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            for gate in tuple(self._gates):
                gate.wait_for(plain, (tensor,), {})
            return plain(tensor, *args, **kwargs)

        return read


# The methods, and what stands in the class itself; None for what it inherits.
_READS: dict[str, Any] = {
    name: vars(Tensor).get(name) for name in ("tolist", "numpy", "data_ptr", "__array__", "__dlpack__")
}
_START = threading.Thread.start
_exits = _Exits()
