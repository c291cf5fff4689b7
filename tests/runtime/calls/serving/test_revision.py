"""A revision: the number of its workers, invocations whose worker dies or cannot start, and what it reports."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
from live import Gate, failure, gone, until
from pilotflame.errors import HandlerFailed, Overloaded, PilotflameError, RevisionRetired
from pilotflame.runtime.calls.serving import revision as module
from pilotflame.runtime.calls.serving import time_limits
from pilotflame.runtime.calls.serving.invocation import Invocation, Output
from pilotflame.runtime.calls.serving.revision import Revision
from pilotflame.runtime.ground.telemetry.timeline import Activation

pytestmark = pytest.mark.asyncio(loop_scope="module")

PID = "import os\ndef handler(event):\n    return os.getpid()"
# Fails in setup until the file $OK exists.
STARTS_LATER = """
import os
def setup(context):
    if not os.path.exists(os.environ["OK"]):
        raise OSError("no licence")
def handler(event):
    return event
"""
WAITS = "import gate, os\ndef handler(event):\n    gate.wait(str(event))\n    return event"


# -- the number of workers


async def test_back_to_zero_when_idle(deploy):
    function = await deploy(PID, {"scale.idle_timeout_s": 0})
    pids = []
    for _ in range(3):
        response = await function.call()
        assert response.headers["x-cold-start"] == "true"
        pids.append(response.json())
        await gone(pids[-1])
        await function.settled(ready=0)
    assert len(set(pids)) == 3


async def test_a_minimum_is_kept_and_kept_up(deploy):
    function = await deploy(PID, {"scale.min": 2, "scale.idle_timeout_s": 0})
    await function.settled(ready=2)
    victim = (await function.pids("worker"))[0]
    os.kill(victim, signal.SIGKILL)
    await gone(victim)
    await function.settled(ready=2)
    assert victim not in await function.pids("worker")
    assert (await function.call()).headers["x-cold-start"] == "false"


async def test_one_more_is_started_near_the_limit(deploy, gate: Gate):
    source = "import gate\nasync def handler(event):\n    await gate.wait_async()\n    return event"
    function = await deploy(source, {"concurrency": 5, "scale.max": 3}, gate=gate)
    calls = []
    for n in range(4):
        calls.append(asyncio.create_task(function.answer(n)))
        await gate.next()
    assert {arrival.pid for arrival in gate.arrived} == set(await function.pids("worker"))
    await function.settled(ready=1, in_flight=4)
    # With the fifth call, the worker has no free slot, and a sixth call would wait.
    calls.append(asyncio.create_task(function.answer(4)))
    await function.settled(ready=2, in_flight=5)
    gate.open()
    assert await asyncio.gather(*calls) == list(range(5))


async def test_async_handlers_run_side_by_side(deploy, gate: Gate):
    source = "import gate\nasync def handler(event):\n    await gate.wait_async()\n    return event"
    function = await deploy(source, {"concurrency": 10, "scale.max": 1}, gate=gate)
    calls = [asyncio.create_task(function.answer(n)) for n in range(10)]
    arrivals = [await gate.next() for _ in range(10)]
    assert len({arrival.pid for arrival in arrivals}) == 1
    gate.open()
    assert await asyncio.gather(*calls) == list(range(10))


async def test_plain_handlers_run_on_as_many_threads(deploy, gate: Gate):
    function = await deploy(WAITS, {"concurrency": 3, "scale.max": 1}, gate=gate)
    calls = [asyncio.create_task(function.answer(n)) for n in range(4)]
    for _ in range(3):
        await gate.next()
    gate.open()
    assert await asyncio.gather(*calls) == list(range(4))


async def test_no_more_than_the_maximum(deploy, gate: Gate):
    function = await deploy(WAITS, {"scale.max": 2}, gate=gate)
    calls = [asyncio.create_task(function.answer(n)) for n in range(6)]
    for _ in range(2):
        await gate.next()
    await function.settled(ready=2, in_flight=2, queued=4)
    gate.open()
    assert await asyncio.gather(*calls) == list(range(6))


# -- workers that die


async def test_a_killed_worker_fails_only_what_it_had_started(deploy, gate: Gate):
    function = await deploy(WAITS, {"scale.max": 2}, gate=gate)
    calls = [asyncio.create_task(function.call(n)) for n in range(16)]
    victim, other = await gate.next(), await gate.next()
    assert victim.pid != other.pid
    os.kill(victim.pid, signal.SIGKILL)
    await gone(victim.pid)
    gate.open()
    responses = await asyncio.gather(*calls)
    failed = {n: failure(response) for n, response in enumerate(responses) if response.status_code != 200}
    assert list(failed) == [int(victim.word)]
    error = failed[int(victim.word)]
    assert (error["status"], error["type"]) == (500, "worker_died")
    assert "SIGKILL" in error["message"]
    assert "idempotent" in error["remedy"]
    assert [r.json() for n, r in enumerate(responses) if n not in failed] == [
        n for n in range(16) if n not in failed
    ]


async def test_a_killed_worker_of_an_idempotent_function_fails_nothing(deploy, gate: Gate):
    source = "import gate\ndef handler(event, context):\n    gate.wait(str(event))\n    return [event, context.attempt]"
    function = await deploy(source, {"scale.max": 2, "idempotent": True}, gate=gate)
    calls = [asyncio.create_task(function.answer(n)) for n in range(16)]
    victim = await gate.next()
    os.kill(victim.pid, signal.SIGKILL)
    gate.open()
    answers = await asyncio.gather(*calls)
    assert answers == [[n, 2 if n == int(victim.word) else 1] for n in range(16)]


@pytest.mark.parametrize("kind", ["plain", "async", "batch"])
@pytest.mark.parametrize("idempotent", [False, True])
async def test_kills_under_load(deploy, kind: str, idempotent: bool):
    source = {
        "plain": "import os\ndef handler(event):\n    return [event, os.getpid()]",
        "async": "import asyncio, os\nasync def handler(event):\n    await asyncio.sleep(0)\n    return [event, os.getpid()]",
        "batch": "import os, pilotflame\n@pilotflame.batch(max_size=4)\n"
        "def handler(events):\n    return [[event, os.getpid()] for event in events]",
    }[kind]
    settings = {"scale.max": 2, "idempotent": idempotent, "concurrency": 2 if kind == "async" else 1}
    function = await deploy(source, settings)
    failed, killed = [], set()

    async def caller(number: int) -> None:
        for n in range(20):
            response = await function.call([number, n])
            if response.status_code != 200:
                failed.append(failure(response))
                continue
            event, pid = response.json()
            assert event == [number, n]
            if number == 0 and n % 5 == 0 and pid not in killed:
                killed.add(pid)
                os.kill(pid, signal.SIGKILL)

    await asyncio.gather(*(caller(number) for number in range(16)))
    assert len(killed) >= 2
    assert {error["type"] for error in failed} <= (set() if idempotent else {"worker_died"})
    assert len(failed) <= len(killed) * (4 if kind == "batch" else settings["concurrency"])


async def test_an_invocation_that_kills_every_worker_fails(deploy):
    source = "import os, signal\ndef handler(event):\n    os.kill(os.getpid(), signal.SIGKILL)"
    function = await deploy(source, {"idempotent": True})
    error = await function.error()
    assert (error["status"], error["type"]) == (500, "worker_died")
    assert "attempt 3" in error["message"]


async def test_a_stream_is_not_repeated(deploy, gate: Gate):
    source = "import gate\ndef handler(event):\n    yield 1\n    gate.wait()"
    function = await deploy(source, {"idempotent": True}, gate=gate)
    call = asyncio.create_task(function.call())
    os.kill((await gate.next()).pid, signal.SIGKILL)
    text = (await call).text
    assert text.count("event: output") == 1
    assert '"type":"worker_died"' in text.partition("event: error")[2]


# -- workers that cannot start


async def test_a_worker_killed_while_it_restores(deploy, gate: Gate):
    source = "import gate\ndef setup(context):\n    gate.wait('setup')\ndef handler(event):\n    return event"
    function = await deploy(source, gate=gate, check=False)
    call = asyncio.create_task(function.answer(1))
    first = await gate.next("setup")
    os.kill(first.pid, signal.SIGKILL)
    # The gateway starts another worker for the waiting invocation.
    second = await gate.next("setup")
    assert second.pid != first.pid
    second.go()
    assert await call == 1


async def test_a_crash_loop_is_bounded(deploy):
    source = "import os\ndef setup(context):\n    os._exit(7)\ndef handler(event):\n    return event"
    function = await deploy(source, check=False)
    for round_ in (1, 2):
        error = await function.error()
        assert (error["status"], error["type"]) == (500, "activation_failed")
        assert "exit code 7" in error["message"]
        status = await function.settled(ready=0)
        assert status["activations"] <= 3 * round_


async def test_a_failing_setup_fails_those_that_wait(deploy, tmp_path):
    function = await deploy(STARTS_LATER, {"scale.max": 1, "env.OK": str(tmp_path / "ok")}, check=False)
    for error in await asyncio.gather(*(function.error(n) for n in range(3))):
        assert (error["status"], error["type"]) == (500, "handler_setup_failed")
        assert (error["details"]["file"], error["details"]["line"]) == ("handler.py", 5)
        assert "OSError: no licence" in error["message"]
    (tmp_path / "ok").touch()
    assert await function.answer(1) == 1


async def test_workers_that_no_invocation_needs_are_not_started_again_and_again(deploy, monkeypatch):
    monkeypatch.setattr("pilotflame.runtime.node.reconciling.start_outcomes.FIRST_BACKOFF_S", 3600.0)
    monkeypatch.setattr("pilotflame.runtime.node.reconciling.start_outcomes.MAX_BACKOFF_S", 3600.0)
    source = "def setup(context):\n    raise OSError\ndef handler(event):\n    return event"
    function = await deploy(source, {"scale.min": 1}, check=False)
    await function.logged("activation failed")
    await function.settled(ready=0)
    assert (await function.status())["activations"] == 1


async def test_the_first_delay_after_a_failed_start_is_half_a_second(gateway, deploy):
    source = "def setup(context):\n    raise OSError\ndef handler(event):\n    return event"
    function = await deploy(source, check=False)
    assert gateway.server is not None
    breaker = gateway.server.functions.get(function.name).workers.breaker
    assert (await function.error())["type"] == "handler_setup_failed"
    assert 0.3 < breaker.backoff_until_s - time.monotonic() <= 0.5


async def test_a_crash_loop_costs_five_starts_and_then_callers_get_the_reason_at_once(deploy):
    source = "def setup(context):\n    raise OSError('no licence')\ndef handler(event):\n    return event"
    function = await deploy(source, check=False)
    errors = [await function.error() for _ in range(5)]
    assert {error["type"] for error in errors} == {"handler_setup_failed"}
    for _ in range(3):
        response = await function.call()
        error = response.json()["error"]
        assert (response.status_code, error["type"]) == (503, "crash_loop")
        assert "OSError: no licence" in error["message"]
        assert error["details"]["cause"] == "handler_setup_failed"
        assert int(response.headers["retry-after"]) > 0
    assert (await function.status())["activations"] == 5


async def test_workers_that_die_in_setup_open_the_breaker_and_nobody_waits_for_them(deploy):
    source = "import os\ndef setup(context):\n    os._exit(3)\ndef handler(event):\n    return event"
    function = await deploy(source, check=False)
    types = [(await function.error())["type"] for _ in range(3)]
    assert types == ["activation_failed", "activation_failed", "crash_loop"]
    assert (await function.status())["activations"] == 5


async def test_a_burst_on_a_function_that_cannot_start_costs_its_workers_and_one_more(deploy):
    source = "def setup(context):\n    raise OSError\ndef handler(event):\n    return event"
    function = await deploy(source, {"scale.max": 4}, check=False)
    for _ in range(4):
        await asyncio.gather(*(function.error() for _ in range(30)))
    assert (await function.status())["activations"] <= 5


async def test_the_breaker_closes_when_a_start_after_the_back_off_succeeds(deploy, tmp_path, monkeypatch):
    monkeypatch.setattr("pilotflame.runtime.node.reconciling.start_outcomes.FIRST_BACKOFF_S", 0.01)
    function = await deploy(STARTS_LATER, {"env.OK": str(tmp_path / "ok")}, check=False)
    types = [(await function.error())["type"] for _ in range(6)]
    assert types == ["handler_setup_failed"] * 5 + ["crash_loop"]
    (tmp_path / "ok").touch()

    async def answers() -> bool:
        return (await function.call(1)).status_code == 200

    await until(answers, "a start after the back-off")
    assert await function.answer(2) == 2


async def test_reset_closes_the_breaker_and_runs_the_jobs_that_wait(gateway, deploy, tmp_path, monkeypatch):
    # Without the reset, nothing would start for an hour.
    monkeypatch.setattr("pilotflame.runtime.node.reconciling.start_outcomes.FIRST_BACKOFF_S", 3600.0)
    monkeypatch.setattr("pilotflame.runtime.node.reconciling.start_outcomes.MAX_BACKOFF_S", 3600.0)
    function = await deploy(STARTS_LATER, {"env.OK": str(tmp_path / "ok")}, check=False)
    for _ in range(5):
        await function.error()
    jobs = f"/v2/{function.name}"
    job = (await gateway.client.post(f"{jobs}/run", json={"input": 1})).json()["id"]
    for _ in range(10):
        assert (await function.error())["type"] == "crash_loop"
    assert (await gateway.client.get(f"{jobs}/status/{job}")).json()["status"] == "IN_QUEUE"
    (tmp_path / "ok").touch()
    assert (await gateway.client.post(f"/v1/functions/{function.name}/reset")).status_code == 200

    async def completed() -> bool:
        return (await gateway.client.get(f"{jobs}/status/{job}")).json()["status"] == "COMPLETED"

    await until(completed, "the end of the job")


async def test_starts_of_workers_are_counted_by_outcome(gateway, deploy, tmp_path):
    function = await deploy(STARTS_LATER, {"scale.max": 1, "env.OK": str(tmp_path / "ok")}, check=False)
    await function.error()
    (tmp_path / "ok").touch()
    await function.answer(1)
    text = (await gateway.client.get("/metrics")).text
    for outcome in ("ready", "failed"):
        labels = f'{{function="{function.name}",outcome="{outcome}"}}'
        assert f"pilotflame_activations_total{labels} 1.0" in text


async def test_a_revision_that_retires_accepts_nothing_more(gateway, deploy, gate: Gate):
    function = await deploy(WAITS, {"scale.max": 1}, gate=gate)
    assert gateway.server is not None
    workers = gateway.server.functions.get(function.name).workers
    revision = workers.revision
    running = asyncio.create_task(function.answer("runs"))
    await gate.next("runs")
    retiring = asyncio.create_task(workers.retire(20.0))
    await asyncio.sleep(0)
    now_s = time.monotonic()
    late = Invocation("late", b"1", now_s=now_s, deadline_s=now_s + 60, hold_until_s=now_s + 60)
    with pytest.raises(RevisionRetired):
        revision.submit(late)
    gate.open()
    assert await running == "runs"
    await retiring


async def test_nothing_keeps_a_replaced_revision_in_memory(gateway, deploy, gate: Gate):
    """No timer of a job with a long time to live, or of a disconnected caller, refers to the old revision."""
    source = "import gate\nasync def handler(event):\n    await gate.wait_async(str(event))\n    return event"
    function = await deploy(source, {"concurrency": 2, "scale.max": 1, "timeout_s": 7200.0}, gate=gate)
    job = await function.client.post(
        f"/v2/{function.name}/run", json={"input": "job", "policy": {"ttl": 86_400_000}}
    )
    await gate.next("job")
    leaver = asyncio.create_task(function.call("leaves"))
    await gate.next("leaves")
    waits = asyncio.create_task(function.call("waits"))
    await function.settled(ready=1, in_flight=2, queued=1)
    for call in (leaver, waits):
        call.cancel()
    gate.open()
    assert gateway.server is not None
    revision = weakref.ref(gateway.server.functions.live(function.name))
    assert job.status_code == 200
    await gateway.deploy(PID, name=function.name)

    async def collected() -> bool:
        gc.collect()
        return revision() is None

    try:
        await until(collected, "the end of the old revision in memory")
    except AssertionError as error:
        holders = [f"{type(one).__qualname__}: {str(one)[:200]}" for one in gc.get_referrers(revision())]
        raise AssertionError(f"{error}; it is held by {holders}") from None


# -- how workers end


async def ended(function, cause: str) -> dict[str, object]:
    """Return the line of the log that says how a worker has ended."""
    line = await function.logged(f"ended with {cause}")
    assert (line["source"], line["level"]) == ("gateway", "error")
    return line


async def test_a_worker_that_exits_is_logged_with_its_last_words(deploy):
    function = await deploy("import os\ndef handler(event):\n    print('giving up')\n    os._exit(7)\n")
    response = await function.call()
    assert failure(response)["type"] == "worker_died"
    line = await ended(function, "exit code 7")
    assert "its last words: giving up" in line["text"]
    assert line["request_id"] == response.headers["X-Request-Id"]


async def test_the_last_words_are_of_this_death_and_not_of_earlier_calls(deploy):
    source = "import os\ndef handler(event):\n    print('call', event)\n    if event == 2: os._exit(7)\n"
    function = await deploy(source)
    await function.answer(1)
    await function.call(2)
    line = await ended(function, "exit code 7")
    assert line["text"].endswith("its last words: call 2")


async def test_a_worker_that_is_killed_is_logged_also_without_work(deploy):
    function = await deploy(PID)
    pid = await function.answer()
    os.kill(pid, signal.SIGKILL)
    await ended(function, "signal 9 (SIGKILL)")


async def test_a_crash_is_logged_with_its_stack_which_no_job_gets(deploy):
    source = "import ctypes\ndef handler(event):\n    print('before')\n    ctypes.string_at(0)\n"
    function = await deploy(source, {"attempts": 1})
    job = (await function.client.post(f"/v2/{function.name}/runsync", json={"input": 1})).json()
    assert (job["status"], job["logs"]) == ("FAILED", "before")
    await ended(function, "signal 11 (SIGSEGV)")
    texts = [line["text"] for line in await function.lines()]
    assert "Fatal Python error: Segmentation fault" in texts
    assert any("handler.py" in text and "line 4 in handler" in text for text in texts)


@pytest.mark.parametrize("kind", ["def", "async def"])
async def test_a_stuck_worker_leaves_the_stack_of_its_thread(
    deploy, gate: Gate, kind: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(time_limits, "CANCEL_GRACE_S", 0.2)
    source = f"import gate\n{kind} handler(event):\n    gate.wait('stuck')\n"
    settings = {"execution_timeout_s": 0.2, "env.GATE": str(gate.path)}
    function = await deploy(source, settings)
    job = (await function.client.post(f"/v2/{function.name}/runsync", json={"input": 1})).json()
    assert job["status"] == "TIMED_OUT"
    assert "line" not in job.get("logs", "")
    await ended(function, "signal 9 (SIGKILL), sent by the gateway because a call of the handler did not end")
    texts = [line["text"] for line in await function.lines()]
    assert any("handler.py" in text and "line 3 in handler" in text for text in texts)


async def test_a_worker_that_drains_is_no_error(deploy):
    function = await deploy(PID, {"scale.idle_timeout_s": 0})
    await function.answer()
    proof = await function.logged(", the proof start of the deploy, has drained and ended")
    assert proof["level"] == "info"
    assert (await function.status())["last_errors"] == []


# -- what a revision reports to its watcher


class Calls:
    """A revision. This object replaces its dispatcher, its workers and its watcher. `told` records their calls."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.told: list[Any] = []
        self.queue: list[Invocation] = []
        self.ready: list[Any] = []
        self.parked = self.in_flight = self.completed = self.most = 0
        self.sent: bool | PilotflameError = True
        self.limits, self.ready_s = SimpleNamespace(given_up=0), 0.0
        patch.setattr(module, "Dispatcher", lambda *_: self)
        this: Any = self
        policy: Any = SimpleNamespace(streaming=False, scale=SimpleNamespace(max=3))
        spec: Any = SimpleNamespace(function="f")
        load: Any = SimpleNamespace(note_queued=lambda _at_s, queued: self.told.append(("queued", queued)))
        arrivals: Any = SimpleNamespace(note=lambda _at_s: None)
        self.revision = Revision(
            spec, policy, this, this, this, this, load, arrivals, lambda at_s: self.told.append(("called", at_s)),
            lambda _end: None, (), this,
        )  # fmt: skip
        self.revision._notice_at_s = 1e9

    def look(self, arriving: int = 0) -> None:
        self.told.append(("look", arriving) if arriving else "look")

    def __getattr__(self, name: str) -> Any:
        return lambda *given, **more: self.told.append(
            (name, *given, *more.values()) if given or more else name
        )

    def has(self, most: int) -> bool:
        return self.most >= most

    def explain(self, error: PilotflameError) -> PilotflameError:
        return error

    def complete(self, *_given: Any) -> None: ...

    def dispatch(self) -> None:
        self.queue.pop()

    def submit(self, invocation: Invocation) -> bool:
        if isinstance(self.sent, PilotflameError):
            raise self.sent
        if not self.sent:
            self.queue.append(invocation)
        return self.sent

    def call(self, now_s: float = 10.0) -> Invocation:
        made = Invocation("i", b"", now_s=now_s, deadline_s=now_s + 9, hold_until_s=now_s + 9)
        self.told.clear()
        self.revision.submit(made)
        return made

    def end(self, invocation: Invocation, outcome: Output | PilotflameError) -> None:
        self.told.clear()
        outstanding, activation = SimpleNamespace(batching=False), Activation(9.0, 9.0, self.ready_s)
        replica: Any = SimpleNamespace(name="w1", outstanding=outstanding, activation=activation)
        self.revision.on_end(replica, invocation, outcome, (0.0, 1.0, 1, 1.0), 20.0, None)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


