"""Which consumers run for the sources of a function."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pilotflame.runtime.ground.settings.event_source import EventSource
from pilotflame.runtime.ground.settings.function_settings import FunctionSettings
from pilotflame.runtime.ground.storing.duties import SharedDuties
from pilotflame.runtime.ground.telemetry.background import BackgroundTasks
from pilotflame.runtime.jobs.events import sources
from pilotflame.runtime.jobs.events.message_queue import Identity, Message
from pilotflame.runtime.plugins.sqs.settings import SqsSource
from pilotflame.snapshot.sources.access import ANY, Access


class Silent:
    """A queue without messages."""

    batch = 10
    closed = False
    checks = 0

    async def receive(self, limit: int, *, wait: bool) -> list[Message]:
        del limit, wait
        await asyncio.Event().wait()
        raise AssertionError

    async def check(self) -> None:
        self.checks += 1

    async def close(self) -> None:
        self.closed = True


async def test_a_source_is_opened_and_checked_again_only_with_another_rule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[tuple[Access, Silent]] = []

    def open_silent(_source: EventSource, identity: Identity) -> tuple[Silent, None]:
        opened.append((identity.access, Silent()))
        return opened[-1][1], None

    monkeypatch.setattr(sources, "_opened", open_silent)
    source = SqsSource(type="sqs", queue="https://sqs.us-east-1.amazonaws.com/1/orders")
    settings = FunctionSettings(name="f", source=(source,))
    rules = {"f": ANY}
    jobs: Any = None
    async with asyncio.timeout(20), BackgroundTasks() as tasks:
        found = sources.Sources(
            jobs, tasks, lambda *_: None, drain_s=0.0, identity=lambda name: Identity(access=rules[name])
        )
        found.start("f", settings)
        found.start("f", settings)
        assert [access for access, _ in opened] == [ANY]
        await found.check(settings, Identity())
        assert [access for access, _ in opened] == [ANY]
        await found.check(settings, Identity(access=Access(own_only=True)))
        assert [queue.checks for _, queue in opened] == [0, 1]
        rules["f"] = Access(own_only=True)
        found.start("f", settings)
        assert [access for access, _ in opened] == [ANY, *[Access(own_only=True)] * 2]
        await found.close()
    assert all(queue.closed for _, queue in opened)


async def test_one_of_several_gateways_reads_the_sources_of_a_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[Silent] = []

    def open_silent(_source: EventSource, _identity: Identity) -> tuple[Silent, None]:
        opened.append(Silent())
        return opened[-1], None

    monkeypatch.setattr(sources, "_opened", open_silent)
    source = SqsSource(type="sqs", queue="https://sqs.us-east-1.amazonaws.com/1/orders")
    settings = FunctionSettings(name="f", source=(source,))
    jobs: Any = None
    duties = SharedDuties(lambda: True)
    async with asyncio.timeout(20), BackgroundTasks() as tasks:
        found = sources.Sources(jobs, tasks, lambda *_: None, drain_s=0.0, duties=duties)
        found.start("f", settings)
        assert (duties.names, opened) == (("sources f",), [])
        duties.note(["sources f"])
        assert (len(opened), len(found.statuses("f"))) == (1, 1)
        duties.note([])
        assert found.statuses("f") == []
        # Without sources, a function is no duty.
        found.start("f", FunctionSettings(name="f"))
        assert duties.names == ()
        await found.close()
