"""The dispatcher with real workers: batches, isolation, time limits, overload, order; and its rules with scripted workers."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from live import Gate, failure, gone, until
from pilotflame.errors import ActivationTimeout, FunctionStopped, OutOfMemory, PilotflameError, WorkerDied
from pilotflame.runtime.calls.batching.latency_curve import Point
from pilotflame.runtime.calls.batching.outstanding import BatchEnd, Outstanding
from pilotflame.runtime.calls.batching.queue import MAX_WAITING_BYTES
from pilotflame.runtime.calls.link.child import EndCause
from pilotflame.runtime.calls.link.worker_spec import WorkerSpec
from pilotflame.runtime.calls.serving import replica, time_limits
from pilotflame.runtime.calls.serving.dispatcher import MAX_ATTEMPTS, Dispatcher, Policy
from pilotflame.runtime.calls.serving.equal_calls import EqualCalls
from pilotflame.runtime.calls.serving.invocation import Invocation, Output
from pilotflame.runtime.calls.serving.latency_curve_store import LatencyCurveStore
from pilotflame.runtime.calls.serving.replica import ReplicaState
from pilotflame.runtime.calls.serving.replicas import ReplicaList
from pilotflame.runtime.ground.access.fair_share import SharedRoom
from pilotflame.runtime.ground.settings.function_settings import FunctionSettings
from pilotflame.runtime.ground.settings.scale_spec import ScaleSpec
from pilotflame.runtime.ground.telemetry.invocation_end import InvocationEnd
from pilotflame.runtime.ground.telemetry.timeline import Activation

pytestmark = pytest.mark.asyncio(loop_scope="module")

# -- rules, with scripted workers

POINTS = [Point(1, 0.02, 0.03), Point(2, 0.03, 0.04)]


class Scripted:
    """A ready worker that keeps the invocations that it is sent, and never answers."""

    prefetches = False
    state = ReplicaState.READY
    batch_limit = None
    completed = 0

    def __init__(
        self, *, free: bool = True, device: str = "", measured: tuple[Point, ...] = (), took_s: float = 1.0
    ) -> None:
        self.name, self.credit, self.calls = "w0", int(free), self
        self.start = SimpleNamespace(device=device, measured=list(measured))
        self.activation = Activation(10.0, 10.0, 10.0 + took_s)
        # Give the worker enough slots, so that none of its calls is late.
        self.outstanding: Outstanding[Invocation] = Outstanding(9, batching=True)
        self.sent: list[Invocation] = []

    def send(self, batch: list[Invocation], now_s: float) -> None:
        self.credit -= 1
        self.outstanding.add_batch(batch, now_s)
        self.sent += batch


class Scene:
    """A dispatcher with scripted workers, and what it reports."""

    def __init__(self, *workers: Scripted, max_batch: int = 1, concurrency: int = 1, **settings: Any) -> None:
        self.ended: list[InvocationEnd] = []
        self.replicas = ReplicaList()
        for worker in workers:
            self.replicas.add(worker)  # type: ignore[arg-type]
        self.curves = LatencyCurveStore(Path(os.devnull, "curves.json"))
        self.policy = Policy(
            FunctionSettings(name="f", **settings), ScaleSpec(concurrency=concurrency), max_batch
        )
        self.start()

    def start(self) -> None:
        spec = WorkerSpec(function="f", revision="r1-1", code=Path("/"))
        self.dispatcher = Dispatcher(
            spec, self.policy, self.replicas, self.curves, lambda: None, self.ended.append,
            SharedRoom(MAX_WAITING_BYTES),
        )  # fmt: skip

    def submit(self, name: str, **fields: Any) -> Invocation:
        now_s = time.monotonic()
        given = Invocation(
            name, b"1", now_s=now_s, deadline_s=now_s + 60, hold_until_s=now_s + 60, **fields
        )  # fmt: skip
        self.dispatcher.submit(given)
        return given

    def error(self, invocation: Invocation) -> BaseException | None:
        return invocation.output.exception() if invocation.output.done() else None


def stopped() -> PilotflameError:
    return FunctionStopped("It was stopped.")


async def test_a_refusal_is_for_those_who_wait_too_unless_they_may_wait_on():
    scene = Scene(Scripted(free=False))
    waits = scene.submit("waits")
    scene.dispatcher.bar(stopped, queued=False)
    assert not waits.ended
    with pytest.raises(FunctionStopped):
        scene.submit("refused")
    scene.dispatcher.bar(stopped)
    assert isinstance(scene.error(waits), FunctionStopped)
    scene.dispatcher.bar(None)
    assert not scene.submit("waits again").ended
    assert len(scene.dispatcher.queue) == 1


def aside(scene: Scene, first: Invocation) -> Invocation:
    """Set aside, and return, an invocation that waits for the output of `first`. It arrived 2 s ago, with a hold time of 1 s."""
    now_s = time.monotonic()
    given = Invocation(
        "aside", b"1", now_s=now_s - 2.0, deadline_s=now_s + 60.0, hold_until_s=now_s - 1.0
    )  # fmt: skip

    def queue(waiting: Iterable[Invocation]) -> None:
        for one in waiting:
            scene.dispatcher.queue_aside(one)

    equal = EqualCalls(scene.dispatcher, queue)
    equal.start("key", first)
    assert equal.wait("key", given)
    return given


async def test_an_equal_call_has_its_hold_time_anew_if_the_worker_of_the_first_dies():
    worker = Scripted()
    scene = Scene(worker)
    first = scene.submit("first")
    scene.replicas.remove(worker)  # type: ignore[arg-type]
    given = aside(scene, first)
    await asyncio.sleep(0.01)
    assert not given.ended
    scene.dispatcher.recover([], [first], EndCause())
    await asyncio.sleep(0)
    assert isinstance(scene.error(first), WorkerDied)
    assert list(scene.dispatcher.queue) == [given]
    assert given.hold_until_s > time.monotonic() + 0.5


async def test_an_equal_call_has_no_longer_hold_time_than_a_queued_call():
    scene = Scene()
    given = aside(scene, scene.submit("first"))
    await asyncio.sleep(0.01)
    assert isinstance(scene.error(given), ActivationTimeout)
    assert [end.request_id for end in scene.ended] == ["aside"]


async def test_a_function_that_stops_fails_equal_calls_that_wait():
    scene = Scene(Scripted())
    first = scene.submit("first")
    given = aside(scene, first)
    scene.dispatcher.bar(stopped)
    assert isinstance(scene.error(given), FunctionStopped)
    assert not first.ended
    assert not scene.dispatcher.aside


async def test_a_call_of_a_dead_worker_is_not_checked_again_and_again_until_it_is_recovered(
    monkeypatch: pytest.MonkeyPatch,
):
    """Until the cause of the death is known, only the deadline of the call counts, even if its execution limit has passed."""
    worker, checks = Scripted(), 0
    scene = Scene(worker)
    call = scene.submit("call")
    call.limit_execution(time.monotonic() - 1.0, 0.5)
    scene.replicas.remove(worker)  # type: ignore[arg-type]
    find = scene.replicas.named

    def counted(name: str) -> replica.Replica | None:
        nonlocal checks
        checks += 1
        return find(name)

    monkeypatch.setattr(scene.replicas, "named", counted)
    scene.dispatcher.limits.restart([call])
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert checks == 1
    assert not call.ended
    scene.dispatcher.recover([], [call], EndCause())
    assert isinstance(scene.error(call), WorkerDied)


async def test_a_newcomer_does_not_overtake_those_who_wait():
    worker = Scripted(free=False)
    scene = Scene(worker)
    first = scene.submit("first")
    worker.credit = 2
    second = scene.submit("second")
    assert worker.sent == [first, second]


async def test_what_fails_in_the_queue_is_reported_with_its_time():
    scene = Scene(Scripted(free=False))
    waits = scene.submit("waits")
    scene.dispatcher.cancel(waits, stopped())
    scene.dispatcher.cancel(waits, stopped())
    (end,) = scene.ended
    assert isinstance(end.error, FunctionStopped)
    assert end.timeline.responded_s >= end.timeline.received_s


@pytest.mark.parametrize(
    ("idempotent", "streaming", "attempts"), [(False, False, 1), (True, False, MAX_ATTEMPTS), (True, True, 1)]
)
async def test_only_an_idempotent_invocation_without_a_stream_is_repeated(
    idempotent: bool, streaming: bool, attempts: int
):
    scene = Scene(worker := Scripted(), idempotent=idempotent)
    invocation = scene.submit("kills", streaming=streaming)
    for _ in range(attempts):
        assert not invocation.ended
        assert worker.sent.pop() is invocation
        worker.credit = 1
        scene.dispatcher.recover([], [invocation], EndCause("signal 9"))
    assert isinstance(scene.error(invocation), WorkerDied)
    assert ("idempotent = true" in scene.error(invocation).remedy) == (attempts == 1)
    assert worker.sent == []


async def test_a_worker_that_ran_out_of_memory_says_how_much_it_had():
    scene = Scene(Scripted(), resources={"memory_mb": 64})
    invocation = scene.submit("large")
    scene.dispatcher.recover([], [invocation], EndCause("signal 9", out_of_memory=True))
    error = scene.error(invocation)
    assert isinstance(error, OutOfMemory)
    assert "resources.memory_mb of the function is 64" in error.message


async def test_the_mean_time_of_a_start_leaves_out_starts_that_measured():
    scene = Scene()
    assert scene.dispatcher.durations.activation_s == 0
    scene.dispatcher.adopt(Scripted(measured=(Point(1, 9.0, 9.0),), took_s=100.0))
    assert scene.dispatcher.durations.activation_s == 0
    assert [point.p50_s for point in scene.dispatcher.durations.learned] == [9.0]
    scene.dispatcher.adopt(Scripted(took_s=2.0))
    assert scene.dispatcher.durations.activation_s == pytest.approx(2.0)
    scene.dispatcher.adopt(Scripted(took_s=4.0))
    assert scene.dispatcher.durations.activation_s == pytest.approx(2.6)


async def test_a_worker_on_another_device_brings_the_curve_of_that_device():
    scene = Scene()
    scene.curves.write("cuda", POINTS)
    scene.curves.write("cpu", [Point(4, 0.5, 0.5)])
    # Before the first worker starts, the dispatcher uses the curve that was stored last.
    scene.start()
    assert [point.size for point in scene.dispatcher.durations.learned] == [4]
    scene.dispatcher.adopt(Scripted(device="cuda"))
    assert [point.size for point in scene.dispatcher.durations.learned] == [1, 2]
    scene.dispatcher.adopt(Scripted(device="cpu"))
    assert [point.size for point in scene.dispatcher.durations.learned] == [1, 2, 4]


async def test_a_worker_that_has_not_started_is_expected_to_run_as_many_batches_as_fit_its_concurrency():
    scene = Scene(max_batch=2, concurrency=6)
    scene.curves.write("", POINTS)
    scene.start()
    # A worker runs three batches at a time. Seven items are three batches of two items and one batch of one item.
    assert scene.dispatcher.durations.work_s(7) == pytest.approx((3 * 0.03 + 0.02) / 3)


async def test_the_time_to_respond_to_a_batch_is_learned(monkeypatch: pytest.MonkeyPatch):
    scene = Scene(worker := Scripted(), max_batch=2)
    seen: list[float] = []
    monkeypatch.setattr(scene.dispatcher.queue.forecast, "observe_response", seen.append)
    invocation = scene.submit("one")
    now_s = time.monotonic()
    timing = (0.0, 0.01, 1, 1.0)
    scene.dispatcher.complete(worker, invocation, Output(b"1", ""), timing, now_s, BatchEnd(1, 1.0, 0.01))
    assert seen == []
    # The event loop takes the time after its present work, such as sending the responses.
    await asyncio.sleep(0)
    assert len(seen) == 1
    assert 0 <= seen[0] < 60


# -- with real workers

ONE = {"scale.max": 1}
POISONED = """
import gate, pilotflame
@pilotflame.batch(max_size=32)
def handler(events):
    if events == ["first"]:
        gate.wait("first")
    if "bad" in events:
        raise ValueError("poisoned")
    return [[event, len(events)] for event in events]
