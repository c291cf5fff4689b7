"""Gateways in this process that share the functions in a database, with heartbeats that a test can stop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from live import LIMIT_S, Gateway, gateway_here, short_folder, until
from pilotflame.runtime.node.functions.follower import Follower
from pilotflame.runtime.node.functions.restoration import Restoration
from pilotflame.runtime.node.functions.shared_revisions import GatewayPeers, SharedRevisions
from pilotflame.runtime.startup.sharing import share_functions


@dataclass(eq=False)
class Shared:
    """A gateway of a group."""

    gateway: Gateway
    follower: Follower

    @property
    def revisions(self) -> SharedRevisions:
        return self.follower.shared

    def live(self, name: str) -> str:
        """Return the id of the live revision of a function; "" if there is none."""
        assert self.gateway.server is not None
        found = self.gateway.server.functions.find(name)
        return "" if found is None else found.record.revision

    async def even(self) -> None:
        """Wait until the gateway serves the functions that the index names."""

        async def follows() -> bool:
            return not await asyncio.to_thread(self.revisions.index.changes, self.follower.generation)

        await until(follows, "the latest change of functions")


@dataclass(eq=False)
class Group:
    """Gateways with one database."""

    database: str
    generations: dict[str, int] = field(default_factory=dict)
    news: asyncio.Condition = field(default_factory=asyncio.Condition)
    beating: dict[str, Follower] = field(default_factory=dict)

    def seen(self) -> Mapping[str, int]:
        return dict(self.generations)

    async def beat(self) -> None:
        """Call `follow` of the members again and again, as heartbeats do each second."""
        while True:
            for name, follower in list(self.beating.items()):
                await follower.follow()
                # The member may have left while it followed.
                if name in self.beating:
                    self.generations[name] = follower.generation
            async with self.news:
                self.news.notify_all()
            await asyncio.sleep(0.02)

    @contextlib.asynccontextmanager
    async def member(self, name: str, state: Path) -> AsyncIterator[Shared]:
        """Run a gateway that follows what the other members do. It restores its stored functions after it has
        caught up with them.
        """
        async with gateway_here(state, drain_s=5.0) as gateway, contextlib.AsyncExitStack() as stack:
            assert gateway.server is not None
            node = gateway.server.node
            for live in node.functions.all():
                await node.revisions.end(live, 0.0)
            node.functions._live.clear()
            peers = GatewayPeers(name, self.seen, self.news)
            follower = share_functions(node, self.database, peers, lambda _: None, _nothing, stack)
            async with asyncio.timeout(LIMIT_S):
                await follower.catch_up()
            await Restoration(node.functions, node.revisions).run()
            self.beating[name], self.generations[name] = follower, follower.generation
            try:
                yield Shared(gateway, follower)
            finally:
                self.leave(name)

    def leave(self, name: str) -> None:
        self.beating.pop(name, None)
        self.generations.pop(name, None)


async def _nothing() -> None:
    """Do nothing: the gateways of these tests do not share keys and secrets."""


@contextlib.asynccontextmanager
async def gateways(url: str, **settings: Any) -> AsyncIterator[list[Gateway]]:
    """Run two gateways that share a database, with real heartbeats."""
    async with contextlib.AsyncExitStack() as stack:
        folders = [stack.enter_context(short_folder()) for _ in range(2)]
        yield [
            await stack.enter_async_context(gateway_here(one / "state", database=url, **settings))
            for one in folders
        ]
