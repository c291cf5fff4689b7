"""Serves which gateways share the database, and what each of them does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aiohttp import web
from typing_extensions import TypedDict

from ...ground.access.keys import Scope
from ...ground.storing.members import GatewayMember
from ..http.responses import json_response
from ..http.routes import Route


class NodeRow(TypedDict):
    """A gateway. `alive` is false if its lease has ended. `duties` are what it alone does for all. `generation` is the newest change of
    functions that it has followed.
    """

    name: str
    version: str
    alive: bool
    this: bool
    generation: int
    duties: Sequence[str]


class NodesApi:
    """The route of the gateways that share a database."""

    def __init__(self, incarnation: str, members: Callable[[], Sequence[GatewayMember]]) -> None:
        """`incarnation` identifies this gateway among `members`."""
        self._incarnation, self._members = incarnation, members

    def routes(self) -> list[Route]:
        summary = "List the gateways that share the database. Without the setting `database`, list this one."
        return [Route("GET", "/v1/nodes", self.list, Scope.ADMIN, summary, {"nodes": list[NodeRow]})]

    async def list(self, _request: web.Request) -> web.StreamResponse:
        rows = [
            NodeRow(
                name=one.name, version=one.version, alive=one.alive, this=one.incarnation == self._incarnation,
                generation=one.generation, duties=one.duties,
            )
            for one in self._members()
        ]  # fmt: skip
        return json_response({"nodes": rows})
