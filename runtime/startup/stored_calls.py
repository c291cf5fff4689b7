"""Creates the callers that wait for no response: jobs and event sources. Pre-warming and alerts follow the functions, too."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ...errors import GatewayError
from ..front.api.plugin import ApiPlugin
from ..ground.settings.function_settings import FunctionSettings
from ..ground.settings.gateway_settings import GatewaySettings
from ..ground.storing.duties import Duties
from ..jobs.alerting.alerts import ALERTS, FunctionAlerts
from ..jobs.events.message_queue import Identity
from ..jobs.events.sources import Sources
from ..jobs.sqlite.database import Database
from ..jobs.sqlite.schema import SCRIPTS
from ..jobs.sqlite.store import DATABASE_FILE, SqliteJobStore
from ..jobs.stored.job_store import JobStore
from ..jobs.stored.jobs import Jobs
from ..jobs.stored.steady_clock import SteadyClock
from ..jobs.webhooks.signing import load_key
from ..node.functions.prewarming import Prewarming
from ..node.functions.registry import Functions
from .node import RunningNode
from .sharing import follow_jobs
from .state import State

LOG = logging.getLogger(__name__)
NO_SHUTDOWN = (
    "the previous gateway (%s) ended without shutdown; restored: %d functions, %d jobs that were running and run again,"
    " %d jobs that failed because it was their last attempt"
)


@dataclass(frozen=True, slots=True)
class StoredCalls:
    """The jobs of a gateway, the queues whose messages are its jobs, and its alerts."""

    jobs: Jobs
    sources: Sources
    alerts: FunctionAlerts


async def open_stored_calls(
    settings: GatewaySettings, state: State, node: RunningNode, plugins: Iterable[type[ApiPlugin]], stack: contextlib.AsyncExitStack
) -> StoredCalls:  # fmt: skip
    """Begin to run the stored jobs, and to read the queues of functions."""
    functions = node.functions
    jobs = await _open_jobs(settings, state, functions, plugins, stack)
    sources = Sources(
        jobs, functions.tasks, functions.log, drain_s=settings.drain_s, on_backlog=functions.expect,
        plugins=settings.plugins, identity=functools.partial(identity, functions), duties=state.duties,
    )  # fmt: skip
    prewarming = Prewarming(functions)
    alerts = FunctionAlerts(jobs.store, functions.tasks, jobs.addresses.check, state.duties)
    await _connect(functions, jobs, sources, prewarming, alerts, state.duties, stack)
    node.metrics.readers += [jobs.readings, sources.readings, prewarming.readings]
    return StoredCalls(jobs, sources, alerts)


def identity(functions: Functions, name: str) -> Identity:
    """Return what the event sources of a function may use. Raise the errors of `Functions.get`."""
    return _identity_of(functions, name, functions.get(name).record.deployed_by)


def _identity_of(functions: Functions, name: str, key_id: str) -> Identity:
    access = functions.policies.queue_access(key_id)

    def dialect() -> str:
        live = functions.find(name)
        return "" if live is None else str(live.record.handler.get("dialect", ""))

    return Identity(functools.partial(functions.secrets.of, name), access, dialect)


async def _open_jobs(
    settings: GatewaySettings, state: State, functions: Functions, plugins: Iterable[type[ApiPlugin]],
    stack: contextlib.AsyncExitStack,
) -> Jobs:  # fmt: skip
    """Open the jobs. If the previous gateway crashed, log what was restored."""
    key = await asyncio.to_thread(load_key, state.documents, functions.signed_as)
    bodies = {form: make for plugin in plugins for form, make in plugin.webhook_bodies.items()}
    clock = SteadyClock()
    store = _store(state, clock, keep_s=settings.keep_result_s, bodies=bodies)
    jobs = Jobs(store, clock, key, functions.get, functions.tasks, settings, state.duties)
    again, failed = await jobs.start()
    stack.push_async_callback(jobs.close)
    if state.members is not None:
        follow_jobs(state.members, jobs, functions.tasks, stack)
    if state.previous:
        LOG.warning(NO_SHUTDOWN, state.previous, len(functions.all()), again, failed)
    return jobs


def _store(state: State, clock: SteadyClock, **more: Any) -> JobStore:
    """Return the store of jobs: in the database that gateways share, or in a file of the state folder."""
    if (members := state.members) is None:
        database = Database(state.folder / DATABASE_FILE, SCRIPTS, state.disk.wrote)
        return SqliteJobStore(database, clock=clock, **more)
    if (unused := state.folder / DATABASE_FILE).exists():
        LOG.warning(
            "the jobs in %s are not in the database: stop the gateway, and run `pilotflame move`", unused
        )
    # These modules import psycopg, which `join` has found.
    from ..jobs.postgres.database import PostgresDatabase  # noqa: PLC0415
    from ..jobs.postgres.store import PostgresJobStore  # noqa: PLC0415

    return PostgresJobStore(PostgresDatabase(members.url), incarnation=members.incarnation, **more)


async def _connect(
    functions: Functions,
    jobs: Jobs,
    sources: Sources,
    prewarming: Prewarming,
    alerts: FunctionAlerts,
    duties: Duties,
    stack: contextlib.AsyncExitStack,
) -> None:
    """Connect jobs, event sources, pre-warming and alerts to the events of functions."""
    events = functions.events
    await alerts.start()
    stack.callback(prewarming.close)
    stack.callback(alerts.close)
    stack.callback(duties.close)

    def follow(name: str) -> None:
        # `get` raises GatewayError if the gateway is shutting down. Then no event source is started.
        with contextlib.suppress(GatewayError):
            deployed = functions.get(name)
            if deployed.function.paused or deployed.function.barred:
                sources.stop(name)
            else:
                sources.start(name, deployed.record.settings)
            prewarming.follow(name)
            alerts.follow(deployed)

    def live(name: str) -> None:
        jobs.wake(name)
        follow(name)

    def gone(name: str) -> None:
        prewarming.forget(name)
        alerts.forget(name)
        sources.stop(name)

    async def deploying(settings: FunctionSettings, key_id: str) -> None:
        await sources.check(settings, _identity_of(functions, settings.name, key_id))

    for function in functions.all():
        follow(function.record.function)
    if duties.shared:
        duties.keep(ALERTS, alerts.take_over)
    events.called.append(prewarming.note_call)
    events.ended.append(alerts.note_end)
    events.refused.append(alerts.note_refused)
    events.deploying.append(deploying)
    events.live.append(live)
    # The purge at the deletion may have failed, and a job whose submit had begun may have been stored after it.
    events.creating.append(functools.partial(jobs.store.purge, running=True))
    events.deleted.append(gone)
    events.disowned.append(jobs.forget)
