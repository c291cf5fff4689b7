"""What functions use and what their budgets stop, with real workers, over real HTTP."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
from live import TRUSTED, Function, Gate, Gateway, failure, gateway_here, short_folder, until
from pilotflame.errors import GatewayError
from pilotflame.runtime.ground.billing import budget
from pilotflame.runtime.ground.billing.budget import BudgetSpec
from pilotflame.runtime.ground.billing.ledger import Ledger
from pilotflame.runtime.ground.billing.usage import Prices, Usage
from pilotflame.runtime.ground.billing.usage_store import (
    Standing,
    UsageKey,
    UsageQuery,
    UsageRecord,
    UsageStore,
)
from pilotflame.runtime.ground.telemetry.metrics import Totals

pytestmark = pytest.mark.asyncio(loop_scope="module")

ECHO = "def handler(event):\n    return event\n"
WAITS = "import gate\ndef handler(event):\n    gate.wait(str(event))\n    return event\n"
# A price of memory at which a worker of a few MB soon costs a whole unit of money.
DEAR = 1e9


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[Gateway]:
    with short_folder() as folder, pytest.MonkeyPatch.context() as patch:
        measure_at_once(patch)
        async with gateway_here(folder / "state", drain_s=5.0, price_memory_gb_hour=36.0) as found:
            yield found


def measure_at_once(patch: pytest.MonkeyPatch) -> None:
    """Measure memory soon after each change. Otherwise measurements would have long pauses, because they take long here: the
    tests and the gateway are one large process.
    """
    for name, seconds in (("FIRST_S", 0.01), ("SETTLE_S", 0.01), ("PAUSE", 0.0)):
        patch.setattr(f"pilotflame.runtime.node.measuring.node_memory.{name}", seconds)


async def usage(gateway: Gateway, **query: Any) -> dict[str, Any]:
    response = await gateway.client.get("/v1/usage", params=query)
    assert response.status_code == 200, response.text
    return dict(response.json())


async def used(gateway: Gateway, function: Function) -> dict[str, float]:
    return dict((await usage(gateway, function=function.name))["total"])


async def exhausted(function: Function) -> dict[str, Any]:
    """Wait until the status says that the budget is used up."""

    async def so() -> bool:
        return (await function.status())["budget"]["state"] == "exhausted"

    await until(so, "the end of the budget")
    return await function.status()


async def spend(function: Function) -> None:
    """Start a worker with a call, and wait until the worker has used up the budget."""
    await function.answer(1)
    await exhausted(function)


# -- usage


async def test_seconds_memory_money_and_calls_of_a_function_are_summed_up(gateway, deploy, gate: Gate):
    function = await deploy(WAITS, {"scale.idle_timeout_s": 60}, gate=gate)
    call = asyncio.create_task(function.answer(1))
    await gate.next("1")
    first = await used(gateway, function)

    async def grown() -> bool:
        found = await used(gateway, function)
        # The memory of the worker was measured too, beside that of the zygote.
        measured = found["memory_gb_s"] > found["holding_gb_s"] > 0
        return measured and found["busy_s"] > first["busy_s"] and found["always_on_cost"] > found["cost"] > 0

    await until(grown, "seconds of the worker that is busy")
    gate.open()
    await call
    found = await used(gateway, function)
    # The worker that the deploy has started is not counted.
    assert (found["invocations"], found["cold_starts"], found["activations"]) == (1, 1, 1)
    assert 0 < found["waiting_s"] < found["starting_s"] + found["zygote_s"] + found["local_s"]
    workers_s = found["busy_s"] + found["idle_s"] + found["starting_s"]
    assert 0 < found["occupied_s"] <= workers_s
    # At 36 a GB and hour, money is a hundredth of the GB seconds; files cost next to nothing.
    assert found["cost"] == pytest.approx(found["memory_gb_s"] / 100, rel=1e-3)
    assert found["disk_gb_s"] > 0
    # Holding is the zygote, the standby, the files and the worker before its call. The worker's busy time is not holding.
    assert 0 < found["holding_gb_s"] < found["memory_gb_s"]
    assert 0 < found["holding_cost"] < found["cost"]
    assert found["device_s"] == 0


async def test_an_idle_worker_is_not_busy_and_zero_is_neither(gateway, deploy):
    function = await deploy(ECHO, {"scale.idle_timeout_s": 0})
    await function.answer(1)
    await function.settled(zygote=True)
    before = await used(gateway, function)

    async def rested() -> bool:
        return (await used(gateway, function))["zygote_s"] > before["zygote_s"]

    await until(rested, "seconds with a zygote only")
    after = await used(gateway, function)
    assert (after["busy_s"], after["idle_s"]) == (before["busy_s"], before["idle_s"])


async def test_usage_of_all_functions_is_grouped_and_the_metrics_agree(gateway, deploy):
    one, other = await deploy(ECHO), await deploy(ECHO)
    await one.answer(1)
    rows = (await usage(gateway))["rows"]
    costs = [row["usage"]["cost"] for row in rows]
    assert costs == sorted(costs, reverse=True)
    by_function = {row["key"]: row["usage"] for row in rows}
    assert {one.name, other.name} <= by_function.keys()
    assert by_function[one.name]["invocations"] == 1
    assert by_function[other.name]["invocations"] == 0
    for by, length in (("hour", 3600), ("day", 86400)):
        found = await usage(gateway, by=by)
        (row,) = found["rows"][-1:]
        start = time.mktime(time.strptime(row["key"], "%Y-%m-%dT%H:%M:%S.000Z")) - time.timezone
        assert start % length == 0
        assert found["total"]["invocations"] >= 1
    text = (await gateway.client.get("/metrics")).text
    assert f'pilotflame_rung_seconds_total{{function="{one.name}",rung="ready"}}' in text
    assert f'pilotflame_cost_total{{function="{one.name}"}}' in text


async def test_usage_outlives_deploys_a_delete_and_the_gateway(state):
    async with gateway_here(state) as gateway:
        function = await gateway.deploy(ECHO, name="kept")
        await function.answer(1)
        await gateway.deploy(ECHO, name="kept")
        await gateway.function("kept").answer(2)
        deleted = await gateway.deploy(ECHO, name="gone")
        await deleted.answer(3)
        assert (await gateway.client.delete("/v1/functions/gone")).status_code == 200
        assert (await used(gateway, deleted))["invocations"] == 1
        before = await used(gateway, function)
    async with gateway_here(state) as gateway:
        function = gateway.function("kept")
        after = await used(gateway, function)
        # The workers that deploys start are not counted.
        assert (after["invocations"], after["activations"]) == (2, before["activations"]) == (2, 1)
        assert after["busy_s"] >= before["busy_s"] > 0
        await function.answer(4)
        assert (await used(gateway, function))["invocations"] == 3
        assert (await used(gateway, gateway.function("gone")))["invocations"] == 1


async def test_what_is_used_is_written_while_the_gateway_runs(state, monkeypatch):
    monkeypatch.setattr("pilotflame.runtime.ground.billing.ledger.WRITE_EVERY_S", 0.05)
    async with gateway_here(state) as gateway:
        await (await gateway.deploy(ECHO, name="kept")).answer(1)
        # A second reader sees the rows that a kill of the gateway would leave.
        found = UsageStore(state / "usage.sqlite3")
        found.open()

        async def written() -> bool:
            rows = found.read(UsageQuery(UsageKey.FUNCTION, 0.0, 1e11, ("kept",)), time.time())
            return [usage.invocations for _, usage in rows] == [1]

        await until(written, "the write of the first minute")
        found.close()


async def test_a_restricted_key_sees_the_usage_of_its_functions_only(state):
    async with gateway_here(state) as gateway:
        async with gateway.at_home() as home:
            for name in ("mine", "theirs"):
                response = await home.post(
                    "/v1/keys", json={"name": name, "scopes": ["deploy", "invoke"], "policy": TRUSTED}
                )
                token = response.json()["key"]
                gateway.client.headers["Authorization"] = f"Bearer {token}"
                await (await gateway.deploy(ECHO, name=name)).answer(1)
            fields = {"name": "reader", "scopes": ["read"], "functions": ["mine"]}
            token = (await home.post("/v1/keys", json=fields)).json()["key"]
        owners = {row["key"] for row in (await usage(gateway, by="owner"))["rows"]}
        gateway.client.headers["Authorization"] = f"Bearer {token}"
        assert [row["key"] for row in (await usage(gateway))["rows"]] == ["mine"]
        mine = (await usage(gateway, by="owner"))["rows"]
        assert len(owners - {"(node)"}) == 2
        assert {row["key"] for row in mine} < owners
        assert (await usage(gateway))["total"]["invocations"] == 1
        response = await gateway.client.get("/v1/usage", params={"function": "theirs"})
        assert failure(response)["type"] == "unknown_function"


async def test_a_deploy_with_another_key_leaves_the_last_owner_what_was_used(state):
    owners = list[str]()
    async with gateway_here(state) as gateway:
        async with gateway.at_home() as home:
            for name in ("old", "new"):
                key = (
                    await home.post(
                        "/v1/keys", json={"name": name, "scopes": ["deploy", "invoke"], "policy": TRUSTED}
                    )
                ).json()
                gateway.client.headers["Authorization"] = f"Bearer {key['key']}"
                function = await gateway.deploy(ECHO, name="shared")
                await function.answer(1)
                owners.append(key["id"])
        rows = {row["key"]: row["usage"] for row in (await usage(gateway, by="owner"))["rows"]}
        assert [rows[owner]["invocations"] for owner in owners] == [1, 1]
        assert rows[owners[0]]["cold_starts"] == 1
        before = {owner: rows[owner]["busy_s"] for owner in owners}
    async with gateway_here(state) as gateway, gateway.at_home() as home:
        found = (await home.get("/v1/usage", params={"by": "owner"})).json()["rows"]
        rows = {row["key"]: row["usage"] for row in found}
        assert [rows[owner]["invocations"] for owner in owners] == [1, 1]
        assert rows[owners[0]]["busy_s"] == pytest.approx(before[owners[0]])


@pytest.mark.parametrize(
    "query", [{"by": "week"}, {"since": "now"}, {"since": "-1e11"}, {"until": "1e99"}, {"function": "../a"}]
)
async def test_a_query_that_is_wrong_is_refused_by_name(gateway, query):
    error = failure(await gateway.client.get("/v1/usage", params=query))
    assert (error["status"], error["type"]) == (400, "bad_json")


# -- what is written


class Spent:
    """A revision that has used five seconds and uses no more."""

    worker_total = 0

    def usage(self, now_s: float) -> Usage:
        return Usage(busy_s=5.0)

    def on_budget(self, *, changed: bool) -> None: ...


def ledger_in(folder: Path) -> Ledger:
    ledger = Ledger(UsageStore(folder / "usage.sqlite3"), Prices(), lambda _function: Totals({}))
    ledger.open()
    return ledger


async def test_usage_that_a_cancelled_write_could_not_store_is_stored_by_the_next(
    tmp_path, monkeypatch
) -> None:
    ledger, begun, goes_on = ledger_in(tmp_path), threading.Event(), threading.Event()
    account, spent = ledger.account("f"), Spent()
    account.attach(spent)
    account.open(BudgetSpec(), "")
    add = UsageStore.add

    def fails(*_: Any) -> None:
        begun.set()
        goes_on.wait(10)
        raise GatewayError("The disk is full.")

    monkeypatch.setattr(UsageStore, "add", fails)
    writing = asyncio.create_task(ledger.write())
    await asyncio.to_thread(begun.wait, 10)
    writing.cancel()
    await asyncio.wait([writing])
    goes_on.set()
    monkeypatch.setattr(UsageStore, "add", add)
    async with asyncio.timeout(10):
        while not account.to_write().get("", Usage()).busy_s:
            await asyncio.sleep(0.01)
    await ledger.write()
    assert [used.busy_s for _, used in await ledger.read(UsageQuery(UsageKey.FUNCTION, 0.0, 1e11))] == [5.0]
    account.detach(spent)
    await ledger.close()


async def test_requests_go_on_while_many_accounts_are_settled(tmp_path: Path) -> None:
    turn, settled_in = 0, list[int]()

    async def request() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    def totals(_function: str) -> Totals:
        settled_in.append(turn)
        return Totals({})

    ledger = Ledger(UsageStore(tmp_path / "usage.sqlite3"), Prices(), totals)
    ledger.open()
    for number in range(20):
        ledger.account(f"f{number}")
    task = asyncio.create_task(request())
    await ledger.close()
    task.cancel()
    assert len(set(settled_in)) == 20


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The wall clock of ledgers and accounts. The test sets `at`."""
    found = SimpleNamespace(at=20_779 * 86400.0 + 3600, time=lambda: found.at, monotonic=time.monotonic)
    for module in ("ground.billing.ledger", "ground.billing.account"):
        monkeypatch.setattr(f"pilotflame.runtime.{module}.time", found)
    return found


