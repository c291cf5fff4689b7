"""Gateways that share a PostgreSQL database, with jobs, waiting callers, webhooks and deaths. Gateways, workers and PostgreSQL are real."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
import pytest_asyncio
from live import (
    Function,
    Gate,
    Gateway,
    failure,
    gateway_here,
    gateway_process,
    gone,
    short_folder,
    until,
)
from pilotflame.errors import GatewayError
from pilotflame.runtime.ground.access.secrets import Secrets
from pilotflame.runtime.ground.settings.function_settings import FunctionSettings
from pilotflame.runtime.ground.settings.gateway_settings import GatewaySettings
from pilotflame.runtime.ground.storing import membership
from pilotflame.runtime.ground.storing.postgres import PostgresConnection, migrate
from pilotflame.runtime.ground.storing.revision_index import FunctionEntry
from pilotflame.runtime.jobs.alerting import conditions
from pilotflame.runtime.jobs.alerting.alerts import ALERTS
from pilotflame.runtime.node.functions import shared_revisions
from pilotflame.runtime.startup.joining import INCARNATION_FILE
from pilotflame.runtime.startup.server import serve
from postgres import PostgresServer, new_schema, postgres_server
from pydantic import SecretStr
from receiver import receiving
from shared_gateways import Group, Shared, gateways

pytestmark = pytest.mark.asyncio(loop_scope="module")
SIGNS = """
import gate, pathlib
NAME = pathlib.Path(__file__).parents[5].name
async def handler(event):
    if event == "held":
        await gate.wait_async(NAME)
    return NAME
"""
"""A handler that returns the name of its gateway: the name of the folder that contains the gateway's state folder."""
ONE = {"scale.max": 1}
LOCAL = {"webhook_networks": ["127.0.0.0/8"]}


@pytest.fixture(scope="module")
def url(postgres: PostgresServer) -> str:
    return new_schema(postgres.url, f"t{secrets.token_hex(8)}")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(url: str) -> AsyncIterator[list[Gateway]]:
    async with gateways(url, **LOCAL) as found:
        yield found


async def deployed(gateways: list[Gateway], gate: Gate, settings: dict[str, Any] = ONE) -> list[Function]:
    """Deploy a function on the first gateway. Return it on each gateway: all have it when the deploy is answered."""
    first = await gateways[0].deploy(SIGNS, settings, gate=gate, name=f"f{secrets.token_hex(4)}")
    assert first.described["warnings"] == []
    return [first, *(gateway.function(first.name) for gateway in gateways[1:])]


def _name(gateway: Gateway) -> str:
    return gateway.state.parent.name


async def run(function: Function, event: Any, **more: Any) -> str:
    answer = await function.client.post(f"/v2/{function.name}/run", json={"input": event, **more})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


async def ended(function: Function, job: str) -> dict[str, Any]:
    """Wait for the end of a job, and return it."""
    answer = await function.client.get(f"/v2/{function.name}/status-sync/{job}?wait=60000")
    found: dict[str, Any] = answer.json()
    assert found["status"] not in ("IN_QUEUE", "IN_PROGRESS"), found
    return found


async def test_a_gateway_waits_for_a_job_that_runs_on_another_one(pair: list[Gateway], gate: Gate) -> None:
    functions = await deployed(pair, gate)
    job = await run(functions[0], "held")
    arrival = await gate.next()
    other = functions[_name(pair[0]) == arrival.word]
    waiting = asyncio.create_task(ended(other, job))
    arrival.go()
    found = await waiting
    assert (found["status"], found["output"]) == ("COMPLETED", arrival.word)


async def test_a_deploy_is_on_all_gateways_when_it_is_answered(pair: list[Gateway]) -> None:
    name = f"f{secrets.token_hex(4)}"
    for number in range(4):
        at = pair[number % 2]
        await at.deploy(f"def handler(event):\n    return {number}\n", name=name)
        assert [await gateway.function(name).answer(0) for gateway in pair] == [number] * 2
    client = pair[0].client
    assert (await client.post(f"/v1/functions/{name}/rollback")).status_code == 200
    assert [await gateway.function(name).answer(0) for gateway in pair] == [2, 2]
    assert (await client.post(f"/v1/functions/{name}/pause")).status_code == 200
    assert [failure(await gateway.function(name).call(0))["type"] for gateway in pair] == [
        "function_paused"
    ] * 2
    assert (await client.delete(f"/v1/functions/{name}")).status_code == 200
    assert [(await gateway.function(name).call(0)).status_code for gateway in pair] == [404, 404]


