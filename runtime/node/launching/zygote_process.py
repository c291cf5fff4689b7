"""Controls a zygote process for the gateway: requests forks and follows the zygote's children."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping
from typing import Any

from ....errors import LauncherError, PilotflameError
from ...calls.link import handler_facts
from ...calls.link.child import KILLED_S, Child
from ...calls.link.connection import Link
from ...calls.link.frames import Frame, FrameKind
from ...calls.link.worker_spec import Confinement, WorkerSpec
from ...ground.telemetry.log_stream import LogStream
from ...ground.telemetry.logs import Log
from ...ground.telemetry.refusals import Operation, refusal
from .launcher import NO_SECRETS
from .listener import Listener
from .slow_build import SlowBuild

FORK_TIMEOUT_S = 60.0


class ChildProcess(Child):
    """A process of this machine. It is killed and watched through its pidfd (a file descriptor)."""

    def __init__(
        self, link: Link, pid: int, name: str, output: LogStream | None = None, *, reaped: bool = False
    ) -> None:
        """`reaped` is True if other code of the gateway collects the exit status of the process."""
        super().__init__(link, pid, name, output)
        self._reaped = reaped
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            # The process has connected, sent its failure, ended and been reaped already.
            self._pidfd = -1
            self.ended()
        else:
            self._loop.add_reader(self._pidfd, self._on_exit)

    def send_signal(self, number: int) -> None:
        """Send a signal to this process, but never to a later process with the same pid."""
        with contextlib.suppress(ProcessLookupError, OSError):
            signal.pidfd_send_signal(self._pidfd, number)

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        if not self._reaped:
            # Usually the zygote reaps the process. If the zygote died first, the gateway may have become the parent.
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
        os.close(self._pidfd)
        self._pidfd = -1
        self.ended()


class ZygoteProcess:
    """The process of a zygote, or of a base, from which zygotes are forked."""

    def __init__(self, child: Child, listener: Listener, on_death: Callable[[], None] | None = None) -> None:
        self.child, self._listener, self._on_death = child, listener, on_death
        self._built: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.building = SlowBuild(child, self._built)
        self.reported_failure = False
        self._forking: dict[str, asyncio.Future[Child]] = {}
        # The tokens of the children, by the pid that the zygote sees. In a container, this pid differs from the pid on
        # the machine.
        self._token_of: dict[int, str] = {}
        self._children: dict[str, Child] = {}
        child.link.bind(self._on_frame, self._on_lost)

    @property
    def alive(self) -> bool:
        return not self.child.link.closed

    @property
    def childless(self) -> bool:
        """True if this process has no child, and no fork is in progress."""
        return not self._children and not self._forking

    async def fork(
        self, role: str, name: str, logs: Log, spec: WorkerSpec | None = None,
        confinement: Confinement | None = None, rehearsal_mb: int | None = None,
    ) -> Child:  # fmt: skip
        """Return a new child once it has connected. Raise LauncherError if the child dies first or is too slow.

        Children of a zygote inherit its confinement.
        """
        future: asyncio.Future[Child] = asyncio.get_running_loop().create_future()

        def on_link(link: Link, pid: int, output: LogStream | None) -> None:
            self._children[token] = child = self._make_child(link, pid, name, token, output)
            if future.done():
                # The caller of `fork` timed out or was cancelled.
                link.close()
            else:
                future.set_result(child)

        token = self._listener.expect("zygote" if role == "zygote" else "worker", name, logs, on_link)
        self._forking[token] = future
        # Leave out the URLs of weights: they may hold credentials, and workers need no credentials.
        without = {"weights": {"__all__": {"source"}}}
        described = spec.model_dump(mode="json", exclude=without) if spec else None
        request: dict[str, Any] = {"token": token, "role": role, "spec": described}
        if rehearsal_mb is not None:
            request["rehearsal_mb"] = rehearsal_mb
        if confinement is not None:
            request["confinement"] = confinement.model_dump(mode="json")
        self.child.link.send_json(FrameKind.FORK, 0, request)
        late = f"{name} did not dial in within {FORK_TIMEOUT_S:.0f} s."
        timer = asyncio.get_running_loop().call_later(FORK_TIMEOUT_S, self._fail_fork, token, late)
        try:
            if not self.alive:
                raise LauncherError(f"{self.child.name} has ended.")
            return await future
        finally:
            timer.cancel()
            self._forking.pop(token, None)
            self._listener.forget(token)

    def send_signal(self, token: str, number: int) -> None:
        """Ask the zygote to send a signal to the child that was forked with `token`."""
        for pid, of in self._token_of.items():
            if of == token:
                self.child.link.send_json(FrameKind.SIGNAL, 0, {"pid": pid, "number": number})

    def _make_child(self, link: Link, pid: int, name: str, _token: str, output: LogStream | None) -> Child:
        return ChildProcess(link, pid, name, output)

    async def launch(
        self, spec: WorkerSpec, logs: Log, on_death: Callable[[], None], secrets: Mapping[str, str] = NO_SECRETS,
        confinement: Confinement | None = None,
    ) -> ZygoteSource:  # fmt: skip
        """Fork the zygote of a revision from this base, and return once its handler is built. Call `on_death` if the
        zygote dies. Raise HandlerError or LauncherError.
        """
        child = await self.fork("zygote", "zygote", logs, spec, confinement)
        zygote = self._make_zygote(child, on_death)
        send_secrets(child, secrets)
        try:
            head = await zygote.building.wait(spec, logs)
            facts = handler_facts.checked(
                head.get("facts"), lambda note: logs.write("gateway", note, "warning")
            )
        except BaseException as error:
            # A zygote that still runs reports its failure itself. If the zygote has died, the base reports its exit
            # code.
            told = zygote.reported_failure or not isinstance(error, LauncherError)
            died = None if told or zygote.alive else await _death(child, spec)
            # The build failed or the deploy was cancelled. The process may be running user code and not
            # notice that its link is closed, so kill it.
            zygote.close()
            child.kill()
            if died is not None:
                raise died from error
            raise
        if reason := str(head["spawn_reason"]):
            zygote.close()
            text = f"workers are spawned, not forked, and each imports for itself: {reason}"
            logs.write("zygote", text, "warning")
        return self._source(zygote, self, spec, facts, reason, secrets, confinement)

    @property
    def _source(self) -> type[ZygoteSource]:
        return ZygoteSource

    def _make_zygote(self, child: Child, on_death: Callable[[], None]) -> ZygoteProcess:
        return ZygoteProcess(child, self._listener, on_death)

    async def wait_built(self, timeout_s: float) -> dict[str, Any]:
        """Wait for a base's BUILT frame, and return the frame's head. Raise LauncherError if the base ends or takes
        longer than `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await self._built
        except TimeoutError:
            self.child.kill()
            raise LauncherError(f"{self.child.name} was not ready within {timeout_s:.0f} s.") from None

    def close(self) -> None:
        """End the zygote by closing its link. When the zygote ends, the kernel sends SIGTERM to its children, and
        workers then drain.
        """
        self._on_death = None
        self.child.link.close()
        self._end("was closed")

    def _on_frame(self, frame: Frame) -> None:
        head = frame.json()
        if frame.kind == FrameKind.FORKED:
            self._token_of[head["pid"]] = head["token"]
        elif frame.kind == FrameKind.UNFORKED:
            refused = refusal(Operation.FORK, head.get("errno"))
            text = f"{self.child.name} could not fork: {head['why']}. {refused.remedy}"
            self._fail_fork(head["token"], text.strip())
        elif frame.kind == FrameKind.EXITED:
            self._child_ended(**head)
        elif frame.kind == FrameKind.BUILT and not self._built.done():
            self._built.set_result(head)
        elif frame.kind == FrameKind.POSITION:
            self.building.answer(head)
        elif frame.kind == FrameKind.FAILED and not self._built.done():
            self.reported_failure = True
            self._built.set_exception(PilotflameError.from_wire(head))

    def _child_ended(self, pid: int, code: int, out_of_memory: bool, certain: bool = True) -> None:
        token = self._token_of.pop(pid, "")
        if token in self._forking and token not in self._children:
            # Read what has arrived: the HELLO and the output that the child sent before its death may still be unread.
            self._listener.settle()
        if (child := self._children.pop(token, None)) is not None:
            child.report_exit(code, out_of_memory=out_of_memory, certain=certain)
        else:
            self._fail_fork(token, f"A child of {self.child.name} died before it dialled in ({code}).")

    def _fail_fork(self, token: str, message: str) -> None:
        if (future := self._forking.get(token)) is not None and not future.done():
            future.set_exception(LauncherError(message))

    def _on_lost(self) -> None:
        self._end("died")
        # After a reported failure, `launch` raises the reported error. The end of the process is not a second failure.
        if self._on_death is not None and not self.reported_failure:
            self._on_death()

    def _end(self, how: str) -> None:
        """Fail everything that waits for a report of this zygote. `how` is the part of the error's message that says
        how the zygote ended.
        """
        for child in self._children.values():
            child.report_exit(None)
        message, remedy = f"{self.child.name} {how}.", "See `pilotflame logs` for its last output."
        futures: list[asyncio.Future[Any]] = [*self._forking.values(), self._built]
        for future in futures:
            if not future.done():
                future.set_exception(LauncherError(message, remedy=remedy))
        if not self._built.cancelled():
            # Retrieve the exception: otherwise asyncio logs an error if `wait_built` is never called.
            self._built.exception()


async def _death(child: Child, spec: WorkerSpec) -> LauncherError:
    """Return the error that says why a zygote has ended before its handler was built."""
    cause = await child.cause()
    message = f"The zygote of {spec.label} died of {cause.text} while it imported and built the handler."
    if cause.out_of_memory and (limit_mb := spec.resources.memory_mb) is not None:
        remedy = f"Raise resources.memory_mb, which is {limit_mb}, or use less memory in import and `build`."
        return LauncherError(message, remedy=remedy)
    return LauncherError(message, remedy="See `pilotflame logs` for its last output.")


def send_secrets(child: Child, secrets: Mapping[str, str]) -> None:
    """Let a zygote, or a spawned worker, import and build the handler with these environment variables."""
    child.link.send_json(FrameKind.BUILD, 0, {"env": dict(secrets)})


class ZygoteSource:
    """Forks a revision's workers from its zygote. If the import has left something that forks must not share, such as a
    thread or a connection, the base spawns the workers instead.
    """

    def __init__(
        self, zygote: ZygoteProcess, base: ZygoteProcess, spec: WorkerSpec, facts: dict[str, Any],
        spawn_reason: str, secrets: Mapping[str, str], confinement: Confinement | None = None,
    ) -> None:  # fmt: skip
        self.facts, self.spawn_reason = facts, spawn_reason
        self._secrets = secrets
        self._zygote, self._base, self._spec, self._confinement = zygote, base, spec, confinement

    @property
    def alive(self) -> bool:
        return self._base.alive if self.spawn_reason else self._zygote.alive

    @property
    def zygote_pid(self) -> int | None:
        return None if self.spawn_reason else self._zygote.child.pid

    async def fork(self, name: str, logs: Log, rehearsal_mb: int | None = None) -> Child:
        if self.spawn_reason:
            child = await self._base.fork("solo", name, logs, self._spec, self._confinement, rehearsal_mb)
            send_secrets(child, self._secrets)
            return child
        return await self._zygote.fork("worker", name, logs, rehearsal_mb=rehearsal_mb)

    def close(self) -> None:
        self._zygote.close()

    async def wait_closed(self, timeout_s: float) -> None:
        self._zygote.child.kill_after(timeout_s)
        await self._zygote.child.wait_killed(timeout_s + KILLED_S)
