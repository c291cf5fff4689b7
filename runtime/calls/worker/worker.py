"""Runs a worker, the process that holds the model and runs invocations.

It starts as a standby, which is connected and has started its threads, but has no weights. After ACTIVATE it maps the
snapshot, runs `setup`, and sends READY. After DRAIN or SIGTERM it finishes the running invocations, returns the waiting
invocations to the gateway, runs `teardown` and exits.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from statistics import mode
from typing import TYPE_CHECKING, Any

import orjson
import uvloop
from setproctitle import setproctitle

from ....errors import (
    CacheError,
    HandlerSetupError,
    PilotflameError,
    SettingsError,
    SnapshotChanged,
    SnapshotCorrupt,
    SnapshotError,
    SourceError,
)
from ....handlers.caller import NO_ORIGIN, CallOrigin
from ....handlers.contract import NOTHING, Cancellation, Context
from ....handlers.failure import explain
from ....handlers.handler import Hook
from ....snapshot.named import Snapshots
from ...ground.settings.resources import CONTEXT_MB
from ..batching.latency_curve import Point
from ..leftovers import fork_safety
from ..link.connection import Link
from ..link.frames import Frame, FrameKind
from ..link.stream_credit import Credit
from ..link.worker_spec import STACKS_SIGNAL, WorkerSpec
from . import devices
from .exchange import WorkerExchange
from .function_setup import (
    Built,
    call_hook,
    call_hook_beside_loop,
    configure_logging,
    run_hook,
    run_without_loop,
    warm_up_torch,
)
from .host import WorkerHost
from .loop_runner import LoopRunner
from .measurement import measure
from .parking import ParkingHooks, WorkerParking
from .runner import Call, Runner, not_whole
from .thread_runner import ThreadRunner

if TYPE_CHECKING:
    from ....handlers.language_model.declared_prefixes import DeclaredPrefixes

# How long a worker that drains by itself waits for the gateway's DRAIN. The gateway sends no invocations after DRAIN.
RELEASE_TIMEOUT_S = 10.0
# How long a worker that ends may take to send its last answers.
FLUSH_TIMEOUT_S = 10.0


class Worker:
    """One worker process. Async handlers are set up on the event loop, other handlers on their first thread."""

    def __init__(
        self, sock: socket.socket, spec: WorkerSpec, built: Built, rehearsal_mb: int | None = None
    ) -> None:
        """`rehearsal_mb` is how much memory of each GPU `rehearse` may use: 0 if it must not run, None for no limit."""
        self._sock, self._rehearsal_mb = sock, rehearsal_mb
        self._spec = spec
        self._handler = built.handler
        self._on_event_loop = built.handler.kind.on_loop
        self._streaming = built.handler.kind.streaming
        self._snapshots, self._prefixes = built.snapshots, built.prefixes
        # Makes a context in which each torch operation waits until the weights that it reads have arrived.
        self._gate: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        if built.snapshots is not None:
            self._gate = built.snapshots.gate
        self._state = built.state
        self._threads, self._observers = built.threads, built.observers
        self._activated = threading.Event()
        self._draining = False
        self._measuring = False
        # The time by which fetched weights must have arrived, in monotonic seconds. ACTIVATE sets it.
        self._weights_by_s: float | None = None
        self._dtype = ""
        # True if other threads may use the weights too. A gate applies to one thread only.
        self._ungated = built.handler.kind.on_loop

    def run(self) -> None:
        """Run until the worker has drained. If the gateway ends, exit at once."""
        configure_logging()
        # Crashes and stuck threads are reported on standard error, which is the function's log.
        faulthandler.enable(file=2)
        faulthandler.register(STACKS_SIGNAL, file=2)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._run())

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._drained = asyncio.Event()
        self._released = asyncio.Event()
        self._loop.add_signal_handler(signal.SIGTERM, self._drain)
        self._link = Link(self._sock)
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            self._runner = self._make_runner(tasks)
            self._host = WorkerHost(self._link, self._runner, self._drain)
            if self._snapshots is not None:
                self._snapshots.adapters.fetch = self._host.fetch
            hooks = ParkingHooks(
                partial(self._call_hook, self._handler.park), partial(self._call_hook, self._handler.unpark)
            )
            self._parking = WorkerParking(
                self._snapshots, hooks, self._link, tasks, self._on_frame, self._follow_weights, self._drain
            )
            self._link.bind(self._on_frame, self._on_lost)
            if isinstance(self._runner, ThreadRunner):
                self._start_thread("handler-0", self._run_first_thread, self._runner)
            else:
                fork_safety.set_threads(self._threads)
                self._preparing = tasks.create_task(self._prepare())
            await self._drained.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RELEASE_TIMEOUT_S):
                    await self._released.wait()
        self._link.finish(FLUSH_TIMEOUT_S)
        for observer in self._observers:
            observer.close()

    def _make_runner(self, tasks: asyncio.TaskGroup) -> Runner:
        common = (self._handler, self._spec.code, self._link, self._spec.concurrency, self._on_idle)
        found: dict[str, Any] = {"probe": self._probe, "observers": self._observers}
        if checks := self._checks():
            found["check"] = checks[0] if len(checks) == 1 else lambda: [check() for check in checks]
        if self._on_event_loop:
            return LoopRunner(*common, tasks, **found)
        return ThreadRunner(*common, self._loop, self._gate, **found)

    def _checks(self) -> list[Callable[[], None]]:
        """Return the functions that raise SnapshotChanged if files in folders have changed. Files in a cache need none."""
        found = []
        if self._snapshots is not None and self._snapshots.compare:
            found.append(self._snapshots.check)
        if self._prefixes is not None:
            found.append(self._prefixes.kept.check)
        return found

    def _run_first_thread(self, runner: ThreadRunner) -> None:
        fork_safety.set_threads(self._threads)
        run_without_loop(self._prepare())
        self._activated.wait()
        if run_without_loop(self._set_up()):
            for number in range(1, self._spec.concurrency):
                self._start_thread(f"handler-{number}", self._run_next_thread, runner)
            run_without_loop(self._become_ready())
            runner.work()

    def _run_next_thread(self, runner: ThreadRunner) -> None:
        fork_safety.set_threads(self._threads)
        runner.work()

    async def _set_up_on_loop(self) -> None:
        await self._preparing
        if await self._set_up():
            await self._become_ready()

    async def _prepare(self) -> None:
        """Start torch's threads and call `rehearse`, before ACTIVATE. Then send PRIMED."""
        warm_up_torch()
        # Find the dtype before ACTIVATE, because this takes as long as mapping the weights (0.7 ms).
        self._dtype = most_common_dtype(self._snapshots)
        head = {}
        if self._handler.rehearse is not None and self._rehearsal_mb != 0 and not self._activated.is_set():
            try:
                devices.limit_memory(_torchs_part(self._rehearsal_mb))
                if self._snapshots is not None:
                    self._snapshots.blank()
                await call_hook(self._handler, self._handler.rehearse, self._context(self._host))
            except (Exception, SystemExit) as error:  # noqa: BLE001  the worker works without a rehearsal
                self._log_failure("rehearse(context)", error)
                if devices.may_be_of_device(error) and devices.failure(self._snapshots) is not None:
                    # This process cannot use the device any more.
                    os._exit(1)
            head["reserved"] = devices.reserved_bytes()
        self._link.send_json(FrameKind.PRIMED, 0, head)
        if "reserved" in head and self._snapshots is not None:
            if self._on_event_loop:
                self._start_thread("pin", self._pin_weights, self._snapshots)
            else:
                self._pin_weights(self._snapshots)

    def _pin_weights(self, snapshots: Snapshots) -> None:
        """Pin the weights for their copy to a device, until ACTIVATE."""
        try:
            snapshots.pin(self._activated.is_set)
        except (PilotflameError, OSError, RuntimeError) as error:
            self._log_failure("Pinning the weights", error)

    async def _set_up(self) -> bool:
        """Map the weights and call `setup`. Send FAILED and return False if that fails."""
        try:
            if self._spec.resources.gpus:
                # The rehearsal may have had another limit.
                devices.limit_memory(_torchs_part(self._spec.resources.gpu_memory_mb))
            if self._snapshots is not None:
                await self._restore(self._snapshots)
            with self._gate():
                state = await call_hook(self._handler, self._handler.setup, self._context(self._host))
            if self._prefixes is not None:
                await self._prepare_prefixes(self._prefixes)
            self._runner.check()
        except (Exception, SystemExit) as error:  # noqa: BLE001  the gateway reports it
            if isinstance(error, (CacheError, SnapshotChanged, SnapshotCorrupt, SourceError)):
                failure: PilotflameError = not_whole(error)
            else:
                failure = explain(HandlerSetupError, "Setting up a worker", error, self._spec.code)
            self._link.send_json(FrameKind.FAILED, 0, failure.to_wire(private=True))
            self._loop.call_soon_threadsafe(self._leave)
            return False
        if state is not None:
            self._state = state
        return True

    async def _prepare_prefixes(self, prefixes: DeclaredPrefixes) -> None:
        """Map the declared prefixes. If this node does not keep them, compute them. Raise SettingsError if no model uses them."""

        def run(prepare: Callable[[], None]) -> None:
            # Torch keeps its thread count separately for each thread.
            fork_safety.set_threads(self._threads)
            prepare()

        if prefixes.prepare is None:
            raise SettingsError(
                "[prefixes] has no effect, because the handler does not use it.",
                remedy="Write language_model(..., prefixes=context.prefixes) in `build`, or remove [prefixes].",
            )
        if self._on_event_loop:
            await asyncio.to_thread(run, prefixes.prepare)
        else:
            run(prefixes.prepare)

    async def _restore(self, snapshots: Snapshots) -> None:
        """Map the weights. Some of their bytes may still be arriving when this returns."""
        # If there are threads beside the main thread and the first handler thread, the rehearsal has started them. The
        # tasks of async handlers share the loop's thread, and may also use other threads.
        self._ungated = self._on_event_loop or threading.active_count() > 2 or self._spec.wait_for_weights
        snapshots.open()
        if self._weights_by_s is not None:
            snapshots.limit(self._weights_by_s)
        if snapshots.arriving and self._on_event_loop:
            await asyncio.to_thread(self._follow_weights, snapshots)
        else:
            self._follow_weights(snapshots)

    def _follow_weights(self, snapshots: Snapshots) -> None:
        """Watch weights that are still arriving, in a thread. If no gate waits for the weights, wait for all of them
        here.
        """
        if snapshots.arriving:
            self._start_thread("weights", self._await_weights, snapshots)
            if self._spec.wait_for_weights or (self._ungated and not snapshots.gated):
                snapshots.wait()

    def _await_weights(self, snapshots: Snapshots) -> None:
        """Wait for all weights. If they do not arrive, drain: the next worker starts with another fetch.

        torch reports the failure of a device as a RuntimeError.
        """
        try:
            snapshots.wait()
        except (PilotflameError, RuntimeError) as error:
            sys.stderr.write(f"the weights did not arrive: {error}\n")
            self._loop.call_soon_threadsafe(self._drain)
        else:
            for copy in _copies(snapshots):
                self._link.send_json(FrameKind.COPIED, 0, copy)

    async def _become_ready(self) -> None:
        curve: list[Point] = []
        # While weights are arriving, the measured times would include the wait for the weights.
        if self._measuring and not (self._snapshots and self._snapshots.arriving):
            try:
                await measure(self._runner, self._context(None), curve, lambda: self._draining)
            except (Exception, SystemExit) as error:  # noqa: BLE001  the gateway learns from real invocations
                self._log_failure("Measuring the example of @batch", error)
        runner = self._runner
        head = {
            "window": runner.window, "slots": runner.slots, "limit": runner.limit,
            "batching": self._handler.batch is not None,
            "device": devices.describe(), "dtype": self._dtype,
        }  # fmt: skip
        if self._snapshots is not None and (copies := _copies(self._snapshots)):
            head["copies"] = copies
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
            self._runner.check()
        except SnapshotError as error:
            sys.stderr.write(f"another worker replaces this one: {error}\n")
        else:
            if (failure := devices.failure(self._snapshots)) is None:
                return
            sys.stderr.write(
                f"a device of this worker has failed, so another worker replaces it: {failure}\n"
            )
        drained = threading.Event()

        def drain() -> None:
            self._drain()
            drained.set()

        self._loop.call_soon_threadsafe(drain)
        drained.wait(RELEASE_TIMEOUT_S)

    def _log_failure(self, what: str, error: BaseException) -> None:
        sys.stderr.write(f"{explain(HandlerSetupError, what, error, self._spec.code)}\n")

    def _start_thread(self, name: str, run: Callable[..., None], *arguments: Any) -> None:
        threading.Thread(target=run, args=arguments, name=name, daemon=True).start()

    async def _call_hook(self, hook: Hook | None) -> Any:
        return await call_hook_beside_loop(self._handler, hook, self._context(self._host))

    def _context(self, host: WorkerHost | None) -> Context:
        spec = self._spec
        return Context(
            spec.function,
            spec.revision,
            state=self._state,
            snapshots=self._snapshots,
            host=host,
            prefixes=self._prefixes,
        )

    def _on_frame(self, frame: Frame) -> None:
        if frame.kind == FrameKind.INVOKE:
            self._invoke(frame)
        elif frame.kind == FrameKind.CANCEL:
            if self._parking.awake:
                self._runner.cancel(frame.channel)
            else:
                self._parking.hold(frame)
        elif frame.kind == FrameKind.MORE:
            self._runner.grant(frame.channel, int(frame.json()["count"]))
        elif frame.kind in (FrameKind.INPUT, FrameKind.INPUT_END):
            self._runner.feed(frame.channel, frame.payload, last=frame.kind == FrameKind.INPUT_END)
        else:
            self._on_control(frame)

    def _on_control(self, frame: Frame) -> None:
        """Handle a frame that belongs to no invocation."""
        if frame.kind == FrameKind.ACTIVATE:
            self._activate(frame.json())
        elif frame.kind == FrameKind.HELD:
            self._host.on_held(frame.json())
        elif frame.kind == FrameKind.DRAIN:
            self._released.set()
            self._drain()
        elif frame.kind == FrameKind.ASK_BACK:
            # A worker that drains has given them back already.
            for call in [] if self._draining else self._runner.give_back():
                self._link.send(FrameKind.RETURNED, call.channel)
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
        if self._on_event_loop:
            # Run `setup` on the loop's thread, because the handler's calls run there too. Torch keeps its thread count
            # separately for each thread that calls it, so a count set on another thread would not apply to these calls.
            # `setup` may block the loop, which has nothing else to do before READY.
            self._tasks.create_task(self._set_up_on_loop())

    def _invoke(self, frame: Frame) -> None:
        if self._draining:
            self._link.send(FrameKind.RETURNED, frame.channel)
            return
        if not self._parking.awake:
            self._parking.hold(frame)
            return
        head = orjson.loads(frame.head)
        cancellation = Cancellation()
        remaining_s = head.get("remaining_s")
        context = Context(
            self._spec.function, self._spec.revision,
            invocation_id=head["id"], attempt=head.get("attempt", 1),
            deadline_s=None if remaining_s is None else time.monotonic() + remaining_s,
            state=self._state, snapshots=self._snapshots, cancellation=cancellation,
            traceparent=head.get("traceparent", ""), extra=head.get("extra", NOTHING),
            host=self._host, channel=frame.channel, tracestate=head.get("tracestate", ""),
        )  # fmt: skip
        if self._handler.exchanges and "exchange" in head:
            context.exchange = exchange = WorkerExchange(self._link, frame.channel, follows=head["exchange"])
        else:
            exchange = None
        credit = Credit() if self._streaming else None
        call = Call(
            frame.channel, frame.payload, head.get("type", ""), context, cancellation,
            head.get("accept", ""), credit, head.get("execution_s"), exchange,
            CallOrigin(*head["origin"]) if "origin" in head else NO_ORIGIN,
        )  # fmt: skip
        self._runner.submit(call, head.get("more", 0))

    def _drain(self) -> None:
        if self._draining:
            return
        self._draining = True
        # If the worker drains by itself, invocations may still be arriving: `_invoke` returns them. The
        # gateway answers this DRAIN with its own, and sends no invocations after it.
        self._link.send(FrameKind.DRAIN)
        if not self._activated.is_set():
            self._leave()
            return
        for call in self._runner.close():
            self._link.send(FrameKind.RETURNED, call.channel)
        self._parking.close()

    def _leave(self) -> None:
        """Exit without waiting for DRAIN: before READY, there are no invocations to finish or return."""
        self._drained.set()
        self._released.set()

    def _on_idle(self) -> None:
        """Run `teardown`, if there is one, and end. The runner calls this after `close`, once no group runs."""
        if self._handler.teardown is None:
            self._drained.set()
        else:
            self._start_thread("teardown", self._tear_down)

    def _tear_down(self) -> None:
        try:
            self._parking.restore()
            with self._gate():
                run_hook(self._handler.teardown, self._context(self._host))
        except (Exception, SystemExit) as error:  # noqa: BLE001  the worker ends either way
            self._log_failure("teardown(context)", error)
        self._loop.call_soon_threadsafe(self._drained.set)

    def _on_lost(self) -> None:
        """Exit at once: the gateway has ended or closed the link, so no result can be sent any more."""
        os._exit(1)