async def test_nothing_is_kept_of_a_deleted_function_on_the_next_day(tmp_path, clock):
    ledger = ledger_in(tmp_path)
    account, spent = ledger.account("gone"), Spent()
    account.attach(spent)
    account.open(BudgetSpec(), "")
    account.detach(spent)
    ledger.note_removed("gone")
    await ledger.write()
    # A new function of this name gets the same account today, and so no new budget.
    assert ledger.account("gone") is account
    clock.at += 86400
    await ledger.write()
    await ledger.write()
    assert (await ledger.readings())[0].values == {}
    assert ledger.account("gone").today == Usage()
    by_day = await ledger.read(UsageQuery(UsageKey.DAY, 0.0, 1e11))
    assert [used.busy_s for _, used in by_day] == [5.0]
    await ledger.close()


async def test_what_was_read_of_an_earlier_day_does_not_count_today(tmp_path, clock):
    store = UsageStore(tmp_path / "usage.sqlite3")
    store.open()
    store.add(clock.at, [UsageRecord("f", "", Usage(busy_s=50.0), Standing())])
    store.close()
    ledger = ledger_in(tmp_path)
    clock.at += 86400
    assert ledger.account("f").today == Usage()
    await ledger.close()


async def test_a_write_that_is_cancelled_is_not_repeated(tmp_path):
    ledger = ledger_in(tmp_path)
    ledger.account("f").attach(Spent())
    ledger.account("f").open(BudgetSpec(), "")
    other = sqlite3.connect(tmp_path / "usage.sqlite3", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    writing = asyncio.create_task(ledger.write())
    # Wait until the write, in its thread, waits for the locked file.
    await asyncio.sleep(0.1)
    writing.cancel()
    await asyncio.wait([writing])
    other.rollback()
    await ledger.close()
    assert other.execute("SELECT SUM(busy_s) FROM days").fetchall() == [(5.0,)]
    other.close()


async def test_what_cannot_be_written_is_written_later(tmp_path):
    ledger = ledger_in(tmp_path)
    ledger.account("f").attach(Spent())
    ledger.account("f").open(BudgetSpec(), "")
    other = sqlite3.connect(tmp_path / "usage.sqlite3", isolation_level=None)
    other.execute("ALTER TABLE days RENAME TO other_days")
    with pytest.raises(GatewayError):
        await ledger.write()
    other.execute("ALTER TABLE other_days RENAME TO days")
    await ledger.write()
    await ledger.close()
    assert other.execute("SELECT SUM(busy_s) FROM days").fetchall() == [(5.0,)]
    other.close()


# -- budgets


async def test_at_the_cap_the_running_call_ends_and_others_get_the_reason(
    gateway, deploy, gate: Gate, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(budget, "WARN_AT", 0.1)
    function = await deploy(WAITS, {"budget.seconds_per_day": 0.8, "scale.max": 1}, gate=gate)
    running = asyncio.create_task(function.answer("runs"))
    waiting = asyncio.create_task(function.error("waits", x_priority="3"))
    await gate.next("runs")
    assert (await function.logged("of today's budget is used"))["level"] == "warning"
    workers = (await exhausted(function))["workers"]
    assert workers == {"ready": 0, "parked": 0, "starting": 0, "draining": 1}
    assert (await waiting)["type"] == "budget_exhausted"
    response = await function.call("late")
    error = failure(response)
    assert (error["status"], error["type"]) == (503, "budget_exhausted")
    left_s = 86400 - time.time() % 86400
    assert abs(int(response.headers["retry-after"]) - left_s) < 60
    assert "seconds_per_day" not in error["message"]
    warmup = await gateway.client.post(f"/v2/{function.name}/warmup")
    assert failure(warmup)["type"] == "budget_exhausted"
    gate.open()
    assert await running == "runs"
    status = await function.settled()
    assert any("no worker starts before 0:00 UTC" in warning for warning in status["warnings"])
    assert status["budget"]["worker_s"] >= status["budget"]["seconds_per_day"] == 0.8
    text = (await gateway.client.get("/metrics")).text
    assert f'pilotflame_budget_used_ratio{{function="{function.name}"}} 1' in text
    assert gateway.server is not None
    decisions = gateway.server.functions.get(function.name).workers.function.decisions.since(0)
    assert [one.cause for one in decisions if one.action == "budget"] == ["warned", "exhausted"]


async def test_jobs_wait_for_a_reset_and_the_budget_begins_anew(gateway, deploy):
    function = await deploy(ECHO, {"budget.seconds_per_day": 0.3})
    await spend(function)
    run = await gateway.client.post(f"/v2/{function.name}/run", json={"input": 1})
    job = f"/v2/{function.name}/status/{run.json()['id']}"
    assert failure(await function.call(2))["type"] == "budget_exhausted"
    assert (await gateway.client.get(job)).json()["status"] == "IN_QUEUE"
    assert gateway.server is not None
    assert not gateway.server.tasks.failures
    assert (await gateway.client.post(f"/v1/functions/{function.name}/reset")).status_code == 200

    async def completed() -> bool:
        return (await gateway.client.get(job)).json()["status"] == "COMPLETED"

    await until(completed, "the end of the job")
    # A reset allows the same amount once more, not an unlimited amount.
    await exhausted(function)


async def test_a_deploy_lifts_the_cap_only_with_a_higher_budget(gateway, deploy):
    function = await deploy(ECHO, {"budget.seconds_per_day": 0.3})
    await spend(function)
    await gateway.deploy(ECHO, {"budget.seconds_per_day": 0.3, "scale.min": 1}, name=function.name)
    assert (await function.error())["type"] == "budget_exhausted"
    await function.settled()
    await gateway.deploy(ECHO, {"budget.seconds_per_day": 3600}, name=function.name)
    assert await function.answer(5) == 5
    assert (await function.status())["budget"]["state"] == "within"
    await gateway.deploy(ECHO, name=function.name)
    assert await function.answer(6) == 6
    assert (await function.status())["budget"] is None


async def test_money_is_a_budget_too_and_is_known_after_a_restart(state, monkeypatch):
    measure_at_once(monkeypatch)
    async with gateway_here(state, price_memory_gb_hour=DEAR) as gateway:
        function = await gateway.deploy(
            ECHO, {"budget.money_per_day": 1, "scale.rest": "local"}, name="dear", check=False
        )
        await spend(function)
        assert (await function.error())["type"] == "budget_exhausted"
    async with gateway_here(state, price_memory_gb_hour=DEAR) as gateway:
        assert (await gateway.function("dear").error())["type"] == "budget_exhausted"
        await gateway.client.delete("/v1/functions/dear")
        # A new function of the same name has no new budget.
        await gateway.deploy(ECHO, {"budget.money_per_day": 1}, name="dear")
        assert (await gateway.function("dear").error())["type"] == "budget_exhausted"


async def test_the_next_day_has_a_budget_of_its_own(gateway, deploy, monkeypatch):
    # Shorten the day, so that it ends soon after the budget is used up.
    monkeypatch.setattr("pilotflame.runtime.ground.billing.budget.DAY_S", 4.0)
    function = await deploy(ECHO, {"budget.seconds_per_day": 0.2})
    await spend(function)
    run = await gateway.client.post(f"/v2/{function.name}/run", json={"input": 1})
    job = f"/v2/{function.name}/status/{run.json()['id']}"

    async def completed() -> bool:
        return (await gateway.client.get(job)).json()["status"] == "COMPLETED"

    await until(completed, "the end of the job on the next day")


async def test_a_worker_that_gets_ready_after_the_cap_serves_nobody(gateway, deploy, gate: Gate):
    source = (
        "import gate\ndef setup(context):\n    gate.wait('setup')\ndef handler(event):\n    return event\n"
    )
    function = await deploy(source, {"budget.seconds_per_day": 0.4}, gate=gate, check=False)
    call = asyncio.create_task(function.error())
    arrival = await gate.next("setup")
    assert (await call)["type"] == "budget_exhausted"
    arrival.go()
    # Wait for the log, not for the status, because a request of the status checks the budget.
    await function.logged("has drained and ended")
    assert (await function.settled())["activations"] == 1


async def test_who_waits_for_workers_learns_of_the_cap(gateway, deploy, gate: Gate):
    source = (
        "import gate\ndef setup(context):\n    gate.wait('setup')\ndef handler(event):\n    return event\n"
    )
    function = await deploy(source, {"budget.seconds_per_day": 0.4}, gate=gate, check=False)
    response = await gateway.client.post(f"/v2/{function.name}/warmup", params={"wait_s": 100})
    assert failure(response)["type"] == "budget_exhausted"
    gate.open()
    await function.settled()


async def test_a_gateway_that_has_ended_measures_no_more(state, monkeypatch):
    measure_at_once(monkeypatch)
    loop = asyncio.get_running_loop()
    async with gateway_here(state) as gateway:
        function = await gateway.deploy("def handler(event):\n    return event")
        events = gateway.server.functions.events
    # A process may end after its gateway. Its notice must not start a measurement.
    started, call_later = [], loop.call_later
    monkeypatch.setattr(
        loop, "call_later", lambda *how, **more: started.append(how) or call_later(*how, **more)
    )
    for notice in (*events.processes, *events.removed):
        notice(function.name)
    for notice in events.activated:
        notice(function.name, "ready")
    assert started == []
