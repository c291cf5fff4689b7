"""Sends alerts of functions: a signed webhook when a condition of `[alerts]` begins, and another one when it ends.

The delivery of an alert is a row of the outbox, like a delivery of a job. So it is sent at least once, even if the
gateway is killed. A condition whose beginning was sent has a row, too, so that only its end is sent after a restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ....errors import JobStoreFailed, PilotflameError, WebhookRefused
from ...calls.serving.live_function import LiveFunction
from ...ground.settings.alerts import Alerts
from ...ground.storing.duties import Duties
from ...ground.telemetry.invocation_end import InvocationEnd
from ...ground.telemetry.logs import LogChannel
from ..stored.alert import Alert
from ..stored.job_store import JobStore
from .conditions import CONDITIONS, Condition, CountedCall

ALERTS = "alerts"
"""The duty to send alerts."""
FAILED = 500
"""From this HTTP status on, the function is at fault for a failed call. Below this status, the caller is at fault."""


@dataclass(eq=False)
class _Watch:
    """The conditions of one function."""

    settings: Alerts
    url: str
    revision: str
    owner: str
    log: LogChannel
    conditions: list[Condition]
    told: bool = False
    """True if the latest reports of other gateways have calls of the function."""
    timer: asyncio.TimerHandle | None = None
    timer_s: float = math.inf
    storing: asyncio.Lock = field(default_factory=asyncio.Lock)


class FunctionAlerts:
    """The alerts of all functions. Its methods must be called on the event loop."""

    def __init__(
        self, store: JobStore, tasks: asyncio.TaskGroup, check_url: Callable[[str], object], duties: Duties | None = None
    ) -> None:  # fmt: skip
        """`check_url` raises WebhookRefused for a URL that may not be called. If several gateways share jobs, one of them sends alerts."""
        self._store, self._tasks, self._check_url = store, tasks, check_url
        self._duties = duties or Duties()
        # False until it is known which conditions other gateways have begun.
        self._known = not self._duties.shared
        self._watches: dict[str, _Watch] = {}
        self._begun: dict[str, set[str]] = {}

    async def start(self) -> None:
        """Read which conditions have begun. Raise JobStoreFailed."""
        self._begun.clear()
        for function, condition in await self._store.begun_alerts():
            self._begun.setdefault(function, set()).add(condition)
        for function, watch in self._watches.items():
            begun = self._begun.pop(function, set())
            for one in watch.conditions:
                one.begun = one.name in begun

    def close(self) -> None:
        for watch in self._watches.values():
            _cancel(watch)
        self._watches.clear()

    def follow(self, live: LiveFunction) -> None:
        """Watch a function whose present revision is `live`. If its settings of alerts have not changed, its conditions
        keep their state.
        """
        function, settings = live.record.function, live.record.settings.alerts
        before = self._watches.pop(function, None)
        if before is not None:
            _cancel(before)
            self._begun[function] = {one.name for one in before.conditions if one.begun}
        if settings.url is None:
            self._drop(function, self._begun.pop(function, set()))
            return
        try:
            self._check_url(settings.url)
        except WebhookRefused as error:
            live.warnings.append(f"No alerts are sent to alerts.url: {error.message}")
        if before is not None and before.settings == settings:
            before.revision, before.owner = live.record.revision, live.record.deployed_by
            self._watches[function] = before
            del self._begun[function]
        else:
            self._watches[function] = self._watch(live, settings, settings.url)
        self._look(function, self._watches[function], time.monotonic())

    def forget(self, function: str) -> None:
        """Stop watching a deleted function."""
        watch = self._watches.pop(function, None)
        begun = self._begun.pop(function, set())
        if watch is not None:
            _cancel(watch)
            begun |= {one.name for one in watch.conditions if one.begun}
        self._drop(function, begun)

    # -- the other gateways with the same jobs

    def take_over(self, mine: bool) -> None:
        """If `mine`, send the alerts from now on, instead of another gateway."""
        self._known = False
        if mine:
            self._tasks.create_task(self._take_over(), name="alert")

    async def _take_over(self) -> None:
        # Without the store, the conditions that had begun are not known, and their ends are not sent.
        with contextlib.suppress(JobStoreFailed):
            await self.start()
        self._known = True
        for function, watch in self._watches.items():
            self._look(function, watch, time.monotonic())

    def report(self) -> dict[str, dict[str, Sequence[float | str]]]:
        """Return the figures of this gateway's calls for the other gateways, by function and condition."""
        now_s = time.monotonic()
        told = {
            function: {one.name: found for one in watch.conditions if (found := one.report(now_s))}
            for function, watch in self._watches.items()
        }
        return {function: found for function, found in told.items() if found}

    def hear(self, reports: Sequence[Mapping[str, Mapping[str, Sequence[Any]]]]) -> None:
        """Take the latest reports of the other gateways."""
        now_s = time.monotonic()
        for function, watch in self._watches.items():
            told = [report[function] for report in reports if function in report]
            if told or watch.told:
                watch.told = bool(told)
                for condition in watch.conditions:
                    condition.hear(now_s, [one[condition.name] for one in told if condition.name in one])
                self._look(function, watch, now_s)

    # -- what happens to calls

    def note_end(self, end: InvocationEnd) -> None:
        """Record that an invocation has ended."""
        timeline = end.timeline
        cold_ms = timeline.cold_start_s * 1000 if timeline.activation is not None else None
        self._observe(end.function, CountedCall(end.code >= FAILED, cold_ms, end.request_id))

    def note_refused(self, function: str, error: PilotflameError) -> None:
        """Record that a call was refused. The refusal counts as a failed call unless the caller is at fault."""
        if error.status >= FAILED:
            self._observe(function, CountedCall(failed=True))

    def _observe(self, function: str, call: CountedCall) -> None:
        if (watch := self._watches.get(function)) is not None:
            now_s = time.monotonic()
            for condition in watch.conditions:
                condition.observe(now_s, call)
            self._look(function, watch, now_s)

    # -- what is sent

    def _watch(self, live: LiveFunction, settings: Alerts, url: str) -> _Watch:
        record, now_s = live.record, time.monotonic()
        begun = self._begun.pop(record.function, set())
        made = (kind.of(settings, begun=kind.name in begun, now_s=now_s) for kind in CONDITIONS)
        conditions = [one for one in made if one is not None]
        self._drop(record.function, begun - {one.name for one in conditions})
        return _Watch(settings, url, record.revision, record.deployed_by, live.logs, conditions)

    def _look(self, function: str, watch: _Watch, now_s: float) -> None:
        """Send alerts for the conditions that have changed. Set the timer to the time when a condition may change
        without a call.
        """
        if not (self._known and self._duties.has(ALERTS)):
            return
        for condition in watch.conditions:
            if condition.changed(now_s):
                alert = Alert(
                    function, watch.revision, condition.name, watch.url, watch.owner, condition.begun,
                    condition.figures(),
                )  # fmt: skip
                self._tasks.create_task(self._store_alert(watch, condition, alert), name="alert")
        due_s = min(condition.due_s(now_s) for condition in watch.conditions)
        if due_s < watch.timer_s:
            _cancel(watch)
            loop, watch.timer_s = asyncio.get_running_loop(), due_s
            watch.timer = loop.call_later(max(0.0, due_s - now_s), self._on_timer, function, watch)

    def _on_timer(self, function: str, watch: _Watch) -> None:
        watch.timer, watch.timer_s = None, math.inf
        self._look(function, watch, time.monotonic())

    async def _store_alert(self, watch: _Watch, condition: Condition, alert: Alert) -> None:
        # Store alerts in their order: an end must not be stored before its beginning.
        async with watch.storing:
            try:
                await self._store.alert(alert)
            except JobStoreFailed as error:
                condition.not_sent()
                watch.log.write("gateway", f"alert {condition.name} is not sent: {error.message}", "error")
                return
        level = "warning" if alert.begun else "info"
        watch.log.write("gateway", alert.text, level, revision=alert.revision)

    def _drop(self, function: str, conditions: set[str]) -> None:
        """Delete the store's records of the beginnings of `conditions`, so that the gateway sends no alerts for their
        ends.
        """
        if conditions:
            self._tasks.create_task(self._store_end(function, frozenset(conditions)), name="alert")

    async def _store_end(self, function: str, conditions: frozenset[str]) -> None:
        try:
            await self._store.drop_alerts(function, conditions)
        # The next start of the gateway drops these conditions, or their ends are sent then.
        except JobStoreFailed:
            return


def _cancel(watch: _Watch) -> None:
    if watch.timer is not None:
        watch.timer.cancel()
    watch.timer, watch.timer_s = None, math.inf
