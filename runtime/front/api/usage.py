"""Serves the usage of functions, and its cost."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from aiohttp import web
from typing_extensions import TypedDict

from ....errors import BadInput, UnknownFunction
from ...ground.access.keys import Scope
from ...ground.billing.ledger import Ledger
from ...ground.billing.usage import Prices, Usage
from ...ground.billing.usage_store import UsageKey, UsageQuery
from ...ground.settings.function_settings import name_problem
from ..http.requests import caller_of
from ..http.responses import Timestamp, json_response, timestamp
from ..http.routes import Parameter, Route, UnixTime

DEFAULT_S = 30 * 86400.0
BY = Parameter(
    "by", "By what it is summed up.", type="string", enum=list(UsageKey), default=UsageKey.FUNCTION
)
FUNCTION = Parameter("function", "Only of this function, which may be deleted.")
SINCE = UnixTime("since", "Unix time in seconds; by default 30 days ago.")
UNTIL = UnixTime("until", "Unix time in seconds; by default now.")


class UsageRow(TypedDict):
    """One sum of usage. Depending on the query, `key` is a function, the id of the API key that deployed functions, or
    the start of an hour or day. Rows of functions and owners begin with the dearest.
    """

    key: str
    usage: Usage


UsageAnswer: Any = {
    "by": UsageKey,
    "since": Timestamp,
    "until": Timestamp,
    "rows": list[UsageRow],
    "total": Usage,
    "prices": Prices,
    "currency": str,
}


class UsageApi:
    """The route of the usage of all functions."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def routes(self) -> list[Route]:
        summary = "Return what functions have used and what it cost, also deleted ones."
        parameters = (BY, FUNCTION, SINCE, UNTIL)
        return [
            Route("GET", "/v1/usage", self.usage, Scope.READ, summary, UsageAnswer, parameters=parameters)
        ]

    async def usage(self, request: web.Request) -> web.StreamResponse:
        query = _query(request)
        if (wanted := request.query.get(FUNCTION.name)) is not None and not await self._ledger.knows(wanted):
            raise UnknownFunction.named(wanted)
        total, rows = Usage(), list[UsageRow]()
        for key, used in await self._ledger.read(query):
            total += used
            rows.append(UsageRow(key=key if isinstance(key, str) else timestamp(key), usage=used))
        if query.by in (UsageKey.FUNCTION, UsageKey.OWNER):
            rows.sort(key=lambda row: row["usage"].cost, reverse=True)
        return json_response(
            {
                "by": query.by, "since": timestamp(query.since), "until": timestamp(query.until), "rows": rows,
                "total": total, "prices": self._ledger.prices, "currency": self._ledger.currency,
            }
        )  # fmt: skip


def _query(request: web.Request) -> UsageQuery:
    """Return the caller's query, limited to the functions that the caller may see. Raise BadInput if it is not valid, or UnknownFunction."""
    sent, now, caller = request.query, time.time(), caller_of(request)
    try:
        by = UsageKey(sent.get(BY.name, UsageKey.FUNCTION))
    except ValueError:
        raise BadInput(f"by is {sent[BY.name][:40]!r}.", remedy=f"One of {', '.join(UsageKey)}.") from None
    since, until = SINCE.read(request, now - DEFAULT_S), UNTIL.read(request, now + 1)
    query = UsageQuery(by, since, until, caller.functions)
    if (wanted := sent.get(FUNCTION.name)) is None:
        return query
    if problem := name_problem(wanted):
        raise BadInput(f"{problem}.", remedy="See `pilotflame list`.")
    caller.check(wanted)
    return replace(query, functions=(wanted,))
