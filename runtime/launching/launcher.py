"""The launcher: starts and stops zygotes and, through them, workers. Here: as processes of this node."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from ...errors import LauncherError, PilotflameError
from ..link.link import Frame, FrameKind, Link
from ..link.worker_spec import WorkerSpec
from ..telemetry.logs import LogBook
from .listener import Listener

# Imports of large packages from a cold disk take their time; nothing waits without an end.
BASE_TIMEOUT_S = 300.0
BUILD_TIMEOUT_S = 600.0
FORK_TIMEOUT_S = 60.0
EXIT_REPORT_TIMEOUT_S = 2.0
# What functions may inherit of the gateway's environment: its credentials are not among it.
INHERITED = frozenset(
    [
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "TMPDIR",
        "TZ",
        "LANG",
        "LANGUAGE",
        "LD_LIBRARY_PATH",
        "VIRTUAL_ENV",
    ]
)
INHERITED_PREFIXES = ("LC_", "HF_", "TRANSFORMERS_", "OMP_", "MKL_", "KMP_", "CUDA_", "NVIDIA_", "COVERAGE_")
SECRET_ENDINGS = ("_TOKEN", "_KEY", "_SECRET", "_PASSWORD")
# Pools that libraries would start at import; a zygote must have none. Workers get their threads back (lineage.own_threads).
SINGLE_THREADED = {"OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


class Child:
    """A process that has dialled in: its link, and its end."""

    def __init__(self, link: Link, pid: int, name: str, *, reaped: bool = False) -> None:
        """`reaped` says that somebody here waits for the process itself: only one may collect its exit."""
        self.link = link
        self.pid = pid
        self.name = name
        self._reaped = reaped
        self._kill_timer: asyncio.TimerHandle | None = None
        loop = asyncio.get_running_loop()
        self.exit_code: asyncio.Future[int | None] = loop.create_future()
        self.gone = asyncio.Event()
        self._loop = loop
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:  # it dialled in, said why it cannot go on, and was reaped before we looked
            self._pidfd = -1
            self.gone.set()
        else:
            loop.add_reader(self._pidfd, self._exited)

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Sends a signal to this very process, never to another that got its number."""
        with contextlib.suppress(ProcessLookupError, OSError):
            signal.pidfd_send_signal(self._pidfd, number)

    def kill_after(self, timeout_s: float) -> None:
        """Kills it unless it has ended by then; of several calls the earliest end counts."""
        if self._kill_timer is not None:
            if self._kill_timer.when() <= self._loop.time() + timeout_s:
                return
            self._kill_timer.cancel()
        if not self.gone.is_set():
            self._kill_timer = self._loop.call_later(timeout_s, self.kill)

    async def cause(self) -> str:
        """How it ended, for people: "signal 9 (SIGKILL)", "exit code 1"; waits a moment for its parent's report."""
        try:
            async with asyncio.timeout(EXIT_REPORT_TIMEOUT_S):
                code = await asyncio.shield(self.exit_code)
        except TimeoutError:
            code = None
        if code is None:
            return "an unknown cause"
        return f"signal {-code} ({signal_name(-code)})" if code < 0 else f"exit code {code}"

    def report(self, code: int | None) -> None:
        """What its parent says of its end."""
        if not self.exit_code.done():
            self.exit_code.set_result(code)

    def _exited(self) -> None:
        self._loop.remove_reader(self._pidfd)
        if not self._reaped:
            with contextlib.suppress(ChildProcessError):  # ours to reap only if its zygote died before it
                os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
        os.close(self._pidfd)
        self._pidfd = -1
        if self._kill_timer is not None:  # it would keep all of this for as long as it runs
            self._kill_timer.cancel()
        self.gone.set()


