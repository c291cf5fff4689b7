"""Runs a module while its weights arrive: every operation waits for the bytes of its own tensors only.

torch calls `__torch_dispatch__` before every operation of the thread that entered the gate, from Python or
C++, with the tensors that the operation will read. So modules need no hooks, and it does not matter which
module uses a weight. Methods that give access to memory without an operation (`.numpy()`, `.tolist()`,
`.data_ptr()`) wait when they are called. Starting a thread inside the gate waits until all bytes are there.
The gate does not see the operations of threads that were started before (each needs its own gate), nor reads
through addresses that were taken before.
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
    """The context for operations on tensors of `mapping`: `with Gate(mapping, arrival): model(x)`.

    Operations in it raise the error of the fetch if it failed, or SourceUnavailable if their tensors do not
    arrive within `timeout_s`. Once all bytes have arrived, no gate is needed.
    """

    def __init__(self, mapping: Mapping, arrival: Arrival, *, timeout_s: float = 600.0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # The thread that entered the gate. It is 0 while the gate waits: a thread that it starts meanwhile
        # must not wait for the bytes (see `_start`).
        self.thread = 0
        self._touched = Touched(mapping)
        self._arrival = arrival
        self._timeout_s = timeout_s

    def __enter__(self) -> Self:
        self.thread = threading.get_ident()
        with _lock:
            if not _gates:
                for name in _READS:
                    setattr(Tensor, name, _waiting(name))
                threading.Thread.start = _start  # type: ignore[method-assign, assignment]
            _gates.append(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *failure: object) -> None:
        super().__exit__(*failure)  # type: ignore[no-untyped-call]
        with _lock:
            _gates.remove(self)
            if not _gates:
                for name, own in _READS.items():
                    if own is None:
                        delattr(Tensor, name)
                    else:
                        setattr(Tensor, name, own)
                threading.Thread.start = _START  # type: ignore[method-assign]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.wait_for(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def wait_for(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Block until the bytes that `func` will read or write have landed."""
        if not self._arrival.complete:
            for extent in self._touched.extents(func, args, kwargs):
                self._wait(*self._arrival.chunks.covering(*extent))

    def wait_for_all(self) -> None:
        """Block until all chunks have landed."""
        self._wait(0, self._arrival.count - 1)

    def _wait(self, first: int, last: int) -> None:
        if not self._arrival.has(first, last):
            self.thread, thread = 0, self.thread
            try:
                self._arrival.wait(first, last, self._timeout_s)
            finally:
                self.thread = thread


# While at least one gate is entered, the methods of Tensor that give access to memory are patched, and so is
# Thread.start. A TorchFunctionMode would see these methods too, but within one torch does not use its fused
# kernels, and results differ in the last bits.
_READS: dict[str, Any] = {
    name: vars(Tensor).get(name) for name in ("tolist", "numpy", "data_ptr", "__array__", "__dlpack__")
}
"""The patched methods, with the function that Tensor itself defines. None if Tensor inherits the method."""
_START = threading.Thread.start
_lock = threading.Lock()
_gates: list[Gate] = []


@functools.wraps(_START)
def _start(thread: threading.Thread) -> None:
    # The new thread has no gate.
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