async def test_a_new_gateway_serves_what_the_others_serve(pair: list[Gateway], url: str) -> None:
    function = await pair[0].deploy("def handler(event):\n    return 7\n")
    with short_folder() as folder:
        async with gateway_here(folder / "state", database=url) as third:
            assert await third.function(function.name).answer(0) == 7


async def test_gateways_share_a_queue(pair: list[Gateway], gate: Gate) -> None:
    """A gateway claims no more jobs than its workers can soon run. If one gateway has all workers that `scale.max` allows, it may
    run all jobs.
    """
    first, second = await deployed(pair, gate, {"scale.max": 2})
    jobs = [await run(first, "held") for _ in range(30)]
    for _ in range(2):
        await gate.next()
    gate.open()
    found = await asyncio.gather(*(ended(second, job) for job in jobs))
    assert {one["status"] for one in found} == {"COMPLETED"}
    ran = {one["output"] for one in found}
    assert ran == {arrival.word for arrival in gate.arrived} <= {_name(gateway) for gateway in pair}


async def test_a_job_that_another_gateway_has_cancelled_leaves_its_worker(
    pair: list[Gateway], gate: Gate
) -> None:
    functions = await deployed(pair, gate)
    job = await run(functions[0], "held")
    arrival = await gate.next()
    other = functions[_name(pair[0]) == arrival.word]
    cancelled = await other.client.post(f"/v2/{other.name}/cancel/{job}")
    assert cancelled.json()["status"] == "CANCELLED"
    await arrival.left()
    assert (await ended(other, job))["status"] == "CANCELLED"


async def test_one_gateway_sends_webhooks(pair: list[Gateway], gate: Gate) -> None:
    functions = await deployed(pair, gate)
    async with receiving() as receiver:
        jobs = [await run(function, "free", webhook=f"{receiver.url}/done") for function in functions * 10]
        came = await receiver.received(len(jobs))
    assert len({one.id for one in came}) == len(came) == len(jobs)
    senders = [one for one in pair if one.server is not None and one.server.jobs._duties.has("webhooks")]
    assert len(senders) == 1


async def test_one_gateway_sends_alerts_and_another_one_sends_their_ends(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conditions, "MIN_CALLS", 4)
    monkeypatch.setattr(conditions, "PAUSE_S", 0.0)
    fails, name = "def handler(event):\n    assert not event\n", "fails"
    async with receiving() as receiver, contextlib.AsyncExitStack() as stack:
        settings = {"alerts.url": f"{receiver.url}/alerts", "alerts.error_share": 0.5}
        states = [stack.enter_context(short_folder()) / "state" for _ in range(2)]
        async with gateway_here(states[0], database=postgres_url, **LOCAL) as first:
            await _judges(first)
            second = await stack.enter_async_context(gateway_here(states[1], database=postgres_url, **LOCAL))
            functions = [await second.deploy(fails, settings, name=name), first.function(name)]
            # Only the calls of both gateways together are enough for an alert.
            for function in (functions[0], *functions, functions[0]):
                await function.call(1)
            (came,) = await receiver.received(1)
            assert (came.event, json.loads(came.body)["data"]["errors"]) == ("alert.begun", 4)
        await _judges(second)

        async def told() -> bool:
            await functions[0].answer(0)
            return len(receiver.came) > 1

        await until(told, "the end of the alert")
        assert [came.event for came in receiver.came] == ["alert.begun", "alert.ended"]


async def _judges(gateway: Gateway) -> None:
    async def so() -> bool:
        assert gateway.server is not None
        return gateway.server.jobs._duties.has(ALERTS)

    await until(so, "the duty of alerts")


async def test_gateways_share_keys_and_secrets(pair: list[Gateway], gate: Gate) -> None:
    sources = {"handler.py": "import os\ndef handler(event):\n    return os.environ.get('TOKEN', '')\n"}
    name = f"f{secrets.token_hex(4)}"
    first = await pair[0].deploy(None, name=name, files=sources)
    second = pair[1].function(name)
    assert await second.answer(1) == ""
    await first.client.put(f"/v1/functions/{name}/secrets/TOKEN", json={"value": "shared"})

    async def renewed() -> bool:
        return await second.answer(1) == "shared"

    await until(renewed, "a worker with the secret")


