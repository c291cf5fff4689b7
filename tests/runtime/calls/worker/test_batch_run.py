"""Groups of a batch handler, on threads and on the event loop: packing by cost, bisection, and the limit after memory ran out."""

import asyncio
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from live import Gate, failure, until
from pilotflame.errors import BadInput, SnapshotError
from pilotflame.handlers.contract import Cancellation, Context, batch
from pilotflame.handlers.resolve import handler_of
from pilotflame.runtime.calls.link.connection import Link
from pilotflame.runtime.calls.link.frames import Frame, FrameKind, FrameReader, Timing
from pilotflame.runtime.calls.worker.batch_run import pack
from pilotflame.runtime.calls.worker.call import Call
from pilotflame.runtime.calls.worker.loop_runner import LoopRunner
from pilotflame.runtime.calls.worker.runner import Runner
from pilotflame.runtime.calls.worker.thread_runner import ThreadRunner

LIMIT_S = 30.0
ROOT = Path(__file__).parent


class Written:
    """A link that keeps the frames sent over it."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []

    def send_json(self, kind: int, channel: int, head: dict[str, Any]) -> None:
        self.frames.append(Frame(kind, channel, orjson.dumps(head), b""))

    def send_encoded(self, *parts: bytes) -> None:
        self.frames += FrameReader().feed(b"".join(parts))

    def answers(self) -> dict[int, Any]:
        """Return each channel's answer, or the type of its error. Fail if a channel has more than one."""
        found: dict[int, Any] = {}
        for frame in self.frames:
            if frame.kind != FrameKind.WINDOW:
                assert frame.channel not in found
                error = frame.kind == FrameKind.ERROR
                found[frame.channel] = frame.json()["type"] if error else orjson.loads(frame.payload)
        return found

    def errors(self) -> dict[int, dict[str, Any]]:
        return {frame.channel: frame.json() for frame in self.frames if frame.kind == FrameKind.ERROR}

    def timings(self) -> dict[int, Timing]:
        return {
            frame.channel: Timing.unpack(frame.head)
            for frame in self.frames
            if frame.kind == FrameKind.RESULT
        }

    def windows(self) -> list[dict[str, Any]]:
        return [frame.json() for frame in self.frames if frame.kind == FrameKind.WINDOW]


Act = Callable[[list[Call], Runner], None]


def calls_of(events: list[Any], deadlines_s: dict[int, float] | None = None) -> list[Call]:
    """Return one call for each event, on channels from 1."""
    found = []
    for channel, event in enumerate(events, start=1):
        flag, deadline_s = Cancellation(), (deadlines_s or {}).get(channel)
        context = Context("tone", "r1", invocation_id=str(channel), cancellation=flag, deadline_s=deadline_s)
        found.append(Call(channel, orjson.dumps(event), "", context, flag))
    return found


def resolved(call: Callable[..., Any]) -> Any:
    module = ModuleType("handler")
    module.handler = call  # type: ignore[attr-defined]
    return handler_of(module, "handler", "handler.py")


def on_thread(handler: Any, calls: list[Call], written: Written) -> Runner:
    ended = threading.Event()
    runner = ThreadRunner(handler, ROOT, cast("Link", written), 1, ended.set)
    submit(runner, calls)
    runner._queue.put([])
    runner.work()
    assert ended.is_set()
    return runner


async def on_loop(handler: Any, calls: list[Call], written: Written) -> Runner:
    async with asyncio.TaskGroup() as tasks:
        runner = LoopRunner(handler, ROOT, cast("Link", written), 1, lambda: None, tasks)
        submit(runner, calls)
    return runner


def submit(runner: Runner, calls: list[Call]) -> None:
    for number, call in enumerate(calls, start=1):
        runner.submit(call, len(calls) - number)


