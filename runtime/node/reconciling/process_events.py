"""Handles the events of one revision's processes: recovers calls, logs how workers end, and has the reconciler look."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from ....errors import HandlerSetupError, PilotflameError, for_callers
from ...calls.link.child import UNKNOWN_CAUSE, EndCause
from ...calls.link.worker_spec import Weights
from ...calls.serving.invocation import Invocation
from ...calls.serving.replica import Replica
from ...ground.telemetry.decisions import describe
from ...ground.telemetry.logs import RevisionLog
from ...ground.telemetry.timeline import StartCause
from ..scaling.revision_state import Phase
from .carry_out import CarryOut
from .gpu_bookings import GpuBooking
from .inventory import Inventory
from .pool import STOP_TIMEOUT_S, PoolEvents
from .revision_parts import RevisionParts

# If a start fails because weights are missing, its error waits for up to this time until the fetcher reports the reason.
CAUSE_TIMEOUT_S = 2.0
# When a worker dies, the log repeats this many of the last lines that the worker printed.
LAST_WORDS = 5
# When a worker's setup fails, its error has at most this many of the last lines that the worker logged. The cause may
# have been printed by another process, with a traceback.
SETUP_LINES = 40
# When a worker dies, the log names at most this many of the invocations that the worker ran.
MOST_IDS = 10


class Watched(RevisionParts, Protocol):
    """The part of a revision that `ProcessEvents` and `CallReports` use."""

    carry_out: CarryOut
    inventory: Inventory

    def warm(self, workers: int, cause: str) -> None: ...


class ProcessEvents(PoolEvents):
    """The events of the workers, the zygote and the standby of one revision."""

    def __init__(
        self, one: Watched, on_activation: Callable[[str], None], on_processes: Callable[[], None]
    ) -> None:
        """`on_activation` is called with "ready" or "failed" when the start of a worker has ended. `on_processes` is
        called when a process has started or ended.
        """
        self._one, self._tasks, self._logs = one, one.node.tasks, one.logs
        self._on_activation, self._on_processes = on_activation, on_processes
        self.starts = one.starts
        self.unexplained = 0
        """The number of failed starts whose cause the fetcher, or the parent of the process, has yet to report."""
        self.unrecovered = 0
        """The number of dead workers whose calls have been neither queued again nor failed yet."""
        # The tasks that recover the calls of ended workers, and log why the workers ended.
        self._endings: set[asyncio.Task[None]] = set()

    async def wait_told(self, timeout_s: float) -> None:
        """Wait until the function's log says how the last workers have ended."""
        if self._endings:
            await asyncio.wait(self._endings, timeout=timeout_s)

    def on_ready(self, replica: Replica) -> None:
        self._one.function.prewarms.watch(replica)
        self._one.revision.dispatcher.adopt(replica)
        # First send the waiting invocations (`adopt`). Learn from the start only after that, so that they wait no
        # longer than necessary.
        self._one.pool.note_ready(replica)
        self.starts.note_ready()
        self.starts.note_workers(self._one.replicas)
        self._one.function.ladder.note_ready(
            self._one, usual=not replica.start.measured, devices=self._one.inventory.devices(replica)
        )
        self._on_activation("ready")
        # Waiting revisions may get workers now: this worker can park to make room, which a starting worker cannot.
        self._one.node.limits.note_change()
        self._one.look()

    def on_zygote(self) -> None:
        self._one.look()

    def on_processes_changed(self) -> None:
        # Waiting revisions may get workers now: once a worker is forked, its start can be cancelled to make room.
        self._one.node.limits.note_change()
        self._on_processes()

    def on_leaving(self, replica: Replica) -> None:
        self._one.node.limits.note_change()
        self._one.look()

    def on_parked(self, replica: Replica, freed_bytes: int, reserved: list[int]) -> None:
        booking = self._one.node.gpus.of(replica)
        cause = "gpus" if booking is not None and booking.given else "idle"
        decision = self._one.function.decisions.note("park", cause, freed_bytes=freed_bytes)
        if cause == "gpus":
            self._one.logs.write("gateway", describe(decision))
        if booking is not None:
            self._tasks.create_task(self._note_kept(booking, replica, freed_bytes, reserved))

    async def _note_kept(
        self, booking: GpuBooking, replica: Replica, freed_bytes: int, reserved: list[int]
    ) -> None:
        """Let other functions use the GPU memory that a parked worker has given back."""
        parks, kept = (
            replica.parking.count,
            await self._one.node.gpus.hardware.kept(booking.full, replica.child, reserved),
        )
        # Ignore the measurement if the worker has woken and parked again meanwhile.
        if parks == replica.parking.count:
            self._one.node.gpus.note_parked(replica, freed_bytes, kept)

    def on_need(self, replica: Replica, name: str) -> None:
        self._tasks.create_task(self._one.carry_out.hold_adapter(replica, name))

    def on_start_failed(self, error: PilotflameError, worker: str = "") -> None:
        """Fail the waiting invocations, unless a worker is ready, because the next start would probably fail too.

        `worker` is the name of a worker that has reported the error.
        """
        if self._one.pool.weights.unheard(error):
            self.unexplained += 1
            self._tasks.create_task(self._fail_start_later(error))
        elif worker:
            # The last lines of the worker come over another connection than its report. Let the event loop read them
            # before the start fails.
            self.unexplained += 1
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, self._fail_start_of, worker, error)
        else:
            self._fail_start(error)

    def _fail_start_of(self, worker: str, error: PilotflameError) -> None:
        self.unexplained -= 1
        if isinstance(error, HandlerSetupError) and (lines := self._logs.last_lines(worker, SETUP_LINES)):
            error.private["printed"] = "\n".join(lines)
        self._fail_start(error)

    async def _fail_start_later(self, error: PilotflameError) -> None:
        """Wait until the fetcher reports why the weights are missing: its report may come after the worker's report."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CAUSE_TIMEOUT_S):
                while fetching := self._one.pool.weights.unheard(error):
                    ended = [one.ended for one in fetching]
                    await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
        self.unexplained -= 1
        self._fail_start(error)

    def _fail_start(self, error: PilotflameError) -> None:
        error = for_callers(self._one.pool.weights.explain(error))
        self._logs.write("gateway", f"activation failed: {error.whole}\n{error.trace}".rstrip(), "error")
        self._on_activation("failed")
        self.starts.note_failure(error)
        self._tell_failure(error)
        self.starts.note_workers(self._one.replicas)
        if not self._one.replicas.ready:
            self._one.revision.dispatcher.fail_queued(error)
        self._one.node.limits.note_change()
        self._one.look()

    def _tell_failure(self, error: PilotflameError) -> None:
        """Record a failed start among the decisions, except during a deploy, which reports the failure itself."""
        if self._one.phase is not Phase.PROVING:
            breaker = self.starts.breaker
            delay_s = max(0.0, breaker.backoff_until_s - time.monotonic())
            self._one.function.decisions.note("fail", error.code, failures=breaker.failures, delay_s=delay_s)

    def on_lost(self, replica: Replica, unstarted: list[Invocation], started: list[Invocation]) -> None:
        self._one.pool.remove(replica)
        self.starts.died |= not replica.left
        # If this worker was the last that was starting, the `settled` waits end now, even if its start was cancelled.
        self.starts.note_workers(self._one.replicas)
        self.unrecovered += 1
        if _died_in_start(replica):
            # Until the cause of the death is known, the start has neither succeeded nor failed. Unless a worker is ready,
            # no other worker starts before that.
            self.unexplained += 1
            self._one.observed.update_row(time.monotonic())
        self._one.node.limits.note_change()
        self._one.function.prewarms.end(replica, used=bool(replica.completed or started))
        ending = self._tasks.create_task(self._recover(replica, unstarted, started))
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)
        if self._one.revision.dispatcher.queue:
            # Do not wait for the cause of this end: the waiting invocations need another worker now.
            self._one.look()

    async def _recover(
        self, replica: Replica, unstarted: list[Invocation], started: list[Invocation]
    ) -> None:
        was_ready = replica.activation.ready_s > 0
        cause = await self._cause(replica) if started or not was_ready else EndCause()
        self.unrecovered -= 1
        self._one.revision.dispatcher.recover(unstarted, started, cause)
        if _died_in_start(replica):
            self.unexplained -= 1
            self._note_death(cause)
        self._one.look()
        if not len(self._one.replicas) and not len(self._one.revision.dispatcher.queue):
            self._tasks.create_task(self._one.revision.dispatcher.durations.store())
        text = cause.text or (await self._cause(replica)).text
        end = describe_end(replica, text, started, self._logs, retiring=self._one.phase is Phase.RETIRING)
        self.starts.unexpected_ends += end.unexpected
        if end.unexpected and was_ready:
            self._one.function.decisions.note("lose", text, calls=len(started))
        self._logs.write("gateway", end.text, end.level, request_id=end.request_id)
        await replica.child.wait_gone(STOP_TIMEOUT_S)
        self._one.pool.note_gone()
        if self._one.inventory.resident_bytes:
            # Look again, because the weights may leave the memory after the last process that uses them has ended.
            self._one.look()

    async def _cause(self, replica: Replica) -> EndCause:
        """Return how a worker ended. If SIGBUS ended it because a mapped file was truncated, add the name of that file."""
        cause = await replica.child.cause()
        local = [one for one in self._one.revision.spec.weights if not one.source]
        if not local or not cause.text.startswith(f"signal {signal.SIGBUS.value} "):
            return cause
        short = await asyncio.to_thread(_truncated, local)
        told = f": {short} was truncated; deploy again, or put the file back" if short else ""
        return cause._replace(text=f"{cause.text}{told}")

    def _note_death(self, cause: EndCause) -> None:
        """Count a worker that died while it started. After too many such deaths, fail the waiting invocations."""
        self._on_activation("failed")
        error = self.starts.note_death(self._one.spec.function, cause.text)
        self._tell_failure(error)
        self.starts.note_workers(self._one.replicas)
        if not self._one.replicas.ready and self.starts.give_up():
            self._one.revision.dispatcher.fail_queued(error)


def _died_in_start(replica: Replica) -> bool:
    """Return True if a worker ended before it was ready, without a report of a failure and without being cancelled."""
    return not (replica.activation.ready_s or replica.start.failed or replica.left)


def _truncated(weights: list[Weights]) -> str:
    """Return the path of a file of local weights that is shorter than at the deploy; "" if there is none."""
    from ....snapshot.format.compared import truncated  # noqa: PLC0415  only weights of a dead worker need it

    return next((found for one in weights if (found := truncated(one.folder, one.manifest))), "")


class WorkerEnd(NamedTuple):
    """The log entry for the end of a worker."""

    text: str
    level: str = "info"
    request_id: str = ""
    """The id of the invocation that the worker ran; "" if it ran no invocation or several."""
    unexpected: bool = False
    """True if the worker ended although the gateway did not ask it to, and without the report of a failed start."""


def describe_end(
    replica: Replica, cause: str, started: list[Invocation], logs: RevisionLog, *, retiring: bool
) -> WorkerEnd:
    """Return why a worker has ended, what it printed last, and which invocations it ran."""
    # At a shutdown, the zygote ends before its workers, so it cannot report their exit codes. Such an unknown cause is
    # no error.
    if replica.left and cause in ("exit code 0", UNKNOWN_CAUSE):
        proof = ", the proof start of the deploy," if replica.activation.cause is StartCause.DEPLOY else ""
        return WorkerEnd(f"worker {replica.name}{proof} has drained and ended")
    ids = [invocation.id for invocation in started]
    words = logs.last_words(replica.name, LAST_WORDS, ids)
    said = f"; its last words: {words}" if words else "; it printed nothing"
    # A failed start has its own log entry, and the gateway itself ends the workers of a retiring revision. So neither end
    # is logged as an error.
    expected = replica.start.failed or (replica.left and (retiring or replica.relieved))
    ran = f"; it ran {', '.join(ids[:MOST_IDS])}" if len(ids) > 1 else ""
    return WorkerEnd(
        f"worker {replica.name} ended with {cause}{ran}{said}",
        "info" if expected else "error",
        ids[0] if len(ids) == 1 else "",
        unexpected=not (expected or replica.left),
    )