"""


async def together(function, gate: Gate, events: list[object]) -> list:
    """Invoke all events while another invocation occupies the worker, so that the events form one batch. Return the responses."""
    first = asyncio.create_task(function.answer("first"))
    await gate.next("first")
    calls = [asyncio.create_task(function.call(event)) for event in events]

    async def all_there() -> bool:
        status = await function.status()
        return status["in_flight"] + status["queued"] == 1 + len(events)

    await until(all_there, "all of the batch")
    gate.open()
    await first
    return await asyncio.gather(*calls)


async def test_one_poisoned_item_of_32_fails_alone(deploy, gate: Gate):
    function = await deploy(POISONED, ONE, gate=gate)
    answers = await together(function, gate, [*range(16), "bad", *range(16, 31)])
    bad = answers.pop(16)
    assert [answer.json()[0] for answer in answers] == list(range(31))
    assert failure(bad)["type"] == "handler_failed"
    assert "poisoned" in failure(bad)["message"]


async def test_an_item_that_hangs_in_a_batch_is_found(deploy, gate: Gate):
    source = """
import gate, os, pilotflame, threading
@pilotflame.batch(max_size=8)
def handler(events):
    if events == ["first"]:
        gate.wait("first")
    if "stuck" in events:
        threading.Event().wait()
    return [[event, os.getpid()] for event in events]
