"""Runs a zygote, a single-threaded process that has built a handler, without weights, and forks workers.

There are two kinds. A base has imported the large packages of one Python environment, such as torch. The zygotes of
revisions are forked from it and share its memory pages. Both wait for FORK frames on a blocking link and use no event
loop, thread pool or GPU. A forked child returns the function that it must run (its role) up to `main`, and `main` calls
it. So the child starts on an almost empty stack.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from setproctitle import setproctitle

from ....errors import LauncherError, PilotflameError
from ....handlers.failure import locate_frame
from ....handlers.notes import NOTES
from ..leftovers import fork_safety, leftovers, processes
from ..leftovers.child_folders import ChildFolders
from ..leftovers.generators import Generators
from ..leftovers.leftovers import Leftovers
from ..leftovers.signals import AuthorsHandlers
from ..leftovers.working_folder import WorkingFolder
from ..link.connection import BlockingLink, dial
from ..link.frames import FrameKind
from ..link.worker_spec import (
    POSITION_SIGNAL,
    REQUEST_VARIABLE,
    STACKS_SIGNAL,
    Confinement,
    WorkerSpec,
)
from . import compiled_code, output
from .confinement import confine
from .function_setup import Built, build, weights_hint
from .loop_worker import LoopWorker
from .main_thread_worker import MainThreadWorker
from .worker import Worker, WorkerConnection

DIAL_TIMEOUT_S = 10.0
# How long a base waits at its end for the ends of its children. The gateway kills it later (BASE_EXIT_S).
OUTLAST_S = 8.0
# The files in which the kernel counts its kills: on the whole machine; and in a container, with version 2 or 1 of
# cgroups.
MACHINE_KILLS = "/proc/vmstat"
MEMORY_KILLS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control", MACHINE_KILLS)
# A function that a process runs. It returns None when the process must end. In a child that the process has forked, the
# function returns the role that the child runs next.
Role = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a process needs to connect to the gateway: the path of its socket, and the process's token."""

    address: str
    token: str

    def dial(self, role: str, **facts: str) -> socket.socket:
        """Connect, send HELLO as `role` ("zygote", "worker" or "log"), and return the connection."""
        sock = dial(self.address, DIAL_TIMEOUT_S)
        BlockingLink(sock).send(FrameKind.HELLO, {"token": self.token, "role": role, **facts})
        return sock


