"""The invocation: ends once, whoever is first; its stream hands pieces over and grants credit."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.errors import HandlerFailed, WorkerDied
from pilotflame.runtime.serving.invocation import Answer, Invocation, Stream

LIMIT_S = 30.0
ANSWER = Answer(b"1", "application/json")


def make(**more: Any) -> Invocation:
    return Invocation("i1", b"{}", **({"now_s": 10.0, "deadline_s": 15.0, "hold_until_s": 12.0} | more))


ENDS = {
    "resolve": lambda invocation: invocation.resolve(ANSWER),
    "fail": lambda invocation: invocation.fail(HandlerFailed("no")),
    "abandon": lambda invocation: invocation.abandon(),
}


@given(st.lists(st.sampled_from(sorted(ENDS)), min_size=1, max_size=6))
def test_the_first_end_wins(ends: list[str]) -> None:
    async def run() -> None:
        invocation = make(streaming=True)
        assert not invocation.ended
        for end in ends:
            ENDS[end](invocation)
            assert invocation.ended
        assert invocation.stream is not None
        assert await invocation.stream.take() == []
        if ends[0] == "resolve":
            assert await invocation.answer == ANSWER
        elif ends[0] == "fail":
            with pytest.raises(HandlerFailed):
                await invocation.answer
        else:
            assert invocation.answer.cancelled()

    asyncio.run(run())


async def test_an_end_cancels_the_timer() -> None:
    fired: list[int] = []
    invocation = make()
    invocation.timer = asyncio.get_running_loop().call_later(0, fired.append, 1)
    invocation.resolve(ANSWER)
    for _ in range(5):
        await asyncio.sleep(0)
    assert fired == []
    assert invocation.timer is None


async def test_a_caller_that_stops_waiting_is_no_obstacle() -> None:
    """aiohttp cancels the task that awaits the answer when its caller goes away."""
    for end in ENDS.values():
        invocation = make()
        invocation.answer.cancel()
        end(invocation)
        assert invocation.ended


async def test_a_failure_nobody_fetches_leaves_no_warning() -> None:
    invocation = make()
    invocation.fail(WorkerDied("gone"))
    del invocation  # warnings are errors here: "exception was never retrieved" would fail the test


async def test_what_the_worker_is_told() -> None:
    assert make().head(11.0) == {"id": "i1", "remaining_s": 4.0}
    invocation = make(content_type="text/plain", traceparent="00-a-b-01")
    invocation.attempt = 2
    assert invocation.head(10.0) == {
        "id": "i1",
        "remaining_s": 5.0,
        "attempt": 2,
        "type": "text/plain",
        "traceparent": "00-a-b-01",
    }


async def test_it_takes_no_stray_attributes() -> None:
    with pytest.raises(AttributeError):
        make().anwser = 1  # type: ignore[attr-defined]


@given(st.lists(st.binary(), max_size=20), st.integers(0, 20))
def test_pieces_come_in_order_and_are_granted_when_passed(pieces: list[bytes], before: int) -> None:
    async def run() -> None:
        stream, granted = Stream(), list[int]()
        stream.on_taken = granted.append
        for piece in pieces[:before]:
            stream.put(piece)

        async def put() -> None:
            for piece in pieces[before:]:
                stream.put(piece)
                await asyncio.sleep(0)
            stream.close()

        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(put())
            got = []
            while some := await stream.take():
                got += some
                stream.passed(len(some))
        assert got == pieces
        assert sum(granted) == len(pieces)
        assert await stream.take() == []

    asyncio.run(run())


async def test_a_cancelled_get_loses_nothing() -> None:
    stream = Stream()
    waiting = asyncio.ensure_future(stream.take())
    await asyncio.sleep(0)
    waiting.cancel()
    stream.put(b"a")
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await asyncio.wait_for(stream.take(), LIMIT_S) == [b"a"]
