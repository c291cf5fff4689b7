"""Leases and duties of gateways on a real PostgreSQL: joins, ends, deaths, and a database that is away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import psycopg
import pytest
import pytest_asyncio
from live import until
from pilotflame.errors import GatewayError
from pilotflame.runtime.ground.storing import membership as module
from pilotflame.runtime.ground.storing.members import DaySpending, GatewayMember, GatewayReport
from pilotflame.runtime.ground.storing.membership import Membership
from postgres import PostgresServer, postgres_server

Join = Callable[..., Awaitable[Membership]]


@pytest_asyncio.fixture
async def join(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Join]:
    """Yield a function that joins a gateway with these duties. Heartbeats come often."""
    monkeypatch.setattr(module, "BEAT_S", 0.02)
    joined: list[Membership] = []

    async def make(name: str, *duties: str, url: str = postgres_url, previous: str = "") -> Membership:
        members = Membership(url, f"incarnation-{name}", name, "1.0")
        joined.append(members)
        for duty in duties:
            members.duties.keep(duty, lambda _mine: None)
        await asyncio.to_thread(members.open, previous)
        members.start()
        return members

    yield make
    for members in joined:
        await asyncio.to_thread(members.close)


def end_lease(url: str, incarnation: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("UPDATE nodes SET until = now() WHERE incarnation = %s", [incarnation])


async def has(members: Membership, duty: str) -> None:
    async def so() -> bool:
        return members.duties.has(duty)

    await until(so, f"{duty} on {members.incarnation}")


async def test_gateways_see_each_other_and_what_they_have_followed(join: Join) -> None:
    first, second = await join("a"), await join("b")
    second.generation = 7

    async def seen() -> bool:
        return [(one.name, one.version, one.generation, one.alive) for one in first.members] == [
            ("a", "1.0", 0, True), ("b", "1.0", 7, True),
        ]  # fmt: skip

    await until(seen, "the generation of the other gateway")


async def test_a_duty_has_one_gateway_which_leaves_it_to_another_at_its_end(join: Join) -> None:
    first = await join("a", "webhooks", "only a")
    await has(first, "webhooks")
    second = await join("b", "webhooks", "only b")
    await has(second, "only b")
    assert not second.duties.has("webhooks")
    await asyncio.to_thread(first.close)
    await has(second, "webhooks")
    assert [one.name for one in second.members] == ["b"]


async def test_a_dropped_duty_is_free(join: Join) -> None:
    first, second = await join("a", "webhooks"), await join("b", "other")
    await has(first, "webhooks")
    second.duties.keep("webhooks", lambda _mine: None)
    first.duties.drop("webhooks")
    await has(second, "webhooks")


async def test_a_dead_gateway_is_named_until_its_jobs_are_queued_again(join: Join, postgres_url: str) -> None:
    first = await join("a", "webhooks")
    await has(first, "webhooks")
    await asyncio.to_thread(_kill, first)
    end_lease(postgres_url, first.incarnation)
    second = await join("b", "webhooks")
    await has(second, "webhooks")
    assert [(one.name, one.alive) for one in second.members] == [("a", False), ("b", True)]
    # When the dead gateway starts again, it removes the entry of its last run.
    third = await join("a2", previous=first.incarnation)

    async def gone() -> bool:
        return first.incarnation not in {one.incarnation for one in third.members}

    await until(gone, "the end of the dead gateway")


async def test_a_copy_of_a_state_folder_ends_no_living_gateway(join: Join) -> None:
    first = await join("a", "webhooks")
    await has(first, "webhooks")
    copy = await join("copy", previous=first.incarnation)
    assert [(one.name, one.alive) for one in copy.members] == [("a", True), ("copy", True)]
    assert first.duties.has("webhooks")


async def test_a_gateway_that_closes_while_it_opens_ends_no_other_lease(
    join: Join, postgres_url: str
) -> None:
    first = await join("a")
    previous = first.incarnation
    # No heartbeat makes a new lease of a removed one.
    await asyncio.to_thread(_kill, first)
    copy = Membership(postgres_url, "incarnation-copy", "copy", "1.0")
    await asyncio.to_thread(copy.close)
    await asyncio.to_thread(copy.open, previous)
    copy._disconnect()
    assert previous in [one.incarnation for one in copy.members]


async def test_nobody_is_dead_for_a_gateway_that_was_away_itself(
    join: Join, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEASE_S", 0.5)
    first, second = await join("a"), await join("b")
    await asyncio.to_thread(_kill, first)

    async def dead() -> bool:
        return second.dead

    await until(dead, "the end of the first gateway")
    # Without heartbeats of its own, the second gateway cannot know whether the first one is dead.
    second._until_s = 0.0
    assert not second.dead
    second._note(module._Beat(time.monotonic() + 0.5, second.members))
    assert not second.dead


@pytest.mark.parametrize("url", ["postgresql+psycopg://pf:S3cret@db/x", "postgresql://pf:50%S3cret@db/x"])
def test_an_address_that_is_none_is_not_quoted(url: str) -> None:
    members = Membership(url, "i", "a", "1.0")
    with pytest.raises(GatewayError, match="must be an address") as raised:
        members.open("")
    assert "S3cret" not in repr(raised.value)
    assert raised.value.__cause__ is None or "S3cret" not in repr(raised.value.__cause__)


async def test_a_gateway_whose_row_was_removed_joins_again(join: Join, postgres_url: str) -> None:
    members = await join("a", "webhooks")
    await has(members, "webhooks")
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("DELETE FROM nodes")

        async def back() -> bool:
            return connection.execute("SELECT incarnation FROM nodes").fetchall() == [(members.incarnation,)]

        await until(back, "the row of the gateway")
    assert members.duties.has("webhooks")


async def test_duties_end_with_the_lease_if_the_database_is_away(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEASE_S", 0.5)
    with postgres_server() as server:
        members = await join("a", url=server.url)
        told: list[bool] = []
        members.duties.keep("webhooks", told.append)
        await has(members, "webhooks")
        heard = asyncio.Event()
        server.kill()
        members.followers.append(lambda: None if members.alive else heard.set())
        await asyncio.wait_for(heard.wait(), 30)
        assert (told, members.duties.has("webhooks")) == ([True, False], False)
        server.start()
        await has(members, "webhooks")
        assert told == [True, False, True]


async def test_a_database_that_cannot_be_reached(postgres: PostgresServer) -> None:
    members = Membership("host=/nowhere user=postgres", "i", "a", "1.0")
    with pytest.raises(GatewayError, match="The database cannot be used") as raised:
        await asyncio.to_thread(members.open, "")
    assert "the setting `database`" in (raised.value.remedy or "")


def _kill(members: Membership) -> None:
    """End the heartbeats, and leave the gateway's entry in the database."""
    members._told = ("nobody", "nobody", "0")
    members.incarnation = "nobody"
    members.close()


