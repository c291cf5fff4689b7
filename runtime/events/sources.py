"""The sources: for every live function the pumps that its settings ask for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..jobs.jobs import Jobs
from ..settings.event_source import missing_package
from ..settings.function_settings import FunctionSettings
from .consumer import Consumer
from .sinks import open_sink
from .sqs import SqsBus

SETTLE_S = 2.0
"""After the drain: how what was cut off has ended is stored, and its message given back."""


class Sources:
    """Event sources of a gateway. `say(function, text)` writes to a function's log."""

    def __init__(
        self, jobs: Jobs, tasks: asyncio.TaskGroup, say: Callable[[str, str], None], *, drain_s: float
    ) -> None:
        self._jobs = jobs
        self._tasks = tasks
        self._say = say
        self._drain_s = drain_s
        self._pumps: dict[str, list[Consumer]] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._closed = False

    def start(self, name: str, settings: FunctionSettings) -> None:
        """The function is live with these settings: sources that are new begin, those that are no more end."""
        if self._closed:
            return
        before = {pump.source: pump for pump in self._pumps.pop(name, [])}
        pumps: list[Consumer] = []
        for source in dict.fromkeys(settings.source):
            pump = before.pop(source, None)
            if pump is not None:  # its messages at work do not notice that the revision was replaced
                pump.settings = settings
            elif problem := missing_package():
                self._say(name, f"source {source.queue}: {problem}")
                continue
            else:
                pump = Consumer(
                    settings, source, self._jobs, SqsBus(source), open_sink(source), self._sayer(name, source.queue_name)
                )  # fmt: skip
                pump.start(self._tasks)
            pumps.append(pump)
        if pumps:
            self._pumps[name] = pumps
        self._end(list(before.values()))

    def stop(self, name: str) -> None:
        """The function is gone: no new message is taken, and those that do not run are given back."""
        self._end(self._pumps.pop(name, []))

    async def close(self) -> None:
        """All of it ends: returns when what ran has ended and is deleted, and all else is given back."""
        self._closed = True
        for name in list(self._pumps):
            self.stop(name)
        if self._leaving:
            await asyncio.wait(self._leaving)

    def in_flight(self, name: str) -> int:
        """How many messages of a function are at work."""
        return sum(pump.in_flight for pump in self._pumps.get(name, []))

    def _end(self, pumps: list[Consumer]) -> None:
        for pump in pumps:
            task = self._tasks.create_task(pump.close(self._drain_s + SETTLE_S))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    def _sayer(self, name: str, queue: str) -> Callable[[str], None]:
        return lambda text: self._say(name, f"source {queue}: {text}")