class Parent:
    """A zygote as the gateway sees it: forks on demand, and reports how its children end."""

    def __init__(self, child: Child, listener: Listener, on_death: Callable[[], None]) -> None:
        self.child = child
        self.facts: dict[str, Any] = {}
        self.built: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._listener = listener
        self._on_death = on_death
        self._forking: dict[str, asyncio.Future[Child]] = {}
        self._token_of: dict[int, str] = {}
        self._children: dict[int, Child] = {}
        child.link.bind(self._on_frame, self._on_lost)

    @property
    def alive(self) -> bool:
        return not self.child.link.closed

    async def fork(self, role: str, name: str, logs: LogBook, spec: WorkerSpec | None = None) -> Child:
        """A new child, dialled in. Raises LauncherError if it dies first or takes too long."""
        future: asyncio.Future[Child] = asyncio.get_running_loop().create_future()

        def on_link(link: Link, pid: int) -> None:
            child = Child(link, pid, name)
            self._children[pid] = child
            if future.done():  # nobody waits any more
                link.close()
            else:
                future.set_result(child)

        token = self._listener.expect("worker" if role != "zygote" else role, name, logs, on_link)
        self._forking[token] = future
        order = {
            "token": token,
            "role": role,
            "spec": spec.model_dump(mode="json", exclude={"source"}) if spec else None,
        }
        self.child.link.send_json(FrameKind.FORK, 0, order)
        try:
            if not self.alive:
                raise LauncherError(f"{self.child.name} has gone.")
            async with asyncio.timeout(FORK_TIMEOUT_S):
                return await future
        except TimeoutError:
            raise LauncherError(f"{name} did not dial in within {FORK_TIMEOUT_S:.0f} s.") from None
        finally:
            self._forking.pop(token, None)
            self._listener.forget(token)

    async def wait_built(self, timeout_s: float) -> dict[str, Any]:
        """What it says once it is ready to fork. Raises the HandlerError that kept it from that."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self.built
        except TimeoutError:
            self.child.kill()
            raise LauncherError(
                f"{self.child.name} was not ready within {timeout_s:.0f} s.",
                remedy="Move slow work from import and `build` to `setup`.",
            ) from None

    def close(self) -> None:
        """Ends the zygote; its children hear of it and drain."""
        self._on_death = _nothing
        self.child.link.close()
        for child in self._children.values():  # nobody will tell any more
            child.report(None)
        self._fail_forks("was closed")

    def _on_frame(self, frame: Frame) -> None:
        head = frame.json()
        if frame.kind == FrameKind.FORKED:
            self._token_of[head["pid"]] = head["token"]
        elif frame.kind == FrameKind.UNFORKED:
            if (future := self._forking.get(head["token"])) is not None and not future.done():
                future.set_exception(LauncherError(f"{self.child.name} could not fork: {head['why']}."))
        elif frame.kind == FrameKind.EXITED:
            self._child_ended(head["pid"], head["code"])
        elif frame.kind == FrameKind.BUILT and not self.built.done():
            self.built.set_result(head)
        elif frame.kind == FrameKind.FAILED and not self.built.done():
            self.built.set_exception(PilotflameError.from_wire(head))

    def _child_ended(self, pid: int, code: int) -> None:
        token = self._token_of.pop(pid, "")
        if token in self._forking and pid not in self._children:
            self._listener.settle()  # its last words, if there are any, say more than its end
        if (child := self._children.pop(pid, None)) is not None:
            child.report(code)
        elif (future := self._forking.get(token)) is not None and not future.done():
            future.set_exception(
                LauncherError(f"A child of {self.child.name} died before it dialled in ({code}).")
            )

    def _on_lost(self) -> None:
        self._fail_forks("died")
        for child in self._children.values():
            child.report(None)
        self._on_death()

    def _fail_forks(self, how: str) -> None:
        error = LauncherError(f"{self.child.name} {how}.", remedy="See `pilotflame logs` for its last words.")
        futures: list[asyncio.Future[Any]] = [*self._forking.values(), self.built]
        for future in futures:
            if not future.done():
                future.set_exception(error)
        if self.built.done() and not self.built.cancelled():
            self.built.exception()  # seen: nobody has to wait for it


class WorkerSource:
    """Where a revision's workers come from: forks of its zygote or, if that may not fork, fresh processes."""

    def __init__(
        self, zygote: Parent, base: Parent, spec: WorkerSpec, facts: dict[str, Any], why_not: str
    ) -> None:
        self.facts = facts
        self.forks = not why_not
        self.why_not = why_not
        self.zygote = zygote
        self._base = base
        self._spec = spec

    @property
    def alive(self) -> bool:
        return self.zygote.alive if self.forks else self._base.alive

    async def fork(self, name: str, logs: LogBook) -> Child:
        """A standby: connected, without weights."""
        if self.forks:
            return await self.zygote.fork("worker", name, logs)
        return await self._base.fork("solo", name, logs, self._spec)

    def close(self) -> None:
        self.zygote.close()