"""
    # The limit is long enough for all calls to arrive while the first call occupies the worker.
    function = await deploy(source, {**ONE, "execution_timeout_s": 3.0}, gate=gate)
    pid = (await function.answer("before"))[1]
    answers = await together(function, gate, [1, 2, 3, "stuck", 4, 5, 6])
    stuck = answers.pop(3)
    assert [answer.json()[0] for answer in answers] == [1, 2, 3, 4, 5, 6]
    assert all(answer.json()[1] != pid for answer in answers)
    assert (failure(stuck)["status"], failure(stuck)["type"]) == (504, "deadline_exceeded")
    assert "execution_timeout_s" in failure(stuck)["message"]
    await gone(pid)
    assert (await function.answer("after"))[0] == "after"


async def test_beside_a_stuck_invocation_others_finish_and_behind_it_they_run_elsewhere(
    deploy, gate: Gate, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(time_limits, "CANCEL_GRACE_S", 0.1)
    source = """
import gate, os, threading
def handler(event):
    if event == "stuck":
        gate.say("stuck")
        threading.Event().wait()
    if event == "neighbour":
        gate.wait("neighbour")
    return os.getpid()
"""
    function = await deploy(source, {**ONE, "concurrency": 2, "execution_timeout_s": 2.0}, gate=gate)
    pid = await function.answer("before")
    stuck = asyncio.create_task(function.call("stuck"))
    await gate.next("stuck")
    # Start the neighbour later, so that its time limit ends after the stuck call's limit.
    await asyncio.sleep(1.0)
    neighbour = asyncio.create_task(function.answer("neighbour"))
    arrival = await gate.next("neighbour")
    behind = asyncio.create_task(function.answer("behind"))
    assert failure(await stuck)["status"] == 504
    # The old worker is sent nothing more.
    assert await behind != pid
    arrival.go()
    assert await neighbour == pid
    await gone(pid)


# The calls are so short that their worker is sent several at a time.
SHORT = """
import gate, os
def handler(event):
    if event:
        gate.wait(event)
    return os.getpid()
