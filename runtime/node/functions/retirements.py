"""Ends replaced and deleted revisions, and removes the files that no revision needs any more."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from ....errors import PilotflameError, RevisionsDraining, UnknownFunction
from ..packaging.environment import discard_unused, shrink_cache
from .live import Live
from .registry import Functions
from .revisions import Revisions

LOG = logging.getLogger(__name__)
# While this many replaced revisions of a function still run calls, its live revision cannot be replaced. Each replaced
# revision keeps its workers, its zygote and its weights in memory.
MOST_DRAINING = 3
# A deletion waits this long for the end of the function's processes, unless calls run.
DELETED_S = 1.0


@dataclass(eq=False)
class Retirements:
    """The replaced and the deleted revisions of one gateway, until they have finished their invocations."""

    functions: Functions
    revisions: Revisions
    untidy: bool = field(default=True, init=False)
    """True if there may be an environment that no revision needs, which a crash or a failed deploy has left."""
    # The retiring revisions by the task that ends them. After a first deploy, a task ends no revision, and only removes
    # files.
    _ending: dict[asyncio.Task[None], Live | None] = field(default_factory=dict, init=False)

    def busy(self, name: str, besides: Live | None = None) -> set[str]:
        """Return the ids of a function's replaced or deleted revisions that have not ended yet, except `besides`."""
        retiring = [old.record for old in self._ending.values() if old is not None and old is not besides]
        return {record.revision for record in retiring if record.function == name}

    def draining(self, name: str) -> dict[asyncio.Task[None], Live]:
        """Return a function's replaced revisions that still run calls, by the tasks that end them."""
        return {
            task: old
            # Iterate over a copy: a deploy calls this in a thread, and the event loop may change the dict meanwhile.
            for task, old in list(self._ending.items())
            if old is not None and old.record.function == name and old.workers.observed.unfinished
        }

    def check_room(self, name: str) -> None:
        """Raise RevisionsDraining if the live revision of a function cannot be replaced now."""
        if len(draining := self.draining(name)) < MOST_DRAINING:
            return
        revisions = ", ".join(old.record.revision for old in draining.values())
        raise RevisionsDraining(
            f"{len(draining)} replaced revisions of {name} still run calls ({revisions}), and each holds its processes"
            " and weights.",
            remedy="Try again when the calls of one of them have ended: the latest end is the function's timeout_s after"
            " its replacement.",
        )

    def retire(self, old: Live | None, name: str) -> None:
        """Begin to retire the replaced revision of a function, if there is one, and to remove the files of the
        function's old revisions.
        """
        self._begin(self._retire(old, name), old)

    async def delete(self, name: str) -> None:
        """Delete a function: refuse new invocations, and remove its secrets and files.

        Accepted invocations finish in the background, and their revisions keep their code until then. Raise the errors
        of `Functions.get`, or UnknownFunction if another caller has deployed or deleted the function while this method
        waited for its lock.
        """
        functions = self.functions
        revision = functions.get(name).record.revision
        async with functions.lock(name):
            # Look the function up again: while this method waited, a restart may have replaced its `Live`.
            live = functions.find(name)
            if live is None or live.record.revision != revision:
                raise UnknownFunction(f"{name!r} was changed meanwhile.", remedy="Check it, and try again.")
            await functions.tasks.complete(self._delete(name, live))
        if functions.shared is not None:
            await functions.shared.settle(name)
        ending = [task for task, old in self._ending.items() if old is live]
        if ending and not live.workers.observed.unfinished:
            await asyncio.wait(ending, timeout=DELETED_S)

    async def leave(self, name: str, secrets: dict[str, str]) -> None:
        """Delete a function here that another gateway has deleted. Its calls finish with `secrets`. The caller holds
        the function's lock.
        """
        if (live := self.functions.find(name)) is not None:
            live.function.secrets = secrets
            await self.functions.tasks.complete(self._take_away(name, live, followed=True))
            return
        # If the first revision of the function failed to start here, only its files exist. Remove them.
        with contextlib.suppress(UnknownFunction):
            await self.revisions.threads.run(functools.partial(self.functions.store.delete, name))

    async def close(self) -> None:
        """Refuse new requests, finish accepted requests within `drain_s`, and end all processes."""
        functions = self.functions
        functions.closing = True
        begun_s, drains = time.monotonic(), [live.workers.drain for live in self.revisions.running]
        for drain in drains:
            drain.limit_shutdown(functions.settings.drain_s)
        retiring = [self.revisions.end(live) for live in functions.all()]
        # Also wait for replaced revisions that still finish their invocations.
        if ends := {*map(functions.tasks.create_task, retiring), *self._ending}:
            await asyncio.wait(ends)
        took_s, cut = time.monotonic() - begun_s, sum(drain.cut for drain in drains)
        LOG.info("drained in %.1f s; running calls that did not end in time: %d", took_s, cut)
        await self.revisions.histories.close()

    def _begin(self, end: Coroutine[Any, Any, None], old: Live | None) -> None:
        """Run `end`, which retires the revision `old` and removes files."""
        ending = self.functions.tasks.create_task(end)
        self._ending[ending] = old
        ending.add_done_callback(self._ending.pop)

    async def _retire(self, old: Live | None, name: str) -> None:
        if old is not None:
            await self.revisions.end(old)
            self._note_removed(name)
        busy = self.busy(name, besides=old)
        busy |= {revision for function, revision in self.functions.proving if function == name}
        store, removed = self.functions.store, list[str]()

        def prune() -> list[str]:
            removed.extend(store.prune(name, busy=busy) + store.sweep(name, busy=busy))
            return removed

        await self._tidy(name, prune)
        if removed:
            self.functions.events.pruned(name)

    async def _delete(self, name: str, live: Live) -> None:
        functions = self.functions
        if functions.shared is not None:
            live.function.secrets = functions.secrets.of(name)
            # Delete the function on all gateways first, because this may be refused. Keep the secrets until then.
            await functions.shared.delete(live.record)
            await asyncio.to_thread(functions.secrets.forget, name)
        await self._take_away(name, live)

    async def _take_away(self, name: str, live: Live, *, followed: bool = False) -> None:
        functions, deleted = self.functions, asyncio.Event()
        functions.remove(name, followed=followed)
        # End the log before the files are gone. Then, after a crash in between, the next owner does not get the old lines.
        live.logs.end()
        if live.function.secrets is None:
            live.function.secrets = functions.secrets.of(name)
        self._begin(self._retire_deleted(name, live, deleted), live)
        try:
            await self.revisions.histories.forget(name)
            # Remove the secrets before the files. Then, after a crash in between, a new function with this name does
            # not get the old secrets. If gateways share a database, `_delete` has removed the secrets, on the gateway
            # that was asked to delete the function.
            if functions.shared is None:
                await asyncio.to_thread(functions.secrets.forget, name)
            delete = functools.partial(functions.store.delete, name, busy=self.busy(name))
            await self.revisions.threads.run(delete)
        finally:
            deleted.set()

    async def _retire_deleted(self, name: str, live: Live, deleted: asyncio.Event) -> None:
        """Retire the revision of a deleted function. Then remove the code that it kept for its calls, and unused
        environments.
        """
        await self.revisions.end(live)
        await deleted.wait()
        busy = self.busy(name, besides=live)
        self._note_removed(name)
        await self._tidy(name, lambda: self.functions.store.sweep(name, busy=busy) or True)

    def _note_removed(self, name: str) -> None:
        """If no revision of a deleted function runs, and there is no new function of this name, report that its
        deletion has ended.
        """
        running = any(one.record.function == name for one in self.revisions.running)
        if self.functions.find(name) is None and not running:
            self.functions.events.removed(name)

    async def _tidy(self, name: str, prune: Callable[[], object]) -> None:
        """Call `prune` in a thread. If it has removed a revision, or a deploy has failed, remove unused environments.

        If there were unused environments, also shrink the cache of uv.
        """
        untidy, self.untidy = self.untidy, False
        environments = self.revisions.environments
        # Keep the environments of running revisions, too: a deleted function whose calls still run has no record in the
        # store.
        running = {live.record.requirements_digest for live in self.revisions.running}

        def needed() -> set[str]:
            return self.functions.store.environments() | running

        def tidy() -> None:
            # Shrink the cache after the environments are gone: until then, the cache shares files with them as hard
            # links, and does not count such files.
            if (prune() or untidy) and discard_unused(environments, needed):
                shrink_cache(environments)

        try:
            await self.revisions.threads.run(tidy)
        # Only log this error, because files that cannot be removed do no harm.
        except (OSError, PilotflameError) as error:
            LOG.warning("old revisions of %s were not removed: %s", name, error)
