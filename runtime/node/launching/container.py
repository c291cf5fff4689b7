"""Represents a container of a revision, and the processes in it: its base, its zygote and its workers."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ....errors import LauncherError
from ....snapshot.caching.mounted import KeptFolders
from ...calls.link.child import Child
from ...calls.link.connection import Link
from ...calls.link.worker_spec import Confinement, WorkerSpec
from ...ground.telemetry.log_stream import LogStream
from ...ground.telemetry.logs import Log
from .launcher import NO_SECRETS
from .listener import Listener
from .zygote_process import ZygoteProcess, ZygoteSource

if TYPE_CHECKING:
    from aiodocker.containers import DockerContainer


# If a process has not ended this long after its parent was asked to kill it, the gateway removes the container, which
# ends all its processes. A zygote may fail to kill a worker, because it runs the function's own code.
KILLED_BY_ZYGOTE_S = 2.0
LOG = logging.getLogger(__name__)


class ContainerChild(Child):
    """A process in a container. Its parent process sends it signals for the gateway, and reports its end.

    If the parent has ended, no report comes. The process then counts as ended when its container has been removed. If the
    parent does not kill it, the container is removed.
    """

    def __init__(
        self, link: Link, pid: int, name: str, output: LogStream | None, send_signal: Callable[[int], None],
        container: Container,
    ) -> None:  # fmt: skip
        super().__init__(link, pid, name, output)
        self._send_signal, self._container = send_signal, container
        self._removal: asyncio.TimerHandle | None = None
        container.hold(self)

    def send_signal(self, number: int) -> None:
        self._send_signal(number)

    def kill(self) -> None:
        super().kill()
        forked = self is not self._container.first
        if forked and self._removal is None and not self.gone.is_set():
            self._removal = self._loop.call_later(KILLED_BY_ZYGOTE_S, self._remove_container)

    def _remove_container(self) -> None:
        if self._container.removing:
            return
        text = f"{self.name} was not killed by its parent process, so its container is removed"
        LOG.warning("%s", text)
        self._container.logs.write("gateway", text, "error")
        self._container.remove()

    def ended(self) -> None:
        if self._removal is not None:
            self._removal.cancel()
        super().ended()

    def report_exit(self, code: int | None, *, out_of_memory: bool = False, certain: bool = True) -> None:
        super().report_exit(code, out_of_memory=out_of_memory, certain=certain)
        if code is not None:
            self._container.release(self)
            self.ended()


class Container:
    """A container of the engine, and the processes in it that have connected."""

    def __init__(
        self, name: str, spec: WorkerSpec, engine_side: DockerContainer,
        starting: asyncio.Task[LauncherError | None], weights: Mapping[str, KeptFolders], logs: Log,
    ) -> None:  # fmt: skip
        self.name, self.spec, self.engine_side, self.logs = name, spec, engine_side, logs
        self.starting = starting
        """This task ends when the engine has created and started the container, or has failed to do so."""
        self.weights = weights
        """The folders of the node's cache that are mounted into the container, by the name of the snapshot."""
        self.first: ContainerChild | None = None
        """The container's first process; None until that process has connected."""
        self.remove: Callable[[], None] = lambda: None
        """Removes the container, which ends all its processes. Does nothing until the container's first process has connected."""
        self.removing = False
        """Whether `remove` has been called."""
        self._children: set[ContainerChild] = set()

    def hold(self, child: ContainerChild) -> None:
        self.first = self.first or child
        self._children.add(child)

    def release(self, child: ContainerChild) -> None:
        self._children.discard(child)

    def note_removed(self) -> None:
        """Set `gone` of each process that is left in the container."""
        for child in self._children:
            child.report_exit(None)
            child.ended()
        self._children.clear()


class ContainerZygote(ZygoteProcess):
    """The process of a base or a zygote in a container."""

    def __init__(
        self, child: Child, listener: Listener, on_death: Callable[[], None], container: Container
    ) -> None:
        super().__init__(child, listener, on_death)
        self._container = container

    def _make_child(self, link: Link, pid: int, name: str, token: str, output: LogStream | None) -> Child:
        send_signal = functools.partial(self.send_signal, token)
        return ContainerChild(link, pid, name, output, send_signal, self._container)


class ContainerBase(ContainerZygote):
    """The first process of a container. The container is removed when this base is closed or dies, or when its zygote
    dies.
    """

    def __init__(
        self, child: Child, listener: Listener, remove: Callable[[], None], container: Container
    ) -> None:
        super().__init__(child, listener, remove, container)
        self._remove = remove
        container.remove = self.close
        self._orphaned = False

    def close(self) -> None:
        super().close()
        self._container.removing = True
        self._remove()

    async def launch(
        self, spec: WorkerSpec, logs: Log, on_death: Callable[[], None], secrets: Mapping[str, str] = NO_SECRETS,
        confinement: Confinement | None = None,
    ) -> ZygoteSource:  # fmt: skip
        if kept := self._container.weights:
            weights = [
                one.model_copy(update={"mounted": tuple(kept[one.name].paths)}) if one.source else one
                for one in spec.weights
            ]
            spec = spec.model_copy(update={"weights": tuple(weights)})
        return await super().launch(spec, logs, on_death, secrets, confinement)

    def _make_zygote(self, child: Child, on_death: Callable[[], None]) -> ZygoteProcess:
        def on_zygote_death() -> None:
            # Remove the container with its workers: only the zygote could report the ends of its workers, and a
            # relaunch needs the memory of the workers.
            self._orphaned = True
            if child.gone.is_set():
                self.close()
            on_death()

        return ContainerZygote(child, self._listener, on_zygote_death, self._container)

    def _child_ended(self, pid: int, code: int, out_of_memory: bool, certain: bool = True) -> None:
        super()._child_ended(pid, code, out_of_memory, certain)
        # Close only now: the report that the line above has handled says why the zygote died.
        if self._orphaned:
            self.close()

    @property
    def _source(self) -> type[ZygoteSource]:
        return ContainerSource


class ContainerSource(ZygoteSource):
    """Forks a revision's workers from its zygote. Closing this source removes the container."""

    def close(self) -> None:
        super().close()
        self._base.close()

    async def wait_closed(self, timeout_s: float) -> None:
        await self._base.child.wait_killed(timeout_s)