async def test_a_gateway_that_lags_behind_gives_no_secret_to_the_next_function_of_a_name(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = PostgresConnection(postgres_url)
    migrate(connection)
    connection.close()
    group, source = Group(postgres_url), "def handler(event):\n    return 1\n"
    with short_folder() as first, short_folder() as second:
        async with (
            group.member("one", first / "state") as one,
            group.member("other", second / "state") as other,
        ):
            group.leave("other")
            path = "/v1/functions/passed-on/secrets/TOKEN"

            async def told() -> tuple[int, bool]:
                answer = await other.gateway.client.put(path, json={"value": "x"})
                assert other.gateway.server is not None
                return answer.status_code, bool(other.gateway.server.functions.secrets.of("passed-on"))

            assert await told() == (200, True)
            await other.gateway.client.delete(path)
            await one.gateway.deploy(source, name="passed-on")
            assert await told() == (404, False)
            await other.follower.follow()
            await other.even()
            await until(served(other), "the function")
            assert await told() == (200, True)
            await other.gateway.client.delete(path)
            # Delete the function when the gateway has stored the secret, before it answers.
            set_secret = Secrets.set

            def deletes_after(found: Secrets, *args: str) -> bool:
                replaced = set_secret(found, *args)
                one.revisions.index.change("passed-on", lambda _: FunctionEntry("passed-on", deleted=True))
                return replaced

            monkeypatch.setattr(Secrets, "set", deletes_after)
            assert await told() == (404, False)
            monkeypatch.undo()
            assert await told() == (404, False)


def served(member: Shared) -> Callable[[], Awaitable[bool]]:
    async def serves() -> bool:
        return bool(member.live("passed-on"))

    return serves


async def test_gateways_share_keys(postgres_url: str) -> None:
    async with gateways(postgres_url, **LOCAL) as pair, pair[0].at_home() as home, pair[1].at_home() as other:
        made = (await home.post("/v1/keys", json={"name": "team", "scopes": ["read"]})).json()
        headers = {"Authorization": f"Bearer {made['key']}"}

        async def status(headers: dict[str, str]) -> int:
            return (await pair[1].client.get("/v1/usage", headers=headers)).status_code

        async def closed() -> bool:
            return await status({}) == 401 and await status(headers) == 200

        await until(closed, "the key on the other gateway")
        assert (await other.delete(f"/v1/keys/{made['id']}")).status_code == 200

        async def refused() -> bool:
            return (await pair[0].client.get("/v1/usage", headers=headers)).status_code == 401

        await until(refused, "the end of the key on the first gateway")


async def test_the_gateways_are_listed(pair: list[Gateway]) -> None:
    answer = await pair[1].client.get("/v1/nodes")
    rows = [one for one in answer.json()["nodes"] if one["alive"]]
    assert [one["this"] for one in rows].count(True) == 1
    assert len(rows) == len(pair)
    duties = sorted(duty for one in rows for duty in one["duties"] if not duty.startswith("sources"))
    assert duties == ["alerts", "webhooks"]
    command = [sys.executable, "-m", "pilotflame.runtime.cli", "nodes", "--url", pair[1].url]
    shown = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)
    assert shown.stdout.count("live") == len(pair)
    assert shown.stdout.count("* ") == 1


async def test_a_gateway_that_is_alone_is_listed(state: Path) -> None:
    async with gateway_here(state) as gateway:
        (only,) = (await gateway.client.get("/v1/nodes")).json()["nodes"]
    assert (only["this"], only["alive"], only["duties"]) == (True, True, [])


