"""Makes a gateway serve one function alone, as in that function's own image on Knative, Cloud Run or plain docker.

The platform in front authenticates and scales. It calls `/`, probes `/readyz`, and stops the process with SIGTERM.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from aiohttp import web

from ....errors import ActivationTimeout, GatewayError, QueueFull
from ...ground.access.keys import Caller, Scope
from ...ground.settings.function_settings import FunctionSettings
from ...node.functions.registry import Functions
from ..http.requests import HOLD, MAX_HOLD_S, seconds
from ..http.routes import INVOKE_PATH, Route

ROOT = "/"
PLATFORM = "platform"
"""The owner of the jobs and files of all callers without an API key. No key has this id."""
METRICS_ROUTE = ("GET", "/metrics")


class Standalone:
    """The only function of a gateway. Until the function is live, its callers wait, at most as long as they may wait
    for a worker.
    """

    def __init__(self, settings: FunctionSettings, functions: Functions, routes: Sequence[Route]) -> None:
        self.name = settings.name
        self.routes = [
            replace(route, path=ROOT, error_format=None)
            for route in routes
            if (route.method, route.path) == ("POST", INVOKE_PATH)
        ]
        """The route `POST /`, which calls the function."""
        self.caller = Caller(owner=PLATFORM, scopes=frozenset({Scope.INVOKE}))
        """The caller of every request without an API key."""
        self.open_routes = frozenset({METRICS_ROUTE})
        """Routes that callers without an API key may use, beside the routes that call the function. Platforms read the
        metrics to scale the function.
        """
        self._functions, self._hold_s, self._most = functions, settings.hold_s, settings.max_queue
        self._calls = {
            (route.method, route.path)
            for route in [*routes, *self.routes]
            if route.scope is Scope.INVOKE and route.method in ("POST", "PUT")
        }
        self._live = asyncio.Event()
        self._closing = False
        self._deploying: asyncio.Task[None] | None = None
        self._held = 0

    def is_starting(self) -> bool:
        """Return True if no worker is ready."""
        live = [live for live in self._functions.all() if live.record.function == self.name]
        return not (self._live.is_set() and live and live[0].workers.replicas.ready)

    def follow(self, deploying: asyncio.Task[None]) -> None:
        """Remember the task of the first deploy, so that `close` can cancel it."""
        self._deploying = deploying

    def open(self) -> None:
        """Let the requests that have waited for the first deploy continue."""
        self._live.set()

    async def close(self) -> None:
        """Cancel the first deploy if it still runs, and refuse the requests that wait for it."""
        self._closing = not self._live.is_set()
        if self._deploying is not None and not self._deploying.done():
            self._deploying.cancel()
            await asyncio.wait([self._deploying])
        self._live.set()

    def name_function(self, request: web.Request) -> None:
        """Add the function to the variables of the path, for the guard and the handler of `POST /`."""
        if request.path == ROOT and request.method == "POST":
            request.match_info["function"] = self.name

    async def hold(self, request: web.Request, path: str) -> None:
        """Let a call wait for the first deploy, at most as long as it may wait for a worker. Raise ActivationTimeout,
        QueueFull if too many calls wait, or GatewayError if the gateway is closing.
        """
        if not self._live.is_set() and (request.method, path) in self._calls:
            await self._wait(seconds(request.headers, HOLD, self._hold_s, MAX_HOLD_S))

    async def _wait(self, most_s: float) -> None:
        """Wait for the first deploy. Raise ActivationTimeout, or QueueFull if too many requests wait."""
        if self._held >= self._most:
            remedy = "Try again later, or raise max_queue."
            raise QueueFull(f"{self._held} calls wait for {self.name} to start.", remedy=remedy)
        self._held += 1
        begun_s = time.monotonic()
        try:
            async with asyncio.timeout(most_s):
                await self._live.wait()
        except TimeoutError:
            waited_s = time.monotonic() - begun_s
            remedy = "Try again, or raise hold_s or the header X-Scale-Up-Timeout."
            message = f"{self.name} was not up within {waited_s:.1f} s."
            raise ActivationTimeout(message, remedy=remedy) from None
        finally:
            self._held -= 1
        if self._closing:
            raise GatewayError(f"{self.name} has not started.", remedy="Try again at another instance.")
