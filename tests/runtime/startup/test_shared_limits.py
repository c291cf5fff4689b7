"""Limits of workers, quotas of keys and budgets over two gateways that share a PostgreSQL database. Gateways and PostgreSQL are real."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from typing import Any

import psycopg
import pytest
import pytest_asyncio
from live import Function, Gate, Gateway, failure, gateway_here, gateway_process, gone, short_folder, until
from pilotflame.runtime.ground.access import shared_quotas
from pilotflame.runtime.ground.billing.usage import Usage
from pilotflame.runtime.ground.storing import membership
from pilotflame.runtime.node.functions.live import Live
from postgres import PostgresServer, new_schema, postgres_server
from shared_gateways import gateways

pytestmark = pytest.mark.asyncio(loop_scope="module")
WAITS = (
    "import gate, os\ndef handler(event):\n    if event:\n        gate.wait(event)\n    return os.getpid()\n"
)
STAYS = {"scale.idle_timeout_s": 1000}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let gateways send heartbeats often, with counts of running requests over short windows."""
    monkeypatch.setattr(membership, "BEAT_S", 0.05)
    monkeypatch.setattr(shared_quotas, "WINDOW_S", 0.1)


@pytest.fixture(scope="module")
def url(postgres: PostgresServer) -> str:
    return new_schema(postgres.url, f"t{secrets.token_hex(8)}")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(url: str) -> AsyncIterator[list[Gateway]]:
    async with gateways(url) as found:
        yield found


async def deployed(pair: list[Gateway], gate: Gate | None = None, **settings: Any) -> list[Function]:
    """Deploy a function on the first gateway. Return it on each gateway."""
    sent = {**STAYS, **settings}
    first = await pair[0].deploy(WAITS, sent, gate=gate, name=f"f{secrets.token_hex(4)}", check=False)
    assert first.described["warnings"] == []
    return [first, *(gateway.function(first.name) for gateway in pair[1:])]


def live(gateway: Gateway, name: str) -> Live:
    assert gateway.server is not None
    return gateway.server.functions.get(name)


def share(gateway: Gateway, name: str) -> int:
    return live(gateway, name).workers.revision.policy.scale.max


async def so(condition: Callable[[], object], what: str) -> None:
    async def check() -> object:
        return condition()

    await until(check, what)


async def test_scale_max_holds_over_both(pair: list[Gateway], gate: Gate) -> None:
    first, second = await deployed(pair, gate, **{"scale.max": 2})
    calls = [asyncio.create_task(first.answer("one")) for _ in range(2)]
    begun = [await gate.next("one") for _ in range(2)]
    await so(lambda: share(pair[1], second.name) == 0, "no share on the second gateway")
    late = await second.error("other", X_Request_Timeout="0.2")
    assert (late["status"], "Other gateways have 2 workers" in late["message"]) == (504, True)
    other = asyncio.create_task(second.answer("other"))

    async def refused() -> bool:
        return "max (other gateways: 2) refuses 1" in (await second.status())["desired"]["because"]

    await until(refused, "the reason why no worker starts")
    # The first gateway gives up one of its workers when the worker's call has ended.
    await so(lambda: share(pair[0], first.name) == 1, "a share of one on the first gateway")
    assert [arrival.word for arrival in gate.arrived] == ["one", "one"]
    begun[0].go()
    (await gate.next("other")).go()
    assert isinstance(await other, int)
    gate.open()
    await asyncio.gather(*calls)


async def test_calls_of_a_replaced_revision_without_a_share_get_a_worker(
    pair: list[Gateway], gate: Gate
) -> None:
    """`scale.max` does not count the workers of replaced revisions, so no report gives them a share."""
    first, second = await deployed(pair, gate, **{"scale.max": 1})
    call = asyncio.create_task(first.answer("one"))
    await gate.next("one")
    await so(lambda: share(pair[1], second.name) == 0, "no share on the second gateway")
    other = asyncio.create_task(second.answer("other"))
    waiting = live(pair[1], second.name).workers.revision
    await so(lambda: len(waiting.dispatcher.queue) == 1, "a waiting call on the second gateway")
    await pair[1].deploy(f"{WAITS}\n", STAYS | {"scale.max": 1}, gate=gate, name=first.name, check=False)
    (await gate.next("other")).go()
    assert isinstance(await other, int)
    gate.open()
    await call


