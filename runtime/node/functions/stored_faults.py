"""Says why a stored revision may not run: a policy does not allow it any more, or its weights lack a required signature."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ....errors import GatewayError, SnapshotError
from ...ground.access.deploy_policy import DeployPolicies
from ...ground.access.fair_threads import FairThreads
from ...ground.telemetry.logs import LogChannel
from ..packaging.snapshots import check_signatures
from .deploy import stored_outside
from .function_events import FunctionEvents
from .live import Live
from .store import RevisionRecord, Store

UNREAD = "The gateway still compares the weights with their signed digests. Try again later."
"""The fault of a function after a start of the gateway, until its local weights have been read."""


@dataclass(frozen=True)
class StoredFaults:
    """The checks of one gateway. `check_open` raises GatewayError if the gateway shuts down, which ends long reading."""

    store: Store
    policies: DeployPolicies
    events: FunctionEvents
    threads: FairThreads
    check_open: Callable[[], None]

    async def of(self, record: RevisionRecord, logs: LogChannel, *, read: bool) -> str:
        """Return why a stored revision may not run; "" if it may. Callers of the function see it.

        Without `read`, return UNREAD if weights have to be read. Raise GatewayError if the gateway shuts down meanwhile.
        """
        if fault := self.policies.fault(record.settings, stored_outside(record), record.deployed_by):
            return fault
        try:
            complete = await self.check_signatures(record, read=read)
        except SnapshotError as error:
            logs.write("gateway", str(error), "error")
            return f"A snapshot of {record.function} is refused ({error.code}). The log of the function says why."
        return "" if complete else UNREAD

    async def check_signatures(self, record: RevisionRecord, *, read: bool = True) -> bool:
        """Raise SnapshotError if a snapshot of the revision lacks a required signature, or if its weights differ from the signed ones.

        Without `read`, return False if weights have to be read.
        """
        if not (signers := self.policies.snapshot_signers):
            return True
        code, stored = self.store.code(record), record.snapshots.items()
        places = {name: at.url or code / (at.root or "") for name, at in stored}
        progress = (lambda _done, _total: self.check_open()) if read else None
        return await self.threads.run(
            functools.partial(check_signatures, code.parent, places, signers, progress)
        )

    async def read_weights(self, functions: Iterable[Live], is_live: Callable[[Live], bool]) -> None:
        """Compare the local weights of functions with their signed digests, and let the functions run after that."""
        for live in filter(is_live, functions):
            try:
                fault = await self.of(live.record, live.logs, read=True)
            except GatewayError:
                return
            # A deploy or a restart compares the weights itself.
            if is_live(live):
                live.function.barred = fault
                live.logs.write("gateway", fault or "the weights have the signed digests")
                live.workers.look()
                self.events.note_live(live.record.function)
