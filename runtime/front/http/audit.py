"""Writes the audit log: who changed what, when, and whether it succeeded."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from aiohttp import web

from ....errors import PilotflameError
from ...ground.access.keys import Scope
from ...ground.telemetry.logs import LogChannel
from .access_log import ClientOf
from .requests import caller_of, request_id_of
from .responses import Handler
from .routes import Route

FACTS = web.RequestKey("audit", dict[str, str])
_READS = ("GET", "HEAD", "OPTIONS")
_SCOPES = (Scope.DEPLOY, Scope.ADMIN)


class Audit:
    """Logs each request to a route that changes something and requires the scope deploy or admin."""

    def __init__(self, routes: Sequence[Route], channel: LogChannel, client_of: ClientOf) -> None:
        self._channel, self._client_of = channel, client_of
        self._actions = {
            (route.method, route.path): route.summary.rstrip(".")
            for route in routes
            if route.method not in _READS and not route.reads and route.scope in _SCOPES
        }

    async def audited(self, request: web.Request, path: str, handler: Handler) -> web.StreamResponse:
        """Return the response of a handler. Log the request if its route changes something and requires the scope
        deploy or admin. `path` is the registered path.
        """
        if (action := self._actions.get((request.method, path))) is None:
            return await handler(request)
        outcome = "broke off"
        try:
            response = await handler(request)
            outcome = str(response.status)
        except PilotflameError as error:
            outcome = f"{error.status} {error.code}"
            raise
        finally:
            self._write(request, action, outcome)
        return response

    def note_gateway(self, verb: str, version: str) -> None:
        """Log that the gateway starts or stops."""
        self._line({"by": f"user {os.getuid()}", "did": f"{verb} the gateway", "version": version}, "")

    def note_call(
        self, route: tuple[str, str], owner: str, peer: str, function: str, outcome: str, request_id: str
    ) -> None:
        """Log a call over another protocol than HTTP that means the same as a request to this route."""
        facts = {
            "by": _named(owner), "from": peer, "did": self._actions[route], "function": function, "outcome": outcome,
        }  # fmt: skip
        self._line(facts, request_id)

    def _write(self, request: web.Request, action: str, outcome: str) -> None:
        client = self._client_of(request.headers, request.transport) or request.remote
        facts = {
            "by": _named(caller_of(request).owner), "from": client or "the control socket",
            "did": action, **request.match_info, "outcome": outcome, **request.get(FACTS, {}),
        }  # fmt: skip
        # Move the outcome to the end of the line.
        facts["outcome"] = facts.pop("outcome")
        self._line(facts, request_id_of(request.headers))

    def _line(self, facts: Mapping[str, str], request_id: str) -> None:
        text = " ".join(f'{name}="{_plain(value)}"' for name, value in facts.items())
        level = "info" if facts.get("outcome", "2")[:1] == "2" else "warning"
        self._channel.write("audit", text, level, request_id=request_id, facts=facts)


def _named(owner: str) -> str:
    return f"key {owner}" if owner else "no key"


def note(request: web.Request, **facts: str) -> None:
    """Add facts to the request's line in the audit log, such as the id of a new key.

    A streamed response sets `outcome`, because it sends the status before the outcome is known.
    """
    request[FACTS] = request.get(FACTS, {}) | facts


def _plain(value: str) -> str:
    """Return a value without double quotes and line breaks. Callers choose some values, and these characters would end
    the value or the line.
    """
    return ascii(value[:200])[1:-1].replace('"', "'")