async def test_an_idle_worker_ends_for_calls_at_another_gateway(pair: list[Gateway]) -> None:
    functions = await deployed(pair, **{"scale.max": 1})
    assert isinstance(await functions[0].answer(), int)
    await so(lambda: share(pair[1], functions[1].name) == 0, "no share on the second gateway")
    assert isinstance(await functions[1].answer(), int)

    async def one_is_left() -> bool:
        """Return True if at most one worker is left. Both end if each gateway reads the other's report before its end."""
        counts = [(await function.status())["workers"] for function in functions]
        return sum(sum(count.values()) for count in counts) <= 1

    await until(one_is_left, "the end of one worker")
    histories = [live(gateway, functions[0].name).function.decisions.since(0) for gateway in pair]
    stops = [one.action for history in histories for one in history if one.cause == "elsewhere"]
    assert stops in (["stop"], ["stop"] * 2)
    assert [isinstance(await function.answer(), int) for function in functions] == [True, True]


async def test_the_limit_of_an_owner_holds_over_both(postgres_url: str, gate: Gate) -> None:
    async with gateways(postgres_url) as pair, pair[0].at_home() as home:
        key = {
            "name": "team",
            "scopes": ["deploy", "invoke"],
            "max_workers": 1,
            "policy": {"kind": "trusted"},
        }
        found = (await home.post("/v1/keys", json=key)).json()
        for gateway in pair:
            gateway.client.headers["Authorization"] = f"Bearer {found['key']}"
        await so(lambda: all(most(one, found["id"]) for one in pair), "the key on both gateways")
        first, _ = await deployed(pair, gate)
        _, second = await deployed(pair, gate)
        call = asyncio.create_task(first.answer("first"))
        arrival = await gate.next("first")
        await so(lambda: most(pair[1], found["id"]) == 0, "no share on the second gateway")
        late = await second.error("second", X_Request_Timeout="0.2")
        assert "Other gateways have the others" in late["message"]
        other = asyncio.create_task(second.answer("second"))
        arrival.go()
        await call
        # The idle worker of the first function ends for the call at the second gateway, although no call waits at the first gateway.
        (await gate.next("second")).go()
        await first.settled()
        await other


def most(gateway: Gateway, owner: str) -> int | None:
    assert gateway.server is not None
    return gateway.server.node.revisions.reconciler.limits.of_owner(owner)


async def test_quotas_hold_over_both(postgres_url: str) -> None:
    async with gateways(postgres_url) as pair:
        first, second = await deployed(pair)
        key, headers = await made(pair, rate_per_s=0.01, burst=6)
        assert [(await first.call(**headers)).status_code for _ in range(4)] == [200] * 4
        await so(lambda: meters(pair[1])[key]._requests.level < 2.1, "the requests of the first gateway")
        assert [(await second.call(**headers)).status_code for _ in range(3)] == [200, 200, 429]


async def test_a_key_that_sends_one_request_at_a_time_over_both(postgres_url: str, gate: Gate) -> None:
    async with gateways(postgres_url) as pair:
        functions = await deployed(pair, gate)
        key, headers = await made(pair, concurrency=1)
        for number in range(20):
            assert (await functions[number % 2].call(**headers)).status_code == 200
        # At first, each gateway admits one request.
        calls = [asyncio.create_task(function.call("held", **headers)) for function in functions]
        for _ in functions:
            await gate.next("held")
        await so(lambda: sum(meters(one)[key].elsewhere for one in pair) == 1, "the request of the other")
        other = next(
            function for function, one in zip(functions, pair, strict=True) if meters(one)[key].elsewhere
        )
        gate.open()
        await asyncio.gather(*calls)
        assert failure(await other.call(**headers))["details"]["limit"] == "concurrency"


