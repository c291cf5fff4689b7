"""Starts and stops the request logs of functions. The plugin has no routes of its own."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Iterable

from ....errors import GatewayError, PackageMissing, UnknownFunction
from ....snapshot.sources.locate import KeptSources
from ....snapshot.sources.source import Source
from ...front.api.backend import Backend
from ...front.api.plugin import ApiPlugin
from ...ground.access.fair_share import SharedRoom
from ...ground.telemetry.invocation_end import InvocationEnd
from ...ground.telemetry.metrics import Reading
from ...node.functions.live import Live
from .function_log import FunctionLog, LogStore

ROOM_BYTES = 64 << 20
"""The most bytes of calls that wait for their stores. All functions share it."""


class RequestLogApi(ApiPlugin):
    """The request logs of all functions whose settings have `[request_log]`."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self._room, self._stores = SharedRoom(ROOM_BYTES), KeptSources()
        self._logs: dict[str, FunctionLog] = {}

    async def sweep(self) -> None:
        """Keep logs until cancelled. Then let each log write the calls that it has."""
        functions = self.backend.functions
        events = functions.events
        subscribed = ((events.live, self._follow), (events.deleted, self._forget))
        for callbacks, callback in subscribed:
            callbacks.append(callback)
        try:
            for live in functions.all():
                self._follow(live.record.function)
            await asyncio.Event().wait()
        finally:
            for callbacks, callback in subscribed:
                callbacks.remove(callback)
            for name in list(self._logs):
                self._forget(name)

    async def readings(self) -> Iterable[Reading]:
        """Return the metrics of all logs. Join the values of metrics that have the same name."""
        found: dict[str, Reading] = {}
        for log in self._logs.values():
            for reading in log.readings():
                before = found.get(reading.name)
                values = reading.values if before is None else {**before.values, **reading.values}
                found[reading.name] = reading._replace(values=values)
        return found.values()

    def _note_end(self, end: InvocationEnd) -> None:
        if (log := self._logs.get(end.function)) is not None:
            log.note(end)

    def _follow(self, name: str) -> None:
        """Start the log of a function, or a new log if its settings have changed."""
        # `get` raises GatewayError if the gateway is shutting down.
        with contextlib.suppress(GatewayError, UnknownFunction):
            live = self.backend.functions.get(name)
            settings, log = live.record.settings.request_log, self._logs.get(name)
            if log is not None and (log.settings, log.store.deployed_by) == (
                settings,
                live.record.deployed_by,
            ):
                return
            self._forget(name)
            if settings.on:
                self._start(name, live)

    def _start(self, name: str, live: Live) -> None:
        functions, record = self.backend.functions, live.record
        settings, say = record.settings.request_log, functools.partial(functions.log, name)

        def opened() -> Source:
            # The store may use the same credentials and addresses as an event source of the function.
            access = functions.policies.queue_access(record.deployed_by)
            return self._stores.open(settings.store or "", functions.secrets.of(name), access)

        try:
            log = FunctionLog(name, settings, self._room, LogStore(record.deployed_by, opened, say))
        except PackageMissing as error:
            say(f"{error.message} {error.remedy}")
            return
        if not self._logs:
            # Subscribe to calls only while a function has a log.
            functions.events.ended.append(self._note_end)
        self._logs[name] = log
        functions.tasks.keep(log.run, name=f"request_log {name}")

    def _forget(self, name: str) -> None:
        if (log := self._logs.pop(name, None)) is not None:
            log.close()
            if not self._logs:
                self.backend.functions.events.ended.remove(self._note_end)