def run(
    call: Callable[..., Any],
    events: list[Any],
    *,
    loop: bool = False,
    calls: list[Call] | None = None,
    written: Written | None = None,
    **spec: Any,
) -> tuple[Written, Runner]:
    """Run these events, or `calls`, as one group with the handler, plain or async. Return the sent frames and the runner."""
    group = calls_of(events) if calls is None else calls
    kept = written or Written()

    def handler(events: list[Any], context: Context) -> Any:
        return call(events, context)

    async def handler_async(events: list[Any], context: Context) -> Any:
        await asyncio.sleep(0)
        return call(events, context)

    marked = batch(**{"max_size": 64} | spec)
    if loop:
        return kept, asyncio.run(on_loop(resolved(marked(handler_async)), group, kept))
    return kept, on_thread(resolved(marked(handler)), group, kept)


both = pytest.mark.parametrize("loop", [False, True], ids=["plain", "async"])


# -- packing

COSTS = st.lists(st.integers(1, 1000).map(float), max_size=60)
MAX_COST = st.none() | st.integers(1, 3000).map(float)


@given(COSTS, st.integers(1, 40), MAX_COST)
def test_every_item_is_in_one_pack_within_both_limits(
    costs: list[float], max_size: int, max_cost: float | None
) -> None:
    packed = pack(costs, max_size, max_cost)
    assert sorted(index for one in packed for index in one) == list(range(len(costs)))
    for one in packed:
        assert 1 <= len(one) <= max_size
        assert max_cost is None or len(one) == 1 or sum(costs[index] for index in one) <= max_cost


@given(COSTS, st.integers(1, 40), MAX_COST)
def test_what_is_split_is_sorted_and_what_fits_keeps_its_order(
    costs: list[float], max_size: int, max_cost: float | None
) -> None:
    packed = pack(costs, max_size, max_cost)
    if len(packed) == 1:
        assert packed == [list(range(len(costs)))]
    flat = [costs[index] for one in packed for index in one]
    assert len(packed) == 1 or flat == sorted(costs)


@given(COSTS, st.integers(1, 40), MAX_COST)
def test_no_pack_could_have_taken_the_next_one(
    costs: list[float], max_size: int, max_cost: float | None
) -> None:
    for one, following in pairwise(pack(costs, max_size, max_cost)):
        grown = [*one, following[0]]
        assert len(grown) > max_size or sum(costs[index] for index in grown) > (max_cost or float("inf"))


def test_similar_costs_share_a_call_and_a_large_one_is_alone() -> None:
    assert pack([9.0, 1.0, 50.0, 8.0, 2.0], 2, 20.0) == [[1, 4], [3, 0], [2]]
    assert pack([], 4) == []


# -- bisection


@both
def test_one_poisoned_item_of_32_fails_alone(loop: bool) -> None:
    sizes: list[int] = []

    def handler(events: list[int], _context: Context) -> list[int]:
        sizes.append(len(events))
        if 13 in events:
            raise ValueError("thirteen")
        return [event * 2 for event in events]

    written, _ = run(handler, list(range(32)), loop=loop)
    wanted: dict[int, Any] = {n + 1: 2 * n for n in range(32)}
    assert written.answers() == wanted | {14: "handler_failed"}
    described = written.errors()[14]
    assert "test_batch_run.py, line" in described["message"]
    assert described["details"]["exception"] == "ValueError"
    assert sizes == [32, 16, 8, 8, 4, 4, 2, 1, 1, 2, 16]
    timings = written.timings()
    assert timings[1].batch == 8
    assert timings[32].batch == 16


@settings(deadline=None)
@given(
    size=st.integers(1, 40), data=st.data(), max_size=st.integers(1, 40), loop=st.booleans(),
    max_cost=st.none() | st.integers(1, 60),
)  # fmt: skip
def test_exactly_the_bad_ones_fail(
    size: int, data: st.DataObject, max_size: int, loop: bool, max_cost: int | None
) -> None:
    costs = data.draw(st.lists(st.integers(1, 20), min_size=size, max_size=size))
    bad = data.draw(st.sets(st.integers(0, size - 1)))

    def handler(events: list[list[int]], _context: Context) -> list[int]:
        assert len(events) <= max_size
        if max_cost is not None and len(events) > 1:
            assert sum(cost for _, cost in events) <= max_cost
        if any(number in bad for number, _ in events):
            raise BadInput("a bad one")
        return [number for number, _ in events]

    spec = {"max_size": max_size, "cost": lambda event: event[1], "max_cost": max_cost}
    events = [[number, cost] for number, cost in enumerate(costs)]
    written, _ = run(handler, events, loop=loop, **spec)
    assert written.answers() == {n + 1: "bad_json" if n in bad else n for n in range(size)}
    assert {channel: timing.cost for channel, timing in written.timings().items()} == {
        n + 1: cost for n, cost in enumerate(costs) if n not in bad
    }