class Zygote:
    """A process that forks on request. Subclasses define how it gets ready and what its children run."""

    # The signals that this process handles. Its children reset the handlers.
    handled: tuple[signal.Signals, ...] = (signal.SIGCHLD,)
    # A descriptor that is readable in the children once this process has ended. If it is None, the kernel sends the children
    # SIGTERM instead.
    own_end: int | None = None

    def __init__(self, ticket: Ticket, kill_files: tuple[str, ...]) -> None:
        """`kill_files` are the files in which the kernel may count the processes that it kills here because memory ran
        out.
        """
        self._ticket, self._kill_files = ticket, kill_files
        self._wake_read, self._wake_write = socket.socketpair()
        # For each child that was not reaped yet, by pid: the counter that counts the child's death if the kernel kills the
        # child.
        self._children: dict[int, MemoryKills] = {}
        self._folders = ChildFolders()
        # What the imports have left. Each child opens the files in it again, and reseeds the generators in it.
        self._left = Leftovers()

    def run(self) -> Role | None:
        processes.adopt_orphans()
        link = BlockingLink(self._ticket.dial("zygote"))
        if not self.prepare(link):
            return None
        self._watch_children(link)
        fork_safety.freeze_objects()
        if (role := self._serve(link)) is None:
            processes.end_orphans(self._children, last=True)
        return role

    def prepare(self, link: BlockingLink) -> bool:
        """Get ready and send BUILT or FAILED. Return False if the process must end."""
        raise NotImplementedError

    def child_role(self, ticket: Ticket, request: dict[str, Any], root: str) -> Role:
        """Return the function that a forked child runs. The child calls this with its own ticket, and with the folder in
        which it makes its working folder.
        """
        raise NotImplementedError

    def kill_files(self, _request: dict[str, Any]) -> tuple[str, ...]:
        """Return the files in which the kernel may count a kill of the child because memory ran out."""
        return self._kill_files

    def folder_root(self, request: dict[str, Any]) -> str:
        """Return the folder in which the child makes its working folder. Raise OSError."""
        raise NotImplementedError

    def _watch_children(self, _link: BlockingLink) -> None:
        for end in (self._wake_read, self._wake_write):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

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
                    if frame.kind == FrameKind.SIGNAL:
                        self._signal(**frame.json())
                    if frame.kind == FrameKind.FORK and (role := self._fork(link, frame.json())) is not None:
                        return role

    def _reap(self, link: BlockingLink | None) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_read.recv(4096)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                self._folders.remove(ended.si_pid)
                pid, status = os.waitpid(ended.si_pid, 0)
                code = os.waitstatus_to_exitcode(status)
                kills = self._children.pop(pid, None)
                processes.end_orphans(self._children)
                if kills is None:
                    # Report no adopted orphans, because the gateway does not know them.
                    continue
                killed = code == -signal.SIGKILL and kills.explain()
                certain = kills.file != MACHINE_KILLS
                head = {"pid": pid, "code": code, "out_of_memory": killed, "certain": certain}
                # OSError means that the gateway has ended, which `_serve` notices at its next read.
                with contextlib.suppress(OSError):
                    if link is not None:
                        link.send(FrameKind.EXITED, head)

    def _memory_kills(self, files: tuple[str, ...]) -> MemoryKills:
        """Return the counter that the children with the same limit of memory share."""
        file = first_that_tells(files)
        known = (kills for kills in self._children.values() if kills.file == file)
        # If no such child is left, begin a new count: all kills so far are explained, or were kills of children's children.
        return next(known, None) or MemoryKills(file)

    def _signal(self, pid: int, number: int) -> None:
        # Send signals only to children that this zygote has not reaped. Until then, no other process gets the child's pid.
        if pid in self._children:
            os.kill(pid, number)

    def _fork(self, link: BlockingLink, request: dict[str, Any]) -> Role | None:
        parent, kills = os.getpid(), self._memory_kills(self.kill_files(request))
        try:
            root = self.folder_root(request)
            pid = os.fork()
        except OSError as error:
            # The operating system refuses another process or folder for now. This zygote and its children go on.
            link.send(
                FrameKind.UNFORKED, {"token": request["token"], "why": str(error), "errno": error.errno}
            )
            return None
        if pid != 0:
            self._children[pid] = kills
            self._folders.expect(pid, root)
            link.send(FrameKind.FORKED, {"token": request["token"], "pid": pid})
            return None
        fork_safety.detach(parent, self.handled, signalled=self.own_end is None)
        link.sock.close()
        self._wake_read.close()
        self._wake_write.close()
        processes.own_programs()
        ticket = Ticket(self._ticket.address, request["token"])
        try:
            self._left.renew()
        except Exception as error:  # noqa: BLE001  a generator's class may be the handler's
            failed = LauncherError(f"What the import has left cannot be renewed: {error}.")
            return partial(_refuse, ticket, request["role"], failed)
        return self.child_role(ticket, request, root)


class MemoryKills:
    """Counts the processes that the kernel has killed because memory ran out. Each kill explains one child's end."""

    def __init__(self, file: str) -> None:
        self.file = file
        self._explained = self._count()

    def explain(self) -> bool:
        """If a counted kill has not explained the end of any child yet, let it explain one now, and return True."""
        if self._count() <= self._explained:
            return False
        self._explained += 1
        return True

    def _count(self) -> int:
        return _count_memory_kills(self.file) or 0


@functools.lru_cache(maxsize=16)
def first_that_tells(files: tuple[str, ...]) -> str:
    """Return the first file in which the kernel counts its kills."""
    return next((file for file in files if _count_memory_kills(file) is not None), MACHINE_KILLS)


def _count_memory_kills(file: str) -> int | None:
    """Return the kernel's count in `file`; None if the file has no count."""
    with contextlib.suppress(OSError), open(file) as lines:  # noqa: PTH123
        for line in lines:
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return None


