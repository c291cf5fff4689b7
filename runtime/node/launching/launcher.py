"""Defines the launcher interface: launch a revision, and fork its workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

from ...calls.link.child import Child
from ...calls.link.worker_spec import WorkerSpec
from ...ground.telemetry.logs import Log

NO_SECRETS: Mapping[str, str] = MappingProxyType({})


class WorkerSource(Protocol):
    """A launched revision, which starts its workers."""

    facts: dict[str, Any]
    """What `Handler.facts` has returned for the revision's handler."""
    spawn_reason: str
    """Why workers are spawned instead of forked; empty if they are forked."""

    @property
    def alive(self) -> bool: ...

    @property
    def zygote_pid(self) -> int | None:
        """Return the pid of the process that workers are forked from. None if workers are spawned."""

    async def fork(self, name: str, logs: Log, rehearsal_mb: int | None = None) -> Child:
        """Return a new standby: a worker process that is connected, without weights. Raise LauncherError.

        `rehearsal_mb` is the memory of each GPU that the standby may use to rehearse: 0 if it must not rehearse, None
        for no limit.
        """

    def close(self) -> None:
        """End the zygote. The workers that were forked from it drain."""

    async def wait_closed(self, timeout_s: float) -> None:
        """Wait for the end of the zygote after a call of `close`. Kill the zygote after `timeout_s`."""


class RevisionLauncher(Protocol):
    """Launches a revision, for example as processes of this machine."""

    async def launch(
        self,
        spec: WorkerSpec,
        logs: Log,
        on_death: Callable[[], None],
        secrets: Mapping[str, str] = NO_SECRETS,
    ) -> WorkerSource:
        """Launch the zygote of `spec`. Call `on_death` if the zygote dies. Raise HandlerError or LauncherError.

        `secrets` are environment variables that only this zygote and its workers get, over their links.
        Call `forget` with the same `spec` when its revision has ended.
        """

    async def prepare(self, spec: WorkerSpec) -> None:
        """Start the processes that a launch of `spec` shares with others, so that the launch takes less time. Raise
        LauncherError.
        """

    async def forget(self, spec: WorkerSpec) -> None:
        """End the processes that were started only for `spec`, which must be the same object as at its launch."""


class Launcher(RevisionLauncher, Protocol):
    """Launches all revisions of a node."""

    async def provide(self, spec: WorkerSpec) -> bool:
        """Bring the image that a launch of `spec` needs to this machine. Return True if the image was missing.

        Raise LauncherError.
        """

    def base_pids(self) -> list[int]:
        """Return the pids of the bases: the processes with the heavy imports, from which zygotes are forked."""

    def end_unused(self) -> None:
        """End the shared processes that no launched revision needs now. A later launch starts them again."""

    async def close(self) -> None:
        """End all launched processes and wait until they have ended. Later launches raise LauncherError."""


class LauncherByImage:
    """Launches functions that have an image in containers, and all other functions as processes."""

    def __init__(self, processes: Launcher, containers: Launcher) -> None:
        self._processes, self._containers = processes, containers

    async def launch(
        self,
        spec: WorkerSpec,
        logs: Log,
        on_death: Callable[[], None],
        secrets: Mapping[str, str] = NO_SECRETS,
    ) -> WorkerSource:
        return await self._of(spec).launch(spec, logs, on_death, secrets)

    async def prepare(self, spec: WorkerSpec) -> None:
        await self._of(spec).prepare(spec)

    async def provide(self, spec: WorkerSpec) -> bool:
        return await self._of(spec).provide(spec)

    async def forget(self, spec: WorkerSpec) -> None:
        await self._of(spec).forget(spec)

    def base_pids(self) -> list[int]:
        return self._processes.base_pids() + self._containers.base_pids()

    def end_unused(self) -> None:
        self._processes.end_unused()
        self._containers.end_unused()

    async def close(self) -> None:
        await self._containers.close()
        await self._processes.close()

    def _of(self, spec: WorkerSpec) -> Launcher:
        return self._containers if spec.image else self._processes
