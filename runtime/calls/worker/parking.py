"""Parks a worker: frees the device memory of its weights, until an invocation needs the weights.

To free the memory and to bring the weights back takes time. Both run in a thread, so that the event loop stays free.
The hooks `park` and `unpark` do the same for memory of the handler's own. Frames that arrive meanwhile are held in order.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from ....errors import PilotflameError
from ....snapshot.named import Snapshots
from ..link.connection import Link
from ..link.frames import Frame, FrameKind
from . import devices

# How long `teardown` waits for a running hook. The gateway kills a worker that does not park or end in time.
HOOK_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class ParkingHooks:
    """The handler's hooks `park` and `unpark`. Each call returns what the hook returns, or raises what it raises."""

    park: Callable[[], Awaitable[Any]]
    unpark: Callable[[], Awaitable[Any]]


class WorkerParking:
    """Parks the weights of a worker, and brings them back. The gateway sends PARK only while the worker has no
    invocations.
    """

    def __init__(
        self, snapshots: Snapshots | None, hooks: ParkingHooks, link: Link, tasks: asyncio.TaskGroup,
        deliver: Callable[[Frame], None], follow: Callable[[Snapshots], None], drain: Callable[[], None],
    ) -> None:  # fmt: skip
        """`deliver` gets the frames that were held. Once the weights are coming back, a thread calls `follow`.

        If the weights cannot come back, this object calls `drain`. Then the callers get another worker, or the error of
        that worker's start.
        """
        self.awake = True
        """False from PARK until the worker can run invocations again: until then, pass frames to `hold`."""
        self._snapshots, self._link, self._tasks = snapshots, link, tasks
        self._hooks = hooks
        self._deliver, self._follow, self._drain = deliver, follow, drain
        self._asked = self._closed = self._parked = self._hook_parked = False
        self._number = 0
        self._needed = asyncio.Event()
        # The frames that wait. The gateway's window limits their number.
        self._held: list[Frame] = []
        # A lock is needed because `teardown` calls `restore` in its own thread.
        self._lock = threading.Lock()
        # Clear while a hook runs. `teardown` runs after it.
        self._hooks_ended = threading.Event()
        self._hooks_ended.set()

    def park(self, number: int) -> None:
        """Free the device memory. Report the number of freed bytes to the gateway, with a PARKED frame that has this
        `number`.

        If an invocation arrives at the same moment, no memory is freed.
        """
        self._asked, self._number = True, number
        self._needed.clear()
        if self.awake and not self._closed:
            self.awake = False
            self._tasks.create_task(self._run())

    def wake(self) -> None:
        """Begin to bring the weights back. The gateway may send invocations before the weights are back."""
        self._asked = False
        self._needed.set()

    def hold(self, frame: Frame) -> None:
        """Wake the worker, and deliver a frame once it is awake."""
        self._held.append(frame)
        self.wake()

    def close(self) -> None:
        """Bring no weights back any more, because the worker ends, and deliver the held frames."""
        self._closed = True
        self.wake()

    def restore(self) -> None:
        """Bring the weights back in this thread, if they are parked. Raise SnapshotError if a device has no room.

        Waits for a running hook, but does not call `unpark`. Don't call it on the event loop.
        """
        self._hooks_ended.wait(HOOK_TIMEOUT_S)
        self._restore_weights()

    def _restore_weights(self) -> None:
        with self._lock:
            if self._parked and self._snapshots is not None:
                self._snapshots.unpark()
                self._parked = False
                self._follow(self._snapshots)

    async def _run(self) -> None:
        while self._asked and not self._closed:
            hook_bytes = await self._call_park()
            freed_bytes, reserved = await asyncio.to_thread(self._give_back)
            head = {"freed_bytes": hook_bytes + freed_bytes, "reserved": reserved}
            self._link.send_json(FrameKind.PARKED, self._number, head)
            await self._needed.wait()
            if not self._closed:
                await self._bring_back()
        self.awake = True
        held, self._held = self._held, []
        for frame in held:
            self._deliver(frame)

    async def _call_park(self) -> int:
        """Call the hook `park`. Return how many bytes it says that it has freed."""
        self._hooks_ended.clear()
        try:
            freed_bytes = await self._hooks.park()
        except (Exception, SystemExit) as error:  # noqa: BLE001  user code: the worker works on
            sys.stderr.write(f"park(context) failed, so the handler keeps its memory: {error!r}\n")
            return 0
        else:
            self._hook_parked = True
            return freed_bytes if isinstance(freed_bytes, int) and freed_bytes > 0 else 0
        finally:
            self._hooks_ended.set()

    def _give_back(self) -> tuple[int, list[int]]:
        """Park the weights. Return how many bytes this has freed, and how many bytes torch keeps of each GPU."""
        try:
            with self._lock:
                self._parked = True
                freed_bytes = self._snapshots.park() if self._snapshots is not None else 0
                return freed_bytes, devices.reserved_bytes()
        except (PilotflameError, RuntimeError) as error:
            # Weights that are not parked yet stay on their devices.
            sys.stderr.write(f"the weights could not be parked: {error}\n")
            return 0, []

    async def _bring_back(self) -> None:
        try:
            await asyncio.to_thread(self._restore_weights)
        except (PilotflameError, RuntimeError) as error:
            sys.stderr.write(f"the weights could not be brought back: {error}\n")
            self._drain()
        else:
            if self._hook_parked and not self._closed:
                await self._call_unpark()

    async def _call_unpark(self) -> None:
        self._hooks_ended.clear()
        try:
            await self._hooks.unpark()
            self._hook_parked = False
        except (Exception, SystemExit) as error:  # noqa: BLE001  another worker takes the calls
            sys.stderr.write(f"unpark(context) failed: {error!r}\n")
            self._drain()
        finally:
            self._hooks_ended.set()
