"""Schedules that start workers: on a simulated clock, and in a gateway."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from live import TRUSTED, failure, gateway_here
from pilotflame.runtime.ground.settings.schedule import Schedule
from pilotflame.runtime.node.functions.prewarming import Alarms, Prewarming

ECHO = "def handler(event):\n    return event"
HALF_PAST_TWO = Schedule(cron="30 2 * * *", timezone="Europe/Berlin", for_s=600)


def unix(*local: int) -> float:
    return datetime(*local, tzinfo=UTC).timestamp()  # type: ignore[misc, arg-type]


# -- on a simulated clock


def fired(alarms: Alarms, start: float, end: float) -> list[float]:
    """Run from `start` to `end` as the gateway's timer does. Return when schedules fired."""
    found, now = [], start
    while (following := alarms.next_at()) is not None and following <= end:
        assert following > now
        now = following
        found += [now for _ in alarms.due(now)]
    return found


@pytest.mark.parametrize(
    ("day", "expected"),
    [
        # In March, the clocks go forward at 02:00, and in October they go back at 03:00. Both are at 01:00 UTC.
        ((2026, 3, 29), [unix(2026, 3, 29, 1, 0)]),
        ((2026, 10, 25), [unix(2026, 10, 25, 0, 30)]),
        ((2026, 6, 15), [unix(2026, 6, 15, 0, 30)]),
    ],
)
def test_a_schedule_fires_once_on_each_day(day: tuple[int, int, int], expected: list[float]):
    alarms, midnight = Alarms(), unix(*day) - 7200
    assert list(alarms.put("f", [HALF_PAST_TWO], midnight)) == []
    assert fired(alarms, midnight, midnight + 86_400) == expected


@given(st.lists(st.floats(0.1, 40_000), min_size=1, max_size=50))
def test_each_time_fires_exactly_once_whenever_the_timer_looks(pauses_s: list[float]):
    schedule = Schedule(cron="*/30 * * * *", timezone="Europe/Berlin", for_s=100_000)
    alarms, now = Alarms(), unix(2026, 10, 24, 20, 10)
    list(alarms.put("f", [schedule], now))
    for pause_s in pauses_s:
        following = alarms.next_at()
        assert following is not None
        now += pause_s
        found = list(alarms.due(now))
        # If the timer looks late, the schedule fires once, and wants its workers for the rest of its period.
        assert len(found) == (following <= now)
        assert all(99_900 - 1800 < left_s <= 100_000 for _, _, left_s in found)
        assert list(alarms.due(now)) == []


def test_what_the_machine_slept_through_is_left_out():
    alarms, now = Alarms(), unix(2026, 6, 15)
    list(alarms.put("f", [HALF_PAST_TWO], now))
    assert list(alarms.due(unix(2026, 6, 15, 0, 41))) == []
    assert alarms.next_at() == unix(2026, 6, 16, 0, 30)


def test_a_clock_that_is_set_back():
    alarms, now = Alarms(), unix(2026, 6, 15, 0, 31)
    assert [left_s for _, left_s in alarms.put("f", [HALF_PAST_TWO], now)] == [540.0]
    assert list(alarms.due(now)) == []
    assert list(alarms.due(now - 120)) == []
    # The schedule has fired at this time, so it does not fire again.
    assert alarms.next_at() == unix(2026, 6, 16, 0, 30)
    assert list(alarms.due(now)) == []
    # If the clock is set back over several times of the schedule, it fires at the first of them.
    assert list(alarms.due(now - 5 * 86400)) == []
    assert alarms.next_at() == unix(2026, 6, 11, 0, 30)
    assert [name for name, _, _ in alarms.due(unix(2026, 6, 11, 0, 30))] == ["f"]
    assert list(alarms.due(unix(2026, 6, 11, 0, 29))) == []
    assert alarms.next_at() == unix(2026, 6, 12, 0, 30)