class Base(Zygote):
    """The first process of a Python environment. It has imported large packages, but no function."""

    handled = (signal.SIGCHLD, signal.SIGTERM)

    def __init__(self, ticket: Ticket, preload: list[str], kill_files: tuple[str, ...]) -> None:
        super().__init__(ticket, kill_files)
        self._preload = preload
        # The folder for the working folders of children whose function has no folder for temporary files, as in a container.
        self._root = ""
        self._generators = Generators()

    def run(self) -> Role | None:
        role = super().run()
        if role is None:
            self._outlast_children()
        return role

    def _watch_children(self, link: BlockingLink) -> None:
        super()._watch_children(link)
        # When the gateway dies, the kernel also sends SIGTERM to this base. The base ends with its link, so shut the link down.
        signal.signal(signal.SIGTERM, lambda *_: link.sock.shutdown(socket.SHUT_RD))

    def _outlast_children(self) -> None:
        """End the children, wait until the zygotes and workers below have ended, and kill the processes that these have left."""
        for pid in self._children:
            os.kill(pid, signal.SIGTERM)
        until_s = time.monotonic() + OUTLAST_S
        while processes.has_children() and (left_s := until_s - time.monotonic()) > 0:
            select.select([self._wake_read], [], [], left_s)
            self._reap(None)
        processes.end_orphans((), last=True)

    def prepare(self, link: BlockingLink) -> bool:
        setproctitle(f"pilotflame: base {' '.join(self._preload)}".rstrip())
        with leftovers.watch(self._generators):
            for name in self._preload:
                # Skip a package that cannot be imported here: the handler's own import reports this, or finds it elsewhere.
                with contextlib.suppress(ImportError, OSError):
                    importlib.import_module(name)
        if "torch" in sys.modules:
            compiled_code.prepare()
        os.environ["PILOTFLAME_TORCH_THREADS"] = str(fork_safety.torch_threads())
        fork_safety.make_torch_single_threaded()
        self._generators.keep()
        self._left = Leftovers(renewals=self._generators.find()[0])
        link.send(FrameKind.BUILT, {})
        return True

    def child_role(self, ticket: Ticket, request: dict[str, Any], root: str) -> Role:
        try:
            confine(_confinement(request))
            if request["role"] == "zygote":
                spec = WorkerSpec.model_validate(request["spec"])
                folder = WorkingFolder.of_code(root, spec.code)
                return RevisionZygote(ticket, spec, self.kill_files(request), folder, self._generators).run
        except (OSError, PilotflameError) as error:
            return partial(_refuse, ticket, request["role"], error)
        return partial(spawn_worker, ticket, request["spec"], root, request.get("rehearsal_mb"))

    def folder_root(self, request: dict[str, Any]) -> str:
        given = _confinement(request).tmp
        if given is None and not self._root:
            self._root = tempfile.mkdtemp(prefix="pilotflame-")
        root = str(given) if given is not None else self._root
        self._folders.remove_ended(root)
        return root

    def kill_files(self, request: dict[str, Any]) -> tuple[str, ...]:
        file = _confinement(request).memory_kills
        return (str(file),) if file is not None else self._kill_files


