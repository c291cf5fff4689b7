"""Publishes the functions of this gateway to all gateways with its database, and brings revisions of others to this node."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ....errors import Forbidden, GatewayError, SnapshotError, UnknownFunction
from ....handlers.recognise import Dialects
from ....snapshot.extras import require
from ...ground.access.deploy_policy import Deployer, DeployPolicies
from ...ground.access.fair_threads import FairThreads
from ...ground.settings.function_settings import FunctionSettings
from ...ground.storing.revision_index import FunctionEntry, IndexedRevision, RevisionIndex, TrafficShare
from ..packaging.environment import ensure_environment, is_environment
from ..packaging.revision_files import REMEDY, PackedFiles, RevisionFiles, pack_files
from ..packaging.snapshots import ASSETS_FOLDER, compare_received, folder_of
from .deploy import choose_python, stored_outside
from .function_folder import CODE_FOLDER, RECORD_FILE
from .revision_record import RevisionRecord
from .store import Store

LOG = logging.getLogger(__name__)
SETTLE_S = 30.0
"""The longest time for which a change waits until the other gateways serve it. It is long enough for the start of a
zygote that imports torch on a busy machine, and shorter than the time-outs of clients and load balancers.
"""


@dataclass(frozen=True, slots=True)
class GatewayPeers:
    """What this gateway knows about the gateways with the same database."""

    name: str
    """The name of this gateway."""
    generations: Callable[[], Mapping[str, int]]
    """Returns the generation up to which each living gateway has followed the changes, by the gateway's name. The result may include this gateway."""
    news: asyncio.Condition
    """Notified when `generations` may return something else."""