@pytest.mark.parametrize(
    ("in_flight", "waiting", "workers", "told"),
    [
        (2, None, 1, []),
        (3, None, 1, ["look"]),
        (2, 1, 1, [("queued", 2), "look_soon"]),
        (2, 2, 1, ["look"]),
        # With the most workers that `scale.max` allows, a longer queue starts no further worker.
        (2, 2, 3, [("queued", 3)]),
        (3, 2, 3, ["look"]),
    ],
)
async def test_an_arrival_is_looked_at_where_it_may_need_another_worker(
    calls: Calls, in_flight: int, waiting: int | None, workers: int, told: list[Any]
) -> None:
    calls.revision.enough = calls.revision.enough_queued = 2
    calls.in_flight, calls.most, calls.sent = in_flight, workers, waiting is None
    calls.queue += [None] * (waiting or 0)  # type: ignore[list-item]
    calls.call()
    assert calls.told == told
    assert calls.revision.peak == (0 if told == ["look"] else in_flight)


async def test_a_parked_worker_wakes_for_the_first_call(calls: Calls) -> None:
    calls.parked = 1
    calls.call()
    assert calls.told == [("look", 1), "look"]
    calls.ready.append(None)
    calls.call()
    assert calls.told == ["look"]
    calls.revision.enough = 5
    calls.ready.clear()
    calls.call()
    assert calls.told == []


