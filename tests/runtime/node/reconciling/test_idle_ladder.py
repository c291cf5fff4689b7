"""The keep-alive policy drives a live function: down its ladder without calls, and up before the next call."""

from __future__ import annotations

import json
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from live import Function, Gateway, gateway_here, short_folder, until
from pilotflame.runtime.ground.telemetry.background import BackgroundTasks
from pilotflame.runtime.ground.telemetry.decisions import DecisionRecord, Decisions
from pilotflame.runtime.ground.telemetry.rung_name import RungName
from pilotflame.runtime.node.reconciling.function import Function as DeployedFunction
from pilotflame.runtime.node.reconciling.idle_ladder import IdleLadder
from pilotflame.runtime.node.scaling.idle_distribution import SharedPrior
from pilotflame.runtime.node.scaling.measured_ladder import LadderSpec

pytestmark = pytest.mark.asyncio(loop_scope="module")

PID = "import os\ndef handler(event):\n    return os.getpid()"
# A worker holds much more than its zygote, and a zygote spares the import's half second, so it pays to keep the zygote
# alone for a while.
LARGE = f"import time\ntime.sleep(0.5)\n{PID}\ndef setup(context):\n    return b'x' * (64 << 20)\n"
# Waiting costs nearly nothing, so that each rung is left within a second or two.
PATIENT = {"price_waiting_s": 1e-9}
IMPATIENT = {"price_waiting_s": 1.0}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[Gateway]:
    with short_folder() as folder:
        async with gateway_here(folder / "state", **PATIENT) as found:
            yield found


def history_of(gateway: Gateway, function: Function) -> DeployedFunction:
    assert gateway.server is not None
    return gateway.server.functions.get(function.name).workers.function


async def decided(gateway: Gateway, function: Function, action: str, number: int = 1) -> DecisionRecord:
    """Wait for the decision with this number among those with this action, and return it."""
    found: list[DecisionRecord] = []

    async def so() -> bool:
        found[:] = [one for one in history_of(gateway, function).decisions.since(0) if one.action == action]
        return len(found) >= number

    await until(so, f"{number} x {action} of {function.name}")
    return found[number - 1]


async def idle(gateway: Gateway, function: Function, rung: str) -> dict[str, Any]:
    """Wait until an idle period has begun, and return the status then."""

    async def so() -> bool:
        # A plan may have no further step: if starts take long, it keeps the worker for good.
        return history_of(gateway, function).ladder.watch.period is not None

    await until(so, "an idle period")
    status = await function.status()
    assert status["rung"] == rung
    return status


def stored(state: Path, name: str) -> Path:
    return state / "habits" / "functions" / f"{name}.json"


async def test_an_idle_function_steps_down_rung_by_rung(gateway, deploy):
    function = await deploy(LARGE)
    pid = await function.answer()
    down = await decided(gateway, function, "step_down")
    assert (down.cause, down.figures["rung"]) == ("plan", 1)
    assert down.figures["idle_s"] >= 0.5
    assert down.figures["saved_per_hour"] > 0
    status = await function.settled(ready=0, zygote=True)
    assert (status["rung"], status["next_rung"]) == ("zygote", "local")
    assert (await decided(gateway, function, "step_down", 2)).figures["rung"] == 2
    status = await function.settled(ready=0, zygote=False, standby=False)
    assert (status["rung"], status["next_rung"], status["next_rung_at"]) == ("local", None, None)
    again = await function.call()
    assert again.headers["x-cold-start"] == "true"
    assert again.json() != pid
    # The wakes from the files and from the zygote were measured.
    figures = history_of(gateway, function).ladder.measured.figures
    assert figures.wakes_s["local"][-1] > 0 < figures.wakes_s["zygote"][-1]


async def test_a_function_whose_callers_may_not_wait_stays_ready(state: Path):
    async with gateway_here(state, **IMPATIENT) as gateway:
        function = await gateway.deploy(PID)
        pid = await function.answer()
        status = await idle(gateway, function, "ready")
        assert status["next_rung"] == "zygote"
        assert await function.answer() == pid
        ladder = history_of(gateway, function).ladder
        await idle(gateway, function, "ready")
        # A gap that is longer than the quiet time is an idle time. The time before the first call is no idle time.
        assert len(ladder.past.history.idles) == 1
        assert 0.5 < ladder.past.history.idles[0] < 20


async def test_slow_requests_beyond_their_share_raise_the_price_of_waiting(gateway, deploy):
    function = await deploy(PID, {"scale.slow_share": 0.01, "scale.rest": "local"})
    ladder = history_of(gateway, function).ladder
    await function.answer()
    first = await decided(gateway, function, "step_down")
    assert first.figures["slow_share"] == 1.0
    once = ladder.measured.slow_share.price(1.0)
    assert 1.9 < once < 2.0
    await function.settled(ready=0)
    await function.answer()
    assert (await decided(gateway, function, "step_down", 2)).figures["slow_share"] == 1.0
    assert 3.8 < ladder.measured.slow_share.price(1.0) < 4.0
    # Both calls have waited. A deploy keeps the counts of slow requests, from which the price follows.
    await gateway.deploy(PID, {"scale.slow_share": 0.5, "scale.rest": "local"}, name=function.name)
    assert history_of(gateway, function).ladder.measured.slow_share.recent_slow > 1.9
    steady = await deploy(PID)
    await steady.answer()
    assert "slow_share" not in (await decided(gateway, steady, "step_down")).figures