"""
ON_LOOP = SHORT.replace("def handler", "async def handler").replace("gate.wait", "await gate.wait_async")


@pytest.mark.parametrize("source", [SHORT, ON_LOOP], ids=["thread", "loop"])
async def test_short_calls_do_not_wait_behind_a_long_one(deploy, gate: Gate, source: str):
    function = await deploy(source, gate=gate)
    for _ in range(5):
        await function.answer("")
    # The long call and a short call are sent together, before the worker can know that the first is long.
    long = asyncio.create_task(function.answer("long"))
    together = asyncio.create_task(function.answer(""))
    arrival = await gate.next("long")
    async with asyncio.timeout(10.0):
        await together
        others = {await function.answer("") for _ in range(3)}
    assert arrival.pid not in others
    assert not long.done()
    arrival.go()
    assert await long == arrival.pid


async def test_a_stuck_async_handler_is_interrupted_and_its_worker_stays(deploy):
    source = "import asyncio, os\nasync def handler(event):\n    if event:\n        await asyncio.Event().wait()\n    return os.getpid()"
    function = await deploy(source, {**ONE, "execution_timeout_s": 0.1})
    pid = await function.answer(0)
    assert (await function.error(1))["status"] == 504
    await function.settled(ready=1, in_flight=0)
    assert await function.answer(0) == pid


async def test_an_item_that_kills_its_worker_fails_alone(deploy, gate: Gate):
    source = """
import gate, os, pilotflame
@pilotflame.batch(max_size=8)
def handler(events):
    if events == ["first"]:
        gate.wait("first")
    if "bad" in events:
        os._exit(3)
    return [event for event in events]
