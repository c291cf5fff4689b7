"""Keeps one revision's zygote running, and forks its workers."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping

from ....errors import LauncherError, PilotflameError
from ...calls.link.child import Child
from ...calls.link.worker_spec import WorkerSpec
from ...ground.telemetry.logs import Log
from ..launching.launcher import RevisionLauncher, WorkerSource
from .standby import Standby

# A zygote that was closed is killed if it has not ended after this time.
EXIT_TIMEOUT_S = 10.0
# A zygote that died is launched again: the first time without a delay, then after FIRST_RELAUNCH_DELAY_S,
# then after twice the delay each time, up to LAST_RELAUNCH_DELAY_S. After a zygote that lived longer than
# STABLE_AFTER_S, the next launch has no delay again.
FIRST_RELAUNCH_DELAY_S = 0.5
LAST_RELAUNCH_DELAY_S = 60.0
STABLE_AFTER_S = 30.0
# To fork one child, the zygote is launched at most this many times.
MAX_LAUNCHES = 3


class ZygoteSupervisor:
    """The zygote of one revision. Its children are the workers and the standby."""

    def __init__(
        self, spec: WorkerSpec, launcher: RevisionLauncher, logs: Log, tasks: asyncio.TaskGroup,
        secrets: Callable[[], Mapping[str, str]], names: Iterator[str], standby: Standby,
        on_change: Callable[[], None], on_zygote: Callable[[], None], *, stays: bool,
    ) -> None:  # fmt: skip
        """`secrets` returns the environment variables that each new zygote gets over its link. `names` yields the name of
        each child.

        The supervisor calls `on_change` when the zygote has started or ended. It calls `on_zygote` when a zygote has died
        and a new one should be launched, and at the end of a launch that no start waits for.
        """
        self.stays = stays
        """If False, the zygote ends after the last worker, and is not launched again after its death."""
        self._spec, self._launcher, self._logs, self._tasks = spec, launcher, logs, tasks
        self._secrets, self._names, self._standby = secrets, names, standby
        self._on_change, self._on_zygote = on_change, on_zygote
        self._source: WorkerSource | None = None
        self._launching = asyncio.Lock()
        self.relaunch_at_s = math.inf
        """When to launch a new zygote after a death; infinity if no launch is due."""
        self._closed = False
        self._delay_s = 0.0
        self._launched_s = 0.0

    @property
    def source(self) -> WorkerSource | None:
        """The zygote; None if it was not launched, or has died."""
        return self._source if self._source is not None and self._source.alive else None

    @property
    def exists(self) -> bool:
        """True if there is a zygote, or one is being launched."""
        return self.source is not None or self._launching.locked()

    # -- the zygote

    async def open(self) -> WorkerSource:
        """Return the zygote, after launching it if it does not run. Raise HandlerError or LauncherError."""
        async with self._launching:
            if (source := self.source) is not None:
                return source
            self.check_open()
            self._launched_s = time.monotonic()
            async with self._forgotten_if_closed():
                source = await self._launcher.launch(self._spec, self._logs, self._on_death, self._secrets())
            if self._closed:
                source.close()
            self.check_open()
            self.relaunch_at_s = math.inf
            self._set_source(source)
            return source

    def _set_source(self, source: WorkerSource | None) -> None:
        self._source = source
        self._standby.note_zygote(source)
        self._on_change()

    @contextlib.asynccontextmanager
    async def _forgotten_if_closed(self) -> AsyncIterator[None]:
        """If the supervisor was closed before the block ends, have the launcher end the processes that the block has started."""
        try:
            yield
        finally:
            if self._closed:
                await self._launcher.forget(self._spec)

    def check_open(self) -> None:
        """Raise LauncherError after `close`."""
        if self._closed:
            raise LauncherError(f"Revision {self._spec.revision} has been stopped.")

    def launch(self) -> None:
        """Launch the zygote ahead of need, unless it runs or is being launched. A failure is only logged."""
        self.relaunch_at_s = math.inf
        if not self.exists and not self._closed:
            self._tasks.create_task(self.warm())

    async def warm(self, *, shared_only: bool = False) -> None:
        """Launch the zygote before it is needed. A failure is only logged.

        If `shared_only`, start only the processes that the zygote shares with zygotes of other revisions.
        """
        try:
            if shared_only:
                async with self._forgotten_if_closed():
                    await self._launcher.prepare(self._spec)
            else:
                await self.open()
        except PilotflameError as error:
            text = f"the zygote could not be launched: {error.whole}\n{error.trace}".rstrip()
            self._logs.write("gateway", text, "error")
        self._on_zygote()

    def _on_death(self) -> None:
        self._set_source(None)
        if self._closed or not self.stays:
            return
        if time.monotonic() - self._launched_s > STABLE_AFTER_S:
            self._delay_s = 0.0
        text = f"the zygote died; a new one is launched in {self._delay_s:.1f} s"
        self._logs.write("gateway", text, "error")
        self.relaunch_at_s = time.monotonic() + self._delay_s
        self._delay_s = min(LAST_RELAUNCH_DELAY_S, max(FIRST_RELAUNCH_DELAY_S, self._delay_s * 2))
        self._on_zygote()

    def note_works(self) -> None:
        """Make the next relaunch immediate: a worker became ready, so the zygote works."""
        self._delay_s = 0.0
        self._standby.note_works()

    def rest(self) -> None:
        """End the zygote and the standby. The next fork of a worker launches a new zygote."""
        if self.relaunch_at_s < math.inf:
            self.relaunch_at_s = math.inf
            self._logs.write("gateway", "no new zygote is launched: an idle function holds none now")
        if self._source is not None:
            self._standby.drop()
            self._source.close()
            self._set_source(None)

    def close(self) -> None:
        """End the standby, and start no more processes."""
        self._closed = True
        self.relaunch_at_s = math.inf
        self._standby.close()

    async def wait_closed(self) -> None:
        """End the zygote and the processes that were launched only for this revision, and wait for their end."""
        if self._source is not None:
            self._source.close()
            await self._source.wait_closed(EXIT_TIMEOUT_S)
        await self._launcher.forget(self._spec)

    async def fork(self, rehearsal_mb: int | None) -> Child:
        """Fork a child and return it. If the zygote dies meanwhile, launch another zygote and fork from that.

        The child may rehearse with `rehearsal_mb` MiB of each GPU (None: no limit). Raise HandlerError or
        LauncherError.
        """
        for _ in range(MAX_LAUNCHES - 1):
            try:
                return await self._fork(rehearsal_mb)
            except LauncherError as error:
                # Try again only after a death of the zygote. If it still runs, the fork failed for another reason.
                if self._closed or self.source is not None:
                    raise
                self._logs.write("gateway", f"starting a worker once more: {error}", "warning")
        return await self._fork(rehearsal_mb)

    async def _fork(self, rehearsal_mb: int | None) -> Child:
        source = await self.open()
        return await source.fork(next(self._names), self._logs, rehearsal_mb)
