"""Runs a worker, the process that holds the model and runs invocations.

It starts as a standby, which is connected, but has no weights. After ACTIVATE it maps the snapshot, runs `setup`, and sends READY.
After DRAIN, SIGTERM or the end of its parent, it finishes the running invocations, returns the waiting invocations to the
gateway, runs `teardown` and exits. If the link is lost, it exits at once.

The handler runs on the main thread, as in a process of its own. The link of a plain handler (`main_thread_worker.py`) runs on
another thread, and the link of an async handler (`loop_worker.py`) on the handler's event loop.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

from setproctitle import setproctitle

from ....errors import SnapshotError
from ....handlers.handler import Hook
from ..leftovers import signals
from ..leftovers.signals import AuthorsHandlers
from ..link.connection import Link
from ..link.frames import Frame, FrameKind
from ..link.poll_loop import LinkLoop
from ..link.worker_spec import WorkerSpec
from . import devices
from .function_setup import Built, warm_up_torch
from .hooks import WorkerHooks
from .host import WorkerHost
from .incoming import IncomingCalls
from .parking import ParkingHooks, WorkerParking
from .runner import Runner
from .weights import WorkerWeights

# How long a worker that drains by itself waits for the gateway's DRAIN. The gateway sends no invocations after DRAIN.
RELEASE_TIMEOUT_S = 10.0
# How long a worker that ends may take to send its last answers.
FLUSH_TIMEOUT_S = 10.0


class WorkerConnection(NamedTuple):
    """What a worker process gets at its start."""

    sock: socket.socket
    """The link to the gateway."""
    parents_end: int | None = None
    """A descriptor that is readable once the parent has ended."""
    rehearsal_mb: int | None = None
    """How much memory of each GPU `rehearse` may use: 0 if it must not run, None for no limit."""
    at_end: Callable[[], None] = lambda: None
    """Called at the end of the process."""


class Worker(ABC):
    """One worker process. Subclasses choose the threads of the handler and of the link."""

    def __init__(self, spec: WorkerSpec, built: Built, authors_handlers: AuthorsHandlers) -> None:
        """Call this once, in the zygote, because this work in each fork would copy more memory."""
        self._spec, self._built, self._handler = spec, built, built.handler
        self._authors_handlers = authors_handlers
        self._weights = WorkerWeights(built.snapshots, spec, shared=self._handler.kind.on_loop)
        self._check = self._find_check()
        self.hooks = WorkerHooks(built, spec, self._weights)
        self._activated = threading.Event()
        self._draining = self._measuring = False
        # The time by which fetched weights must have arrived, in monotonic seconds. ACTIVATE sets it.
        self._weights_by_s: float | None = None

    def run(self, connection: WorkerConnection) -> None:
        """Run until the worker has drained. Call it on the main thread."""
        self._connection = connection
        self._serve()

    @abstractmethod
    def _serve(self) -> None:
        """Serve the link and run the handler until the worker has drained, and finish."""

    # -- the parts of a worker, made on the main thread

    def _assemble(self, link: Link, loop: LinkLoop, runner: Runner) -> None:
        self._link, self._loop, self._runner = link, loop, runner
        self._host = WorkerHost(link, loop, runner, self._drain, on_loop=self._handler.kind.on_loop)
        snapshots = self._built.snapshots
        if snapshots is not None:
            snapshots.adapters.fetch = self._host.fetch
        self.hooks.bind(self._host)
        self._weights.bind(link, lambda: loop.call_soon_threadsafe(self._drain))
        self._calls = IncomingCalls(self._handler, self._spec, link, runner, self.hooks, snapshots)
        hooks = ParkingHooks(
            lambda: self._call_from_thread(self._handler.park),
            lambda: self._call_from_thread(self._handler.unpark),
        )
        self._parking = WorkerParking(self._weights, hooks, link, loop, self._on_frame, self._drain)
        self._calls.bind(self._host, self._parking)

    def _runner_options(self) -> dict[str, Any]:
        """Return the keyword arguments of the runner."""
        return {"probe": self._probe, "check": self._check, "observers": self._built.observers}

    def _find_check(self) -> Callable[[], None]:
        """Return a function that raises SnapshotChanged if local weights or kept prefixes have changed. Fetched weights need no check."""
        snapshots, prefixes = self._built.snapshots, self._built.prefixes
        checks = [snapshots.check] if snapshots is not None and snapshots.compare else []
        checks += [prefixes.kept.check] if prefixes is not None else []
        if len(checks) == 1:
            return checks[0]

        def check() -> None:
            for one in checks:
                one()

        return check

    def _share_signals(self, on_term: signals.SignalHandler, close: Callable[[], None]) -> None:
        """Set the signal handlers of the function's code. `on_term` is this worker's handler of SIGTERM, which is set already.

        The end of the parent drains this worker as SIGTERM does. A process that the function's code forks calls `close`.
        """
        if (parent := self._connection.parents_end) is not None:
            self._loop.add_reader(parent, self._on_parents_end)
        self._authors_handlers.restore()

        def leave() -> None:
            self._link.close_in_fork()
            if parent is not None:
                os.close(parent)
            close()

        signals.leave_to_forks(on_term, leave)

    def _on_parents_end(self) -> None:
        if (parent := self._connection.parents_end) is not None:
            self._loop.remove_reader(parent)
        self._drain()

    # -- the handler's thread

    async def _prepare(self) -> None:
        """Start torch's threads and call `rehearse`, before ACTIVATE. Then send PRIMED."""
        warm_up_torch()
        self._weights.find_dtype()
        memory_mb = self._connection.rehearsal_mb
        wanted = self._handler.rehearse is not None and memory_mb != 0 and not self._activated.is_set()
        head = await self.hooks.rehearse(memory_mb) if wanted else {}
        self._link.send_json(FrameKind.PRIMED, 0, head)
        if wanted:
            self._pin()

    def _pin(self) -> None:
        self.hooks.pin(self._activated.is_set)

    async def _set_up(self) -> bool:
        """Map the weights and call `setup`. Send FAILED and return False if that fails."""
        if (failure := await self.hooks.set_up(self._weights_by_s, self._check)) is not None:
            self._link.send_json(FrameKind.FAILED, 0, failure.to_wire(private=True))
            return False
        return True

    async def _become_ready(self) -> None:
        curve = await self.hooks.measure(self._runner, lambda: self._draining) if self._measuring else []
        limits = self._runner.limits
        head = {
            "window": limits.window, "slots": limits.slots, "limit": limits.limit,
            "batching": self._handler.batch is not None, **self._weights.facts(),
        }  # fmt: skip
        if self._measuring:
            # orjson cannot encode named tuples.
            head["curve"] = [list(point) for point in curve]
        self._link.send_json(FrameKind.READY, 0, head)
        setproctitle(f"pilotflame: worker {self._spec.label}")

    def _probe(self) -> None:
        """Drain if a device has failed, or if the weights have changed since the deploy, because every call would fail. The
        next worker makes a new context on the device, and maps the weights again.

        Don't call this on the loop's thread. When it returns, no group starts any more, and DRAIN was sent to the
        gateway.
        """
        try:
            self._check()
        except SnapshotError as error:
            sys.stderr.write(f"another worker replaces this one: {error}\n")
        else:
            if (failure := devices.failure(self._built.snapshots)) is None:
                return
            sys.stderr.write(
                f"a device of this worker has failed, so another worker replaces it: {failure}\n"
            )
        drained = threading.Event()
        self._loop.call_soon_threadsafe(self._drain)
        self._loop.call_soon_threadsafe(drained.set)
        drained.wait(RELEASE_TIMEOUT_S)

    @abstractmethod
    def _call_from_thread(self, hook: Hook | None) -> Any:
        """Call `park` or `unpark` for the parking thread, and wait until the hook has ended."""

    # -- the thread of the link's loop

    def _on_frame(self, frame: Frame) -> None:
        if self._calls.take(frame):
            return
        if frame.kind == FrameKind.ACTIVATE:
            self._activate(frame.json())
        elif frame.kind == FrameKind.HELD:
            self._host.on_held(frame.json())
        elif frame.kind == FrameKind.DRAIN:
            self._release()
            self._drain()
        elif frame.kind == FrameKind.PARK:
            self._parking.park(frame.channel)
        elif frame.kind == FrameKind.UNPARK:
            self._parking.wake()

    def _activate(self, head: dict[str, Any]) -> None:
        os.environ.update(head.get("env", {}))
        self._measuring = bool(head.get("measure"))
        if (weights_s := head.get("weights_s")) is not None:
            self._weights_by_s = time.monotonic() + weights_s
        self._activated.set()

    def _drain(self) -> None:
        if self._draining:
            return
        self._draining = True
        # If the worker drains by itself, invocations may still arrive, and the worker returns them. The gateway answers this
        # DRAIN with a DRAIN, and sends no invocations after that.
        self._link.send(FrameKind.DRAIN)
        if self._activated.is_set():
            self._calls.close()
        else:
            self._leave()

    @abstractmethod
    def _release(self) -> None:
        """Let the worker end after its drain, because the gateway sends no more invocations."""

    @abstractmethod
    def _leave(self) -> None:
        """Exit without having been set up: there are no invocations to finish or return."""

    def _finish(self) -> None:
        """Send the last frames, and close the link and the observers. The loop must not run any more."""
        self._link.finish(FLUSH_TIMEOUT_S)
        for observer in self._built.observers:
            observer.close()
        self._connection.at_end()


def exit_at_once() -> None:
    """Exit: the gateway has ended or closed the link, so no result can be sent any more."""
    os._exit(1)