"""
    function = await deploy(source, ONE, gate=gate)
    answers = await together(function, gate, [1, 2, "bad", 3])
    bad = answers.pop(2)
    assert [answer.json() for answer in answers] == [1, 2, 3]
    assert failure(bad)["type"] == "worker_died"


async def test_an_invocation_behind_another_has_its_full_time(deploy):
    source = """
import os, time
def handler(event):
    time.sleep(event)
    return os.getpid()
"""
    function = await deploy(source, {**ONE, "execution_timeout_s": 1.0})
    # The calls are so short that the worker begins to prefetch.
    for _ in range(20):
        pid = await function.answer(0)
    assert await asyncio.gather(function.answer(0.7), function.answer(0.7)) == [pid, pid]


async def test_a_requeued_invocation_has_its_hold_time_again(deploy, gate: Gate):
    source = """
import gate, os, signal
def setup(context):
    gate.wait("setup")
def handler(event, context):
    if context.attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return context.attempt
"""
    limits = {"execution_timeout_s": 0.3, "idempotent": True, "scale.idle_timeout_s": 0.1}
    function = await deploy(source, {**ONE, **limits}, gate=gate, check=False)
    call = asyncio.create_task(function.answer("again"))
    (await gate.next("setup")).go()
    second = await gate.next("setup")
    # The start takes longer than `execution_timeout_s`, which must not limit it.
    await asyncio.sleep(0.6)
    second.go()
    assert await call == 2


async def test_an_invocation_that_would_be_late_is_refused_at_once_with_retry_after(deploy, gate: Gate):
    source = "import gate, time\ndef handler(event):\n    time.sleep(0.2)\n    if event == 'held':\n        gate.wait('held')\n    return event"
    function = await deploy(source, ONE, gate=gate)
    await function.answer("measured")
    held = asyncio.create_task(function.answer("held"))
    await gate.next("held")
    waits = asyncio.create_task(function.answer("waits"))
    await function.settled(ready=1, in_flight=1, queued=1)
    refused = await function.call("refused", X_Request_Timeout="0.3")
    error = failure(refused)
    assert (error["status"], error["type"]) == (503, "overloaded")
    assert int(refused.headers["Retry-After"]) >= 1
    assert int(refused.headers["retry-after-ms"]) == pytest.approx(
        error["details"]["retry_after_s"] * 1000, abs=2
    )
    gate.open()
    assert await held == "held"
    assert await waits == "waits"
    assert await function.answer("refused", X_Request_Timeout="5") == "refused"


async def test_a_caller_who_cannot_wait_for_an_activation_is_refused_and_causes_it(deploy, gate: Gate):
    source = "import gate\ndef setup(context):\n    gate.wait('setup')\ndef handler(event):\n    return event"
    function = await deploy(source, {**ONE, "scale.idle_timeout_s": 0.05}, gate=gate, check=False)
    first = asyncio.create_task(function.answer(1))
    arrival = await gate.next("setup")
    # Make the activation take longer than the time limit of the next call.
    await asyncio.sleep(0.3)
    arrival.go()
    assert await first == 1
    await function.settled()
    refused = await function.call(2, X_Request_Timeout="0.1")
    assert (refused.status_code, failure(refused)["type"]) == (503, "overloaded")
    assert 0.1 < failure(refused)["details"]["retry_after_s"] < 60
    # The refused call has started a worker.
    (await gate.next("setup")).go()
    assert await function.answer(2) == 2


async def test_without_a_curve_nothing_is_refused(deploy, gate: Gate):
    function = await deploy(
        "import gate\ndef handler(event):\n    gate.wait(str(event))\n    return event", ONE, gate=gate
    )
    calls = [asyncio.create_task(function.answer(n, X_Request_Timeout="20")) for n in range(5)]
    await function.settled(ready=1, in_flight=1, queued=4)
    gate.open()
    assert await asyncio.gather(*calls) == list(range(5))


async def test_priority_then_fairness_then_deadlines(gateway, deploy, gate: Gate):
    source = "import gate\ndef handler(event):\n    gate.wait(str(event))\n    return event"
    function = await deploy(source, ONE, gate=gate)
    assert gateway.server is not None
    revision = gateway.server.functions.live(function.name)

    def submit(name: str, *, tenant: str = "a", priority: int = 3, timeout_s: float = 60.0) -> Invocation:
        now_s = time.monotonic()
        invocation = Invocation(
            name, f'"{name}"'.encode(), now_s=now_s, deadline_s=now_s + timeout_s, hold_until_s=now_s + timeout_s,
            tenant=tenant, priority=priority,
        )  # fmt: skip
        revision.submit(invocation)
        return invocation

    running = [submit("running")]
    await gate.next("running")
    running += [submit(f"a{n}") for n in range(4)]
    running += [submit("b0", tenant="b"), submit("b1", tenant="b"), submit("late", tenant="c", priority=5)]
    running += [submit("soon", timeout_s=30.0), submit("first", tenant="c", priority=1)]
    gate.open()
    await asyncio.gather(*(invocation.output for invocation in running))
    ran = [arrival.word for arrival in gate.arrived]
    assert ran[:2] == ["running", "first"]
    assert ran[-1] == "late"
    assert [name for name in ran if name[0] == "b"] == ["b0", "b1"]
    assert [name for name in ran if name in ("soon", "a0", "a1", "a2", "a3")] == [
        "soon",
        "a0",
        "a1",
        "a2",
        "a3",
    ]
    # Tenants alternate, although a0 to a3 came before the calls of tenant b.
    assert set(ran[2:6]) >= {"b0", "b1"}


async def test_a_measured_curve_is_stored_at_zero(gateway, deploy):
    source = """
