"""Calls the hooks of one worker's handler: `forked`, `rehearse`, `setup` and `teardown`. Also measures its examples."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from ....errors import (
    CacheError,
    HandlerSetupError,
    PilotflameError,
    SettingsError,
    SnapshotChanged,
    SnapshotCorrupt,
    SourceError,
    not_whole,
)
from ....handlers.contract import Context
from ....handlers.failure import explain
from ....handlers.handler import Hook
from ..batching.latency_curve import Point
from ..leftovers import fork_safety
from ..link.worker_spec import WorkerSpec
from . import devices, output
from .function_setup import Built, call_hook, run_hook
from .host import WorkerHost
from .measurement import measure
from .runner import Runner
from .weights import WorkerWeights, limit_memory


class WorkerHooks:
    """Calls the hooks, on the thread or event loop of the handler's calls unless a method says otherwise."""

    def __init__(self, built: Built, spec: WorkerSpec, weights: WorkerWeights) -> None:
        self._built, self._spec, self._weights = built, spec, weights
        self._handler = built.handler
        self._host: WorkerHost | None = None
        self.state = built.state
        """What `setup` returned. Until `setup` has returned something other than None, this is what `build` returned."""

    def bind(self, host: WorkerHost) -> None:
        """Set the host, which the contexts of the hooks call."""
        self._host = host

    def forked(self) -> PilotflameError | None:
        """Call `forked`, while this process has one thread. Return why that failed."""
        if self._handler.forked is None:
            return None
        try:
            run_hook(self._handler.forked, self._context(None))
        except (Exception, SystemExit) as error:  # noqa: BLE001  the gateway reports it
            return explain(HandlerSetupError, "forked(context)", error, self._spec.code)
        return None

    async def rehearse(self, memory_mb: int | None) -> dict[str, Any]:
        """Call `rehearse` with weights of zeros, and return the head of the PRIMED frame. The process may use `memory_mb` of each GPU; None
        means no limit.

        The worker works without a rehearsal, too, so an error goes to the log. If a device has failed, this process cannot use
        it any more, and ends.
        """
        try:
            limit_memory(memory_mb)
            self._weights.blank()
            await self.call(self._handler.rehearse)
        except (Exception, SystemExit) as error:  # noqa: BLE001  as above
            self._log("rehearse(context)", error)
            if devices.may_be_of_device(error) and devices.failure(self._weights.snapshots) is not None:
                os._exit(1)
        return {"reserved": devices.reserved_bytes()}

    async def set_up(self, by_s: float | None, check: Callable[[], None]) -> PilotflameError | None:
        """Map the weights and call `setup`. Return why that failed. `by_s` is when fetched weights must have arrived, in monotonic seconds.

        `check` raises SnapshotChanged if the weights have changed since the deploy.
        """
        needed = self._handler.setup, self._weights.snapshots, self._built.prefixes, self._spec.resources.gpus
        if all(one is None for one in needed):
            return None
        try:
            self._weights.open(by_s)
            await self._beside_loop(self._weights.follow, needed=self._weights.arriving)
            with self._weights.gate():
                state = await self.call(self._handler.setup)
            await self._prepare_prefixes()
            check()
        except (CacheError, SnapshotChanged, SnapshotCorrupt, SourceError) as error:
            return not_whole(error)
        except (Exception, SystemExit) as error:  # noqa: BLE001  the gateway reports it
            return explain(HandlerSetupError, "Setting up a worker", error, self._spec.code)
        if state is not None:
            self.state = state
        return None

    async def measure(self, runner: Runner, stopped: Callable[[], bool]) -> list[Point]:
        """Measure how long the handler takes for its examples, until `stopped()` is true. Return the points measured so far."""
        curve: list[Point] = []
        # Do not measure while weights are arriving, because the measured times would include the wait for the weights.
        if not self._weights.arriving:
            try:
                await measure(runner, self._context(None), curve, stopped)
            except (Exception, SystemExit) as error:  # noqa: BLE001  the gateway learns from real invocations
                self._log("Measuring the example of @batch", error)
        return curve

    async def tear_down(self, restore: Callable[[], None]) -> None:
        """Call `restore`, and then `teardown`. If this thread runs the link's loop, call them on another thread.

        An error goes to the log, because the worker ends either way.
        """
        if self._handler.teardown is None:
            return

        def tear_down() -> None:
            # Let no invocation get what the hook prints.
            output.begin([])
            restore()
            with self._weights.gate():
                run_hook(self._handler.teardown, self._context(self._host))

        try:
            await self._beside_loop(tear_down)
        except (Exception, SystemExit) as error:  # noqa: BLE001  as above
            self._log("teardown(context)", error)

    def pin(self, stop: Callable[[], bool]) -> None:
        """Pin the weights for their copy to a device, until `stop()`. An error goes to the log."""
        try:
            self._weights.pin(stop)
        except (PilotflameError, OSError, RuntimeError) as error:
            self._log("Pinning the weights", error)

    async def call(self, hook: Hook | None) -> Any:
        return await call_hook(self._handler, hook, self._context(self._host))

    async def _prepare_prefixes(self) -> None:
        """Map the declared prefixes. If this node does not keep them, compute them. Raise SettingsError if no model uses them."""
        if (prefixes := self._built.prefixes) is None:
            return
        if prefixes.prepare is None:
            raise SettingsError(
                "[prefixes] has no effect, because the handler does not use it.",
                remedy="Write language_model(..., prefixes=context.prefixes) in `build`, or remove [prefixes].",
            )
        # Set the thread count on the thread that computes, because torch has a separate count for each thread.
        await self._beside_loop(partial(fork_safety.set_threads, self._built.threads), prefixes.prepare)

    async def _beside_loop(self, *calls: Callable[[], None], needed: bool = True) -> None:
        """Make blocking calls on this thread. If it runs the link's loop and `needed` is True, make them on another thread."""

        def run() -> None:
            for call in calls:
                call()

        if self._handler.kind.on_loop and needed:
            await asyncio.to_thread(run)
        else:
            run()

    def _context(self, host: WorkerHost | None) -> Context:
        return Context(
            self._spec.function, self._spec.revision, state=self.state, snapshots=self._weights.snapshots,
            host=host, prefixes=self._built.prefixes,
        )  # fmt: skip

    def _log(self, what: str, error: BaseException) -> None:
        sys.stderr.write(f"{explain(HandlerSetupError, what, error, self._spec.code)}\n")
