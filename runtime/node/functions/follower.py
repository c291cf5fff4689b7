"""Follows the changes that other gateways with the same database make to functions."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from ....errors import GatewayError, PilotflameError
from ...ground.storing.revision_index import FunctionEntry
from .retirements import Retirements
from .revision_record import RevisionRecord
from .rollouts import Rollouts
from .shared_revisions import SharedRevisions

LOG = logging.getLogger(__name__)
AT_A_TIME = 4
"""The number of functions that are changed at the same time. A change may take minutes, because it may install requirements."""
FIRST_RETRY_S, LAST_RETRY_S = 1.0, 60.0


@dataclass(eq=False, slots=True)
class _Change:
    """A change that this gateway does not serve yet."""

    entry: FunctionEntry
    secrets: dict[str, str] = field(default_factory=dict)
    """The function's secrets before `refresh`, which drops them if the function was deleted."""
    failures: int = 0
    due_s: float = 0.0
    running: bool = False


@dataclass(eq=False)
class Follower:
    """Makes this gateway serve the functions as the index describes them."""

    shared: SharedRevisions
    rollouts: Rollouts
    retirements: Retirements
    advanced: Callable[[int], object]
    """Called with the new `generation` when it has grown."""
    refresh: Callable[[], Awaitable[object]]
    """Brings API keys and secrets up to date. It is awaited after the changes are read and before they are applied. Otherwise, the key of a
    changed function might still be unknown here, and a function with an unknown key counts as trusted.
    """
    _open: dict[str, _Change] = field(default_factory=dict, init=False)
    # `_seen` is the generation of the newest change that was read. `_told` is the newest generation with which
    # `advanced` was called.
    _seen: int = field(default=0, init=False)
    _told: int = field(default=0, init=False)
    _wanted: bool = field(default=False, init=False)
    _reading: bool = field(default=False, init=False)
    _slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_A_TIME), init=False)

    @property
    def generation(self) -> int:
        """The number of a change: this gateway serves all changes up to this number."""
        behind = [change.entry.generation - 1 for name, change in self._open.items() if self._lacks(name)]
        return min(behind, default=self._seen)

    def lags(self, function: str | None) -> bool:
        """Return True if this gateway does not serve the newest change of a function yet. With None, return True if
        this is so for any function.
        """
        return self._lacks(function) if function is not None else any(map(self._lacks, self._open))

    async def follow(self) -> None:
        """Read the changes, and begin to apply the changes that are due. Call this about once a second.

        A change that fails is tried again later, until it succeeds or a newer change of the function replaces it.
        """
        self._wanted = True
        if self._reading or self.rollouts.functions.closing:
            return
        self._reading = True
        try:
            while self._wanted:
                self._wanted = False
                await self._read()
        except GatewayError as error:
            LOG.debug("changes of functions cannot be read: %s", error)
        finally:
            self._reading = False
        await self.refresh()
        self._begin()
        self._tell()

    async def catch_up(self, *, first: bool = False) -> None:
        """Make the stored files match the index, and publish stored functions that the index never had. Call this
        before the stored functions are restored.

        `first` is True if this gateway has never followed the index. Then also publish a stored function if the
        function of the same name in the index was deleted. If that function was not deleted, raise GatewayError.
        """
        store, entries = self.shared.store, await asyncio.to_thread(self.shared.index.changes, 0)
        self._seen = max((entry.generation for entry in entries), default=0)
        if first:
            entries = [entry for entry in entries if not entry.deleted]
            await self._check_names({entry.name for entry in entries})
        await self.refresh()
        await asyncio.gather(*map(self._restore, entries))
        known, paused = {entry.name for entry in entries}, await asyncio.to_thread(store.paused)
        for name, record in (await asyncio.to_thread(store.functions)).items():
            if name not in known:
                await self._introduce(record, paused=name in paused)
        self._tell()

    async def _check_names(self, shared: set[str]) -> None:
        if both := sorted(shared.intersection(await asyncio.to_thread(self.shared.store.functions))):
            raise GatewayError(
                f"The state folder and the database have different functions of these names: {', '.join(both)}.",
                remedy="Start with an empty state folder, or start without `database` and delete them here.",
            )

    async def _restore(self, entry: FunctionEntry) -> None:
        try:
            if await self.shared.threads.run(functools.partial(self._bring, entry)):
                self.rollouts.functions.logs.of_function(entry.name).end()
            self.shared.applied[entry.name] = entry.generation
        except (PilotflameError, OSError) as error:
            change = self._open[entry.name] = _Change(entry)
            self._fail(change, error)

    async def _introduce(self, record: RevisionRecord, *, paused: bool) -> None:
        introduce = functools.partial(self.shared.introduce, record, paused=paused)
        try:
            entry = await self.shared.threads.run(introduce)
            self.shared.applied[entry.name] = entry.generation
        except (PilotflameError, OSError) as error:
            LOG.warning("%s is on this gateway only: %s", record.function, error)

    def _bring(self, entry: FunctionEntry) -> bool:
        """Make the stored files of a function match the index. Return True if the stored function was deleted, because
        the index has no such function or has one of another owner.
        """
        shared, store = self.shared, self.shared.store
        folder, name = store.function(entry.name), entry.name
        record = None if entry.live is None else RevisionRecord.parse(entry.live.record)
        present, deleted = folder.current() if folder.path.is_dir() else None, False
        self._check_live(entry)
        if folder.path.is_dir() and (record is None or (present and not self._may_replace(present, record))):
            store.delete(name)
            present, deleted = None, True
        if entry.live is None:
            return deleted
        fetched = shared.fetch(entry.live)
        if present is None or present.revision != fetched.revision:
            store.promote(fetched)
        if entry.paused != (name in store.paused()):
            store.pause(name, paused=entry.paused)
        return deleted

    def _lacks(self, name: str) -> bool:
        """Return True if this gateway does not serve the newest change of a function. That may be a change by this
        gateway itself, because `_read` may find the change before the gateway serves it.
        """
        change = self._open.get(name)
        return change is not None and self.shared.applied.get(name, 0) < change.entry.generation

    async def _read(self) -> None:
        for entry in await asyncio.to_thread(self.shared.index.changes, self._seen):
            self._seen = entry.generation
            if self.shared.applied.get(entry.name, 0) < entry.generation:
                known = self._open.get(entry.name)
                secrets = self.rollouts.functions.secrets.of(entry.name) if known is None else known.secrets
                self._open[entry.name] = _Change(entry, secrets)
            else:
                self._end(entry.name)

    def _begin(self) -> None:
        functions, now_s = self.rollouts.functions, time.monotonic()
        for change in sorted(self._open.values(), key=lambda change: change.entry.generation):
            # Do not wait for the lock, because a deploy or a deletion here may keep it for minutes. A later call begins
            # the change.
            locked = functions.lock(change.entry.name).locked()
            if not (change.running or locked or functions.closing) and change.due_s <= now_s:
                change.running = True
                functions.tasks.create_task(self._try(change), name="follow")

    async def _try(self, change: _Change) -> None:
        entry, applied = change.entry, self.shared.applied
        try:
            async with self._slots, self.rollouts.functions.lock(entry.name):
                if self._open.get(entry.name) is change and self._lacks(entry.name):
                    await self._apply(change)
                    applied[entry.name] = max(entry.generation, applied.get(entry.name, 0))
        except Exception as error:  # noqa: BLE001  whatever it is, the gateway goes on to serve what it has
            self._fail(change, error)
        else:
            if self._open.get(entry.name) is change:
                self._end(entry.name)
            self._tell()
        finally:
            change.running = False

    async def _apply(self, change: _Change) -> None:
        functions, entry, name = self.rollouts.functions, change.entry, change.entry.name
        self._check_live(entry)
        if entry.live is None:
            return await self.retirements.leave(name, change.secrets)
        live, record = functions.find(name), RevisionRecord.parse(entry.live.record)
        if live is not None and not self._may_replace(live.record, record):
            await self.retirements.leave(name, change.secrets)
            live = None
        same = live is not None and live.record.revision == record.revision and not live.record.lost
        if live is None or not same:
            fetch = functools.partial(self.shared.fetch, entry.live)
            await self.rollouts.adopt(await self.shared.threads.run(fetch))
        elif live.function.paused == entry.paused and live.workers.inventory.exist:
            # This gateway already serves the revision and the pause of the change, so the change is a restart. Replace
            # the processes here, too.
            await self.rollouts.adopt(live.record)
        if functions.get(name).function.paused != entry.paused:
            await functions.pause(name, paused=entry.paused, followed=entry.generation)
        return None

    def _check_live(self, entry: FunctionEntry) -> None:
        if entry.live is None and not entry.deleted:
            raise GatewayError(
                f"The database lacks the live revision of {entry.name}.", remedy="Deploy it again."
            )

    def _may_replace(self, old: RevisionRecord, new: RevisionRecord) -> bool:
        """Return True if both revisions have the same owner. If not, the function of `old` was deleted before `new` was
        deployed.
        """
        return self.shared.policies.same_owner(old.owner, new.owner)

    def _fail(self, change: _Change, error: Exception) -> None:
        name, change.failures = change.entry.name, change.failures + 1
        wait_s = min(LAST_RETRY_S, FIRST_RETRY_S * 2 ** (change.failures - 1))
        change.due_s = time.monotonic() + wait_s
        if self._open.get(name) is change:
            self.shared.failures[name] = f"{error}"
            LOG.warning(
                "the change of %s by another gateway failed, next try in %.0f s: %s", name, wait_s, error
            )

    def _end(self, name: str) -> None:
        self._open.pop(name, None)
        self.shared.failures.pop(name, None)

    def _tell(self) -> None:
        if (generation := self.generation) > self._told:
            self._told = generation
            self.advanced(generation)