def test_a_function_that_is_gone_has_no_schedule():
    alarms = Alarms()
    for name in ("f", "g"):
        list(alarms.put(name, [HALF_PAST_TWO], unix(2026, 6, 15)))
    alarms.drop("f")
    assert [name for name, _, _ in alarms.due(unix(2026, 6, 15, 0, 30))] == ["g"]
    alarms.drop("g")
    assert alarms.next_at() is None


# -- in a gateway


class TestGateway:
    pytestmark = pytest.mark.asyncio(loop_scope="module")

    async def test_a_schedule_warms_a_function(self, gateway: Any, deploy: Any):
        """The simulated clock starts 0.2 s before 02:30, when the clocks go forward, and runs on from there."""
        schedule = [{"cron": "30 2 * * *", "timezone": "Europe/Berlin", "workers": 2, "for_s": 60}]
        function = await deploy(ECHO, {"scale.idle_timeout_s": 0, "schedule": schedule})
        await function.settled(ready=0)
        ahead_s = unix(2026, 3, 29, 0, 59, 59) + 0.8 - time.monotonic()
        prewarming = Prewarming(gateway.server.functions, lambda: ahead_s + time.monotonic())
        try:
            prewarming.follow(function.name)
            await function.settled(ready=2)
        finally:
            prewarming.close()
        assert (await function.call(1)).headers["x-cold-start"] == "false"
        history = gateway.server.functions.get(function.name).workers.function
        (start,) = [
            one for one in history.decisions.since(0) if one.action == "start" and one.cause != "load"
        ]
        assert start.cause == "schedule 30 2 * * *"
        assert start.figures["workers"] == 2
        metrics = (await gateway.client.get("/metrics")).text
        sample = f'pilotflame_prewarms_total{{function="{function.name}",signal="schedule",used="true"}} 1.0'
        assert sample in metrics

    async def test_status_and_deploy(self, gateway: Any, deploy: Any):
        schedule = [{"cron": "0 8 * * mon-fri", "timezone": "Europe/Berlin"}]
        function = await deploy(ECHO, {"schedule": schedule})
        (shown,) = (await function.status())["schedules"]
        following = datetime.fromisoformat(shown.pop("next_at"))
        assert shown == {"cron": "0 8 * * mon-fri", "timezone": "Europe/Berlin", "workers": 1, "for_s": 300.0}
        assert following > datetime.now(UTC)
        assert following.hour in (6, 7)
        response = await gateway.send(ECHO, {"schedule": [{"cron": "0 8 * * *", "workers": 9}]})
        assert response.status_code == 422
        assert "schedule.workers is 9, more than scale.max, which is 4" in response.text

    async def test_workers_are_there_again_after_a_restart(self, state: Path):
        """A gateway that starts while a schedule wants workers starts them."""
        settings = {"schedule": [{"cron": "* * * * *", "for_s": 3600}]}
        async with gateway_here(state) as gateway:
            await (await gateway.deploy(ECHO, settings, name="early")).settled(ready=1)
        async with gateway_here(state) as gateway:
            function = gateway.function("early")
            await function.settled(ready=1)
            assert (await function.call(1)).headers["x-cold-start"] == "false"


# -- upstream functions


