"""Parks a worker: frees the device memory of its weights, until an invocation needs the weights.

Freeing the memory and bringing the weights back takes time. Both run in a thread, so that the link's loop stays free.
The hooks `park` and `unpark` do the same for memory of the handler's own. Frames that arrive meanwhile are deferred in order.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ....errors import PilotflameError
from ..link.connection import Link
from ..link.frames import Frame, FrameKind
from ..link.poll_loop import LinkLoop
from . import devices
from .owned_thread import start_thread
from .weights import WorkerWeights

# How long a worker that ends waits for a running hook. The gateway kills a worker that does not park or end in time.
HOOK_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class ParkingHooks:
    """The handler's hooks `park` and `unpark`. Each call blocks until the hook has ended, and returns or raises what the hook does."""

    park: Callable[[], Any]
    unpark: Callable[[], Any]


class WorkerParking:
    """Parks the weights of a worker, and brings them back. The gateway sends PARK only while the worker has no
    invocations. Call all methods except `wait_ended` and `restore` on the thread of the link's loop.
    """

    def __init__(
        self, weights: WorkerWeights, hooks: ParkingHooks, link: Link, loop: LinkLoop,
        deliver: Callable[[Frame], None], drain: Callable[[], None],
    ) -> None:  # fmt: skip
        """`deliver` gets the deferred frames.

        If the weights cannot come back, this object calls `drain`. Then the callers get another worker, or the error of
        that worker's start.
        """
        self.awake = True
        """False from PARK until the worker can run invocations again. While this is False, pass frames to `defer`."""
        self._weights, self._link, self._loop = weights, link, loop
        self._hooks = hooks
        self._deliver, self._drain = deliver, drain
        self._asked = self._closed = self._parked = self._hook_parked = False
        # The number in the last PARK frame, and how many PARK frames have arrived.
        self._number = self._parks = 0
        self._changed = threading.Condition()
        # The deferred frames. The gateway's window limits their number.
        self._deferred: list[Frame] = []
        # Clear while a thread parks the worker or brings it back.
        self._ended = threading.Event()
        self._ended.set()

    def park(self, number: int) -> None:
        """Free the device memory. Report the number of freed bytes to the gateway, with a PARKED frame that has this
        `number`.

        If an invocation arrives at the same moment, no memory is freed.
        """
        with self._changed:
            self._asked, self._number = True, number
            self._parks += 1
        if self.awake and not self._closed:
            self.awake = False
            self._ended.clear()
            # First handle the frames that arrived together with PARK, because one of them may wake the worker again.
            self._loop.call_soon(self._begin)

    def wake(self) -> None:
        """Begin to bring the weights back. The gateway may send invocations before the weights are back."""
        with self._changed:
            self._asked = False
            self._changed.notify()

    def defer(self, frame: Frame) -> None:
        """Wake the worker, and deliver a frame once it is awake."""
        self._deferred.append(frame)
        self.wake()

    def close(self) -> None:
        """Leave parked weights parked, because the worker ends, and deliver the deferred frames."""
        self._closed = True
        self.wake()

    def wait_ended(self) -> None:
        """After `close`, wait for a running hook and for the delivery of the deferred frames. Don't call it on the loop's thread."""
        self._ended.wait(HOOK_TIMEOUT_S)

    def restore(self) -> None:
        """Bring the weights back, if they are parked. Raise SnapshotError if a device has too little free memory.

        This does not call the hook `unpark`. Call it after `wait_ended`, and not on the loop's thread.
        """
        if self._parked and self._weights.snapshots is not None:
            self._weights.snapshots.unpark()
            self._parked = False
            self._weights.follow()

    def _begin(self) -> None:
        """Park, if that is still wanted. If not, deliver the deferred frames."""
        if self._asked and not self._closed:
            start_thread(self._run, "parking")
            return
        self.awake = True
        deferred, self._deferred = self._deferred, []
        for frame in deferred:
            self._deliver(frame)
        self._ended.set()

    def _run(self) -> None:
        hook_bytes = self._call_park()
        freed_bytes, reserved = self._give_back()
        head = {"freed_bytes": hook_bytes + freed_bytes, "reserved": reserved}
        with self._changed:
            parks = self._parks
            self._link.send_json(FrameKind.PARKED, self._number, head)
            self._changed.wait_for(lambda: not self._asked or self._parks != parks)
        if not self._closed:
            self._bring_back()
        self._loop.call_soon_threadsafe(self._begin)

    def _call_park(self) -> int:
        """Call the hook `park`. Return the number of freed bytes that the hook reports; 0 if the hook fails."""
        try:
            freed_bytes = self._hooks.park()
        except (Exception, SystemExit) as error:  # noqa: BLE001  user code: the worker works on
            sys.stderr.write(f"park(context) failed, so the handler keeps its memory: {error!r}\n")
            return 0
        self._hook_parked = True
        return freed_bytes if isinstance(freed_bytes, int) and freed_bytes > 0 else 0

    def _give_back(self) -> tuple[int, list[int]]:
        """Park the weights. Return how many bytes this has freed, and how many bytes torch keeps of each GPU."""
        self._parked, snapshots = True, self._weights.snapshots
        try:
            freed_bytes = snapshots.park() if snapshots is not None else 0
            return freed_bytes, devices.reserved_bytes()
        except (PilotflameError, RuntimeError) as error:
            # Weights that are not parked yet stay on their devices.
            sys.stderr.write(f"the weights could not be parked: {error}\n")
            return 0, []

    def _bring_back(self) -> None:
        try:
            self.restore()
        except (PilotflameError, RuntimeError) as error:
            sys.stderr.write(f"the weights could not be brought back: {error}\n")
            self._loop.call_soon_threadsafe(self._drain)
        else:
            if self._hook_parked and not self._closed:
                self._call_unpark()

    def _call_unpark(self) -> None:
        try:
            self._hooks.unpark()
            self._hook_parked = False
        except (Exception, SystemExit) as error:  # noqa: BLE001  another worker takes the calls
            sys.stderr.write(f"unpark(context) failed: {error!r}\n")
            self._loop.call_soon_threadsafe(self._drain)
