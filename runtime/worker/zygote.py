"""The zygote: a single-threaded parent that has imported the handler and built its skeleton, and forks workers.

Two generations. A base holds the heavy imports of one Python environment (torch); revisions' zygotes are forked from
it and share its pages. Both wait for FORK frames on a blocking link: no event loop, no pool, no device.
A fork leaves the loop by returning the child's role to `live`, so that a child starts on an almost empty stack.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from setproctitle import setproctitle

from ...errors import HandlerBuildError, PilotflameError
from ...handlers.contract import Context
from ...handlers.failure import explain
from ...handlers.handler import Handler
from ...handlers.resolve import resolve
from ...snapshot.handle import Snapshot
from ..link.link import Address, BlockingLink, FrameKind
from ..link.worker_spec import WorkerSpec
from . import fork_safety
from .worker import Built, Worker

DIAL_TIMEOUT_S = 10.0


class Role(Protocol):
    """What a process is: runs until it is done (None) or has become another (a forked child's)."""

    def run(self) -> Role | None: ...


@dataclass(frozen=True, slots=True)
class Ticket:
    """Where to dial in, and the token that proves who was asked to."""

    address: Address
    token: str

    def dial(self, role: str) -> socket.socket:
        """A connection that has said HELLO as `role` ("zygote", "worker" or "log")."""
        sock = self.address.dial(DIAL_TIMEOUT_S)
        BlockingLink(sock).send(FrameKind.HELLO, {"token": self.token, "role": role})
        return sock


class Zygote:
    """Waits for orders and forks. Subclasses say how to get ready and what a child becomes."""

    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket
        self._wake_read, self._wake_write = socket.socketpair()
        self._link: BlockingLink | None = None

    def run(self) -> Role | None:
        self._watch_children()
        self._link = BlockingLink(self._ticket.dial("zygote"))
        if not self.prepare(self._link):
            return None
        fork_safety.settle()
        return self._serve(self._link)

    def prepare(self, link: BlockingLink) -> bool:
        """Gets ready and says BUILT or FAILED; False ends the process."""
        raise NotImplementedError

    def child_role(self, order: dict[str, Any]) -> Role:
        """What a forked child becomes. Runs in the child."""
        raise NotImplementedError

    def _watch_children(self) -> None:
        for end in (self._wake_read, self._wake_write):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the gateway's to handle

    def _serve(self, link: BlockingLink) -> Role | None:
        while True:
            readable, _, _ = select.select([link.sock, self._wake_read], [], [])
            if self._wake_read in readable:
                self._reap(link)
            if link.sock in readable:
                frames = link.receive()
                if frames is None:
                    return None
                for frame in frames:
                    if frame.kind == FrameKind.FORK and (role := self._fork(link, frame.json())) is not None:
                        return role

    def _reap(self, link: BlockingLink) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_read.recv(4096)
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                with contextlib.suppress(OSError):  # the gateway has gone; `_serve` sees that next
                    link.send(FrameKind.EXITED, {"pid": pid, "code": os.waitstatus_to_exitcode(status)})

    def _fork(self, link: BlockingLink, order: dict[str, Any]) -> Role | None:
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:  # no room for a process now; those that run must not die of that
            link.send(FrameKind.UNFORKED, {"token": order["token"], "why": str(error)})
            return None
        if pid != 0:
            link.send(FrameKind.FORKED, {"token": order["token"], "pid": pid})
            return None
        fork_safety.detach(parent)
        link.close()
        self._wake_read.close()
        self._wake_write.close()
        fork_safety.reseed()
        return self.child_role(order)


class Base(Zygote):
    """The root of one Python environment: heavy imports, nothing of any function."""

    def __init__(self, ticket: Ticket, preload: list[str]) -> None:
        super().__init__(ticket)
        self._preload = preload

    def prepare(self, link: BlockingLink) -> bool:
        setproctitle(f"pilotflame: base {' '.join(self._preload)}".rstrip())
        for name in self._preload:
            importlib.import_module(name)
        threads = fork_safety.torch_threads()
        quiet_torch()
        link.send(FrameKind.BUILT, {"threads": fork_safety.thread_count(), "torch_threads": threads})
        os.environ["PILOTFLAME_TORCH_THREADS"] = str(threads)
        return True

    def child_role(self, order: dict[str, Any]) -> Role:
        ticket = Ticket(self._ticket.address, order["token"])
        spec = WorkerSpec.model_validate(order["spec"])
        if order["role"] == "zygote":
            return RevisionZygote(ticket, spec)
        return Solo(ticket, spec)


class RevisionZygote(Zygote):
    """The parent of one revision's workers: handler imported, skeleton built, no weights."""

    def __init__(self, ticket: Ticket, spec: WorkerSpec) -> None:
        super().__init__(ticket)
        self._spec = spec
        self._built: Built | None = None

    def run(self) -> Role | None:
        setproctitle(f"pilotflame: zygote {self._spec.label}")
        redirect_output(self._ticket)
        return super().run()

    def prepare(self, link: BlockingLink) -> bool:
        with fork_safety.watch_threads() as culprits:
            try:
                self._built = build(self._spec)
            except PilotflameError as error:
                link.send(FrameKind.FAILED, error.to_wire())
                return False
        quiet_torch()
        threads = fork_safety.thread_count()
        who = fork_safety.describe_threads(culprits) if threads > 1 else ""
        link.send(
            FrameKind.BUILT, {"facts": self._built.handler.facts(), "threads": threads, "thread_source": who}
        )
        return True

    def child_role(self, order: dict[str, Any]) -> Role:
        if self._built is None:
            raise RuntimeError("forked before it was built")
        ticket = Ticket(self._ticket.address, order["token"])
        return WorkerRole(ticket, self._spec, self._built)


class WorkerRole:
    """A forked worker."""

    def __init__(self, ticket: Ticket, spec: WorkerSpec, built: Built) -> None:
        self._ticket, self._spec, self._built = ticket, spec, built

    def run(self) -> None:
        gc.enable()
        setproctitle(f"pilotflame: standby {self._spec.label}")
        redirect_output(self._ticket)
        Worker(self._ticket.dial("worker"), self._spec, self._built).run()


class Solo:
    """A worker that shares nothing: for handlers whose imports start threads, which no fork would survive.

    Forked from the base only to become a fresh interpreter, so that the base reaps it like any other child.
    """

    def __init__(self, ticket: Ticket, spec: WorkerSpec) -> None:
        self._ticket, self._spec = ticket, spec

    def run(self) -> None:
        order = {
            "address": str(self._ticket.address),
            "token": self._ticket.token,
            "spec": self._spec.model_dump(mode="json"),
        }
        memory = os.memfd_create("order", 0)
        os.write(memory, json.dumps(order).encode())
        os.lseek(memory, 0, os.SEEK_SET)
        os.dup2(memory, 0)
        os.execv(sys.executable, [sys.executable, "-m", "pilotflame.runtime.worker.zygote", "solo"])  # noqa: S606


def solo(order: dict[str, Any]) -> None:
    """The fresh interpreter that `Solo` became: import, build, and serve as a worker."""
    ticket = Ticket(Address.parse(order["address"]), order["token"])
    spec = WorkerSpec.model_validate(order["spec"])
    fork_safety.detach(os.getppid())
    setproctitle(f"pilotflame: standby {spec.label}")
    redirect_output(ticket)
    sock = ticket.dial("worker")
    try:
        built = build(spec)
    except PilotflameError as error:
        BlockingLink(sock).send(FrameKind.FAILED, error.to_wire())
        return
    Worker(sock, spec, built).run()


def build(spec: WorkerSpec) -> Built:
    """Imports the handler and calls its `build`. Raises HandlerError."""
    os.environ.update(spec.env)
    threads = (
        spec.threads or int(os.environ.get("PILOTFLAME_TORCH_THREADS", "0")) or fork_safety.torch_threads()
    )
    handler = resolve(spec.code, spec.handler, spec.function)
    quiet_torch()
    snapshot = _attach(spec)
    state = _call_build(handler, Context(spec.function, spec.revision, snapshot=snapshot), spec.code)
    return Built(handler, state, snapshot, threads)


def _call_build(handler: Handler, context: Context, root: Path) -> Any:
    if handler.build is None:
        return None
    try:
        return handler.build(context)
    except (Exception, SystemExit) as error:
        raise explain(HandlerBuildError, "build(context)", error, root) from error


def _attach(spec: WorkerSpec) -> Snapshot | None:
    if spec.snapshot is None or spec.manifest is None:
        return None
    from ...snapshot.format.manifest import Manifest  # noqa: PLC0415  only functions with weights pay for it
    from ...snapshot.sources.folder import FolderSource  # noqa: PLC0415

    manifest = Manifest.read(spec.manifest)
    if spec.cache is not None:
        return Snapshot(spec.snapshot, manifest, cache=spec.cache)
    files = FolderSource(spec.snapshot)
    return Snapshot(spec.snapshot, manifest, [files.stat(shard.name) for shard in manifest.shards])


def quiet_torch() -> None:
    """One thread until the fork: an OpenMP team does not survive it."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


def redirect_output(ticket: Ticket) -> None:
    """Standard output and error go to the gateway over a connection of their own.

    The kernel holds what was written, so that the last words of a process that crashes arrive too.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    sock = ticket.dial("log")
    for descriptor in (1, 2):
        os.dup2(sock.fileno(), descriptor)
    sock.close()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def live(role: Role | None) -> None:
    """Runs roles until a process is done."""
    while role is not None:
        role = role.run()


def main() -> None:
    """`python -m pilotflame.runtime.worker.zygote base|solo`, with the order as JSON on standard input."""
    kind, order = sys.argv[1], json.load(sys.stdin)
    os.closerange(
        3, os.sysconf("SC_OPEN_MAX")
    )  # uvloop leaves a copy of the gateway's standard error open in its children
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), 0)
    if kind == "solo":
        solo(order)
    else:
        gc.disable()
        fork_safety.detach(os.getppid())
        live(Base(Ticket(Address.parse(order["address"]), order["token"]), order["preload"]))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
