"""An invocation ends once; its stream passes pieces on and grants credit."""

import asyncio
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.errors import BadInput, HandlerFailed, LinkError, WorkerDied
from pilotflame.handlers.caller import NORMAL, CallOrigin
from pilotflame.runtime.calls.link.stream_credit import STREAM_BYTES, STREAM_CHUNKS
from pilotflame.runtime.calls.serving.invocation import Invocation, Output, Stream
from pilotflame.runtime.ground.telemetry.timeline import Activation

LIMIT_S = 30.0
OUTPUT = Output(b"1", "application/json")


def make(**more: Any) -> Invocation:
    return Invocation("i1", b"{}", **({"now_s": 10.0, "deadline_s": 15.0, "hold_until_s": 12.0} | more))


ENDS = {
    "output": lambda invocation: invocation.end(OUTPUT),
    "error": lambda invocation: invocation.end(HandlerFailed("no")),
    "caller gone": lambda invocation: invocation.end(None),
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
        if ends[0] == "output":
            assert await invocation.output == OUTPUT
        elif ends[0] == "error":
            with pytest.raises(HandlerFailed):
                await invocation.output
        else:
            assert invocation.output.cancelled()

    asyncio.run(run())


async def test_what_the_handler_reads_beside_the_input_is_json_from_the_beginning() -> None:
    """Refuse such a value when the invocation is made. Otherwise its dispatch would fail, and end the link of a worker."""
    deep: Any = []
    for _ in range(300):
        deep = [deep]
    for value in (deep, "\udcff", {"a": "\udcff"}):
        with pytest.raises(BadInput, match="cannot be passed"):
            make(extra={"value": value})
    head = orjson.dumps(make(extra={"value": 10**30}).head(10.0))
    assert b'"extra":{"value":1000000000000000000000000000000}' in head


async def test_the_end_is_reported_unless_it_was_abandoned() -> None:
    reported: list[str] = []
    for name, end in ENDS.items():
        end(make(on_end=lambda name=name: reported.append(name)))
    assert reported == ["output", "error"]


async def test_a_stored_one_has_its_execution_time_when_sent_and_its_hold_time_when_requeued() -> None:
    invocation = make(execution_s=30.0)
    invocation.mark_sent("w1", 4, 11.0, Activation(1.0))
    assert (invocation.deadline_s, invocation.worker) == (41.0, "w1")
    invocation.mark_requeued()
    assert (invocation.deadline_s, invocation.worker) == (12.0, "")


async def test_only_an_invocation_that_waited_for_an_activation_is_cold() -> None:
    for ready_s, expected in ((11.0, True), (9.0, False)):
        invocation = make()
        invocation.mark_sent("w1", 1, 11.5, Activation(8.0, 8.5, ready_s))
        assert invocation.timeline.cold is expected


async def test_a_batch_that_killed_its_worker_runs_again_one_by_one() -> None:
    invocation = make()
    invocation.mark_sent("w1", 4, 11.0, Activation(1.0))
    invocation.mark_repeated()
    assert (invocation.attempt, invocation.max_batch) == (2, 1)


async def test_an_end_after_the_caller_stopped_waiting_is_ignored() -> None:
    """When a caller goes away, aiohttp cancels the task that awaits the answer, and so cancels `output`."""
    for end in ENDS.values():
        invocation = make()
        invocation.output.cancel()
        end(invocation)
        assert invocation.ended


async def test_a_failure_that_is_not_retrieved_leaves_no_warning() -> None:
    invocation = make()
    invocation.end(WorkerDied("gone"))
    # Warnings are errors here: "exception was never retrieved" would fail the test.
    del invocation


async def test_the_head_that_the_worker_gets() -> None:
    assert make().head(11.0) == {"id": "i1", "remaining_s": 4.0}
    invocation = make(content_type="text/plain", traceparent="00-a-b-01")
    invocation.mark_repeated()
    assert invocation.head(10.0) == {
        "id": "i1",
        "remaining_s": 5.0,
        "attempt": 2,
        "type": "text/plain",
        "traceparent": "00-a-b-01",
    }


async def test_a_worker_learns_which_calls_have_the_same_tenant_and_not_who_it_is() -> None:
    first, second, other = (
        make(tenant=name).head(10.0)["origin"] for name in ("0a1b2c3d4e5f", "0a1b2c3d4e5f", "b")
    )
    assert first == second != other
    assert "0a1b" not in first[0]
    assert CallOrigin(*first).priority == NORMAL
    assert make(priority=1).head(10.0)["origin"] == ("", 1)


async def test_the_worker_gets_the_span_of_an_observer() -> None:
    invocation = make(traceparent="00-a-b-01", tracestate="shop=1")
    assert invocation.head(10.0)["traceparent"] == "00-a-b-01"
    invocation.mark_traced("00-a-c-01")
    head = invocation.head(10.0)
    assert (head["traceparent"], head["tracestate"], invocation.traceparent) == (
        "00-a-c-01",
        "shop=1",
        "00-a-b-01",
    )


async def test_it_takes_no_stray_attributes() -> None:
    with pytest.raises(AttributeError):
        make().ouptut = 1  # type: ignore[attr-defined]


@given(st.lists(st.binary(), max_size=20), st.integers(0, 20))
def test_pieces_arrive_in_order_and_are_granted_when_consumed(pieces: list[bytes], before: int) -> None:
    async def run() -> None:
        stream, granted = Stream(), list[int]()
        stream.connect(granted.append)
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
                stream.consumed(len(some))
        assert got == pieces
        assert sum(granted) == len(pieces)
        assert await stream.take() == []

    asyncio.run(run())


@pytest.mark.parametrize(
    ("size", "count"), [(1, STREAM_CHUNKS), (STREAM_BYTES // 4, 4), (10 * STREAM_BYTES, 1)]
)
async def test_a_worker_that_sends_more_than_the_reader_has_room_for_breaks_the_protocol(
    size: int, count: int
) -> None:
    stream = Stream()
    for _ in range(count):
        stream.put(b"x" * size)
    with pytest.raises(LinkError, match="than it may"):
        stream.put(b"x")
    assert len(await stream.take()) == count
    stream.consumed(count)
    stream.put(b"x")


async def test_a_cancelled_take_loses_nothing() -> None:
    stream = Stream()
    waiting = asyncio.ensure_future(stream.take())
    await asyncio.sleep(0)
    waiting.cancel()
    stream.put(b"a")
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await asyncio.wait_for(stream.take(), LIMIT_S) == [b"a"]
