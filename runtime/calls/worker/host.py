"""Lets handlers, from any thread, report progress, retire their worker, and change its concurrency."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

from ....errors import LauncherError, OutputInvalid, PilotflameError, SnapshotError
from ....handlers.codec import JSON_TYPE, OutputCodec
from ..link.connection import Link
from ..link.frames import FrameKind, check_output
from ..link.poll_loop import LinkLoop
from .runner import Runner

# A handler may report progress very often, so at most one report of an invocation is sent per interval.
PROGRESS_INTERVAL_S = 0.05
MAX_CONCURRENCY = 1024
# How long a handler thread waits for the link's loop to do what the thread asked for. Then the thread goes on anyway.
LOOP_TIMEOUT_S = 10.0
# How long a thread waits for the gateway's answer to NEED. Longer than the 300 s within which the fetcher answers.
HOLD_TIMEOUT_S = 330.0


class WorkerHost:
    """The part of a worker that the handler's context calls."""

    def __init__(
        self, link: Link, loop: LinkLoop, runner: Runner, drain: Callable[[], None], *, on_loop: bool
    ) -> None:
        """With `on_loop`, this thread runs the link's loop."""
        self._link, self._loop = link, loop
        self._runner = runner
        self._drain = drain
        self._loop_thread = threading.get_ident() if on_loop else None
        self._codec = OutputCodec(None)
        self._lock = threading.Lock()
        self._latest: dict[int, bytes] = {}
        self._waiting = False
        # The requests for adapters that the gateway has not answered, by the adapter's name.
        self._needed: dict[str, Future[float]] = {}

    def progress(self, channel: int, value: Any) -> None:
        """Report the progress of the invocation on `channel`. Raise OutputInvalid if `value` is not JSON, or too large."""
        payload = self._encoded(value)
        with self._lock:
            if self._link.closed:
                return
            if self._waiting:
                self._latest[channel] = payload
                return
            self._waiting = True
            self._link.send(FrameKind.PROGRESS, channel, b"", payload)
        self._loop.call_soon_threadsafe(self._loop.call_later, PROGRESS_INTERVAL_S, self._flush)

    def metrics(self, channel: int, values: Mapping[str, Any]) -> None:
        """Report metrics of the invocation on `channel`. Raise OutputInvalid if they are not JSON, or too large."""
        payload = self._encoded(values)
        with self._lock:
            if not self._link.closed:
                self._link.send(FrameKind.METRICS, channel, b"", payload)

    def _encoded(self, value: Any) -> bytes:
        payload, kind = self._codec.encode(value)
        if kind != JSON_TYPE:
            raise OutputInvalid("A report must be JSON, this is bytes.", remedy="Decode the bytes.")
        check_output(payload)
        return payload

    def retire(self) -> None:
        """Drain the worker: it starts no more invocations, and exits once the running invocations were answered."""
        self._on_loop(self._drain, "the drain")

    def resize(self, concurrency: int) -> None:
        """Run `concurrency` invocations at the same time, if the handler is async."""
        resize = partial(self._runner.resize, min(max(1, concurrency), MAX_CONCURRENCY))
        self._on_loop(resize, "the change of the concurrency")

    def fetch(self, name: str) -> float:
        """Ask the gateway to fetch an adapter. Block until its files can be mapped, and return the seconds within which their
        bytes arrive.

        Raise what the fetch has raised, LauncherError if the gateway does not answer, and SnapshotError on the event loop.
        """
        if threading.get_ident() == self._loop_thread:
            fault = "An adapter was opened on the event loop, which would stop while it is fetched."
            raise SnapshotError(fault, remedy="Write: await asyncio.to_thread(context.adapters.open, NAME).")
        with self._lock:
            needed = self._needed[name] = Future()
            self._link.send_json(FrameKind.NEED, 0, {"name": name})
        try:
            return needed.result(HOLD_TIMEOUT_S)
        except TimeoutError:
            raise LauncherError(
                f"The gateway did not say within {HOLD_TIMEOUT_S:.0f} s where {name} is."
            ) from None

    def on_held(self, head: Mapping[str, Any]) -> None:
        """End the wait of `fetch` for an adapter, with the seconds or the error in a HELD frame."""
        if (needed := self._needed.pop(head["name"], None)) is None:
            return
        if "error" in head:
            needed.set_exception(PilotflameError.from_wire(head["error"]))
        else:
            needed.set_result(float(head["weights_s"]))

    def _on_loop(self, act: Callable[[], None], what: str) -> None:
        """Call `act` on the thread of the link's loop and wait until it is done. `what` names the action in a message.

        `retire` has to wait: otherwise this thread could start another invocation before the drain.
        """
        if threading.get_ident() == self._loop_thread:
            act()
            return
        done = threading.Event()
        self._loop.call_soon_threadsafe(act)
        self._loop.call_soon_threadsafe(done.set)
        if not done.wait(LOOP_TIMEOUT_S):
            sys.stderr.write(
                f"the worker's event loop was busy for {LOOP_TIMEOUT_S:g} s; going on before {what}\n"
            )

    def _flush(self) -> None:
        with self._lock:
            latest, self._latest = self._latest, {}
            self._waiting = bool(latest)
            for channel, payload in latest.items():
                self._link.send(FrameKind.PROGRESS, channel, b"", payload)
        if latest:
            self._loop.call_later(PROGRESS_INTERVAL_S, self._flush)
