"""Requests for workers ahead of need: how many workers they want, and whether the workers started for them were used."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.runtime.ground.telemetry.decisions import DecisionRecord
from pilotflame.runtime.node.reconciling.prewarms import signal_of
from pilotflame.runtime.node.scaling.warm_requests import WarmRequest, WarmRequests

ECHO = "def handler(event):\n    return event"

REQUESTS = st.lists(
    st.builds(WarmRequest, st.integers(1, 8), st.floats(0, 100), st.just("warmup")), max_size=20
)


@given(REQUESTS, st.lists(st.floats(0, 120), min_size=1, max_size=5).map(sorted))
def test_as_many_workers_as_the_largest_request_wants(added: list[WarmRequest], times_s: list[float]):
    requests = WarmRequests()
    for one in added:
        requests.add(one)
    for now_s in times_s:
        running = [one for one in added if one.until_s > now_s]
        found = requests.at(now_s)
        assert (found.workers if found else 0) == max((one.workers for one in running), default=0)
        # The result ends with the last request of the largest number of workers.
        if found is not None:
            assert found.until_s == max(one.until_s for one in running if one.workers == found.workers)


@given(REQUESTS)
def test_requests_are_bounded_by_the_number_of_workers(added: list[WarmRequest]):
    requests = WarmRequests()
    for one in added:
        requests.add(one)
    ends = []
    while (one := requests.at(ends[-1] if ends else -1.0)) is not None:
        ends.append(one.until_s)
    assert len(ends) <= 8
    assert ends == sorted(ends)


def test_a_signal_that_wants_no_worker_holds_nothing():
    requests = WarmRequests()
    requests.add(WarmRequest(0, 100.0, "warmup"))
    assert requests.at(1.0) is None


def test_a_signal_is_the_first_word_of_its_cause():
    assert signal_of("schedule 0 8 * * 1-5") == signal_of("schedule") == "schedule"


# -- with workers


class TestWorkers:
    pytestmark = pytest.mark.asyncio(loop_scope="module")

    async def test_a_warm_up_keeps_workers_that_would_be_idle_for_too_long(self, gateway, deploy):
        function = await deploy(ECHO, {"scale.idle_timeout_s": 0})
        workers = gateway.server.functions.get(function.name).workers
        await function.settled(ready=0)
        stops = notes(gateway, function, "stop")
        workers.warm(2, "warmup", 100.0)
        await function.settled(ready=2)
        assert (await function.call(1)).headers["x-cold-start"] == "false"
        await function.settled(ready=2)
        assert [one.cause for one in notes(gateway, function, "start")] == ["warmup"]
        assert notes(gateway, function, "stop") == stops

    async def test_a_used_worker_is_told_from_an_unused_one(self, gateway, deploy):
        function = await deploy(ECHO, {"scale.idle_timeout_s": 0})
        workers = gateway.server.functions.get(function.name).workers
        workers.warm(2, "schedule 0 8 * * *", 100.0)
        await function.settled(ready=2)
        await function.answer(1)
        await gateway.client.delete(f"/v1/functions/{function.name}")
        found = sorted(
            (one.cause, one.figures["used"])
            for one in workers.function.decisions.since(0)
            if one.action == "prewarm"
        )
        assert found == [("schedule 0 8 * * *", 0.0), ("schedule 0 8 * * *", 1.0)]
        assert workers.function.prewarms.counts == {("schedule", True): 1, ("schedule", False): 1}

    async def test_workers_end_with_the_request(self, gateway, deploy):
        function = await deploy(ECHO, {"scale.idle_timeout_s": 0})
        gateway.server.functions.get(function.name).workers.warm(1, "warmup", 0.5)
        await function.settled(ready=1)
        await function.settled(ready=0)
        (found,) = notes(gateway, function, "prewarm")
        assert (found.cause, found.figures["used"]) == ("warmup", 0.0)

    async def test_a_held_worker_that_dies_is_replaced(self, gateway, deploy):
        source = "import os, signal\ndef handler(event):\n    os.kill(os.getpid(), signal.SIGKILL)"
        function = await deploy(source, {"scale.idle_timeout_s": 0})
        gateway.server.functions.get(function.name).workers.warm(1, "warmup", 100.0)
        await function.settled(ready=1)
        assert (await function.error())["type"] == "worker_died"
        await function.settled(ready=1)
        assert [one.cause for one in notes(gateway, function, "start")] == ["warmup", "warmup"]

    async def test_a_hold_goes_on_in_the_next_revision(self, gateway, deploy):
        function = await deploy(ECHO, {"scale.idle_timeout_s": 0}, name="held")
        gateway.server.functions.get("held").workers.warm(1, "warmup", 100.0)
        await function.settled(ready=1)
        again = await deploy(ECHO + "\n", {"scale.idle_timeout_s": 0}, name="held")
        await again.settled(ready=1)
        assert (await again.call(1)).headers["x-cold-start"] == "false"

    async def test_starts_for_callers_are_not_the_signals(self, gateway, deploy, gate):
        source = "import gate\ndef handler(event):\n    gate.wait()\n    return event"
        function = await deploy(source, {"scale.max": 4}, gate=gate)
        calls = [asyncio.create_task(function.answer(n)) for n in range(2)]
        # Two running calls want a third worker.
        await function.settled(ready=3, in_flight=2)
        assert {one.cause for one in notes(gateway, function, "start")} <= {"load"}
        gateway.server.functions.get(function.name).workers.warm(4, "warmup", 100.0)
        await function.settled(ready=4, in_flight=2)
        (ahead,) = [one for one in notes(gateway, function, "start") if one.cause == "warmup"]
        assert ahead.figures["workers"] == 1
        gate.open()
        await asyncio.gather(*calls)


def notes(gateway: Any, function: Any, action: str) -> list[DecisionRecord]:
    """Return the function's decisions of one kind."""
    history = gateway.server.functions.get(function.name).workers.function
    return [one for one in history.decisions.since(0) if one.action == action]
