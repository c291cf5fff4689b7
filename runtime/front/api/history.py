"""Serves the records of a function: the decisions about it, its load over time, and the arrival times of its calls."""

from __future__ import annotations

import time
from typing import Any

from aiohttp import web
from typing_extensions import TypedDict

from ...ground.access.keys import Scope
from ...ground.billing.usage import GB, HOUR_S
from ...ground.telemetry.decisions import describe
from ...ground.telemetry.rung_name import RungName
from ...node.functions.live import Live, ladder_spec_of
from ...node.functions.registry import Functions
from ...node.measuring.recorder import Recorder
from ...node.scaling.rung_figures import HoldingPrices
from ..http.requests import caller_of
from ..http.responses import Timestamp, outputs_response, timestamp
from ..http.routes import Number, Route, UnixTime

MAX_ARRIVALS = 1_000_000
ROW_BYTES = 100
# With these prices, the cost of a rung is the number of bytes that it holds.
IN_BYTES = HoldingPrices(memory_byte_s=1.0, device_s=0.0, waiting_s=0.0)
SINCE = UnixTime("since", "Unix time in seconds from which on to tell; by default all that is kept.", 0.0)
MOST_DECISIONS = Number("lines", "The largest number of decisions, the last ones.", 1000, maximum=10_000)
MOST_ARRIVALS = Number(
    "lines", "The largest number of arrivals, the last ones.", 100_000, maximum=MAX_ARRIVALS
)


class DecisionFacts(TypedDict):
    """A decision about a function. `text` explains it in words, `figures` holds the numbers behind it."""

    at: Timestamp
    action: str
    cause: str
    figures: dict[str, float]
    text: str


class LoadFacts(TypedDict):
    """A sample of a function's load. Its values apply from `at` until the next sample.

    Counts of invocations and workers are the maxima within the second of the sample. `rung` is the rung at the end of
    that second. `cold` is the number of answered invocations that had waited for an activation, and `slowest_cold_s`
    the longest of these waits.
    """

    at: Timestamp
    queued: int
    in_flight: int
    starting: int
    ready: int
    rung: str
    cold: int
    slowest_cold_s: float


class RungFacts(TypedDict):
    """A rung on which a function can be held, the memory and devices that it holds there, and the time from there until
    a worker is ready.
    """

    rung: RungName
    held_bytes: float
    devices: float
    wake_s: float


class PriceFacts(TypedDict):
    """What holding and waiting cost a function at present."""

    memory_gb_hour: float
    device_hour: float
    waiting_s: float


class HistoryApi:
    """The routes of the records of functions."""

    def __init__(self, functions: Functions, recorder: Recorder) -> None:
        self._functions = functions
        self._recorder = recorder

    def routes(self) -> list[Route]:
        one = "/v1/functions/{function}"
        decided = "List what the gateway decided about a function of the caller, and why, the oldest first."
        load = "Show a function's workers, rung, queue and cold starts over time: a sample for each change."
        arrived = "List when a function's answered invocations arrived (only for its owner), and how long one takes."
        decisions, samples = (
            {"decisions": list[DecisionFacts]},
            {"now": Timestamp, "samples": list[LoadFacts]},
        )
        arrivals = {
            "arrivals": list[float], "service_s": float | None, "rungs": list[RungFacts], "prices": PriceFacts,
        }  # fmt: skip
        return [
            Route(
                "GET", f"{one}/decisions", self.decisions, Scope.READ, decided, decisions,
                parameters=(SINCE, MOST_DECISIONS),
            ),
            Route("GET", f"{one}/load", self.load, Scope.READ, load, samples, parameters=(SINCE,)),
            Route(
                "GET", f"{one}/arrivals", self.arrivals, Scope.READ, arrived, arrivals,
                parameters=(SINCE, MOST_ARRIVALS),
            ),
        ]  # fmt: skip

    async def decisions(self, request: web.Request) -> web.StreamResponse:
        since, most = SINCE.read(request), MOST_DECISIONS.read(request)
        name = self._live(request).record.function
        found = await self._recorder.decisions(name, since) if self._owned(request) else []

        def told() -> dict[str, Any]:
            rows = [
                DecisionFacts(
                    at=timestamp(one.at), action=one.action, cause=one.cause, figures=dict(one.figures),
                    text=describe(one),
                )
                for one in found[max(0, len(found) - most) :]
            ]  # fmt: skip
            return {"decisions": rows}

        return await outputs_response(request, ROW_BYTES * len(found), told)

    async def load(self, request: web.Request) -> web.StreamResponse:
        found = await self._recorder.load(self._live(request).record.function, SINCE.read(request))

        def told() -> dict[str, Any]:
            # Rows of `LoadFacts`.
            rows = [one._asdict() | {"at": timestamp(one.at)} for one in found]
            return {"now": timestamp(time.time()), "samples": rows}

        return await outputs_response(request, ROW_BYTES * len(found), told)

    async def arrivals(self, request: web.Request) -> web.StreamResponse:
        live, most = self._live(request), MOST_ARRIVALS.read(request)
        since, owned = SINCE.read(request), self._owned(request)
        found = await self._recorder.arrivals(live.record.function, since) if owned else []
        curve = live.revision.dispatcher.durations.learned
        service_s = curve[0].p50_s if curve else None
        kept = found[max(0, len(found) - most) :]
        body = {"arrivals": kept, "service_s": service_s, "rungs": _rungs(live), "prices": _prices(live)}
        return await outputs_response(request, ROW_BYTES * len(kept), lambda: body)

    def _owned(self, request: web.Request) -> bool:
        return self._functions.owns(caller_of(request), request.match_info["function"])

    def _live(self, request: web.Request) -> Live:
        return self._functions.get(request.match_info["function"])


def _rungs(live: Live) -> list[RungFacts]:
    """Return the rungs of a function's ladder, with estimates until the first measurements exist."""
    figures = live.function.ladder.measured.figures
    names = ladder_spec_of(live.record, IN_BYTES).rungs
    rungs = figures.ladder(names, IN_BYTES).rungs
    devices = [figures.devices if name is RungName.READY else 0.0 for name in names]
    return [
        RungFacts(rung=name, held_bytes=rung.hold_per_s, devices=device, wake_s=rung.wake_s)
        for name, rung, device in zip(names, rungs, devices, strict=True)
    ]


def _prices(live: Live) -> PriceFacts:
    memory_byte_s, device_s, waiting_s = live.function.ladder.measured.prices
    return PriceFacts(
        memory_gb_hour=memory_byte_s * GB * HOUR_S, device_hour=device_s * HOUR_S, waiting_s=waiting_s
    )