class RevisionZygote(Zygote):
    """The parent of one revision's workers. It has imported and built the handler, without weights."""

    def __init__(
        self, ticket: Ticket, spec: WorkerSpec, kill_files: tuple[str, ...], folder: WorkingFolder,
        generators: Generators,
    ) -> None:  # fmt: skip
        """`generators` has recorded the generators that the base's imports have made."""
        super().__init__(ticket, kill_files)
        self._spec, self._folder, self._generators = spec, folder, generators
        self._authors_handlers = AuthorsHandlers()

    def run(self) -> Role | None:
        setproctitle(f"pilotflame: zygote {self._spec.label}")
        redirect_output(self._ticket)
        report_crashes()
        signal.signal(POSITION_SIGNAL, signal.SIG_IGN)
        role = super().run()
        if role is None and self._spec.compiled is not None and "torch" in sys.modules:
            compiled_code.note_end(self._spec.compiled)
        return role

    def prepare(self, link: BlockingLink) -> bool:
        if (secrets := _receive_secrets(link)) is None:
            return False
        began_s = time.monotonic()
        try:
            with leftovers.watch(self._generators) as watch, self._telling_positions(link):
                built = build(self._spec, secrets, Path(self._folder.work))
        except PilotflameError as error:
            link.send(FrameKind.FAILED, error.to_wire(private=True))
            return False
        self._authors_handlers.note()
        self._folder.note_import(self._spec.code)
        self._folders.copied = self._folder.copied
        fork_safety.make_torch_single_threaded()
        times = {"import_s": round(built.import_s, 3), "build_s": round(time.monotonic() - began_s, 3)}
        facts = {
            **built.handler.facts(),
            **times,
            "rehearses": built.handler.rehearse is not None,
            "notes": NOTES,
        }
        kept = self._spec.compiled.folder if self._spec.compiled is not None else None
        self._left = watch.find(self._spec.code, Path(self._folder.tmp), built.state, kept)
        head = {"facts": facts, "spawn_reason": self._left.reason(times["build_s"])}
        link.send(FrameKind.BUILT, head)
        # Each fork inherits this worker, and connects and runs it.
        self._worker = worker_of(self._spec, built, self._authors_handlers)
        self.own_end = fork_safety.end_of(os.getpid())
        if not self._spec.weights and (hint := weights_hint(self._spec.code)):
            sys.stderr.write(hint)
        return True

    @contextlib.contextmanager
    def _telling_positions(self, link: BlockingLink) -> Iterator[None]:
        """In the block, answer each POSITION_SIGNAL with the lines that are being run.

        Python runs signal handlers between two of its instructions. So if native code runs, the answer comes after its
        return.
        """
        code = self._spec.code
        signal.signal(
            POSITION_SIGNAL, lambda _, frame: link.send(FrameKind.POSITION, locate_frame(frame, code))
        )
        try:
            yield
        finally:
            signal.signal(POSITION_SIGNAL, signal.SIG_IGN)

    def child_role(self, ticket: Ticket, request: dict[str, Any], _root: str) -> Role:
        try:
            folder = self._folder.fork()
        except PilotflameError as error:
            return partial(_refuse, ticket, request["role"], error)
        return partial(
            run_worker, ticket, self._spec, folder, request.get("rehearsal_mb"), self._worker, self.own_end
        )

    def folder_root(self, _request: dict[str, Any]) -> str:
        return self._folder.root


def _confinement(request: dict[str, Any]) -> Confinement:
    return Confinement.model_validate(request.get("confinement") or {})


def _refuse(ticket: Ticket, role: str, error: OSError | PilotflameError) -> None:
    """Tell the gateway why this process, a fork of a base or a zygote, cannot play its role. Then this process ends."""
    if isinstance(error, OSError):
        place = f" ({error.filename})" if error.filename else ""
        error = LauncherError(f"The process cannot be confined: {error.strerror or error}{place}.")
    link = BlockingLink(ticket.dial("zygote" if role == "zygote" else "worker"))
    link.send(FrameKind.FAILED, error.to_wire(private=True))


def spawn_worker(ticket: Ticket, spec: dict[str, Any], root: str, rehearsal_mb: int | None) -> None:
    """Replace this process, which the base has forked and will reap, with a new interpreter for a worker.

    Used for handlers whose import or build leaves something that forks would share or lack (`leftovers.py`).
    """
    request = {
        "address": ticket.address, "token": ticket.token, "spec": spec, "root": root,
        "rehearsal_mb": rehearsal_mb,
    }  # fmt: skip
    memory = os.memfd_create("request", 0)
    os.write(memory, json.dumps(request).encode())
    os.lseek(memory, 0, os.SEEK_SET)
    os.dup2(memory, 0)
    os.execv(sys.executable, [sys.executable, "-m", "pilotflame.zygote", "solo"])  # noqa: S606


def run_spawned(ticket: Ticket, spec: WorkerSpec, root: str, rehearsal_mb: int | None) -> None:
    """Run a worker that `spawn_worker` has made."""
    try:
        folder = WorkingFolder.of_code(root, spec.code)
    except PilotflameError as error:
        _refuse(ticket, "solo", error)
        return
    run_worker(ticket, spec, folder, rehearsal_mb)