async def test_calls_are_noticed_at_most_twice_a_second(calls: Calls) -> None:
    calls.revision.enough, calls.revision._notice_at_s = 9, 0.0
    noticed = []
    for at_s in (10.0, 10.4, 10.5, 10.9, 12.0):
        calls.call(at_s)
        noticed += calls.told
    assert noticed == [("called", 10.0), ("called", 10.5), ("called", 12.0)]


async def test_calls_that_waited_for_a_start_and_calls_that_could_not_are_slow(calls: Calls) -> None:
    calls.revision.enough, calls.completed = 9, 2
    first, second = calls.call(), calls.call(12.0)
    calls.ready_s = 11.0
    for one in (first, second):
        calls.end(one, Output(b"1", ""))
    assert calls.revision.slow == (1, 2)
    calls.sent = Overloaded("late")
    with pytest.raises(Overloaded):
        calls.call()
    assert calls.told == ["on_refused"]
    assert calls.revision.slow == (2, 3)
    # With a ready worker, the refused call was not refused because of a start, so `slow` does not count it.
    calls.ready.append(None)
    with pytest.raises(Overloaded):
        calls.call()
    calls.limits.given_up = 1
    assert (calls.told, calls.revision.slow) == ([], (3, 4))


async def test_the_end_of_a_call_is_told_with_its_error_and_whether_others_still_wait(calls: Calls) -> None:
    calls.revision.enough = calls.revision.enough_queued = 2
    calls.revision.follows_until_s = 10.0
    early, late = calls.call(), calls.call(10.1)
    calls.end(early, Output(b"1", ""))
    assert [one[0] for one in calls.told] == ["on_followed", "on_room"]
    assert calls.told[0][1] == 10.0
    calls.queue += [late] * 3
    calls.end(late, HandlerFailed("no", details={"traceback": "line 1"}))
    assert [one[0] for one in calls.told] == ["write", "on_room"]
    assert (calls.told[0][2:], calls.told[1][-1]) == (("no\nline 1", "error", "i"), False)
    calls.queue.append(late)
    calls.end(late, Output(b"1", ""))
    assert calls.told[-1][-1] is False
    calls.queue += [late] * 2
    calls.end(late, Output(b"1", ""))
    assert calls.told[-1][-1] is True