import pilotflame, time
calls = []
@pilotflame.batch(max_size=4, example=0)
def handler(events):
    calls.append(len(events))
    time.sleep(0.001 * len(events))
    return [calls] * len(events)
"""
    function = await deploy(source, {**ONE, "scale.idle_timeout_s": 0.05})
    assert gateway.server is not None
    queue = gateway.server.functions.live(function.name).dispatcher.queue
    sizes = [point.size for point in queue.curve.points]
    # The curve was measured at the deploy.
    assert sizes == [1, 2, 4]
    await function.settled()
    again = await deploy(source, {**ONE, "scale.min": 1})
    queue = gateway.server.functions.live(again.name).dispatcher.queue
    assert [point.size for point in queue.curve.points] == sizes
    # The new worker has not measured, so this call is its handler's first.
    assert await again.answer(0) == [1]


async def test_each_call_of_a_split_batch_has_its_full_time(deploy, gate: Gate):
    source = """
import gate, os, pilotflame, time
@pilotflame.batch(max_size=8)
def handler(events):
    if events == ["first"]:
        gate.wait("first")
    time.sleep(0.2)
    if "bad" in events:
        raise ValueError
    return [[event, os.getpid()] for event in events]
"""
    function = await deploy(source, {**ONE, "execution_timeout_s": 0.6}, gate=gate)
    # Bisection makes seven handler calls of 0.2 s. Together they exceed the limit of 0.6 s.
    answers = await together(function, gate, [1, 2, 3, "bad", 4, 5, 6, 7])
    bad = answers.pop(3)
    assert [answer.json()[0] for answer in answers] == [1, 2, 3, 4, 5, 6, 7]
    assert len({answer.json()[1] for answer in answers}) == 1
    assert failure(bad)["type"] == "handler_failed"


async def _beside_a_short_deadline(deploy, call_s: float, deadline_s: float) -> None:
    """Send a call with a short deadline to a worker with 50 equal calls without one. The worker must answer all 50."""
    source = """
import os, time
def handler(event):
    time.sleep(event)
    return os.getpid()
"""
    function = await deploy(source, {**ONE, "concurrency": 64})
    pid = await function.answer(0)
    calls = [asyncio.create_task(function.answer(call_s)) for _ in range(50)]
    await function.settled(ready=1, in_flight=50)
    late = await function.error(call_s, X_Request_Timeout=str(deadline_s))
    assert (late["status"], late["type"]) == (504, "deadline_exceeded")
    assert await asyncio.gather(*calls) == [pid] * 50
    await function.settled(ready=1, in_flight=0)
    assert await function.answer(0) == pid


async def test_a_callers_deadline_ends_no_other_call(deploy, monkeypatch):
    monkeypatch.setattr(replica, "EXIT_TIMEOUT_S", 0.2)
    monkeypatch.setattr(time_limits, "CANCEL_GRACE_S", 0.2)
    await _beside_a_short_deadline(deploy, 3.0, 1.0)


@pytest.mark.slow
async def test_a_callers_deadline_ends_no_call_of_40_seconds(deploy):
    """The calls take longer than CANCEL_GRACE_S and EXIT_TIMEOUT_S together."""
    await _beside_a_short_deadline(deploy, 40.0, 1.0)