def _copies(snapshots: Snapshots) -> list[dict[str, Any]]:
    """Return, for each snapshot with weights on a device, how long ago its copy began and how long the copy took.

    "took_s" is None while the copy runs. "context" has the same two numbers for the device's context: how long ago its
    creation began ("ago_s"), and how long the creation took ("took_s").
    """
    found, now_s = [], time.monotonic()
    for name in snapshots:
        if (copied := snapshots[name].copied) is not None:
            started_s, ended_s = copied
            if not (ended_s or snapshots[name].arriving):
                ended_s = now_s
            took_s = ended_s - started_s if ended_s else None
            begun_s, made_s = snapshots[name].device_made or (now_s, now_s)
            context = {"ago_s": now_s - begun_s, "took_s": made_s - begun_s}
            found.append({"name": name, "ago_s": now_s - started_s, "took_s": took_s, "context": context})
    return found


def _torchs_part(memory_mb: int | None) -> int | None:
    """Return the bytes that torch may allocate on a GPU if the process may use `memory_mb` there. The context takes the
    rest.
    """
    return None if memory_mb is None else (memory_mb - CONTEXT_MB) << 20


def most_common_dtype(snapshots: Snapshots | None) -> str:
    """Return the most common dtype of the snapshots' tensors, or "" if there are no tensors."""
    manifests = [snapshots[name].manifest for name in snapshots] if snapshots is not None else []
    dtypes = [tensor.dtype for manifest in manifests for tensor in manifest.tensors]
    return mode(dtypes) if dtypes else ""