class Launcher:
    """Keeps one base per Python environment and set of heavy imports, and launches revisions' zygotes from them."""

    def __init__(self, listener: Listener, tasks: asyncio.TaskGroup) -> None:
        self._listener = listener
        self._tasks = tasks
        self._bases: dict[tuple[str, tuple[str, ...]], Parent] = {}
        self._starting: dict[tuple[str, tuple[str, ...]], asyncio.Lock] = {}
        self._processes: set[asyncio.subprocess.Process] = set()
        self._closed = False

    async def launch(self, spec: WorkerSpec, logs: LogBook, on_death: Callable[[], None]) -> WorkerSource:
        """Imports and builds `spec`'s handler in a zygote. Raises HandlerError or LauncherError.

        `on_death` is called if the zygote dies without having been asked to.
        """
        base = await self._base(spec)
        child = await base.fork("zygote", "zygote", logs, spec)
        parent = Parent(child, self._listener, on_death)
        try:
            told = await parent.wait_built(BUILD_TIMEOUT_S)
        except BaseException:  # a cancelled deploy too
            parent.close()
            child.kill()  # it may be in the user's code, which does not read the link
            raise
        if told["threads"] == 1:
            return WorkerSource(parent, base, spec, told["facts"], "")
        parent.close()
        why_not = f"{told['thread_source']} started threads, which no fork survives"
        logs.write("zygote", f"workers are spawned instead of forked, each importing for itself: {why_not}")
        return WorkerSource(parent, base, spec, told["facts"], why_not)

    async def close(self) -> None:
        """Ends all bases and waits for them. Nothing is launched from then on."""
        self._closed = True
        for base in self._bases.values():
            base.close()
        for process in list(self._processes):
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        for process in list(self._processes):
            await process.wait()

    async def _base(self, spec: WorkerSpec) -> Parent:
        key = (spec.python or sys.executable, spec.preload)
        async with self._starting.setdefault(key, asyncio.Lock()):
            if self._closed:
                raise LauncherError("The gateway is shutting down.")
            base = self._bases.get(key)
            if base is None or not base.alive:
                base = self._bases[key] = await self._start_base(*key)
            return base

    async def _start_base(self, python: str, preload: tuple[str, ...]) -> Parent:
        name = f"base {' '.join(preload)}".strip()
        dialled: asyncio.Future[Child] = asyncio.get_running_loop().create_future()
        token = self._listener.expect(
            "zygote",
            name,
            LogBook(),
            lambda link, pid: dialled.set_result(Child(link, pid, name, reaped=True)),
        )
        try:
            process = await asyncio.create_subprocess_exec(
                python, "-m", "pilotflame.runtime.worker.zygote", "base",
                stdin=asyncio.subprocess.PIPE, stdout=sys.stderr.fileno(), env=environment(), cwd="/",
            )  # fmt: skip
        except OSError as error:  # the interpreter was moved, or there is no room for another process
            self._listener.forget(token)
            raise LauncherError(
                f"{python} cannot be started: {error.strerror}.",
                remedy="Deploy again if its environment was moved.",
            ) from error
        self._processes.add(process)
        ended = self._tasks.create_task(self._reap(process, dialled, name))
        order = {"address": str(self._listener.address), "token": token, "preload": preload}
        if process.stdin is not None:
            process.stdin.write(json.dumps(order).encode())
            process.stdin.close()
        try:
            async with asyncio.timeout(BASE_TIMEOUT_S):
                base = Parent(await dialled, self._listener, _nothing)
            await base.wait_built(BASE_TIMEOUT_S)
        except TimeoutError:
            process.kill()
            await ended
            raise LauncherError(f"{name} did not start within {BASE_TIMEOUT_S:.0f} s.") from None
        except BaseException:  # whoever waited for it has gone: nobody else knows of it
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            raise
        finally:
            self._listener.forget(token)
        return base

    async def _reap(
        self, process: asyncio.subprocess.Process, dialled: asyncio.Future[Child], name: str
    ) -> None:
        code = await process.wait()
        self._processes.discard(process)
        if not dialled.done():
            dialled.set_exception(
                LauncherError(
                    f"The {name} process ended with code {code} before it was ready.",
                    remedy="Run `pilotflame doctor`; its own words are on the gateway's standard error.",
                )
            )


def signal_name(number: int) -> str:
    """SIGKILL and the like; real-time signals have no names in Python."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return "real-time"


def environment() -> dict[str, str]:
    """What a base inherits: no credentials, one thread a library."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if (key in INHERITED or key.startswith(INHERITED_PREFIXES)) and not key.endswith(SECRET_ENDINGS)
    }
    return {**kept, **SINGLE_THREADED, "PYTHONUNBUFFERED": ""}


def _nothing() -> None:
    return None