@pytest.mark.parametrize("limit", [{"hold_s": 0.2}, {"timeout_s": 0.2}])
async def test_a_caller_whose_time_is_up_before_a_worker_starts_was_a_slow_one(gateway, deploy, gate, limit):
    """Otherwise the price would fall further the longer starts take, because nobody would count the callers that gave up."""
    source = "import gate\ndef setup(context):\n    gate.wait('setup')\ndef handler(event):\n    return event"
    settings = {"scale.slow_share": 0.01, "scale.rest": "local", **limit}
    function = await deploy(source, settings, gate=gate, check=False)
    assert (await function.error())["type"] in ("activation_timeout", "deadline_exceeded")
    gate.open()
    down = await decided(gateway, function, "step_down")
    assert down.figures["slow_share"] == 1.0
    assert history_of(gateway, function).ladder.measured.slow_share.price(1.0) > 1.9


async def test_a_fixed_timeout_and_a_minimum_are_kept(gateway, deploy):
    minimum = await deploy(PID, {"scale.min": 1})
    fixed = await deploy(PID, {"scale.idle_timeout_s": 0.2})
    await fixed.answer()
    await fixed.settled(ready=0, zygote=True)
    await fixed.answer()
    await fixed.settled(ready=0, zygote=True)
    assert (await fixed.status())["next_rung"] is None
    assert await minimum.answer() > 0
    await minimum.settled(ready=1)
    actions = {one.action for one in history_of(gateway, fixed).decisions.since(0)}
    assert actions == {"start", "stop"}
    assert "step_down" not in {one.action for one in history_of(gateway, minimum).decisions.since(0)}


async def test_without_the_zygote_as_a_rung_a_function_goes_down_to_its_files_at_once(gateway, deploy):
    function = await deploy(PID, {"scale.rest": "local"})
    await function.answer()
    assert (await decided(gateway, function, "step_down")).figures["rung"] == 2
    await function.settled(ready=0, zygote=False)
    assert await function.answer() > 0


async def test_a_worker_that_a_warm_up_asked_for_outlives_the_next_step_of_the_plan(gateway, deploy):
    function = await deploy(PID)
    await function.answer()
    await decided(gateway, function, "step_down")
    await function.settled(ready=0)
    response = await gateway.client.post(f"/v2/{function.name}/warmup")
    assert response.status_code < 300, response.text
    await function.settled(ready=1)
    # The plan goes down to the files after about two seconds, but the warm-up keeps the worker.
    due_at = history_of(gateway, function).ladder.next_step
    assert due_at is None or due_at.rung == "local"
    await function.settled(ready=1, rung="ready")
    assert (await function.call()).headers["x-cold-start"] == "false"


async def test_a_timer_is_prewarmed_and_its_call_is_not_cold(state):
    """The stored history is that of a timer. Tests of the simulator show that the policy learns such a history."""
    rnd = random.Random(1)
    intervals = [3.0 + rnd.gauss(0, 0.01) for _ in range(100)]
    file = stored(state, "timer")
    file.parent.mkdir(parents=True)
    content = {
        "idles": intervals, "intervals": intervals, "burst_waits": [[0, 100], [0.6 * 100, 100]], "periods": 100,
        "bills": [9, 9, 9, 0, 0], "held_bytes": {"ready": 1e9, "local": 0}, "wakes_s": {"local": [0.6]},
    }  # fmt: skip
    file.write_text(json.dumps(content))
    async with gateway_here(state, price_waiting_s=5e-6) as gateway:
        function = await gateway.deploy(PID, {"scale.rest": "local"}, name="timer")
        first = await function.answer()
        down = await decided(gateway, function, "step_down")
        assert down.figures["expert"] >= 3
        up = await decided(gateway, function, "step_up")
        assert 1.0 < up.figures["idle_s"] < 3.2
        starts = [one for one in history_of(gateway, function).decisions.since(0) if one.action == "start"]
        assert [one.cause for one in starts] == ["load", "predicted"]
        await function.settled(ready=1)
        call = await function.call()
        assert call.headers["x-cold-start"] == "false"
        assert call.json() != first


