"""The gate executes a module while its weights arrive: every operation waits for its own tensors' bytes only.

torch calls `__torch_dispatch__` for every operation of the thread that entered the mode, whether it comes
from Python or C++, with the tensors that it is about to read. Modules need no hooks and no names: a weight
used by a module that does not own it (tied, or inside a fused layer) is waited for like any other. Memory
that is read without an operation (`.numpy()`, `.tolist()`, an address) is waited for when it is requested.
Starting a thread inside waits until everything has arrived. The gate does not see threads that were started
before, each of which needs its own gate, and addresses that were taken before.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Self

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..fetching.arrival import Arrival
from .mapping import Mapping
from .touch import Touched


class Gate(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`with Gate(mapping, arrival): model(x)`. Once everything has arrived, it can be left out.

    Operations raise what the fetch failed with, or SourceUnavailable if their tensors do not arrive within
    `timeout_s`.
    """

    def __init__(self, mapping: Mapping, arrival: Arrival, *, timeout_s: float = 600.0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # The thread that entered the gate; 0 while the gate waits and may start threads itself.
        self.thread = 0
        self._touched = Touched(mapping)
        self._arrival = arrival
        self._timeout_s = timeout_s

    def __enter__(self) -> Self:
        self.thread = threading.get_ident()
        _enter(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *failure: object) -> None:
        super().__exit__(*failure)  # type: ignore[no-untyped-call]
        _leave(self)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.wait_for(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def wait_for(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Block until the bytes that `func` is about to read or write have landed."""
        if not self._arrival.complete:
            for extent in self._touched.extents(func, args, kwargs):
                self._wait(*self._arrival.chunks.covering(*extent))

    def wait_for_all(self) -> None:
        """Block until everything has landed, for threads that have no gate."""
        self._wait(0, self._arrival.count - 1)

    def _wait(self, first: int, last: int) -> None:
        if not self._arrival.has(first, last):
            self.thread, thread = 0, self.thread
            try:
                self._arrival.wait(first, last, self._timeout_s)
            finally:
                self.thread = thread


# While any gate is entered, the methods that hand out memory, and the start of threads, are patched. Not a
# TorchFunctionMode: under one, torch does not use its fused kernels, and results differ in the last bits.
_READS: dict[str, Any] = {
    name: vars(Tensor).get(name) for name in ("tolist", "numpy", "data_ptr", "__array__", "__dlpack__")
}
"""The methods, and what the class itself defines; None for what it inherits."""
_START = threading.Thread.start
_lock = threading.Lock()
_gates: list[Gate] = []


def _enter(gate: Gate) -> None:
    with _lock:
        if not _gates:
            for name in _READS:
                setattr(Tensor, name, _waiting(name))
            threading.Thread.start = _start  # type: ignore[method-assign, assignment]
        _gates.append(gate)


def _leave(gate: Gate) -> None:
    with _lock:
        _gates.remove(gate)
        if not _gates:
            for name, own in _READS.items():
                if own is None:
                    delattr(Tensor, name)
                else:
                    setattr(Tensor, name, own)
            threading.Thread.start = _START  # type: ignore[method-assign]


@functools.wraps(_START)
def _start(thread: threading.Thread) -> None:
    for gate in tuple(_gates):
        if gate.thread == threading.get_ident():
            gate.wait_for_all()
    _START(thread)


def _waiting(name: str) -> Callable[..., Any]:
    plain = getattr(Tensor, name)

    @functools.wraps(plain)
    def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        for gate in tuple(_gates):
            gate.wait_for(plain, (tensor,), {})
        return plain(tensor, *args, **kwargs)

    return read