async def test_gateways_tell_what_they_have_and_what_they_have_spent(join: Join) -> None:
    today = int(time.time() // 86400)
    spent = DaySpending(today, 2.0, 3.0, 0.5, 0.25)
    first = await join("a")
    first.reporter = lambda: GatewayReport({"x": {"f": (1, 2)}}, {"f": spent})
    second = await join("b")
    second.reporter = lambda: GatewayReport({}, {"f": DaySpending(today, 10.0, 20.0)})
    third = await join("c")

    async def seen() -> bool:
        return third.spent == {"f": DaySpending(today, 12.0, 23.0, 0.5, 0.25)} and len(third.reports) == 3

    await until(seen, "the spending of both")
    assert first.spent == {"f": DaySpending(today, 10.0, 20.0)}
    assert third.reports[first.incarnation] == {"x": {"f": [1, 2]}}
    assert first.told.spent == {"f": spent}


async def test_spending_outlives_its_gateway_for_a_day(join: Join, postgres_url: str) -> None:
    today = int(time.time() // 86400)
    first = await join("a")
    first.reporter = lambda: GatewayReport(
        {}, {"new": DaySpending(today, 2.0), "old": DaySpending(today - 3, 1.0)}
    )

    async def told() -> bool:
        return bool(first.told.spent)

    await until(told, "the first report")
    first.reporter = GatewayReport

    async def quiet() -> bool:
        return not await told()

    await until(quiet, "a heartbeat without spending")
    await asyncio.to_thread(_kill, first)
    second = await join("b")
    assert second.spent == {"new": DaySpending(today, 2.0)}
    with psycopg.connect(postgres_url) as connection:
        assert connection.execute("SELECT function FROM spent").fetchall() == [("new",)]


async def test_a_heartbeat_brings_only_spending_that_is_new(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    today = int(time.time() // 86400)
    first, second = await join("a"), await join("b")
    beats: list[dict[str, DaySpending]] = []
    note = second._note
    monkeypatch.setattr(second, "_note", lambda beat: (beats.append(dict(beat.spent)), note(beat)))
    rows = {"f": DaySpending(today, 1.0)}
    first.reporter = lambda: GatewayReport({}, rows)

    async def seen() -> bool:
        return bool(second.spent)

    await until(seen, "the spending")
    rows = {}

    async def quiet() -> bool:
        return len(beats) > 3 and not any(beats[-3:])

    await until(quiet, "heartbeats without spending")
    assert second.spent == {"f": DaySpending(today, 1.0)}


async def test_a_gateway_of_the_version_before_is_a_member_that_tells_nothing(
    join: Join, postgres_url: str
) -> None:
    members = await join("a", "webhooks")
    members.reporter = lambda: GatewayReport({"x": 1})
    await has(members, "webhooks")
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        before = "SELECT heartbeat('old', 'old', '0.9', 0, 10, '{webhooks}')"
        (told,) = connection.execute(before).fetchone() or ()

        async def seen() -> bool:
            return len(members.members) == 2

        await until(seen, "the older gateway")
        assert {one["name"] for one in told} == {"a", "old"}
        assert all(GatewayMember._fields == tuple(one) for one in told)
    assert set(members.reports) == {members.incarnation}
