"""Connects the parts that follow the events of functions: metrics, accounts, memory, records, and observers of plugins."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ...entry_points import OBSERVERS, load
from ..front.generation.token_counts import TokenCounts
from ..ground.access.keyring import Keyring
from ..ground.billing.ledger import Ledger
from ..ground.settings.gateway_settings import GatewaySettings
from ..ground.telemetry.metrics import Metrics
from ..node.functions.registry import Functions
from ..node.functions.revisions import Revisions
from ..node.measuring.idle_memory_limit import IdleMemoryLimit
from ..node.measuring.metering import Metering
from ..node.measuring.node_memory import MemoryMeter
from ..node.measuring.recorder import Recorder


def observe(
    revisions: Revisions, metrics: Metrics, ledger: Ledger, keyring: Keyring, settings: GatewaySettings,
    stack: contextlib.AsyncExitStack,
) -> MemoryMeter:  # fmt: skip
    """Connect the metrics, the ledger, the limits of API keys in tokens, the memory limit and the plugins' observers.

    Return the meter of the memory of all processes.
    """
    functions, memory = revisions.functions, MemoryMeter(revisions, revisions.functions.tasks)
    events = functions.events
    metering = Metering(functions, ledger)
    limit = IdleMemoryLimit(
        functions.all, revisions.launcher, functions.tasks, settings.rest_mb, revisions.weights.give_back
    )
    events.activated.append(metrics.activated)
    events.ended.append(metrics.ended)
    events.refused.append(metrics.refused)
    # The ledger takes the last counts before the metrics drop them.
    for removed in (ledger.note_removed, metrics.forget, metering.forget):
        events.removed.append(removed)
    events.pruned.append(metering.forget)
    events.live.append(TokenCounts(functions, keyring).follow)
    memory.followers += [metering.tell, limit.check]
    memory.note_change()
    usage = functions.tasks.keep(ledger.run, name="usage")
    for close in (limit.close, metering.close, memory.close, usage.cancel):
        stack.callback(close)
    _open_observers(revisions, metrics, settings, stack)
    return memory


def _open_observers(
    revisions: Revisions, metrics: Metrics, settings: GatewaySettings, stack: contextlib.AsyncExitStack
) -> None:
    for kind in load(OBSERVERS, settings.plugins).values():
        if (observer := kind.open()) is None:
            continue
        observer.follow(revisions.functions.events, metrics)
        stack.push_async_callback(observer.close)
        if observer.call_observer:
            revisions.call_observers.append(observer.call_observer)


def open_recorder(functions: Functions, folder: Path, stack: contextlib.AsyncExitStack) -> Recorder:
    """Return a recorder that stores the decisions about functions, their load and their arrivals."""
    recorder, tasks = Recorder(folder, functions.all), functions.tasks

    def deleted(name: str) -> None:
        tasks.create_task(recorder.forget(name))

    # Subscribe to `deleted`, which comes before `removed`: if the gateway is killed during the deletion, a new function
    # with this name must not get the old records.
    functions.events.deleted.append(deleted)
    functions.events.processes.append(recorder.note_change)
    stack.push_async_callback(recorder.flush)
    stack.callback(tasks.keep(recorder.run, name="records").cancel)
    return recorder
