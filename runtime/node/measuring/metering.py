"""Tells the accounts how much memory, disk and devices functions use, after each measurement."""

from __future__ import annotations

import asyncio
import math
import time
from typing import NamedTuple

from ...ground.billing.ledger import Ledger
from ...ground.billing.usage import GB, Footprint, Usage
from ..functions.live import Live
from ..functions.registry import Functions
from .node_memory import BASES, GATEWAY, NO_MEMORY, FunctionMemory, NodeMemory


class _Told(NamedTuple):
    """The last figures that the account of a function was told."""

    memory: FunctionMemory
    revision: str
    """The revision that was live when the files were measured."""
    disk_gb: float


class NodeProcesses:
    """The bases or the gateway, as their account sees them. Their time counts from the creation of this object."""

    worker_total = 0

    def __init__(self) -> None:
        self._since_s = time.monotonic()

    def usage(self, now_s: float) -> Usage:
        return Usage(occupied_s=now_s - self._since_s)

    def on_budget(self, *, changed: bool) -> None:
        """Do nothing: the bases and the gateway have no budget."""


class Metering:
    """Tells the accounts of functions, of the bases and of the gateway how much memory, disk and devices they use."""

    def __init__(self, functions: Functions, ledger: Ledger) -> None:
        self._functions, self._ledger = functions, ledger
        # By function: the last figures that its account was told.
        self._told: dict[str, _Told] = {}
        self._processes = NodeProcesses()
        for name in (GATEWAY, BASES):
            ledger.open_node(name, self._processes)

    def forget(self, function: str) -> None:
        """Forget the figures of a function that was deleted, or whose files became fewer. If the function still exists,
        its files are measured again.
        """
        self._told.pop(function, None)

    def close(self) -> None:
        for name in (GATEWAY, BASES):
            self._ledger.account(name).detach(self._processes)

    async def tell(self, found: NodeMemory) -> float:
        """Tell the accounts the figures of a measurement. No further measurement is needed, so return infinity."""
        for name, held_bytes in ((GATEWAY, found.gateway_bytes), (BASES, found.bases_bytes)):
            self._ledger.account(name).measured(Footprint(rest_gb=held_bytes / GB))
        for live in self._functions.all():
            memory = found.functions.get(live.record.function, NO_MEMORY)
            told = self._told.get(live.record.function)
            if told is None or told.memory is not memory or told.revision != live.record.revision:
                await self._tell(live, memory, told)
                # Let requests go on: there may be a thousand functions.
                await asyncio.sleep(0)
        return math.inf

    async def _tell(self, live: Live, memory: FunctionMemory, told: _Told | None) -> None:
        """Pass the footprint of a function to its account. Weights that several functions share count for each function."""
        function, revision = live.record.function, live.record.revision
        if told is not None and told.revision == revision:
            disk_gb = told.disk_gb
        else:
            sizes = await asyncio.to_thread(self._functions.store.function(function).sizes)
            disk_gb = sum(sizes.values()) / GB
        self._told[function] = _Told(memory, revision, disk_gb)
        account = live.function.account
        account.measured(_footprint(account.footprint, memory, disk_gb, live.devices))


def _footprint(before: Footprint, memory: FunctionMemory, disk_gb: float, devices: float) -> Footprint:
    """Return the memory, disk and devices that a function holds. Figures that cannot be measured at present keep their
    last values.
    """
    workers, rest_gb = memory.workers, memory.rest_bytes / GB
    return Footprint(
        worker_gb=memory.workers_bytes / workers / GB if workers else before.worker_gb,
        rest_gb=rest_gb if rest_gb and not workers else before.rest_gb,
        disk_gb=disk_gb,
        devices=devices if workers else before.devices,
        beside_gb=rest_gb if workers else before.beside_gb,
    )
