"""The runners over a real socket pair: the test is the gateway and reads the frames they write."""

import asyncio
import socket
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import RawTestServer
from pilotflame import AsyncClient, Client, PilotflameError
from pilotflame.errors import BadInput, EngineStopped, Overloaded, SnapshotChanged
from pilotflame.handlers.caller import NO_ORIGIN, NORMAL, CallOrigin, origin
from pilotflame.handlers.contract import Cancellation, Context, batch
from pilotflame.handlers.handler import HandlerKind
from pilotflame.handlers.resolve import handler_of
from pilotflame.runtime.calls.batching.prefetch import window
from pilotflame.runtime.calls.link.connection import Link
from pilotflame.runtime.calls.link.frames import TIMING, Frame, FrameKind, FrameReader, Timing
from pilotflame.runtime.calls.link.stream_credit import Credit
from pilotflame.runtime.calls.worker.call import Call
from pilotflame.runtime.calls.worker.loop_runner import LoopRunner
from pilotflame.runtime.calls.worker.runner import Runner
from pilotflame.runtime.calls.worker.thread_runner import ThreadRunner
from pydantic import BaseModel, field_validator

LIMIT_S = 30.0


class Rig:
    """A runner of one handler, and the gateway's end of its link."""

    def __init__(
        self, call: Callable[..., Any], tasks: asyncio.TaskGroup, concurrency: int, start: bool
    ) -> None:
        module = ModuleType("handler")
        module.handler = call  # type: ignore[attr-defined]
        self.handler = handler_of(module, "handler", "handler.py")
        self.loop = asyncio.get_running_loop()
        self.gateway, sock = socket.socketpair()
        self.gateway.setblocking(False)
        self.link = Link(sock)
        self.link.bind(lambda _frame: None, lambda: None)
        self.idle = asyncio.Event()
        self.idle_count = 0
        self.threads: list[threading.Thread] = []
        self.calls: dict[int, Call] = {}
        self._reader = FrameReader()
        self._frames: list[Frame] = []
        self.runner = self._make(tasks, concurrency)
        if start:
            self.start()

    def _make(self, tasks: asyncio.TaskGroup, concurrency: int) -> Runner:
        root = Path(__file__).parent
        if self.handler.kind.on_loop:
            return LoopRunner(self.handler, root, self.link, concurrency, self._on_idle, tasks)
        runner = ThreadRunner(self.handler, root, self.link, concurrency, self._on_idle_thread)
        self.threads = [threading.Thread(target=runner.work) for _ in range(concurrency)]
        return runner

    def start(self) -> None:
        for thread in self.threads:
            thread.start()

    def _on_idle_thread(self) -> None:
        self.loop.call_soon_threadsafe(self._on_idle)

    def _on_idle(self) -> None:
        self.idle_count += 1
        self.idle.set()

    def submit(
        self,
        channel: int,
        event: Any = None,
        *,
        credit: int | None = None,
        deadline_s: float | None = None,
        more: int = 0,
        of: CallOrigin = NO_ORIGIN,
    ) -> None:
        cancellation = Cancellation()
        context = Context(
            "tone",
            "r1",
            invocation_id=f"i{channel}",
            cancellation=cancellation,
            deadline_s=deadline_s,
            state="s",
        )
        found = Credit() if credit is None else Credit(credit)
        stream_credit = found if self.handler.kind.streaming else None
        call = Call(channel, orjson.dumps(event), "", context, cancellation, credit=stream_credit, origin=of)
        self.calls[channel] = call
        self.runner.submit(call, more)

    def group(self, *events: Any, first: int = 1) -> None:
        """Submit the events as one group, on channels from `first`."""
        for number, event in enumerate(events):
            self.submit(first + number, event, more=len(events) - 1 - number)

    async def frame(self) -> Frame:
        async with asyncio.timeout(LIMIT_S):
            while not self._frames:
                data = await self.loop.sock_recv(self.gateway, 1 << 16)
                assert data, "the link was closed"
                self._frames = self._reader.feed(data)
            frame = self._frames.pop(0)
            return await self.frame() if frame.kind == FrameKind.WINDOW else frame

    async def expect(self, *kinds: FrameKind) -> list[Frame]:
        frames = [await self.frame() for _ in kinds]
        assert [FrameKind(frame.kind).name for frame in frames] == [kind.name for kind in kinds]
        return frames

    async def answer(self) -> tuple[int, Any]:
        """Return the channel and the answer of a RESULT, or the channel and the error's type of an ERROR."""
        frame = await self.frame()
        assert frame.kind in (FrameKind.RESULT, FrameKind.ERROR), FrameKind(frame.kind).name
        return frame.channel, frame.json()["type"] if frame.kind == FrameKind.ERROR else orjson.loads(
            frame.payload
        )

    async def ask(self, channel: int, event: Any = None, *, of: CallOrigin = NO_ORIGIN) -> Any:
        """Submit an event, and return its answer."""
        self.submit(channel, event, of=of)
        answered, answer = await self.answer()
        assert answered == channel
        return answer

    def peek(self) -> list[int]:
        """Return the kinds of the frames that the gateway's end could read now. Any thread may call it."""
        try:
            data = self.gateway.recv(1 << 16, socket.MSG_PEEK)
        except BlockingIOError:
            return []
        return [frame.kind for frame in FrameReader().feed(data)]

    async def end(self) -> None:
        if not self.idle.is_set():
            self.runner.close()
            async with asyncio.timeout(LIMIT_S):
                await self.idle.wait()
        for thread in self.threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive()
        self.link.close()
        self.gateway.close()
        assert self.idle_count == 1