@both
@pytest.mark.parametrize(
    "error",
    [SystemExit(3), KeyboardInterrupt(), SnapshotError("no weights"), asyncio.CancelledError()],
    ids=repr,
)
def test_errors_that_no_item_causes_are_not_repeated(loop: bool, error: BaseException) -> None:
    calls = 0

    def handler(_events: list[int], _context: Context) -> Any:
        nonlocal calls
        calls += 1
        raise error

    written, _ = run(handler, [1, 2, 3], loop=loop)
    assert len(written.answers()) == 3
    assert calls == 1


@both
def test_a_wrong_number_of_answers_is_not_repeated(loop: bool) -> None:
    sizes: list[int] = []

    def handler(events: list[int], _context: Context) -> list[int]:
        sizes.append(len(events))
        return [1]

    written, _ = run(handler, [1, 2], loop=loop)
    assert written.answers() == {1: "output_invalid", 2: "output_invalid"}
    assert sizes == [2]


@both
def test_cancelled_and_expired_calls_are_left_out_of_the_next_try(loop: bool) -> None:
    seen: list[list[int]] = []
    calls = calls_of([1, 2, 3, 4], {2: time.monotonic() + 1000})

    def handler(events: list[int], _context: Context) -> list[int]:
        seen.append(events)
        if len(events) == 4:
            calls[0].cancellation.flag = True
            calls[1].context._deadline_s = time.monotonic() - 1
            raise ValueError
        return events

    written, _ = run(handler, [], loop=loop, calls=calls)
    assert written.answers() == {1: "cancelled", 2: "deadline_exceeded", 3: 3, 4: 4}
    assert seen == [[1, 2, 3, 4], [3, 4]]


# -- packing by cost


@both
def test_a_group_over_the_cost_is_split_and_each_part_is_answered_when_it_ends(loop: bool) -> None:
    sent: list[list[int]] = []
    written = Written()

    def handler(events: list[int], context: Context) -> list[Any]:
        sent.append(list(written.answers()))
        return [[event, [item.id for item in context.items]] for event in events]

    run(handler, [5, 1, 30, 1, 5], loop=loop, written=written, cost=float, max_cost=7)
    assert written.answers() == {
        2: [1, ["2", "4", "1"]], 4: [1, ["2", "4", "1"]], 1: [5, ["2", "4", "1"]], 5: [5, ["5"]], 3: [30, ["3"]],
    }  # fmt: skip
    assert sent == [[], [2, 4, 1], [2, 4, 1, 5]]
    assert {channel: timing.cost for channel, timing in written.timings().items()} == {
        1: 5.0, 2: 1.0, 3: 30.0, 4: 1.0, 5: 5.0,
    }  # fmt: skip
    # A WINDOW frame reports the start of each further handler call, and names its first channel.
    assert [head["call"] for head in written.windows()] == [5, 3]


@both
@pytest.mark.parametrize("nonsense", [0, -1, float("nan"), float("inf"), None, "5", True])
def test_an_invalid_cost_fails_its_event_alone(loop: bool, nonsense: Any) -> None:
    def cost(event: int) -> Any:
        return nonsense if event == 2 else 1

    written, _ = run(lambda events, _context: events, [1, 2, 3], loop=loop, cost=cost)
    assert written.answers() == {1: 1, 2: "handler_failed", 3: 3}
    assert f"cost function of @batch returned {nonsense!r}" in written.errors()[2]["message"]