async def made(pair: list[Gateway], **limits: Any) -> tuple[str, dict[str, str]]:
    """Make an API key with limits. Return its id, and the headers of its requests, when both gateways have it."""
    async with pair[0].at_home() as home:
        key = (await home.post("/v1/keys", json={"name": "k", "scopes": ["invoke"], **limits})).json()
    await so(lambda: all(key["id"] in meters(one) for one in pair), "the key on both gateways")
    return key["id"], {"Authorization": f"Bearer {key['key']}"}


def meters(gateway: Gateway) -> dict[str, Any]:
    assert gateway.server is not None
    shares: Any = gateway.server.node.revisions.reconciler.limits.of_owner
    found: dict[str, Any] = shares.__self__._of_owner.__self__.meters()
    return found


async def test_a_budget_holds_over_both_and_after_a_death(postgres_url: str) -> None:
    settings = {"budget.seconds_per_day": 4, **STAYS}
    with short_folder() as folder, short_folder() as own:
        async with gateway_here(own / "state", database=postgres_url) as other:
            async with gateway_process(folder / "state", database=postgres_url) as killed:
                function = await killed.deploy("def handler(event):\n    return 1\n", settings, name="f")
                live(other, "f").function.account._add(Usage(busy_s=3))
                await _exhausted(killed, other)
                assert killed.process is not None
                killed.process.kill()
                await gone(killed.process.pid)
            with psycopg.connect(postgres_url) as connection:
                rows = connection.execute("SELECT seconds FROM spent").fetchall()
            # If the gateways did not share the budget, the killed gateway would have used 4 s, and both together 7 s.
            assert (len(rows), sum(seconds for (seconds,) in rows) < 7) == (2, True)
            async with gateway_here(folder / "state", database=postgres_url) as again:
                await _exhausted(again, other)
                reset = await other.client.post(f"/v1/functions/{function.name}/reset")
                assert reset.status_code == 200

                async def goes_on() -> bool:
                    return (await again.function("f").call(1)).status_code == 200

                await until(goes_on, "an answer after the reset at the other gateway")


async def _exhausted(*gateways: Gateway) -> None:
    for gateway in gateways:

        async def refused(gateway: Gateway = gateway) -> bool:
            answer = await gateway.function("f").call(1)
            return answer.status_code == 503 and failure(answer)["type"] == "budget_exhausted"

        await until(refused, "the end of the budget")


async def test_without_the_database_a_gateway_uses_its_part_of_a_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(membership, "LEASE_S", 2.0)
    with postgres_server() as server:
        async with gateways(server.url) as pair:
            functions = await deployed(pair, **{"budget.seconds_per_day": 1000, "scale.max": 1})
            account = live(pair[1], functions[1].name).function.account
            account._add(Usage(busy_s=400))
            await so(
                lambda: live(pair[0], functions[0].name).function.account.spent.seconds >= 400, "the spending"
            )
            await functions[0].answer()
            await so(lambda: share(pair[1], functions[1].name) == 0, "no share on the second gateway")
            server.kill()
            await so(lambda: account._reserved.seconds, "the part of the other gateway")
            # The second gateway cannot know whether the first one is alive. It serves calls, although its share was 0.
            assert isinstance(await functions[1].answer(), int)
            account._add(Usage(busy_s=290))
            account.check()
            assert isinstance(await functions[1].answer(), int)
            account._add(Usage(busy_s=30))
            account.check()
            refused = await functions[1].error()
            assert (refused["type"], "cannot be reached" in refused["message"]) == ("budget_exhausted", True)
            server.start()

            async def accepted() -> bool:
                return (await functions[1].call()).status_code == 200

            await until(accepted, "the rest of the budget")
