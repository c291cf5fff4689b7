"""Keeps one revision's zygote running, forks its workers, and keeps a standby."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping

from ....errors import LauncherError, PilotflameError
from ...calls.link.child import Child
from ...calls.link.frames import Frame, FrameKind
from ...calls.link.worker_spec import WorkerSpec
from ...ground.settings.function_settings import Scale
from ...ground.telemetry.logs import Log
from ..launching.launcher import Launcher, WorkerSource
from .gpu_places import GpuPlace
from .standby_places import StandbyPlaces

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
# Forking a standby takes processor time from the requests that follow a cold start. (MiniLM on 2 cores: a request
# took up to 69 ms instead of 23 ms.) So the next standby waits until no invocation runs, at most for this time.
LATEST_STANDBY_S = 2.0


class ZygoteSupervisor:
    """The zygote of one revision, and its standby: a child without weights that becomes the next worker."""

    def __init__(
        self, spec: WorkerSpec, scale: Scale, launcher: Launcher, logs: Log, tasks: asyncio.TaskGroup,
        on_change: Callable[[], None] = lambda: None, secrets: Callable[[], Mapping[str, str]] = dict,
        numbers: Iterator[int] | None = None, places: StandbyPlaces | None = None,
        on_zygote: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """`secrets` returns the environment variables that each new zygote gets over its link. `numbers` yields the last
        part of each child's name.

        `places` books the GPU memory of standbys; None if that memory is not limited. The supervisor calls `on_change`
        when the zygote has started or ended, and when the standby is primed or has ended. It calls `on_zygote` when a
        zygote has died and a new one should be launched, and when a zygote was launched that no start waits for.
        """
        self.standby: Child | None = None
        self.standby_primed = False
        self._spec, self._launcher, self._logs, self._tasks = spec, launcher, logs, tasks
        self._on_change, self._secrets, self._places = on_change, secrets, places
        self._on_zygote = on_zygote
        # The place of the standby on GPUs; None without a place.
        self._place: GpuPlace | None = None
        self.stays = scale.rest == "zygote"
        """If False, the zygote ends after the last worker."""
        self._with_standby = self.stays and scale.standby
        self._source: WorkerSource | None = None
        self._launching = asyncio.Lock()
        self._numbers = numbers or itertools.count(1)
        self._forking_standby = False
        # After a fork failed, the next one is tried once a worker has started, or a zygote was launched.
        self._failed_standby = False
        self.standby_due_s = math.inf
        """When to fork a missing standby although invocations run."""
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
            self._source, self.relaunch_at_s, self._failed_standby = source, math.inf, False
            self.standby_due_s = time.monotonic() + LATEST_STANDBY_S
            self._on_change()
            return source

    @contextlib.asynccontextmanager
    async def _forgotten_if_closed(self) -> AsyncIterator[None]:
        """If the supervisor was closed before the block ends, have the launcher end what the block has started."""
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
        """Launch the zygote before it is needed, unless it is there. A failure is only logged."""
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
            text = f"the zygote could not be launched: {error}\n{error.trace}".rstrip()
            self._logs.write("gateway", text, "error")
        self._on_zygote()

    def _on_death(self) -> None:
        self._source = None
        self._on_change()
        if self._closed or not self.stays:
            return
        if time.monotonic() - self._launched_s > STABLE_AFTER_S:
            self._delay_s = 0.0
        self._logs.write(
            "gateway", f"the zygote died; a new one is launched in {self._delay_s:.1f} s", "error"
        )
        self.relaunch_at_s = time.monotonic() + self._delay_s
        self._delay_s = min(LAST_RELAUNCH_DELAY_S, max(FIRST_RELAUNCH_DELAY_S, self._delay_s * 2))
        self._on_zygote()

    def note_works(self) -> None:
        """Make the next relaunch immediate: a worker became ready, so the zygote works."""
        self._delay_s, self._failed_standby = 0.0, False

    def rest(self) -> None:
        """End the zygote and the standby. The next fork of a worker launches a new zygote."""
        if self.relaunch_at_s < math.inf:
            self.relaunch_at_s = math.inf
            self._logs.write("gateway", "no new zygote is launched: an idle function holds none now")
        if self._source is not None:
            self._drop_standby()
            self._source.close()
            self._source = None
            self._on_change()

    def close(self) -> None:
        """Close the standby, and start no more processes."""
        self._closed = True
        self.relaunch_at_s = math.inf
        self._drop_standby()

    async def wait_closed(self) -> None:
        """End the zygote and the processes that were launched only for this revision, and wait for their end."""
        if self._source is not None:
            self._source.close()
            await self._source.wait_closed(EXIT_TIMEOUT_S)
        await self._launcher.forget(self._spec)

    # -- the zygote's children

    async def fork(self, rehearsal_mb: int | None = None) -> Child:
        """Fork a child and return it. If the zygote dies meanwhile, launch another zygote and fork from that.

        The child may rehearse with `rehearsal_mb` MiB of each GPU (None: no limit). Raise HandlerError or
        LauncherError.
        """
        for _ in range(MAX_LAUNCHES - 1):
            try:
                return await self._fork(await self.open(), rehearsal_mb)
            except LauncherError as error:
                # Try again only after a death of the zygote. If it still runs, the fork failed for another reason.
                if self._closed or self.source is not None:
                    raise
                self._logs.write("gateway", f"starting a worker once more: {error}", "warning")
        return await self._fork(await self.open(), rehearsal_mb)

    async def _fork(self, source: WorkerSource, rehearsal_mb: int | None) -> Child:
        name = f"{self._spec.function}-{self._spec.revision.partition('-')[0]}-{next(self._numbers)}"
        return await source.fork(name, self._logs, rehearsal_mb)

    def take_standby(self) -> Child | None:
        """Hand the standby over to the caller; return None if there is no live standby."""
        child, self.standby = self.standby, None
        self.standby_due_s = time.monotonic() + LATEST_STANDBY_S
        return child if child is not None and not child.link.closed else None

    @property
    def lacks_standby(self) -> bool:
        """True if the settings ask for a standby, it is missing, and the zygote can fork it."""
        there = self.standby is not None or self._forking_standby or self._failed_standby
        return self._with_standby and not self._closed and not there and self.source is not None

    def replenish(self) -> None:
        """Fork a standby, if one is missing."""
        if self.lacks_standby and (source := self.source) is not None:
            self._forking_standby = True
            self._tasks.create_task(self._fork_standby(source))

    async def _fork_standby(self, source: WorkerSource) -> None:
        place, rehearsal_mb = self._places.take(source.facts) if self._places is not None else (None, None)
        child: Child | None = None
        try:
            child = await self._fork(source, rehearsal_mb)
        except LauncherError as error:
            if source is self._source:
                self._failed_standby = True
                self._logs.write("gateway", f"no standby: {error}", "warning")
            return
        finally:
            self._forking_standby = False
            if self._places is not None and place is not None:
                self._places.bind(place, child)
        unwanted = self._closed or not self._with_standby or self.standby is not None
        if unwanted or source is not self._source:
            child.link.close()
            return
        self.standby, self.standby_primed, self._place = child, False, place
        child.link.bind(self._on_standby_frame, lambda: self._on_standby_lost(child))
        if self._places is not None:
            self._places.note_forked()

    def _on_standby_frame(self, frame: Frame) -> None:
        if frame.kind == FrameKind.PRIMED:
            self.standby_primed = True
            if self._places is not None and self._place is not None and self.standby is not None:
                self._places.note_primed(self._place, self.standby, frame.json())
            self._on_change()

    def _on_standby_lost(self, child: Child) -> None:
        if self.standby is child:
            self.standby = None
            self._on_change()

    def stop_standbys(self) -> None:
        """End the standby, and fork no other: few or no workers will start."""
        self._with_standby = False
        self.end_standby()

    def end_standby(self) -> bool:
        """End the standby. Return False if there is no standby."""
        if self.standby is None:
            return False
        self._drop_standby()
        self._on_change()
        return True

    def _drop_standby(self) -> None:
        """Close the standby's link, which ends its process."""
        if (child := self.take_standby()) is not None:
            child.link.close()