@both
def test_a_cost_function_that_raises_fails_its_event_alone(loop: bool) -> None:
    written, _ = run(lambda events, _context: events, [1, 0, 3], loop=loop, cost=lambda event: 1 / event)
    assert written.answers() == {1: 1, 2: "handler_failed", 3: 3}
    assert "The cost function of @batch failed at test_batch_run.py" in written.errors()[2]["message"]


# -- memory


@both
def test_running_out_of_memory_halves_the_limit_and_answers_every_call(loop: bool) -> None:
    sizes: list[int] = []

    def handler(events: list[int], _context: Context) -> list[int]:
        sizes.append(len(events))
        if len(events) > 5:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
        return events

    written, runner = run(handler, list(range(32)), loop=loop, max_size=32)
    assert written.answers() == {n + 1: n for n in range(32)}
    assert runner.limits.limit == 4
    assert sizes == [32, 16, 8, *[4] * 8]
    assert [head["limit"] for head in written.windows() if "limit" in head] == [16, 8, 4]


class Tensor:
    """An object that only the garbage collector frees, because it is in a reference cycle, as objects of torch often are."""

    def __init__(self) -> None:
        self.itself = self


@both
def test_memory_is_released_before_the_next_try(loop: bool) -> None:
    made: list[weakref.ref[Tensor]] = []

    def handler(events: list[int], _context: Context) -> list[int]:
        if len(events) > 2:
            tensor = Tensor()
            made.append(weakref.ref(tensor))
            raise MemoryError
        return [tensor() is None for tensor in made] * len(events)

    written, _ = run(handler, [1, 2, 3, 4], loop=loop)
    assert written.answers() == dict.fromkeys((1, 2, 3, 4), True)


@both
def test_an_item_too_large_alone_gets_a_remedy(loop: bool) -> None:
    def handler(events: list[int], _context: Context) -> list[int]:
        if 3 in events:
            raise MemoryError
        return events

    written, _ = run(handler, [1, 2, 3, 4], loop=loop)
    assert written.answers() == {1: 1, 2: 2, 3: "handler_failed", 4: 4}
    assert "needs more memory" in written.errors()[3]["remedy"]


@both
def test_an_item_too_large_alone_does_not_end_batching(loop: bool) -> None:
    def handler(events: list[int], _context: Context) -> list[int]:
        if 3 in events:
            raise MemoryError
        return events

    written, runner = run(handler, list(range(8)), loop=loop, max_size=8)
    assert runner.limits.limit == 8
    assert [head["limit"] for head in written.windows() if "limit" in head] == [4, 2, 1, 8]


# -- callers that go away


@asynccontextmanager
async def running(call: Callable[..., Any], events: list[Any], **spec: Any) -> Any:
    """Submit these events to an async handler as one group. Yield its runner and the frames that it sends."""
    written = Written()
    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
        handler = resolved(batch(**{"max_size": 8} | spec)(call))
        runner = LoopRunner(handler, ROOT, cast("Link", written), 1, lambda: None, tasks)
        submit(runner, calls_of(events))
        yield runner, written


async def test_a_cancelled_call_does_not_disturb_its_batch() -> None:
    inside, gate = asyncio.Event(), asyncio.Event()

    async def handler(events: list[int], context: Context) -> list[Any]:
        inside.set()
        await gate.wait()
        return [item.cancelled for item in context.items]

    async with running(handler, [1, 2, 3]) as (runner, written):
        await inside.wait()
        runner.cancel(2)
        gate.set()
    assert written.answers() == {1: False, 2: True, 3: False}


async def test_a_fully_cancelled_batch_is_interrupted_and_the_rest_of_its_group_runs() -> None:
    inside, seen = asyncio.Event(), []

    async def handler(events: list[int], _context: Context) -> list[int]:
        if len(seen) == 0:
            seen.append(events)
            inside.set()
            await asyncio.Event().wait()
        task = asyncio.current_task()
        return [event + task.cancelling() for event in events] if task else []

    async with running(handler, [1, 1, 9], cost=float, max_cost=2) as (runner, written):
        await inside.wait()
        runner.cancel(1)
        runner.cancel(2)
    assert written.answers() == {1: "cancelled", 2: "cancelled", 3: 9}


