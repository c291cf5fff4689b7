"""The turns of connections that have more bytes than one read takes."""

from __future__ import annotations

import asyncio

import pytest
from pilotflame.runtime.front.listening.reading_turns import READS, ReadingTurns


async def test_some_connections_read_on_in_each_turn_of_the_loop_in_their_order():
    turns, read = ReadingTurns(), list[int]()
    for number in range(3 * READS):
        turns.add(lambda number=number: read.append(number))
    for turn in range(1, 4):
        await asyncio.sleep(0)
        assert read == list(range(turn * READS))
    await asyncio.sleep(0)
    turns.add(lambda: turns.add(lambda: read.append(-1)))
    for _ in range(3):
        await asyncio.sleep(0)
    assert read[-1] == -1


async def test_a_connection_that_always_has_more_takes_one_turn_of_each_turn_of_the_loop():
    turns, taken = ReadingTurns(), 0

    def read_on() -> None:
        nonlocal taken
        taken += 1
        turns.add(read_on)

    turns.add(read_on)
    for _ in range(10):
        await asyncio.sleep(0)
    assert taken == 10


async def test_a_connection_that_fails_takes_no_turn_from_another(caplog: pytest.LogCaptureFixture):
    turns, read = ReadingTurns(), list[int]()

    def fail() -> None:
        raise KeyError("parser")

    for number in range(2):
        turns.add(fail)
        turns.add(lambda number=number: read.append(number))
    for _ in range(3):
        await asyncio.sleep(0)
    turns.add(lambda: read.append(2))
    await asyncio.sleep(0)
    assert read == [0, 1, 2]
    assert "failed to read on" in caplog.text


async def test_a_client_with_many_connections_delays_another_by_one_turn():
    turns, read = ReadingTurns(), list[str]()
    for number in range(100):
        turns.add(lambda number=number: read.append(f"many {number}"), "many")
    turns.add(lambda: read.append("one"), "one")
    await asyncio.sleep(0)
    assert read == ["many 0", "one", "many 1", "many 2"]