@dataclass(eq=False)
class SharedRevisions:
    """Publishes changes of functions to all gateways, and copies the revisions of other gateways to this node."""

    index: RevisionIndex
    files: RevisionFiles
    peers: GatewayPeers
    store: Store
    policies: DeployPolicies
    environments: Path
    dialects: Dialects
    threads: FairThreads
    applied: dict[str, int] = field(default_factory=dict, init=False)
    """For each function, the generation of the latest change that this gateway serves."""
    failures: dict[str, str] = field(default_factory=dict, init=False)
    """For each function whose latest change this gateway cannot serve, the reason."""
    # For each function, the generation of the latest change that this gateway has made.
    _made: dict[str, int] = field(default_factory=dict, init=False)
    # For each function, the generation of a change that this gateway has committed and does not serve yet.
    _committed: dict[str, int] = field(default_factory=dict, init=False)
    # The gateways that did not follow a change in time, with the generations that they had then. `settle` does not wait
    # for such a gateway while it has the same generation.
    _given_up: dict[str, int] = field(default_factory=dict, init=False)

    def check(self, settings: FunctionSettings, outside: Mapping[str, str]) -> None:
        """Raise SnapshotError if weights are at a path outside the code, which the other gateways do not have."""
        if paths := {name: at for name, at in outside.items() if name not in settings.snapshot_urls}:
            fault = f"The weights {', '.join(paths.values())} are only on this machine, and several gateways serve {settings.name}."
            remedy = f"{REMEDY} Or upload the folder with the weights in it, at most 256 MiB: pilotflame deploy --upload."
            raise SnapshotError(fault, remedy=remedy)

    def warnings(self, name: str) -> list[str]:
        """Return a warning if this gateway does not serve the latest change of a function, and a warning if other
        gateways do not serve it.
        """
        found = []
        if failure := self.failures.get(name):
            found.append(
                f"This gateway does not serve the latest change, which another gateway has made: {failure}"
            )
        if behind := self._behind(self._made.get(name, 0), waits=False):
            found.append(f"Gateways that may not serve the latest change yet: {', '.join(sorted(behind))}.")
        return found

    # -- changes by this gateway

    async def prepare(self, staged: Path, name: str) -> tuple[PackedFiles, int]:
        """Pack the files of a staged revision. Call this before processes of the function can change the files. Also
        return the smallest number that the revision may get.
        """

        def pack() -> tuple[PackedFiles, int]:
            least = self.index.reserve(name, self.store.function(name).next_number())
            return pack_files(staged, CODE_FOLDER, RECORD_FILE), least

        return await self.threads.run(pack, undo=lambda made: made[0].file.close())

    async def is_new(self, name: str) -> bool:
        """Return True if no gateway has a function of this name."""
        entry = await asyncio.to_thread(self.index.entry, name)
        return entry is None or entry.deleted

    async def check_served(self, name: str, record: RevisionRecord | None) -> None:
        """Raise UnknownFunction if this gateway has not yet followed a change in which another gateway has created the
        function, deleted it, or deployed it for another owner. `record` is the record of the function that this gateway
        serves; None if it serves no function of this name.
        """
        entry = await asyncio.to_thread(self.index.entry, name)
        there = None if entry is None or entry.live is None else RevisionRecord.parse(entry.live.record)
        if there is None or record is None:
            same = there is record
        else:
            same = self.policies.same_owner(there.owner, record.owner)
        if not same:
            raise UnknownFunction(f"{name!r} was changed meanwhile.", remedy="Check it, and try again.")

    async def publish(self, record: RevisionRecord, packed: PackedFiles | None, *, paused: bool) -> None:
        """Make a revision live on all gateways. `packed` are the files of the revision. If `packed` is None, use the
        files that are stored, or else pack the files now.

        `paused` is True if the function is paused on this gateway. Raise Forbidden if another owner has a function of
        this name.
        """

        def decide(present: FunctionEntry | None) -> FunctionEntry:
            self._check_owner(present, record.owner)
            pause = present is not None and present.paused
            return FunctionEntry(record.function, (TrafficShare(record.revision),), pause)

        self.check(record.settings, stored_outside(record))
        entry = await self.threads.run(functools.partial(self._publish, record, packed, decide))
        self._note(entry, record.revision, paused=paused)
        self.threads.start(self._discard_unused)

    def introduce(self, record: RevisionRecord, *, paused: bool) -> FunctionEntry:
        """Publish a function that was deployed before this gateway had a database. Blocks. Raise GatewayError if the
        index already has a function of this name.
        """

        def decide(present: FunctionEntry | None) -> FunctionEntry:
            if present is not None and not present.deleted:
                raise GatewayError(f"Another gateway has a function {record.function!r}.")
            return FunctionEntry(record.function, (TrafficShare(record.revision),), paused)

        self.check(record.settings, stored_outside(record))
        self.index.reserve(record.function, self.store.function(record.function).next_number() - 1)
        return self._publish(record, None, decide)

    async def pause(self, record: RevisionRecord, *, paused: bool) -> None:
        """Pause or resume a function on all gateways."""

        def decide(present: FunctionEntry | None) -> FunctionEntry:
            if present is None or present.deleted:
                raise UnknownFunction.named(record.function)
            self._check_owner(present, record.owner)
            return replace(present, paused=paused)

        present = await asyncio.to_thread(self.index.entry, record.function)
        # Do not store a change that has no effect: the other gateways would take it for a restart.
        if present is None or present.paused != paused:
            entry = await asyncio.to_thread(self.index.change, record.function, decide)
            self._note(entry, record.revision, paused=paused)

    async def delete(self, record: RevisionRecord) -> None:
        """Delete a function on all gateways."""

        def decide(present: FunctionEntry | None) -> FunctionEntry:
            self._check_owner(present, record.owner)
            return FunctionEntry(record.function, deleted=True)

        entry = await asyncio.to_thread(self.index.change, record.function, decide)
        self._made[entry.name] = self.applied[entry.name] = entry.generation
        self.threads.start(self._discard_unused)

    def confirm(self, name: str) -> None:
        """Note that this gateway serves the change that it has committed. Otherwise it would follow its own change."""
        if (generation := self._committed.pop(name, None)) is not None:
            self.applied[name] = generation

    async def settle(self, name: str) -> None:
        """Wait until the other gateways serve the latest change that this gateway has made to a function, but at most
        SETTLE_S.
        """
        generation = self._made.get(name, 0)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S), self.peers.news:
                await self.peers.news.wait_for(lambda: not self._behind(generation))
        if behind := self._behind(generation, waits=False):
            self._given_up = behind
            LOG.warning("%s: gateways that have not followed its change: %s", name, ", ".join(sorted(behind)))

    # -- changes by others

    def fetch(self, indexed: IndexedRevision) -> RevisionRecord:
        """Return the record of a revision. If the node does not have the revision, fetch its files and build its
        environment first. Blocks.

        Raise PilotflameError or OSError if this fails.
        """
        folder = self.store.function(indexed.function)
        if indexed.revision in folder.ids():
            with contextlib.suppress(GatewayError):
                return folder.read(indexed.revision)
        record = RevisionRecord.parse(indexed.record)
        if indexed.revision in folder.ids():
            self.store.withdraw(record)
        staged = self.store.stage()
        try:
            self.files.get(indexed.files, staged)
            record = self._fit(record, staged)
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)
            raise
        return self.store.place(staged, record)

    def fetch_old(self, live: RevisionRecord, wanted: str | None) -> RevisionRecord:
        """Choose a revision from the index, and bring it to this node. Return its record. Blocks. `wanted` is the
        revision's id or number; None for the newest revision before the live one.
        """
        stored = {one.revision: one for one in self.index.revisions(live.function)}
        among = [RevisionRecord.parse(one.record) for one in stored.values()]
        return self.fetch(stored[self.store.function(live.function).find(live, wanted, among).revision])

    # -- parts

    def _publish(
        self, record: RevisionRecord, packed: PackedFiles | None, decide: Callable[[FunctionEntry | None], FunctionEntry]
    ) -> FunctionEntry:  # fmt: skip
        """Store the files of a revision, and then change the index, which names the files. Do not store files that the
        index already names.
        """
        known = packed is None and any(
            one.revision == record.revision for one in self.index.revisions(record.function)
        )
        if known:
            return self.index.change(record.function, decide)
        if packed is None:
            packed = pack_files(self.store.code(record).parent, CODE_FOLDER, RECORD_FILE)
        self.files.put(packed)
        text = record.model_dump_json()
        new = IndexedRevision(record.function, record.revision, record.number, text, packed.name)
        return self.index.change(record.function, decide, new)

    def _check_owner(self, present: FunctionEntry | None, owner: Deployer) -> None:
        """Raise Forbidden if the index has a function of another owner. Another gateway has deployed it, and this
        gateway has not followed yet.
        """
        if present is None or present.live is None:
            return
        if not self.policies.same_owner(RevisionRecord.parse(present.live.record).owner, owner):
            message = f"{present.name} was deployed with another key, on another gateway."
            raise Forbidden(message, remedy="Choose another name, or let an admin delete it first.")

    def _note(self, entry: FunctionEntry, revision: str, *, paused: bool) -> None:
        """Note a change that this gateway has made. `revision` and `paused` describe the function as this gateway
        serves it after the change. If the index has another revision or pause, because this gateway has not followed an
        earlier change, the change does not count as committed. So this gateway follows it later.
        """
        self._made[entry.name] = entry.generation
        if (entry.traffic[0].revision, entry.paused) == (revision, paused):
            self._committed[entry.name] = entry.generation

    def _behind(self, generation: int, *, waits: bool = True) -> dict[str, int]:
        """Return the generations of the other gateways that have not followed a change, by their names. If `waits`,
        leave out the gateways for which `settle` does not wait any more.
        """
        given_up = self._given_up if waits else {}
        found = self.peers.generations().items()
        return {
            name: at
            for name, at in found
            if name != self.peers.name and at < generation and given_up.get(name) != at
        }

    def _fit(self, record: RevisionRecord, staged: Path) -> RevisionRecord:
        """Check the files of a revision from another gateway, and build its environment on this machine. Return its
        record for this machine.
        """
        require(record.settings.packages)
        code, weights, settings = staged / CODE_FOLDER, self.store.weights, record.settings
        roots = {name: code / one.root for name, one in record.snapshots.items() if one.root is not None}
        weights.share(code, roots.values())
        for name in record.snapshots:
            assets = folder_of(staged, name) / ASSETS_FOLDER
            weights.share(assets, [assets])
        for name, root in roots.items():
            compare_received(root, folder_of(staged, name))
        stood_in = frozenset[str]() if is_environment(record.python) else self.dialects.stands_in
        build = functools.partial(ensure_environment, self.environments, progress=LOG.debug)
        needs = self.dialects.requirements(code, settings.handler)
        python, digest = choose_python(code, settings, needs, stood_in, build)
        return record.model_copy(update={"python": python, "requirements_digest": digest})

    def _discard_unused(self) -> None:
        """Delete the files of revisions that no function has any more."""
        self.files.keep(self.index.files())