# -- through the gateway and a real worker

HOLDS = """
import gate, os, pilotflame
failed = []
@pilotflame.batch(max_size=32)
def handler(events):
    if events == ["hold"]:
        gate.wait()
    {statement}
    return [[event, len(events), len(failed), os.getpid()] for event in events]
"""


async def together(function: Any, gate: Gate, events: list[Any]) -> list[Any]:
    """Return the responses to the events. A call occupies the worker until all events have arrived."""

    async def there() -> bool:
        status = await function.status()
        return bool(
            status["queued"] + status["in_flight"] == 1 + len(events)
        )  # in_flight, because a full group may already be at the worker

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(function.answer("hold"))
        held = await gate.next()
        calls = [tasks.create_task(function.call(event)) for event in events]
        await until(there, f"{len(events)} at {function.name}")
        held.go()
    return [call.result() for call in calls]


@pytest.mark.asyncio(loop_scope="module")
async def test_31_right_answers_and_one_typed_error(deploy: Any, gate: Gate) -> None:
    statement = "if 13 in events: raise ValueError('thirteen')"
    function = await deploy(HOLDS.format(statement=statement), {"scale.max": 1}, gate=gate)
    responses = await together(function, gate, list(range(32)))
    error = failure(responses.pop(13))
    assert (error["status"], error["type"], error["details"]["exception"]) == (
        500,
        "handler_failed",
        "ValueError",
    )
    answers = [response.json() for response in responses]
    assert [event for event, *_ in answers] == [number for number in range(32) if number != 13]
    assert max(size for _, size, *_ in answers) == 16
    assert len({pid for *_, pid in answers}) == 1


@pytest.mark.asyncio(loop_scope="module")
async def test_a_worker_whose_memory_ran_out_is_given_less(deploy: Any, gate: Gate) -> None:
    statement = "if len(events) > 8: failed.append(1); raise MemoryError"
    function = await deploy(HOLDS.format(statement=statement), {"scale.max": 1}, gate=gate)
    for _ in range(2):  # in the second round, no call fails, because the limit is known
        answers = [response.json() for response in await together(function, gate, list(range(32)))]
        assert [event for event, *_ in answers] == list(range(32))
        assert {(size, failures) for _, size, failures, _ in answers} == {(8, 2)}
        assert len({pid for *_, pid in answers}) == 1


@pytest.mark.asyncio(loop_scope="module")
async def test_after_an_item_too_large_alone_the_others_run_together(deploy: Any, gate: Gate) -> None:
    statement = "if 'bad' in events: raise MemoryError"
    function = await deploy(HOLDS.format(statement=statement), {"scale.max": 1}, gate=gate)
    responses = await together(function, gate, [*range(31), "bad"])
    assert failure(responses.pop())["type"] == "handler_failed"
    answers = [response.json() for response in await together(function, gate, list(range(32)))]
    assert {size for _, size, *_ in answers} == {32}


@pytest.mark.asyncio(loop_scope="module")
async def test_a_disconnected_caller_does_not_disturb_its_async_batch(deploy: Any, gate: Gate) -> None:
    source = """
import asyncio, gate, pilotflame
@pilotflame.batch(max_size=8)
async def handler(events, context):
    await gate.wait_async(str(len(events)))
    while len(events) > 1 and not any(item.cancelled for item in context.items):
        await asyncio.sleep(0.001)
    return [[event, item.cancelled] for event, item in zip(events, context.items)]
"""
    function = await deploy(source, {"scale.max": 1}, gate=gate)
    async with asyncio.TaskGroup() as tasks:
        hold = tasks.create_task(function.answer("hold"))
        held = await gate.next("1")
        calls = [tasks.create_task(function.answer(event)) for event in range(3)]
        await function.settled(ready=1, in_flight=1, queued=3)
        held.go()
        running = await gate.next("3")
        calls[1].cancel()
        running.go()
    assert hold.result() == ["hold", False]
    assert [calls[number].result() for number in (0, 2)] == [[0, False], [2, False]]
    assert await function.pids("worker") == [running.pid]