def run_worker(
    ticket: Ticket,
    spec: WorkerSpec,
    folder: WorkingFolder,
    rehearsal_mb: int | None,
    worker: Worker | None = None,
    parents_end: int | None = None,
) -> None:
    """Run a worker. If it inherits no `worker` from a zygote, import and build the handler first.

    `WorkerConnection` describes `rehearsal_mb` and `parents_end`.
    """
    gc.enable()
    setproctitle(f"pilotflame: standby {spec.label}")
    redirect_output(ticket)
    # Call the hook before the connection is made, because processes that the hook forks must not inherit the connection.
    failed = worker.hooks.forked() if worker is not None else None
    link = BlockingLink(ticket.dial("worker"))
    if worker is None:
        report_crashes()
        authors_handlers = AuthorsHandlers()
        if (secrets := _receive_secrets(link)) is None:
            return
        try:
            built = build(spec, secrets, Path(folder.work))
        except PilotflameError as error:
            link.send(FrameKind.FAILED, error.to_wire(private=True))
            return
        authors_handlers.note()
        folder.note_import(spec.code)
        worker, parents_end = worker_of(spec, built, authors_handlers), fork_safety.end_of_parent()
        failed = worker.hooks.forked()
    if failed is not None:
        link.send(FrameKind.FAILED, failed.to_wire(private=True))
        return
    worker.run(WorkerConnection(link.sock, parents_end, rehearsal_mb, folder.remove_if_orphaned))


def worker_of(spec: WorkerSpec, built: Built, authors_handlers: AuthorsHandlers) -> Worker:
    """Return the worker of a function that is built in this process. It is not connected yet."""
    kind = LoopWorker if built.handler.kind.on_loop else MainThreadWorker
    return kind(spec, built, authors_handlers)


def report_crashes() -> None:
    """Report crashes and stuck threads on standard error, which is the function's log. Forks inherit this."""
    faulthandler.enable(file=2)
    faulthandler.register(STACKS_SIGNAL, file=2)


def _receive_secrets(link: BlockingLink) -> dict[str, str] | None:
    """Wait for the BUILD frame and return the secrets in it. Return None if the gateway closed the link.

    Secrets come over the function's own link, so that no base ever has them in its memory.
    """
    frame = link.receive_one()
    return None if frame is None else dict(frame.json()["env"])


def redirect_output(ticket: Ticket) -> None:
    """Redirect standard output and standard error to a separate connection to the gateway.

    The kernel delivers everything that was written, so even the last output before a crash arrives.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    word = os.urandom(8).hex()
    sock = ticket.dial("log", mark=word)
    output.redirect(sock.fileno(), word)
    sock.close()


def main() -> None:
    """Run `python -m pilotflame.zygote base|solo`.

    The request is JSON. A container has it in the environment variable REQUEST_VARIABLE, other processes on standard
    input.
    """
    kind, given = sys.argv[1], os.environ.pop(REQUEST_VARIABLE, None)
    request = json.loads(given) if given is not None else json.load(sys.stdin)
    # Replace the streams before any library is imported, because libraries may keep references to the streams.
    output.install()
    # Close inherited descriptors: uvloop leaves a copy of the gateway's standard error open in its children.
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), 0)
    fork_safety.detach(os.getppid())
    if kind == "base":
        processes.yield_memory()
    ticket = Ticket(request["address"], request["token"])
    if kind == "solo":
        run_spawned(
            ticket, WorkerSpec.model_validate(request["spec"]), request["root"], request["rehearsal_mb"]
        )
    else:
        gc.disable()
        role: Role | None = Base(ticket, request["preload"], MEMORY_KILLS if given else (MACHINE_KILLS,)).run
        # In a forked child, `role` returns the child's own role, which runs next. Keep the earlier roles and all that they refer
        # to, because freeing an inherited object copies its page of memory.
        roles = list[Role]()
        while role is not None:
            roles.append(role)
            role = role()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
