"""The worker: the process that holds the model and answers invocations.

Born as a standby (connected, threads started, no weights). ACTIVATE makes it a worker: it maps the snapshot, runs
`setup`, and says READY. DRAIN or SIGTERM: finish what runs, give back the rest, `teardown`, exit.
Imports no HTTP server.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

import orjson
import uvloop
from setproctitle import setproctitle

from ...errors import HandlerSetupError, PilotflameError
from ...handlers.contract import NOTHING, Cancellation, Context
from ...handlers.failure import explain
from ...handlers.handler import Handler, Hook
from ...snapshot.handle import Snapshot
from ..batching.latency_curve import Point
from ..link.link import Frame, FrameKind, Link
from ..link.stream_credit import Credit
from ..link.worker_spec import WEIGHTS_TIMEOUT_S, WorkerSpec
from . import device_info, fork_safety
from .host import WorkerHost
from .loop_runner import LoopRunner
from .measurement import Measurement
from .runner import Call, Runner
from .thread_runner import ThreadRunner

# How long a worker that goes by itself waits for the gateway's word that nothing more is on its way.
RELEASE_TIMEOUT_S = 10.0
OWN_THREADS = ("main", "handler-0")  # of a standby
# How long the last answers may take to leave a worker that ends.
FLUSH_TIMEOUT_S = 10.0
LOG_FORMAT = "%(levelname)s %(invocation)s %(message)s"


@dataclass(frozen=True, slots=True)
class Built:
    """What a zygote hands to its workers by forking: the handler, what `build` returned, the planned snapshot."""

    handler: Handler
    state: Any
    snapshot: Snapshot | None
    threads: int


class Worker:
    """One worker process, from its HELLO to its exit."""

    def __init__(self, sock: socket.socket, spec: WorkerSpec, built: Built) -> None:
        self._sock = sock
        self._spec = spec
        self._handler = built.handler
        self._streaming = built.handler.kind.streaming
        self._snapshot = built.snapshot
        self._state = built.state
        self._threads = built.threads
        self._activated = threading.Event()
        self._draining = False
        self._measuring = False

    def run(self) -> None:
        """Lives. Returns when drained; the process ends at once when the gateway has gone."""
        configure_logging()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._live())

    async def _live(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._drained = asyncio.Event()
        self._released = asyncio.Event()
        self._prepared = asyncio.Event()
        self._loop.add_signal_handler(signal.SIGTERM, self._drain)
        self._link = Link(self._sock, self._loop)
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            self._runner = self._make_runner(tasks)
            self._host = WorkerHost(self._link, self._loop, self._runner, self._drain)
            self._link.bind(self._on_frame, self._on_lost)
            if self._handler.kind.on_loop:
                fork_safety.own_threads(self._threads)
                tasks.create_task(self._prepare_on_loop())
            else:
                threading.Thread(target=self._work_first, name="handler-0", daemon=True).start()
            await self._drained.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RELEASE_TIMEOUT_S):
                    await self._released.wait()
        self._link.finish(FLUSH_TIMEOUT_S)

    def _make_runner(self, tasks: asyncio.TaskGroup) -> Runner:
        concurrency = self._spec.concurrency
        if self._handler.kind.on_loop:
            return LoopRunner(self._handler, self._spec.code, self._link, concurrency, self._on_idle, tasks)
        return ThreadRunner(
            self._handler, self._spec.code, self._link, concurrency, self._on_idle, self._loop, self._gate
        )

    # -- becoming a worker

    def _work_first(self) -> None:
        """The first handler thread: gets ready ahead of time, sets up once activated, then works."""
        fork_safety.own_threads(self._threads)
        self._prepare()
        self._activated.wait()
        runner = self._runner
        if not isinstance(runner, ThreadRunner) or not self._set_up():
            return
        for number in range(1, self._spec.concurrency):
            threading.Thread(
                target=self._work_next, args=(runner,), name=f"handler-{number}", daemon=True
            ).start()
        self._say_ready(self._measured())
        runner.work()

    def _prepare(self) -> None:
        """What a standby does ahead of time: thread pool, kernels, a rehearsal. Nothing, if it is needed at once."""
        prime()
        if self._handler.rehearse is not None and not self._activated.is_set():
            try:
                answer = self._rehearse(self._handler.rehearse)
                if inspect.isawaitable(answer):
                    asyncio.run(_await(answer))
            except (Exception, SystemExit) as error:  # noqa: BLE001  a rehearsal may fail: the performance counts
                self._tell("rehearse(context)", error)
        self._link.send(FrameKind.PRIMED)

    async def _prepare_on_loop(self) -> None:
        prime()
        if self._handler.rehearse is not None and not self._activated.is_set():
            try:
                answer = self._rehearse(self._handler.rehearse)
                if inspect.isawaitable(answer):
                    await answer
            except (Exception, SystemExit) as error:  # noqa: BLE001  as above
                self._tell("rehearse(context)", error)
        self._link.send(FrameKind.PRIMED)
        self._prepared.set()

    def _rehearse(self, rehearse: Hook) -> Any:
        if self._snapshot is not None:
            self._snapshot.blank()
        return rehearse(self._context())

    def _tell(self, what: str, error: BaseException) -> None:
        """Nobody waits for this one: it goes to the log."""
        sys.stderr.write(f"{explain(HandlerSetupError, what, error, self._spec.code)}\n")

    def _work_next(self, runner: ThreadRunner) -> None:
        fork_safety.own_threads(self._threads)
        runner.work()

    def _activate(self, order: dict[str, Any]) -> None:
        os.environ.update(order.get("env", {}))
        self._measuring = bool(order.get("measure"))
        self._activated.set()
        if self._handler.kind.on_loop:
            # Nothing else needs this loop before READY, and torch keeps its threads per calling thread.
            self._tasks.create_task(self._set_up_on_loop())

    async def _set_up_on_loop(self) -> None:
        await self._prepared.wait()
        try:
            self._restore()
            if self._snapshot is not None and self._snapshot.arriving:
                # Tasks share their thread, and hand work to others: no gate could stand before all of it.
                await asyncio.to_thread(self._snapshot.wait, WEIGHTS_TIMEOUT_S)
            answer = self._call_setup()
            if inspect.isawaitable(answer):
                answer = await answer
        except (Exception, SystemExit) as error:  # noqa: BLE001  told to the gateway, which answers for it
            self._say_failed(error)
            return
        self._keep(answer)
        self._say_ready(await self._measured_on_loop())

    def _set_up(self) -> bool:
        try:
            self._restore()
            with self._gate():
                answer = self._call_setup()
                if inspect.isawaitable(answer):
                    answer = asyncio.run(_await(answer))
        except (Exception, SystemExit) as error:  # noqa: BLE001  told to the gateway, which answers for it
            self._say_failed(error)
            return False
        self._keep(answer)
        return True

    def _restore(self) -> None:
        """Weights mapped; they may still be arriving."""
        started_s = time.monotonic()
        snapshot = self._snapshot
        if snapshot is not None:
            foreign = threading.active_count() - len(OWN_THREADS)
            snapshot.open()
            if snapshot.arriving:
                threading.Thread(target=self._await_weights, args=(snapshot,), daemon=True).start()
                if foreign > 0 and not self._handler.kind.on_loop:
                    snapshot.wait(
                        WEIGHTS_TIMEOUT_S
                    )  # a rehearsal started threads; no gate stands before them
        self._restored_s = time.monotonic() - started_s

    def _call_setup(self) -> Any:
        return self._handler.setup(self._context()) if self._handler.setup is not None else None

    def _gate(self) -> contextlib.AbstractContextManager[Any]:
        """Around the user's code while weights are still coming: each operation waits for its own."""
        if self._snapshot is None or not self._snapshot.arriving:
            return contextlib.nullcontext()
        return self._snapshot.gate()

    def _await_weights(self, snapshot: Snapshot) -> None:
        """Weights that will never be whole are no worker's: the next one is given others."""
        try:
            snapshot.wait(WEIGHTS_TIMEOUT_S)
        except PilotflameError as error:
            sys.stderr.write(f"the weights did not arrive: {error}\n")
            self._loop.call_soon_threadsafe(self._drain)

    def _keep(self, answer: Any) -> None:
        if answer is not None:
            self._state = answer

    def _measurement(self) -> Measurement | None:
        """None if nobody asked, there is no example, or weights are still to come, which would be measured too."""
        spec, snapshot = self._handler.batch, self._snapshot
        if not self._measuring or spec is None or not spec.examples or (snapshot and snapshot.arriving):
            return None
        context = Context(self._spec.function, self._spec.revision, state=self._state, snapshot=snapshot)
        return Measurement(self._runner, context, lambda: self._draining)

    def _measured(self) -> list[Point]:
        if (measurement := self._measurement()) is None:
            return []
        try:
            measurement.run(self._gate)
        except (Exception, SystemExit) as error:  # noqa: BLE001  what is not known is learned later
            self._tell_unmeasured(measurement, error)
        return measurement.curve

    async def _measured_on_loop(self) -> list[Point]:
        if (measurement := self._measurement()) is None:
            return []
        try:
            await measurement.run_async()
        except (Exception, SystemExit) as error:  # noqa: BLE001  as above
            self._tell_unmeasured(measurement, error)
        return measurement.curve

    def _tell_unmeasured(self, measurement: Measurement, error: BaseException) -> None:
        measurement.note(error)
        self._tell("Measuring the example of @batch", error)

    def _say_ready(self, curve: list[Point]) -> None:
        head = {
            "window": self._runner.window,
            "slots": self._runner.slots,
            "batching": self._handler.batch is not None,
            "limit": self._runner.limit,
            "restore_s": self._restored_s,
            "device": device_info.device(),
            "dtype": device_info.dtype(self._snapshot),
        }
        if self._measuring:
            head["curve"] = [list(point) for point in curve]  # orjson takes no named tuples
        self._link.send(FrameKind.READY, 0, orjson.dumps(head))
        setproctitle(f"pilotflame: worker {self._spec.label}")

    def _say_failed(self, error: BaseException) -> None:
        told = explain(HandlerSetupError, "Setting up a worker", error, self._spec.code)
        self._link.send_json(FrameKind.FAILED, 0, told.to_wire())
        self._loop.call_soon_threadsafe(self._leave)

    # -- frames

    def _on_frame(self, frame: Frame) -> None:
        if frame.kind == FrameKind.INVOKE:
            self._invoke(frame)
        elif frame.kind == FrameKind.CANCEL:
            self._runner.cancel(frame.channel)
        elif frame.kind == FrameKind.MORE:
            self._runner.grant(frame.channel, int(frame.json()["count"]))
        elif frame.kind == FrameKind.ACTIVATE:
            self._activate(frame.json())
        elif frame.kind == FrameKind.DRAIN:
            self._released.set()
            self._drain()

    def _invoke(self, frame: Frame) -> None:
        if self._draining:
            self._link.send(FrameKind.RETURNED, frame.channel)
            return
        head = orjson.loads(frame.head)
        cancellation = Cancellation()
        remaining_s = head.get("remaining_s")
        context = Context(
            self._spec.function,
            self._spec.revision,
            invocation_id=head["id"],
            attempt=head.get("attempt", 1),
            deadline_s=None if remaining_s is None else time.monotonic() + remaining_s,
            state=self._state,
            snapshot=self._snapshot,
            cancellation=cancellation,
            traceparent=head.get("traceparent", ""),
            extra=head.get("extra", NOTHING),
            host=self._host,
            channel=frame.channel,
        )
        call = Call(
            frame.channel, frame.payload, head.get("type", ""), context, cancellation, head.get("accept", "")
        )
        if self._streaming:
            call.credit = Credit()
        self._runner.submit(call, head.get("more", 0))

    def _context(self) -> Context:
        return Context(
            self._spec.function,
            self._spec.revision,
            state=self._state,
            snapshot=self._snapshot,
            host=self._host,
        )

    # -- the end

    def _drain(self) -> None:
        if self._draining:
            return
        self._draining = True
        # If this was a signal, the gateway does not know yet and may be sending more. It answers with DRAIN, the last
        # frame: until then what comes is given back, so that nothing is lost unread.
        self._link.send(FrameKind.DRAIN)
        if not self._activated.is_set():
            self._leave()  # a standby has nothing to finish
            return
        for call in self._runner.close():
            self._link.send(FrameKind.RETURNED, call.channel)

    def _leave(self) -> None:
        """There is nothing to finish, and nothing that the gateway could have sent."""
        self._drained.set()
        self._released.set()

    def _on_idle(self) -> None:
        """Everything that ran has ended, after `close`."""
        if self._handler.teardown is None:
            self._drained.set()
        elif self._handler.kind.on_loop:
            self._tasks.create_task(asyncio.to_thread(self._tear_down))
        else:
            threading.Thread(target=self._tear_down, name="teardown", daemon=True).start()

    def _tear_down(self) -> None:
        try:
            answer = self._handler.teardown(self._context()) if self._handler.teardown else None
            if inspect.isawaitable(answer):
                asyncio.run(_await(answer))
        except (Exception, SystemExit) as error:  # noqa: BLE001  as above
            self._tell("teardown(context)", error)
        self._loop.call_soon_threadsafe(self._drained.set)

    def _on_lost(self) -> None:
        """The gateway has gone, and with it everyone who waits: nothing here is worth finishing."""
        os._exit(1)


async def _await(awaitable: Any) -> Any:
    return await awaitable


def prime() -> None:
    """Starts the thread pool and the matrix kernels ahead of the first forward pass."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    with torch.inference_mode():
        square = torch.zeros(128, 128)
        torch.nn.functional.linear(square, square)
        torch.zeros(1 << 17).add_(1)


class _InvocationField(logging.Filter):
    """Lines that name no invocation still fit the format."""

    def filter(self, record: logging.LogRecord) -> bool:
        if not hasattr(record, "invocation"):
            record.invocation = "-"
        return True


def configure_logging() -> None:
    """`context.log` and the logging module write to standard error, which is the function's log."""
    stream = logging.StreamHandler(sys.stderr)
    stream.addFilter(_InvocationField())
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, handlers=[stream], force=True)
