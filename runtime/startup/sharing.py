"""Follows the gateways that share a database: their functions, jobs, keys and secrets, and what they report."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from ..ground.access.access_watch import AccessWatch
from ..ground.access.shared_quotas import KEYS, SharedQuotas
from ..ground.billing.ledger import SharedBudgets
from ..ground.storing.members import GatewayMember, GatewayReport
from ..ground.telemetry.background import BackgroundTasks
from ..jobs.alerting.alerts import ALERTS, FunctionAlerts
from ..jobs.stored.jobs import Jobs
from ..node.functions.follower import Follower
from ..node.functions.shared_revisions import GatewayPeers, SharedRevisions
from ..node.packaging.revision_files import RevisionFiles
from .node import RunningNode
from .state import State
from .worker_shares import WorkerShares

if TYPE_CHECKING:
    # The module needs psycopg, which a gateway without the setting `database` need not have.
    from ..ground.storing.membership import Membership


def follow_jobs(
    members: Membership, jobs: Jobs, tasks: BackgroundTasks, stack: contextlib.AsyncExitStack
) -> None:
    """Follow, after each heartbeat, what the other gateways do with jobs."""
    others, known = jobs.others(), set[str]()
    others.start(tasks)
    stack.callback(others.close)

    async def look() -> None:
        present = {one.incarnation for one in members.members}
        left = not known <= present
        known.clear()
        known.update(present)
        await others.look(left=left, dead=members.dead)

    _after_heartbeats(members, look, "other_gateways", tasks, stack)


class SharedState:
    """The functions, keys and secrets that gateways with a common database share."""

    def __init__(
        self, members: Membership, state: State, node: RunningNode, stack: contextlib.AsyncExitStack
    ) -> None:
        self._members, self._rollouts, self._tasks, self._stack = (
            members,
            node.rollouts,
            node.functions.tasks,
            stack,
        )
        grace_s = node.functions.settings.store_grace_s
        self._watch = AccessWatch(state.documents, state.keyring, state.secrets, grace_s)
        self._news = asyncio.Condition()
        self._revoked: Callable[[str], object] = lambda _key: None
        own = next(one for one in members.members if one.incarnation == members.incarnation)
        peers = GatewayPeers(_unique(own), self._generations, self._news)
        self._follower = share_functions(node, members.url, peers, self._advanced, self._refresh, stack)

    def is_stale(self, function: str | None) -> bool:
        """Return True if other gateways may serve a newer revision of the function, or of any function if it is None."""
        return not self._members.alive or self._follower.lags(function)

    async def catch_up(self) -> None:
        """Update the state folder to the functions that the gateways share. Call it before stored functions are restored."""
        await self._follower.catch_up(first=self._members.first)

    def follow(self, revoked: Callable[[str], object]) -> None:
        """Follow the other gateways from now on, after each heartbeat. `revoked` gets the id of each key that was removed."""
        self._revoked = revoked
        _after_heartbeats(self._members, self._look, "shared_state", self._tasks, self._stack)

    async def _look(self) -> None:
        async with self._news:
            self._news.notify_all()
        await self._follower.follow()

    async def _refresh(self) -> None:
        changes = await asyncio.to_thread(self._watch.look)
        for key in changes.revoked:
            self._revoked(key)
        for name in changes.functions:
            self._rollouts.renew(name)

    def _generations(self) -> dict[str, int]:
        return {_unique(one): one.generation for one in self._members.members if one.alive}

    def _advanced(self, generation: int) -> None:
        self._members.generation = generation
        self._members.beat()


class ReportSharing:
    """What gateways with a common database report to each other: uses of limits over all gateways, and calls for alerts."""

    def __init__(
        self, members: Membership, state: State, node: RunningNode, alerts: FunctionAlerts, stack: contextlib.AsyncExitStack
    ) -> None:  # fmt: skip
        self._members, self._alerts = members, alerts
        self._quotas, self._budgets = SharedQuotas(state.keyring), SharedBudgets(node.ledger)
        self._workers = WorkerShares(node.revisions, state.keyring.max_workers, members.beat)
        members.reporter = self._report
        _after_heartbeats(members, self._look, "reports", node.functions.tasks, stack)

    def _report(self) -> GatewayReport:
        now_s = time.monotonic()
        uses = {
            KEYS: self._quotas.report(now_s),
            ALERTS: self._alerts.report(),
            **self._workers.report(now_s),
        }
        return GatewayReport(uses, self._budgets.report())

    async def _look(self) -> None:
        members, own = self._members, self._members.incarnation
        if not members.alive:
            self._budgets.cut_off(sum(one.alive for one in members.members))
            self._workers.cut_off()
            self._quotas.cut_off()
        elif own in members.reports:
            self._budgets.take(members.told.spent, members.spent)
            self._quotas.take(own, members.reports, time.monotonic())
            self._workers.take(own, members.reports)
            others = (report for gateway, report in members.reports.items() if gateway != own)
            self._alerts.hear([report[ALERTS] for report in others if ALERTS in report])


def share_functions(
    node: RunningNode, database: str, peers: GatewayPeers, advanced: Callable[[int], object],
    refresh: Callable[[], Awaitable[object]], stack: contextlib.AsyncExitStack,
) -> Follower:  # fmt: skip
    """Return the follower of the other gateways' changes. `database` is a connection string of libpq. `advanced` and `refresh` are
    passed to Follower.

    Await `catch_up` before the stored functions are restored, and `follow` about each second afterwards.
    """
    # A gateway without a database does not import psycopg.
    from ..ground.storing.postgres_blobs import PostgresBlobs  # noqa: PLC0415
    from ..ground.storing.postgres_revision_index import PostgresRevisionIndex  # noqa: PLC0415

    index = PostgresRevisionIndex(database, node.functions.settings.keep_revisions)
    blobs = PostgresBlobs(database, "revision_files")
    for close in (blobs.close, index.close):
        stack.callback(close)
    functions, revisions = node.functions, node.revisions
    functions.shared = SharedRevisions(
        index, RevisionFiles(blobs), peers, functions.store, functions.policies, revisions.environments,
        revisions.dialects, revisions.threads,
    )  # fmt: skip
    return Follower(functions.shared, node.rollouts, node.retirements, advanced, refresh)


def _unique(member: GatewayMember) -> str:
    """Return a name that no other gateway has: two machines may have the same name."""
    return f"{member.name} ({member.incarnation[:6]})"


def _after_heartbeats(
    members: Membership, look: Callable[[], Awaitable[None]], name: str, tasks: BackgroundTasks, stack: contextlib.AsyncExitStack
) -> None:  # fmt: skip
    """Call `look` after each heartbeat. While `look` runs, further heartbeats cause only one more call, after its end."""
    news = asyncio.Event()

    async def run() -> None:
        while True:
            await news.wait()
            news.clear()
            await look()

    members.followers.append(news.set)
    stack.callback(tasks.keep(run, name=name).cancel)
