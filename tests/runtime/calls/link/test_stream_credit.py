"""Stream credit: the limits in chunks and bytes hold, and waiting senders wake."""

from __future__ import annotations

import asyncio
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from live import LIMIT_S
from pilotflame.runtime.calls.link.stream_credit import PIECE_BYTES, Credit, ReadPieces


def test_chunks_are_spent_and_granted() -> None:
    credit = Credit(2)
    assert credit.spend(1, 0)
    assert credit.spend(1, 0)
    assert not credit.spend(1, 0)
    credit.grant(1)
    assert credit.spend(1, None)
    assert not credit.spend(1, 0)


def test_bytes_are_limited_and_a_large_chunk_goes_alone() -> None:
    credit = Credit(100, 10)
    assert credit.spend(6, 0)
    assert not credit.spend(5, 0)
    assert credit.spend(4, 0)
    credit.grant(2)
    assert credit.spend(1000, 0)
    assert not credit.spend(0, 0)
    credit.grant(1)
    assert credit.spend(0, 0)


@given(st.integers(1, 4), st.integers(1, 20), st.lists(st.integers(0, 30) | st.none(), max_size=40))
def test_never_more_than_allowed_is_on_its_way(chunks: int, size: int, steps: list[int | None]) -> None:
    """In a step of None, the reader receives the oldest chunk. Another step is the size of a chunk to send."""
    credit, out = Credit(chunks, size), list[int]()
    for step in steps:
        if step is None:
            credit.grant(1)
            del out[:1]
            continue
        room = not out or (len(out) < chunks and sum(out) + step <= size)
        assert credit.spend(step, 0) is room
        if room:
            out.append(step)


@pytest.mark.parametrize("closed", [False, True])
def test_a_thread_that_waits_is_woken(closed: bool) -> None:
    credit, found = Credit(1), list[bool]()
    credit.spend(1, 0)
    thread = threading.Thread(target=lambda: found.append(credit.spend(1, LIMIT_S)))
    thread.start()
    if closed:
        credit.close()
    else:
        credit.grant(1)
    thread.join(LIMIT_S)
    assert found == [not closed]


@pytest.mark.parametrize("closed", [False, True])
async def test_a_task_that_waits_is_woken(closed: bool) -> None:
    credit = Credit(1)
    async with asyncio.timeout(LIMIT_S):
        assert await credit.spend_async(1)
        waiting = asyncio.ensure_future(credit.spend_async(1))
        await asyncio.sleep(0)
        assert not waiting.done()
        if closed:
            credit.close()
        else:
            credit.grant(1)
        assert await waiting is not closed


def test_grants_of_what_was_never_sent_do_not_count() -> None:
    credit = Credit(1)
    credit.grant(5)
    assert credit.spend(1, 0)
    assert not credit.spend(1, 0)


@given(st.lists(st.integers(0, PIECE_BYTES), max_size=300))
def test_a_sender_never_waits_for_a_report_that_does_not_come(sizes: list[int]) -> None:
    """The credit allows the next piece, even if the reader has not yet reported some of the pieces that it has read."""
    credit, read = Credit(), ReadPieces()
    for size in sizes:
        assert credit.spend(size, 0)
        if count := read.add(size):
            credit.grant(count)


def test_pieces_are_reported_in_groups() -> None:
    read = ReadPieces()
    assert [read.add(1) for _ in range(16)] == [0] * 15 + [16]
    assert [read.add(PIECE_BYTES), read.add(0)] == [1, 0]