MakeRig = Callable[..., Rig]


@pytest.fixture
async def rig() -> AsyncIterator[MakeRig]:
    rigs: list[Rig] = []
    async with asyncio.TaskGroup() as tasks:

        def make(call: Callable[..., Any], concurrency: int = 1, *, start: bool = True) -> Rig:
            rigs.append(Rig(call, tasks, concurrency, start))
            return rigs[-1]

        yield make
        for made in rigs:
            await made.end()


def sync(call: Callable[..., Any]) -> Callable[..., Any]:
    return call


def on_loop(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same handler as an async function."""
    marks = {name: value for name, value in vars(call).items() if name != "__wrapped__"}
    hints = call.__annotations__

    if call.__code__.co_argcount == 2:

        async def handler2(event: Any, context: Context) -> Any:
            return call(event, context)

        handler2.__annotations__ = hints
        vars(handler2).update(marks)
        return handler2

    async def handler(event: Any) -> Any:
        return call(event)

    handler.__annotations__ = {**hints, "event": next((hints[key] for key in hints if key != "return"), Any)}
    vars(handler).update(marks)
    return handler


both = pytest.mark.parametrize("kind", [sync, on_loop], ids=["plain", "async"])


# -- one invocation


@both
async def test_an_answer_carries_its_timing(rig: MakeRig, kind: Any) -> None:
    made = rig(kind(lambda event: {"got": event}))
    assert made.handler.kind is (HandlerKind.PLAIN if kind is sync else HandlerKind.ASYNC)
    made.submit(7, [1])
    (result,) = await made.expect(FrameKind.RESULT)
    assert (result.channel, result.payload) == (7, b'{"got":[1]}')
    timing = Timing.unpack(result.head)
    assert timing.batch == 1
    assert timing.wait_s >= 0
    assert timing.exec_s >= 0


@both
async def test_bytes_are_answered_with_their_type(rig: MakeRig, kind: Any) -> None:
    made = rig(kind(lambda _event: b"\xff\x00"))
    made.submit(1)
    (result,) = await made.expect(FrameKind.RESULT)
    assert result.payload == b"\xff\x00"
    assert result.head[TIMING.size :] == b"application/octet-stream"


@both
async def test_what_finished_is_sent_before_the_next_one_starts(rig: MakeRig, kind: Any) -> None:
    """So, if this worker dies, the gateway knows that only the oldest open invocations had started."""
    seen: list[list[int]] = []
    ran = asyncio.Event()

    def handler(event: int) -> None:
        seen.append(made.peek())
        if event == 3:
            made.loop.call_soon_threadsafe(ran.set)

    made = rig(kind(handler), start=False)
    batched(made, 1, 2, 3)  # the handler takes no lists, so it is called three times
    await asyncio.wait_for(ran.wait(), LIMIT_S)
    await made.expect(*[FrameKind.RESULT] * 3)
    assert [[kind for kind in kinds if kind != FrameKind.WINDOW] for kinds in seen] == [
        [],
        [FrameKind.RESULT],
        [FrameKind.RESULT] * 2,
    ]


@both
async def test_the_context_is_the_calls(rig: MakeRig, kind: Any) -> None:
    def handler(event: Any, context: Context) -> Any:
        return [context.id, context.state, context.function, context.remaining_ms()]

    assert await rig(kind(handler)).ask(5) == ["i5", "s", "tone", None]


@both
async def test_a_handler_works_for_the_origin_of_its_call(rig: MakeRig, kind: Any) -> None:
    def handler(_event: Any) -> Any:
        return list(origin.get())

    made = rig(kind(handler))
    assert await made.ask(5, of=CallOrigin("a1", 1)) == ["a1", 1]
    assert await made.ask(5) == ["", NORMAL]


class Odd(BaseException):
    """A BaseException that is no Exception and not raised by Python."""


def failing(error: BaseException) -> Callable[[Any], Any]:
    def handler(event: Any) -> Any:
        if event == "fail":
            raise error
        return event

    return handler


@both
@pytest.mark.parametrize(
    "error",
    [
        ValueError("no"),
        SystemExit(3),
        KeyboardInterrupt(),
        StopIteration(),
        asyncio.CancelledError(),
        RecursionError(),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_what_the_handler_raises_goes_to_its_caller_and_the_next_one_runs(
    rig: MakeRig, kind: Any, error: BaseException
) -> None:
    made = rig(kind(failing(error)))
    made.submit(1, "fail")
    (frame,) = await made.expect(FrameKind.ERROR)
    described = frame.json()
    assert (frame.channel, described["type"]) == (1, "handler_failed")
    if kind is sync:
        assert described["details"]["exception"] == type(error).__name__
        assert "test_runner.py, line " in described["message"]
    assert await made.ask(2, "fine") == "fine"


def calls_another(url: str, kept: bool) -> Callable[..., Any]:
    def handler(_event: Any) -> Any:
        with Client(url, retry_s=0.0) as client:
            for found in client.function("other").map([1], return_exceptions=kept):
                raise found

    return handler


def calls_another_on_loop(url: str, kept: bool) -> Callable[..., Any]:
    async def handler(_event: Any) -> Any:
        async with AsyncClient(url, retry_s=0.0) as client:
            async for found in client.function("other").map([1], return_exceptions=kept):
                raise found

    return handler


@pytest.mark.parametrize("kept", [False, True], ids=["raised", "yielded"])
@pytest.mark.parametrize("error", [Overloaded, BadInput, SnapshotChanged, EngineStopped])
@pytest.mark.parametrize("made_for", [calls_another, calls_another_on_loop])
async def test_an_error_of_a_call_of_another_function_is_a_failure_of_the_handler(
    rig: MakeRig,
    made_for: Callable[[str, bool], Callable[..., Any]],
    error: type[PilotflameError],
    kept: bool,
) -> None:
    body = orjson.dumps({"error": error("Nested.", details={"retry_after_s": 9.0}).to_wire()})

    async def answer(_request: web.BaseRequest) -> web.Response:
        return web.Response(status=503, body=body)

    async with RawTestServer(answer) as server:
        made = rig(made_for(str(server.make_url("/")), kept))
        made.submit(1)
        (frame,) = await made.expect(FrameKind.ERROR)
    described = frame.json()
    assert described["type"] == "handler_failed"
    assert described["details"]["exception"] == error.code
    assert "test_runner.py, line " in described["message"]
    assert not made.runner.answers.suspicious


async def test_a_base_exception_does_not_end_the_handlers_thread(rig: MakeRig) -> None:
    made = rig(failing(Odd()))
    assert await made.ask(1, "fail") == "handler_failed"
    assert await made.ask(2, "fine") == "fine"


class Picky(BaseModel):
    n: int

    @field_validator("n")
    @classmethod
    def known(cls, n: int) -> int:
        return {1: 1}[n]  # pydantic does not handle the KeyError of other numbers


@both
async def test_input_that_does_not_fit_never_reaches_the_handler(rig: MakeRig, kind: Any) -> None:
    seen: list[Any] = []

    def handler(event: Picky) -> Any:
        seen.append(event.n)
        return event.n

    made = rig(kind(handler))
    assert await made.ask(1, {"n": "x"}) == "input_invalid"
    assert await made.ask(2, {"n": 5}) == "handler_failed"  # the validator fails
    assert await made.ask(3, {"n": 1}) == 1
    assert seen == [1]


@both
async def test_output_that_is_not_json_is_an_error_and_the_next_one_runs(rig: MakeRig, kind: Any) -> None:
    made = rig(kind(lambda event: object() if event else 1))
    assert await made.ask(1, True) == "output_invalid"
    assert await made.ask(2, False) == 1


# -- batches


def doubled(events: list[Any]) -> Any:
    return [event * 2 for event in events]


@both
async def test_a_group_is_one_call_and_the_next_one_another(rig: MakeRig, kind: Any) -> None:
    made = rig(kind(batch(max_size=3)(doubled)), start=False)
    made.group(1, 2, 3)
    made.group(4, 5, first=4)
    made.start()
    frames = await made.expect(*[FrameKind.RESULT] * 5)
    assert [(frame.channel, orjson.loads(frame.payload)) for frame in frames] == [
        (n, 2 * n) for n in range(1, 6)
    ]
    assert [Timing.unpack(frame.head).batch for frame in frames] == [3, 3, 3, 2, 2]


async def test_a_group_waits_for_all_of_it(rig: MakeRig) -> None:
    made = rig(batch(max_size=3)(doubled))
    made.submit(1, 1, more=1)
    assert made.runner.close() == [made.calls[1]]


@both
async def test_a_call_cancelled_before_its_group_is_complete_is_left_out(rig: MakeRig, kind: Any) -> None:
    made = rig(kind(batch(max_size=3)(doubled)))
    made.submit(1, 1, more=2)
    made.runner.cancel(1)
    made.submit(2, 2, more=1)
    made.submit(3, 3)
    assert [await made.answer() for _ in range(3)] == [(1, "cancelled"), (2, 4), (3, 6)]


async def test_a_handler_that_takes_no_lists_runs_each_call_by_itself(rig: MakeRig) -> None:
    made = rig(lambda event: event)
    made.submit(1, 1, more=1)
    assert await made.answer() == (1, 1)


def batched(made: Rig, *events: Any) -> None:
    """Submit the events as one group, and start the runner."""
    made.group(*events)
    made.start()


async def test_an_exception_as_an_answer_fails_its_own_event_alone(rig: MakeRig) -> None:
    @batch(max_size=4)
    def handler(events: list[int]) -> Any:
        return [ValueError("two") if event == 2 else event for event in events]

    made = rig(handler, start=False)
    batched(made, 1, 2, 3)
    _, failed, _ = frames = await made.expect(FrameKind.RESULT, FrameKind.ERROR, FrameKind.RESULT)
    assert [frame.channel for frame in frames] == [1, 2, 3]
    assert "ValueError: two" in failed.json()["message"]


async def test_one_answer_that_is_not_json_fails_alone(rig: MakeRig) -> None:
    @batch(max_size=4)
    def handler(events: list[int]) -> Any:
        return [object() if event == 2 else event for event in events]

    made = rig(handler, start=False)
    batched(made, 1, 2, 3)
    assert [await made.answer() for _ in range(3)] == [(1, 1), (2, "output_invalid"), (3, 3)]


async def test_bad_input_is_left_out_of_the_batch(rig: MakeRig) -> None:
    @batch(max_size=4)
    def handler(events: list[int]) -> list[int]:
        return [len(events)] * len(events)

    made = rig(handler, start=False)
    batched(made, 1, "x", 3)
    assert [await made.answer() for _ in range(3)] == [(2, "input_invalid"), (1, 2), (3, 2)]


@pytest.mark.parametrize(
    ("answer", "expected"), [([1], "1 answers"), ([1, 2, 3], "3 answers"), (None, "NoneType"), (5, "int"), ("ab", "str"), ({1: 1, 2: 2}, "dict")]
)  # fmt: skip
async def test_a_wrong_number_of_answers_fails_all_and_says_both(
    rig: MakeRig, answer: Any, expected: str
) -> None:
    made = rig(batch(max_size=4)(lambda events: answer), start=False)
    batched(made, 1, 2)
    for frame in await made.expect(FrameKind.ERROR, FrameKind.ERROR):
        assert frame.json()["type"] == "output_invalid"
        assert f"was given 2 events and returned {expected}" in frame.json()["message"]


@pytest.mark.parametrize("answer", [(1, 2), np.array([1, 2]), deque([1, 2])], ids=["tuple", "array", "deque"])
async def test_other_sequences_of_answers_are_taken(rig: MakeRig, answer: Any) -> None:
    made = rig(batch(max_size=4)(lambda events: answer), start=False)
    batched(made, 1, 2)
    assert [await made.answer() for _ in range(2)] == [(1, 1), (2, 2)]


async def test_a_batch_handlers_context_has_one_item_for_each_event(rig: MakeRig) -> None:
    def handler(events: list[int], context: Context) -> list[Any]:
        return [[item.id for item in context.items]] * len(events)

    made = rig(batch(max_size=4)(handler), start=False)
    batched(made, 1, 2)
    assert await made.answer() == (1, ["i1", "i2"])
    assert await made.answer() == (2, ["i1", "i2"])


# -- concurrency


async def test_threads_run_side_by_side(rig: MakeRig) -> None:
    barrier = threading.Barrier(2)
    made = rig(lambda _event: barrier.wait(LIMIT_S) >= 0, concurrency=2)
    made.submit(1)
    made.submit(2)
    await made.expect(FrameKind.RESULT, FrameKind.RESULT)


@pytest.mark.parametrize("kind", ["plain", "async"])
async def test_64_run_at_the_same_time_where_64_may(rig: MakeRig, kind: str) -> None:
    """No layer between the setting and the handler has a smaller limit."""
    barrier, async_barrier = threading.Barrier(64), asyncio.Barrier(64)

    def plain(_event: Any) -> bool:
        return barrier.wait(LIMIT_S) >= 0

    async def on_loop(_event: Any) -> bool:
        return await async_barrier.wait() >= 0

    made = rig(plain if kind == "plain" else on_loop, concurrency=64)
    for channel in range(64):
        made.submit(channel)
    assert sorted([await made.answer() for _ in range(64)]) == [(channel, True) for channel in range(64)]


async def test_tasks_run_side_by_side_up_to_the_concurrency(rig: MakeRig) -> None:
    barrier = asyncio.Barrier(2)
    running, most = 0, 0

    async def handler(event: Any) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await barrier.wait()
        running -= 1

    made = rig(handler, concurrency=2)
    for channel in range(1, 5):
        made.submit(channel)
    await made.expect(*[FrameKind.RESULT] * 4)
    assert most == 2


# -- cancel


@both
async def test_cancelled_while_queued_it_never_runs(rig: MakeRig, kind: Any) -> None:
    seen: list[int] = []
    inside = asyncio.Event()
    if kind is sync:
        gate = threading.Event()

        def handler(event: int) -> int:
            seen.append(event)
            made.loop.call_soon_threadsafe(inside.set)
            gate.wait(LIMIT_S)
            return event
    else:
        gate = asyncio.Event()  # type: ignore[assignment]

        async def handler(event: int) -> int:  # type: ignore[misc]
            seen.append(event)
            inside.set()
            await gate.wait()  # type: ignore[misc]
            return event

    made = rig(handler)
    for channel in (1, 2, 3):
        made.submit(channel, channel)
    await asyncio.wait_for(inside.wait(), LIMIT_S)
    made.runner.cancel(2)
    gate.set()
    assert dict([await made.answer() for _ in range(3)]) == {1: 1, 2: "cancelled", 3: 3}
    assert seen == [1, 3]


async def test_a_cancelled_task_is_interrupted_and_may_clean_up(rig: MakeRig) -> None:
    cleaned: list[bool] = []
    inside = asyncio.Event()

    async def handler(event: str, context: Context) -> str:
        inside.set()
        try:
            if event == "wait":
                await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append(context.cancelled)
        return event

    made = rig(handler)
    made.submit(1, "wait")
    made.submit(2, "next")
    await asyncio.wait_for(inside.wait(), LIMIT_S)
    made.runner.cancel(1)
    assert await made.answer() == (1, "cancelled")
    assert await made.answer() == (2, "next")
    assert cleaned == [True, False]


async def test_a_task_that_ignores_its_cancellation_still_answers(rig: MakeRig) -> None:
    inside = asyncio.Event()

    async def handler(event: Any) -> str:
        inside.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "on my way"
        return "never"

    made = rig(handler)
    made.submit(1)
    await asyncio.wait_for(inside.wait(), LIMIT_S)
    made.runner.cancel(1)
    assert await made.answer() == (1, "on my way")


async def test_a_running_plain_handler_sees_its_cancellation(rig: MakeRig) -> None:
    gate, inside = threading.Event(), threading.Event()

    def handler(event: Any, context: Context) -> bool:
        inside.set()
        gate.wait(LIMIT_S)
        return context.cancelled

    made = rig(handler)
    made.submit(1)
    await asyncio.to_thread(inside.wait, LIMIT_S)
    made.runner.cancel(1)
    gate.set()
    assert await made.answer() == (1, True)


async def test_cancelling_what_is_not_there_does_nothing(rig: MakeRig) -> None:
    made = rig(lambda event: event)
    made.runner.cancel(99)
    made.runner.grant(99, 5)
    assert await made.ask(1, 1) == 1
    made.runner.cancel(1)


# -- streams


def counting(produced: list[int], ended: list[str]) -> dict[str, Callable[..., Any]]:
    def plain(event: int) -> Iterator[int]:
        try:
            for number in range(event):
                produced.append(number)
                yield number
        finally:
            ended.append("closed")

    async def loop(event: int) -> AsyncIterator[int]:
        try:
            for number in range(event):
                produced.append(number)
                yield number
        finally:
            ended.append("closed")

    return {"generator": plain, "async_generator": loop}


streaming = pytest.mark.parametrize("kind", ["generator", "async_generator"])


@streaming
async def test_chunks_then_the_end(rig: MakeRig, kind: str) -> None:
    made = rig(counting([], [])[kind])
    made.submit(4, 3)
    *chunks, end = await made.expect(FrameKind.CHUNK, FrameKind.CHUNK, FrameKind.CHUNK, FrameKind.END)
    assert [(chunk.channel, chunk.payload) for chunk in chunks] == [(4, b"0"), (4, b"1"), (4, b"2")]
    assert end.channel == 4
    assert len(end.head) == TIMING.size


@streaming
async def test_it_stops_without_credit_and_goes_on_with_more(rig: MakeRig, kind: str) -> None:
    produced: list[int] = []
    ended: list[str] = []
    made = rig(counting(produced, ended)[kind])
    made.submit(1, 1_000_000, credit=2)
    await made.expect(FrameKind.CHUNK, FrameKind.CHUNK)
    made.runner.grant(1, 1)
    await made.expect(FrameKind.CHUNK)
    made.runner.grant(1, 2)
    await made.expect(FrameKind.CHUNK, FrameKind.CHUNK)
    made.runner.cancel(1)
    assert await made.answer() == (1, "cancelled")  # no sixth chunk comes before the answer
    assert produced in ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4])
    assert ended == ["closed"]
    made.submit(2, 1)
    await made.expect(FrameKind.CHUNK, FrameKind.END)


@streaming
async def test_a_stream_that_fails_sends_its_error_after_its_chunks(rig: MakeRig, kind: str) -> None:
    def plain(event: str) -> Iterator[Any]:
        yield 1
        if event == "raise":
            raise IndexError
        yield b"" if event == "bytes" else 2

    async def loop(event: str) -> AsyncIterator[Any]:
        for piece in plain(event):
            yield piece

    made = rig(plain if kind == "generator" else loop)
    for channel, (event, code) in enumerate(
        [("raise", "handler_failed"), ("bytes", "output_invalid")], start=1
    ):
        made.submit(channel, event)
        *_, error = await made.expect(FrameKind.CHUNK, FrameKind.ERROR)
        assert (error.channel, error.json()["type"]) == (channel, code)
    made.submit(3, "")
    await made.expect(FrameKind.CHUNK, FrameKind.CHUNK, FrameKind.END)


@streaming
async def test_a_stream_whose_cleanup_fails_does_not_stop_the_worker(rig: MakeRig, kind: str) -> None:
    def plain(event: int) -> Iterator[int]:
        try:
            yield 1
            yield 2
        finally:
            if event:
                raise ValueError("cleanup")

    async def loop(event: int) -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
        finally:
            if event:
                raise ValueError("cleanup")

    made = rig(plain if kind == "generator" else loop)
    made.submit(1, 1, credit=1)
    await made.expect(FrameKind.CHUNK)
    made.runner.cancel(1)
    channel, code = await made.answer()
    assert channel == 1
    assert code in ("handler_failed", "cancelled")
    made.submit(2, 0)
    await made.expect(FrameKind.CHUNK, FrameKind.CHUNK, FrameKind.END)


async def test_a_generator_without_a_reader_gives_up_at_its_deadline(rig: MakeRig) -> None:
    made = rig(counting([], [])["generator"])
    made.submit(1, 5, credit=1, deadline_s=time.monotonic())
    await made.expect(FrameKind.CHUNK)
    assert await made.answer() == (1, "deadline_exceeded")


# -- the end


@both
async def test_closing_returns_what_never_started_and_finishes_the_rest(rig: MakeRig, kind: Any) -> None:
    inside = asyncio.Event()
    if kind is sync:
        gate = threading.Event()

        def handler(event: int) -> int:
            made.loop.call_soon_threadsafe(inside.set)
            gate.wait(LIMIT_S)
            return event
    else:
        gate = asyncio.Event()  # type: ignore[assignment]

        async def handler(event: int) -> int:  # type: ignore[misc]
            inside.set()
            await gate.wait()  # type: ignore[misc]
            return event

    made = rig(handler)
    for channel in (1, 2, 3):
        made.submit(channel, channel)
    await asyncio.wait_for(inside.wait(), LIMIT_S)
    assert [call.channel for call in made.runner.close()] == [2, 3]
    assert not made.idle.is_set()
    gate.set()
    assert await made.answer() == (1, 1)
    async with asyncio.timeout(LIMIT_S):
        await made.idle.wait()


@both
async def test_closing_an_idle_one_reports_at_once(rig: MakeRig, kind: Any) -> None:
    made = rig(kind(lambda event: event), concurrency=2)
    assert made.runner.close() == []
    async with asyncio.timeout(LIMIT_S):
        await made.idle.wait()


async def test_threads_share_all_groups_and_run_each_once(rig: MakeRig) -> None:
    made = rig(lambda event: event, concurrency=3)
    for channel in range(600):
        made.submit(channel, channel)
    returned = [call.channel for call in made.runner.give_back()]
    returned += [call.channel for call in made.runner.close()]
    answered = [await made.answer() for _ in range(600 - len(returned))]
    assert sorted([*returned, *(channel for channel, _ in answered)]) == list(range(600))
    assert all(channel == event for channel, event in answered)


# -- the window


async def test_short_calls_are_prefetched_and_long_ones_are_not(rig: MakeRig) -> None:
    made = rig(lambda event: event, concurrency=2)
    assert made.runner.limits.window == made.runner.limits.slots == 2

    def windows(*exec_s: float) -> list[int]:
        data = b"".join(frame for seconds in exec_s for frame in made.runner.limits.learn(2, seconds))
        frames = FrameReader().feed(data)
        assert {frame.kind for frame in frames} == {FrameKind.WINDOW}
        return [frame.json()["window"] for frame in frames]

    assert windows(0.0001, 0.0001) == [window(2, 0.0001)]
    assert made.runner.limits.window > 2
    assert windows(*[1.0] * 5)[-1] == 2
    assert made.runner.limits.window == 2


async def test_the_slots_and_the_window_of_a_batch_handler_are_groups(rig: MakeRig) -> None:
    made = rig(batch(max_size=8)(doubled), concurrency=2)
    assert (made.runner.limits.slots, made.runner.limits.window, made.runner.limits.limit) == (2, 2, 8)
    assert await made.ask(1, 1) == 2
    assert made.runner.limits.window == 2  # no prefetch: the gateway forms the batches


class Recorded:
    """An observer of handler calls."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def begin(self, contexts: Sequence[Context]) -> None:
        self.calls.append([one.id for one in contexts])

    def close(self) -> None: ...


@pytest.mark.parametrize("form", [sync, on_loop])
async def test_an_observer_learns_of_each_handler_call(rig: MakeRig, form: Any) -> None:
    @form
    def plain(event: Any) -> Any:
        return event

    @form
    @batch(max_size=4)
    def batched(events: list[int]) -> list[int]:
        if 2 in events and len(events) > 1:
            raise ValueError("2")
        return events

    for handler, calls in ((plain, [["i1"], ["i2"]]), (batched, [["i1", "i2"], ["i1"], ["i2"]])):
        made, recorded = rig(handler, start=False), Recorded()
        made.runner.observers = [recorded]
        made.start()
        if handler is plain:
            made.submit(1, 1)
            made.submit(2, 2)
        else:
            made.group(1, 2)
        assert [await made.answer(), await made.answer()] == [(1, 1), (2, 2)]
        assert recorded.calls == calls