async def test_jobs_of_a_killed_gateway_run_on_another_one(
    postgres_url: str, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Shorten the lease. A gateway queues the jobs of a dead gateway again only if it has itself run for the time of a lease.
    monkeypatch.setattr(membership, "LEASE_S", 2.0)
    with short_folder() as folder:
        async with gateway_process(folder / "state", database=postgres_url) as killed:
            function = await killed.deploy(SIGNS, ONE, name="killed", gate=gate)
            jobs = [await run(function, "held") for _ in range(3)]
            await gate.next(folder.name)
            async with gateway_here(folder / "other" / "state", database=postgres_url) as other:
                assert killed.process is not None
                killed.process.kill()
                await gone(killed.process.pid)
                gate.open()
                _end_lease(postgres_url, (folder / "state" / INCARNATION_FILE).read_text())
                found = [await ended(other.function("killed"), job) for job in jobs]
    assert [(one["status"], one["output"]) for one in found] == [("COMPLETED", "other")] * 3


async def test_a_gateway_that_starts_again_takes_its_jobs_at_once(postgres_url: str, gate: Gate) -> None:
    """The gateway does not wait until the lease of its last run has ended."""
    with short_folder() as folder:
        async with gateway_process(folder / "state", database=postgres_url) as killed:
            function = await killed.deploy(SIGNS, ONE, gate=gate)
            job = await run(function, "held")
            await gate.next()
            assert killed.process is not None
            killed.process.kill()
            await gone(killed.process.pid)
        gate.open()
        async with gateway_here(folder / "state", database=postgres_url) as again:
            assert (await ended(again.function(function.name), job))["output"] == folder.name


async def test_calls_go_on_while_the_database_is_away(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "LEASE_S", 2.0)
    with postgres_server() as server, short_folder() as folder:
        async with gateway_here(folder / "state", database=server.url) as gateway:
            function = await gateway.deploy(SIGNS, ONE, gate=gate)
            job = await run(function, "free")
            assert (await ended(function, job))["status"] == "COMPLETED"
            server.kill()
            assert await function.answer("free") == folder.name
            refused = await gateway.client.post(f"/v2/{function.name}/run", json={"input": 1})
            assert (failure(refused)["status"], int(refused.headers["retry-after"]) > 0) == (503, True)
            for path in (function.path, f"/v2/{function.name}/runsync", "/v1/functions"):
                await until(lambda path=path: _marked(gateway, path, stale=True), "the mark of old revisions")
            server.start()
            await until(lambda: _marked(gateway, function.path, stale=False), "answers without a mark")

            async def accepted() -> bool:
                again = await gateway.client.post(f"/v2/{function.name}/run", json={"input": 1})
                return again.status_code == 200 and bool(await ended(function, again.json()["id"]))

            await until(accepted, "a job after the database was away")


async def _marked(gateway: Gateway, path: str, *, stale: bool) -> bool:
    answer = await gateway.client.post(path, json={"input": "free"})
    return (answer.headers.get("X-Revision-Stale") == "true") is stale


async def test_a_gateway_that_cannot_serve_a_new_revision_marks_the_old_one(
    pair: list[Gateway], monkeypatch: pytest.MonkeyPatch
) -> None:
    function = await pair[0].deploy(SIGNS)
    # The next deploy need not wait for the gateway that cannot follow.
    monkeypatch.setattr(shared_revisions, "SETTLE_S", 0.1)
    fails = f"{SIGNS}assert NAME != {_name(pair[1])!r}\n"
    described = (await pair[0].deploy(fails, name=function.name)).described
    assert "may not serve the latest change" in described["warnings"][0]
    await until(lambda: _marked(pair[1], function.path, stale=True), "the mark of the old revision")
    assert await _marked(pair[0], function.path, stale=False)
    await pair[0].deploy(SIGNS, name=function.name)
    await until(lambda: _marked(pair[1], function.path, stale=False), "the newest revision")


async def test_a_gateway_of_one_function_shares_no_database(state: Path, postgres_url: str) -> None:
    settings = GatewaySettings(state_dir=state, port=0, database=SecretStr(postgres_url))
    with pytest.raises(GatewayError, match="shares no database"):
        async with serve(settings, FunctionSettings(name="only")):
            pass


async def test_a_gateway_brings_its_functions_unless_there_are_others_of_these_names(
    postgres_url: str,
) -> None:
    with short_folder() as folder:
        for number, path in enumerate((folder / "own" / "state", folder / "clash" / "state")):
            path.parent.mkdir()
            async with gateway_here(path) as gateway:
                await gateway.deploy(f"def handler(event):\n    return {number}\n", name="both")
                await gateway.deploy(f"def handler(event):\n    return {number}\n", name=f"only{number}")
        async with gateways(postgres_url, **LOCAL) as pair:
            await pair[0].deploy("def handler(event):\n    return -1\n", name="both")
            assert (await pair[0].client.delete("/v1/functions/both")).status_code == 200
            async with gateway_here(folder / "own" / "state", database=postgres_url) as joined:
                assert [await joined.function(name).answer(0) for name in ("both", "only0")] == [0, 0]
                await joined.deploy("def handler(event):\n    return 5\n", name="last")
                assert [await pair[1].function(name).answer(0) for name in ("both", "only0", "last")] == [
                    0,
                    0,
                    5,
                ]
            with pytest.raises(GatewayError, match="different functions of these names: both"):
                async with gateway_here(folder / "clash" / "state", database=postgres_url):
                    pass


async def test_a_gateway_does_not_start_without_its_database(state: Path) -> None:
    with pytest.raises(Exception, match="The database cannot be used") as raised:
        async with gateway_here(state, database="host=/nowhere user=postgres"):
            pass
    assert "the setting `database`" in str(getattr(raised.value, "remedy", ""))


def _end_lease(url: str, incarnation: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        ended = connection.execute("UPDATE nodes SET until = now() WHERE incarnation = %s", [incarnation])
        assert ended.rowcount == 1