async def test_the_history_survives_a_deploy_and_a_restart_but_no_delete(state):
    async with gateway_here(state, **IMPATIENT) as gateway:
        function = await gateway.deploy(PID, name="kept")
        await function.answer()
        await idle(gateway, function, "ready")
        await function.answer()
        await idle(gateway, function, "ready")
        before = history_of(gateway, function).ladder.past.history
        assert before.periods == 1
        await gateway.deploy(PID.replace("getpid", "getppid"), name="kept")
        assert history_of(gateway, function).ladder.past.history.periods == 1
    # The plan goes on after the gateway was down, and the idle time across that gap is not recorded.
    assert json.loads(stored(state, "kept").read_text())["idling"]["since_at"] > 0
    async with gateway_here(state, **IMPATIENT) as gateway:
        function = gateway.function("kept")
        await function.settled(ready=0)
        after = history_of(gateway, function).ladder.past.history
        # The file has whole milliseconds.
        for stored_s, s in ((after.idles, before.idles), (after.intervals, before.intervals)):
            assert stored_s == pytest.approx(s, abs=0.0006)
        await function.answer()
        await idle(gateway, function, "ready")
        assert history_of(gateway, function).ladder.past.history.periods == 1
        # A period is learned only when the arrivals of the longest wake are known, so call until then.
        while history_of(gateway, function).ladder.past.history.periods < 2:
            await function.answer()
            await idle(gateway, function, "ready")
        await gateway.client.delete("/v1/functions/kept")
        assert not stored(state, "kept").exists()
        again = await gateway.deploy(PID, name="kept")
        assert history_of(gateway, again).ladder.past.history.periods == 0
    assert json.loads(stored(state, "kept").read_text())["periods"] == 0


async def test_a_function_that_cannot_start_is_not_idle(gateway, deploy, tmp_path):
    source = (
        "import os\ndef setup(context):\n    if not os.path.exists(os.environ['OK']): raise OSError\n" + PID
    )
    function = await deploy(source, {"env.OK": str(tmp_path / "ok")}, check=False)
    for _ in range(5):
        assert (await function.error())["type"] == "handler_setup_failed"
    (tmp_path / "ok").touch()
    await gateway.client.post(f"/v1/functions/{function.name}/reset")
    ladder = history_of(gateway, function).ladder
    assert ladder.watch.period is None
    await function.answer()
    await decided(gateway, function, "step_down")
    assert ladder.past.history.periods == 0


async def test_the_time_of_failed_starts_is_no_wake_time(gateway, deploy, tmp_path):
    source = (
        "import os\ndef setup(context):\n    if not os.path.exists(os.environ['OK']): raise OSError\n" + PID
    )
    function = await deploy(source, {"env.OK": str(tmp_path / "ok")}, check=False)
    assert (await function.error())["type"] == "handler_setup_failed"
    (tmp_path / "ok").touch()
    # The start-up check of the next revision is not the start that the failed call waited for.
    await deploy(source, {"env.OK": str(tmp_path / "ok")}, name=function.name)
    assert history_of(gateway, function).ladder.measured.figures.wakes_s == {}


class Warm:
    """A revision with a worker and without calls."""

    rung = RungName.READY
    slow = (0, 0)
    warm_until_s = None

    def __init__(self) -> None:
        self.looks = 0

    def look(self) -> None:
        self.looks += 1


async def test_a_deploy_after_a_restart_begins_its_plan_anew():
    async with BackgroundTasks() as tasks:
        ladder = IdleLadder(Decisions(), SharedPrior(), lambda: None)
        ladder.watch.resume(time.monotonic() - 1e6, 0.0)
        restored, deployed = Warm(), Warm()
        await ladder.adopt(restored, LadderSpec(), 0.1, tasks)
        assert restored.looks == 1
        assert ladder.stand(time.monotonic()).rung is RungName.LOCAL
        # A deploy begins a new plan with a worker, because a call is likely soon after a deploy.
        await ladder.adopt(deployed, LadderSpec(), 0.1, tasks)
        assert ladder.stand(time.monotonic()).keeps_worker
        ladder.release(deployed)


async def test_the_delays_at_which_a_plan_holds_a_worker_are_told_only_while_it_does():
    async with BackgroundTasks() as tasks:
        ladder, target = IdleLadder(Decisions(), SharedPrior(), lambda: None), Warm()
        assert set(ladder.ready_shares()) == {0.0}
        await ladder.adopt(target, LadderSpec(), 0.1, tasks)
        # READY costs so little that it is held beyond all delays.
        assert ladder.ready_shares()[:10] == pytest.approx([1.0] * 10)
        target.rung = RungName.LOCAL
        assert set(ladder.ready_shares()) == {0.0}
        ladder.release(target)


async def test_a_plan_made_for_guessed_memory_is_made_anew_once_the_memory_was_measured():
    async with BackgroundTasks() as tasks:
        ladder, target = IdleLadder(Decisions(), SharedPrior(), lambda: None), Warm()
        await ladder.adopt(target, LadderSpec(), 0.1, tasks)
        guessed = ladder.next_step
        assert guessed is not None
        # The worker holds 1 MB more than the zygote, instead of the guessed 40 MB, so the plan keeps it for much longer.
        ladder.note_held(RungName.ZYGOTE, 24e6)
        ladder.note_held(RungName.READY, 25e6)

        async def later() -> bool:
            step = ladder.next_step
            return step is None or step.at > guessed.at + 1000

        await until(later, "a later step")
        assert ladder.stand(time.monotonic()).keeps_worker
        ladder.release(target)
