"""Runs a module while its weights arrive: every operation waits for the bytes of its own tensors only.

Before every operation of the thread that entered the gate, from Python or C++, torch calls `__torch_dispatch__`
with the tensors that the operation will read. So modules need no hooks, and it does not matter which
module uses a weight. Methods that give access to memory without an operation (`.numpy()`, `.tolist()`,
`.data_ptr()`, printing, torch.save) wait when they are called. Starting a thread inside the gate waits until
all bytes have arrived. The gate does not see the operations of a thread that was started before the gate was entered:
such a thread needs a gate of its own. Nor does the gate see reads through addresses that were taken before.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...errors import snapshot_errors_about
from ..fetching.arrival import Arrival
from .mapping import Mapping
from .touch import Extent, Touched

if TYPE_CHECKING:
    from .device.upload import DeviceUpload


class Unlanded:
    """A mapping with bytes that have not arrived yet. Errors begin with `subject`, which names the snapshot."""

    def __init__(self, mapping: Mapping, arrival: Arrival, subject: str = "") -> None:
        self.extents = Touched(mapping.flats).extents
        """Yields the bytes of the mapping that an operation reads or writes."""
        self._arrival, self.subject = arrival, subject

    @property
    def complete(self) -> bool:
        return self._arrival.complete

    def has(self, extent: Extent) -> bool:
        return self._arrival.has(*self._arrival.chunks.covering(*extent))

    def wait(self, extent: Extent) -> None:
        """Wait until this thread may submit an operation that uses these bytes. Raise the error of the fetch."""
        self._arrival.wait(*self._arrival.chunks.covering(*extent))

    def wait_for_all(self) -> None:
        """Block until every thread can use all bytes. Raise the error of the fetch."""
        self._arrival.wait(0, self._arrival.count - 1)


class Uncopied:
    """A slab with bytes that are not on their device yet. Errors begin with `subject`, which names the snapshot."""

    def __init__(self, upload: DeviceUpload, subject: str = "", deadline_s: float | None = None) -> None:
        """All waits end at `deadline_s`, in monotonic seconds."""
        self.extents = Touched([upload.slab]).extents
        """Yields the bytes of the slab that an operation reads or writes."""
        self._upload, self.subject, self._deadline_s = upload, subject, deadline_s

    @property
    def complete(self) -> bool:
        return self._upload.complete

    def has(self, extent: Extent) -> bool:
        return self._upload.has(*extent[1:])

    def wait(self, extent: Extent) -> None:
        """Wait until this thread may submit an operation that uses these bytes. Raise the error of the fetch."""
        self._upload.precede(*extent[1:], self._left_s())

    def wait_for_all(self) -> None:
        """Block until every thread can use all bytes. Raise the error of the fetch."""
        self._upload.wait(self._left_s())

    def _left_s(self) -> float | None:
        return None if self._deadline_s is None else max(0.0, self._deadline_s - time.monotonic())


Awaited = Unlanded | Uncopied
"""Regions of memory with bytes that have not arrived yet."""


class Gate(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context for operations on weights that still arrive: `with Gate(Unlanded(mapping, arrival)): model(x)`.

    An operation in this context raises the error of the fetch if the fetch has failed, or SourceUnavailable if the tensors
    of the operation do not arrive by the deadline of the arrival. Once all bytes have arrived, no gate is needed.
    """

    def __init__(self, *awaited: Awaited) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # The thread that entered the gate, or 0 while the gate waits: if the waiting code starts a thread, this start must
        # not wait for all bytes (see `_start`).
        self.thread = 0
        self._awaited = awaited

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # By default, torch would import torch._dynamo at the first operation, which takes 0.65 s of a cold start.
        return False

    def __enter__(self) -> Self:
        if "torch._dynamo" in sys.modules:
            _keep_compiler_out()
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
        """Wait for the bytes that `func` will read or write."""
        # Go through several mappings twice: the rows that an embedding reads are only known when its indices have
        # landed, and the indices may be in a later mapping than the rows.
        for one in self._awaited * min(2, len(self._awaited)):
            if not one.complete:
                for extent in one.extents(func, args, kwargs):
                    if not one.has(extent):
                        with self._waiting(), snapshot_errors_about(one.subject):
                            one.wait(extent)

    def wait_for_all(self) -> None:
        """Block until all bytes have arrived."""
        for one in self._awaited:
            if not one.complete:
                with self._waiting(), snapshot_errors_about(one.subject):
                    one.wait_for_all()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self.thread, thread = 0, self.thread
        try:
            yield
        finally:
            self.thread = thread


@functools.cache
def _keep_compiler_out() -> None:
    """Prevent torch.compile, which is loaded, from compiling frames of the gate.

    By default, torch compiles no frames of a mode. But the gate overrides `_should_skip_dynamo`, so torch would compile its
    frames.
    """
    disable = torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001
    disabled = disable(Gate.__torch_dispatch__, recursive=True)
    Gate.__torch_dispatch__ = disabled  # type: ignore[method-assign]


# While at least one gate is entered, patch Thread.start and the methods of Tensor that give access to memory. A
# TorchFunctionMode would see these methods too, but in such a mode torch does not use its fused kernels, and the results
# differ in the last bits.
_READS: dict[str, Any] = {
    name: vars(Tensor).get(name)
    for name in (
        "tolist", "numpy", "data_ptr", "__array__", "__dlpack__",
        # Printing turns all modes off, the gate too. torch.save pickles tensors, and then reads their storage.
        "__repr__", "__reduce_ex__",
    )
}  # fmt: skip
"""The patched methods. Maps each name to the function that Tensor itself defines, or None if Tensor inherits it."""
_START = threading.Thread.start
_lock = threading.Lock()
_gates: list[Gate] = []


@functools.wraps(_START)
def _start(thread: threading.Thread) -> None:
    # The operations of the new thread do not pass through a gate, so let all bytes arrive before it starts.
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
