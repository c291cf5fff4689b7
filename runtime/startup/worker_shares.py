"""Lets `scale.max` and the limits of owners hold over all gateways that share a database.

Each gateway reports to the others, for each function that has workers or calls, how many workers it has and needs, and takes
its share. A gateway that lacks workers reports this at once. For about two heartbeats, the gateways together may have more
workers than a limit allows.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ..ground.access.gateway_shares import GatewayUse, by_name, share_of
from ..node.functions.live import Live
from ..node.functions.revisions import Revisions
from ..node.scaling.revision_state import Phase

FUNCTIONS, OWNERS = "functions", "owners"
UNUSED = GatewayUse()


class WorkerShares:
    """The workers that the functions of this gateway have and need, and its shares of the limits."""

    def __init__(self, revisions: Revisions, of_owner: Callable[[str], int | None], tell: Callable[[], object]) -> None:  # fmt: skip
        """`of_owner` returns the limit of an owner over all gateways. `tell` starts the next heartbeat at once."""
        self._revisions, self._of_owner, self._tell = revisions, of_owner, tell
        self._limits = revisions.reconciler.limits
        self._limits.of_owner, self._limits.lacks = self._share_of_owner, self._note_lack
        # By function: the number of workers that its calls need here, as last reported to the other gateways.
        self._wants = dict[str, int]()
        self._owner_shares = dict[str, int]()
        # By kind and name: the time at which a function or an owner without workers began to need one.
        self._since: dict[tuple[str, str], float] = {}

    def report(self, now_s: float) -> dict[str, dict[str, GatewayUse]]:
        """Return the use of the limits, for the other gateways. Leave out functions and owners without workers and calls."""
        told: dict[str, dict[str, GatewayUse]] = {FUNCTIONS: {}, OWNERS: {}}
        for live in self._revisions.running:
            if any(use := live.workers.observed.use):
                # `scale.max` does not count the workers of retiring revisions, or of a revision before it goes live.
                if live.workers.phase is Phase.LIVE:
                    told[FUNCTIONS][live.record.function] = use
                if self._of_owner(owner := live.workers.owner) is not None:
                    told[OWNERS][owner] = GatewayUse(*map(operator.add, use, told[OWNERS].get(owner, UNUSED)))
        self._wants = {name: use.want for name, use in told[FUNCTIONS].items()}
        before, self._since = self._since, {}
        for kind, uses in told.items():
            for name, use in uses.items():
                if not use.have:
                    at_s = self._since[kind, name] = before.get((kind, name), now_s)
                    uses[name] = use._replace(since_s=round(now_s - at_s, 1))
        return told

    def take(self, gateway: str, reports: Mapping[str, Any]) -> None:
        """Compute this gateway's shares of the limits, and apply them.

        `reports` has the reports of the living gateways, by incarnation.
        """
        functions = by_name(reports, FUNCTIONS, GatewayUse, len(UNUSED))
        for live in list(self._revisions.running):
            most, uses = live.record.settings.scale.max, functions.get(live.record.function)
            self._limit(live, most if uses is None else share_of(gateway, live.record.function, most, uses))
        before, self._owner_shares = self._owner_shares, {}
        for owner, uses in by_name(reports, OWNERS, GatewayUse, len(UNUSED)).items():
            if (limit := self._of_owner(owner)) is not None:
                self._owner_shares[owner] = share_of(gateway, owner, limit, uses)
        if any(share < before.get(owner, share + 1) for owner, share in self._owner_shares.items()):
            self._limits.shrink()

    def cut_off(self) -> None:
        """While no reports arrive, let each function have at least one worker, because the other gateways may have ended."""
        self._owner_shares = {owner: max(1, share) for owner, share in self._owner_shares.items()}
        for live in list(self._revisions.running):
            self._limit(live, max(1, live.workers.revision.policy.scale.max))

    def _share_of_owner(self, owner: str) -> int | None:
        limit = self._of_owner(owner)
        return limit if limit is None else min(limit, self._owner_shares.get(owner, limit))

    def _limit(self, live: Live, share: int) -> None:
        """Let a live revision have at most `share` workers. A replaced revision, which the reports leave out, may have `scale.max`."""
        policy, revision = live.workers.revision.policy, live.workers.revision
        share = share if live.workers.phase is Phase.LIVE else policy.settings.scale.max
        if policy.scale.max == share:
            return
        scale = replace(policy.scale, max=share, elsewhere=policy.settings.scale.max - share)
        revision.dispatcher.limits.elsewhere = None
        revision.configure(replace(policy, scale=scale))
        live.workers.look()
        if not policy.scale.max:
            # This gateway had no share of the function before. Now the function's waiting jobs may run here again.
            self._revisions.functions.events.live(live.record.function)

    def _note_lack(self, function: str, want: int) -> None:
        """Tell the other gateways at once if the calls of a function need more workers than they know."""
        if want > self._wants.get(function, 0):
            self._wants[function] = want
            self._tell()
