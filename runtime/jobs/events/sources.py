"""Runs one consumer for each event source in the settings of the live functions."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from importlib import import_module

from ....errors import BusFailed, SourceDenied
from ...ground.settings.event_source import EventSource
from ...ground.settings.function_settings import FunctionSettings
from ...ground.storing.duties import Duties
from ...ground.telemetry.background import BackgroundTasks
from ...ground.telemetry.metrics import Reading
from ...node.functions.status import SourceStatus
from ..stored.jobs import Jobs
from .consumer import Consumer
from .message_queue import Identity, MessageQueue, Sink

CHECK_S = 15.0
"""How long a deploy waits at most until all sources have answered."""
SETTLE_S = 2.0
"""After the drain, a consumer may take this much longer to store results and to release messages."""


def _opened(source: EventSource, identity: Identity) -> tuple[MessageQueue, Sink | None]:
    module, _, name = source.opener.partition(":")
    opened: tuple[MessageQueue, Sink | None] = getattr(import_module(module), name)(source, identity)
    return opened


async def _check(source: EventSource, identity: Identity) -> None:
    queue, sink = _opened(source, identity)
    try:
        await queue.check()
        if sink is not None:
            await sink.check()
    except BusFailed as error:
        raise SourceDenied(error.message, remedy=error.remedy, details=error.details) from error
    finally:
        await queue.close()
        if sink is not None:
            await sink.close()


class Sources:
    """The consumers of all live functions. `log(function, text)` writes a line to a function's log."""

    def __init__(
        self, jobs: Jobs, tasks: BackgroundTasks, log: Callable[[str, str], None], *, drain_s: float,
        on_backlog: Callable[[str, int], None] = lambda _function, _messages: None, plugins: Collection[str] | None = None,
        identity: Callable[[str], Identity] = lambda _function: Identity(), duties: Duties | None = None,
    ) -> None:  # fmt: skip
        """The consumers call `on_backlog` with a function and the number of its messages that run or that are about to
        be received. `plugins` are the kinds of sources that are on; None for all. The sources of a function are a duty: one gateway reads
        them.
        """
        self._duties = duties or Duties()
        self._plugins, self._identity, self._jobs, self._tasks = plugins, identity, jobs, tasks
        self._log, self._on_backlog, self._drain_s = log, on_backlog, drain_s
        self._consumers: dict[str, list[Consumer]] = {}
        self._followed: set[str] = set()
        """The functions that have sources. Another gateway may read these sources."""
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False

    async def check(self, settings: FunctionSettings, identity: Identity) -> None:
        """Raise SourceDenied, which names the source, if its credentials are missing or refused, or its results have no
        destination.

        Ignore sources that do not answer. Do not check the sources of running consumers.
        """
        running = {(one.source, one.access) for one in self._consumers.get(settings.name, ())}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CHECK_S):
                for source in dict.fromkeys(settings.source):
                    on = self._plugins is None or source.type in self._plugins
                    if on and (source, identity.access) not in running:
                        await _check(source, identity)

    def start(self, name: str, settings: FunctionSettings) -> None:
        """Start consumers for the new sources of a live function. Stop consumers whose source was removed."""
        if settings.source:
            self._followed.add(name)
            self._duties.keep(f"sources {name}", partial(self._follow_duty, name, settings))
        else:
            self.stop(name)

    def _follow_duty(self, name: str, settings: FunctionSettings, mine: bool) -> None:
        if mine:
            self._start(name, settings)
        else:
            self._close(self._consumers.pop(name, []))

    def _start(self, name: str, settings: FunctionSettings) -> None:
        if self._closed:
            return
        identity = self._identity(name)
        # Do not reuse the consumer of a source whose access rule has changed.
        before = {(one.source, one.access): one for one in self._consumers.pop(name, [])}
        consumers: list[Consumer] = []
        for source in dict.fromkeys(settings.source):
            if self._plugins is not None and source.type not in self._plugins:
                text = f"the plugin {source.type!r} is not in `plugins`: its messages stay in the queue"
                self._log_source(name, source.queue_name, text)
                continue
            consumer = before.pop((source, identity.access), None)
            if consumer is not None:
                # The consumer of an unchanged source goes on, so a new revision does not affect its messages.
                consumer.update(settings)
            else:
                log = partial(self._log_source, name, source.queue_name)
                told = partial(self._on_backlog, name)
                opened = _opened(source, identity)
                consumer = Consumer(settings, source, self._jobs, *opened, log, told, identity.access)
                consumer.start(self._tasks)
            consumers.append(consumer)
        if consumers:
            self._consumers[name] = consumers
        self._close(list(before.values()))

    def stop(self, name: str) -> None:
        """Stop the consumers of a deleted function, in the background; see `Consumer.close`."""
        self._followed.discard(name)
        self._duties.drop(f"sources {name}")
        self._close(self._consumers.pop(name, []))

    async def close(self) -> None:
        """Stop all consumers, and wait until each has ended; see `Consumer.close`."""
        self._closed = True
        for name in list(self._followed):
            self.stop(name)
        if self._closing:
            await asyncio.wait(self._closing)

    async def readings(self) -> list[Reading]:
        """Return the metrics of the consumers that run."""
        ended: Counter[tuple[str, ...]] = Counter()
        held: Counter[tuple[str, ...]] = Counter()
        connected: dict[tuple[str, ...], float] = {}
        lags: dict[tuple[str, ...], float] = {}
        backlogs: dict[tuple[str, ...], float] = {}
        for name, consumers in self._consumers.items():
            for consumer in consumers:
                status, key = consumer.status(), (name, consumer.source.queue_name)
                ended.update({(*key, outcome): count for outcome, count in consumer.ended.items()})
                held[key] += status.in_flight
                connected[key] = status.state == "connected"
                if status.lag_s is not None:
                    lags[key] = status.lag_s
                if status.backlog is not None:
                    backlogs[key] = status.backlog
        of_source = ("function", "source")
        return [
            Reading(
                "source_messages", "Messages of event sources by outcome.", ended, (*of_source, "outcome"),
                total=True,
            ),
            Reading("source_messages_in_flight", "Messages that run as jobs.", held, of_source),
            Reading("source_connected", "1 if the latest request for messages was answered.", connected, of_source),
            Reading("source_backlog", "Messages that waited in a queue when it was asked last.", backlogs, of_source),
            Reading("source_lag_seconds", "How long the latest message had waited in its queue.", lags, of_source),
        ]  # fmt: skip

    def statuses(self, name: str) -> list[SourceStatus]:
        """Return the state of each event source of a function."""
        return [consumer.status() for consumer in self._consumers.get(name, [])]

    def _close(self, consumers: list[Consumer]) -> None:
        for consumer in consumers:
            task = self._tasks.create_task(consumer.close(self._drain_s + SETTLE_S))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def _log_source(self, name: str, queue: str, text: str) -> None:
        self._log(name, f"source {queue}: {text}")
