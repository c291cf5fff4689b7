"""Makes the stored functions live when the gateway starts, and says which of them may not run any more."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from ....errors import GatewayError, SnapshotError
from ...ground.telemetry.logs import LogChannel
from ...ground.telemetry.rung_name import RungName
from ..reconciling.function import UNREAD
from .deploy import stored_outside
from .live import LIGHT_S, Live
from .registry import Functions
from .revision_record import RevisionRecord
from .revisions import Revisions

# After a start of the gateway, the launch of a zygote waits until the zygote before it is ready, but at most this long.
WARM_TURN_S = 30.0
LOST = "The stored files of the live revision of {} are damaged. The gateway's log names them."


@dataclass(eq=False)
class Restoration:
    """Makes the functions live that an earlier gateway has left in the store."""

    functions: Functions
    revisions: Revisions
    # `_warming` has the functions whose zygotes are launched now. `_unread` has the functions whose weights must be
    # read before the functions may run.
    _warming: list[Live] = field(default_factory=list, init=False)
    _unread: list[Live] = field(default_factory=list, init=False)

    async def run(self) -> None:
        """Make the stored functions live. Their zygotes and workers (`scale.min`) start in the background."""
        store, tasks = self.functions.store, self.functions.tasks
        paused = await asyncio.to_thread(store.paused)
        found = await asyncio.to_thread(store.functions)
        lost = {record.function: record for record in await asyncio.to_thread(store.lost, found)}
        for name, record in sorted((found | lost).items()):
            await self._restore(record, paused=name in paused)
        self.functions.hosts.update()
        self._warming.sort(key=_expected_waiting, reverse=True)
        tasks.create_task(self._warm(), name="warm")
        tasks.create_task(self._read_weights(), name="compare")

    async def _restore(self, record: RevisionRecord, *, paused: bool) -> None:
        logs = self.functions.logs.of_function(record.function)
        fault = await self._fault(record, logs, read=False)
        live = await self.revisions.make(record, barred=fault)
        if fault == UNREAD:
            self._unread.append(live)
        live.function.paused = paused
        # Wait for the plan of the idle period. The period began before the restart of the gateway, so the plan may not
        # include a zygote any more.
        await asyncio.wait([self.functions.put(live)])
        rests_warm = record.settings.scale.rest == "zygote" and not live.function.stopped
        if rests_warm and live.function.ladder.plans_zygote:
            self._warming.append(live)
        live.workers.go_live()

    async def _fault(self, record: RevisionRecord, logs: LogChannel, *, read: bool) -> str:
        """Return why a stored revision may not run; "" if it may. Callers of the function see this text.

        Without `read`, return UNREAD if weights have to be read. Raise GatewayError if the gateway shuts down meanwhile.
        """
        if record.lost:
            return LOST.format(record.function)
        policies, outside = self.functions.policies, stored_outside(record)
        if fault := policies.fault(record.settings, outside, record.deployed_by):
            return fault
        try:
            complete = await self.revisions.check_signatures(record, read=read)
        except SnapshotError as error:
            logs.write("gateway", str(error), "error")
            return f"A snapshot of {record.function} is refused ({error.code}). The log of the function says why."
        return "" if complete else UNREAD

    async def _warm(self) -> None:
        """Launch zygotes one after the other. A slow zygote delays the next zygote by at most WARM_TURN_S.

        If a function is called before its turn, its zygote is launched at once.
        """
        for live in filter(self.functions.is_live, self._warming):
            light = live.builds_within(LIGHT_S)
            warm = self.functions.tasks.create_task(live.workers.carry_out.open_ahead(shared_only=light))
            await asyncio.wait([warm], timeout=WARM_TURN_S)

    async def _read_weights(self) -> None:
        """Compare the local weights of functions with their signed digests. Let each function run whose weights have
        these digests.
        """
        for live in filter(self.functions.is_live, self._unread):
            try:
                fault = await self._fault(live.record, live.logs, read=True)
            except GatewayError:
                return
            # Do nothing if a deploy or a restart has replaced the revision meanwhile: it has compared the weights
            # itself.
            if self.functions.is_live(live):
                live.function.barred = fault
                live.logs.write("gateway", fault or "the weights have the signed digests")
                live.workers.look()
                self.functions.events.live(live.record.function)


def _expected_waiting(live: Live) -> float:
    """Return how long a function's callers are expected to wait if it has no zygote, in seconds of waiting per second."""
    ladder = live.function.ladder
    return ladder.step_down(live.record.function, RungName.ZYGOTE, RungName.LOCAL).waiting
