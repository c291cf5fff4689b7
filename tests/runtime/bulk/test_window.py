"""The window: answers in order, a bounded lead, and no answer lost at an error."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from pilotflame.errors import GatewayError, UnknownFunction
from pilotflame.runtime.bulk.inputs import InputLine
from pilotflame.runtime.bulk.journal import Journal
from pilotflame.runtime.bulk.window import AHEAD, run_in_order


@pytest.fixture
async def journal(tmp_path: Path) -> AsyncIterator[Journal]:
    found = Journal(tmp_path / "out.jsonl", function="f", digest="d", restart=False)
    yield found
    found.close()


def lines(count: int) -> list[InputLine]:
    return [InputLine(number, f"line {number}", b"%d" % number, number) for number in range(1, count + 1)]


async def test_answers_are_in_order_and_few_are_in_flight(journal: Journal) -> None:
    chance, flying, most = random.Random(3), 0, 0

    async def ask(line: InputLine) -> bytes:
        nonlocal flying, most
        flying += 1
        most = max(most, flying)
        for _ in range(chance.randrange(80)):
            await asyncio.sleep(0)
        flying -= 1
        return line.text

    written: list[int] = []
    await run_in_order(
        iter(lines(1000)), ask, journal, max_in_flight=16, written=lambda line: written.append(line.number)
    )
    assert journal.path.read_bytes().split() == [b"%d" % number for number in range(1, 1001)]
    assert most == 16
    assert written == sorted(written)
    assert written[-1] == 1000


async def test_one_slow_line_does_not_let_the_others_run_away(journal: Journal) -> None:
    go, full, farthest = asyncio.Event(), asyncio.Event(), 0

    async def ask(line: InputLine) -> bytes:
        nonlocal farthest
        if line.number == 1:
            await go.wait()
        elif not go.is_set():
            farthest = max(farthest, line.number)
            if line.number == 4 * AHEAD:
                full.set()
        return line.text

    running = run_in_order(iter(lines(500)), ask, journal, max_in_flight=4, written=lambda _: None)
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        tasks.create_task(running)
        await full.wait()
        # Whatever can run has run by then.
        for _ in range(100):
            await asyncio.sleep(0)
        assert farthest == 4 * AHEAD
        go.set()
    assert journal.done == 500


async def test_an_error_of_all_lines_stops_it_and_answers_are_kept(journal: Journal) -> None:
    async def ask(line: InputLine) -> bytes:
        if line.number == 41:
            raise UnknownFunction.named("f")
        return line.text

    with pytest.raises(UnknownFunction):
        await run_in_order(iter(lines(5000)), ask, journal, max_in_flight=1, written=lambda _: None)
    assert journal.done == 40


async def test_a_source_that_breaks_off_stops_it(journal: Journal) -> None:
    def breaking():
        yield from lines(600)
        raise GatewayError("gone")

    async def ask(line: InputLine) -> bytes:
        return line.text

    with pytest.raises(GatewayError):
        await run_in_order(breaking(), ask, journal, max_in_flight=8, written=lambda _: None)
    assert journal.done <= 600