class TestUpstream:
    pytestmark = pytest.mark.asyncio(loop_scope="module")

    async def test_a_call_of_a_declared_upstream_function_starts_a_worker(self, gateway: Any, deploy: Any):
        first = await deploy(ECHO, name="first")
        second = await deploy(ECHO, {"after": [first.name], "scale.rest": "local"}, name="second")
        await second.settled(ready=0, zygote=False)
        await first.answer(1)
        await second.settled(ready=1)
        assert (await second.call(1)).headers["x-cold-start"] == "false"
        history = gateway.server.functions.get("second").workers.function
        (start,) = [
            one for one in history.decisions.since(0) if one.action == "start" and one.cause != "load"
        ]
        assert start.cause == "upstream first"
        metrics = (await gateway.client.get("/metrics")).text
        assert 'pilotflame_prewarms_total{function="second",signal="upstream",used="true"} 1.0' in metrics

    async def test_a_learned_upstream_function(self, gateway: Any, deploy: Any):
        """Each call of `b` follows a call of `a`. From the fourth round on, a worker of `b` is ready before the call of `b`."""
        idle = {"scale.idle_timeout_s": 0}
        a, b = await deploy(ECHO, idle, name="a"), await deploy(ECHO, idle, name="b")
        cold = []
        for _ in range(5):
            await b.settled(ready=0)
            await a.answer(1)
            if len(cold) >= 3:
                await b.settled(ready=1)
            cold.append((await b.call(1)).headers["x-cold-start"])
            # Wait, because the gateway ignores calls of a function that come again within a second.
            await asyncio.sleep(1.0)
        assert cold == ["true"] * 3 + ["false"] * 2
        history = gateway.server.functions.get("b").workers.function
        assert {one.cause for one in history.decisions.since(0) if one.action == "prewarm"} == {"upstream"}
        assert {one.figures["used"] for one in history.decisions.since(0) if one.action == "prewarm"} == {1.0}

    async def test_what_was_learned_of_an_upstream_function_outlives_the_gateway(self, state: Path):
        idle = {"scale.idle_timeout_s": 0}
        async with gateway_here(state) as gateway:
            for name in ("a", "b"):
                await gateway.deploy(ECHO, idle, name=name)
            for _ in range(3):
                await gateway.function("a").answer(1)
                await gateway.function("b").answer(1)
                await asyncio.sleep(1.0)
        async with gateway_here(state) as gateway:
            b = gateway.function("b")
            await b.settled(ready=0)
            await gateway.function("a").answer(1)
            await b.settled(ready=1)
            assert (await b.call(1)).headers["x-cold-start"] == "false"

    async def test_calls_of_another_owners_function_start_no_worker_and_are_not_learned(self, state: Path):
        """`mine` is called after `theirs` and after `own`."""
        settings = {"scale.idle_timeout_s": 0}
        async with gateway_here(state) as gateway, gateway.at_home() as home:
            keys = {}
            for owner, functions in (("me", ["mine", "own"]), ("they", ["theirs"])):
                fields = {
                    "name": owner,
                    "scopes": ["deploy", "invoke"],
                    "policy": TRUSTED,
                    "functions": functions,
                }
                keys[owner] = (await home.post("/v1/keys", json=fields)).json()["key"]
            clients = {"mine": "me", "own": "me", "theirs": "they"}

            def by(name: str) -> Any:
                gateway.client.headers["Authorization"] = f"Bearer {keys[clients[name]]}"
                return gateway

            for name in clients:
                await by(name).deploy(ECHO, settings, name=name)
            refused = await by("mine").send(ECHO, settings | {"after": ["theirs"]}, name="mine")
            assert failure(refused)["type"] == "forbidden"
            for _ in range(4):
                for name in ("theirs", "own", "mine"):
                    await by(name).function(name).answer(1)
                await asyncio.sleep(1.0)
            mine = by("mine").function("mine")
            await mine.settled(ready=0)
            history = gateway.server.functions.get("mine").workers.function
            assert list(history.upstreams) == ["own"]
            causes = {
                one.cause.partition(" ")[2] for one in history.decisions.since(0) if one.action == "start"
            }
            assert causes == {""}
            # A call of the owner's own function starts a worker.
            await by("own").function("own").answer(1)
            await by("mine").function("mine").settled(ready=1)
            theirs = gateway.server.functions.get("theirs").workers.function
            assert theirs.upstreams == {}

    async def test_prewarms_teach_nothing(self, gateway: Any, deploy: Any):
        """Workers of `d` are started after each call of `c`, but `d` is never called."""
        c = await deploy(ECHO, name="c")
        await deploy(ECHO, {"after": ["c"], "scale.idle_timeout_s": 0}, name="d")
        e = await deploy(ECHO, {"after": ["d"], "scale.idle_timeout_s": 0}, name="e")
        await c.answer(1)
        await gateway.function("d").settled(ready=1)
        # A prewarm of `d` is no call of `d`.
        await e.settled(ready=0)
        history = gateway.server.functions.get("e").workers.function
        assert [one for one in history.decisions.since(0) if one.cause == "upstream d"] == []
