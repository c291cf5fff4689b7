"""The webhook sender over real sockets: what it sends, repeats, leaves to the next run, and how it pauses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from pilotflame.errors import JobStoreFailed
from pilotflame.runtime.ground.telemetry.background import BackgroundTasks
from pilotflame.runtime.jobs.sql import outbox
from pilotflame.runtime.jobs.sqlite.schema import SCRIPTS
from pilotflame.runtime.jobs.sqlite.store import SqliteJobStore
from pilotflame.runtime.jobs.webhooks import sender
from pilotflame.runtime.jobs.webhooks.delivery import Delivery, RetrySchedule
from pilotflame.runtime.jobs.webhooks.http_post import AddressPolicy
from pilotflame.runtime.jobs.webhooks.sender import WebhookSender
from pilotflame.runtime.jobs.webhooks.signing import SigningKey
from receiver import Held, Receiver, Watched, job, receiving
from standardwebhooks import Webhook

KEY = SigningKey(b"k" * 32)
AT_ONCE = RetrySchedule(tries=3, first_s=0.0)


@pytest_asyncio.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with receiving() as found:
        yield found


@pytest_asyncio.fixture
async def database(tmp_path: Path) -> AsyncIterator[Watched]:
    database = Watched(tmp_path / "jobs.db", SCRIPTS)
    database.open()
    yield database
    await asyncio.to_thread(database.close)


@asynccontextmanager
async def sending(database: Watched, *, close_s: float = 20.0) -> AsyncIterator[WebhookSender]:
    policy = AddressPolicy.parse(["127.0.0.1"])
    async with BackgroundTasks() as tasks:
        sender = WebhookSender(SqliteJobStore(database, keep_s=60.0), KEY, policy, AT_ONCE)
        sender.start(tasks)
        yield sender
        await sender.close(deadline_s=close_s)


async def add(database: Watched, receiver: Receiver, job_id: str = "job-1", event: str = "completed") -> None:
    added = job(f"{receiver.url}/{job_id}", id=job_id)
    await database.write(lambda connection: outbox.add(connection, added, event, time.time()))


def states(found: list[Delivery]) -> list[str]:
    return [delivery.state for delivery in found]


async def test_a_delivery_of_the_previous_run_is_sent_and_signed(
    database: Watched, receiver: Receiver
) -> None:
    await add(database, receiver)
    async with sending(database):
        (came,) = await receiver.received(1)
        (delivery,) = await database.until(lambda found: states(found) == ["DELIVERED"])
    assert (came.id, came.event, came.path) == (delivery.id, "job.completed", "/job-1")
    assert Webhook(KEY.of("f").secret).verify(came.body, came.headers)["id"] == "job-1"


async def test_a_new_delivery_is_sent_after_a_wake(database: Watched, receiver: Receiver) -> None:
    async with sending(database) as sender:
        await add(database, receiver)
        sender.wake()
        await receiver.received(1)


async def test_a_failed_delivery_is_repeated_with_its_id_then_given_up(
    database: Watched, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.responses = [500, 503, 404]
    await add(database, receiver)
    async with sending(database):
        (delivery,) = await database.until(lambda found: states(found) == ["DEAD"])
    assert [came.id for came in receiver.came] == [delivery.id] * 3
    assert [attempt.status for attempt in delivery.log] == [500, 503, 404]
    assert (
        f"webhook {delivery.id} (completed of job-1) was given up after 3 attempts: status 404" in caplog.text
    )


async def test_a_redelivery_is_sent_again(database: Watched, receiver: Receiver) -> None:
    await add(database, receiver)
    async with sending(database) as sender:
        (delivery,) = await database.until(lambda found: states(found) == ["DELIVERED"])
        await database.write(lambda connection: outbox.redeliver(connection, "f", delivery.id, time.time()))
        sender.wake()
        await receiver.received(2)
        await database.until(lambda found: states(found) == ["DELIVERED"] and len(found[0].log) == 2)


async def test_a_host_gets_a_limited_number_of_requests_at_a_time(
    database: Watched, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = [Held() for _ in range(4)]
    receiver.responses = [*held]
    for number in range(5):
        await add(database, receiver, f"job-{number}")
    monkeypatch.setattr(sender, "MAX_REQUESTS_PER_HOST", 4)
    async with sending(database):
        await receiver.received(2)
        held[0].let_go.set()
        await receiver.received(3)
        assert len(receiver.came) == 3
        for each in held:
            each.let_go.set()
        await database.until(lambda found: states(found) == ["DELIVERED"] * 5)


async def test_a_request_that_outlasts_the_close_is_sent_by_the_next_run(
    database: Watched, receiver: Receiver
) -> None:
    receiver.responses = [Held()]
    await add(database, receiver)
    async with sending(database, close_s=0.01):
        await receiver.received(1)
    (delivery,) = await database.until(lambda found: states(found) == ["PENDING"])
    assert delivery.attempts == 0
    async with sending(database):
        await database.until(lambda found: states(found) == ["DELIVERED"])
    assert [came.id for came in receiver.came] == [delivery.id] * 2


async def test_a_close_lets_requests_end(database: Watched, receiver: Receiver) -> None:
    held = Held()
    receiver.responses = [held]
    await add(database, receiver)
    async with sending(database):
        await receiver.received(1)
        asyncio.get_running_loop().call_later(0.01, held.let_go.set)
    await database.until(lambda found: states(found) == ["DELIVERED"])


@pytest.mark.parametrize("call", ["read", "write"])
async def test_it_pauses_while_the_store_refuses(
    database: Watched, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(sender, "PAUSE_S", 0.01)
    await add(database, receiver)
    real, left = getattr(database, call), [JobStoreFailed("The disk is full.")] * 2

    async def refusing(*args: Any) -> Any:
        if left:
            raise left.pop()
        return await real(*args)

    monkeypatch.setattr(database, call, refusing)
    async with sending(database):
        await receiver.received(1)
        while left:
            await asyncio.sleep(0.001)
        monkeypatch.setattr(database, call, real)
        await database.until(lambda found: states(found) == ["DELIVERED"])


async def test_the_messages_of_owners_that_are_made_when_they_are_sent_share_a_room(
    database: Watched,
) -> None:
    entered, let_go = list[str](), asyncio.Event()
    found = WebhookSender(SqliteJobStore(database, keep_s=60.0), KEY, AddressPolicy.parse([]))

    async def send(owner: str) -> None:
        async with found._roomy(owner):
            entered.append(owner)
            await let_go.wait()

    async with asyncio.TaskGroup() as tasks:
        for number in range(20):
            tasks.create_task(send(f"owner {number}"))
        for _ in range(50):
            await asyncio.sleep(0)
        assert 5 <= len(entered) <= 8
        let_go.set()
    assert len(entered) == 20
